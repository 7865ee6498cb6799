"""What a connected session is delivered, and under which options."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from unittest.mock import patch

import pytest
import topicstore as ts
from topicstore.contract.state import StateWrite
from topicstore.sessions import Publish, PubRel, Session, Sessions
from topicstore.shard.state import OWN, ShardState
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until

Publishing = Callable[..., None]
SECOND = 1_000_000


def payloads(items: list[Publish | PubRel]) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]


def ids(items: list[Publish | PubRel]) -> list[int]:
    return [item.packet_id for item in items]


def opened(sessions: Sessions, topic_filter: str = "a/#", qos: int = 1, **options: object) -> Session:
    session = sessions.open("subscriber", expiry_interval=None)
    assert session.subscribe(topic_filter, qos, **options).created  # type: ignore[arg-type]
    return session


def test_all_are_delivered_the_same_object(sessions: Sessions, publish: Publishing) -> None:
    """By whatever filter, with whatever options: a server can encode it once for all."""
    for number, (topic_filter, qos) in enumerate([("a/#", 1), ("a/#", 2), ("#", 1), ("a/+", 0)]):
        sessions.open(f"client-{number}").subscribe(topic_filter, qos, retain_as_published=bool(number % 2))
    publish("1", topic="a/b")
    items = [item for _, some in sessions.deliver() for item in some if isinstance(item, Publish)]
    assert 4 == len(items)
    assert 1 == len({id(item.message) for item in items})


# --- QoS ---


def test_the_lower_qos_counts(db: ts.Database, sessions: Sessions) -> None:
    """The message's or the subscription's."""
    session = opened(sessions, "#", 2)
    one = sessions.open("one", expiry_interval=None)
    one.subscribe("#", 1)
    db.publish([ts.Message("t", b"%d" % qos, "publisher", qos) for qos in (0, 1, 2)])
    assert [0, 1, 2] == [item.qos for item in session.deliver() if isinstance(item, Publish)]
    assert [0, 1, 1] == [item.qos for item in one.deliver() if isinstance(item, Publish)]


def test_qos_0_needs_no_packet_id_and_no_room(sessions: Sessions, publish: Publishing) -> None:
    """It flows on while the window is full."""
    session = sessions.open("subscriber", expiry_interval=None, receive_maximum=1)
    session.subscribe("a/#", 1)
    session.subscribe("z/#", 0)
    publish("1", "2")
    assert [1] == ids(session.deliver())
    publish("live", topic="z/z")
    assert [("live", 0)] == [(i.message.payload.decode(), i.packet_id) for _, some in sessions.deliver() for i in some]  # type: ignore[union-attr]
    assert [] == session.deliver()


def test_qos_0_subscriptions_get_what_is_stored_and_what_is_not_in_order(db: ts.Database, sessions: Sessions) -> None:
    """Of one publisher, whichever way its messages went."""
    session = opened(sessions, "#", 0)
    sessions.open("durable", expiry_interval=None).subscribe("stored", 1)
    for number in range(6):
        topic = "stored" if number % 2 else "live"
        db.publish([ts.Message(topic, b"%d" % number, "publisher", 1)])
    assert 3 == db.info().messages
    assert ["0", "1", "2", "3", "4", "5"] == payloads(session.deliver())


def test_qos_0_subscriptions_get_nothing_of_their_absence(sessions: Sessions, publish: Publishing) -> None:
    """They are served live only."""
    session = opened(sessions, "a/#", 0)
    other = sessions.open("other", expiry_interval=None)
    other.subscribe("a/#", 1)
    publish("1")
    assert ["1"] == payloads(session.deliver())
    session.disconnect()
    publish("2")
    session = sessions.open("subscriber", expiry_interval=None)
    publish("3")
    assert ["3"] == payloads(session.deliver())
    assert ["1", "2", "3"] == payloads(other.deliver())


def test_only_what_somebody_wants_is_stored_and_once(db: ts.Database, sessions: Sessions, publish: Publishing) -> None:
    """However many sessions want it; a subscription of QoS 0 doesn't."""
    for number in range(5):
        sessions.open(f"c{number}", expiry_interval=None).subscribe("a/#", 1)
    sessions.open("zero", expiry_interval=None).subscribe("z/#", 0)
    publish("1", "2")
    publish("3", topic="z/1")
    assert 2 == db.info().messages
    assert 5 == sum(["1", "2"] == payloads(items) for _, items in sessions.deliver())


def test_what_is_wanted_follows_subscriptions_and_sessions(sessions: Sessions) -> None:
    """Those of other processes' times, too, and until the last is gone."""
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
    """By a call that comes when the end is committed, and not counted yet: the next subscription is wanted."""
    session = opened(sessions)
    if changing == "expire":
        session.disconnect()
    write, reading = ShardState.write, list[Future[bool]]()

    def beside(self: ShardState, writes: Iterable[StateWrite]) -> None:
        write(self, writes)
        if not reading and not list(sessions._states.all_subscriptions()):
            reading.append(begin(lambda: sessions.wants("a/b")))
            wait_until(lambda: reading[0].done() or sessions._dispatcher.claims._waiting, "the other call to read")

    with patch.object(ShardState, "write", beside):
        if changing == "expire":
            sessions.expire("subscriber")
        else:
            assert session.unsubscribe("a/#")
    assert [False] == [call.result(PATIENCE) for call in reading]
    sessions.open("other", expiry_interval=None).subscribe("a/#", 1)
    assert sessions.wants("a/b")


