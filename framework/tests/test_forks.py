"""Forks and other ways to begin processes beside an open database."""

from __future__ import annotations

import ctypes
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE

PROGRAM = """
import asyncio, faulthandler, gc, inspect, os, sys, threading, types
from pathlib import Path
import topicstore as ts
from topicstore.sessions import Connect, SubscribeOptions

from topicstore_conformance.faults.threads import PATIENCE

path, backend, layout = sys.argv[1:]
message = ts.Message("a", b"1", "me")
db = ts.open(path, backend=backend, layout=layout, auto_compact=False)
db.store([message])
db.add_generation()
db.archives.archive(path + "-export")
db.store([message])
if backend == "rocksdb":
    view = ts.open(path, mode="r")
else:
    with ts.open(path + "-viewed", backend=backend) as other:
        other.store([message, message])
        other.queues.open("q")
    view = ts.open(path + "-viewed", mode="r")
writer, subscription, queue = db.writer(flush_interval=3_600), db.subscribe("#"), db.queues.open("q")
session, rule, stream = db.sessions.open("me", expiry_interval=None), db.persistence.add("b"), db.streams("#")[0]
session.subscribe("#")
future = writer.put(message)
begun = [db.replay("#", batch_size=1), view.replay("#", batch_size=1)]
for replay in begun:
    next(replay)

inherited = {
    "db": db, "writer": writer, "subscription": subscription, "queue": queue, "queues": db.queues,
    "session": session, "sessions": db.sessions, "groups": db.sessions.groups, "rules": db.persistence,
    "retention": db.retention, "archives": db.archives, "state": db.state(0),
    "view": view, "queues of a view": view.queues, "archives of a view": view.archives,
    "state of a view": view.state(0),
}
GIVEN = {  # where something takes an argument of that name
    "messages": [message], "message": message, "batch": ts.MessageBatch.of([message]), "topic_filter": "#",
    "topic": "a", "client_id": "me", "stream": stream, "cursor": db.cursor(stream, "#"), "generation": 1,
    "path": "copy", "copy": Path("copy"), "target": "export", "shard": 0, "statement": "select 1", "key": b"k",
    "keys": [b"k"], "writes": [],
    "name": "q",
    "max_messages": 1, "max_bytes": 1, "overflow": None, "call": print, "sequence": 0, "upto": 1,
    "rule": rule, "interval": 1.0, "connects": [Connect(client_id="one")], "sessions": [session],
    "packet_ids": [0], "client_ids": ["me"], "limit": 1, "allow": None,
}
ROWS = {
    "publish": [(session, message, 0)], "pubrec": [(session, 1)], "pubrel": [(session, 1)],
    "subscribe": [(session, "b", SubscribeOptions())], "unsubscribe": [(session, "b")],
}
SPECIAL = {"__iter__", "__aiter__", "__len__", "__bool__", "__contains__", "__getitem__", "__repr__"}
RETURNS = {  # what was known before, or ends nothing here
    "__len__", "__bool__", "__repr__", "close", "clock", "read_only", "shard_of", "topic_filter", "bytes", "dropped",
    "name", "client_id", "ended", "failure", "keep_alive", "on_end", "present", "receive_maximum", "clock_ahead",
    "settings", "slow_after", "handover_after", "store_qos0", "filters",
    "removal_failure",
}

async def first(items):
    return await anext(items)

def needed(parameter):
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL

def use(one, name):
    found = getattr(one, name)
    if callable(found):
        parameters = inspect.signature(found).parameters
        given = {**GIVEN, "rows": ROWS.get(name)}
        found = found(**{n: given[n.strip("_")] for n, p in parameters.items() if needed(p)})
    if inspect.iscoroutine(found):
        asyncio.run(found)
    if inspect.isasyncgen(found):
        asyncio.run(first(found))
    if inspect.isgenerator(found):
        list(found)

def refused(call, *arguments):
    try:
        call(*arguments)
    except ts.DatabaseClosedError:
        return True

def child():
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    for whose, one in inherited.items():
        for name in dir(type(one)):
            if name in SPECIAL or (not name.startswith("_") and name in dir(one)):
                if not refused(use, one, name) and name not in RETURNS:
                    sys.exit(f"{name} of {whose} was not refused")
    for replay in begun:
        assert refused(next, replay)
    with ts.open(path + "-own", backend="memory") as own:
        own.store([message])
        own.add_generation()
        own.archives.archive(path + "-own-export")
        assert [message.payload] == [found.payload for found in own.replay("#")]
    for variable in [name for name in globals() if not name.startswith("_")]:
        if variable not in ("gc", "os"):
            del globals()[variable]
    gc.collect()
    print("refused", flush=True)
    os._exit(0)  # as `multiprocessing` does

PLAIN, REENTRANT = type(threading.Lock()), type(threading.RLock())
PASSED = (types.ModuleType, type, threading.Thread, types.FrameType)

def locks_within(*roots):
    found, seen, left = [], set(), list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, PASSED):
            continue
        seen.add(id(one))
        if isinstance(one, (PLAIN, REENTRANT)):
            found.append(one)
        left += (one.__closure__ or ()) if isinstance(one, types.FunctionType) else gc.get_referents(one)
    return found

def hold(locks, held, over):
    taken = []
    for lock in locks:
        kind = PLAIN if isinstance(lock, PLAIN) else REENTRANT
        if kind.acquire(lock, False):  # else somebody holds it who waits
            taken.append(lock)
    held.set()
    over.wait()
    for lock in taken:
        lock.release()

modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("topicstore")]
locks = locks_within(*inherited.values(), *begun, *modules)
known = (db.storage._closing, db.storage.shards[0].writer.lock, writer._storing)
assert {id(lock) for lock in known} <= set(map(id, locks))
held, over = threading.Event(), threading.Event()
thread = threading.Thread(target=hold, args=(locks, held, over), daemon=True)
thread.start()
assert held.wait(PATIENCE)
del modules
forked = os.fork()
if forked == 0:
    child()
over.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
db.store([message])
writer.close()
assert future.done()
for one in (subscription, db, view):
    one.close()
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
    """Run a program, and return its output and exit code."""
    # Python 3.12 and later warn of a fork in a process with several threads, such as the engine's.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


@pytest.mark.parametrize(("backend", "layout"), [("rocksdb", "block"), ("leveldb", "block"), ("duckdb", "table")])
def test_a_fork_takes_nothing_and_closes_nothing(tmp_path: Path, backend: str, layout: str) -> None:
    """In a forked child every public call returns, even if other threads of the parent held locks.

    Calls that need the inherited database are refused, and the parent's database is unaffected. The child can open and
    use databases of its own.
    """
    need(backend)
    done = run(PROGRAM, str(tmp_path / "db"), backend, layout)
    assert (0, "refused\n", "") == (done.returncode, done.stdout, done.stderr)
    with ts.open(tmp_path / "db") as opened:
        assert 4 == len(list(opened.replay("#")))
        assert [] == opened.verify().damages


def test_a_fork_that_outlives_its_parent_keeps_no_lock(tmp_path: Path) -> None:
    """When the process that opened a database dies, its lock is free, even if a forked child still runs."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOCK, str(tmp_path / "db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"forked\n"
        assert parent.wait(PATIENCE) == 1
        with ts.open(tmp_path / "db") as opened:  # while the forked child lives
            assert 1 == opened.info().messages
        parent.stdin.close()


