"""Compaction in the background, where some of it fails."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore import background
from topicstore.storage import compaction
from topicstore_conformance.faults.threads import wait_until


def test_a_shard_that_fails_keeps_none_from_being_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is shown until another try, which nobody has to wake the thread for, succeeds."""
    monkeypatch.setattr(compaction, "QUIET", 0.001)
    monkeypatch.setattr(background, "_FIRST_RETRY", 0.001)
    with ts.open(tmp_path / "db", backend="memory", shards=3) as db:
        scheduler, shards = db._compaction, db.storage.shards
        assert scheduler is not None
        with (
            patch.object(shards[0], "compact", side_effect=ts.CorruptionError("damaged")),
            patch.object(shards[1], "compact", return_value=0),
            patch.object(shards[2], "compact", return_value=0) as last,
        ):
            scheduler.task.wake()
            wait_until(lambda: last.call_count >= 3, "it to be tried again")
            assert db.info().compaction_failure == "damaged"
        wait_until(lambda: db.info().compaction_failure is None, "it to go on")


def test_compaction_rests_while_messages_are_read_or_delivered(tmp_path: Path) -> None:
    """After a step during which someone read or a session delivered it rests; otherwise it goes on at once."""
    rests: list[float] = []
    with ts.open(tmp_path / "db", backend="memory") as db:
        scheduler = db._compaction
        assert scheduler is not None
        shard = db.storage.shards[0]
        session = db.sessions.open("c")
        session.subscribe("a/#")
        db.publish([ts.Message("a/b", b"x")])
        seen = scheduler._stored
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
            assert scheduler._must_pause(shard, seen)  # it waits for a quiet moment


def test_compaction_ends_when_it_is_told(tmp_path: Path) -> None:
    """Then nothing more is merged; what is stored stays, and another call does the rest."""
    with ts.open(tmp_path / "db", backend="memory", auto_compact=False) as db:
        for number in range(20):
            db.store([ts.Message(f"a/{number % 3}", b"x")])
        assert 0 == db.compact(stop=lambda: True).messages
        assert 20 == len(list(db.replay("#")))
        assert 20 == db.compact().messages
