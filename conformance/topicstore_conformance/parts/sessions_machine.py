"""Random histories of sessions, compared with a plain model.

A history publishes, subscribes, unsubscribes, acknowledges, reconnects and crashes.


The model records which messages each subscription must deliver, with the options at the time of publication. It also
records the state that MQTT requires each client to keep. Every delivery is checked. At the end of a history all
clients reconnect and acknowledge, and no required message may be missing.

The database is driven by plain calls (`Store`). A call may fail to write, or be the last before the process is killed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

import attrs
import msgspec
import pytest
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from topicstore.contract.positions import time_of
from topicstore.pubsub.publish import Publisher
from topicstore.sessions import (
    Connect,
    DeliveryBatch,
    Publish,
    PubRel,
    Session,
    SessionEndedError,
    SubscribeOptions,
    SubscribeResult,
    Will,
)
from topicstore.storage.keyed_messages import state_key

from topicstore_conformance.faults.striking import Fault, kills
from topicstore_conformance.parts.machines import SessionsMachine, World, shows_at_once, stored_keys
from topicstore_conformance.subjects.pairs import Pair

SECOND = 1_000_000
DAY = 86_400
CLIENTS = ["a", "b", "c"]
TOPICS = ["t/a", "t/b", "t/", "u/a", "u/b/c", "$s/a"]
FILTERS = ["#", "t/#", "t/+", "+/a", "t/a", "u/#", "$s/#"]
Row = tuple[str, ts.Message, int]
"""A client id, a message of this client, and its packet id."""
Drawn = tuple[str, int, bool, int | None, bool]
"""A drawn message: topic, QoS, RETAIN flag, expiry in seconds, and whether the publisher asks to have it stored."""
Asked = tuple[int, str, int, bool, int]
"""A drawn subscription: number of the client, filter, QoS, No Local, Retain Handling."""
Outcome = tuple[ts.Message, int | None]
"""A published message, and its position's time in microseconds; None if it was not stored."""


# --- the store --------------------------------------------------------------------------


class Store(World):
    """A database and its sessions, driven by plain calls that return plain results."""

    def __init__(self, pair: Pair, shards: int) -> None:
        super().__init__(pair, shards)
        self.outcomes: list[Outcome] = []
        self.older: list[Session] = []
        """Session objects of processes that crashed."""
        self._publish = Publisher.publish
        Publisher.publish = lambda *how, **more: self.publish(*how, **more)  # type: ignore[method-assign]

    def publish(self, publisher: Publisher, batch: ts.MessageBatch, state: Any, *requested: Any, **more: Any) -> Any:
        """Publish, and record the outcome of each message, including wills and messages that clients publish."""
        result = self._publish(publisher, batch, state, *requested, **more)
        stored = [message.payload for message in result.batch.to_messages()] if result.stored else []
        times = {payload: time_of(id_.position) for payload, id_ in zip(stored, result.ids, strict=True)}
        self.outcomes += [(message, times.get(message.payload)) for message in batch.to_messages()]
        return result

    def call(self, target: str, name: str, *args: Any, **kwargs: Any) -> tuple[Any, list[Outcome]]:
        """Call a method of the database, the sessions or a session; return its result and the published messages."""
        self.outcomes = []
        owner: Any = {"store": self, "db": self.db, "sessions": self.db.sessions}.get(target)
        owner = self.db.sessions.connected(target) if owner is None else owner
        name = "deliver_batches" if (target, name) == ("sessions", "deliver") else name
        return _plain(getattr(owner, name)(*args, **kwargs)), self.outcomes

    def publish_rows(self, rows: Sequence[Row]) -> tuple[list[bool], set[int], list[int]]:
        """Publish messages of many clients; return which rows matched, were repetitions, and were refused."""
        given = [self._open(name) for name, _, _ in rows]
        messages, ids = [message for _, message, _ in rows], [packet_id for _, _, packet_id in rows]
        found = self.db.sessions.publish_batch(given, columns(messages), ids, partial=True)
        return found.matched, set(found.repeated), sorted(found.refused)

    def release_rows(self, rows: Sequence[tuple[str, int]]) -> list[bool]:
        """Release packet ids of many clients; return which were in use."""
        return self.db.sessions.pubrel([(self._open(name), packet_id) for name, packet_id in rows]).known

    def subscribe_rows(self, rows: Sequence[tuple[str, str, SubscribeOptions]]) -> list[bool | None]:
        """Subscribe for many clients; return for each row whether the subscription is new, or None if refused."""
        asked = [(self._open(name), text, options) for name, text, options in rows]
        results = self.db.sessions.subscribe(asked, partial=True)
        return [result.created if isinstance(result, SubscribeResult) else None for result in results]

    def open_rows(self, connects: Sequence[Connect]) -> list[bool]:
        """Open sessions for many clients; return which of the sessions were already present."""
        return [one.present for one in self.db.sessions.open_many(connects) if isinstance(one, Session)]

    def end_rows(self, names: Sequence[str], how: str) -> None:
        """Disconnect clients, or lose their connections."""
        getattr(self.db.sessions, how)([self._open(name) for name in names])

    def _open(self, name: str) -> Session:
        session = self.db.sessions.connected(name)
        assert session is not None
        return session

    def contents(self) -> dict[bytes, int]:
        """Return all stored messages' payloads with their positions' times; check that no message is stored twice."""
        batches = [batch for text in ("#", "$s/#") for batch in self.db.replay_arrow(text, ids=True)]
        found = [row for batch in batches for row in batch.to_pylist() if row["payload"]]
        assert len(found) == len({row["payload"] for row in found})
        return {row["payload"]: time_of(row["position"]) for row in found}

    def retained(self) -> dict[tuple[str, bytes], int]:
        """Return the times of all retained messages, by topic and payload."""
        found = [message for text in ("#", "$s/#") for message in self.db.retained(text)]
        return {(message.topic, message.payload): message.timestamp or 0 for message in found}

    def left_in_flight(self) -> list[bytes]:
        """Return the keys of all stored records of messages in flight."""
        return in_flight(self.db)

    def wills(self) -> list[str]:
        """Return the clients whose wills are stored."""
        prefix = state_key(b"w")
        return sorted(key.removeprefix(prefix).decode() for key in stored_keys(self.db) if key.startswith(prefix))

    def left(self) -> list[bytes]:
        """Expire all sessions; return the keys of session records that still exist."""
        for client_id in self.db.sessions.clients():
            self.db.sessions.expire(client_id)
        return [key for key in stored_keys(self.db) if key[1:2] in b"sitg" or key.startswith(state_key(b"w"))]

    def reopen(self) -> None:
        self.older.clear()
        super().reopen()

    def crash(self) -> None:
        # A session kept in memory ends with its process, and has no stored record that could show a takeover.
        sessions = self.db.sessions
        stored = [client for client in CLIENTS if client in sessions and not sessions[client].in_memory]
        self.older += [session for client in stored if (session := sessions.connected(client)) is not None]
        super().crash()

    def close(self) -> None:
        super().close()
        Publisher.publish = self._publish  # type: ignore[method-assign]


def in_flight(db: ts.Database) -> list[bytes]:
    return [key for key in stored_keys(db) if key[1:3] in (b"sf", b"sp", b"sn")]


def columns(messages: Sequence[ts.Message]) -> ts.MessageBatch:
    """Return messages as columns, which are not validated."""
    return ts.MessageBatch(*([getattr(message, name) for message in messages] for name in ts.Message.__struct_fields__))


def _plain(result: Any) -> Any:
    if isinstance(result, Session):
        return result.present
    if isinstance(result, list) and result and isinstance(result[0], tuple):  # the result of `Sessions.deliver_batches`
        return [(session.client_id, [one for item in items for one in packets_of(item)]) for session, items in result]
    return None if isinstance(result, ts.StoreResult) else result


