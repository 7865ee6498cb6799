"""Deliveries to a connected session: stored messages, subscription options, and the in-flight window."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.sessions import Publish, PubRel, Session, Sessions
from topicstore.shard.writer import PendingWrite, ShardWriter
from topicstore_conformance.faults.clock import START
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until

Publishing = Callable[..., None]


def payloads(items: list[Publish | PubRel]) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]


def ids(items: list[Publish | PubRel]) -> list[int]:
    return [item.packet_id for item in items]


def opened(sessions: Sessions, topic_filter: str = "a/#", qos: int = 1, **options: object) -> Session:
    session = sessions.open("subscriber", expiry_interval=None)
    assert session.subscribe(topic_filter, qos, **options).created  # type: ignore[arg-type]
    return session


def test_all_are_delivered_the_same_object(sessions: Sessions, publish: Publishing) -> None:
    """All sessions are delivered the same message object whatever their filters.

    So a server can encode the message once for all sessions.
    """
    for number, (topic_filter, qos) in enumerate([("a/#", 1), ("a/#", 2), ("#", 1), ("a/+", 0)]):
        sessions.open(f"client-{number}").subscribe(topic_filter, qos, retain_as_published=bool(number % 2))
    publish("1", topic="a/b")
    items = [item for _, some in sessions.deliver() for item in some if isinstance(item, Publish)]
    assert 4 == len(items)
    assert 1 == len({id(item.message) for item in items})


# --- QoS ---


def test_only_what_somebody_wants_is_stored_and_once(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """A message is stored only if a subscription above QoS 0 matches it, and stored once however many match."""
    for number in range(5):
        sessions.open(f"c{number}", expiry_interval=None).subscribe("a/#", 1)
    sessions.open("zero", expiry_interval=None).subscribe("z/#", 0)
    publish("1", "2")
    publish("3", topic="z/1")
    assert 2 == db.info().messages
    assert 5 == sum(["1", "2"] == payloads(items) for _, items in sessions.deliver())


def test_what_is_wanted_follows_subscriptions_and_sessions(sessions: Sessions) -> None:
    """`Sessions.wants` is true for a topic while a subscription above QoS 0 matches, even of an absent session."""
    session = sessions.open("a", expiry_interval=None)
    other = sessions.open("b", expiry_interval=None)
    assert not sessions.wants("t/1")
    session.subscribe("t/+", 1)
    other.subscribe("t/+", 2)
    other.subscribe("t/#", 0)
    session.disconnect()
    assert sessions.wants("t/1")
    other.unsubscribe("t/+")
    assert sessions.wants("t/1")
    sessions.expire("a")
    assert not sessions.wants("t/1")


@pytest.mark.parametrize("changing", ["unsubscribe", "expire"])
def test_what_is_wanted_is_first_read_while_a_subscription_ends(sessions: Sessions, changing: str) -> None:
    """`Sessions.wants` sees a new subscription even if filters were first loaded while another subscription ended."""
    session = opened(sessions)
    if changing == "expire":
        session.disconnect()
    write, reading = ShardWriter.submit, list[Future[bool]]()

    def beside(self: ShardWriter, given: PendingWrite) -> PendingWrite:
        pending = write(self, given)
        if not reading and not list(sessions._registry.states.all_subscriptions()):
            reading.append(begin(lambda: sessions.wants("a/b")))
            wait_until(lambda: reading[0].done() or sessions._locks._waiting, "the other call to read")
        return pending

    with patch.object(ShardWriter, "submit", beside):
        if changing == "expire":
            sessions.expire("subscriber")
        else:
            assert session.unsubscribe("a/#")
    assert [False] == [call.result(PATIENCE) for call in reading]
    sessions.open("other", expiry_interval=None).subscribe("a/#", 1)
    assert sessions.wants("a/b")


# --- options ---


def test_a_subscription_that_turned_to_qos_0_is_wanted_until_its_last_stored_message(
    sessions: Sessions, publish: Publish
) -> None:
    """`Sessions.wants` stays true for a subscription changed to QoS 0 until its last stored message is delivered."""
    session = opened(sessions, "a/#", 1)
    publish("1")
    session.subscribe("a/#", 0)
    assert sessions.wants("a/b")
    assert ["1"] == payloads(session.deliver())
    publish("2")
    assert ["2"] == payloads(session.deliver())
    assert not sessions.wants("a/b")


@pytest.mark.parametrize(
    "arguments",
    [
        {"qos": 3},
        {"retain_handling": 3},
        {"subscription_identifier": -1},
        {"no_local": "yes"},
        {"retain_as_published": 1},
    ],
)
def test_options_out_of_range_are_refused(sessions: Sessions, arguments: dict[str, object]) -> None:
    """Subscription options that are out of range are refused, and nothing is subscribed."""
    session = sessions.open("subscriber")
    with pytest.raises(ts.InvalidArgumentError):
        session.subscribe("a", **arguments)  # type: ignore[arg-type]
    assert () == session.status().subscriptions


# --- the window ---


def test_no_more_is_in_flight_than_the_client_takes(sessions: Sessions, publish: Publishing) -> None:
    """No more messages are in flight than the client's receive maximum.

    A QoS 2 message leaves the window with its PUBCOMP.
    """
    session = sessions.open("subscriber", expiry_interval=None, receive_maximum=2)
    session.subscribe("a/#", 2)
    publish("1", "2", "3", "4", qos=2)
    assert ["1", "2"] == payloads(session.deliver())
    assert ("acknowledgements", START) == (session.status().waits_for, session.status().stuck_since)
    assert not sessions.wait(0)
    assert session.pubrec(1)
    assert [PubRel(1)] == session.deliver()
    assert [] == session.deliver()
    assert session.pubcomp(1)
    assert session.status().stuck_since is None
    assert ["3"] == payloads(session.deliver())


def test_unknown_acknowledgements_change_nothing(sessions: Sessions, publish: Publishing) -> None:
    """Acknowledgements that are repeated, of the wrong kind or with unknown packet ids change nothing."""
    session = opened(sessions, qos=2)
    publish("1", qos=1)
    publish("2", qos=2)
    assert [1, 2] == ids(session.deliver())
    assert not session.puback(2)
    assert not session.pubrec(1)
    assert not session.pubcomp(2)
    assert not session.puback(0)
    assert not session.puback(70_000)
    assert session.puback(1)
    assert not session.puback(1)
    assert 0 == session.puback(1, 1, 2)
    assert 1 == session.status().in_flight


@pytest.mark.parametrize("wrong", [[1, 2], "1", True, None, 1.0])
def test_what_is_no_packet_id_is_refused(sessions: Sessions, publish: Publishing, wrong: object) -> None:
    """A packet id that isn't an integer makes the call raise before any id of the call is acknowledged."""
    session = opened(sessions, qos=2)
    publish("1", qos=1)
    assert [1] == ids(session.deliver())
    for call in (session.puback, session.pubrec, session.pubcomp, session.pubrel):
        with pytest.raises(ts.InvalidArgumentError, match="packet ids are numbers"):
            call(1, wrong)  # type: ignore[arg-type]
    assert 1 == session.status().in_flight
    assert 0 == session.puback()
    assert 1 == session.puback(1)


def test_a_refused_message_of_qos_2_is_done_with(sessions: Sessions, publish: Publishing) -> None:
    """A QoS 2 message that the client refuses in its PUBREC is complete: no PUBREL follows."""
    session = opened(sessions, qos=2)
    publish("1", qos=2)
    assert [1] == ids(session.deliver())
    assert session.pubrec(1, accepted=False)
    assert [] == session.deliver()
    assert 0 == session.status().in_flight


def test_a_repeated_pubrec_is_answered_again(sessions: Sessions, publish: Publishing) -> None:
    """Every repeated PUBREC is answered with another PUBREL."""
    session = opened(sessions, qos=2)
    publish("1", qos=2)
    session.deliver()
    assert session.pubrec(1)
    assert session.pubrec(1)
    assert [PubRel(1)] == session.deliver()
    assert session.pubrec(1)
    assert [PubRel(1)] == session.deliver()
