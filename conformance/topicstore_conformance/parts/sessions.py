"""Tests of durable sessions."""

from __future__ import annotations

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.sessions import Publish, PubRel, Session, Will

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.parts.fixtures import DAY, SECOND, Fixtures, deaths, delivered, drop_first, numbered
from topicstore_conformance.parts.machines import World

__all__ = ["Sessions"]


def subscribed(world: World, qos: int = 1, client_id: str = "client", **how: object) -> Session:
    """Return the session of a client that never expires and is subscribed to ``t/#``."""
    session = world.db.sessions.open(client_id, **{"expiry_interval": None, **how})  # type: ignore[arg-type]
    session.subscribe("t/#", qos)
    return session


def sent(session: Session, limit: int = 1_000) -> list[Publish]:
    """Return the messages that a session delivers next."""
    return [item for item in session.deliver(limit) if isinstance(item, Publish)]


def settled(world: World) -> None:
    """End the current epochs, if the layout has epochs, so that sessions see all stored messages."""
    list(world.db.replay("#"))


class Sessions(Fixtures):
    """Tests of durable sessions."""

    def test_each_message_once(self, world: World) -> None:
        """A session receives every message that is published after its subscription once, each publisher's in order."""
        world.db.publish(numbered(range(5)))
        session = subscribed(world)
        for first in range(5, 65, 5):
            world.db.publish(numbered(range(first, first + 5)))
        settled(world)
        found = delivered(session, acknowledge=True)
        assert list(range(5, 65)) == sorted(found)
        for publisher in range(3):
            for topic in range(4):
                mine = [number for number in found if (number % 3, number % 4) == (publisher, topic)]
                assert sorted(mine) == mine

    @requires("persistent")
    def test_sessions_outlast_reopening(self, world: World) -> None:
        """After a reopening a session resends unacknowledged messages under the same ids, then sends later ones."""
        session = subscribed(world, receive_maximum=4)
        world.db.publish(numbered(range(10)))
        settled(world)
        before = {item.packet_id: item.message for item in sent(session)}
        first = min(before)
        session.puback(first)
        session.checkpoint()
        gone = before.pop(first)
        world.reopen()
        resumed = world.db.sessions.open("client", expiry_interval=None, receive_maximum=4)
        assert resumed.present
        assert ["t/#"] == [text for text, _ in world.db.sessions["client"].subscriptions]
        again = sent(resumed, len(before))
        assert before == {item.packet_id: item.message for item in again}
        assert {True} == {item.dup for item in again}
        resumed.puback(*before)
        rest = delivered(resumed, acknowledge=True)
        assert list(range(10)) == sorted([*rest, int(gone.payload), *(int(m.payload) for m in before.values())])

    @requires("persistent")
    def test_retained_messages_in_flight_outlast_reopening(self, world: World) -> None:
        """After a reopening, unacknowledged retained messages are sent again under the same ids, and no others.

        Their content is unchanged [MQTT-4.4.0-1], although the topic has another retained message by then, or none.
        """
        world.db.publish([Message(f"t/{number}", b"%d" % number, f"p{number}", 1, True) for number in range(6)])
        session = subscribed(world)
        before = {item.packet_id: item.message for item in sent(session)}
        assert 6 == len(before)
        gone = min(before)
        session.puback(gone)
        session.checkpoint()
        del before[gone]
        world.db.publish([Message("t/4", b"9", "p4", 1, True), Message("t/5", b"", "p5", 1, True)])
        settled(world)
        world.reopen()
        resumed = world.db.sessions.open("client", expiry_interval=None)
        again = sent(resumed)
        assert before == {item.packet_id: item.message for item in again}
        assert {(True, True)} == {(item.dup, item.retain) for item in again}
        assert 5 == resumed.puback(*before)
        later = sorted(sent(resumed), key=lambda item: item.message.topic)
        assert [(b"9", False, False), (b"", False, False)] == [
            (item.message.payload, item.dup, item.retain) for item in later
        ]
        assert [] == resumed.deliver()

    def test_dropped_generations_reach_no_session(self, world: World) -> None:
        """Messages of a dropped generation are neither sent nor sent again, and all later ones are sent once."""
        session = subscribed(world, receive_maximum=3)
        world.db.publish(numbered(range(10)))
        settled(world)
        flying = sent(session)
        drop_first(world.db)
        world.db.publish(numbered(range(10, 20)))
        settled(world)
        session.puback(*(item.packet_id for item in flying))
        assert list(range(10, 20)) == sorted(delivered(session, acknowledge=True))
        world.db.publish(numbered(range(20, 22)))
        settled(world)
        flying = sent(session)
        drop_first(world.db)
        session.lost()
        resumed = world.db.sessions.open("client", expiry_interval=None)
        assert [] == delivered(resumed)

    def test_deleted_messages_hold_nothing_up(self, world: World) -> None:
        """If all messages in flight were deleted, the first delivery of a resumed session has later messages."""
        session = subscribed(world)
        for number in (0, 2):
            world.db.publish(numbered([number]))
            settled(world)
            assert [number] == delivered(session)
            session.lost()
            assert 1 == world.db.delete("#")
            world.db.publish(numbered([number + 1]))
            settled(world)
            session = world.db.sessions.open("client", expiry_interval=None)
            [item] = sent(session)
            assert (number + 1, 1) == (int(item.message.payload), session.status().in_flight)
            assert 1 == session.puback(item.packet_id)
            world.db.delete("#")

    def test_sessions_expire(self, world: World) -> None:
        """A session stays until its expiry interval has passed after its connection, and is gone afterwards."""
        for name, seconds in (("short", 10), ("ever", None), ("long", 1_000_000)):
            world.db.sessions.open(name, expiry_interval=seconds).subscribe("t/#", 1)
            connected = world.db.sessions.connected(name)
            assert connected is not None
            connected.lost()
        world.clock.now += 10 * SECOND - 1
        world.db.sessions.tick()
        assert ["ever", "long", "short"] == sorted(world.db.sessions.clients())
        world.clock.now += 1
        world.db.sessions.tick()
        assert ["ever", "long"] == sorted(world.db.sessions.clients())
        new = world.db.sessions.open("short", expiry_interval=10)
        assert not new.present
        world.db.publish(numbered(range(3)))
        settled(world)
        assert [] == delivered(new)
        world.clock.now += 400 * 365 * DAY // 4
        world.db.sessions.tick()
        assert "ever" in world.db.sessions.clients()

    def test_bounded_sessions(self, world: World) -> None:
        """At most as many sessions are stored as the bounds allow, in all and per user; stored ones can be opened."""
        sessions = world.db.sessions
        first = sessions.open("first", expiry_interval=None, user="u")
        sessions.bounds.in_all, sessions.bounds.each_user = 3, 2
        second = sessions.open("second", expiry_interval=None, user="u")
        sessions.open("other", expiry_interval=None)
        for _ in range(2):
            for user in ("u", "v"):
                with pytest.raises(ts.QuotaExceededError):
                    sessions.open("one more", expiry_interval=None, user=user)
            sessions.bounds.in_all = 4
            with pytest.raises(ts.QuotaExceededError):
                sessions.open("one more", expiry_interval=None, user="u")
            sessions.open("one more", expiry_interval=None, user="v").disconnect(expiry_interval=0)
            sessions.bounds.in_all = 3
            first.lost()
            first = sessions.open("first", expiry_interval=None, user="u")
            assert first.present
        second.disconnect(expiry_interval=0)
        assert not sessions.open("one more", expiry_interval=None, user="u").present
        assert ["first", "one more", "other"] == sorted(sessions.clients())

    def test_expired_messages_are_not_sent(self, world: World) -> None:
        """A message is sent with its remaining expiry interval in seconds, and not after it has expired."""
        session = subscribed(world)
        for number, seconds in enumerate((1, 5, None)):
            expiry = None if seconds is None else ts.Properties(message_expiry_interval=seconds)
            world.db.publish([Message("t/a", b"%d" % number, "p", 1, properties=expiry)])
        settled(world)
        world.clock.now += 3 * SECOND
        found = sent(session)
        assert [1, 2] == [int(item.message.payload) for item in found]
        assert [2, None] == [item.expiry for item in found]

    def test_what_is_left_of_an_interval(self, world: World) -> None:
        """A routed or retained message carries the remaining seconds of its expiry interval, rounded up, never 0."""
        expiry = ts.Properties(message_expiry_interval=2)
        routed = world.db.sessions.open("routed", expiry_interval=None)
        routed.subscribe("r/#", 0)
        for passed, expected in ((0, 2), (SECOND // 2, 2), (SECOND, 1), (SECOND * 3 // 2, 1), (2 * SECOND, None)):
            name = f"r/{passed}"
            world.db.publish([Message(name, b"1", "p", 0, True, properties=expiry)])
            retained = world.db.sessions.open(f"client {passed}", expiry_interval=None)
            world.clock.now += passed
            retained.subscribe(name, 1)
            wanted = [] if expected is None else [expected]
            assert wanted == [item.expiry for item in sent(routed)]
            assert wanted == [item.expiry for item in sent(retained)]
            world.clock.now += 10 * SECOND

    def test_kicked_clients_are_lost(self, world: World) -> None:
        """A client that is kicked has lost its connection: its will is published, and its session stays."""
        world.db.persistence.add("will")
        session = subscribed(world, will=Will(Message("will", b"1", "client", 1)))
        assert world.db.sessions.kick("client")
        with pytest.raises(ts.SessionEndedError):
            session.deliver()
        world.db.sessions.tick()
        assert [b"1"] == [message.payload for message in world.db.replay("will")]
        assert not world.db.sessions.kick("client")
        with pytest.raises(ts.SessionNotFoundError):
            world.db.sessions.kick("nobody")
        world.db.publish(numbered([2]))
        settled(world)
        resumed = world.db.sessions.open("client", expiry_interval=None)
        assert (True, [2]) == (resumed.present, delivered(resumed))

    @requires("persistent")
    def test_wills_outlast_reopening(self, world: World) -> None:
        """A will is published once, at its time, although the database is opened again during its delay."""
        world.db.persistence.add("will")
        will = Will(Message("will", b"1", "client", 1), delay=10)
        world.db.sessions.open("client", expiry_interval=None, will=will).lost()
        world.clock.now += 4 * SECOND
        world.reopen()
        world.db.sessions.tick()
        assert [] == list(world.db.replay("will"))
        world.clock.now += 11 * SECOND
        for _ in range(2):
            world.db.sessions.tick()
            world.clock.now += SECOND
        world.reopen()
        world.db.sessions.tick()
        assert [b"1"] == [message.payload for message in world.db.replay("will")]

    @requires("persistent")
    def test_wills_reach_sessions_that_are_away(self, world: World) -> None:
        """A will that is due after a reopening is sent to a session whose client is away, once it returns."""
        world.db.sessions.open("away", expiry_interval=None).subscribe("will", 1)
        will = Will(Message("will", b"7", "client", 1), delay=10)
        world.db.sessions.open("client", expiry_interval=None, will=will).lost()
        world.reopen()
        world.clock.now += 11 * SECOND
        world.db.sessions.tick()
        settled(world)
        assert [7] == delivered(world.db.sessions.open("away", expiry_interval=None))

    def test_wills_come_with_the_end_of_a_session(self, world: World) -> None:
        """A will is published after its delay, or when its session ends if that is sooner, and once."""
        world.db.persistence.add("will/#")
        for name, delay, interval in (("delay", 10, 20), ("end", 20, 10), ("ever", 10, None), ("now", 0, None)):
            will = Will(Message(f"will/{name}", b"1", name, 1), delay=delay)
            world.db.sessions.open(name, expiry_interval=interval, will=will).lost()
        found = []
        for _ in range(4):
            world.db.sessions.tick()
            found.append(sorted(message.topic.removeprefix("will/") for message in world.db.replay("will/#")))
            world.clock.now += 10 * SECOND
        assert [["now"], ["delay", "end", "ever", "now"]] == [found[0], found[1]]
        assert found[1] == found[3]

    @requires("persistent")
    def test_wills_of_clients_that_return(self, world: World) -> None:
        """The will of a client that returns within the delay, or disconnects, is never published."""
        world.db.persistence.add("will/#")
        for name in ("back", "clean", "gone"):
            will = Will(Message(f"will/{name}", b"1", name, 1), delay=10)
            session = world.db.sessions.open(name, expiry_interval=None, will=will)
            if name == "gone":
                session.disconnect()
            else:
                session.lost()
        world.clock.now += 9 * SECOND
        world.db.sessions.tick()
        world.db.sessions.open("back", expiry_interval=None).lost()
        world.db.sessions.open("clean", clean_start=True, expiry_interval=None)
        for _ in range(3):
            world.clock.now += 11 * SECOND
            world.db.sessions.tick()
            world.reopen()
        assert ["will/clean"] == [message.topic for message in world.db.replay("will/#")]

    @requires("persistent")
    @deaths
    def test_a_killed_delivery(self, world: World, death: Fault) -> None:
        """After a kill during a delivery, a session is still sent every message that it has not acknowledged."""
        session = subscribed(world)
        world.db.publish(numbered(range(12)))
        settled(world)
        with world.dying(death):
            session.deliver(5)
        resumed = world.db.sessions.open("client", expiry_interval=None)
        assert resumed.present
        assert list(range(12)) == sorted(delivered(resumed, acknowledge=True))

    @requires("persistent")
    @deaths
    def test_exactly_once(self, world: World, death: Fault) -> None:
        """A message of QoS 2 that a client has answered with PUBREC is not sent again after a kill."""
        session = subscribed(world, 2)
        world.db.publish(numbered(range(3), qos=2))
        settled(world)
        ids = [item.packet_id for item in sent(session)]
        session.pubrec(*ids)
        assert ids == [item.packet_id for item in session.deliver() if isinstance(item, PubRel)]
        with world.dying(death):
            world.db.sessions.checkpoint()
        resumed = world.db.sessions.open("client", expiry_interval=None)
        items = resumed.deliver()
        assert [] == [item for item in items if isinstance(item, Publish)]
        assert ids == [item.packet_id for item in items]
        assert len(ids) == resumed.pubcomp(*ids)
        assert [] == resumed.deliver()
