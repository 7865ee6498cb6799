"""Exports and archivings that are killed anywhere, and what the next one makes of it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.shard.records import ranges_of
from topicstore.shard.shard import Shard

GENERATIONS, MESSAGES = 12, 600
CHILD = """
import sys
import topicstore as ts
from topicstore.tiering import exporting
exporting._BATCH, exporting._GROUP_ROWS, exporting._PART_BYTES = 50, 100, 5_000
with ts.open_existing(sys.argv[1]) as db:
    print("open", flush=True)
    getattr(db, sys.argv[2])(sys.argv[3])
"""


KILLED_AROUND_THE_WRITE = """
import os, signal, sys
import topicstore as ts
with ts.open_existing(sys.argv[1]) as db:
    engine = db.shards[0].engine()
    write = engine.write
    def write_and_die(batch, **options):
        if batch.ranges and sys.argv[3] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write(batch, **options)
        if batch.ranges:
            os.kill(os.getpid(), signal.SIGKILL)
    engine.write = write_and_die
    db.archive(sys.argv[2])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", shards=2) as db:
        for generation in range(GENERATIONS):
            first = generation * MESSAGES
            db.store([ts.Message(f"a/{n % 7}", b"%d" % n, f"c{n % 5}") for n in range(first, first + MESSAGES)])
            db.add_generation()
    return tmp_path / "db"


def run_and_kill(path: Path, method: str, target: Path, seconds: float | None) -> bool:
    """Run it in a process that is killed after some time; return whether it came to the end before."""
    command = [sys.executable, "-c", CHILD, str(path), method, str(target)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
    _, errors = child.communicate()
    assert child.returncode in (0, -signal.SIGKILL), errors.decode()
    return child.returncode == 0


@pytest.mark.parametrize("method", ["export", "archive"])
def test_killed_again_and_again_it_ends_like_one_that_was_not(path: Path, tmp_path: Path, method: str) -> None:
    """Every message is there at every moment, and what was done is not done again."""
    target, chance = tmp_path / "export", random.Random(method)
    with ts.open_existing(path) as db:
        before = list(db.replay("#", order="time"))
        began = time.monotonic()
        db.export(tmp_path / "whole")
        whole = time.monotonic() - began
    archived: dict[int, Path] = {}
    killed = 0
    while not run_and_kill(path, method, target, chance.uniform(0, whole / 3) if killed < 8 else None):
        killed += 1
        with ts.open_existing(path) as db:
            assert list(db.replay("#", order="time")) == before
            assert archived.items() <= db.archived().items()
            archived = db.archived()
            report = db.verify()
            assert (report.damages, report.messages) == ([], len(before))
    assert killed >= 3
    with ts.open_existing(path) as db:
        assert list(db.replay("#", order="time")) == before
        assert len(db.archived()) == (GENERATIONS if method == "archive" else 0)
        assert db.export(target).slabs == 0
    assert list(target.glob(".unfinished-*")) == []
    assert _slabs(target) == _slabs(tmp_path / "whole")


def _slabs(target: Path) -> list[Path]:
    return sorted(path.parent.relative_to(target) for path in target.rglob("_topicstore_slab.json"))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_the_write_that_drops(path: Path, tmp_path: Path, moment: str) -> None:
    """Nothing is local or all is, and where the export is was noted just then."""
    with ts.open_existing(path) as db:
        before = list(db.replay("#", order="time"))
        local = db.generations()[0].live_bytes
    command = [sys.executable, "-c", KILLED_AROUND_THE_WRITE, str(path), str(tmp_path / "export"), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with ts.open_existing(path) as db:
        first = [shard.generations()[0] for shard in db.shards]
        assert [one.archive is None for one in first] == [moment == "before", True]
        held = [sum(1 for _ in keys(shard)) for shard in db.shards]
        assert [count == 0 for count in held] == [moment == "after", False]
        assert (db.generations()[0].live_bytes == local) == (moment == "before")
        assert list(db.replay("#", order="time")) == before
        db.archive(tmp_path / "export")
        assert list(db.replay("#", order="time")) == before


def keys(shard: Shard) -> Iterator[object]:
    """Yield what is local of the first generation."""
    for keyspace, start, end in ranges_of(1):
        for chunk in shard.engine().scan(keyspace, start, end):
            yield from chunk


def test_killed_between_shards_it_is_whole_and_goes_on(path: Path, tmp_path: Path) -> None:
    """Each shard notes by itself where its part is."""
    target = tmp_path / "export"
    with ts.open_existing(path) as db:
        before = list(db.replay("#", order="time"))
        db.export(target, generations=[1])
        db.shards[0].archive(1, str(target), next(one.messages for one in db.shards[0].generations()))
    with ts.open_existing(path) as db:
        assert list(db.replay("#", order="time")) == before
        assert db.archive(target).generations == tuple(range(1, GENERATIONS + 1))
        assert list(db.replay("#", order="time")) == before
        assert {record.archive is None for shard in db.shards for record in shard.generations()[:-1]} == {False}
