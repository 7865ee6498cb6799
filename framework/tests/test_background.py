"""Threads of ours end before the interpreter does, though nobody closed the database."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import topicstore as ts

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


def run(program: str, *arguments: object, code: int = 7) -> str:
    """Run a program that ends without closing what it opened; return what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert code == ended.returncode, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def test_whoever_waits_for_the_end_of_an_epoch_is_let_go(tmp_path: Path) -> None:
    """It would end in twelve days."""
    run(EPOCH, tmp_path / "db")


def test_nothing_begins_to_work_when_the_interpreter_exits(tmp_path: Path) -> None:
    """Not even for what is stored then, and whatever worked before has ended."""
    assert "[]\n" == run(WORKING, tmp_path / "db")


def test_a_writer_that_nobody_closed_stores_what_it_holds(tmp_path: Path) -> None:
    """Though the program ended by an error."""
    run(WRITER, tmp_path / "db")
    with ts.open(tmp_path / "db") as db:
        assert [b"1"] == [message.payload for message in db.replay("#")]


def test_a_fork_ends_no_thread_of_its_parent(tmp_path: Path) -> None:
    """It has none, and leaves its parent's messages alone."""
    run(FORK, tmp_path / "db", code=0)
