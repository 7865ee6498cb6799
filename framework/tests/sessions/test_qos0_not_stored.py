"""QoS 0 messages that are not stored for durable subscriptions: `Sessions.store_qos0`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.hub import Hub
from topicstore.sessions import Publish, PubRel, Session, Sessions, SubscribeOptions
from topicstore.shard.writer import ShardWriter
from topicstore_conformance.faults.clock import Clock

Publishing = Callable[..., None]


def payloads(packets: list[Publish | PubRel]) -> list[tuple[str, int]]:
    return [(packet.message.payload.decode(), packet.qos) for packet in packets if isinstance(packet, Publish)]


def opened(sessions: Sessions, client_id: str = "client", qos: int = 1, **options: object) -> Session:
    sessions.store_qos0 = False
    session = sessions.open(client_id, expiry_interval=None)
    session.subscribe("a/#", qos, **options)  # type: ignore[arg-type]
    return session


def test_by_default_they_are_stored(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """By default QoS 0 messages are stored for durable subscriptions, and so reach clients that were away."""
    sessions.open("client", expiry_interval=None).subscribe("a/#", 1)
    assert sessions.store_qos0
    publish("1", qos=0)
    assert 1 == db.info().messages


def test_they_are_delivered_live_at_qos_0(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """Unstored QoS 0 messages go to connected clients only, without a packet id.

    QoS 1 and 2 messages beside them are stored as usual.
    """
    session = opened(sessions)
    opened(sessions, "away").disconnect()
    for number, qos in enumerate((0, 1, 0)):
        publish(str(number), qos=qos)
    assert [("0", 0), ("1", 1), ("2", 0)] == payloads(session.deliver())
    db.publish([ts.Message("a", b"%d" % number, "publisher", number % 3) for number in range(3, 9)])
    assert 1 + 4 == db.info().messages
    assert [(str(number), min(number % 3, 1)) for number in range(3, 9)] == sorted(payloads(session.deliver()))
    session.puback(*range(1, 6))
    sessions.checkpoint()
    assert [] == session.deliver()
    away = sessions.open("away", expiry_interval=None)
    assert [(str(number), 1) for number in (1, 4, 5, 7, 8)] == payloads(away.deliver())


def test_what_is_stored_for_another_reason_is_read_from_there(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """A QoS 0 message that a persistence rule stores is read from the store, even by clients that were away."""
    db.persistence.add("a/kept")
    session = opened(sessions)
    session.disconnect()
    publish("1", topic="a/kept", qos=0)
    session = sessions.open("client", expiry_interval=None)
    publish("2", topic="a/kept", qos=0)
    assert [("1", 0), ("2", 0)] == payloads(session.deliver())


def test_shared_subscriptions_are_served_from_the_store(
    db: ts.Database, sessions: Sessions, publish: Publishing
) -> None:
    """A QoS 0 message that matches a shared subscription is stored, and all sessions read it from the store."""
    session = opened(sessions)
    sharing = sessions.open("sharing", expiry_interval=None)
    sharing.subscribe("$share/group/a/b", 1)
    publish("1", qos=0)
    publish("2", topic="a/c", qos=0)
    assert 1 == db.info().messages
    assert [("1", 0)] == payloads(sharing.deliver())
    assert [("1", 0), ("2", 0)] == payloads(session.deliver())
    sharing.unsubscribe("$share/group/a/b")
    publish("3", qos=0)
    assert 1 == db.info().messages


def test_what_comes_while_a_window_is_full_waits_in_order(sessions: Sessions, publish: Publishing) -> None:
    """A QoS 0 message that arrives while the window is full doesn't overtake a stored message published before."""
    sessions.store_qos0 = False
    session = sessions.open("client", expiry_interval=None, receive_maximum=1)
    session.subscribe("a/#", 1)
    publish("1", "2")
    publish("3", qos=0)
    assert [("1", 1)] == payloads(session.deliver())
    assert [] == session.deliver()
    session.puback(1)
    assert [("2", 1)] == payloads(session.deliver())
    session.puback(2)
    assert [("3", 0)] == payloads(session.deliver())


