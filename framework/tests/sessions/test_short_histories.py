"""Short tests of sessions: the fate of a retained or live message when its subscription or its time changes."""

from __future__ import annotations

import pytest
import topicstore as ts
from topicstore.sessions import Publish, Sessions
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.parts.sessions_machine import in_flight

SECOND = 1_000_000


def retain(db: ts.Database, topic: str, seconds: int | None = None) -> None:
    properties = ts.Properties(message_expiry_interval=seconds)
    db.publish([ts.Message(topic, b"retained", "publisher", 1, True, properties=properties)])


def test_retained_messages_expire_while_they_wait_for_room(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """Retained messages expire while they wait for delivery; others carry the seconds that remain at delivery."""
    retain(db, "a/1", 10)
    retain(db, "a/2", 100)
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1)
    clock.now += 10 * SECOND
    assert [("a/2", 90)] == [(item.message.topic, item.expiry) for item in session.deliver()]  # type: ignore[union-attr]


def test_live_messages_expire_from_when_they_were_published(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """The expiry of an unstored message counts from its publication, not from the first delivery attempt."""
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a", 0)
    for seconds in (10, 100):
        properties = ts.Properties(message_expiry_interval=seconds)
        db.publish([ts.Message("a", b"", "publisher", properties=properties)])
    clock.now += 10 * SECOND
    assert [90] == [item.expiry for item in session.deliver()]  # type: ignore[union-attr]


@pytest.mark.parametrize("handling", [0, 2])
def test_retained_messages_are_sent_once_though_the_subscription_turns_to_qos_0(
    db: ts.Database, sessions: Sessions, handling: int
) -> None:
    """Retained messages are sent once although the subscription changes to QoS 0 meanwhile.

    No record remains that would make them be sent again when the session resumes.
    """
    retain(db, "a/1")
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1)
    session.subscribe("a/#", 0, retain_handling=handling)
    assert 1 == len(session.deliver())
    for _ in range(2):
        session.lost()
        session = sessions.open("client", expiry_interval=None)
        assert all(item.dup for item in session.deliver() if isinstance(item, Publish))
    session.puback(1)
    sessions.checkpoint()
    assert [] == in_flight(db)


def test_nothing_is_left_of_retained_messages_that_were_cleared(db: ts.Database, sessions: Sessions) -> None:
    """Retained messages that were cleared while the session was away leave no record of the pending request."""
    retain(db, "a/1")
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a/#", 1)
    session.lost()
    db.publish([ts.Message("a/1", b"", "publisher", 0, True)])
    session = sessions.open("client", expiry_interval=None)
    session.deliver()
    sessions.checkpoint()
    assert [] == in_flight(db)


def test_live_messages_come_by_the_options_of_their_time(db: ts.Database, sessions: Sessions) -> None:
    """Unstored messages are delivered with the options that applied when they were published."""
    session = sessions.open("client", expiry_interval=None)
    session.subscribe("a", 0, subscription_identifier=1)
    for qos, identifier in ((0, 2), (1, 3)):
        db.publish([ts.Message("a", b"%d" % identifier, "publisher", 1)])
        session.subscribe("a", qos, subscription_identifier=identifier)
    db.publish([ts.Message("a", b"4", "publisher", 1)])
    found = [(i.message.payload, i.qos, i.subscription_identifiers) for i in session.deliver()]  # type: ignore[union-attr]
    assert [(b"2", 0, (1,)), (b"3", 0, (2,)), (b"4", 1, (3,))] == found


def test_live_messages_are_for_those_who_were_there(db: ts.Database, sessions: Sessions) -> None:
    """Unstored messages go only to sessions that were connected and subscribed when they were published."""
    first = sessions.open("first", expiry_interval=None)
    first.subscribe("a", 0)
    away = sessions.open("away", expiry_interval=None)
    away.subscribe("a", 0)
    away.disconnect()
    db.publish([ts.Message("a", b"live", "publisher")])
    sessions.open("away", expiry_interval=None)
    sessions.open("late", expiry_interval=None).subscribe("a", 0)
    assert ["first"] == [session.client_id for session, _ in sessions.deliver()]
