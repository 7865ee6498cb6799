"""Forks and other ways to begin processes beside an open database."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.faults.threads import PATIENCE

PROGRAM = """
import asyncio, os, signal, sys, threading
from contextlib import ExitStack
import topicstore as ts

from topicstore_conformance.faults.threads import PATIENCE
db = ts.open(sys.argv[1])
db.store([ts.Message("a", b"1")])
writer, subscription, queue = db.writer(flush_interval=3_600), db.subscribe("#"), db.queues.open("q")
session, rules, shard = db.sessions.open("me", expiry_interval=None), db.persistence, db.storage.shards[0]
session.subscribe("#")
message = ts.Message("a", b"2")
future = writer.put(message)

def hold(locks, held, over):
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        held.set()
        over.wait()

ACCEPTING = {
    "store": lambda: db.store([message]),
    "publish": lambda: db.publish([message]),
    "put": lambda: writer.put(message),
    "flush of a writer": writer.flush,
    "fetch": subscription.fetch,
    "fetch_async": lambda: asyncio.run(subscription.fetch_async()),
    "acknowledge": lambda: subscription.acknowledge(0),
    "subscribe": lambda: db.subscribe("#"),
    "append": lambda: queue.append([message]),
    "read of a queue": queue.read,
    "another queue": lambda: db.queues.open("other"),
    "wait": db.sessions.wait,
    "deliver": db.sessions.deliver,
    "tick": db.sessions.tick,
    "another session": lambda: db.sessions.open("you"),
    "publish of a session": lambda: session.publish([ts.Message("a", b"3", "me")]),
    "deliver of a session": session.deliver,
    "puback": lambda: session.puback(1),
    "a rule": lambda: rules.add("b/#"),
    "retention": lambda: db.retention.set(max_age=1.0),
    "a run of retention": db.retention.run,
    "retention in the background": lambda: db.retention.start(1.0),
    "state": lambda: db.state(0).write([ts.StateWrite(b"k", b"v")]),
    "replay": lambda: list(db.replay("#")),
    "generation": db.add_generation,
    "compact": db.compact,
    "info": db.info,
    "refresh": db.refresh,
}
locks = [
    writer._changed, writer._storing, subscription._reading, subscription._inbox.lock, queue._lock, db.queues._lock,
    db.sessions.dispatcher.lock, rules._changing, db.retention._running, db._beginning, db.storage._registering,
    shard.lock, shard.rewriting, db.hub._lock,
]
held, over = threading.Event(), threading.Event()
thread = threading.Thread(target=hold, args=(locks, held, over))
thread.start()
assert held.wait(PATIENCE)
child = os.fork()
if child == 0:
    signal.alarm(int(PATIENCE))
    for name, call in ACCEPTING.items():
        try:
            call()
        except ts.DatabaseClosedError:
            continue
        sys.exit(f"{name} was not refused")
    for close in (writer.close, subscription.close, db.close):
        close()
    print("refused", flush=True)
    os._exit(0)  # as `multiprocessing` does: RocksDB's own end of a process waits for its threads
over.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
db.store([ts.Message("a", b"3")])
writer.close()
assert future.done()
subscription.close()
db.close()
"""

LOCK = """
import os, sys, topicstore as ts
db = ts.open(sys.argv[1])
db.store([ts.Message("a", b"1")])
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()  # until somebody lets it end
    os._exit(0)
os._exit(1)  # as if it were killed: nothing is closed
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    # From Python 3.12 on, a fork beside the engine's threads is warned of.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


def test_a_fork_takes_nothing_and_closes_nothing(tmp_path: Path) -> None:
    """Whoever holds which lock at that moment: it is refused, ends by itself, and the parent's database stays whole."""
    done = run(PROGRAM, str(tmp_path / "db"))
    assert (0, "refused\n", "") == (done.returncode, done.stdout, done.stderr)
    with ts.open(tmp_path / "db") as opened:
        assert [b"1", b"2", b"3"] == sorted(message.payload for message in opened.replay("#"))


def test_a_fork_that_outlives_its_parent_keeps_no_lock(tmp_path: Path) -> None:
    """The database is free as soon as the process that opened it is dead."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOCK, str(tmp_path / "db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"forked\n"
        assert parent.wait(PATIENCE) == 1
        with ts.open(tmp_path / "db") as opened:  # while the child lives
            assert 1 == opened.info().messages
        parent.stdin.close()


METHODS = """
import multiprocessing, os, sys, topicstore as ts
from pathlib import Path

def use(path):
    try:
        with ts.open(path) as db:
            db.store([ts.Message("a", b"1")])
            db.compact()
    except ts.ForkedProcessError:
        os._exit(3)

if __name__ == "__main__":
    use(Path(sys.argv[1], "parents"))
    child = multiprocessing.get_context(sys.argv[2]).Process(target=use, args=(Path(sys.argv[1], "own"),))
    child.start()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize(("method", "code"), [("fork", 3), ("forkserver", 0), ("spawn", 0)])
def test_processes_of_multiprocessing(tmp_path: Path, method: str, code: int) -> None:
    """Those that are spawned, or forked by a server, use databases of their own; one that is forked is refused."""
    assert method in multiprocessing.get_all_start_methods()
    script = tmp_path / "script.py"
    script.write_text(METHODS)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), str(tmp_path), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert (0, f"{code}\n", "") == (done.returncode, done.stdout, done.stderr)
