"""``topicstore replay`` where nothing matches; `test_formats` has what it writes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from click.testing import Result
from topicstore_conformance.faults.threads import PATIENCE

Run = Callable[..., Result]


def on_a_terminal(*arguments: object) -> str:
    """Run the program where standard error is a terminal; return what it says there."""
    ours, theirs = pty.openpty()
    program = [sys.executable, "-m", "topicstore.cli", *map(str, arguments)]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=theirs, timeout=PATIENCE, check=True)
    os.close(theirs)
    assert b"" == done.stdout
    try:
        return os.read(ours, 65_536).decode()
    except OSError:  # on Linux, nothing was written
        return ""
    finally:
        os.close(ours)


def test_a_replay_of_nothing(run: Run, db: Path, tmp_path: Path) -> None:
    """A person is told so, and where the messages are; a script gets nothing."""
    newest = "no messages match; the newest of the database is of 1970-01-01T00:00:59Z\r\n"
    assert newest == on_a_terminal("replay", db, "nosuch")
    assert newest == on_a_terminal("replay", db, "--start", "-2h", "--format", "jsonl")
    assert "" == on_a_terminal("replay", db, "--limit", 0)
    run("create", tmp_path / "empty")
    assert "no messages: the database holds none\r\n" == on_a_terminal("replay", tmp_path / "empty")
    assert ("", "") == (run("replay", db, "nosuch").stdout, run("replay", db, "nosuch").stderr)
