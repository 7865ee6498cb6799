"""The ranges that tasks read: together they contain each selected message once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import TimeRange
from topicstore.shard import zones
from topicstore.spark import reading
from topicstore.spark.options import ReadSettings, Selection
from topicstore.storage.storage import Storage

FIRST = 1_700_000_000_000_000


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized"])
@pytest.mark.parametrize("start", [0, FIRST + 450_000_000])
def test_large_generations_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, start: int) -> None:
    """Large generations are divided into the wanted number of ranges, or fewer if there are too few messages."""
    monkeypatch.setattr(reading, "_WORTH_CUTTING", 100)
    messages = [ts.Message(f"a/{n % 7}", b"%d" % n, timestamp=FIRST + n * 1_000_000) for n in range(1_000)]
    with ts.open(tmp_path, layout=layout, timestamps="message") as db:
        db.store(messages[:900])
        db.add_generation()
        db.store(messages[900:])
    selection = Selection(first=first_position(start))
    with reading.open_to_read(str(tmp_path)) as db:
        assert 2 == len(reading.ranges_of(db, selection))
        ranges = reading.ranges_of(db, selection, 4)
        assert [1, 1, 1, 1, None] == [one.generation for one in ranges]
        parts = [
            [int(m.payload) for batch in reading.read(db, one, ("#",)) for m in batch.to_messages()] for one in ranges
        ]
    assert [n for n in range(1_000) if messages[n].timestamp >= start] == sorted(n for part in parts for n in part)
    assert all(parts)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """An open database that other processes can open, too."""
    path = tmp_path_factory.mktemp("opened") / "db"
    ts.open(path).close()
    with reading.open_to_read(str(path)) as storage:
        storage.shards[0].writer.open_engine()
        assert storage.mode != "owner"
        yield storage


@given(messages=st.lists(st.integers(0, 1_000_000) | st.just(0), max_size=40), tasks=st.integers(1, 50))
def test_tasks_share_the_ranges(opened: Storage, messages: list[int], tasks: int) -> None:
    """Each range is in one partition, in order; no partition has more than an equal share and its largest range."""
    ranges = [reading.ReadRange(n, 1, 0, 9, count) for n, count in enumerate(messages)]
    partitions = reading.partitions_of(opened, ranges, Selection(), tasks)
    groups = [partition.ranges for partition in partitions if isinstance(partition, reading.RangesPartition)]
    assert ranges == [one for group in groups for one in group]
    assert 1 <= len(groups) <= tasks
    assert all(groups) or not ranges
    share = (sum(messages) + len(messages)) / tasks
    for group in groups:
        sizes = [one.messages + 1 for one in group]
        assert sum(sizes) <= share + max(sizes, default=0)


@pytest.mark.parametrize("least", [1, 4])
def test_a_plan_that_is_kept_reads_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """A plan that is executed later also reads newer messages, in all generations, up to the selection's end."""
    monkeypatch.setattr(reading, "_WORTH_CUTTING", 100)
    with ts.open(tmp_path, shards=2, timestamps="message") as db:

        def store(first: int, count: int) -> None:
            numbers = range(first, first + count)
            db.store([ts.Message("a", b"%d" % n, f"c{n % 5}", timestamp=FIRST + n) for n in numbers])

        store(0, 500)
        selections = Selection(), Selection(last=first_position(FIRST + 900) - 1)
        with reading.open_to_read(str(tmp_path)) as storage:
            plans = [reading.ranges_of(storage, selection, least) for selection in selections]
        store(500, 300)
        db.add_generation()
        store(800, 300)
    with reading.open_to_read(str(tmp_path)) as storage:
        found = [
            sorted(
                int(message.payload)
                for one in ranges
                for batch in reading.read(storage, one, ("#",))
                for message in batch.to_messages()
            )
            for ranges in plans
        ]
    assert [list(range(1_100)), list(range(900))] == found


def test_ranges_of_time_judge_each_message_by_its_own(tmp_path: Path) -> None:
    """With positions from the messages' own times, time ranges are exact, even with 5,000 messages in a microsecond."""
    path = tmp_path / "db"
    with ts.open(path, timestamps="message") as db:
        db.store([ts.Message("a", b"%d" % n, timestamp=FIRST) for n in range(5_000)])
        db.store([ts.Message("a", b"later", timestamp=FIRST + 9)])
    found = []
    at, after, end = f"{FIRST}", f"{FIRST + 1}", f"{FIRST + 9}"
    for bounds in ({"start": at, "until": after}, {"start": after}, {"start": after, "until": end}):
        selection = ReadSettings.of({"path": str(path), **bounds}).selection
        with reading.open_to_read(str(path)) as storage:
            ranges = reading.ranges_of(storage, selection)
            times = selection.timestamps
            found.append(sum(len(b) for one in ranges for b in reading.read(storage, one, ("#",), timestamps=times)))
    assert [5_000, 1, 0] == found


def test_what_has_other_timestamps_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read ranges for a range of timestamps contain the late messages in it, and few other messages."""
    monkeypatch.setattr(zones, "SIZE", 100)
    hour = 3_600_000_000
    with ts.open(tmp_path, shards=2) as db:
        for n in range(60):
            late = n % 20 == 7
            db.store([ts.Message("a", b"%d" % n, "c", timestamp=FIRST + (3 if late else n) * hour)] * 10)
            if n == 29:
                db.add_generation()
    selection = Selection(timestamps=TimeRange(FIRST + 3 * hour, FIRST + 4 * hour))
    with reading.open_to_read(str(tmp_path)) as db:
        ranges = reading.ranges_of(db, selection)
        assert [None, 1, None] == [one.generation for one in ranges]
        found = [
            int(message.payload)
            for one in ranges
            for batch in reading.read(db, one, ("#",), timestamps=selection.timestamps)
            for message in batch.to_messages()
        ]
        assert sorted([3, 7, 27, 47] * 10) == sorted(found)
        assert 300 == sum(shard.writer.counters.read_messages for shard in db.shards)
        none = Selection(timestamps=TimeRange(FIRST + 100 * hour))
        assert {None} == {one.generation for one in reading.ranges_of(db, none)}
        assert Selection(timestamps=TimeRange(5, 5)).empty
