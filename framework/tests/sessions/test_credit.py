"""Limits on deliveries to a client: pausing, limits in bytes, and permissions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import topicstore as ts
from topicstore.pubsub.nonpersistent import MOST, MOST_BYTES
from topicstore.sessions import Overlapping, Publish, PubRel, Session, Sessions
from topicstore_conformance.faults.clock import Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000


def payloads(items: Sequence[Publish | PubRel]) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]


def delivered(sessions: Sessions) -> dict[str, list[str]]:
    return {session.client_id: payloads(items) for session, items in sessions.deliver()}


def subscribed(sessions: Sessions, client_id: str = "client", qos: int = 1, topic_filter: str = "a/#") -> Session:
    session = sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, qos)
    sessions.deliver()
    return session


# --- pausing ---


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_paused_session_gets_nothing_until_it_is_resumed(sessions: Sessions, publish: Publishing, qos: int) -> None:
    """A paused session is delivered nothing at any QoS until it is resumed.

    Then its messages arrive complete and in order. Meanwhile other sessions receive theirs, and the paused session
    wakes no waiting thread.
    """
    session, other = subscribed(sessions, qos=qos), subscribed(sessions, "other")
    publish("1", "2", qos=qos)
    session.pause()
    session.pause()
    publish("3", qos=qos)
    assert {"other": ["1", "2", "3"]} == delivered(sessions) if qos else not sessions.deliver() or other
    assert [] == session.deliver()
    assert not sessions.wait(0)
    assert "resume" == session.status().waits_for
    assert 1 == sessions.counts().paused
    publish("4", qos=qos)
    sessions.tick()
    assert "client" not in delivered(sessions)
    assert not sessions.wait(0)
    session.resume()
    session.resume()
    assert sessions.wait(0)
    assert {"client": ["1", "2", "3", "4"]} == delivered(sessions)
    assert "resume" != session.status().waits_for
    assert 0 == sessions.counts().paused


def test_resuming_wakes_only_for_something(sessions: Sessions) -> None:
    """Resuming a session wakes no waiting thread if no message arrived for it during the pause."""
    session = subscribed(sessions)
    session.pause()
    session.resume()
    assert not sessions.wait(0)
    assert [] == sessions.deliver()


def test_what_was_not_taken_before_a_pause_comes_after_it(sessions: Sessions, publish: Publishing) -> None:
    """Messages and PUBRELs that exceeded a delivery's limit of bytes before a pause are delivered after the pause."""
    session = subscribed(sessions, qos=2)
    publish(*"123", qos=2)
    assert ["1"] == payloads(session.deliver(max_bytes=1))
    assert 1 == session.pubrec(1)
    session.pause()
    assert [] == session.deliver()
    session.resume()
    items = session.deliver()
    assert ["2", "3"] == payloads(items)
    assert [PubRel(1)] == items[2:]


def test_what_is_stored_nowhere_waits_within_bounds(sessions: Sessions, db: ts.Database) -> None:
    """Unstored messages wait for a paused session up to a limit; then the oldest are dropped and counted as missed."""
    session = subscribed(sessions, qos=0)
    session.pause()
    for start in range(0, MOST + 10, 1_000):
        numbers = range(start, min(start + 1_000, MOST + 10))
        db.publish([ts.Message("a", b"%d" % number, "publisher") for number in numbers])
        assert [] == sessions.deliver()
    session.resume()
    found = []
    while sessions.wait(0):
        found += [payload for _, items in sessions.deliver() for payload in payloads(items)]
    assert list(map(str, range(10, MOST + 10))) == found
    assert 10 == session.status().missed


@pytest.mark.parametrize("overlapping", ["each", "once"])
@pytest.mark.parametrize("size", [1, 2_000])
def test_every_message_that_is_dropped_is_counted(
    sessions: Sessions, db: ts.Database, overlapping: Overlapping, size: int
) -> None:
    """Every dropped message is counted for each session that would have received it, even before the session reads."""
    clients = [sessions.open(name, expiry_interval=None, overlapping=overlapping) for name in ("a", "b")]
    for session in clients:
        session.subscribe("a/#", 0)
    clients[1].subscribe("a/+", 0, no_local=True)
    for _ in range(120):
        db.publish([ts.Message("a/b", bytes(size), client) for client in "aaaabbbbcc" * 10])
    assert 0 < min(session.status().missed for session in clients)
    delivered = {"a": 0, "b": 0}
    while sessions.wait(0):
        for session, items in sessions.deliver():
            delivered[session.client_id] += len(items)
    missed = {session.client_id: session.status().missed for session in clients}
    copies = 12_000 + 1_200 * 6 if overlapping == "each" else 12_000
    assert (12_000, copies) == (delivered["a"] + missed["a"], delivered["b"] + missed["b"])
    assert sum(missed.values()) == sessions.counts().missed