EXIT = """
import atexit, os, sys, threading, topicstore as ts
db = ts.open(sys.argv[1], backend=sys.argv[2])
message = ts.Message("a", b"1")
db.store([message])
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(8)]  # their stacks make C release those of the engine's
for thread in threads:
    thread.start()
db.writer().put(message).result()
print("parent", flush=True)
forked = os.fork()
if forked == 0:
    atexit.register(print, "child", end="")  # not flushed
    grandchild = os.fork()
    if grandchild == 0:
        sys.exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 8
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
stop.set()
db.close()
sys.exit(status)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="needs a C library with on_exit")
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb"])
def test_a_fork_ends_with_its_own_status(tmp_path: Path, backend: str) -> None:
    """A forked child exits with its own status and flushes its output, though the engine waits for threads at exit."""
    need(backend)
    done = run(EXIT, str(tmp_path / "db"), backend)
    assert (7, "parent\nchildchild", "") == (done.returncode, done.stdout, done.stderr)
    with ts.open(tmp_path / "db") as opened:
        assert [] == opened.verify().damages


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
    """Spawned and forkserver processes use databases of their own; a forked process is refused."""
    assert method in multiprocessing.get_all_start_methods()
    script = tmp_path / "script.py"
    script.write_text(METHODS)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script), str(tmp_path), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert (0, f"{code}\n", "") == (done.returncode, done.stdout, done.stderr)