# --- options ---


def test_no_local_leaves_out_what_the_client_published(db: ts.Database, sessions: Sessions) -> None:
    """Stored, or live only."""
    session = opened(sessions, "#", 1, no_local=True)
    zero = sessions.open("zero", expiry_interval=None)
    zero.subscribe("#", 0, no_local=True)
    for client_id in ("zero", "subscriber", "publisher"):
        db.publish([ts.Message("t", client_id.encode(), client_id, 1)])
    assert ["publisher", "zero"] == sorted(payloads(session.deliver()))
    session.unsubscribe("#")
    db.publish([ts.Message("t", b"live", "zero", 1), ts.Message("t", b"live", "publisher", 1)])
    assert ["live", "publisher", "subscriber"] == sorted(payloads(zero.deliver()))


def test_retain_is_sent_as_published_only_if_asked_for(db: ts.Database, sessions: Sessions) -> None:
    """To those that follow a topic it is a message like any other."""
    session = opened(sessions, "a/+", 1, retain_as_published=True)
    session.subscribe("a/#", 1)
    db.publish([ts.Message("a/1", b"x", "publisher", 1, retain=True), ts.Message("a/2", b"x", "publisher", 1)])
    flags = [(item.message.topic, item.retain) for item in session.deliver() if isinstance(item, Publish)]
    assert [("a/1", True), ("a/2", False), ("a/1", False), ("a/2", False)] == flags


def test_each_matching_subscription_delivers_with_its_identifier(sessions: Sessions, publish: Publishing) -> None:
    """At its own QoS."""
    session = opened(sessions, "a/#", 1, subscription_identifier=7)
    session.subscribe("a/b", 2, subscription_identifier=8)
    publish("1", qos=2)
    found = [(i.subscription_identifiers, i.qos) for i in session.deliver() if isinstance(i, Publish)]
    assert [((7,), 1), ((8,), 2)] == sorted(found)


def test_options_change_for_messages_from_then_on(sessions: Sessions, publish: Publishing) -> None:
    """What was stored before comes by the options of its time, also behind a resumption."""
    session = opened(sessions, "a/#", 2, subscription_identifier=1)
    publish("1", "2", qos=2)
    assert not session.subscribe("a/#", 1, subscription_identifier=2).created
    publish("3", qos=2)
    session.lost()
    session = sessions.open("subscriber", expiry_interval=None)
    assert not session.subscribe("a/#", 0, subscription_identifier=3).created
    publish("4", qos=2)
    found = [(i.message.payload, i.qos, i.subscription_identifiers[0]) for i in session.deliver()]  # type: ignore[union-attr]
    assert [(b"1", 2, 1), (b"2", 2, 1), (b"3", 1, 2), (b"4", 0, 3)] == found


def test_a_subscription_that_turned_to_qos_0_is_wanted_until_its_last_stored_message(
    sessions: Sessions, publish: Publish
) -> None:
    """Then nothing is stored for it any more."""
    session = opened(sessions, "a/#", 1)
    publish("1")
    session.subscribe("a/#", 0)
    assert sessions.wants("a/b")
    assert ["1"] == payloads(session.deliver())
    publish("2")
    assert ["2"] == payloads(session.deliver())
    assert not sessions.wants("a/b")


def test_unsubscribing_ends_deliveries_but_not_exchanges(sessions: Sessions, publish: Publishing) -> None:
    """What is in flight is sent again after a resumption though its subscription is gone."""
    session = opened(sessions)
    publish("1", "2")
    assert [1, 2] == ids(session.deliver())
    publish("3")
    assert session.unsubscribe("a/#")
    assert not session.unsubscribe("a/#")
    assert session.puback(1)
    session.lost()
    session = sessions.open("subscriber", expiry_interval=None)
    assert ["2"] == payloads(session.deliver())
    assert [] == session.deliver()


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
    """And nothing is subscribed."""
    session = sessions.open("subscriber")
    with pytest.raises(ts.InvalidArgumentError):
        session.subscribe("a", **arguments)  # type: ignore[arg-type]
    assert () == session.status().subscriptions


# --- the window ---


def test_no_more_is_in_flight_than_the_client_takes(sessions: Sessions, publish: Publishing) -> None:
    """Each acknowledgement makes room for one more; QoS 2 only when its exchange is over."""
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
    """Of ids never given out, of the wrong kind, or repeated."""
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
    """Before any of the call's is acknowledged."""
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
    """There is nothing to release."""
    session = opened(sessions, qos=2)
    publish("1", qos=2)
    assert [1] == ids(session.deliver())
    assert session.pubrec(1, accepted=False)
    assert [] == session.deliver()
    assert 0 == session.status().in_flight


