"""Staged task attempts and their commit: order, and exactly-once storage after failures."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from pyspark import TaskContext
from topicstore.spark import promotion
from topicstore.spark.commit import check_unlocked, promote
from topicstore.spark.options import WriteSettings
from topicstore.spark.promotion import write_commit
from topicstore.spark.sink import TopicstoreWriter
from topicstore.spark.staging import in_order, row_counts, row_digests, runs_of, stage
from topicstore.storage.directory.directory_lock import DirectoryLock

MODE = 0o700
FIRST = 1_700_000_000_000_000
COMMIT = """
from topicstore.spark import promotion
from topicstore.spark.commit import promote
from topicstore.spark.options import WriteSettings

def store(self, runs, _store=promotion.CommitJob._store):
    counts(RocksdbEngine, "write")
    _store(self, runs)

promotion._ROWS = promotion._LEAST_ROWS = 50
promotion.CommitJob._store = store
options, batch = arguments
promote(WriteSettings.of(options, overwrite=False), promotion.Batch(**batch))
"""
"""Stores fifty rows of a shard at a time, and counts writes of the engine from the first that stores rows."""


def rows(count: int, first: int = 0) -> pa.RecordBatch:
    """Return rows of a hundred publishers, two in each millisecond."""
    n = np.arange(first, first + count)
    return pa.record_batch(
        {
            "timestamp": pa.array(FIRST + n // 2 * 1000, pa.timestamp("us", tz="UTC")),
            "topic": pa.array([f"a/{i % 100}" for i in n]),
            "client_id": pa.array([f"c{i % 100}" for i in n]),
            "payload": pa.array([b"%09d" % i for i in n]),
        }
    )


def options(path: Path, **more: str) -> dict[str, str]:
    return {"path": str(path / "db"), "staging": str(path / "staging"), "shards": "3", **more}


def batch(
    path: Path, write: str, parts: list[pa.RecordBatch], writer: str | None = "w", number: int = 7
) -> dict[str, object]:
    """Stage each list of rows as one task attempt of the same write."""
    attempts = [stage([part], path / "staging" / write, 3, MODE) for part in parts]
    return {"writer": writer, "number": number, "write": write, "shards": 3, "attempts": attempts}


def commit(path: Path, staged: dict[str, object]) -> None:
    promote(WriteSettings.of(options(path), overwrite=False), promotion.Batch(**staged))  # type: ignore[arg-type]


def last_if_none(time: int | None) -> tuple[bool, int]:
    return time is None, time or 0


def stored(path: Path) -> list[int]:
    with ts.open(path / "db", mode="r") as db:
        return [int(message.payload) for message in db.replay("#", order="time")]


# --- order ------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=30), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_merged_as_one_stable_sort_would(runs: list[list[int | None]], size: int) -> None:
    """Rows are sorted by timestamp, rows without one last, then by run and index, in batches of at most `size`."""
    ordered = [sorted(run, key=last_if_none) for run in runs]
    names = [[n * 100 + i for i in range(len(run))] for n, run in enumerate(ordered)]
    batches = [
        pa.record_batch({"timestamp": pa.array(run, pa.timestamp("us", tz="UTC")), "row": pa.array(name, pa.int64())})
        for run, name in zip(ordered, names, strict=True)
    ]
    pairs = zip(chain.from_iterable(ordered), chain.from_iterable(names), strict=True)
    expected = [name for _, name in sorted(pairs, key=lambda pair: (last_if_none(pair[0]), pair[1]))]
    merged = list(in_order(batches, size))
    assert [name for part in merged for name in part.column("row").to_pylist()] == expected
    assert all(part.num_rows <= size for part in merged)


def test_runs_are_in_order_whatever_came(tmp_path: Path) -> None:
    """A task's rows are sorted by time in each shard's file, whatever their order and batches."""
    shuffled = rows(1000).take(pa.array(np.random.default_rng(1).permutation(1000)))
    attempt = stage([shuffled[start : start + 90] for start in range(0, 1000, 90)], tmp_path, 3, MODE)
    found = []
    for shard in range(3):
        for run in runs_of([tmp_path / attempt], shard):
            times = run.column("timestamp").cast(pa.int64()).to_pylist()
            assert times == sorted(times)
            found += [int(payload) for payload in run.column("payload").to_pylist()]
    assert sorted(found) == list(range(1000))


# --- once -------------------------------------------------------------------------------


def test_only_attempts_that_were_taken_count(tmp_path: Path) -> None:
    """Rows of attempts that Spark didn't accept are not stored."""
    staged = batch(tmp_path, "one", [rows(100)])
    batch(tmp_path, "one", [rows(100)])
    commit(tmp_path, staged)
    assert sorted(stored(tmp_path)) == list(range(100))
    assert not (tmp_path / "staging").exists()


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["w", None])
@pytest.mark.parametrize("death", [(1, "after"), (3, "after"), (8, "before")])
def test_a_commit_that_is_killed_is_finished_by_the_next(
    tmp_path: Path, run_until: Callable[..., object], writer: str | None, death: tuple[int, str]
) -> None:
    """After a killed commit, the same rows staged in another order are stored once, with or without a writer's name.

    The process is killed during the first of its write calls, after that call, or during a later call.
    """
    count = 900
    staged = batch(tmp_path, "one", [rows(count // 2), rows(count // 2, count // 2)], writer)
    run_until(death, COMMIT, options(tmp_path), staged)
    assert 0 < len(stored(tmp_path)) < count
    again = batch(tmp_path, "two", [rows(count // 3, n * (count // 3)) for n in (2, 0, 1)], writer)
    commit(tmp_path, again)
    assert sorted(stored(tmp_path)) == list(range(count))
    assert not (tmp_path / "staging").exists()
    if writer is not None:
        commit(tmp_path, batch(tmp_path, "three", [rows(10)]))
    commit(tmp_path, batch(tmp_path, "four", [rows(10, count)], writer, 8))
    assert sorted(stored(tmp_path)) == list(range(count + 10))


COUNTED = COMMIT.replace(
    '    counts(RocksdbEngine, "write")\n',
    """
    for owner, name in ((RocksdbEngine, "write"), (Path, "rename"), (shutil, "rmtree")):
        def step(*arguments, _step=getattr(owner, name), **options):
            steps.append(_step)
            return _step(*arguments, **options)

        setattr(owner, name, countdown.counted(step))
""",
).replace("from topicstore", "import shutil\nfrom pathlib import Path\nsteps = []\nfrom topicstore", 1)
"""Counts also the steps that end a commit."""
ENDING = 6
"""The number of steps that end a commit without a writer's name.

These are renaming the directory of its rows, deleting the note of each of three shards, removing the directory, and
checking whether anything is left.
"""


def last_before_the_end(path: Path, run_until: Callable[..., list[tuple[int]]]) -> int:
    """Return the number of the step that completes a commit of 300 rows; only cleanup steps follow."""
    staged = batch(path, "all", [rows(300)], None)
    [(steps,)] = run_until(None, f"{COUNTED}\nsay(len(steps))", options(path), staged)
    return steps - ENDING


@pytest.mark.slow
@pytest.mark.parametrize("follows", ["again", "another", "named"])
def test_wherever_a_commit_without_a_name_is_killed(
    tmp_path: Path, run_until: Callable[..., list[tuple[int]]], follows: str
) -> None:
    """A commit that is killed before its completion is completed by the next one, and each row is stored once."""
    last = last_before_the_end(tmp_path / "counted", run_until)
    for number in range(1, last + 2):
        path = tmp_path / f"{number}"
        run_until((number, "before"), COUNTED, options(path), batch(path, "one", [rows(300)], None))
        if follows == "again":
            commit(path, batch(path, "two", [rows(100, 200), rows(200)], None))
            expected = list(range(300))
        else:
            commit(path, batch(path, "two", [rows(100, 300)], None if follows == "another" else "w"))
            expected = list(range(0 if number > 1 else 300, 400))  # before the first step, nothing is stored
        assert sorted(stored(path)) == expected, number
        with ts.open(path / "db") as db:
            assert [key for shard in range(3) for key, _ in db.state(shard).scan(b"spark-write/")] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, ENDING + 1))
def test_a_commit_without_a_name_that_has_ended_is_not_known(
    tmp_path: Path, run_until: Callable[..., list[tuple[int]]], number: int
) -> None:
    """A kill during the cleanup steps leaves a complete commit, whose files the next write removes."""
    last = last_before_the_end(tmp_path / "counted", run_until)
    run_until((last + number, "after"), COUNTED, options(tmp_path), batch(tmp_path, "one", [rows(300)], None))
    assert sorted(stored(tmp_path)) == list(range(300))
    commit(tmp_path, batch(tmp_path, "two", [rows(300, 300)], None))
    assert sorted(stored(tmp_path)) == list(range(600))
    assert not (tmp_path / "staging").exists()


LATER = ts.Message("later", b"-1", "c0", timestamp=FIRST + 300_000)
"""A message newer than 600 of the `rows`, which makes those of its own shard late."""


def interrupt(path: Path, run_until: Callable[..., object], writer: str | None = None) -> list[int]:
    """Kill a commit of 900 rows after 150, store `LATER`, and return the numbers of the rows that are late."""
    run_until((3, "after"), COMMIT, options(path), batch(path, "one", [rows(900)], writer))
    there = set(stored(path))
    assert len(there) == 150
    with ts.open(path / "db") as db:
        db.store([LATER])
        shard = db.shard_of(LATER.client_id)
        return [n for n in range(600) if n not in there and db.shard_of(f"c{n % 100}") == shard]


def put_aside(path: Path, write: str = "one") -> list[int]:
    files = sorted((path / "staging" / f"refused-{write}").glob("*.parquet"))
    return [int(payload) for file in files for payload in pq.read_table(file)["payload"].to_pylist()]


@pytest.fixture
def umask() -> Iterator[None]:
    """Set the usual umask, 022."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def permissions(*paths: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [None, 0o700, 0o750, 0o755], ids=str)
def test_what_is_staged_has_the_permissions_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    """Staged files have the database's permissions, even before its creation; an existing directory keeps its own."""
    monkeypatch.setattr(TaskContext, "get", lambda: Mock(partitionId=lambda: 0))
    if mode is not None:
        ts.open(tmp_path / "db", permissions=mode, shards=3, timestamps="message").close()
    settings = WriteSettings.of(options(tmp_path), overwrite=False)
    staging, expected = tmp_path / "staging", mode or 0o700
    for there in (False, True):
        writer = TopicstoreWriter(settings)
        message = writer.write(iter([rows(100, 100 * there)]))
        (write,) = staging.iterdir()
        (attempt,) = write.iterdir()
        assert [0o777 if there else expected, expected, expected] == permissions(staging, write, attempt)
        writer.commit([message])
        assert not staging.exists()
        staging.mkdir()
        staging.chmod(0o777)
    staging.rmdir()
    write_commit(staging, promotion.Batch(writer=None, number=0, write="without-rows", shards=3), expected)
    assert [expected, expected] == permissions(staging, staging / "without-rows")


@pytest.mark.usefixtures("umask")
def test_what_is_put_aside_has_the_permissions_of_the_database(
    tmp_path: Path, run_until: Callable[..., object]
) -> None:
    interrupt(tmp_path, run_until)
    with pytest.warns(RuntimeWarning, match="LateMessageError"):
        commit(tmp_path, batch(tmp_path, "two", [rows(10, 20_000)], None))
    assert [0o700, 0o700] == permissions(tmp_path / "staging", tmp_path / "staging" / "refused-one")


@pytest.mark.parametrize("writer", [None, "another"])
def test_late_rows_do_not_hold_up_other_writes(
    tmp_path: Path, run_until: Callable[..., object], writer: str | None
) -> None:
    """Rows that are older than the messages stored meanwhile are put aside with a warning; all others are stored."""
    late = interrupt(tmp_path, run_until)
    with pytest.warns(RuntimeWarning, match=rf"{len(late)} rows .*LateMessageError.*staging/refused-one") as told:
        commit(tmp_path, batch(tmp_path, "two", [rows(10, 20_000)], writer))
    assert __file__ in {each.filename for each in told}
    commit(tmp_path, batch(tmp_path, "three", [rows(10, 20_010)], writer, 8))
    assert sorted(put_aside(tmp_path)) == late
    expected = [-1, *(n for n in range(900) if n not in set(late)), *range(20_000, 20_020)]
    assert sorted(stored(tmp_path)) == expected
    assert [entry.name for entry in (tmp_path / "staging").iterdir()] == ["refused-one"]
    [table] = [pq.read_table(file) for file in (tmp_path / "staging" / "refused-one").iterdir()]
    with ts.open(tmp_path / "db") as db:  # stored without a timestamp, these rows are not late
        db.store(table.drop_columns("timestamp").combine_chunks().to_batches()[0])
    assert sorted(stored(tmp_path)) == sorted([*expected, *late])


def test_a_write_whose_own_rows_became_late_is_refused(tmp_path: Path, run_until: Callable[..., object]) -> None:
    """Repeating an interrupted write of which some rows became late raises an error that names these rows.

    Later repetitions are refused as late and store nothing.
    """
    late = interrupt(tmp_path, run_until)
    with pytest.raises(ts.InvalidMessageError, match=rf"{len(late)} rows .*LateMessageError.*staging/refused-one"):
        commit(tmp_path, batch(tmp_path, "two", [rows(900)], None))
    for write in ("three", "four"):
        with pytest.raises(ts.LateMessageError):
            commit(tmp_path, batch(tmp_path, write, [rows(900)], None))
    assert sorted(put_aside(tmp_path)) == late
    assert sorted(stored(tmp_path)) == [-1, *(n for n in range(900) if n not in set(late))]


@pytest.mark.parametrize("late", ["lift", "raise"])
@pytest.mark.parametrize("writer", [None, "another"])
def test_a_write_that_another_has_finished_is_known_when_it_comes_again(
    tmp_path: Path, run_until: Callable[..., object], late: str, writer: str | None
) -> None:
    """A write that another process completed is recognized when it is repeated, even after several other writes.

    It isn't stored again. After that, the same rows count as a new write.
    """
    run_until((3, "after"), COMMIT, options(tmp_path, late=late), batch(tmp_path, "one", [rows(900)], None))
    assert len(stored(tmp_path)) == 150
    for number in range(3):
        commit(tmp_path, batch(tmp_path, f"other-{number}", [rows(10, 900 + 10 * number)], writer, number))
    commit(tmp_path, batch(tmp_path, "two", [rows(300, n * 300) for n in (2, 0, 1)], None))
    assert sorted(stored(tmp_path)) == list(range(930))
    assert not (tmp_path / "staging").exists()
    again = batch(tmp_path, "three", [rows(900)], None)
    with pytest.raises(ts.LateMessageError) if late == "raise" else nullcontext():
        commit(tmp_path, again)


def test_a_finished_write_reports_what_was_put_aside(tmp_path: Path, run_until: Callable[..., object]) -> None:
    """If a write was completed by another process, repeating it reports the rows that were put aside."""
    late = interrupt(tmp_path, run_until)
    with pytest.warns(RuntimeWarning, match="LateMessageError"):
        commit(tmp_path, batch(tmp_path, "two", [rows(10, 20_000)], None))
    there = stored(tmp_path)
    with pytest.raises(ts.InvalidMessageError, match=rf"{len(late)} rows .*staging/refused-one"):
        commit(tmp_path, batch(tmp_path, "three", [rows(900)], None))
    assert stored(tmp_path) == there


def test_a_relative_staging_directory_is_one_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative staging directory is relative to the writer's working directory, even if another process commits."""
    monkeypatch.chdir(tmp_path)
    for name in ("staging", "file:staging"):
        assert WriteSettings.of({"path": "db", "staging": name}, overwrite=False).staging == str(tmp_path / "staging")


FINISHING = """
import shutil, warnings
from pathlib import Path
from topicstore.spark import promotion
from topicstore.spark.commit import promote
from topicstore.spark.options import WriteSettings

def finish(self, _finish=promotion.CommitJob.finish):
    counts(RocksdbEngine, "write")
    counts(Path, "replace")
    counts(Path, "rename")
    _finish(self)

warnings.simplefilter("ignore")
promotion._ROWS = 100
promotion.CommitJob.finish = finish
options, batch = arguments
promote(WriteSettings.of(options, overwrite=False), promotion.Batch(**batch))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 14))
def test_kills_while_a_commit_is_completed(tmp_path: Path, run_until: Callable[..., object], number: int) -> None:
    """After a kill at any step of completing a commit, each row is stored or put aside, exactly once."""
    interrupt(tmp_path, run_until)
    run_until((number, "before"), FINISHING, options(tmp_path), batch(tmp_path, "two", [rows(0)], None))
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("later", b"-2", "c0", timestamp=FIRST + 500_000)])
    with pytest.warns(RuntimeWarning, match="refused-one"):
        commit(tmp_path, batch(tmp_path, "three", [rows(10, 30_000)], None))
    assert sorted([*stored(tmp_path), *put_aside(tmp_path)]) == [-2, -1, *range(900), *range(30_000, 30_010)]


@pytest.mark.filterwarnings("ignore:.*in the future:UserWarning")
def test_rows_ahead_of_a_clock_that_was_put_back_hold_up_no_write(
    tmp_path: Path, run_until: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are ahead of a clock that was set back are also put aside."""
    run_until((3, "after"), COMMIT, options(tmp_path), batch(tmp_path, "one", [rows(900)], None))
    there = stored(tmp_path)
    early = functools.partial(ts.open, clock=lambda: FIRST - 3_600_000_000)
    monkeypatch.setattr("topicstore.spark.commit.open", early)
    with pytest.warns(RuntimeWarning, match=r"750 rows .*TimestampAheadError.*refused-one"):
        commit(tmp_path, batch(tmp_path, "two", [rows(0)], None))
    assert sorted([*there, *put_aside(tmp_path)]) == list(range(900))


@pytest.mark.parametrize("late", [False, True])
def test_the_next_batch_of_a_writer_finishes_the_one_before(
    tmp_path: Path, run_until: Callable[..., object], late: bool
) -> None:
    """The next batch of a writer completes the previous batch, and a repetition of the previous batch is recognized."""
    expected = list(range(900))
    if late:
        interrupt(tmp_path, run_until, "w")
        expected = [-1, *expected]
    else:
        run_until((3, "after"), COMMIT, options(tmp_path), batch(tmp_path, "one", [rows(900)]))
    with pytest.warns(RuntimeWarning, match="refused-one") if late else nullcontext():
        commit(tmp_path, batch(tmp_path, "two", [rows(10, 900)], number=8))
    commit(tmp_path, batch(tmp_path, "three", [rows(900)]))
    assert sorted([*stored(tmp_path), *put_aside(tmp_path)]) == [*expected, *range(900, 910)]


@pytest.mark.parametrize("fault", ["gone", "attempt gone", "garbled"])
def test_staged_rows_that_can_not_be_read_hold_up_no_write(
    tmp_path: Path, run_until: Callable[..., object], fault: str
) -> None:
    """Staged rows that can't be read don't prevent later writes; their directory is kept under another name."""
    run_until((3, "after"), COMMIT, options(tmp_path), batch(tmp_path, "one", [rows(900)], None))
    [attempt] = (path for path in (tmp_path / "staging" / "one").iterdir() if path.is_dir())
    if fault == "gone":
        shutil.rmtree(tmp_path / "staging")
    elif fault == "attempt gone":
        shutil.rmtree(attempt)
    else:
        (attempt / "shard-0001.arrow").write_bytes(b"no Arrow")
    with pytest.warns(RuntimeWarning, match="staging/one, is gone or damaged") as told:
        commit(tmp_path, batch(tmp_path, "two", [rows(10, 20_000)]))
    assert __file__ in {each.filename for each in told}
    commit(tmp_path, batch(tmp_path, "three", [rows(10, 20_010)], number=8))
    assert len(stored(tmp_path)) == 170
    assert (tmp_path / "staging" / "unreadable-one").exists() == (fault != "gone")


def test_what_the_disk_has_no_room_for_waits(tmp_path: Path, run_until: Callable[..., object]) -> None:
    """If the disk is full, the error says whose rows wait and how to discard them; with free space they are stored."""
    run_until((3, "after"), COMMIT, options(tmp_path), batch(tmp_path, "one", [rows(900)], None))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ts.Database, "store", Mock(side_effect=ts.StorageFullError("no room")))
        with pytest.raises(ts.StorageFullError) as told:
            commit(tmp_path, batch(tmp_path, "two", [rows(10, 900)], None))
    assert f"remove {tmp_path / 'staging' / 'one'}" in told.value.__notes__[0]
    commit(tmp_path, batch(tmp_path, "three", [rows(10, 900)], None))
    assert sorted(stored(tmp_path)) == list(range(910))


# --- two writes -------------------------------------------------------------------------


def test_testing_the_lock_does_not_stop_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that tests the lock during another commit doesn't make that commit fail; one waits for the other."""
    commit(tmp_path, batch(tmp_path, "one", [rows(10)]))
    staged = batch(tmp_path, "two", [rows(10, 10)], number=8)
    arrived, failures = threading.Event(), []

    def commits() -> None:
        try:
            commit(tmp_path, staged)
        except ts.DatabaseLockedError as failure:
            failures.append(failure)
        finally:
            arrived.set()

    other = threading.Thread(target=commits)
    flock = fcntl.flock

    def arriving(file: int, operation: int) -> None:
        if threading.current_thread() is other:
            arrived.set()
        flock(file, operation)

    class Looking(DirectoryLock):
        def release(self) -> None:
            monkeypatch.setattr(fcntl, "flock", arriving)
            other.start()
            arrived.wait()
            monkeypatch.setattr(fcntl, "flock", flock)
            super().release()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("topicstore.spark.commit.DirectoryLock", Looking)
        assert check_unlocked(WriteSettings.of(options(tmp_path), overwrite=False)) == 3
    other.join()
    assert failures == []
    assert sorted(stored(tmp_path)) == list(range(20))


# --- failures ---------------------------------------------------------------------------


def test_a_commit_that_fails_half_way_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure in the middle of a commit, such as a full disk, the same rows are stored once."""
    monkeypatch.setattr(promotion, "_ROWS", 50)
    monkeypatch.setattr(promotion, "_LEAST_ROWS", 50)
    original, calls = promotion.CommitJob._store_parts, iter([True])

    def once(self: Any, *arguments: Any) -> None:
        if next(calls, None) is None:
            raise ts.StorageFullError("no room")
        original(self, *arguments)

    monkeypatch.setattr(promotion.CommitJob, "_store_parts", once)
    with pytest.raises(ts.StorageFullError):
        commit(tmp_path, batch(tmp_path, "one", [rows(900)], None))
    assert 0 < len(stored(tmp_path)) < 900
    monkeypatch.setattr(promotion.CommitJob, "_store_parts", original)
    commit(tmp_path, batch(tmp_path, "two", [rows(900)], None))
    assert sorted(stored(tmp_path)) == list(range(900))
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize("change", ["order", "payload", "twice", "none"])
def test_the_same_rows_are_known_in_any_order(tmp_path: Path, change: str) -> None:
    """Digests recognize the same rows in any order, and differ for other values or counts."""
    before = rows(1000)
    after = before.take(pa.array(np.random.default_rng(2).permutation(1000)))
    if change == "payload":
        after = pa.concat_batches([after[:999], rows(1, 5_000)])
    elif change == "twice":
        after = pa.concat_batches([after[:999], after[:1]])
    one = [tmp_path / stage([before], tmp_path, 2, MODE)]
    other = [tmp_path / stage([part], tmp_path, 2, MODE) for part in (after[:300], after[300:])]
    seen = [(row_counts(some, 2), row_digests(some, 2)) for some in (one, [] if change == "none" else other)]
    assert (seen[0] == seen[1]) == (change == "order")


def test_a_part_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """If staged rows of a begun commit are gone, the next attempt raises an `EngineError`."""
    commit(tmp_path, batch(tmp_path, "one", [rows(10)]))
    begun = batch(tmp_path, "two", [rows(100, 10)], number=8)
    with ts.open(tmp_path / "db") as db:
        unfinished = promotion.CommitJob(db, tmp_path / "staging", promotion.Batch(**begun))  # type: ignore[arg-type]
        db.state(1).write([unfinished._noted(5)])
    shutil.rmtree(tmp_path / "staging")
    with pytest.raises(ts.EngineError, match="gone"):
        commit(tmp_path, batch(tmp_path, "three", [rows(100, 10)], number=8))


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    """Refused writes leave nothing, stored or staged: late rows, a locked database, another number of shards."""
    commit(tmp_path, batch(tmp_path, "one", [rows(100)]))
    with pytest.raises(ts.LateMessageError):
        commit(tmp_path, batch(tmp_path, "two", [rows(100)], number=8))
    with ts.open(tmp_path / "db"), pytest.raises(ts.DatabaseLockedError):
        commit(tmp_path, batch(tmp_path, "three", [rows(100, 100)], number=8))
    other = {**batch(tmp_path, "four", [rows(100, 100)], number=8), "shards": 2}
    with pytest.raises(ts.ManifestMismatchError):
        commit(tmp_path, other)
    assert sorted(stored(tmp_path)) == list(range(100))
    assert not (tmp_path / "staging").exists()
    commit(tmp_path, batch(tmp_path, "five", [rows(100, 100)], number=8))
    assert sorted(stored(tmp_path)) == list(range(200))
