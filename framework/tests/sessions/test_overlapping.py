"""Overlapping subscriptions that deliver a message once.

`DatabasePartsSuite` tests these subscriptions with random sequences of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.errors import NewerFormatError
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.nonpersistent import MOST_BYTES
from topicstore.sessions import Publish, PubRel, Session, Sessions, SubscribeOptions
from topicstore.sessions.overlapping_cursor import FilterOverlaps, _Node
from topicstore.sessions.records import InFlightRecord, Keys, Matched, MergedInFlightRecord, StoredInFlight, decode, put
from topicstore_conformance.faults.clock import Clock

Publishing = Callable[..., None]
SECOND = 1_000_000


def opened(sessions: Sessions, *filters: tuple[str, int], **options: Any) -> Session:
    """Return a session with these filters and QoS, with subscription identifiers 1, 2, ..."""
    session = sessions.open("client", expiry_interval=None, overlapping="once", **options)
    for identifier, (text, qos) in enumerate(filters, 1):
        session.subscribe(text, qos, subscription_identifier=identifier)
    return session


def summary(packets: list[Publish | PubRel]) -> list[tuple[str, int, tuple[int, ...]]]:
    found = [packet for packet in packets if isinstance(packet, Publish)]
    return [(packet.message.payload.decode(), packet.qos, packet.subscription_identifiers) for packet in found]


def test_there_are_two_ways(sessions: Sessions) -> None:
    """Any value of `overlapping` other than "each" and "once" raises `InvalidArgumentError`."""
    with pytest.raises(ts.InvalidArgumentError, match="overlapping"):
        sessions.open("client", overlapping="twice")  # type: ignore[arg-type]


def test_retained_messages_come_for_each_subscription(db: ts.Database, sessions: Sessions) -> None:
    """Retained messages are delivered for each subscription that requests them, even if filters overlap.

    See MQTT 5, section 3.8.4.
    """
    db.publish([ts.Message("a/b", b"kept", "publisher", 1, True)])
    session = opened(sessions, ("a/#", 1), ("a/b", 1))
    assert [("kept", 1, (1,)), ("kept", 1, (2,))] == sorted(summary(session.deliver()))


@contextmanager
def during(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> Iterator[None]:
    """Call a function in the storing thread after the first filter was notified and before other filters are."""
    original = getattr(Feed, name)
    acted = []

    def told_one(self: Feed, *args: object) -> None:
        original(self, *args)
        if not acted:
            acted.append(self)
            act()

    with monkeypatch.context() as patch:
        patch.setattr(Feed, name, told_one)
        yield
    assert acted


@pytest.mark.parametrize(("name", "qos"), [("wake", 1), ("route", 0)])
def test_it_comes_once_though_only_one_filter_was_notified_yet(
    sessions: Sessions, publish: Publishing, monkeypatch: pytest.MonkeyPatch, name: str, qos: int
) -> None:
    """A stored or unstored message arrives once even if a delivery runs when only one matching filter was notified.

    The other filters are notified later.
    """
    session = opened(sessions, ("a/#", qos), ("a/b", qos), ("+/b", qos))
    publish("before")
    assert [("before", qos, (1, 2, 3))] == summary(session.deliver())
    packets: list[Publish | PubRel] = []
    with during(monkeypatch, name, lambda: packets.extend(session.deliver())):
        publish("1")
    packets += session.deliver()
    assert [("1", qos, (1, 2, 3))] == summary(packets)


def test_messages_expire_and_say_what_is_left(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """An expired message isn't delivered; others carry the seconds that remain, or None without an interval."""
    session = opened(sessions, ("a/#", 1), ("a/b", 1))
    for seconds in (10, 100, None):
        properties = ts.Properties(message_expiry_interval=seconds)
        db.publish([ts.Message("a/b", b"", "publisher", 1, properties=properties)])
    clock.now += 10 * SECOND
    assert [90, None] == [packet.expiry for packet in session.deliver()]  # type: ignore[union-attr]


