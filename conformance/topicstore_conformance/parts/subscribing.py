"""Tests of the subscriptions of sessions: their options and their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import topicstore as ts
from topicstore import Message
from topicstore.sessions import Publish, Session, Will

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.parts.fixtures import DAY, SECOND, Fixtures, delivered, numbered, payloads
from topicstore_conformance.parts.machines import World, stored_keys
from topicstore_conformance.parts.sessions import sent, settled, subscribed

__all__ = ["Subscribing"]


def texts(session: Session, max_bytes: int | None = None) -> list[str]:
    """Return the payloads that a session delivers next, sorted."""
    items = session.deliver(max_bytes=max_bytes)
    return sorted(item.message.payload.decode() for item in items if isinstance(item, Publish))


class Subscribing(Fixtures):
    """Tests of the subscriptions of sessions."""

    def test_retained_messages_are_sent_as_asked(self, world: World) -> None:
        """A SUBSCRIBE always, only if the subscription is new, or never causes retained messages (Retain Handling)."""
        world.db.publish([Message(f"t/{name}", name.encode(), "p", 1, True) for name in "ab"])
        both = ["a", "b"]
        for handling, (new, again) in enumerate(((both, both), (both, []), ([], []))):
            session = world.db.sessions.open(f"client {handling}", expiry_interval=None)
            session.subscribe("t/#", 1, retain_handling=handling)
            assert new == texts(session)
            session.subscribe("t/#", 1, retain_handling=handling)
            assert again == texts(session)

    def test_flags_of_messages(self, world: World) -> None:
        """A delivery has the lower QoS of publisher and subscription, and the subscription's flag and identifier."""
        one, other = (world.db.sessions.open(name, expiry_interval=None) for name in ("one", "other"))
        one.subscribe("t/#", 2, subscription_identifier=268_435_455)
        other.subscribe("t/#", 1, retain_as_published=True)
        world.db.publish([Message("t/a", b"%d" % qos, "p", qos, bool(qos)) for qos in (1, 2)])
        settled(world)
        rows = [(item.message.payload, item.qos, item.retain, item.subscription_identifiers) for item in sent(one)]
        assert [(b"1", 1, False, (268_435_455,)), (b"2", 2, False, (268_435_455,))] == sorted(rows)
        assert [(b"1", 1, True), (b"2", 1, True)] == sorted(
            (item.message.payload, item.qos, item.retain) for item in sent(other)
        )
        world.db.sessions.open("late", expiry_interval=None).subscribe("t/#", 2)
        late = world.db.sessions.connected("late")
        assert late is not None
        assert [(b"2", 2, True)] == [(item.message.payload, item.qos, item.retain) for item in sent(late)]

    def test_overlapping_subscriptions_end_alone(self, world: World) -> None:
        """With overlapping="once" a message has the identifiers of its matching subscriptions that have not ended."""
        session = world.db.sessions.open("client", expiry_interval=None, overlapping="once")

        def received(topic: str) -> list[tuple[int, tuple[int, ...]]]:
            world.db.publish([Message(topic, b"1", "p", 2)])
            settled(world)
            items = sent(session)
            session.pubrec(*(item.packet_id for item in items))
            return [(item.qos, tuple(sorted(item.subscription_identifiers))) for item in items]

        session.subscribe("t/#", 1, subscription_identifier=1)
        for number in (2, 3):
            session.subscribe("t/a", 2, subscription_identifier=number)
            assert [(2, (1, number))] == received("t/a")
            assert [(1, (1,))] == received("t/b")
            session.unsubscribe("t/a")
            assert [(1, (1,))] == received("t/a")
        session.subscribe("t/a", 2, subscription_identifier=4)
        session.unsubscribe("t/#")
        assert ([(2, (4,))], []) == (received("t/a"), received("t/b"))
        session.unsubscribe("t/a")
        assert [] == received("t/a")

    def test_overlapping_subscriptions_follow_each_other(self, world: World) -> None:
        """With overlapping="once" messages are sent once, beside retained ones and after subscriptions have ended."""
        world.db.publish([Message("t/a", b"0", "p", 1, True)])

        def received(session: Session) -> list[tuple[int, ...]]:
            world.db.publish([Message("t/a", b"1", "p", 1)])
            settled(world)
            return [tuple(sorted(item.subscription_identifiers)) for item in sent(session)]

        for number, (first, second) in enumerate((("t/a", "t/#"), ("t/#", "t/a"), ("t/+", "t/#"))):
            session = world.db.sessions.open(f"client {number}", expiry_interval=None, overlapping="once")
            for _ in range(2):  # the second sending of the retained message replaces the first one
                session.subscribe(first, 1, subscription_identifier=1)
            assert ["0"] == texts(session)
            session.subscribe(second, 1, subscription_identifier=2, retain_handling=2)
            assert [(1, 2)] == received(session)
            assert session.unsubscribe(first)
            assert session.unsubscribe(second)
            for one, identifier in ((second, 3), (first, 4)):  # each alone
                session.subscribe(one, 1, subscription_identifier=identifier, retain_handling=2)
                assert [(identifier,)] == received(session)
                assert session.unsubscribe(one)

    @requires("persistent")
    def test_overlapping_subscriptions_send_again(self, world: World) -> None:
        """After a reopening, each unacknowledged message is sent again once, with its earlier identifiers."""
        session = world.db.sessions.open("client", expiry_interval=None, overlapping="once")
        for number, text in enumerate(("t/#", "t/a", "+/b"), 1):
            session.subscribe(text, 1, subscription_identifier=number)
        world.db.publish([Message(f"t/{name}", name.encode(), "p", 1) for name in "abc"])
        settled(world)
        before = {item.message.topic: (item.packet_id, item.subscription_identifiers) for item in sent(session)}
        assert {"t/a": (1, 2), "t/b": (1, 3), "t/c": (1,)} == {topic: numbers for topic, (_, numbers) in before.items()}
        session.unsubscribe("t/#")
        world.reopen()
        resumed = world.db.sessions.open("client", expiry_interval=None, overlapping="once")
        again = sent(resumed)
        assert 3 == len(again)
        assert before == {item.message.topic: (item.packet_id, item.subscription_identifiers) for item in again}

    def test_own_messages_are_left_out(self, world: World) -> None:
        """With no_local a session is not sent its own client's messages, and they don't count as its lag."""
        session = world.db.sessions.open("client", expiry_interval=None)
        session.subscribe("t/#", 1, no_local=True)
        other = subscribed(world, client_id="other")
        world.db.publish([*numbered(range(4), client_id="client"), *numbered(range(4, 6), client_id="other")])
        settled(world)
        assert 2 == world.db.sessions.lag("client")["client"]["t/#"].messages
        assert 6 == world.db.sessions.lag("other")["other"]["t/#"].messages
        assert [4, 5] == sorted(delivered(session, acknowledge=True))
        assert list(range(6)) == sorted(delivered(other, acknowledge=True))
        assert 0 == session.lag()["t/#"].messages

    @requires("persistent")
    def test_options_outlast_reopening(self, world: World) -> None:
        """After a reopening each subscription has the options of its last SUBSCRIBE."""
        session = subscribed(world, 0)
        session.subscribe("t/#", 2, no_local=True, retain_as_published=True, subscription_identifier=7)
        session.subscribe("u/+", 0, retain_handling=2)
        before = world.db.sessions["client"].subscriptions
        world.reopen()
        resumed = world.db.sessions.open("client", expiry_interval=None)
        assert before == world.db.sessions["client"].subscriptions
        world.db.publish([Message("t/a", b"1", "p", 2, True), Message("t/a", b"2", "client", 2)])
        settled(world)
        [item] = sent(resumed)
        assert (b"1", 2, True, (7,)) == (item.message.payload, item.qos, item.retain, item.subscription_identifiers)

    @requires("persistent")
    def test_nothing_comes_after_an_unsubscribe(self, world: World) -> None:
        """After an UNSUBSCRIBE, only messages of the other filters are delivered, also after a reopening."""
        session = subscribed(world)
        session.subscribe("u/#", 1)
        world.db.publish(numbered(range(3)))
        assert session.unsubscribe("t/#")
        assert not session.unsubscribe("t/#")
        world.db.publish([*numbered(range(3, 6)), *numbered([9], topic="u")])
        settled(world)
        assert [9] == delivered(session)
        world.reopen()
        resumed = world.db.sessions.open("client", expiry_interval=None)
        assert ["u/#"] == [text for text, _ in world.db.sessions["client"].subscriptions]
        world.db.publish(numbered(range(6, 9)))
        settled(world)
        assert [9] == delivered(resumed, acknowledge=True)
        resumed.subscribe("t/#", 1)
        world.db.publish(numbered([10]))
        settled(world)
        assert [10] == delivered(resumed)

    def test_only_wanted_messages_are_stored(self, world: World) -> None:
        """A message is stored for a subscription until its end, or the end of its session in any way."""
        ends: dict[str, Callable[[Session], object]] = {
            "unsubscribe": lambda session: session.unsubscribe("t/#"),
            "expire": lambda session: world.db.sessions.expire(session.client_id),
            "disconnect": lambda session: session.disconnect(expiry_interval=0),
            "clean start": lambda session: world.db.sessions.open(session.client_id, clean_start=True),
            "interval": lambda session: session.lost(),
        }
        for number, (name, end) in enumerate(ends.items()):
            interval = 10 if name == "interval" else None
            session = subscribed(world, client_id=name, expiry_interval=interval)
            assert world.db.sessions.wants("t/a")
            assert 1 == world.db.publish(numbered([number])).stored
            end(session)
            world.clock.now += 11 * SECOND
            world.db.sessions.tick()
            assert not world.db.sessions.wants("t/a"), name
            assert 0 == world.db.publish(numbered([100])).stored, name
        assert [0, 1, 2, 3, 4] == sorted(payloads(world.db.replay("#")))

    def test_nothing_is_left_of_what_ended(self, world: World) -> None:
        """A subscription or session that has ended leaves no stored state: no exchanges and no will."""
        world.db.sessions.open("stays", expiry_interval=None).subscribe("t/#", 1)
        world.clock.now += DAY
        world.db.sessions.tick()  # the opening of a session may store the clock
        before = stored_keys(world.db)
        will = Will(Message("will", b"1", "client", 1), delay=5)
        session = world.db.sessions.open("client", expiry_interval=10, will=will)
        with_session = stored_keys(world.db)
        for text in ("t/#", "$share/group/t/+", "u/#"):
            session.subscribe(text, 2)
            world.db.publish([*numbered(range(3), qos=2), Message("u/kept", b"1", "p", 1, True)])
            world.db.publish([Message("u/kept", b"", "p", 1, True)])
            settled(world)
            ids = [item.packet_id for item in sent(session)]
            session.puback(*ids)
            session.pubrec(*ids)
            session.deliver()
            session.pubcomp(*ids)
            session.unsubscribe(text)
            session.checkpoint()
            assert with_session == stored_keys(world.db), text
        session.subscribe("t/#", 2)
        world.db.publish(numbered(range(3), qos=2))
        settled(world)
        sent(session)
        session.publish([Message("x", b"1", "client", 2)], [9])
        session.lost()
        world.db.sessions.open("client", expiry_interval=10).lost()
        world.clock.now += 11 * SECOND
        world.db.sessions.tick()
        assert before == stored_keys(world.db)

    def test_a_clean_start_begins_anew(self, world: World) -> None:
        """A clean start ends the earlier session: its subscriptions, messages and exchanges are gone."""
        session = subscribed(world)
        world.db.persistence.add("#")
        world.db.publish(numbered(range(4)))
        settled(world)
        first = [item.packet_id for item in session.deliver(2) if isinstance(item, Publish)]
        session.publish([Message("t/a", b"9", "client", 2)], [5])
        new = world.db.sessions.open("client", clean_start=True, expiry_interval=None)
        assert (False, [], 0) == (new.present, new.deliver(), new.puback(*first))
        assert () == world.db.sessions["client"].subscriptions
        assert 0 == new.pubrel(5)
        new.subscribe("t/#", 1, retain_handling=2)
        world.db.publish(numbered([10]))
        settled(world)
        assert [10] == delivered(new)

    @requires("persistent")
    def test_a_session_that_expired_unnoticed(self, world: World) -> None:
        """A session whose expiry interval has passed is not resumed, even if no tick has removed it."""
        for reopened in (False, True):
            session = subscribed(world, client_id="client", expiry_interval=10)
            assert not session.present
            session.lost()
            world.clock.now += 10 * SECOND
            if reopened:
                world.reopen()
            new = world.db.sessions.open("client", expiry_interval=10)
            assert (False, ()) == (new.present, world.db.sessions["client"].subscriptions)
            new.disconnect(expiry_interval=0)

    @requires("persistent")
    def test_bounded_backlogs_lose_the_oldest(self, world: World) -> None:
        """A session, connected or not, whose backlog exceeds its bound loses the oldest messages."""
        near = subscribed(world, client_id="near")
        subscribed(world, client_id="away").lost()
        subscribed(world, client_id="free").lost()
        for number in range(12):
            world.db.publish(numbered([number]))
            world.clock.now += SECOND
        settled(world)
        skipped = world.db.sessions.bound_backlogs(["near", "away", "unknown"], max_messages=5)
        assert {"near": 7, "away": 7} == {name: one.messages for name, one in skipped.items()}
        assert list(range(7, 12)) == sorted(delivered(near, acknowledge=True))
        world.reopen()
        for name, first in (("away", 7), ("near", 12), ("free", 0)):
            session = world.db.sessions.open(name, expiry_interval=None)
            assert list(range(first, 12)) == sorted(delivered(session, acknowledge=True))

    def test_late_sessions_miss_the_oldest_routed_messages(self, world: World) -> None:
        """A session that reads too late misses only the oldest unstored messages, and reports their number."""
        session = subscribed(world, 0)
        for first in range(0, 12_000, 500):
            world.db.publish(numbered(range(first, first + 500), qos=0, client_id="p"))
        found = [number for _ in range(12) for number in payloads(item.message for item in sent(session))]
        missed = session.status().missed
        assert 0 < missed < 12_000
        assert list(range(missed, 12_000)) == found

    def test_changed_subscriptions_keep_their_messages(self, world: World) -> None:
        """Messages published before a repeated SUBSCRIBE are delivered once, with the earlier options."""
        session = subscribed(world, 2)
        world.db.publish(numbered(range(3), qos=2, client_id="p"))
        session.subscribe("t/#", 1, subscription_identifier=3, retain_handling=2)
        world.db.publish(numbered(range(3, 6), qos=2, client_id="p"))
        settled(world)
        rows = sorted((int(i.message.payload), i.qos, i.subscription_identifiers) for i in sent(session))
        assert [(n, 2, ()) if n < 3 else (n, 1, (3,)) for n in range(6)] == rows

    def test_refused_messages_are_not_sent(self, world: World) -> None:
        """A message that the session's ``allow`` refuses is not sent then or later, and all others are."""

        def allow(messages: list[Message]) -> list[bool]:
            return [int(message.payload) % 3 != 0 for message in messages]

        session = subscribed(world, allow=allow)
        world.db.publish(numbered(range(9)))
        settled(world)
        wanted = [number for number in range(9) if number % 3]
        assert wanted == sorted(delivered(session, acknowledge=True))
        assert 3 == session.status().refused
        session.restrict(None)
        assert [] == delivered(session)
        world.db.publish([ts.Message("t/a", b"9", "p", 1)])
        settled(world)
        assert [9] == delivered(session)

    def test_deliveries_of_some_bytes(self, world: World) -> None:
        """A delivery has at most ``max_bytes`` of payloads, or one message; the others come later or expire."""
        session = subscribed(world)
        expiry = ts.Properties(message_expiry_interval=10)
        world.db.publish(numbered(range(10), client_id="p"))
        rows = [
            Message("t/a", b"%0100d" % number, "p", 1, properties=None if number % 2 else expiry)
            for number in range(10, 18)
        ]
        settled(world)
        # The next messages are larger than the session expects.
        assert list(range(10)) == sorted(delivered(session, acknowledge=True))
        world.db.publish(rows)
        settled(world)
        found: list[Publish] = []
        for passed, expected in ((0, [(10, 10), (11, None)]), (4, [(12, 6), (13, None)])):
            world.clock.now += passed * SECOND
            some = [item for item in session.deliver(max_bytes=250) if isinstance(item, Publish)]
            assert expected == [(int(item.message.payload), item.expiry) for item in some]
            found += some
        world.clock.now += 20 * SECOND
        while some := [item for item in session.deliver(max_bytes=250) if isinstance(item, Publish)]:
            found += some
        assert [10, 11, 12, 13, 15, 17] == [int(item.message.payload) for item in found]
        assert 6 == session.status().in_flight == session.puback(*(item.packet_id for item in found))
        world.db.publish([Message("t/a", b"%0500d" % number, "p", 1) for number in (18, 19)])
        settled(world)
        assert [["18"], ["19"]] == [[text.lstrip("0") for text in texts(session, max_bytes=1)] for _ in range(2)]

    def test_paused_sessions_are_sent_nothing(self, world: World) -> None:
        """A paused session gets no new messages and no redeliveries; after it resumes, no message is lost or repeated.

        After `resume` the messages in flight are redelivered with DUP, under their packet ids.
        """
        session = subscribed(world)
        world.db.publish(numbered(range(4)))
        settled(world)
        first = [item.packet_id for item in session.deliver(2) if isinstance(item, Publish)]
        session.lost()
        session = world.db.sessions.open("client", expiry_interval=None)
        for number in (4, 5):
            session.pause()
            world.db.publish(numbered([number]))
            settled(world)
            assert ([], "resume", 1) == (
                session.deliver(),
                session.status().waits_for,
                world.db.sessions.counts().paused,
            )
            session.resume()
            again = session.deliver(2)
            assert (first, {True}) == (
                [item.packet_id for item in again],
                {isinstance(item, Publish) and item.dup for item in again},
            )
            session.lost()
            session = world.db.sessions.open("client", expiry_interval=None)
        assert list(range(6)) == sorted(delivered(session, acknowledge=True))
        assert ("nothing", 0) == (session.status().waits_for, world.db.sessions.counts().paused)

    def test_undecided_messages_wait(self, world: World) -> None:
        """While the session's ``allow`` returns None, no message is sent or redelivered; later, each is sent once."""
        answer: bool | None = None

        def allow(messages: Sequence[Message]) -> list[bool | None]:
            return [answer] * len(messages)

        session = subscribed(world, allow=allow)
        world.db.publish(numbered(range(3)))
        settled(world)
        first: list[int] = []
        for _ in range(2):
            answer = None
            for _ in range(2):
                assert ([], "permission") == (session.deliver(), session.status().waits_for)
                session.ask_again()
            answer = True
            ids = [item.packet_id for item in sent(session, 2)]
            assert ids == first or not first
            first = ids
            session.lost()
            session = world.db.sessions.open("client", expiry_interval=None, allow=allow)
        assert list(range(3)) == sorted(delivered(session, acknowledge=True))