def packets_of(item: Publish | PubRel | DeliveryBatch) -> list[Publish | PubRel]:
    """Return the packets of a batch, built from its columns, or a list of the given packet."""
    if not isinstance(item, DeliveryBatch):
        return [item]
    rows = len(item)

    def column(values: Any, kind: type) -> list[Any]:
        found = [values] * rows if isinstance(values, kind) else list(values)
        assert len(found) == rows > 0
        return found

    columns = zip(
        column(item.packet_ids, int),
        column(item.messages, ts.Message),
        column(item.qos, int),
        [False] * rows,
        column(item.retain, bool),
        column(item.subscription_identifiers, tuple),
        column(item.expiry, type(None)),
        strict=True,
    )
    return [Publish(*row) for row in columns]


# --- the model --------------------------------------------------------------------------


@attrs.define(eq=False, repr=False)
class Published:
    """A message that was published."""

    message: ts.Message
    number: int
    time: int
    stored: bool
    generation: int
    gone: bool = False
    """Whether the message was deleted, or dropped with its generation."""
    least: int | None = None
    """The fewest seconds until expiry at any time when the clock was set back; None if the clock never was."""
    lowest: int = 0
    """The lowest clock value since the publication, in microseconds, recorded for retained messages.

    A reader may have read the message at that time, and counts its expiry down from then.
    """

    def left(self, now: int) -> int | None:
        """Return the seconds until the message expires, rounded up; None without an interval.

        The result is at most the published interval, even after the clock was set back.
        """
        properties = self.message.properties
        interval = None if properties is None else properties.message_expiry_interval
        return None if interval is None else min(interval, -((now - self.time) // SECOND - interval))

    @property
    def lapsed(self) -> bool:
        """Whether the message expired before the clock was set back, so that it may have been removed."""
        return self.least is not None and self.least <= 0

    def surely_lasts(self, now: int) -> bool:
        """Return whether the message is unexpired even if its interval counts from the lowest clock value."""
        properties = self.message.properties
        interval = None if properties is None else properties.message_expiry_interval
        return interval is None or now - self.lowest < interval * SECOND

    def readable(self, now: int) -> bool:
        left = self.left(now)
        return not self.gone and (left is None or left > 0)


@attrs.define(eq=False, repr=False)
class Due:
    """A message that a subscription must deliver, with the subscription's options when it was published."""

    published: Published
    options: SubscribeOptions
    required: bool
    lapsed: bool = False
    """Whether the message was unreadable during a delivery to the session, which may therefore have skipped it."""
    delivered: bool = False
    received: int = 0
    """The number of times that the client processed the message, without refusals and recognised repetitions."""

    @property
    def qos(self) -> int:
        return min(self.published.message.qos, self.options.qos)


@attrs.define(eq=False, repr=False)
class Subscription:
    topic_filter: ts.TopicFilter
    options: SubscribeOptions
    due: dict[bytes, Due] = attrs.field(factory=dict)
    before: dict[bytes, Due] = attrs.field(factory=dict)
    """Messages that were due before the subscription was made again, and may have been read already."""
    newest: dict[tuple[str, str], int] = attrs.field(factory=dict)
    """The number of the newest message delivered, by publisher and topic."""
    kept: list[str] | None = None
    """Topics of the retained messages that were sent for this request; None if no retained messages are requested."""
    kept_due: list[Published] = attrs.field(factory=list)
    """Retained messages that existed when they were requested."""
    after_kept: dict[str, int] = attrs.field(factory=dict)
    """The newest payload delivered since the retained messages were requested, by topic."""
    kept_again: set[str] = attrs.field(factory=set)
    """Topics of retained messages that were redelivered, and whose first delivery may have been lost."""
    kept_before: set[str] = attrs.field(factory=set)
    """Topics of retained messages that may have been read for an earlier request and not sent yet."""
    kept_stored: bool = False
    """Whether the request was made at QoS 1 or 2, so that it continues on the next connection."""

    def begin_anew(self, client: Client) -> None:
        """Forget all due messages, except messages that may have been read already."""
        self.before = self.before | self.due if client.bounded or client.unsure else {}
        self.due = {}


@attrs.define(eq=False, repr=False)
class Exchange:
    """A packet id that was sent to a client, and the state of its QoS 1 or QoS 2 exchange."""

    packet_id: int
    qos: int
    message: ts.Message
    due: Due | None
    """The due message, or None for a retained message."""
    order: int
    expiry: int | None
    """Seconds until the message's expiry when the message was last sent."""
    sent: int
    """The time when the message was last sent, in microseconds."""
    state: str = "sent"
    """"sent", then "acknowledged", "received", "released" or "completed", as the client answers."""
    committed: bool = False
    """Whether the client's PUBREC is committed."""
    answer: str = ""
    """The packet that the client must send on this connection."""
    again: str = ""
    """The packet that must be sent to the client again: ``message``, ``release`` or ``either``."""
    vanished: bool = False
    """Whether the message couldn't be read at a possible redelivery. At QoS 1 the exchange may then have ended."""

    @property
    def over(self) -> bool:
        """Whether the exchange is complete once its acknowledgement is committed."""
        return self.state in ("acknowledged", "completed")


@attrs.define(eq=False, repr=False)
class Client:
    """A client in the model, and its session if there is one."""

    name: str
    exists: bool = False
    connected: bool = False
    left_open: bool = False
    """Whether a crash left the session open."""
    interval: int | None = None
    in_memory: bool = False
    expires: int | None = None
    will: Will | None = None
    will_due: int | None = None
    receive_maximum: int = 1
    subscriptions: dict[str, Subscription] = attrs.field(factory=dict)
    by_identifier: dict[int, tuple[Subscription, SubscribeOptions]] = attrs.field(factory=dict)
    exchanges: dict[int, Exchange] = attrs.field(factory=dict)
    held: dict[int, object] = attrs.field(factory=dict)
    """QoS 2 messages that the client has received and not released, by packet id."""
    outstanding: set[int] = attrs.field(factory=set)
    """Packet ids of messages sent on this connection whose exchange is not complete."""
    paused: bool = False
    """Whether the client's session is paused."""
    bounded: bool = False
    """Whether a delivery on this connection was limited in bytes: messages may have been read and not sent."""
    resent: int = 0
    """The order number of the last redelivered message."""
    unsure: bool = False
    """Whether packet ids may be committed that were never sent.

    Either the process was killed during a delivery, or deliveries on an earlier connection were limited in bytes, so
    that packets waited in memory.
    """
    unreleased: dict[int, ts.Message] = attrs.field(factory=dict)
    """QoS 2 messages that the client published and has not released, by packet id."""

    def forget(self) -> None:
        """Reset the model's record of the client, except its name."""
        self.__init__(self.name)  # type: ignore[misc]

    def commit(self) -> None:
        """Mark this connection's acknowledgements as committed; acknowledgements before a crash stay uncommitted."""
        self.exchanges = {i: exchange for i, exchange in self.exchanges.items() if exchange.again or not exchange.over}
        for exchange in self.exchanges.values():
            exchange.committed |= exchange.state == "received" and not exchange.again

    def leave(self) -> None:
        """End the connection: messages that arrive only on a live connection are no longer required."""
        self.connected = self.paused = False
        self.unsure |= self.bounded
        self.outstanding.clear()
        self.resent = 0
        for exchange in self.exchanges.values():
            exchange.answer = ""
            sure = exchange.committed or exchange.state in ("released", "completed")
            exchange.again = "release" if sure else "either" if exchange.state == "received" else "message"
        for subscription in self.subscriptions.values():
            for due in subscription.due.values():
                due.required &= (due.qos if self.bounded else due.options.qos) > 0
            subscription.kept_before.clear()
            if not subscription.kept_stored:
                subscription.kept = None
        self.bounded = False

    def in_use(self) -> int:
        """Return the highest number of packet ids that the client's session may have in use."""
        return sum(not exchange.over for exchange in self.exchanges.values())


def rows() -> st.SearchStrategy[list[Drawn]]:
    row = st.tuples(
        st.sampled_from(TOPICS),
        st.sampled_from([0, 1, 2, 1, 2]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([None, None, None, None, 1, 30]),
        st.sampled_from([False, False, True]),
    )
    return st.lists(row, min_size=2, max_size=12)


def filters() -> st.SearchStrategy[list[Asked]]:
    row = st.tuples(
        st.integers(0, 2),
        st.sampled_from([*FILTERS, ""]),
        st.sampled_from([0, 1, 2, 1, 2]),
        st.booleans(),
        st.sampled_from([0, 1, 2]),
    )
    return st.lists(row, min_size=1, max_size=6)


class SessionsHistories(SessionsMachine):
    """A state machine: each delivered message must be due, and at the end no message that is due may be missing."""

    @initialize(
        wanted=st.lists(st.tuples(st.sampled_from(FILTERS), st.sampled_from([1, 2])), min_size=3, max_size=3),
        most=st.sampled_from([1, 3, 10, 1_000]),
    )
    def begin(self, wanted: list[tuple[str, int]], most: int) -> None:
        self.store = Store(self.pair, self.shards)
        self.clients = {name: Client(name) for name in CLIENTS}
        self.numbers = count(1)
        self.orders = count(1)
        self.published: list[Published] = []
        self.retained: dict[str, Published] = {}
        self.was_retained: dict[bytes, Published] = {}
        self.generations = [1]
        for which, (text, qos) in enumerate(wanted):
            self.connect(CLIENTS[which], clean=False, interval=None, most=most, delay=None)
            self.subscribe(which, text, qos, no_local=False, as_published=False, handling=0, start=None, same=False)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            try:
                if sys.exc_info()[0] is None:
                    self.settle()
                    assert [] == self.call("store", "left")
            finally:
                self.store.close()

    def call(self, target: str, name: str, *args: Any, away: str = "", **kwargs: Any) -> Any:
        """Call the store; ``away`` is a client that is disconnected while the call publishes messages."""
        result, outcomes = self.store.call(target, name, *args, **kwargs)
        self.absorb_all(outcomes, away)
        return result

    def absorb_all(self, outcomes: list[Outcome], away: str = "") -> None:
        """Record published messages: the stored messages of a call before its unstored messages."""
        for message, time in sorted(outcomes, key=lambda outcome: outcome[1] is None):
            self.absorb(message, time, away)
        for message, time in outcomes:
            if message.retain:
                self.retain(message, time)

    def retain(self, message: ts.Message, time: int | None) -> None:
        """Record a retained message, or that the topic has none."""
        self.retained.pop(message.topic, None)
        if message.payload:
            kept = Published(message, 0, time or self.now, stored=False, generation=0, lowest=self.now)
            self.retained[message.topic] = self.was_retained[message.payload] = kept

    @property
    def now(self) -> int:
        """The wall clock's time in microseconds, by which messages expire."""
        return self.store.clock.now

    @property
    def steady(self) -> int:
        """The monotonic clock's time in microseconds, by which sessions expire and wills are due."""
        return self.store.clock.monotonic()

    # --- publishing ---

    def messages(self, publisher: str, drawn: Sequence[Drawn]) -> list[ts.Message]:
        return [self.message(publisher, *row) for row in drawn]

    def message(
        self, publisher: str, topic: str, qos: int, retain: bool, expiry: int | None, persist: bool
    ) -> ts.Message:
        asks = (("topicstore-persist", "1"),) if persist else ()
        properties = ts.Properties(message_expiry_interval=expiry, user_properties=asks)
        payload = b"%d" % next(self.numbers)
        return ts.Message(topic, payload, publisher, qos, retain, properties=properties)

    @rule(publisher=st.sampled_from(["p", "q"]), drawn=rows())
    def publish(self, publisher: str, drawn: list[Drawn]) -> None:
        self.call("db", "publish", self.messages(publisher, drawn))

    @rule(
        publisher=st.sampled_from(["p", "q"]),
        drawn=rows(),
        limit=st.sampled_from([3, 7, 1_000]),
        picked=st.lists(st.integers(0, 20), max_size=12),
    )
    def turn(self, publisher: str, drawn: list[Drawn], limit: int, picked: list[int]) -> None:
        """Publish, deliver to all clients, and let each send a part of its answers: the most frequent sequence."""
        self.publish(publisher, drawn)
        self.deliver_all(limit)
        for which in range(len(self.live())):
            self.answer(which, picked, refused=False)

    @rule(topic=st.sampled_from(TOPICS))
    def clear_retained(self, topic: str) -> None:
        self.call("db", "publish", [ts.Message(topic, b"", "p", 0, True)])

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2), drawn=rows(), ids=st.permutations(range(1, 13)))
    def publish_once(self, which: int, drawn: list[Drawn], ids: list[int]) -> None:
        """Publish as a client; a QoS 2 message whose packet id is in use repeats the earlier message."""
        client = self.one_of(which)
        messages = self.messages(client.name, drawn)
        for row, (message, packet_id) in enumerate(zip(messages, ids, strict=False)):
            if message.qos == 2:
                messages[row] = client.unreleased.setdefault(packet_id, message)
        self.call(client.name, "publish", messages, ids[: len(messages)])
        known = {published.message.payload for published in self.published}
        assert all(message.payload in known for message in messages)

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2), ids=st.lists(st.integers(1, 9), min_size=1, unique=True))
    def release(self, which: int, ids: list[int]) -> None:
        client = self.one_of(which)
        known = client.unreleased.keys() & set(ids)
        assert len(known) == self.call(client.name, "pubrel", *ids)
        for packet_id in known:
            del client.unreleased[packet_id]

    @precondition(lambda self: self.live())
    @rule(
        drawn=rows(),
        which=st.lists(st.integers(0, 2), min_size=12, max_size=12),
        ids=st.lists(st.integers(1, 9), min_size=12, max_size=12),
        bad=st.lists(st.sampled_from([False, False, False, False, True]), min_size=12, max_size=12),
    )
    def publish_together(self, drawn: list[Drawn], which: list[int], ids: list[int], bad: list[bool]) -> None:
        """Publish for many clients in one call: repetitions are skipped, and only bad messages are refused."""
        sent: list[Row] = []
        repeated: set[int] = set()
        wrong: list[int] = []
        for row, message in enumerate(drawn):
            client = self.one_of(which[row])
            made = self.message(client.name, *message)
            if made.qos == 2 and ids[row] in client.unreleased:
                repeated.add(row)
                made = client.unreleased[ids[row]]
            elif bad[row]:
                made = msgspec.structs.replace(made, topic="+")
                wrong.append(row)
            elif made.qos == 2:
                client.unreleased[ids[row]] = made
            sent.append((client.name, made, ids[row]))
        matched, left_out, refused = self.call("store", "publish_rows", sent)
        assert (repeated, wrong) == (left_out, refused)
        known = {published.message.payload for published in self.published}
        for row, (_, given, _) in enumerate(sent):
            assert (given.payload in known) is (row not in wrong)
            assert matched[row] or row in wrong or not self.wanted(given)

    def wanted(self, message: ts.Message) -> bool:
        """Return whether a subscription certainly matches the message, as opposed to possibly."""
        return any(
            subscription.topic_filter.matches(message.topic) and (client.connected or subscription.options.qos)
            for client in self.clients.values()
            for subscription in client.subscriptions.values()
        )

    @precondition(lambda self: self.live())
    @rule(drawn=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=12))
    def release_together(self, drawn: list[tuple[int, int]]) -> None:
        """Release packet ids of many clients in one call; each row reports whether its id was in use."""
        sent = [(self.one_of(which).name, packet_id) for which, packet_id in drawn]
        known = self.call("store", "release_rows", sent)
        assert known == [self.clients[name].unreleased.pop(packet_id, None) is not None for name, packet_id in sent]

    def absorb(self, message: ts.Message, time: int | None, away: str = "") -> None:
        """Record a published message, and the subscriptions that must deliver it."""
        if not message.payload:  # an empty payload only clears the retained message
            return
        assert message.payload not in {known.message.payload for known in self.published}
        stored = time is not None
        published = Published(message, len(self.published), time or self.now, stored, self.generations[-1])
        self.published.append(published)
        for client in self.clients.values():
            if client.will is not None and client.will.message.payload == message.payload:
                client.will = client.will_due = None
            for subscription in client.subscriptions.values():
                live = client.connected and client.name != away
                if self.matches(client, subscription, published):
                    assert stored or not subscription.options.qos
                    if stored or live:
                        required = subscription.options.qos > 0 or live
                        subscription.due[message.payload] = Due(published, subscription.options, required)

    @staticmethod
    def matches(client: Client, subscription: Subscription, published: Published) -> bool:
        own = subscription.options.no_local and published.message.client_id == client.name
        return subscription.topic_filter.matches(published.message.topic) and not own

    # --- connecting ---

    @rule(
        name=st.sampled_from(CLIENTS),
        clean=st.sampled_from([False] * 7 + [True]),
        interval=st.sampled_from([None, None, None, None, 20, 0]),
        most=st.sampled_from([1, 3, 10, 1_000]),
        delay=st.sampled_from([None, None, 0, 10, 30]),
    )
    def connect(self, name: str, clean: bool, interval: int | None, most: int, delay: int | None) -> None:
        client = self.clients[name]
        will = None if delay is None else Will(self.message(name, "t/a", 1, False, None, True), delay=delay)
        there, pending = self.before_opening(client, clean=clean)
        how = {"clean_start": clean, "expiry_interval": interval, "receive_maximum": most, "will": will}
        assert there == self.call("sessions", "open", name, away=name, **how)
        self.check_will(pending, client)
        self.opened(client, there, most, interval, will)

    @rule(name=st.sampled_from(CLIENTS), most=st.sampled_from([1, 3, 1_000]))
    def connect_in_memory(self, name: str, most: int) -> None:
        """Open a session that is kept in memory, in place of any earlier session of the client."""
        client = self.clients[name]
        _, pending = self.before_opening(client, clean=True)
        how = {"clean_start": True, "expiry_interval": 0, "receive_maximum": most, "in_memory": True}
        assert not self.call("sessions", "open", name, away=name, **how)
        self.check_will(pending, client)
        self.opened(client, False, most, interval=0)
        client.in_memory = True

    def before_opening(self, client: Client, *, clean: bool) -> tuple[bool, Will | None]:
        """End a client's connection; return whether a new session would be present, and the will that is published."""
        expired = client.expires is not None and client.expires <= self.steady
        was_open = client.connected or client.left_open
        there = client.exists and not (clean or expired or (was_open and client.interval == 0))
        due = client.will_due is not None and client.will_due <= self.steady
        pending = client.will is not None and (not there or due or (was_open and not client.will.delay))
        if client.connected:
            client.commit()
            client.leave()
        return there, client.will if pending else None

    def opened(
        self, client: Client, there: bool, most: int, interval: int | None = None, will: Will | None = None
    ) -> None:
        if not there:
            client.forget()
        client.exists = client.connected = True
        client.left_open = False
        client.interval, client.expires, client.receive_maximum = interval, None, most
        client.will, client.will_due = will, None
        self.check_older(client)

    def check_will(self, pending: Will | None, client: Client) -> None:
        """Check that a pending will was published, and no other will."""
        assert (pending is None) or client.will is None
        if pending is not None:
            assert self.published[-1].message.payload == pending.message.payload

    def check_older(self, client: Client) -> None:
        """Check that a session object of an earlier process can't change anything."""
        older = next((session for session in self.store.older if session.client_id == client.name), None)
        if older is not None:
            for act in (older.disconnect, lambda: older.subscribe("x")):
                with pytest.raises(SessionEndedError):
                    act()

    @rule(
        names=st.lists(st.sampled_from(CLIENTS), min_size=1, max_size=3, unique=True),
        most=st.sampled_from([1, 1_000]),
        clean=st.sampled_from([None] * 7 + CLIENTS),
    )
    def connect_together(self, names: list[str], most: int, clean: str | None) -> None:
        """Open many sessions in one call, at most one with a clean start; connected sessions are taken over."""
        clients = [self.clients[name] for name in names]
        before = [self.before_opening(client, clean=client.name == clean) for client in clients]
        how: dict[str, Any] = {"expiry_interval": None, "receive_maximum": most}
        connects = [Connect(client_id=name, clean_start=name == clean, **how) for name in names]
        assert [there for there, _ in before] == self.call("store", "open_rows", connects)
        published = {known.message.payload for known in self.published}
        assert {will.message.payload for _, will in before if will is not None} <= published
        for client, (there, _) in zip(clients, before, strict=True):
            self.opened(client, there, most)

    @precondition(lambda self: self.live())
    @rule(which=st.lists(st.integers(0, 2), min_size=1, max_size=3), how=st.sampled_from(["disconnect", "lost"]))
    def end_together(self, which: list[int], how: str) -> None:
        """End many connections in one call."""
        clients = list(dict.fromkeys(self.one_of(one) for one in which))
        for client in clients:
            client.commit()
            client.leave()
            if how == "disconnect":
                client.will = None
            self.end_connection(client)
        self.call("store", "end_rows", [client.name for client in clients], how)
        for client in clients:
            assert client.will is None or client.will_due != self.steady
            if client.interval == 0:
                client.forget()

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2), how=st.sampled_from(["disconnect", "disconnect with will", "lost", "kick"]))
    def end(self, which: int, how: str) -> None:
        client = self.one_of(which)
        client.commit()
        client.leave()
        if how == "disconnect":
            client.will = None
        self.end_connection(client)
        if how == "kick":
            assert self.call("sessions", "kick", client.name)
        elif how == "disconnect with will":
            self.call(client.name, "disconnect", send_will=True)
        else:
            self.call(client.name, how)
        assert client.will is None or client.will_due != self.steady
        if client.interval == 0:
            client.forget()

    def end_connection(self, client: Client) -> None:
        client.connected = client.left_open = False
        client.expires = None if client.interval is None else self.steady + client.interval * SECOND
        if client.will is not None:
            delay: Any = client.will.delay if client.interval is None else min(client.will.delay, client.interval)
            client.will_due = self.steady + round(delay) * SECOND

    @rule(name=st.sampled_from(CLIENTS), sure=st.sampled_from([False, False, False, True]))
    def expire(self, name: str, sure: bool) -> None:
        client = self.clients[name]
        if sure and client.exists and (client.expires is None or client.expires > self.steady):
            pending = client.will
            self.call("sessions", "expire", client.name, away=client.name)
            self.check_will(pending, client)
            client.forget()

    @rule()
    def crash(self) -> None:
        self.store.crash()
        self.crashed()

    def crashed(self) -> None:
        """Mark all connections as ended without a write."""
        self.store.clock.now += 1
        for client in self.live():
            client.leave()
            client.left_open = True
            if client.in_memory:
                client.forget()

    @rule()
    def reopen(self) -> None:
        """Close and reopen the database; the memory backend would lose its contents, so there only simulate a crash."""
        if not self.persistent:
            self.crash()
            return
        for client in self.live():
            client.commit()
            client.leave()
            self.end_connection(client)
        # closing publishes due wills
        self.store.reopen()
        contents = self.call("store", "contents")
        for client in self.clients.values():
            if client.will is not None and client.will.message.payload in contents:
                self.absorb(client.will.message, contents[client.will.message.payload], client.name)
            if client.interval == 0 and client.exists and not client.left_open:
                assert client.will is None
                client.forget()

    @rule(microseconds=st.sampled_from([1, 1_000, SECOND, 11 * SECOND, 21 * SECOND]), ticks=st.booleans())
    def wait(self, microseconds: int, ticks: bool) -> None:
        self.store.clock.now += microseconds
        if ticks:
            self.tick()

    @rule(seconds=st.sampled_from([60, 3_600, DAY]), back=st.booleans())
    def jump(self, seconds: int, back: bool) -> None:
        """Set the wall clock: sessions and wills wait as long as before, but messages expire by the new time."""
        if back:
            for published in (*self.published, *self.was_retained.values()):
                left = published.left(self.now)
                if left is not None:
                    published.least = min(left, left if published.least is None else published.least)
        self.store.clock.jump((-seconds if back else seconds) * SECOND)
        for kept in self.was_retained.values():
            kept.lowest = min(kept.lowest, self.now)
        self.tick()

    @rule(
        name=st.sampled_from(CLIENTS),
        how=st.sampled_from(["disconnect", "disconnect with will", "lost", "kick"]),
        delay=st.sampled_from([None, 0, 10, 30]),
        will=st.booleans(),
        early=st.booleans(),
        ticks=st.booleans(),
        crashes=st.booleans(),
    )
    def be_away(
        self, name: str, how: str, delay: int | None, will: bool, early: bool, ticks: bool, crashes: bool
    ) -> None:
        """Reconnect a client exactly when its session expires or its will is due, or a microsecond before.

        The process may crash while the client is away.
        """
        client = self.clients[name]
        self.connect(name, clean=False, interval=20, most=10, delay=delay)
        self.end(self.live().index(client), how)
        if crashes:
            self.crash()
        due = client.will_due if will else client.expires
        self.wait(max(due - early - self.steady, 0) if due is not None else 0, ticks)
        self.connect(name, clean=False, interval=None, most=10, delay=None)

    @rule()
    def tick(self) -> None:
        """Tick: wills are published and sessions expire when they are due, and not before."""
        for client in self.clients.values():
            if client.left_open:
                self.end_connection(client)
        wills = [client.will for client in self.clients.values() if client.will_due is not None]
        due = [c.will for c in self.clients.values() if c.will_due is not None and c.will_due <= self.steady]
        before = len(self.published)
        self.call("sessions", "tick")
        found = {published.message.payload for published in self.published[before:]}
        assert {will.message.payload for will in due if will} == found
        assert len(wills) - len(due) == sum(client.will_due is not None for client in self.clients.values())
        for client in self.clients.values():
            if client.expires is not None and client.expires <= self.steady:
                client.forget()

    # --- subscribing ---

    @precondition(lambda self: self.live())
    @rule(
        which=st.integers(0, 2),
        text=st.sampled_from(FILTERS),
        qos=st.sampled_from([0, 1, 2, 1, 2]),
        no_local=st.booleans(),
        as_published=st.booleans(),
        handling=st.sampled_from([0, 1, 2]),
        start=st.sampled_from([None, None, None, 0, SECOND, 20 * SECOND]),
        same=st.booleans(),
    )
    def subscribe(
        self,
        which: int,
        text: str,
        qos: int,
        no_local: bool,
        as_published: bool,
        handling: int,
        start: int | None,
        same: bool,
    ) -> None:
        client = self.one_of(which)
        known = client.subscriptions.get(text)
        as_published = as_published and (known is None or known.kept is None)
        # with ``as_published``, ordinary messages can have the RETAIN flag, too
        handling = 2 if as_published else handling
        options = SubscribeOptions(qos, no_local, as_published, handling, next(self.numbers))
        if same and known is not None:
            options = known.options
        begin = None if start is None else self.now - start if start else 0
        result = self.call(
            client.name,
            "subscribe",
            text,
            options.qos,
            no_local=options.no_local,
            retain_as_published=options.retain_as_published,
            retain_handling=options.retain_handling,
            subscription_identifier=options.identifier,
            start=begin,
        )
        assert result.created == (known is None)
        subscription = self.subscribed(client, text, options)
        if begin is not None:
            self.replay(client, subscription, begin)
        if options.retain_handling == 0 or (options.retain_handling == 1 and known is None):
            self.send_retained(client, subscription, replays=begin is not None)

    @staticmethod
    def subscribed(client: Client, text: str, options: SubscribeOptions) -> Subscription:
        """Record a subscription with these options, and return it."""
        subscription = client.subscriptions.get(text) or Subscription(ts.TopicFilter(text), options)
        subscription.options = options
        client.subscriptions[text] = subscription
        client.by_identifier[options.identifier] = (subscription, options)
        return subscription

    @precondition(lambda self: self.live())
    @rule(drawn=filters())
    def subscribe_together(self, drawn: list[Asked]) -> None:
        """Subscribe many clients to many filters in one call; only bad filters are refused."""
        sent = self.asked(drawn)
        found = self.call("store", "subscribe_rows", sent)
        for (name, text, options), created in zip(sent, found, strict=True):
            client = self.clients[name]
            known = text in client.subscriptions
            assert created is (None if text == "" else not known)
            if created is not None:
                subscription = self.subscribed(client, text, options)
                if options.retain_handling == 0 or (options.retain_handling == 1 and not known):
                    self.send_retained(client, subscription)

    def asked(self, drawn: list[Asked]) -> list[tuple[str, str, SubscribeOptions]]:
        return [
            (self.one_of(which).name, text, SubscribeOptions(qos, no_local, False, handling, next(self.numbers)))
            for which, text, qos, no_local, handling in drawn
        ]

    def replay(self, client: Client, subscription: Subscription, begin: int) -> None:
        """Make all messages stored since this time due, and forget messages that became due earlier."""
        subscription.newest.clear()
        subscription.begin_anew(client)
        subscription.due = {
            published.message.payload: Due(published, subscription.options, required=True)
            for published in self.published
            if published.stored and published.time >= begin and self.matches(client, subscription, published)
        }

    def send_retained(self, client: Client, subscription: Subscription, *, replays: bool = False) -> None:
        """Schedule the current retained messages for delivery; if there are none, an earlier delivery continues.

        A retained message that the subscription also replays is delivered once, as a replayed message.
        """
        there = [kept for topic, kept in self.retained_now().items() if subscription.topic_filter.matches(topic)]
        due = [kept for kept in there if not (replays and kept.message.payload in subscription.due)]
        if there:
            if client.bounded and subscription.kept is not None:
                subscription.kept_before |= set(TOPICS) - set(subscription.kept)
            subscription.kept, subscription.kept_due = [], due
            subscription.after_kept, subscription.kept_again = {}, set()
            subscription.kept_stored = subscription.options.qos > 0

    def retained_now(self) -> dict[str, Published]:
        return {topic: kept for topic, kept in self.retained.items() if kept.readable(self.now)}

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2), text=st.sampled_from(FILTERS[1:]))
    def unsubscribe(self, which: int, text: str) -> None:
        client = self.one_of(which)
        subscription = client.subscriptions.pop(text, None)
        assert (subscription is not None) == self.call(client.name, "unsubscribe", text)
        if subscription is not None:
            subscription.begin_anew(client)
            subscription.kept = None

    # --- removing stored messages ---

    @rule()
    def add_generation(self) -> None:
        self.generations.append(self.call("db", "add_generation"))

    @precondition(lambda self: len(self.generations) > 1)
    @rule()
    def drop_generation(self) -> None:
        number = self.generations.pop(0)
        assert self.call("db", "drop_generation", number)
        assert not self.call("db", "drop_generation", number)
        for published in self.published:
            published.gone |= published.stored and published.generation == number

    @rule(text=st.sampled_from(["t/a", "u/#", "+/a"]))
    def delete(self, text: str) -> None:
        self.call("db", "delete", text)
        topic_filter = ts.TopicFilter(text)
        for published in self.published:
            published.gone |= published.stored and topic_filter.matches(published.message.topic)

    # --- delivering ---

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2), limit=st.sampled_from([1, 3, 1_000]))
    def deliver_to_one(self, which: int, limit: int) -> None:
        client = self.one_of(which)
        self.note_vanished([client])
        self.take(client, self.call(client.name, "deliver", limit))

    @rule(limit=st.sampled_from([1, 3, 1_000]), total=st.sampled_from([2, 20_000]), most=st.sampled_from([None, 1, 9]))
    def deliver(self, limit: int, total: int, most: int | None) -> None:
        for client in self.live():
            client.bounded |= most is not None
        self.deliver_all(limit, limit=total, max_bytes=most)

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2))
    def pause(self, which: int) -> None:
        """Pause a client, which must be sent nothing until it is resumed."""
        client = self.one_of(which)
        self.call(client.name, "pause")
        client.paused = True

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2))
    def resume(self, which: int) -> None:
        client = self.one_of(which)
        self.call(client.name, "resume")
        client.paused = False

    @rule()
    def deliver_everything(self) -> None:
        """Deliver until no client with room in its window misses a due message."""
        self.run_dry(answering=False)
        for client in self.live() if shows_at_once(self.store.db) else []:
            if client.in_use() < client.receive_maximum and not client.paused:
                assert [] == self.missing(client)

    def deliver_all(self, each: int, **limits: int | None) -> bool:
        self.note_vanished(self.live())
        out = self.call("sessions", "deliver", each, **limits)  # type: ignore[arg-type]
        assert sum(len(items) for _, items in out) <= (limits.get("limit") or 20_000)
        for name, items in out:
            payloads = [item.message.payload for item in items if isinstance(item, Publish)]
            assert len(payloads) <= each
            assert len(payloads) <= 1 or sum(map(len, payloads)) <= (limits.get("max_bytes") or 1 << 30)
            self.take(self.clients[name], items)
        return bool(out)

    def note_vanished(self, clients: Sequence[Client]) -> None:
        """Record which messages can't be read at the next delivery, so that none of them is expected."""
        for client in clients:
            for subscription in client.subscriptions.values():
                for due in subscription.due.values():
                    due.lapsed |= not due.published.readable(self.now)
                subscription.kept_due = [kept for kept in subscription.kept_due if kept.readable(self.now)]
            for exchange in client.exchanges.values():
                exchange.vanished |= exchange.again in ("message", "either") and not self.there(exchange)

    def missing(self, client: Client) -> list[Due]:
        """Return the due messages that a client hasn't received yet."""
        every = [due for subscription in client.subscriptions.values() for due in subscription.due.values()]
        wanted = [due for due in every if due.required and not due.lapsed and not due.received]
        return [due for due in wanted if due.published.readable(self.now)]

    def take(self, client: Client, items: Sequence[Publish | PubRel]) -> None:
        """Check the packets sent to a client, and record them."""
        assert not (items and client.paused)
        for item in items:
            if isinstance(item, PubRel):
                self.take_release(client, item.packet_id)
                continue
            if not item.message.payload:
                continue
            target = self.target_of(client, item)
            if item.qos:
                self.take_exchange(client, item, target)
            if isinstance(target, Due):
                self.count(client, item, target)
        assert len(client.outstanding) <= client.receive_maximum

    def take_release(self, client: Client, packet_id: int) -> None:
        exchange = client.exchanges[packet_id]
        assert exchange.again in ("release", "either") or exchange.state in ("received", "released")
        assert exchange.qos == 2
        client.held.pop(packet_id, None)
        exchange.state, exchange.answer, exchange.again = "released", "pubcomp", ""

    def there(self, exchange: Exchange) -> bool:
        """Return whether the message of an exchange can be read again."""
        return exchange.due is None or not exchange.due.published.gone

    def target_of(self, client: Client, item: Publish) -> Due | str:
        """Return the due message of a delivery, or the topic of a retained message."""
        subscription, options = client.by_identifier[item.subscription_identifiers[0]]
        message = item.message
        if item.retain and not options.retain_as_published:
            kept = self.was_retained[message.payload]
            assert kept.message.topic == message.topic
            assert item.qos == min(kept.message.qos, options.qos)
            self.check_expiry(client, item, kept, waited=True)
            assert subscription.topic_filter.matches(message.topic)
            if not item.dup and message.topic in subscription.kept_before:
                subscription.kept_before.remove(message.topic)
                subscription.kept_again.add(message.topic)
            elif not item.dup:
                self.take_kept(subscription, message)
            elif client.unsure and subscription.kept is not None:  # perhaps the id was committed, and never sent
                subscription.kept_again.add(message.topic)
            return message.topic
        exchange = client.exchanges.get(item.packet_id) if item.dup else None
        due = exchange.due if exchange is not None and exchange.due is not None else None
        if due is None or due.published.message.payload != message.payload:
            due = subscription.due.get(message.payload)
            if (client.bounded or client.unsure) and (due is None or due.options != options):
                due = subscription.before[message.payload]
            assert due is not None
            assert options == due.options
        waited = client.bounded  # an earlier delivery may already have read the message
        there = not due.published.gone if item.dup else due.published.readable(self.now)
        assert there or (waited and (due.published.gone or due.published.left(self.now) == 0))
        assert item.qos == due.qos
        self.check_expiry(client, item, due.published, waited=waited)
        assert item.retain == (due.options.retain_as_published and message.retain)
        return due

    def check_expiry(self, client: Client, item: Publish, published: Published, *, waited: bool) -> None:
        """Check the seconds until expiry, which may be one higher for a message that waited after it was read."""
        left = published.left(self.now)
        if left is not None and item.dup:  # messages in flight don't expire
            left = max(left, 0)
        if left is None or not waited:
            assert item.expiry == left
        else:  # setting the clock back doesn't restore seconds that had passed when the message was read
            least = left if published.least is None else max(min(left, published.least), 0)
            if published.least is not None and item.dup and published is self.was_retained.get(item.message.payload):
                least = min(least, self.still_left(client, item))
            assert item.expiry is not None
            assert least <= item.expiry <= left + 1

    def still_left(self, client: Client, item: Publish) -> int:
        """Return the fewest seconds until expiry of a redelivered retained message, counted from its last sending."""
        before = client.exchanges.get(item.packet_id)
        if before is None or before.message.payload != item.message.payload or before.expiry is None:
            return 0  # the packet id was committed but never sent
        return max(before.expiry - 1 - max(self.now - before.sent, 0) // SECOND, 0)

    @staticmethod
    def take_kept(subscription: Subscription, message: ts.Message) -> None:
        """Check that a retained message arrives before all newer messages of its topic."""
        assert subscription.kept is not None
        assert not subscription.kept or subscription.kept[-1] < message.topic
        assert subscription.after_kept.get(message.topic, 0) <= int(message.payload)
        subscription.kept.append(message.topic)

    def take_exchange(self, client: Client, item: Publish, target: Due | str) -> None:
        """Check a message that has a packet id, and record its exchange."""
        due = target if isinstance(target, Due) else None
        known = client.exchanges.get(item.packet_id)
        if item.dup and known is not None and known.again in ("message", "either"):
            assert (known.due, known.message.payload, known.qos) == (due, item.message.payload, item.qos)
            assert known.order > client.resent
            client.resent = known.order
            exchange = known
        else:
            assert not item.dup or client.unsure
            assert known is None or self.may_be_over(known)
            assert item.packet_id not in client.held
            if not item.dup:
                waiting = [e for e in client.exchanges.values() if e.again == "message" and not self.may_be_over(e)]
                assert [] == [e for e in waiting if not self.stays(e)]
            order = next(self.orders)
            exchange = Exchange(item.packet_id, item.qos, item.message, due, order, item.expiry, self.now)
            client.exchanges[item.packet_id] = exchange
        exchange.state, exchange.again, exchange.committed, exchange.vanished = "sent", "", False, False
        exchange.expiry, exchange.sent = item.expiry, self.now
        exchange.answer = "puback" if item.qos == 1 else "pubrec"
        client.outstanding.add(item.packet_id)

    def may_be_over(self, exchange: Exchange) -> bool:
        """Return whether another message may already use the packet id of this exchange."""
        gone = exchange.vanished or not self.there(exchange)
        return exchange.over or (exchange.again == "message" and exchange.qos == 1 and gone)

    def stays(self, exchange: Exchange) -> bool:
        """Return whether the packet id may stay in use, because its QoS 2 message was removed."""
        gone = exchange.vanished or not self.there(exchange)
        return exchange.again in ("message", "either") and exchange.qos == 2 and gone

    def count(self, client: Client, item: Publish, due: Due) -> None:
        """Let a client process a message, unless the client recognises it as a repetition."""
        if item.qos == 2:
            if item.packet_id in client.held:
                assert client.held[item.packet_id] is due
                return
            client.held[item.packet_id] = due
        if not due.delivered:
            self.check_order(client, item, due)
        due.delivered = True
        due.received += 1
        assert due.received == 1 or item.qos == 1

    def check_order(self, client: Client, item: Publish, due: Due) -> None:
        subscription, _ = client.by_identifier[item.subscription_identifiers[0]]
        newest = subscription.after_kept.get(item.message.topic, 0)
        subscription.after_kept[item.message.topic] = max(newest, int(item.message.payload))
        if subscription.due.get(item.message.payload) is due:
            key = (item.message.client_id, "" if self.ordered else item.message.topic)
            assert subscription.newest.get(key, -1) < due.published.number
            subscription.newest[key] = due.published.number

    # --- failures ---

    @precondition(lambda self: self.live())
    @rule(limit=st.sampled_from([1, 3, 1_000]), failing=st.integers(0, 1))
    def fail_to_deliver(self, limit: int, failing: int) -> None:
        """Deliver while a write fails: uncommitted messages are not handed out, and arrive after a tick.

        Other sessions get their messages.
        """
        self.note_vanished(self.live())
        with self.store.failing(failing):
            result, outcomes = self.store.call("sessions", "deliver", limit)
        self.absorb_all(outcomes)
        for name, items in result:
            self.take(self.clients[name], items)
        self.tick()

    @precondition(lambda self: any(not client.in_memory for client in self.live()))
    @rule(which=st.integers(0, 2), what=st.sampled_from(["disconnect", "subscribe", "unsubscribe", "checkpoint"]))
    def fail_to_change(self, which: int, what: str) -> None:
        """Make a call fail to write; nothing may have changed."""
        stored = [client for client in self.live() if not client.in_memory]
        client = stored[which % len(stored)]
        text = next(iter(client.subscriptions), None)
        given: dict[str, list[Any]] = {"subscribe": ["none", 1], "unsubscribe": [text]}
        if what == "checkpoint" or (what == "unsubscribe" and text is None):
            with contextlib.suppress(ts.StorageFullError), self.store.failing(0):
                self.store.call("sessions", "checkpoint")
        else:
            with pytest.raises(ts.StorageFullError), self.store.failing(0):
                self.store.call(client.name, what, *given.get(what, []))
        self.tick()

    # --- answering ---

    @precondition(lambda self: self.live())
    @rule(
        which=st.integers(0, 2),
        picked=st.lists(st.integers(0, 20), min_size=1, max_size=8),
        refused=st.sampled_from([False, False, False, True]),
    )
    def answer(self, which: int, picked: list[int], refused: bool) -> None:
        """Let a client send some of its answers, in any order; other answers are lost or follow later."""
        client = self.one_of(which)
        for number in picked:
            waiting = [exchange for exchange in client.exchanges.values() if exchange.answer]
            if waiting:
                self.send(client, waiting[number % len(waiting)], accepted=not refused)

    @precondition(lambda self: self.live())
    @rule(which=st.integers(0, 2))
    def answer_all(self, which: int) -> None:
        self.answer_everything([self.one_of(which)])

    def answer_everything(self, clients: Sequence[Client]) -> bool:
        """Let clients send all answers, with all PUBACKs in one call; return whether there were any."""
        answered = False
        for client in clients:
            received = [exchange for exchange in client.exchanges.values() if exchange.answer == "puback"]
            assert len(received) == self.call(client.name, "puback", *[exchange.packet_id for exchange in received])
            for exchange in received:
                exchange.answer, exchange.state = "", "acknowledged"
                client.outstanding.discard(exchange.packet_id)
            others = [exchange for exchange in client.exchanges.values() if exchange.answer]
            for exchange in others:
                self.send(client, exchange)
            answered |= bool(received or others)
        return answered

    def send(self, client: Client, exchange: Exchange, *, accepted: bool = True) -> None:
        answer, exchange.answer = exchange.answer, ""
        packet_id = exchange.packet_id
        if answer == "pubrec" and not accepted:
            assert self.call(client.name, "pubrec", packet_id, accepted=False)
            client.held.pop(packet_id, None)
            if exchange.due is not None:
                exchange.due.received -= 1
                exchange.due.required = False
            exchange.state = "acknowledged"
        else:
            assert self.call(client.name, answer, packet_id)
            exchange.state = {"puback": "acknowledged", "pubrec": "received", "pubcomp": "completed"}[answer]
            if answer == "pubrec":
                return
        client.outstanding.discard(packet_id)

    @rule()
    def checkpoint(self) -> None:
        self.call("sessions", "checkpoint")
        for client in self.live():
            client.commit()

    # --- the end of a history ---

    @rule()
    def settle(self) -> None:
        """Reconnect all clients and let them answer; check that no due message is missing and few records remain.

        Only records of QoS 2 messages that were removed while in flight may remain.
        """
        for client in list(self.clients.values()):
            if client.exists and not client.connected:
                self.connect(client.name, clean=False, interval=None, most=1_000, delay=None)
        for which in range(len(self.live())):
            self.resume(which)
        self.run_dry(answering=True)
        while not shows_at_once(self.store.db) and any(self.missing(client) for client in self.live()):
            assert self.call("sessions", "wait", 10)
            self.run_dry(answering=True)
        vanished = sum(one.gone and one.message.qos == 2 for one in self.published)
        for client in self.live():
            assert [] == self.missing(client)
            left = [exchange for exchange in client.exchanges.values() if not self.may_be_over(exchange)]
            assert [] == [exchange for exchange in left if not self.stays(exchange)]
            status = self.status_of(client)
            assert ("nothing", 0) == (status.waits_for, status.to_resend)
            assert len(left) <= status.in_flight
            assert vanished or not status.in_flight
            for subscription in client.subscriptions.values():
                assert [] == self.missing_retained(subscription)
        self.checkpoint()
        if not vanished and all(client.connected for client in self.clients.values() if client.exists):
            assert [] == self.call("store", "left_in_flight")
        stored = {published.message.payload for published in self.published if published.stored and not published.gone}
        assert stored == self.call("store", "contents").keys()
        assert [client.name for client in self.clients.values() if client.will] == self.call("store", "wills")
        kept = self.call("store", "retained").keys()
        for topic, one in self.retained_now().items():
            assert one.lapsed or (topic, one.message.payload) in kept
        assert kept <= {(topic, one.message.payload) for topic, one in self.retained_now().items()}

    def status_of(self, client: Client) -> Any:
        """Return the status of a session to which all messages were delivered.

        With a layout that hides messages until their epoch ends, a session may wait although no message is left for it.
        """
        status = self.call(client.name, "status")
        for _ in range(0 if shows_at_once(self.store.db) else len(self.published)):
            if status.waits_for != "delivery":
                break
            self.run_dry(answering=True)
            status = self.call(client.name, "status")
        return status

    def run_dry(self, *, answering: bool) -> None:
        """Deliver until no session is ready."""
        idle = 0
        while idle < 100:
            if self.deliver_all(1_000) or (answering and self.answer_everything(self.live())):
                idle = 0
            elif not self.call("sessions", "wait", 0):
                return
            idle += 1
        raise AssertionError("a session has nothing to do, and says that it has")

    def missing_retained(self, subscription: Subscription) -> list[str]:
        """Return the topics whose retained messages are missing: they were due and still exist."""
        came = subscription.kept
        if came is None:
            return []
        present = self.retained_now().values()
        still = {id(kept) for kept in present if not kept.lapsed and kept.surely_lasts(self.now)}
        topics = [kept.message.topic for kept in subscription.kept_due if id(kept) in still]
        return [topic for topic in topics if topic not in (*came, *subscription.kept_again)]

    # --- connected clients ---

    def live(self) -> list[Client]:
        return [client for client in self.clients.values() if client.connected]

    def one_of(self, which: int) -> Client:
        live = self.live()
        return live[which % len(live)]


class KilledSessionsHistories(SessionsHistories):
    """`SessionsHistories` on disk, in which the process is also killed between and during calls."""

    @rule()
    def crash(self) -> None:
        self.die_in(Fault("after", 1), "sessions", "counts")

    def die_in(self, death: Fault, *what: Any) -> None:
        """Kill the process during a call or right after it, before the call has returned anything."""
        with self.store.dying(death):
            self.store.call(*what)
        self.crashed()

    @rule(publisher=st.sampled_from(["p", "q"]), drawn=rows(), death=kills(3))
    def die_publishing(self, publisher: str, drawn: list[Drawn], death: Fault) -> None:
        """Kill the process while it publishes: each shard stores and retains its whole part of the call or nothing."""
        messages = self.messages(publisher, drawn)
        self.die_in(death, "db", "publish", messages)
        contents, retained = self.call("store", "contents"), self.call("store", "retained")
        for message in messages:
            if message.payload in contents:
                self.absorb(message, contents[message.payload])
            if (message.topic, message.payload) in retained:
                self.retain(message, contents.get(message.payload, retained[message.topic, message.payload]))
        there = {payload for _, payload in retained}
        self.retained = {
            topic: kept
            for topic, kept in self.retained.items()
            # an expired retained message is returned again if the clock is set back
            if kept.message.payload in there or not kept.readable(self.now)
        }

    @precondition(lambda self: self.live())
    @rule(limit=st.sampled_from([1, 3, 1_000]), death=kills())
    def die_delivering(self, limit: int, death: Fault) -> None:
        """Kill the process in a delivery: packet ids may be committed but never sent; QoS 0 messages may be lost."""
        live = self.live()
        self.note_vanished(live)
        self.die_in(death, "sessions", "deliver", limit)
        for client in live:
            client.unsure = True
            for subscription in client.subscriptions.values():
                for due in subscription.due.values():
                    due.required &= due.qos > 0

    @precondition(lambda self: self.live())
    @rule(death=kills())
    def die_at_a_checkpoint(self, death: Fault) -> None:
        """Kill the process during a checkpoint: acknowledgements may or may not be committed."""
        self.die_in(death, "sessions", "checkpoint")

    @precondition(lambda self: self.live())
    @rule(
        drawn=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(TOPICS)), min_size=2, max_size=12),
        death=kills(),
    )
    def die_publishing_together(self, drawn: list[tuple[int, str]], death: Fault) -> None:
        """Kill the process while many clients publish: each shard commits its rows with their packet ids, or none.

        Clients that publish again store nothing twice.
        """
        live = {client.name for client in self.live()}
        free = max([99, *(packet_id for client in self.live() for packet_id in client.unreleased)]) + 1
        sent: list[Row] = []
        for row, (which, topic) in enumerate(drawn):
            name = self.one_of(which).name
            if not self.clients[name].in_memory:
                sent.append((name, self.message(name, topic, 2, False, None, True), free + row))
        self.die_in(death, "store", "publish_rows", sent)
        contents = self.call("store", "contents")
        self.check_shards([(name, message.payload in contents) for name, message, _ in sent])
        for name, message, packet_id in sent:
            if message.payload in contents:
                self.absorb(message, contents[message.payload])
                self.clients[name].unreleased[packet_id] = message
        for name in sorted(live):
            self.connect(name, clean=False, interval=None, most=10, delay=None)
        again = [row for row in sent if self.clients[row[0]].unreleased or row[1].payload not in contents]
        _, repeated, refused = self.call("store", "publish_rows", again)
        assert not refused
        assert repeated == {row for row, (_, message, _) in enumerate(again) if message.payload in contents}
        for name, message, packet_id in again:
            self.clients[name].unreleased[packet_id] = message

    @precondition(lambda self: any(client.unreleased for client in self.live()))
    @rule(death=kills())
    def die_releasing_together(self, death: Fault) -> None:
        """Kill the process while many clients release packet ids: each shard has released all of its ids or none."""
        stored = [client for client in self.live() if not client.in_memory]
        sent = [(client.name, packet_id) for client in stored for packet_id in client.unreleased]
        self.die_in(death, "store", "release_rows", sent)
        left = {name: self.call("sessions", "__getitem__", name).awaiting_pubrel for name, _ in sent}
        self.check_shards([(name, not left[name]) for name, _ in sent])
        for name, count_left in left.items():
            assert count_left in (0, len(self.clients[name].unreleased))
            if not count_left:
                self.clients[name].unreleased.clear()

    @precondition(lambda self: self.live())
    @rule(drawn=filters(), death=kills())
    def die_subscribing_together(self, drawn: list[Asked], death: Fault) -> None:
        """Kill the process while many clients subscribe: each shard has all of its changed subscriptions or none."""
        sent = [row for row in self.asked(drawn) if row[1] and not self.clients[row[0]].in_memory]
        sent = list({(name, text): (name, text, options) for name, text, options in sent}.values())
        known = {(name, text) for name, text, _ in sent if text in self.clients[name].subscriptions}
        self.die_in(death, "store", "subscribe_rows", sent)
        there = {
            (name, text): options
            for name in {name for name, _, _ in sent}
            for text, options in self.call("sessions", "__getitem__", name).subscriptions
        }
        made = [(name, there.get((name, text)) == options) for name, text, options in sent]
        self.check_shards(made)
        for (name, text, options), (_, committed) in zip(sent, made, strict=True):
            if committed:
                subscription = self.subscribed(self.clients[name], text, options)
                handling = options.retain_handling
                if handling == 0 or (handling == 1 and (name, text) not in known):
                    self.send_retained(self.clients[name], subscription)
                if not subscription.kept_stored:
                    subscription.kept = None

    @rule(death=kills(4), opening=st.booleans())
    def die_while_many_come_or_go(self, death: Fault, opening: bool) -> None:
        """Kill the process while clients connect or disconnect together: each may be committed; no message is lost."""
        lasting = [
            c for c in self.clients.values() if c.exists and c.interval is None and c.expires is None and c.will is None
        ]
        names = [client.name for client in lasting if opening or client.connected]
        if not names:
            return
        self.checkpoint()
        if opening:
            connects = [Connect(client_id=name, expiry_interval=None) for name in names]
            self.die_in(death, "store", "open_rows", connects)
        else:
            self.die_in(death, "store", "end_rows", names, "lost")

    def check_shards(self, done: Sequence[tuple[str, bool]]) -> None:
        """Check that each shard has either all or none of its changes of one call for many clients."""
        by_shard: dict[int, set[bool]] = {}
        for name, one in done:
            by_shard.setdefault(self.call("db", "shard_of", name), set()).add(one)
        assert all(len(both) == 1 for both in by_shard.values())