def test_options_hold_for_them(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """No Local, Retain As Published, identifiers and expiry apply to unstored QoS 0 messages, too."""
    session = opened(sessions, no_local=True, retain_as_published=True, subscription_identifier=7)
    expiring = ts.Properties(message_expiry_interval=10)
    db.publish([ts.Message("a", b"own", "client"), ts.Message("a", b"1", "publisher", 0, True)])
    db.publish([ts.Message("a", b"gone", "publisher", properties=expiring)])
    clock.now += 10_000_000
    (packet,) = session.deliver()
    assert isinstance(packet, Publish)
    assert (b"1", True, (7,)) == (packet.message.payload, packet.retain, packet.subscription_identifiers)


def test_overlapping_subscriptions_get_one_of_each(sessions: Sessions, publish: Publishing) -> None:
    """Overlapping subscriptions of a session opened with ``overlapping="once"`` get one copy of each message."""
    sessions.store_qos0 = False
    session = sessions.open("client", expiry_interval=None, overlapping="once")
    session.subscribe("a/#", 1, subscription_identifier=1)
    session.subscribe("a/+", 0, subscription_identifier=2)
    publish("1", qos=0)
    publish("2", qos=1)
    found = [(packet.qos, packet.subscription_identifiers) for packet in session.deliver()]  # type: ignore[union-attr]
    assert [(0, (1, 2)), (1, (1, 2))] == found


def test_a_message_of_many_overlapping_subscriptions_is_looked_at_once(db: ts.Database, sessions: Sessions) -> None:
    """Delivering an unstored message reads watermarks once, however many filters of the session match.

    The filters aren't matched with the topic again.
    """
    sessions.store_qos0 = False
    session = sessions.open("client", overlapping="once")
    filters = ["/".join(levels) for levels in itertools.product("a+", repeat=6)]
    sessions.subscribe([(session, text, SubscribeOptions(0)) for text in filters])
    session.deliver()
    with (
        patch.object(Hub, "watermarks", autospec=True, side_effect=Hub.watermarks) as watermarks,
        patch.object(TopicFilter, "matches", autospec=True, side_effect=TopicFilter.matches) as matches,
    ):
        db.publish([ts.Message("a/a/a/a/a/a", b"1", "publisher", 0)])
        assert [("1", 0)] == payloads(session.deliver())
    assert watermarks.call_count == 1
    assert matches.call_count == 0


@pytest.mark.parametrize("overlapping", ["each", "once"])
@pytest.mark.parametrize("filters", [["a/#"], ["a/#", "a/+"]])
def test_they_come_later_if_what_is_sent_with_them_can_not_be_committed(
    sessions: Sessions, publish: Publishing, filters: Sequence[str], overlapping: str
) -> None:
    """If a commit fails, the unstored messages of the same delivery are kept and delivered later, in order."""
    sessions.store_qos0 = False
    session = sessions.open("client", expiry_interval=None, overlapping=overlapping)  # type: ignore[arg-type]
    for text in filters:
        session.subscribe(text, 1)
    publish("1", qos=1)
    publish("2", "3", qos=0)
    full = ts.StorageFullError("the disk is full")
    with patch.object(ShardWriter, "submit", side_effect=full), pytest.raises(ts.StorageFullError):
        session.deliver()
    publish("4", qos=0)
    found = payloads(session.deliver())
    assert {("1", 1), ("2", 0), ("3", 0), ("4", 0)} == set(found)
    copies = len(filters) if overlapping == "each" else 1
    assert ["2"] * copies + ["3"] * copies + ["4"] * copies == sorted(text for text, qos in found if qos == 0)
    if copies == 1:
        assert sorted(found) == found