@pytest.mark.parametrize("overlapping", ["each", "once"])
def test_large_ones_wait_within_bounds_too(sessions: Sessions, db: ts.Database, overlapping: Overlapping) -> None:
    """The bytes of waiting unstored messages are limited; a message larger than the limit replaces all others."""
    session = sessions.open("client", expiry_interval=None, overlapping=overlapping)
    session.subscribe("a/#", 0)
    if overlapping == "once":
        session.subscribe("a/+", 0)
    session.pause()
    size = MOST_BYTES // 4
    for number in range(10):
        db.publish([ts.Message("a/b", b"%d" % number + bytes(size - 1), "publisher")])
        assert [] == sessions.deliver()
    session.resume()
    found = [packet.message.payload[:1] for packet in session.deliver() if isinstance(packet, Publish)]
    assert [b"6", b"7", b"8", b"9"] == found
    assert 6 == session.status().missed
    session.pause()
    db.publish([ts.Message("a/b", bytes(size), "publisher"), ts.Message("a/b", bytes(MOST_BYTES + 1), "publisher")])
    assert [] == sessions.deliver()
    session.resume()
    [packet] = session.deliver()
    assert isinstance(packet, Publish)
    assert MOST_BYTES + 1 == len(packet.message.payload)


def test_others_get_the_share_of_a_member_that_is_paused(sessions: Sessions, publish: Publishing, clock: Clock) -> None:
    """A paused member of a shared subscription counts as slow: other members get its share until it is resumed."""
    members = [subscribed(sessions, name, topic_filter="$share/group/a/#") for name in ("one", "two")]
    members[0].pause()
    clock.now += 20 * SECOND
    sessions.tick()
    for number in range(50):
        publish(str(number), topic=f"a/{number}")
    assert {"two": sorted(map(str, range(50)))} == {name: sorted(got) for name, got in delivered(sessions).items()}
    members[0].resume()
    sessions.tick()
    for number in range(50):
        publish(str(number), topic=f"a/{number}")
    assert {"one", "two"} == delivered(sessions).keys()


# --- limits in bytes ---


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_that_wait_for_bytes_expire(
    sessions: Sessions, db: ts.Database, clock: Clock, qos: int, *, together: bool
) -> None:
    """Messages that wait because of a limit in bytes aren't sent after their expiry.

    Other messages carry the seconds that remain.
    """
    session = subscribed(sessions, qos=qos)
    for name, seconds in (("1", 10), ("2", 10), ("3", 100), ("4", None)):
        properties = ts.Properties(message_expiry_interval=seconds)
        db.publish([ts.Message("a", name.encode(), "publisher", qos, properties=properties)])
    assert ["1"] == payloads(session.deliver(max_bytes=1))
    clock.now += 10 * SECOND
    items = [item for _, some in sessions.deliver() for item in some] if together else session.deliver()
    sent = [item for item in items if isinstance(item, Publish)]
    assert [(b"3", 90), (b"4", None)] == [(item.message.payload, item.expiry) for item in sent]
    assert [] == session.deliver()
    assert (3 if qos else 0) == session.status().in_flight


def test_few_more_messages_are_read_than_bytes_permit(sessions: Sessions, db: ts.Database) -> None:
    """A delivery with a limit in bytes reads few messages beyond those that fit, so the window stays nearly free."""
    session = subscribed(sessions)
    db.publish([ts.Message("a", bytes(10_000), "publisher", 1) for _ in range(500)])
    assert 2 == len(session.deliver(max_bytes=25_000))
    assert session.status().in_flight <= 20


# --- permissions ---


def small(messages: Sequence[ts.Message]) -> list[bool]:
    return [len(message.payload) < 3 for message in messages]


