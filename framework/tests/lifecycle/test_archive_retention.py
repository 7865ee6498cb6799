"""Retention that archives generations instead of dropping them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.errors import InvalidArgumentError
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.striking import Fault, striking
from topicstore_conformance.faults.threads import wait_until

SECOND = 1_000_000
Fill = Callable[..., None]


@pytest.fixture
def db(tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    """A database without retention in the background."""
    with ts.open(tmp_path / "db", shards=2, clock=clock) as opened:
        opened.retention.stop()
        yield opened


def stored(db: ts.Database) -> list[int]:
    return [int(one.payload) for one in db.replay("fleet/#", order="time")]


def test_what_is_too_old_is_archived_and_stays(db: ts.Database, tmp_path: Path, clock: Clock, fill: Fill) -> None:
    db.retention.set(max_age=100, rotate_every=10, archive_to=str(tmp_path / "export"))
    fill(db, 10)
    clock.now += 11 * SECOND
    assert db.retention.run().rotated == 2
    fill(db, 10)
    clock.now += 90 * SECOND
    before, held = stored(db), db.generations()[0]
    report = db.retention.run()
    assert (report.rotated, report.dropped, report.archived) == (3, (), (1,))
    assert (report.messages, report.live_bytes) == (10, held.live_bytes)
    assert stored(db) == before
    assert {one.generation: one.path for one in db.archives} == {1: tmp_path / "export"}
    clock.now += 1_000 * SECOND
    assert db.retention.run().archived == (2,)
    assert db.retention.run() == ts.RetentionReport(
        rotated=None, dropped=(), archived=(), messages=0, live_bytes=0, expired=0
    )
    assert stored(db) == before


def test_only_local_bytes_count(db: ts.Database, tmp_path: Path, fill: Fill) -> None:
    """Archived generations don't count for `max_bytes`, so only as many are archived as needed."""
    for _ in range(6):
        fill(db, 50)
        db.add_generation()
    sizes = [one.live_bytes for one in db.generations()]
    before = stored(db)
    db.retention.set(max_bytes=sum(sizes[2:]), when_full="drop", archive_to=str(tmp_path / "export"))
    assert db.retention.run().archived == (1, 2)
    assert db.retention.run().archived == ()
    assert sum(one.live_bytes for one in db.generations()) <= sum(sizes[2:])
    assert stored(db) == before


def test_archived_ones_are_not_dropped_for_room(db: ts.Database, tmp_path: Path, fill: Fill) -> None:
    """Archived generations are not dropped for `max_bytes`; `max_age` drops them only if retention doesn't archive."""
    for _ in range(4):
        fill(db, 50)
        db.add_generation()
    sizes = [one.live_bytes for one in db.generations()]
    db.archives.archive(tmp_path / "export", generations=[1, 2])
    db.retention.set(max_bytes=sizes[3], when_full="drop")
    assert db.retention.run().dropped == (3,)
    db.retention.set(max_age=1)
    assert db.retention.run(db.clock() + 10 * SECOND).dropped == (1, 2, 4)
    assert len(list((tmp_path / "export").rglob("*.parquet"))) == 4


def test_where_it_can_not_be_archived_it_stays_and_says_so(db: ts.Database, tmp_path: Path, fill: Fill) -> None:
    fill(db, 50)
    db.add_generation()
    before = stored(db)
    (tmp_path / "export").write_text("a file is in the way")
    db.retention.set(max_age=1, archive_to=str(tmp_path / "export"))
    with pytest.raises(OSError, match="export"):
        db.retention.run(db.clock() + 10 * SECOND)
    assert (stored(db), {one.generation: one.path for one in db.archives}) == (before, {})
    (tmp_path / "export").unlink()
    assert db.retention.run(db.clock() + 10 * SECOND).archived == (1,)
    assert stored(db) == before


def test_deletes_succeed_after_a_failed_archiving(db: ts.Database, tmp_path: Path, fill: Fill) -> None:
    """Whichever write of an archiving fails, the archive contains nothing of the generation, and deletes succeed."""
    fill(db, 50)
    db.add_generation()
    for write in itertools.count(1):
        with striking(Fault("full", write), (), tmp_path / "db", tmp_path / "copy", files=True):
            db.archives.archive(tmp_path / "export")
        if len(db.archives):
            break
        assert list((tmp_path / "export").glob("shard=*/*")) == []
        assert db.delete("fleet/#", until=START + 2_000 * write + 1)
    assert write > 10
    assert stored(db) == [number for number in range(2 * (write - 1), 50) if number % 10]


def test_a_relative_place_lies_from_the_database(db: ts.Database, tmp_path: Path, fill: Fill) -> None:
    fill(db, 50)
    db.add_generation()
    before = stored(db)
    db.retention.set(max_age=1, archive_to="../cold")
    db.retention.run(db.clock() + 10 * SECOND)
    assert {one.generation: one.path for one in db.archives} == {1: tmp_path / "cold"}
    db.close()
    (tmp_path / "new").mkdir()
    for name in ("db", "cold"):
        shutil.move(tmp_path / name, tmp_path / "new" / name)
    with ts.open(tmp_path / "new" / "db", mode="r+") as moved:
        assert stored(moved) == before
        assert moved.retention.settings.archive_to == "../cold"


def test_it_is_archived_by_itself_when_something_is_stored(tmp_path: Path, clock: Clock, fill: Fill) -> None:
    """Retention archives in the background after a store; closing waits for at most one batch."""
    with ts.open(tmp_path / "db", clock=clock) as db:
        db.retention.set(max_age=100, rotate_every=10, archive_to="../cold")
        fill(db, 50)
        db.add_generation()
        clock.now += 200 * SECOND
        fill(db, 1)
        assert db.retention._task._thread is not None
        db.retention._task.wake()
        wait_until(lambda: len(db.archives) or db.retention.failure, "the generation to be archived")
        assert db.retention.failure is None
        assert len(stored(db)) == 45


def test_settings_are_kept_and_checked(db: ts.Database) -> None:
    with pytest.raises(InvalidArgumentError):
        db.retention.set(max_age=1, archive_to=3)  # type: ignore[arg-type]
    db.retention.set(max_age=5, archive_to="/cold")
    db.close()
    with ts.open(db.path, mode="r+") as again:
        assert again.retention.settings == ts.RetentionSettings(max_age=5, archive_to="/cold")
