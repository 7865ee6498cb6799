"""Exports and archivings that are killed at any step, and the calls that resume them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.shard.records import ranges_of
from topicstore.shard.shard import Shard

GENERATIONS, MESSAGES = 6, 300
RunUntil = Callable[..., object]

KILLED = """
import topicstore as ts
from topicstore.lifecycle import exporting
exporting._BATCH, exporting._GROUP_ROWS, exporting._PART_BYTES = 20, 40, 1_500
path, method, target = arguments
with ts.open(path, mode="r+") as db:
    for name in ("fsync", "mkdir", "rename", "replace"):
        counts(os, name)
    counts(RocksdbEngine, "write")
    getattr(db.archives, method)(target)
"""

KILLED_AROUND_THE_WRITE = """
import topicstore as ts
path, target = arguments
with ts.open(path, mode="r+") as db:
    counts(db.storage.shards[0].writer.open_engine(), "write", lambda batch, **_: batch.ranges)
    db.archives.archive(target)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", shards=2) as db:
        for generation in range(GENERATIONS):
            first = generation * MESSAGES
            db.store([ts.Message(f"a/{n % 7}", b"%d" % n, f"c{n % 5}") for n in range(first, first + MESSAGES)])
            db.add_generation()
    return tmp_path / "db"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "deaths"),
    [("export", (2, 5, 11, 14, 19, 8, 23, 13)), ("archive", (2, 8, 19, 27, 34, 16, 13, 5))],
)
def test_killed_again_and_again_it_ends_like_one_that_was_not(
    path: Path, tmp_path: Path, run_until: RunUntil, method: str, deaths: Sequence[int]
) -> None:
    """All messages stay readable after each kill; finished slabs and archived generations are not written again."""
    target = tmp_path / "export"
    with ts.open(path, mode="r+") as db:
        before = list(db.replay("#", order="time"))
        db.archives.export(tmp_path / "whole")
    archived: dict[int, Path] = {}
    written: set[Path] = set()
    for death in zip(deaths, ["before", "after"] * 4, strict=True):
        run_until(death, KILLED, path, method, target)
        with ts.open(path, mode="r+") as db:
            assert list(db.replay("#", order="time")) == before
            assert archived.items() <= {one.generation: one.path for one in db.archives}.items()
            archived = {one.generation: one.path for one in db.archives}
            report = db.verify()
            assert (report.damages, report.messages) == ([], len(before))
        assert written <= set(_slabs(target))
        written = set(_slabs(target))
    assert 3 <= len(written) < 2 * GENERATIONS
    with ts.open(path, mode="r+") as db:
        report = getattr(db.archives, method)(target)
        assert report.slabs_before >= 3 if method == "export" else len(archived) >= 1
        assert list(db.replay("#", order="time")) == before
        assert len(db.archives) == (GENERATIONS if method == "archive" else 0)
        assert db.archives.export(target).slabs == 0
    assert list(target.glob(".unfinished-*")) == []
    assert _slabs(target) == _slabs(tmp_path / "whole")


def _slabs(target: Path) -> list[Path]:
    """Return the directories of complete slabs."""
    return sorted(path.parent.relative_to(target) for path in target.glob("shard=*/*/_topicstore_slab.json"))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_around_the_write_that_drops(path: Path, tmp_path: Path, run_until: RunUntil, moment: str) -> None:
    """After a kill, a generation is either local, or archived with the export's path recorded."""
    with ts.open(path, mode="r+") as db:
        before = list(db.replay("#", order="time"))
        local = db.generations()[0].live_bytes
    run_until((1, moment), KILLED_AROUND_THE_WRITE, path, tmp_path / "export")
    with ts.open(path, mode="r+") as db:
        first = [shard.generations.listed()[0] for shard in db.storage.shards]
        assert [one.archive is None for one in first] == [moment == "before", True]
        held = [sum(1 for _ in keys(shard)) for shard in db.storage.shards]
        assert [count == 0 for count in held] == [moment == "after", False]
        assert (db.generations()[0].live_bytes == local) == (moment == "before")
        assert list(db.replay("#", order="time")) == before
        db.archives.archive(tmp_path / "export")
        assert list(db.replay("#", order="time")) == before


def keys(shard: Shard) -> Iterator[object]:
    """Yield the local keys and values of the first generation."""
    for keyspace, start, end in ranges_of(1):
        for chunk in shard.writer.open_engine().scan(keyspace, start, end):
            yield from chunk


def test_an_archiving_killed_between_shards_is_readable_and_completed(path: Path, tmp_path: Path) -> None:
    """If only some shards have archived a generation, it is readable, and the next archiving completes it."""
    target = tmp_path / "export"
    with ts.open(path, mode="r+") as db:
        before = list(db.replay("#", order="time"))
        db.archives.export(target, generations=[1])
        db.storage.shards[0].generations.archive(
            1, str(target), next(one.messages for one in db.storage.shards[0].generations.listed())
        )
    with ts.open(path, mode="r+") as db:
        assert list(db.replay("#", order="time")) == before
        assert db.archives.archive(target).generations == tuple(range(1, GENERATIONS + 1))
        assert list(db.replay("#", order="time")) == before
        assert {
            record.archive is None for shard in db.storage.shards for record in shard.generations.listed()[:-1]
        } == {False}
