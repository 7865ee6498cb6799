"""Sessions that deliver a message once for all matching subscriptions, compared with a plain model.

The model records for each message which subscriptions still wait for the message, and their options. A delivery must
serve all these subscriptions: with all their identifiers, the highest QoS, and the RETAIN flag if a subscription
requires it. Between deliveries the client subscribes, unsubscribes, replays, answers, disconnects and reconnects, also
in the other mode, and the process crashes. At the end no message that is due may be missing.
"""

from __future__ import annotations

import sys
from itertools import count

import attrs
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from topicstore.sessions import Publish, PubRel, Session, SubscribeOptions

from topicstore_conformance.parts.machines import SessionsMachine, World, shows_at_once

TOPICS = ["t/a", "t/b", "t", "u/a", "u/b/c", "$s/a"]
FILTERS = ["#", "t/#", "t/+", "+/a", "t/a", "u/#", "u/b/c", "$s/#"]


@attrs.define(eq=False)
class Subscribed:
    """A subscription in the model."""

    topic_filter: ts.TopicFilter
    identifier: int
    options: SubscribeOptions
    newest: dict[str, int] = attrs.field(factory=dict)
    """The number of the newest message delivered, by publisher and topic, and by publisher and stored or live."""


@attrs.define(eq=False)
class Owed:
    """A subscription that still waits for a message."""

    subscribed: Subscribed
    identifier: int
    options: SubscribeOptions
    required: bool = True


@attrs.define(eq=False)
class Published:
    """A message, and the subscriptions that wait for it."""

    message: ts.Message
    number: int
    batch: int
    """The number of the call that published the message."""
    stored: bool
    owed: list[Owed] = attrs.field(factory=list)


