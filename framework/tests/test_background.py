"""Background threads retry failed work, and end before the interpreter does, even if the database wasn't closed."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.runtime import background
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.wake_event import AutoResetEvent
from topicstore_conformance.faults.threads import PATIENCE

EPOCH = """
import sys, threading
import topicstore as ts

options = {"wildcard_optimized": {"epoch_bits": 40}}
db = ts.open(sys.argv[1], layout="wildcard_optimized", options=options)
subscription = db.subscribe("a/+", start=0)

def fetch():
    try:
        subscription.fetch()
    except ts.DatabaseClosedError:
        pass

threading.Thread(target=fetch, daemon=True).start()
db.store([ts.Message("a/b", b"1", "c")])
raise SystemExit(7)
"""
WORKING = """
import atexit, sys, threading

@atexit.register
def look():  # called last
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("topicstore-")]
    print(names, flush=True)

import topicstore as ts

db = ts.open(sys.argv[1])
messages = [ts.Message(f"a/{n % 100}", b"%d" % n, "c") for n in range(20_000)]
writer = db.writer(max_items=100_000, flush_interval=3600)
for message in messages:
    writer.put(message)
raise SystemExit(7)
"""
WRITER = """
import sys
import topicstore as ts

writer = ts.open(sys.argv[1]).writer(flush_interval=3600)
writer.put(ts.Message("a/b", b"1", "c"))
raise SystemExit(7)
"""
FORK = """
import os, sys
import topicstore as ts

db = ts.open(sys.argv[1], backend="memory", layout="block")
writer = db.writer(flush_interval=3600)
writer.put(ts.Message("a/b", b"1", "c"))
child = os.fork()
if not child:
    raise SystemExit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
db.close()
"""

FORKS_OF_ANOTHER_THREAD = """
import atexit, os, sys
from concurrent.futures import ThreadPoolExecutor
from topicstore.runtime import background

def fork():
    child = os.fork()
    if not child:
        atexit._run_exitfuncs()
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def trace(frame, event, argument):
    ended.append(other.submit(fork).result())
    return trace

ended = []
with ThreadPoolExecutor(1) as other:
    other.submit(int).result()
    sys.settrace(trace)
    background._end_all()
    sys.settrace(None)
print(len(ended) > 3, set(ended))
raise SystemExit(7)
"""


def run(program: str, *arguments: object, code: int = 7) -> str:
    """Run a program that exits without closing its database; return its standard output."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert code == ended.returncode, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def test_work_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed work is retried after doubling pauses up to a maximum, and the first success resets the pause."""
    pauses: list[float | None] = []
    outcomes: list[str | None] = [*"ababb", None, "c", None]
    monkeypatch.setattr(background, "_FIRST_RETRY", 0.001)
    monkeypatch.setattr(background, "_LONGEST_RETRY", 0.003)
    done = threading.Event()
    seen: list[str | None] = []

    class Recorded(AutoResetEvent):
        def wait(self, timeout: float | None) -> bool:
            pauses.append(timeout)
            return timeout is None or super().wait(timeout)

    def work(_woken: bool) -> None:
        seen.append(task.failure)
        outcome = outcomes.pop(0)
        if not outcomes:
            task.stop()
            done.set()
        if outcome is not None:
            raise OSError(outcome)

    task = BackgroundTask("test", work)
    task._wake = Recorded()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        task.wake()
        assert done.wait(PATIENCE)
        task.join()
    assert [None, *"ababb", None, "c"] == seen
    assert [None, 0.001, 0.002, 0.003, 0.003, 0.003, None, 0.001] == pauses[:8]
    assert [f"background test failed: {error}" for error in "ababc"] == [str(each.message) for each in told]


def test_waiting_for_the_end_of_an_epoch_ends_at_exit(tmp_path: Path) -> None:
    """A thread that waits for the end of an epoch is released when the interpreter exits."""
    run(EPOCH, tmp_path / "db")


def test_nothing_begins_to_work_when_the_interpreter_exits(tmp_path: Path) -> None:
    """No background work starts during the interpreter's exit, and all threads have ended."""
    assert "[]\n" == run(WORKING, tmp_path / "db")


def test_an_unclosed_writer_stores_its_buffer(tmp_path: Path) -> None:
    """A writer that wasn't closed stores its buffered messages when the interpreter exits."""
    run(WRITER, tmp_path / "db")
    with ts.open(tmp_path / "db") as db:
        assert [b"1"] == [message.payload for message in db.replay("#")]


def test_a_fork_ends_no_thread_of_its_parent(tmp_path: Path) -> None:
    """A forked child exits without waiting for its parent's threads, and stores none of its parent's messages."""
    run(FORK, tmp_path / "db", code=0)


def test_a_fork_ends_though_its_parent_was_exiting() -> None:
    """A child that another thread forks exits normally, whichever line of its exit handler the parent is at."""
    assert "True {3}\n" == run(FORKS_OF_ANOTHER_THREAD)
