"""Tests of packet ids: the window, acknowledgements, and exchanges of QoS 2 in both directions."""

from __future__ import annotations

from topicstore import Message
from topicstore.sessions import Publish, PubRel, Session

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.parts.fixtures import Fixtures, numbered, payloads
from topicstore_conformance.parts.machines import World
from topicstore_conformance.parts.sessions import sent, settled, subscribed

__all__ = ["Exchanges"]


def received(session: Session, *rows: tuple[int, int]) -> None:
    """Publish a client's QoS 2 messages, given as pairs of number and packet id, in one call."""
    messages = [Message("t/a", b"%d" % number, session.client_id, 2) for number, _ in rows]
    session.publish(messages, [packet_id for _, packet_id in rows])


def stored(world: World) -> list[int]:
    """Return the numbers of all stored messages, in the order in which one publisher sent them."""
    return payloads(world.db.replay("#", order="time"))


class Exchanges(Fixtures):
    """Tests of packet ids."""

    def test_repetitions_within_a_call_are_stored_once(self, world: World) -> None:
        """A QoS 2 message that occurs twice in a call under one packet id is stored once."""
        world.db.persistence.add("#")
        session = world.db.sessions.open("client", expiry_interval=None)
        received(session, (0, 7), (1, 8), (0, 7), (2, 9), (1, 8))
        assert [0, 1, 2] == stored(world)

    @requires("persistent")
    def test_repetitions_after_reopening_are_stored_once(self, world: World) -> None:
        """A QoS 2 message that a client sends again before its PUBREL is stored once, also after a reopening."""
        world.db.persistence.add("#")
        received(world.db.sessions.open("client", expiry_interval=None), (0, 7), (1, 8))
        for _ in range(2):
            world.reopen()
            session = world.db.sessions.open("client", expiry_interval=None)
            received(session, (0, 7), (1, 8))
        assert [0, 1] == stored(world)

    @requires("persistent")
    def test_released_ids_can_be_used_again(self, world: World) -> None:
        """After its PUBREL a packet id is free for the next message, also when the database is opened again."""
        world.db.persistence.add("#")
        session = world.db.sessions.open("client", expiry_interval=None)
        received(session, (0, 7), (1, 8))
        assert 2 == session.pubrel(7, 8, 9)
        received(session, (2, 7))
        world.reopen()
        session = world.db.sessions.open("client", expiry_interval=None)
        received(session, (3, 8), (2, 7))
        assert [0, 1, 2, 3] == stored(world)
        assert 2 == session.pubrel(7, 8)

    def test_the_window_counts_all_exchanges(self, world: World) -> None:
        """At most as many messages as a client accepts are in flight; QoS 2 messages are until their PUBCOMP."""
        session = subscribed(world, 2, receive_maximum=3)
        world.db.publish(numbered(range(8), qos=2, client_id="p"))
        settled(world)
        ids = [item.packet_id for item in sent(session)]
        assert 3 == len(set(ids))
        session.pubrec(*ids)
        items = session.deliver()
        assert [PubRel(packet_id) for packet_id in ids] == items
        assert [] == session.deliver()
        assert 1 == session.pubcomp(ids[1])
        assert 1 == len(sent(session))
        session.pubcomp(ids[0], ids[2])
        assert 2 == len(sent(session))
        assert 3 == session.status().in_flight

    def test_a_packet_id_is_given_once(self, world: World) -> None:
        """No message gets the packet id of another in-flight message, even after all ids were in use once."""
        session = subscribed(world)
        world.db.publish(numbered(range(5_000), client_id="p"))
        settled(world)
        for _ in range(5):
            session.puback(*(item.packet_id for item in sent(session)))
        world.db.publish(numbered(range(3), client_id="p"))
        settled(world)
        slow = {item.packet_id for item in sent(session)}
        assert 3 == len(slow)
        for _ in range(7):
            world.db.publish([Message("t/b", b"1", "p", 1)] * 10_000)
            settled(world)
            ids = [item.packet_id for _ in range(10) for item in sent(session)]
            assert (10_000, set()) == (len(set(ids)), slow.intersection(ids))
            assert 10_000 == session.puback(*ids)
        assert 3 == session.puback(*slow)

    def test_limits_count_what_is_sent_again(self, world: World) -> None:
        """A delivery to all sessions has no more packets than its limit, PUBRELs and repeated messages included."""
        sessions = [subscribed(world, 2, client_id=name) for name in ("one", "other")]
        world.db.publish(numbered(range(6), qos=2, client_id="p"))
        settled(world)
        for session in sessions:
            ids = [item.packet_id for item in sent(session)]
            session.pubrec(*ids[:3])
        for session in sessions:
            session.lost()
            world.db.sessions.open(session.client_id, expiry_interval=None)
        found = list[tuple[str, int]]()
        while now := [(session.client_id, one) for session, some in world.db.sessions.deliver(limit=4) for one in some]:
            assert len(now) <= 4
            found += [(name, one.packet_id) for name, one in now]
        assert (12, 12) == (len(found), len(set(found)))

    def test_acknowledgements_outlast_a_take_over(self, world: World) -> None:
        """A client that reconnects without a disconnect is not sent again the messages that it had acknowledged."""
        session = subscribed(world)
        world.db.publish(numbered(range(6)))
        settled(world)
        items = sent(session)
        session.puback(*(item.packet_id for item in items[:3]))
        resumed = world.db.sessions.open("client", expiry_interval=None)
        assert resumed.present
        again = sent(resumed)
        assert [(item.packet_id, item.message) for item in items[3:]] == [(one.packet_id, one.message) for one in again]
        assert all(item.dup for item in again)

    def test_a_refused_message_is_over(self, world: World) -> None:
        """A PUBREC that refuses a message ends its exchange: it frees the window, and no PUBREL follows."""
        session = subscribed(world, 2, receive_maximum=2)
        world.db.publish(numbered(range(4), qos=2, client_id="p"))
        settled(world)
        first = sent(session)
        assert 1 == session.pubrec(first[0].packet_id, accepted=False)
        items = session.deliver()
        assert [Publish] == [type(item) for item in items]
        assert 0 == session.pubcomp(first[0].packet_id)