def test_messages_that_are_refused_get_no_packet_id(sessions: Sessions, publish: Publishing, crash: Crash) -> None:
    """Messages that the callback ``allow`` refuses take no packet id and count as delivered, even after a crash."""
    session = sessions.open("client", expiry_interval=None, allow=small)
    session.subscribe("a/#", 1)
    publish("1", "large", "2", "large", "3", "large")
    assert [(1, "1"), (2, "2"), (3, "3")] == [
        (item.packet_id, item.message.payload.decode()) for item in session.deliver() if isinstance(item, Publish)
    ]
    assert (3, 3) == (session.status().refused, session.status().in_flight)
    publish("large")
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    assert 3 == session.puback(1, 2, 3)
    session.checkpoint()
    session = crash().open("client", expiry_interval=None)
    assert [] == session.deliver()


@pytest.mark.parametrize("qos", [0, 2])
def test_refusals_at_any_qos(sessions: Sessions, publish: Publishing, qos: int) -> None:
    """The callback ``allow`` is also called for retained and unstored messages, at QoS 0 and 2."""
    publish("1", topic="a/1", qos=2)
    session = sessions.open("client", expiry_interval=None, allow=small)
    session.subscribe("a/#", qos)
    publish("large", topic="a/2", qos=qos)
    publish("2", topic="a/2", qos=qos)
    assert {"client": ["2"]} == delivered(sessions)
    assert 1 == session.status().refused


def test_retained_messages_are_refused_too(sessions: Sessions, db: ts.Database) -> None:
    """A retained message that the callback ``allow`` refused is not sent again after the session resumes."""
    db.publish([ts.Message(f"a/{size}", b"x" * size, "publisher", 1, retain=True) for size in (1, 5)])
    session = sessions.open("client", expiry_interval=None, allow=small)
    session.subscribe("a/#", 1)
    assert ["x"] == payloads(session.deliver())
    session.lost()
    assert ["x"] == payloads(sessions.open("client", expiry_interval=None).deliver())


def test_what_is_resent_is_asked_for_again(sessions: Sessions, publish: Publishing) -> None:
    """The permission callback ``allow`` of the new connection decides on redelivered messages.

    A refused message leaves the in-flight window; only at QoS 2 does its packet id stay in use.
    """
    session = subscribed(sessions, qos=2)
    publish("1", "large")
    publish("2", "large", qos=2)
    assert 4 == len(session.deliver())
    session.lost()
    session = sessions.open("client", expiry_interval=None, allow=small)
    assert ["1", "2"] == payloads(session.deliver())
    assert [] == session.deliver()
    assert (2, 3) == (session.status().refused, session.status().in_flight)


@pytest.mark.parametrize("wrong", ["raises", "says too little"])
def test_a_session_for_which_it_cannot_be_said_keeps_no_other_waiting(
    sessions: Sessions, publish: Publishing, wrong: str
) -> None:
    """A session whose ``allow`` raises or returns too few answers delays no other session, and loses no message.

    The session reports the error as its failure, and gets its messages after the next tick.
    """
    failing = [True]

    def allow(messages: Sequence[ts.Message]) -> list[bool]:
        if failing and wrong == "raises":
            raise ValueError("who is that?")
        return [True] * (len(messages) - len(failing))

    session = sessions.open("client", expiry_interval=None, allow=allow)
    session.subscribe("a/#", 1)
    session.subscribe("b/#", 2)
    other = subscribed(sessions, "other")
    publish("1", "2")
    publish("3", topic="b/c")
    assert [other] == [who for who, _ in sessions.deliver()]
    assert isinstance(session.failure, ts.InvalidArgumentError)
    assert ("who is that?" if wrong == "raises" else "answers for 2 messages") in str(session.failure)
    assert not sessions.wait(0)
    with pytest.raises(ts.InvalidArgumentError):
        session.deliver()
    failing.clear()
    sessions.tick()
    assert sessions.wait(0)
    assert ["1", "2", "3"] == sorted(delivered(sessions)["client"])
    assert session.failure is None


