"""`Sessions.deliver_batches`: deliveries as columns, which sessions with equal messages share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.sessions import DeliveryBatch, Publish, PubRel, Session, Sessions, SubscribeOptions
from topicstore.sessions.delivery_batch import Packet, SelectedMessages, count_of, cut, single

Publishing = Callable[..., None]


def opened(sessions: Sessions, client_id: str, **options: object) -> Session:
    session = sessions.open(client_id, expiry_interval=None)
    session.subscribe("a/#", 1, **options)  # type: ignore[arg-type]
    return session


def test_those_who_get_the_same_share_all_but_the_packet_ids(sessions: Sessions, publish: Publishing) -> None:
    """Sessions that receive the same messages with the same options share one body and differ only in packet ids.

    Sessions with other options have another body.
    """
    for number in range(3):
        opened(sessions, f"client-{number}")
    first = opened(sessions, "other", subscription_identifier=7)
    publish("1")
    # the next packet ids of this session differ from those of the other sessions
    first.puback(*[packet.packet_id for packet in first.deliver()])
    for session, _ in sessions.deliver():
        session.puback(1)
    publish("2", "3")
    delivered = {session.client_id: packets for session, packets in sessions.deliver_batches()}
    batches = {client: packet for client, (packet,) in delivered.items() if isinstance(packet, DeliveryBatch)}
    assert sorted(batches) == ["client-0", "client-1", "client-2", "other"]
    assert 2 == len({id(batch.body) for batch in batches.values()})
    assert batches["client-0"].body is batches["client-2"].body is not batches["other"].body
    assert batches["client-0"].messages[1] is batches["other"].messages[1]
    assert [(7,), ()] == [batches[client].subscription_identifiers for client in ("other", "client-0")]
    assert [2, 3] == list(batches["client-0"].packet_ids) == list(batches["other"].packet_ids)
    assert [b"2", b"3"] == [message.payload for message in batches["client-0"].messages]


def test_columns_have_one_value_or_one_for_each(db: ts.Database, sessions: Sessions) -> None:
    """A column is a single value if it is equal for all messages, else a list; `deliver` returns equal packets."""
    session = sessions.open("client", expiry_interval=None, overlapping="once")
    sessions.subscribe([(session, "a/#", SubscribeOptions(2, retain_as_published=True, identifier=1))])
    sessions.subscribe([(session, "a/2", SubscribeOptions(1, identifier=2))])
    alike = [ts.Message("a/1", b"%d" % number, "publisher", 1) for number in range(3)]
    db.publish(alike)
    batch = only(sessions)
    assert [1, 2, 3] == list(batch.packet_ids)
    assert alike == [message_of(message) for message in batch.messages]
    assert (1, False, (1,), None) == (batch.qos, batch.retain, batch.subscription_identifiers, batch.expiry)
    different = [
        ts.Message("a/1", b"1", "publisher", 0),
        ts.Message("a/2", b"2", "publisher", 2, retain=True),
        ts.Message("a/3", b"3", "publisher", 1, properties=ts.Properties(message_expiry_interval=60)),
    ]
    db.publish(different)
    batch = only(sessions)
    assert [0, 4, 5] == list(batch.packet_ids)
    assert ([0, 2, 1], [False, True, False]) == (batch.qos, batch.retain)
    assert ([(1,), (1, 2), (1,)], [None, None, 60]) == (batch.subscription_identifiers, batch.expiry)
    assert batch.packets() == [
        Publish(0, batch.messages[0], 0, False, False, (1,), None),
        Publish(4, batch.messages[1], 2, False, True, (1, 2), None),
        Publish(5, batch.messages[2], 1, False, False, (1,), 60),
    ]


def only(sessions: Sessions) -> DeliveryBatch:
    ((_, packets),) = sessions.deliver_batches()
    (batch,) = packets
    assert isinstance(batch, DeliveryBatch)
    assert 3 == len(batch)
    return batch


def message_of(message: ts.Message) -> ts.Message:
    """Return a message without the time at which it was stored."""
    return ts.Message(message.topic, message.payload, message.client_id, message.qos)


@pytest.mark.parametrize("limits", [{"limit_each": 0}, {"limit": 0}, {"max_bytes": 0}, {"limit": "many"}])
def test_limits_are_checked(sessions: Sessions, limits: dict[str, object]) -> None:
    """A limit that isn't an integer of at least 1 raises `InvalidArgumentError`."""
    for deliver in (sessions.deliver, sessions.deliver_batches):
        with pytest.raises(ts.InvalidArgumentError):
            deliver(**limits)  # type: ignore[arg-type]


PACKETS = st.lists(st.one_of(st.just(-1), st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=4)))


@given(PACKETS, st.integers(1, 12), st.none() | st.integers(1, 12))
def test_packets_are_cut_where_they_no_longer_fit(sizes: list[int | list[int]], limit: int, most: int | None) -> None:
    """A delivery that is split at a limit has as many packets as fit, at least one, in order; the rest is returned."""
    packets = [_packet(size) for size in sizes]
    all_ = single(packets)
    count, left = 0, most
    for packet in all_[:limit]:
        size = len(packet.message.payload) if isinstance(packet, Publish) else 0
        if left is not None:
            if count and size > left:
                break
            left -= size
        count += 1
    taken, others = cut(packets, limit, most)
    assert (all_[:count], all_[count:]) == (single(taken), others)
    assert count_of(taken) == count


def _packet(size: int | list[int]) -> Packet:
    if isinstance(size, int):
        return PubRel(1) if size < 0 else Publish(1, ts.Message("a", bytes(size)), 1)
    messages = [ts.Message("a", bytes(one)) for one in size]
    body = SelectedMessages("a", 0, SubscribeOptions(1), messages, 1, None)
    return DeliveryBatch(range(1, len(size) + 1), body)
