"""Staged attempts and their commit: order, and exactly once whatever ends it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason='needs pyspark: pip install "topicstore[spark]"')

from topicstore.spark import commit as promotion
from topicstore.spark.settings import WriteSettings
from topicstore.spark.staging import in_order, runs_of, same_rows, stage

FIRST = 1_700_000_000_000_000
COMMIT = """
from topicstore.spark import commit as promotion
from topicstore.spark.settings import WriteSettings

def store(self, runs, _store=promotion._Promotion._store):
    counts(RocksdbEngine, "write")
    _store(self, runs)

promotion._ROWS = promotion._LEAST_ROWS = 50
promotion._Promotion._store = store
options, batch = arguments
promotion.promote(WriteSettings.of(options, overwrite=False), promotion.Batch(**batch))
"""
"""Stores fifty rows of a shard at a time, and counts the engines' writes from the first that has rows."""


def rows(count: int, first: int = 0) -> pa.RecordBatch:
    """Of a hundred publishers, two a millisecond."""
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
    """Stage the parts as attempts of one write."""
    attempts = [stage([part], path / "staging" / write, 3) for part in parts]
    return {"writer": writer, "number": number, "write": write, "shards": 3, "attempts": attempts}


def commit(path: Path, staged: dict[str, object]) -> None:
    promotion.promote(WriteSettings.of(options(path), overwrite=False), promotion.Batch(**staged))  # type: ignore[arg-type]


def last_if_none(time: int | None) -> tuple[bool, int]:
    return time is None, time or 0


def stored(path: Path) -> list[int]:
    with ts.open(path / "db", read_only=True) as db:
        return [int(message.payload) for message in db.replay("#", order="time")]


# --- order ------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=30), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_merged_as_one_stable_sort_would(runs: list[list[int | None]], size: int) -> None:
    """By timestamp, without one last, equal ones by run and place; no batch larger than asked for."""
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
    """A task's rows, in any order and in many batches, lie in each shard's file in order of time."""
    shuffled = rows(1000).take(pa.array(np.random.default_rng(1).permutation(1000)))
    attempt = stage([shuffled[start : start + 90] for start in range(0, 1000, 90)], tmp_path, 3)
    found = []
    for shard in range(3):
        for run in runs_of([tmp_path / attempt], shard):
            times = run.column("timestamp").cast(pa.int64()).to_pylist()
            assert times == sorted(times)
            found += [int(payload) for payload in run.column("payload").to_pylist()]
    assert sorted(found) == list(range(1000))


# --- once -------------------------------------------------------------------------------