def test_a_repeated_pubrec_is_answered_again(sessions: Sessions, publish: Publishing) -> None:
    """Whether or not its PUBREL was lost."""
    session = opened(sessions, qos=2)
    publish("1", qos=2)
    session.deliver()
    assert session.pubrec(1)
    assert session.pubrec(1)
    assert [PubRel(1)] == session.deliver()
    assert session.pubrec(1)
    assert [PubRel(1)] == session.deliver()


def test_deliveries_come_in_portions_of_what_was_asked_for(sessions: Sessions, publish: Publishing) -> None:
    """And nothing is lost between two of them."""
    session = opened(sessions)
    publish(*map(str, range(10)))
    found = [payloads(session.deliver(limit=4)) for _ in range(4)]
    assert [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"], []] == found


def test_each_publishers_order_is_kept_over_shards(db: ts.Database, sessions: Sessions) -> None:
    """With messages of many publishers fetched a few at a time."""
    session = opened(sessions)
    for number in range(50):
        db.publish([ts.Message("a/b", b"%d" % number, f"p{publisher}", 1) for publisher in range(6)])
    found: list[Publish] = []
    while items := session.deliver(limit=7):
        found += items  # type: ignore[arg-type]
    assert 300 == len(found)
    for publisher in range(6):
        mine = [int(item.message.payload) for item in found if item.message.client_id == f"p{publisher}"]
        assert list(range(50)) == mine


# --- expiry of messages ---


def message(payload: str, seconds: int | None) -> ts.Message:
    properties = ts.Properties(message_expiry_interval=seconds)
    return ts.Message("a/b", payload.encode(), "publisher", 1, properties=properties)


def test_expired_messages_are_left_out_and_what_is_left_is_told(
    db: ts.Database, sessions: Sessions, clock: Clock
) -> None:
    """Counted from when they were stored."""
    session = opened(sessions)
    db.publish([message("short", 10), message("long", 100), message("endless", None)])
    clock.now += 10 * SECOND
    found = [(i.message.payload, i.expiry) for i in session.deliver() if isinstance(i, Publish)]
    assert [(b"long", 90), (b"endless", None)] == found
    assert [] == session.deliver()


def test_live_messages_expire_while_nobody_fetches_them(db: ts.Database, sessions: Sessions, clock: Clock) -> None:
    """As stored ones do."""
    session = opened(sessions, "a/#", 0)
    db.publish([message("short", 10), message("long", 100)])
    sessions.wait(0)
    clock.now += 10 * SECOND
    assert [("long", 90)] == [(i.message.payload.decode(), i.expiry) for i in session.deliver()]  # type: ignore[union-attr]


# --- retained messages ---


def retain(db: ts.Database, *topics: str, qos: int = 1) -> None:
    db.publish([ts.Message(topic, b"retained", "publisher", qos, retain=True) for topic in topics])


def topics(items: list[Publish | PubRel]) -> list[tuple[str, bool]]:
    return [(item.message.topic, item.retain) for item in items if isinstance(item, Publish)]


def test_retained_messages_come_when_a_subscription_is_made(db: ts.Database, sessions: Sessions) -> None:
    """With the flag, in order of topics, before or among what follows; unless handling says otherwise."""
    retain(db, "a/2", "a/1", "b")
    session = opened(sessions, "a/+", 1)
    assert [("a/1", True), ("a/2", True)] == topics(session.deliver())
    assert not session.subscribe("a/+", 1, retain_handling=1).created
    assert [] == session.deliver()
    assert not session.subscribe("a/+", 1, retain_handling=0).created
    assert [("a/1", True), ("a/2", True)] == topics(session.deliver())
    session.subscribe("b", 1, retain_handling=2)
    assert [] == session.deliver()
    session.subscribe("#", 1, retain_handling=1)
    assert [("a/1", True), ("a/2", True), ("b", True)] == topics(session.deliver())


def test_retained_messages_go_on_after_a_crash(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions]
) -> None:
    """Those in flight with DUP, the others where they were; nothing of it stays behind."""
    retain(db, *(f"a/{number}" for number in range(5)))
    session = opened(sessions, "a/+", 1)
    assert 2 == len(session.deliver(limit=2))
    session.puback(1)
    sessions.checkpoint()
    session = crash().open("subscriber", expiry_interval=None)
    assert [("a/1", True, 2)] == [(i.message.topic, i.dup, i.packet_id) for i in session.deliver()]  # type: ignore[union-attr]
    assert [("a/2", True), ("a/3", True), ("a/4", True)] == topics(session.deliver())
    assert 4 == session.puback(2, 3, 4, 5)
    session.checkpoint()
    left = [key for shard in range(2) for key, _ in db.state(shard).scan(OWN) if key[1:3] in (b"sf", b"sn")]
    assert [] == left
