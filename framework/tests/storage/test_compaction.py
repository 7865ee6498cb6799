"""Background compaction: the parts that it merges, when it pauses and ends, and how failures are reported."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.engine import DATA
from topicstore.runtime import background
from topicstore.storage import maintenance as compaction
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.subjects.pairs import pair_of, small_options


def test_a_shard_that_fails_keeps_none_from_being_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a shard's compaction fails, other shards are compacted; `info` shows the failure until a retry succeeds."""
    monkeypatch.setattr(compaction, "QUIET", 0.001)
    monkeypatch.setattr(background, "_FIRST_RETRY", 0.001)
    with ts.open(tmp_path / "db", backend="memory", shards=3) as db:
        scheduler, shards = db._compaction, db.storage.shards
        assert scheduler is not None
        with (
            patch.object(shards[0].rewriter, "compact", side_effect=ts.CorruptionError("damaged")),
            patch.object(shards[1].rewriter, "compact", return_value=0),
            patch.object(shards[2].rewriter, "compact", return_value=0) as last,
        ):
            scheduler.task.wake()
            wait_until(lambda: last.call_count >= 3, "it to be tried again")
            assert db.info().compaction_failure == "damaged"
        wait_until(lambda: db.info().compaction_failure is None, "it to go on")


def test_compaction_rests_while_messages_are_read_or_delivered(tmp_path: Path) -> None:
    """Compaction pauses after a step if messages were read or delivered meanwhile, and continues at once otherwise."""
    rests: list[float] = []
    with ts.open(tmp_path / "db", backend="memory") as db:
        scheduler = db._compaction
        assert scheduler is not None
        shard = db.storage.shards[0]
        session = db.sessions.open("c")
        session.subscribe("a/#")
        db.publish([ts.Message("a/b", b"x")])
        seen = db.storage.jobs.messages
        with patch.object(scheduler.task.stopping, "wait", side_effect=rests.append):
            scheduler._begin()
            assert not scheduler._must_pause(shard, seen)
            assert not rests
            list(db.replay("#"))
            assert not scheduler._must_pause(shard, seen)
            assert len(rests) == 1
            assert session.deliver()
            assert not scheduler._must_pause(shard, seen)
            assert len(rests) == 2
            assert not scheduler._must_pause(shard, seen)
            assert len(rests) == 2
            db.publish([ts.Message("a/b", b"x")])
            assert scheduler._must_pause(shard, seen)  # a new message makes compaction pause again


def test_compaction_ends_when_it_is_stopped(tmp_path: Path) -> None:
    """`stop` ends a compaction; all messages stay, and another call compacts the rest."""
    with ts.open(tmp_path / "db", backend="memory", auto_compact=False) as db:
        for number in range(20):
            db.store([ts.Message(f"a/{number % 3}", b"x")])
        assert 0 == db.compact(stop=lambda: True).messages
        assert 20 == len(list(db.replay("#")))
        assert 20 == db.compact().messages


# --- a whole database ---

ENOUGH = 70_000
"""The number of messages after which the background compacts."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path for a database on RocksDB."""
    need("rocksdb")
    return tmp_path / "db"


def opened(path: Path, *, auto_compact: bool) -> ts.Database:
    return ts.open(path, options={"block": small_options("block")}, auto_compact=auto_compact)


def fill(db: ts.Database, count: int = ENOUGH) -> None:
    """Store many messages in batches of 2,000."""
    for first in range(0, count, 2_000):
        db.store([ts.Message(f"t/{n % 50}/x", b"%d" % n, f"c{n % 3}") for n in range(first, min(first + 2_000, count))])


def merges(db: ts.Database) -> bool:
    """Return whether a compaction would find anything to merge."""
    return pair_of("rocksdb", "block").merges(db)


def has_compacted(db: ts.Database, count: int) -> bool:
    """Return whether nothing is left to compact, and at least this many messages were compacted."""
    return not merges(db) and db.info().total.compacted >= count


def test_the_background_compacts(path: Path) -> None:
    """Background compaction starts on its own when much data is stored, and includes data of earlier runs."""
    with opened(path, auto_compact=False) as db:
        fill(db)
        assert 0 == db.info().total.compacted
    with ts.open(path) as db:
        wait_until(lambda: has_compacted(db, ENOUGH), "the background to compact everything")
        assert [b"%d" % n for n in range(7, ENOUGH, 50)] == [message.payload for message in db.replay("t/7/x")]
        fill(db)
        wait_until(lambda: has_compacted(db, 2 * ENOUGH), "the background to compact everything")
        assert (2 * ENOUGH, []) == ((report := db.verify()).messages, report.damages)
        assert db.info().compaction_failure is None


@pytest.mark.parametrize("begun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_close_beside_the_background(path: Path, begun: bool) -> None:
    """Closing waits at most for the compaction's current step, leaves no thread running, and loses nothing."""
    count, threads = 3 * ENOUGH if begun else ENOUGH, threading.active_count()
    db = opened(path, auto_compact=True)
    shard = db.storage.shards[0]
    compact = shard.rewriter.compact

    def held(*, whole: bool, stop: Callable[[], bool]) -> int:
        wait_until(stop, "an end of the background's compaction")
        return compact(whole=whole, stop=stop)

    if not begun:
        shard.rewriter.compact = held  # type: ignore[method-assign, assignment]
    fill(db, count)
    if begun:
        wait_until(lambda: shard.writer.counters.compacted, "the background to compact something")
    db.close()
    wait_until(lambda: threading.active_count() <= threads, "the background's threads to end")
    with opened(path, auto_compact=False) as db:
        assert begun or merges(db)
        assert (count, []) == ((report := db.verify()).messages, report.damages)


def test_a_failure_in_the_background_is_shown(path: Path) -> None:
    """A damaged message makes background compaction fail with a warning; other messages can be stored and read.

    `info` shows the failure.
    """
    with opened(path, auto_compact=True) as db:
        db.store([ts.Message("first", b"")])
        engine = db.storage.shards[0].writer.open_engine()
        (key, value), *_ = next(engine.scan(DATA, limit=1))
        put(engine, DATA, {key: value[:-1] + bytes((value[-1] ^ 1,))})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fill(db)
            failed = "background compaction failed"  # counting messages reads the damaged one, too, and also warns
            wait_until(lambda: any(failed in str(one.message) for one in told), "the failure to be told")
        assert "shard 0" in str(db.info().compaction_failure)
        with pytest.raises(ts.CorruptionError):
            db.compact()
        later = db.store([ts.Message("later", b"1")]).ids
        assert later == [id_ for id_, _ in replayed(db, "later", later[0].position >> 11)]
        put(engine, DATA, {key: value})
        db.compact()  # background compaction may run at the same time
        assert (ENOUGH + 2, []) == ((report := db.verify()).messages, report.damages)
