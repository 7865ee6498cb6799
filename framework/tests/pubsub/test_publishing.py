"""Publishing: what is stored and what only goes by, and that each comes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.publishing import PERSIST
from topicstore_conformance.conditions.profiles import COSTLY, tries
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import together


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
        db._hub.listen(db._hub.feed(ts.TopicFilter(text)), ear)
    result = db.publish([ts.Message("a/1", b"1", "me"), ts.Message("a/2", b"2", timestamp=5), ts.Message("c", b"3")])
    assert (3, 0, 3, []) == (result.count, result.stored, result.routed, result.ids)
    assert [] == stored(db)
    assert [("a/1", START), ("a/2", 5)] == [(message.topic, message.timestamp) for message in ears["a/#"].heard]
    assert [] == ears["b"].heard


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
    db._hub.listen(db._hub.feed(ts.TopicFilter("#")), ear)
    rows = [ts.Message("l", b"1", retain=True), ts.Message("s", b"2")]
    with pytest.raises(ts.InvalidMessageError) as refused:
        db.publish([*rows, ts.Message("+", b"")])
    assert 2 == refused.value.index
    with pytest.raises(ts.StateConflictError):
        db.publish(rows, state={0: [ts.StateWrite(b"z", b"1", expect=b"other")]})
    assert ([], [], []) == (ear.heard, stored(db), db.retained("#"))


def test_what_only_goes_by_costs_no_engine_write(db: ts.Database) -> None:
    """Nothing is committed for it."""
    before = [shard.counters.batches for shard in db.storage.shards]
    db.publish([ts.Message("l", b"1", f"client {n}") for n in range(10)])
    assert before == [shard.counters.batches for shard in db.storage.shards]


def test_a_closed_database_takes_nothing(tmp_path: Path) -> None:
    """Also what would only go by."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.publish([ts.Message("l", b"1")])
    with pytest.raises(ts.DatabaseClosedError):
        db.publish([ts.Message("l", b"1")])
    with pytest.raises(ts.DatabaseClosedError):
        db.retained("#")


ROWS = st.builds(
    ts.Message,
    st.sampled_from(["ruled", "wanted", "a", "b", "$s"]),
    st.sampled_from([b"", b"1", b"2"]),
    st.sampled_from(["", "me", "you"]),
    st.integers(0, 2),
    st.booleans(),
    st.none(),
    st.sampled_from([None, ts.Properties(), *map(asking, ("1", "true", "0", "", "TRUE"))]),
)


@settings(COSTLY, max_examples=tries(40, 80))
@given(batches=st.lists(st.lists(ROWS, max_size=6), max_size=5), shards=st.sampled_from([1, 4]))
def test_every_message_goes_where_it_belongs(batches: list[list[ts.Message]], shards: int) -> None:
    """Against a plain model: stored or handed on, one of both, once; and retained or cleared besides."""
    with pytest.MonkeyPatch.context() as patch, ts.open("nowhere", backend="memory", shards=shards) as db:
        patch.setattr(ts.Database, "sessions", Wants("wanted"))
        db.persistence.add("ruled", least_qos=1)
        db.persistence.add("#", client_id="you", least_qos=2)
        ear = Ear()
        for text in ("#", "$s"):
            db._hub.listen(db._hub.feed(ts.TopicFilter(text)), ear)
        live: list[tuple[str, bytes]] = []
        kept: list[tuple[str, bytes]] = []
        retained: dict[str, bytes] = {}
        for batch in batches:
            result = db.publish(batch)
            stays = [
                (row.topic == "ruled" and row.qos >= 1)
                or (row.topic != "$s" and row.client_id == "you" and row.qos == 2)
                or row.topic == "wanted"
                or row.properties in (asking("1"), asking("true"))
                for row in batch
            ]
            kept += [(row.topic, row.payload) for row, flag in zip(batch, stays, strict=True) if flag]
            live += [(row.topic, row.payload) for row, flag in zip(batch, stays, strict=True) if not flag]
            retained.update((row.topic, row.payload) for row in batch if row.retain)
            assert (len(batch), sum(stays)) == (result.count, result.stored) == (len(batch), len(result.ids))
            assert len(batch) - sum(stays) == result.routed
        found = [message for text in ("#", "$s") for message in db.replay(text)]
        assert sorted(kept) == sorted((message.topic, message.payload) for message in found)
        assert sorted(live) == sorted((message.topic, message.payload) for message in ear.heard)
        looked_up = {message.topic: message.payload for text in ("#", "$s") for message in db.retained(text)}
        assert {topic: payload for topic, payload in retained.items() if payload} == looked_up


def test_publishers_in_threads(db: ts.Database) -> None:
    """Shards are locked in one order whatever a batch touches, and the last to commit is retained."""
    db.persistence.add("#")
    topics = [f"t/{number}" for number in range(7)]

    def work(number: int) -> None:
        for turn in range(60):
            order = topics[turn % 7 :] + topics[: turn % 7]
            payload = b"%d %d" % (number, turn)
            db.publish([ts.Message(topic, payload, f"client {number} {topic}", retain=True) for topic in order])

    together(*(partial(work, number) for number in range(4)))
    assert 4 * 60 * 7 == len(stored(db))
    assert topics == [message.topic for message in db.retained("#")]
    assert {59} == {int(message.payload.split()[1]) for message in db.retained("#")}


PUBLISHING = """
import topicstore as ts
path, shards = arguments
counts(RocksdbEngine, "write")
db = ts.open(path, shards=shards)
db.persistence.add("#")
for number in count():
    db.publish([ts.Message(f"t/{(number + n) % 5}", b"%d" % number, f"client {n}", retain=True) for n in range(3)])
    say("published", number)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("shards", "write"), [(1, 30), (3, 60), (3, 61), (3, 62)])
def test_killed_what_is_retained_is_what_was_stored_last(
    tmp_path: Path, run_until: Callable[..., list[tuple[str, int]]], shards: int, write: int, moment: str
) -> None:
    """In one shard both are one write; over several, nothing acknowledged is lost."""
    _, acknowledged = run_until((write, moment), PUBLISHING, tmp_path / "db", shards)[-1]
    assert acknowledged >= 10
    with ts.open(tmp_path / "db") as db:
        for topic in range(5):
            last = max(int(message.payload) for message in db.replay(f"t/{topic}"))
            (retained,) = db.retained(f"t/{topic}")
            expected = max(n for n in range(acknowledged + 1) if topic in {(n + k) % 5 for k in range(3)})
            assert expected <= int(retained.payload) <= acknowledged + 1
            assert shards > 1 or last == int(retained.payload)