def test_only_attempts_that_were_taken_count(tmp_path: Path) -> None:
    """What else lies in the write's directory, of a try that failed or came second, is not stored."""
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
    """The same rows come again, staged anew in another order: each is there once, whether or not the writer has a name.

    The kill comes within the first call, which stores rows of three shards; after it; and within a later one.
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
"""Counts the steps that end a commit, too."""
ENDING = 6
"""Steps by which a commit without a name ends: the new name of its rows' directory, a note of each shard that goes, the
removal, and the look whether anything is left."""


def last_before_the_end(path: Path, run_until: Callable[..., list[tuple[int]]]) -> int:
    """Return the number of the step in a commit of 300 rows with which it is complete; then it ends."""
    staged = batch(path, "all", [rows(300)], None)
    [(steps,)] = run_until(None, f"{COUNTED}\nsay(len(steps))", options(path), staged)
    return steps - ENDING


@pytest.mark.slow
@pytest.mark.parametrize("follows", ["again", "another", "named"])
def test_wherever_a_commit_without_a_name_is_killed(
    tmp_path: Path, run_until: Callable[..., list[tuple[int]]], follows: str
) -> None:
    """At any step until it ends: what follows finishes it, and each row is there once."""
    last = last_before_the_end(tmp_path / "counted", run_until)
    for number in range(1, last + 2):
        path = tmp_path / f"{number}"
        run_until((number, "before"), COUNTED, options(path), batch(path, "one", [rows(300)], None))
        if follows == "again":
            commit(path, batch(path, "two", [rows(100, 200), rows(200)], None))
            expected = list(range(300))
        else:
            commit(path, batch(path, "two", [rows(100, 300)], None if follows == "another" else "w"))
            expected = list(range(0 if number > 1 else 300, 400))  # before the first step nothing has begun
        assert sorted(stored(path)) == expected, number
        with ts.open(path / "db") as db:
            assert [key for shard in range(3) for key, _ in db.state(shard).scan(b"spark-write/")] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, ENDING + 1))
def test_a_commit_without_a_name_that_has_ended_is_not_known(
    tmp_path: Path, run_until: Callable[..., list[tuple[int]]], number: int
) -> None:
    """Killed while it tidies up: the next write is another one, and tidies up the rest."""
    last = last_before_the_end(tmp_path / "counted", run_until)
    run_until((last + number, "after"), COUNTED, options(tmp_path), batch(tmp_path, "one", [rows(300)], None))
    assert sorted(stored(tmp_path)) == list(range(300))
    commit(tmp_path, batch(tmp_path, "two", [rows(300, 300)], None))
    assert sorted(stored(tmp_path)) == list(range(600))
    assert not (tmp_path / "staging").exists()


def test_what_an_interrupted_commit_left_can_be_given_up(tmp_path: Path, run_until: Callable[..., object]) -> None:
    """Where somebody stored later rows meanwhile, the rest is late, which is told until it is removed."""
    staged = batch(tmp_path, "one", [rows(900)], None)
    run_until((3, "after"), COMMIT, options(tmp_path), staged)
    with ts.open(tmp_path / "db") as db:
        db.store(rows(100, 10_000))
    before = len(stored(tmp_path))
    for _ in range(2):
        with pytest.raises(ts.LateMessageError) as late:
            commit(tmp_path, batch(tmp_path, "two", [rows(10, 20_000)]))
        assert str(tmp_path / "staging" / "one") in late.value.__notes__[0]
    shutil.rmtree(tmp_path / "staging")
    with pytest.warns(RuntimeWarning, match="in part"):
        commit(tmp_path, batch(tmp_path, "two", [rows(10, 20_000)]))
    assert len(stored(tmp_path)) == before + 10


def test_a_commit_that_fails_half_way_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, say: the same rows come again, and each is there once."""
    monkeypatch.setattr(promotion, "_ROWS", 50)
    monkeypatch.setattr(promotion, "_LEAST_ROWS", 50)
    original, calls = promotion._Promotion._store_parts, iter([True])

    def once(self: Any, *arguments: Any) -> None:
        if next(calls, None) is None:
            raise ts.StorageFullError("no room")
        original(self, *arguments)

    monkeypatch.setattr(promotion._Promotion, "_store_parts", once)
    with pytest.raises(ts.StorageFullError):
        commit(tmp_path, batch(tmp_path, "one", [rows(900)], None))
    assert 0 < len(stored(tmp_path)) < 900
    monkeypatch.setattr(promotion._Promotion, "_store_parts", original)
    commit(tmp_path, batch(tmp_path, "two", [rows(900)], None))
    assert sorted(stored(tmp_path)) == list(range(900))
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize("change", ["order", "payload", "twice", "none"])
def test_the_same_rows_are_known_in_any_order(tmp_path: Path, change: str) -> None:
    """Each as often; not if anything else is in one of them."""
    before = rows(1000)
    after = before.take(pa.array(np.random.default_rng(2).permutation(1000)))
    if change == "payload":
        after = pa.concat_batches([after[:999], rows(1, 5_000)])
    elif change == "twice":
        after = pa.concat_batches([after[:999], after[:1]])
    one = [tmp_path / stage([before], tmp_path, 2)]
    other = [tmp_path / stage([part], tmp_path, 2) for part in (after[:300], after[300:])]
    same = all(same_rows(one, [] if change == "none" else other, shard) for shard in range(2))
    assert same == (change == "order")


def test_a_part_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """Rows that were staged for a commit that had begun can't be made up for: EngineError, not silence."""
    commit(tmp_path, batch(tmp_path, "one", [rows(10)]))
    begun = batch(tmp_path, "two", [rows(100, 10)], number=8)
    with ts.open(tmp_path / "db") as db:
        unfinished = promotion._Promotion(db, tmp_path / "staging", promotion.Batch(**begun))  # type: ignore[arg-type]
        db.state(1).write([unfinished._noted(5)])
    shutil.rmtree(tmp_path / "staging")
    with pytest.raises(ts.EngineError, match="gone"):
        commit(tmp_path, batch(tmp_path, "three", [rows(100, 10)], number=8))


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    """Late rows, a locked database, another number of shards: nothing stored, nothing staged."""
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
