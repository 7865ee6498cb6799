"""Publishing: what is stored and what only goes by, and that each comes once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.publishing import PERSIST, _chosen
from topicstore.subscriptions.feed import Feed
from topicstore_conformance.clock import START, Clock


class Ear:
    """Notes what goes by."""

    def __init__(self) -> None:
        self.heard: list[ts.Message] = []
        self.woken_by: set[int] = set()

    def woken(self, feed: Feed, shard: int) -> None:
        self.woken_by.add(shard)

    def routed(self, feed: Feed, messages: list[ts.Message]) -> None:
        self.heard += messages

    def closed(self) -> None: ...


class Wants:
    """Durable subscriptions to some topics."""

    def __init__(self, *topics: str) -> None:
        self.topics = topics

    def wants(self, topic: str) -> bool:
        return topic in self.topics


@pytest.fixture(params=["memory", "rocksdb"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", backend=request.param, shards=3, clock=Clock()) as opened:
        yield opened


def asking(value: str = "1") -> ts.Properties:
    return ts.Properties(user_properties=(("other", "1"), (PERSIST, value)))


def stored(db: ts.Database) -> list[bytes]:
    return [message.payload for message in db.replay("#", order="time")]


def test_nobody_asks_nothing_is_stored(db: ts.Database) -> None:
    """It goes to who listens, with a time, and is gone; who listens to something else hears nothing."""
    ears = {text: Ear() for text in ("a/#", "b")}
    for text, ear in ears.items():
        db.hub.feed(ts.TopicFilter(text)).add(ear)
    result = db.publish([ts.Message("a/1", b"1", "me"), ts.Message("a/2", b"2", timestamp=5), ts.Message("c", b"3")])
    assert (3, 0, 3, []) == (result.count, result.stored, result.routed, result.ids)
    assert [] == stored(db)
    assert [("a/1", START), ("a/2", 5)] == [(message.topic, message.timestamp) for message in ears["a/#"].heard]
    assert [] == ears["b"].heard


@pytest.mark.parametrize(("value", "kept"), [("1", True), ("true", True), ("0", False), ("", False), ("TRUE", False)])
def test_a_publisher_may_ask_for_it(db: ts.Database, value: str, kept: bool) -> None:
    """By a user property, message by message."""
    db.publish([ts.Message("a", b"1", properties=asking(value)), ts.Message("a", b"2", properties=ts.Properties())])
    assert [b"1"] * kept == stored(db)
    db.publish([ts.Message("a", b"3", properties=asking(value))] * 2)
    assert [b"1", b"3", b"3"] * kept == stored(db)


def test_a_rule_or_a_durable_subscription_decides(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is stored once, however many reasons there are; the others go by."""
    monkeypatch.setattr(ts.Database, "sessions", Wants("wanted", "both"), raising=False)
    db.persistence.add("ruled")
    db.persistence.add("both")
    db.persistence.add("both", least_qos=0, client_id="me")
    ear = Ear()
    db.hub.feed(ts.TopicFilter("#")).add(ear)
    topics = ["live", "ruled", "wanted", "both", "live", "both"]
    rows = [
        ts.Message(topic, b"%d" % n, "me", properties=asking() if topic == "both" else None)
        for n, topic in enumerate(topics)
    ]
    result = db.publish(rows)
    assert (6, 4, 2, 4) == (result.count, result.stored, result.routed, len(result.ids))
    assert [b"1", b"2", b"3", b"5"] == stored(db)
    assert [b"0", b"4"] == [message.payload for message in ear.heard]
    assert {db.shard_of("me")} == ear.woken_by
    for topic, expected in (("wanted", [True]), ("live", [False])):
        assert expected == _chosen(db, ts.MessageBatch.from_messages([ts.Message(topic, b"")])).tolist()


def test_ids_and_batch_are_of_the_stored_ones(db: ts.Database) -> None:
    """In the order handed in, over all shards."""
    db.persistence.add("s")
    rows = [ts.Message("s" if n % 2 else "l", b"%d" % n, f"client {n}") for n in range(20)]
    result = db.publish(rows)
    assert [b"%d" % n for n in range(1, 20, 2)] == [message.payload for message in result.batch.to_messages()]
    assert [db.shard_of(f"client {n}") for n in range(1, 20, 2)] == [one.shard for one in result.ids]


def test_state_commits_in_any_case(db: ts.Database) -> None:
    """With what is stored, with what is retained or cleared, and where everything only goes by."""
    db.persistence.add("s")
    shard = db.shard_of("r")
    for n, row in enumerate(
        [
            ts.Message("s", b"1"),
            ts.Message("l", b"1"),
            ts.Message("r", b"1", retain=True),
            ts.Message("r", b"", retain=True),
        ]
    ):
        db.publish([row], state={shard: [ts.StateWrite(b"z", b"%d" % n)]})
        assert b"%d" % n == db.state(shard).get(b"z")
    db.publish([], state={shard: [ts.StateWrite(b"z", None)]})
    assert (None, []) == (db.state(shard).get(b"z"), db.retained("#"))


def test_what_fails_is_neither_stored_nor_retained_nor_handed_on(db: ts.Database) -> None:
    """A bad message, or a condition that doesn't hold, keeps the whole batch back."""
    db.persistence.add("s")
    ear = Ear()
    db.hub.feed(ts.TopicFilter("#")).add(ear)
    rows = [ts.Message("l", b"1", retain=True), ts.Message("s", b"2")]
    with pytest.raises(ts.InvalidMessageError) as refused:
        db.publish([*rows, ts.Message("+", b"")])
    assert 2 == refused.value.index
    with pytest.raises(ts.StateConflictError):
        db.publish(rows, state={0: [ts.StateWrite(b"z", b"1", expect=b"other")]})
    assert ([], [], []) == (ear.heard, stored(db), db.retained("#"))


def test_what_only_goes_by_costs_no_engine_write(db: ts.Database) -> None:
    """Nothing is committed for it."""
    before = [shard.counters.batches for shard in db.shards]
    db.publish([ts.Message("l", b"1", f"client {n}") for n in range(10)])
    assert before == [shard.counters.batches for shard in db.shards]
