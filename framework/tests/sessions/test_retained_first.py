"""Retained messages arrive before newer messages of their topics, read in pages, whenever they are read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.sessions import Overlapping, Publish, PubRel, Session, Sessions
from topicstore.sessions.records import InFlightRecord, StoredInFlight, decode, put
from topicstore.shard.state import OWN, FrameworkWrite
from topicstore.storage.keyed_messages import state_key
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import Clock


def retain(db: ts.Database, topic: str, payload: bytes, qos: int = 1) -> None:
    db.publish([ts.Message(topic, payload, "publisher", qos, retain=True)])


def live(db: ts.Database, topic: str, payload: bytes, qos: int = 1) -> None:
    db.publish([ts.Message(topic, payload, "publisher", qos)])


def payloads(items: list[Publish | PubRel]) -> list[bytes]:
    return [item.message.payload for item in items if isinstance(item, Publish)]


def opened(sessions: Sessions, qos: int, receive_maximum: int = 65_535) -> Session:
    session = sessions.open("subscriber", expiry_interval=None, receive_maximum=receive_maximum)
    session.subscribe("a/#", qos)
    return session


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_newer_message_comes_after_the_retained_one(db: ts.Database, sessions: Sessions, qos: int) -> None:
    """A newer message arrives after the retained one of its topic, stored or not, even with a limit of one message."""
    retain(db, "a/1", b"old")
    retain(db, "a/2", b"other")
    session = opened(sessions, qos)
    live(db, "a/1", b"new")
    found: list[bytes] = []
    while items := session.deliver(limit=1):
        found += payloads(items)
    assert [b"old", b"other", b"new"] == found


def test_one_that_was_replaced_meanwhile_comes_in_its_newer_form(db: ts.Database, sessions: Sessions) -> None:
    """If a retained message is replaced before delivery, the new one arrives, and again as an ordinary message.

    If the retained message is cleared before delivery, only the empty message that cleared it arrives.
    """
    retain(db, "a/1", b"old")
    retain(db, "a/2", b"gone")
    session = opened(sessions, 1)
    retain(db, "a/1", b"new")
    retain(db, "a/2", b"")
    found = [item for item in session.deliver() if isinstance(item, Publish)]
    assert [("a/1", b"new", True), ("a/1", b"new", False), ("a/2", b"", False)] == [
        (item.message.topic, item.message.payload, item.retain) for item in found
    ]


def test_many_come_once_each_in_order(db: ts.Database, sessions: Sessions) -> None:
    """More retained messages than one page holds arrive once each, in the order of topics."""
    topics = [f"a/{number:04}" for number in range(2_500)]
    db.publish([ts.Message(topic, b"x", f"publisher {topic}", 1, retain=True) for topic in topics])
    session = opened(sessions, 1)
    live(db, "a/0000", b"new")
    found: list[Publish] = []
    while items := session.deliver(limit=700):
        found += [item for item in items if isinstance(item, Publish)]
    assert [*topics, "a/0000"] == [item.message.topic for item in found]


def test_nothing_is_noted_where_there_are_none(db: ts.Database, sessions: Sessions) -> None:
    """A subscription without matching retained messages stores no record for them and delays no newer message."""
    retain(db, "b", b"other")
    session = opened(sessions, 1)
    assert [] == [key for shard in range(2) for key, _ in db.state(shard).scan(OWN + b"sn")]
    live(db, "a/1", b"new")
    assert [b"new"] == payloads(session.deliver())


def test_a_damaged_one_holds_up_its_subscription_only(db: ts.Database, sessions: Sessions) -> None:
    """A damaged retained message delays only its own subscription until the repair; the failure is reported.

    After the repair, all retained messages of the subscription are delivered.
    """
    for number in range(40):
        retain(db, f"a/{number:02}", b"%d" % number)
    key = state_key(b"ra/39")
    state = db.state(db.shard_of("a/39"))
    stored = state.get(key)
    session = opened(sessions, 1)
    session.subscribe("b", 1)
    state.write([FrameworkWrite(key, b"damaged")])
    live(db, "a/01", b"new")
    live(db, "b", b"of another")
    assert [b"of another"] == payloads(session.deliver())
    assert isinstance(session.failure, ts.CorruptionError)
    state.write([FrameworkWrite(key, stored)])
    sessions.tick()
    assert [*(b"%d" % number for number in range(40)), b"new"] == payloads(session.deliver())


def test_a_change_of_qos_is_not_for_those_on_their_way(db: ts.Database, sessions: Sessions) -> None:
    """A changed QoS doesn't apply to retained messages that are already being sent.

    Retained messages at QoS 0 still ignore the receive maximum, and newer messages at QoS 1 respect it.
    """
    for number in range(3):
        retain(db, f"a/{number}", b"%d" % number)
    session = opened(sessions, 0, receive_maximum=1)
    assert [b"0"] == payloads(session.deliver(limit=1))
    session.subscribe("a/#", 1, retain_handling=2)
    live(db, "a/1", b"new")
    assert [(b"1", 0), (b"2", 0), (b"new", 1)] == [
        (item.message.payload, item.packet_id) for item in session.deliver() if isinstance(item, Publish)
    ]


def test_an_end_is_stored_before_what_comes_after_it(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions]
) -> None:
    """The session records that all retained messages were sent before later messages are delivered.

    Otherwise a retained message older than a delivered one could arrive after a crash.
    """
    retain(db, "a/1", b"gone")
    session = opened(sessions, 1)
    retain(db, "a/1", b"")  # no retained message remains to be sent
    assert [b""] == payloads(session.deliver())
    retain(db, "a/1", b"1")
    live(db, "a/1", b"2")
    items = session.deliver()
    assert [b"1", b"2"] == payloads(items)
    session = crash().open("subscriber", expiry_interval=None)
    again = payloads(session.deliver())
    assert [b"", b"1", b"2"] == again
    assert [] == session.deliver()


@pytest.mark.parametrize("together", [True, False])
def test_newer_messages_come_when_all_that_was_to_be_sent_again_has_vanished(
    db: ts.Database, sessions: Sessions, *, together: bool
) -> None:
    """When all messages due for redelivery have vanished, the same call delivers newer messages."""
    session = opened(sessions, 1, receive_maximum=1)
    live(db, "a/1", b"old")
    assert [b"old"] == payloads(session.deliver())
    db.delete("a/1")
    live(db, "a/1", b"new")
    subscriber = sessions.open("subscriber", expiry_interval=None, receive_maximum=1)
    items = [item for _, some in sessions.deliver() for item in some] if together else subscriber.deliver()
    assert [b"new"] == payloads(items)


@pytest.mark.parametrize("qos", [1, 2])
def test_the_same_retained_message_is_sent_again(
    db: ts.Database, sessions: Sessions, clock: Clock, crash: Callable[[], Sessions], qos: int
) -> None:
    """A retained message is redelivered although it was replaced, cleared or has expired [MQTT-4.4.0-1].

    The redelivered message is the same even if other messages were acknowledged before.
    """
    properties = ts.Properties(message_expiry_interval=10, content_type="text/plain")
    old = [ts.Message(f"a/{number}", b"old", "publisher", 2, True, 7, properties) for number in range(4)]
    db.publish(old)
    session = opened(sessions, qos)
    sent = [item for item in session.deliver() if isinstance(item, Publish)]
    assert [message.topic for message in old] == [item.message.topic for item in sent]
    if qos == 1:
        session.puback(sent[0].packet_id)
    else:
        session.pubrec(sent[0].packet_id, accepted=False)
    session.checkpoint()
    retain(db, "a/1", b"new")
    retain(db, "a/2", b"")
    clock.now += 11_000_000
    session = crash().open("subscriber", expiry_interval=None)
    again = [item for item in session.deliver() if isinstance(item, Publish) and item.dup]
    assert [msgspec.structs.replace(item, dup=True, expiry=0) for item in sent[1:]] == again


def test_retained_messages_in_flight_of_an_older_topicstore_are_looked_up(
    db: ts.Database, sessions: Sessions, crash: Callable[[], Sessions]
) -> None:
    """Retained messages in flight are looked up by topic if an older release stored only their topics."""
    retain(db, "a/1", b"1")
    opened(sessions, 1).deliver()
    state = db.state(db.storage.shard_of("subscriber"))
    ((key, stored),) = state.scan(OWN + b"sf")
    batch = decode(key, stored, StoredInFlight)
    state.write([put(key, InFlightRecord(*(getattr(batch, name) for name in InFlightRecord.__struct_fields__)))])
    session = crash().open("subscriber", expiry_interval=None)
    assert [b"1"] == payloads(session.deliver())


TOPICS = ("a/1", "a/2", "a/3")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(TOPICS), st.booleans(), st.integers(0, 1)),
        st.tuples(st.just("clear"), st.sampled_from(TOPICS)),
        st.tuples(st.just("subscribe"), st.integers(0, 1)),
        st.tuples(st.just("deliver"), st.integers(1, 4)),
        st.tuples(st.just("acknowledge"), st.integers(1, 3)),
        st.tuples(st.just("reconnect"), st.booleans()),
    ),
    max_size=30,
)


class LastValues:
    """A client that keeps the last value of each topic."""

    def __init__(self, db: ts.Database, qos: int, receive_maximum: int) -> None:
        self.db = db
        self.qos = qos
        self.receive_maximum = receive_maximum
        self.values: dict[str, bytes] = {}
        self.unacknowledged: list[int] = []
        self.published: dict[str, bytes] = {}
        self.newer: set[str] = set()
        """Topics to which a message was published since the client last subscribed."""
        self.count = 0
        self.connect()
        self.subscribe(0)

    def connect(self) -> None:
        self.session = self.db.sessions.open("subscriber", expiry_interval=None, receive_maximum=self.receive_maximum)

    def subscribe(self, handling: int) -> None:
        self.session.subscribe("a/#", self.qos, retain_handling=handling)
        if handling == 0:
            self.newer.clear()

    def publish(self, topic: str, retained: bool, qos: int) -> None:
        self.count += 1
        qos = max(qos, self.qos)  # a redelivered message may follow a newer QoS 0 message (MQTT 5, section 4.6)
        self._publish(ts.Message(topic, b"%d" % self.count, f"publisher of {topic}", qos, retained))

    def clear(self, topic: str) -> None:
        self._publish(ts.Message(topic, b"", f"publisher of {topic}", 1, retain=True))

    def _publish(self, message: ts.Message) -> None:
        self.db.publish([message])
        self.published[message.topic] = message.payload
        self.newer.add(message.topic)

    def deliver(self, limit: int) -> bool:
        items = [item for item in self.session.deliver(limit=limit) if isinstance(item, Publish)]
        for item in items:
            self.values[item.message.topic] = item.message.payload
            if item.packet_id:
                self.unacknowledged.append(item.packet_id)
        return bool(items)

    def acknowledge(self, count: int) -> bool:
        some, self.unacknowledged = self.unacknowledged[:count], self.unacknowledged[count:]
        self.session.puback(*some)
        return bool(some)

    def reconnect(self, checkpoint: bool) -> None:
        if self.qos == 0:  # at QoS 0, undelivered messages are lost
            return
        if checkpoint:
            self.session.checkpoint()
        self.unacknowledged.clear()
        self.connect()

    def finish(self) -> None:
        while self.deliver(100) or self.acknowledge(100):
            pass


@settings(COSTLY, max_examples=tries(150, 1_500))
@given(
    before=st.lists(st.sampled_from(TOPICS), max_size=3),
    steps=STEPS,
    qos=st.integers(0, 1),
    receive_maximum=st.integers(1, 4),
    shards=st.sampled_from([1, 3]),
)
def test_a_client_ends_with_the_last_value_of_each_topic(
    before: list[str], steps: list[tuple[object, ...]], qos: int, receive_maximum: int, shards: int
) -> None:
    """A client ends with the last value of each topic, in whatever order and however slowly messages are delivered."""
    with ts.open("nowhere", backend="memory", shards=shards) as db:
        for topic in before:
            db.publish([ts.Message(topic, b"before", f"publisher of {topic}", 1, retain=True)])
        client = LastValues(db, qos, receive_maximum)
        for name, *arguments in steps:
            getattr(client, str(name))(*arguments)
        client.finish()
        for topic in client.newer:
            assert client.published[topic] == client.values[topic], topic
        for topic in set(before) - client.newer:
            last = client.published.get(topic, b"before")
            kept = {message.payload for message in db.retained(topic)}
            assert client.values[topic] in {last, *kept}, topic


@pytest.mark.parametrize("overlapping", ["each", "once"])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_start_brings_no_retained_copy_of_what_is_replayed(
    db: ts.Database, sessions: Sessions, clock: Clock, qos: int, resumed: bool, overlapping: Overlapping
) -> None:
    """A subscription with a start gets no retained copy of a message that it replays.

    Retained messages from before the start, or never stored as ordinary messages, arrive first, even after a reconnect.
    """
    retain(db, "a/nowhere", b"nowhere")
    db.persistence.add("a/#")
    retain(db, "a/early", b"early")
    clock.now += 10_000_000
    start = clock.now
    retain(db, "a/replaced", b"first")
    retain(db, "a/replaced", b"second")
    live(db, "a/live", b"live")
    db.publish([ts.Message("a/other", b"other", "another", 1, retain=True)])
    session = sessions.open("subscriber", expiry_interval=None, overlapping=overlapping)
    session.subscribe("a/#", qos, start=start)
    if overlapping == "once":
        session.subscribe("a/+", qos, start=start, retain_handling=2)
    found: list[bytes] = []
    if resumed and qos:
        found += payloads(session.deliver(limit=1))
        session.lost()
        session = sessions.open("subscriber", expiry_interval=None, overlapping=overlapping)
    while sessions.wait(0):
        found += [one.message.payload for one in session.deliver() if isinstance(one, Publish) and not one.dup]
    assert found[:2] == [b"early", b"nowhere"]
    assert sorted(found[2:]) == sorted([b"first", b"second", b"live", b"other"])


def test_a_start_without_own_messages_brings_retained_ones_as_without_a_start(
    db: ts.Database, sessions: Sessions
) -> None:
    """With No Local, a start doesn't suppress the retained copies of the client's own messages.

    The replay delivers none of those messages.
    """
    db.persistence.add("a/#")
    db.publish([ts.Message("a/own", b"own", "subscriber", 1, retain=True)])
    retain(db, "a/other", b"other")
    session = sessions.open("subscriber", expiry_interval=None)
    session.subscribe("a/#", 1, no_local=True, start="beginning")
    found: list[bytes] = []
    while sessions.wait(0):
        found += payloads(session.deliver())
    assert found == [b"own", b"other"]