def test_messages_wait_together_while_the_window_is_full(sessions: Sessions, publish: Publishing) -> None:
    """Messages of overlapping subscriptions wait while the window is full; a separate QoS 0 subscription continues."""
    session = opened(sessions, ("a/#", 1), ("a/b", 0), ("z", 0), receive_maximum=1)
    publish("1", "2")
    publish("3", topic="z")
    assert [("1", 1, (1, 2)), ("3", 0, (3,))] == sorted(summary(session.deliver()) + summary(session.deliver()))
    session.puback(1)
    assert [("2", 1, (1, 2))] == summary(session.deliver())


def test_a_shard_that_can_not_be_read_is_read_later(
    sessions: Sessions, publish: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a shard can't be read for one overlapping subscription, all of them read it later, without duplicates."""
    session = opened(sessions, ("a/#", 1), ("a/b", 1))
    publish("1")
    original = Feed.read

    def failing(self: Feed, shard: int, after: int, limit: int) -> Any:
        if self.topic_filter.text == "a/b":
            raise ts.StorageFullError("not now")
        return original(self, shard, after, limit)

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "read", failing)
        assert [] == session.deliver()
        assert session.failure is not None
    sessions.tick()
    assert [("1", 1, (1, 2))] == summary(session.deliver())
    assert session.failure is None


FLIGHT = MergedInFlightRecord(
    2, "a/+", 0, SubscribeOptions(2), 7, 1, 1_234, b"\0\1", 1, (), (Matched("a/+", (1, 2), True),), b"\0\0\0\0"
)
STORED = "dc90ded29c02a3612f2b009502c2c200000701cd04d2c402000101909193a3612f2b920102c3c40400000000"


def test_what_is_stored_of_them_stays_readable_and_older_versions_refuse_it() -> None:
    """Records of messages in flight for overlapping subscriptions stay readable; older releases refuse them.

    Older releases know only records with one filter, and wouldn't find all messages. The format of records with one
    filter is unchanged.
    """
    key = Keys("c").batch(3)
    assert STORED == put(key, FLIGHT).value.hex()  # type: ignore[union-attr]
    assert StoredInFlight(*msgspec.structs.astuple(FLIGHT)) == decode(key, bytes.fromhex(STORED), StoredInFlight)
    with pytest.raises(NewerFormatError, match="version 2"):
        decode(key, bytes.fromhex(STORED), InFlightRecord)
    alone = InFlightRecord(1, "a/+", 0, SubscribeOptions(2), 7, 1, 1_234, b"\0\1", 1)
    found = decode(key, put(key, alone).value, StoredInFlight)  # type: ignore[arg-type]
    assert StoredInFlight(*msgspec.structs.astuple(alone)) == found


