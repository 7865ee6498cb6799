"""Owners in processes of their own that are killed or stopped at random times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from topicstore.replication.log_stores import open_log_store

from .test_log import Site

OWNER = Path(__file__).with_name("owner.py")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the shard and writes."""
    with subprocess.Popen([sys.executable, OWNER, tmp_path, "1"], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def said(owner: subprocess.Popen[str], lines: int) -> list[bytes]:
    """Return the next changes that the owner reports as acknowledged."""
    assert owner.stdout is not None
    return [owner.stdout.readline().strip().encode() for _ in range(lines)]


@pytest.mark.parametrize("lines", [1, 17, 60])
def test_what_a_killed_owner_has_acknowledged_is_there(
    owner: subprocess.Popen[str], lines: int, tmp_path: Path
) -> None:
    """All changes that a killed owner acknowledged are in the log, and after them at most the change in flight."""
    said(owner, lines)
    owner.kill()
    rest, _ = owner.communicate()
    acknowledged = lines + len(rest.splitlines())
    heir = Site(open_log_store(tmp_path.as_uri()), "heir")
    assert heir.log.take_over(2)
    heir.propose(b"next")
    found = heir.copy.changes
    assert found[-1] == b"next"
    assert found[:-1] == [b"%d" % number for number in range(len(found) - 1)]
    assert len(found) - 1 in (acknowledged, acknowledged + 1)
    heir.log.close()


def test_an_owner_that_was_stopped_and_goes_on_acknowledges_nothing_that_is_not_there(
    owner: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A stopped owner that continues after a takeover and truncation acknowledges only changes that are in the log."""
    said(owner, 20)
    owner.send_signal(signal.SIGSTOP)
    # one of the process's threads may be in a call that can't be interrupted
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
    heir = Site(open_log_store(tmp_path.as_uri()), "heir")
    assert heir.log.take_over(2)
    heir.propose(b"next")
    heir.truncate()
    owner.send_signal(signal.SIGCONT)
    there = heir.copy.changes[:-1]
    *numbers, last = said(owner, len(there) - 20 + 1)
    assert there[20:] == numbers
    assert last == b"moved: shard 3 has moved to site heir; epoch 1 is over"
    fresh = Site(open_log_store(tmp_path.as_uri()), "fresh")
    assert [*there, b"next"] == fresh.follow()
    assert 1 == fresh.copy.bases
    heir.log.close()
    fresh.log.close()