class Deciding:
    """A permission callback that allows short messages, and answers None until `learn` has been called."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.asked: dict[str, None] = {}

    def __call__(self, messages: Sequence[ts.Message]) -> list[bool | None]:
        texts = [message.payload.decode() for message in messages]
        self.asked |= dict.fromkeys(text for text in texts if text not in self.known)
        return [len(text) < 3 if text in self.known else None for text in texts]

    def learn(self, session: Session) -> bool:
        """Make answers available for all messages of earlier calls, and call `ask_again`; return whether any is new."""
        new = set(self.asked) - self.known
        self.known |= new
        session.ask_again()
        return bool(new)


@pytest.mark.parametrize("overlapping", ["each", "once"])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_wait_until_it_is_known_whether_they_may_be_sent(
    sessions: Sessions, publish: Publishing, db: ts.Database, qos: int, in_memory: bool, overlapping: Overlapping
) -> None:
    """Messages wait while ``allow`` answers None, and arrive once and in order after an answer.

    Stored, retained and unstored messages wait alike. Meanwhile other sessions receive theirs.
    """
    decide = Deciding()
    expiry = 0 if in_memory else None
    db.publish([ts.Message("a/kept", b"k", "publisher", qos, retain=True)])
    other = subscribed(sessions, "other")
    session = sessions.open(
        "client", expiry_interval=expiry, allow=decide, clean_start=True, in_memory=in_memory, overlapping=overlapping
    )
    session.subscribe("a/#", qos)
    session.subscribe("b/c", qos)
    if overlapping == "once":
        session.subscribe("a/+", qos, retain_handling=2)
    got: list[str] = []
    for number in range(3):
        publish(f"a{number}", "large", f"z{number}", qos=qos)
        publish(f"b{number}", topic="b/c", qos=qos)
        assert {session.client_id for session, _ in sessions.deliver()} <= {"other"}
        assert not sessions.wait(0)
        assert session.status().waits_for == "permission"
        while decide.learn(session):
            while sessions.wait(0):
                got += delivered(sessions).get("client", [])
        assert session.status().waits_for == "nothing"
    in_a = [text for text in got if text[0] in "az"]
    assert in_a == ["a0", "z0", "a1", "z1", "a2", "z2"]
    assert sorted(got) == sorted([*in_a, "b0", "b1", "b2", "k"])
    assert other.status().waits_for == "acknowledgements" or other.ended is None


def test_an_answer_that_comes_while_it_is_asked_is_not_missed(sessions: Sessions, publish: Publishing) -> None:
    """If `ask_again` is called while ``allow`` runs, ``allow`` is called again, even for a session that didn't wait."""
    asked: list[int] = []

    def allow(messages: Sequence[ts.Message]) -> list[bool | None]:
        asked.append(len(messages))
        if len(asked) == 1:
            session.ask_again()
            return [None] * len(messages)
        return [True] * len(messages)

    session = sessions.open("client", expiry_interval=None, allow=allow)
    session.subscribe("a/#", 1)
    publish("1", "2")
    assert {"client": ["1", "2"]} == delivered(sessions)


def test_a_paused_session_stays_so_when_answers_come(sessions: Sessions, publish: Publishing) -> None:
    """A paused session stays paused when ``allow`` can answer, and gets its messages after it is resumed."""
    decide = Deciding()
    session = sessions.open("client", expiry_interval=None, allow=decide)
    session.subscribe("a/#", 1)
    publish("1")
    assert {} == delivered(sessions)
    session.pause()
    assert decide.learn(session)
    assert {} == delivered(sessions)
    assert session.status().waits_for == "resume"
    session.resume()
    assert {"client": ["1"]} == delivered(sessions)


def test_what_is_resent_waits_until_it_is_known_whether_it_may_be(sessions: Sessions, publish: Publishing) -> None:
    """Redelivered messages that wait for permission keep their order, and come before newer messages."""
    session = subscribed(sessions)
    publish("1", "large", "2")
    assert 3 == len(session.deliver())
    session.lost()
    publish("3")
    decide = Deciding()
    session = sessions.open("client", expiry_interval=None, allow=decide)
    assert [] == session.deliver()
    got: list[str] = []
    while decide.learn(session):
        got += payloads(session.deliver()) + payloads(session.deliver())
    assert ["1", "2", "3"] == got
    assert (1, 3) == (session.status().refused, session.status().in_flight)


def test_other_rights_hold_for_all_that_was_not_handed_out(sessions: Sessions, publish: Publishing) -> None:
    """New rights apply to all messages that weren't handed out yet, even if they have packet ids.

    Those packet ids become free. Broader rights later don't bring the refused messages back.
    """
    session = subscribed(sessions)
    publish("1", "large", "2", "large")
    assert ["1"] == payloads(session.deliver(max_bytes=1))
    session.restrict(small)
    publish("large", "3")
    assert ["2", "3"] == payloads([*session.deliver(), *session.deliver()])
    assert 3 == session.status().in_flight
    session.restrict(None)
    publish("large")
    assert ["large"] == payloads(session.deliver())