def test_copies_that_never_come_take_bounded_memory(sessions: Sessions) -> None:
    """A subscription's memory for messages is limited even if an overlapping subscription dropped their copies."""
    session = sessions.open("client", overlapping="once")
    for text in ("a/#", "a/+"):
        session.subscribe(text, 0)
    union, cursor = session.overlapping, session.cursors["a/#"]
    assert union is not None
    for _ in range(100):
        message = ts.Message("a/b", bytes(MOST_BYTES // 8), "publisher")
        cursor.take_nonpersistent([message], [0, 0], 0)  # type: ignore[union-attr]
        assert sum(len(one.payload) for one, _ in union._copies.values()) == union._copied <= 2 * MOST_BYTES


LEVELS = st.sampled_from(["a", "b", "+", "$s", ""])
FILTER = (
    st.tuples(st.lists(LEVELS, max_size=3), st.booleans())
    .map(lambda drawn: "/".join([*drawn[0], "#"] if drawn[1] else drawn[0]))
    .filter(bool)
)


@given(st.lists(FILTER, max_size=6), st.lists(FILTER, max_size=3), FILTER)
def test_filters_overlap_if_a_topic_matches_both(kept: list[str], removed: list[str], other: str) -> None:
    """Two filters overlap if some topic matches both, as an exhaustive search over short topics finds.

    The index of overlapping filters doesn't return removed filters.
    """
    index: FilterOverlaps[ts.TopicFilter] = FilterOverlaps()
    filters = {text: ts.TopicFilter(text) for text in (*removed, *kept)}
    for one in filters.values():
        index.add(one, one)
    for text in filters.keys() - kept:
        # removing an equal filter under another value leaves the first value in the index
        index.remove(ts.TopicFilter(text), ts.TopicFilter(text))
        index.remove(filters[text], filters[text])
    chosen = ts.TopicFilter(other)
    matching = [topic for topic in _topics() if _matches(chosen, topic)]
    expected = sorted(text for text in set(kept) if any(_matches(filters[text], topic) for topic in matching))
    assert expected == sorted(found.text for found in index.overlapping(chosen))
    for text in set(kept):
        assert text in {found.text for found in index.overlapping(filters[text])}
        index.remove(filters[text], filters[text])
    assert index._root is None or index._root.empty()


def test_many_subscriptions_are_not_each_compared_with_all_others(
    sessions: Sessions, publish: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscribing to many filters takes work that grows with their number, not with its square."""
    looked, find = [0], dict.get

    class Counting(dict[str, object]):
        def get(self, *key: object) -> object:
            looked[0] += 1
            return find(self, *key)

    made = _Node.__init__

    def counted(node: _Node[object]) -> None:
        made(node)
        node.children = Counting()  # type: ignore[assignment]

    monkeypatch.setattr(_Node, "__init__", counted)
    for kind, texts in (
        ("apart", [f"a/{n}/+" for n in range(300)]),
        ("joined", ["#", *(f"{n}/+" for n in range(300))]),
    ):
        looked[0] = 0
        session = sessions.open(kind, overlapping="once", expiry_interval=None)
        sessions.subscribe([(session, text, SubscribeOptions(1)) for text in texts])
        assert 0 < looked[0] < 30 * len(texts)
        publish("1", topic="7/x")
        publish("2", topic="a/7/x")
        found = [item.message.topic for _ in range(8) for item in session.deliver()]  # type: ignore[union-attr]
        assert sorted(found) == (["a/7/x"] if kind == "apart" else ["7/x", "a/7/x"])


def _matches(topic_filter: ts.TopicFilter, topic: str) -> bool:
    return topic_filter.matches(topic) if topic else topic_filter.text in ("#", "+", "+/#", "/#")


def test_many_subscriptions_overlap_as_few_do(sessions: Sessions, publish: Publishing) -> None:
    """With many overlapping subscriptions each message arrives once, even after some are removed and others added."""
    session = opened(sessions, *[(f"t/{number}", 1) for number in range(100)])
    for number in range(90):
        session.unsubscribe(f"t/{number}")
    for number in range(200, 300):
        session.subscribe(f"t/{number}", 1, subscription_identifier=number)
    session.subscribe("t/+", 2, subscription_identifier=500)
    session.subscribe("t/5", 2, subscription_identifier=501)
    for topic in ("t/5", "t/95", "t/250", "t/x"):
        publish(topic, topic=topic, qos=2)
    expected = [("t/250", 2, (250, 500)), ("t/5", 2, (500, 501)), ("t/95", 2, (96, 500)), ("t/x", 2, (500,))]
    assert expected == sorted(summary(session.deliver()))


def _topics() -> Iterator[str]:
    levels = ["a", "b", "$s", ""]
    found = list(levels)
    for _ in range(4):
        yield from found
        found = [f"{topic}/{level}" for topic in found for level in levels]


def test_there_may_be_many_of_them(sessions: Sessions, publish: Publishing) -> None:
    """A message may match more overlapping subscriptions than a machine word has bits."""
    filters = ["/".join("+" if number >> level & 1 else "a" for level in range(7)) for number in range(128)]
    session = opened(sessions, *((text, 1) for text in filters))
    publish("1", topic="a/a/a/a/a/a/a")
    publish("2", topic="a/a/a/a/a/a/b")
    assert [("1", 1, tuple(range(1, 129))), ("2", 1, tuple(range(65, 129)))] == summary(session.deliver())