class OverlappingHistories(SessionsMachine):
    """A state machine: each delivery of a message serves all subscriptions that wait for it; at the end none waits."""

    @initialize(
        pool=st.sampled_from([[0], [0, 0, 1], [0, 1, 2], [1, 2], [1]]),
        first=st.permutations(FILTERS),
        store_qos0=st.booleans(),
    )
    def begin(self, pool: list[int], first: list[str], store_qos0: bool) -> None:
        """Begin with some subscriptions and a pool of QoS values; some histories have only unstored messages."""
        self.world = World(self.pair, self.shards)
        self.published: dict[bytes, Published] = {}
        self.subscriptions: dict[str, Subscribed] = {}
        self.sent: dict[int, Publish] = {}
        """The last message sent under each packet id."""
        self.answers: dict[int, str] = {}
        """The answer that the client owes on this connection, by packet id."""
        self.again: set[int] = set()
        """Packet ids whose messages were not answered on an earlier connection, and must be redelivered."""
        self.numbers = count()
        self.identifiers, self.batches = count(1), count()
        self.once = True
        self.session: Session | None = None
        self.pool, self.store_qos0 = pool, store_qos0
        self.connect(once=True, most=100)
        for number, text in enumerate(first[:4]):
            self.subscribe(text, number, no_local=number == 3, as_published=number == 2, start=None)

    @property
    def db(self) -> ts.Database:
        return self.world.db

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                if sys.exc_info()[0] is None:
                    self.settle()
            finally:
                self.world.close()

    # --- the connection ---

    @rule(once=st.sampled_from([True, True, True, False]), most=st.sampled_from([1, 2, 5, 100]))
    def connect(self, once: bool, most: int) -> None:
        """Connect or reconnect; unanswered messages must be redelivered."""
        if self.session is not None:
            self.gone()
        self.once = once
        self.db.sessions.store_qos0 = self.store_qos0
        self.session = self.db.sessions.open(
            "c", expiry_interval=None, receive_maximum=most, overlapping="once" if once else "each"
        )

    def gone(self) -> None:
        """Mark messages that arrive only on a live connection as no longer required."""
        self.session = None
        self.again |= {packet_id for packet_id, answer in self.answers.items() if answer != "pubcomp"}
        self.answers.clear()
        for published in self.published.values():
            for owed in published.owed:
                owed.required &= owed.options.qos > 0 and published.stored

    @rule(how=st.sampled_from(["disconnect", "crash", "reopen"]))
    def leave(self, how: str) -> None:
        """Disconnect the client, crash the process so that only committed state remains, or reopen the database."""
        if how == "crash":
            self.world.crash()
        elif how == "reopen" and self.persistent:
            self.world.reopen()
        elif self.session is not None:
            self.session.disconnect()
        self.gone()

    # --- subscriptions ---

    @precondition(lambda self: self.session)
    @rule(
        text=st.sampled_from(FILTERS),
        qos=st.integers(0, 2),
        no_local=st.booleans(),
        as_published=st.booleans(),
        start=st.sampled_from([None, None, None, "beginning"]),
    )
    def subscribe(self, text: str, qos: int, no_local: bool, as_published: bool, start: str | None) -> None:
        """Create or change a subscription, with or without a start from which messages are replayed."""
        assert self.session
        identifier, qos = next(self.identifiers), self.pool[qos % len(self.pool)]
        options = SubscribeOptions(qos, no_local, as_published, 2, identifier)
        self.session.subscribe(
            text,
            qos,
            no_local=no_local,
            retain_as_published=as_published,
            retain_handling=2,
            subscription_identifier=identifier,
            start=start,
        )
        found = self.subscriptions.setdefault(text, Subscribed(ts.TopicFilter(text), identifier, options))
        found.identifier, found.options = identifier, options
        if start is not None:
            found.newest.clear()
            self.forget(found)
            for published in self.published.values():
                if published.stored:
                    self.owe(published, found, required=True)

    @precondition(lambda self: self.session and self.subscriptions)
    @rule(which=st.integers(0, 20))
    def unsubscribe(self, which: int) -> None:
        assert self.session
        text = sorted(self.subscriptions)[which % len(self.subscriptions)]
        assert self.session.unsubscribe(text)
        self.forget(self.subscriptions.pop(text))

    def forget(self, subscribed: Subscribed) -> None:
        for published in self.published.values():
            published.owed = [owed for owed in published.owed if owed.subscribed is not subscribed]

    def owe(self, published: Published, to: Subscribed, *, required: bool) -> None:
        message = published.message
        if to.topic_filter.matches(message.topic) and not (to.options.no_local and message.client_id == "c"):
            published.owed.append(Owed(to, to.identifier, to.options, required))

    # --- messages ---

    @rule(
        publisher=st.sampled_from(["p", "q", "c"]),
        topics=st.lists(st.sampled_from(TOPICS), min_size=1, max_size=12),
        qos=st.sampled_from([0, 1, 2]),
        retain=st.booleans(),
        apart=st.booleans(),
    )
    def publish(self, publisher: str, topics: list[str], qos: int, retain: bool, apart: bool) -> None:
        """Publish messages in one call, or each in a call of its own."""
        messages = [ts.Message(topic, b"%d" % next(self.numbers), publisher, qos, retain) for topic in topics]
        self.db.sessions.store_qos0 = self.store_qos0
        for some in [[message] for message in messages] if apart else [messages]:
            result, batch = self.db.publish(some), next(self.batches)
            stored = {message.payload for message in result.batch.to_messages()} if result.stored else set()
            for message in some:
                published = Published(message, int(message.payload), batch, message.payload in stored)
                self.published[message.payload] = published
                for subscribed in self.subscriptions.values():
                    if self.session is not None or published.stored:
                        connected = self.session is not None or subscribed.options.qos > 0
                        self.owe(published, subscribed, required=connected)

    @rule(seconds=st.sampled_from([1, 20]))
    def wait(self, seconds: int) -> None:
        self.world.clock.now += seconds * 1_000_000
        self.db.sessions.tick()

    # --- deliveries ---

    @precondition(lambda self: self.session)
    @rule(limit=st.sampled_from([1, 2, 5, 1_000]), all_sessions=st.booleans())
    def deliver(self, limit: int, all_sessions: bool) -> None:
        self.fetch(limit, all_sessions=all_sessions)

    def fetch(self, limit: int, *, all_sessions: bool) -> bool:
        assert self.session
        if all_sessions:
            packets = [packet for _, some in self.db.sessions.deliver(limit) for packet in some]
        else:
            packets = self.session.deliver(limit)
        for packet in packets:
            if isinstance(packet, PubRel):
                self.answers[packet.packet_id] = "pubcomp"
            else:
                self.take(packet)
        # PUBRELs don't count towards the window
        unanswered = [answer for answer in self.answers.values() if answer != "pubcomp"]
        assert len(unanswered) <= self.session.receive_maximum
        assert sum(isinstance(packet, Publish) for packet in packets) <= limit
        return bool(packets)

    def take(self, packet: Publish) -> None:
        if packet.qos:
            self.answers[packet.packet_id] = "puback" if packet.qos == 1 else "pubrec"
        if packet.dup:
            self.again.discard(packet.packet_id)
            assert packet.packet_id in self.sent, f"packet {packet.packet_id} is sent again, and never was before"
            before = self.sent[packet.packet_id]
            assert (before.message, before.qos, before.retain) == (packet.message, packet.qos, packet.retain)
            assert before.subscription_identifiers == packet.subscription_identifiers
            return
        if packet.qos:
            self.sent[packet.packet_id] = packet
        published = self.published[packet.message.payload]
        message = published.message
        got = [owed for owed in published.owed if owed.identifier in packet.subscription_identifiers]
        assert sorted(owed.identifier for owed in got) == sorted(packet.subscription_identifiers)
        assert got
        if self.once:
            assert [] == [owed for owed in published.owed if owed.required and owed not in got]
            published.owed = []
        else:
            assert len(got) == 1
            published.owed.remove(got[0])
        assert packet.qos == min(message.qos, max(owed.options.qos for owed in got))
        assert packet.retain == (message.retain and any(owed.options.retain_as_published for owed in got))
        for owed in got:
            self.check_order(owed.subscribed.newest, message, published)

    def check_order(self, newest: dict[str, int], message: ts.Message, published: Published) -> None:
        """Check the order within each topic and among stored messages.

        Stored and unstored messages of separate calls must also keep the order of the calls.
        """
        topic, client = f"{message.client_id} {message.topic}", message.client_id
        kind, other = ("stored", "live") if published.stored else ("live", "stored")
        assert newest.get(topic, -1) < published.number
        if self.ordered:
            assert newest.get(f"{client} {other} batch", -1) <= published.batch
            assert not published.stored or newest.get(f"{client} stored", -1) < published.number
        for key in (topic, f"{client} {kind}"):
            newest[key] = max(newest.get(key, -1), published.number)
        key = f"{client} {kind} batch"
        newest[key] = max(newest.get(key, -1), published.batch)

    @precondition(lambda self: self.answers)
    @rule(picked=st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def answer(self, picked: list[int]) -> None:
        for number in picked:
            if self.answers:
                self.send(sorted(self.answers)[number % len(self.answers)])

    @precondition(lambda self: self.answers)
    @rule()
    def answer_all(self) -> None:
        for packet_id in sorted(self.answers):
            self.send(packet_id)

    def send(self, packet_id: int) -> None:
        assert self.session
        getattr(self.session, self.answers.pop(packet_id))(packet_id)

    @rule()
    def checkpoint(self) -> None:
        self.db.sessions.checkpoint()

    # --- the end of a history ---

    def settle(self) -> None:
        """Reconnect the client and acknowledge all messages; after that, no subscription may wait for a message."""
        if self.session is None:
            self.connect(self.once, 100)
        self.run_dry()
        while not shows_at_once(self.world.db) and self.missing():
            assert self.db.sessions.wait(10)
            self.run_dry()
        assert [] == self.missing()
        assert set() == self.again

    def missing(self) -> list[bytes]:
        return [payload for payload, one in self.published.items() if any(owed.required for owed in one.owed)]

    def run_dry(self) -> None:
        for _ in range(10_000):
            busy = self.fetch(1_000, all_sessions=False) or bool(self.answers)
            self.answer_all()
            if not busy and not self.db.sessions.wait(0):
                return
        raise AssertionError("the session has nothing to do, and says that it has")
