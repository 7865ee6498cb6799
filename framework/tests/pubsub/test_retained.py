"""Retained messages: the keys that a look-up reads, and the automatic removal of expired messages.

`DatabasePartsSuite` covers setting, replacing and clearing them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.errors import EngineError
from topicstore.pubsub.retained import remove_expired
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.keyed_messages import state_key
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import wait_until

SECOND = 1_000_000
DAY = 24 * 3_600 * SECOND


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "rocksdb"])
def db(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", backend=request.param, shards=3, clock=clock) as opened:
        yield opened


def retain(topic: str, payload: bytes = b"x", expiry: int | None = None, client_id: str = "") -> ts.Message:
    properties = None if expiry is None else ts.Properties(message_expiry_interval=expiry)
    return ts.Message(topic, payload, client_id, retain=True, properties=properties)


def found(db: ts.Database, topic_filter: str = "#") -> list[tuple[str, bytes]]:
    return [(message.topic, message.payload) for message in db.retained(topic_filter)]


# --- looking up ---


def test_only_topics_that_begin_as_the_filter_are_read(db: ts.Database) -> None:
    """A look-up reads only topics with the filter's literal prefix, so damaged messages elsewhere don't matter."""
    names = ["a", "a/1", "a/1/x", "a-b/1", "b/1", "c"]
    db.publish([retain(name) for name in names])
    for name in ("a-b/1", "b/1", "c"):
        db.state(db.shard_of(name)).write([FrameworkWrite(state_key(b"r" + name.encode()), b"damaged")])
    assert ["a", "a/1", "a/1/x"] == [topic for topic, _ in found(db, "a/#")]
    assert ["a/1"] == [topic for topic, _ in found(db, "a/+")]
    assert ["a/1/x"] == [topic for topic, _ in found(db, "a/1/+/#")]
    assert ["a/1"] == [topic for topic, _ in found(db, "a/1")]
    with pytest.raises(ts.CorruptionError):
        found(db, "+/1")


def test_a_bad_filter_is_refused(db: ts.Database) -> None:
    """Looking up retained messages by an invalid filter raises `InvalidFilterError`."""
    with pytest.raises(ts.InvalidFilterError):
        db.retained("a/#/b")


def kept(db: ts.Database) -> list[bytes]:
    return [key for shard in range(3) for key, _ in db.state(shard).scan(state_key(b"r"))]


@pytest.mark.parametrize("reopened", [False, True])
def test_expired_ones_are_removed_when_something_is_stored(tmp_path: Path, clock: Clock, *, reopened: bool) -> None:
    """Storing any message removes expired retained messages, even after a restart.

    Only elapsed time counts: while the wall clock is set forward, none is removed.
    """
    db = ts.open(tmp_path / "db", shards=3, clock=clock, monotonic=clock.monotonic)
    db.publish([retain(f"short/{number}", expiry=60) for number in range(3_000)])
    db.publish([retain("long", expiry=3_600), retain("endless")])
    if not reopened:
        clock.jump(DAY)
        db.store([ts.Message("other", b"")])
        assert [] == db.retained("short/#")
        clock.jump(-DAY)
    assert 3_000 == len(db.retained("short/#"))
    clock.now += 61 * SECOND
    if reopened:
        db.close()
        db = ts.open(tmp_path / "db", clock=clock, monotonic=clock.monotonic)
    db.store([ts.Message("other", b"")])
    wait_until(lambda: len(kept(db)) == 2, "the first ones are removed")
    clock.now += 3_600 * SECOND

    def next_removed() -> bool:
        clock.now += 3 * DAY  # a check that seems to take an hour delays the next one by 50 hours
        db.store([ts.Message("other", b"")])
        return kept(db) == [state_key(b"rendless")]

    with db:
        wait_until(next_removed, "the next one is removed")
        assert db.info().retained_failure is None


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_expired_ones_are_removed_when_nothing_is_stored(tmp_path: Path, backend: str, *, reopened: bool) -> None:
    """Expired retained messages are removed soon after they expire even if nothing is stored.

    The expiry time is known from the publish call, or from a scan after the database was opened.
    """
    need(backend)
    db = ts.open(tmp_path / "db", backend=backend, shards=3)
    db.publish([retain("short", expiry=1), retain("endless")])
    if reopened:
        db.close()
        db = ts.open(tmp_path / "db")
    with db:
        wait_until(lambda: kept(db) == [state_key(b"rendless")], "the first one is removed")


def test_removing_expired_ones_is_tried_again(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing expired messages is retried after an error, which is reported until the retry succeeds.

    Meanwhile `store` succeeds.
    """

    def fail(*_: object) -> None:
        raise EngineError("the disk is gone")

    with ts.open(tmp_path / "db", backend="memory", shards=3, clock=clock) as db:
        db.publish([retain("a", expiry=60)])
        clock.now += 61 * SECOND
        with monkeypatch.context() as patches:
            patches.setattr("topicstore.pubsub.retained_expiry.remove_expired_until", fail)
            db.store([ts.Message("other", b"")])
            wait_until(lambda: db.info().retained_failure == "the disk is gone", "removing fails")
        clock.now += 61 * SECOND
        db.store([ts.Message("other", b"")])
        wait_until(lambda: kept(db) == [] and db.info().retained_failure is None, "it is removed")


def test_one_that_was_replaced_meanwhile_is_not_removed(
    db: ts.Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retained message that is replaced between the check and the removal is not removed."""
    db.publish([retain("a", expiry=3)])
    clock.now += 3 * SECOND
    shard = db.shard_of("a")
    write = db.storage.shards[shard].writer.write_state

    def publish_first(writes: list[ts.StateWrite]) -> None:
        monkeypatch.undo()
        db.publish([retain("a", b"new", expiry=3)])
        write(writes)

    monkeypatch.setattr(db.storage.shards[shard].writer, "write_state", publish_first)
    assert 0 == remove_expired(db.storage, clock.now)
    assert [("a", b"new")] == found(db)
