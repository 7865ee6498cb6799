"""Shared subscriptions compared with a plain model: members join, leave, disconnect, are slow, and acknowledge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from topicstore.sessions import Publish, Session

from topicstore_conformance.faults.striking import Fault, kills
from topicstore_conformance.parts.machines import SessionsMachine, World

SHARDS = 2
CLIENTS = ["a", "b", "c", "d"]
TEXT = "$share/g/t/#"
HANDOVER, EXPIRY, SLOW = 20, 50, 5
SECOND = 1_000_000
ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30)
"""Drawn messages: topic, publisher, QoS."""


@attrs.define
class Sent:
    """A message and its state in the model."""

    topic: str
    publisher: str
    number: int
    qos: int
    holder: str = ""
    """The client whose session has the message in flight."""
    state: str = "unread"
    """unread, held, acknowledged, forgotten, done, returned, perhaps or lost.

    "forgotten": acknowledged before a crash, perhaps uncommitted. "perhaps": perhaps returned to the group.
    """
    effective: int = 0
    unsure: frozenset[str] = frozenset()
    """Clients that may have the message in flight from a killed delivery; a redelivery to them has the DUP flag."""
    certain: bool = False
    """Whether all of these clients still have their sessions."""


class SharedHistories(SessionsMachine):
    """A state machine: each message goes to one member, and to another only if it was returned unacknowledged."""

    @initialize()
    def begin(self) -> None:
        self.world = World(self.pair, self.shards)
        self.sent: dict[bytes, Sent] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        self.members: dict[str, int] = {}
        """The QoS of each member of the shared subscription."""
        self.expiry: dict[str, int | None] = {}
        """The expiry interval of each session in seconds."""
        self.away: dict[str, int] = {}
        """The time when each absent client disconnected; clients that returned their messages are removed."""
        self.ends: dict[str, int] = {}
        self.in_flight: dict[str, dict[int, tuple[bytes, str]]] = {client: {} for client in CLIENTS}
        """Messages as each client sees them: by packet id, the payload and the answer that the client owes."""
        self.live: dict[str, Session] = {}
        self.newest: dict[tuple[str, str], int] = {}
        self.start_over()

    def start_over(self) -> None:
        """Load the sessions from committed state, with the group settings of this test."""
        self.sessions = self.world.db.sessions
        self.sessions.groups.slow_after, self.sessions.groups.handover_after = SLOW, HANDOVER

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                if sys.exc_info()[0] is None:
                    self.everything_arrives()
            finally:
                self.world.close()

    # --- rules ---

    @rule(rows=ROWS)
    def publish(self, rows: list[tuple[int, int, int]]) -> None:
        self.world.db.publish(self.messages(rows))

    def messages(self, rows: list[tuple[int, int, int]]) -> list[ts.Message]:
        """Create messages, and record them in the model if the group has a member."""
        messages = []
        for topic, publisher, qos in rows:
            key = (f"t/{topic}", f"p{publisher}")
            number = self.numbers[key] = self.numbers.get(key, 0) + 1
            payload = f"{key}{number}".encode()
            messages.append(ts.Message(key[0], payload, key[1], qos))
            if self.members:
                self.sent[payload] = Sent(*key, number, qos)
        return messages

    @rule(
        client=st.sampled_from(CLIENTS),
        clean=st.sampled_from([False, False, True]),
        expiry=st.sampled_from([None, 0, EXPIRY]),
        most=st.sampled_from([1, 4, 100]),
        qos=st.sampled_from([1, 2]),
        subscribe=st.sampled_from([True, True, False]),
    )
    def connect(self, client: str, clean: bool, expiry: int | None, most: int, qos: int, subscribe: bool) -> None:
        if client in self.live:
            self.commit(client)
            clean_up = self.expiry[client] == 0
        else:
            clean_up = self.ends.get(client, 1 << 60) <= self.world.clock.now
        if clean or clean_up:
            self.session_ended(client)
        session = self.sessions.open(client, clean_start=clean, expiry_interval=expiry, receive_maximum=most)
        assert session.present == (client in self.expiry)
        self.live[client] = session
        self.expiry[client] = expiry
        self.ends.pop(client, None)
        self.away.pop(client, None)
        self.in_flight[client].clear()
        if subscribe:
            assert session.subscribe(TEXT, qos).created == (client not in self.members)
            self.members[client] = qos

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3))
    def unsubscribe(self, which: int) -> None:
        client = self.one_of(which)
        assert self.live[client].unsubscribe(TEXT) == (client in self.members)
        self.leave(client)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), lost=st.booleans())
    def disconnect(self, which: int, lost: bool) -> None:
        client = self.one_of(which)
        session = self.live.pop(client)
        self.commit(client)
        session.lost() if lost else session.disconnect()
        expiry = self.expiry[client]
        self.away[client] = self.world.clock.now
        if expiry == 0:
            self.session_ended(client)
        elif expiry is not None:
            self.ends[client] = self.world.clock.now + expiry * SECOND

    @precondition(lambda self: self.expiry)
    @rule(which=st.integers(0, 3))
    def expire(self, which: int) -> None:
        client = sorted(self.expiry)[which % len(self.expiry)]
        if self.ends.get(client, 1 << 60) > self.world.clock.now:
            self.sessions.expire(client)
            self.commit(client)
            self.session_ended(client)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), limit=st.sampled_from([1, 5, 1_000]))
    def deliver_to_one(self, which: int, limit: int) -> None:
        client = self.one_of(which)
        self.delivered(client, self.live[client].deliver(limit))

    @rule(limit=st.sampled_from([1, 5, 1_000]))
    def deliver(self, limit: int) -> None:
        for session, items in self.sessions.deliver(limit):
            self.delivered(session.client_id, items)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), most=st.sampled_from([1, 3, 1_000]))
    def acknowledge(self, which: int, most: int) -> None:
        client = self.one_of(which)
        for packet_id, (payload, answer) in list(self.in_flight[client].items())[:most]:
            if answer != "nothing":
                self.answer(client, packet_id, payload, answer)

    @rule()
    def checkpoint(self) -> None:
        self.sessions.checkpoint()
        for client in self.live:
            self.commit(client)

    @rule(seconds=st.sampled_from([1, 6, HANDOVER, EXPIRY]))
    def wait(self, seconds: int) -> None:
        self.world.clock.now += seconds * SECOND
        self.tick()

    @rule()
    def crash(self) -> None:
        """Crash the process; only committed state remains."""
        self.world.crash()
        self.crashed()

    def crashed(self) -> None:
        self.start_over()
        list(self.sessions.groups)  # loads all groups from committed state
        for sent in self.sent.values():
            if sent.state == "acknowledged":
                sent.state = "forgotten"
        for client in list(self.live):
            del self.live[client]
            self.away[client] = self.world.clock.now
            expiry = self.expiry[client]
            if expiry is not None:
                self.ends[client] = self.world.clock.now + expiry * SECOND
        for client in self.away:
            self.away[client] = self.world.clock.now  # the client's time away counts from here
        self.tick()

    # --- faults ---

    @precondition(lambda self: self.live)
    @rule(limit=st.sampled_from([1, 5, 1_000]), failing=st.integers(0, 1))
    def fail_to_deliver(self, limit: int, failing: int) -> None:
        """Deliver while a write fails: uncommitted messages are not handed out, and arrive after a tick.

        Other members get their messages.
        """
        with self.world.failing(failing):
            out = self.sessions.deliver(limit)
        for session, items in out:
            self.delivered(session.client_id, items)
        self.tick()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), what=st.sampled_from(["disconnect", "subscribe", "unsubscribe"]))
    def fail_to_change(self, which: int, what: str) -> None:
        """Make a call fail to write; nothing may have changed."""
        client = self.one_of(which)
        there = client in self.members
        if what != "unsubscribe" or there:
            given: dict[str, list[Any]] = {"subscribe": ["other" if there else TEXT, 1], "unsubscribe": [TEXT]}
            with pytest.raises(ts.StorageFullError), self.world.failing(0):
                getattr(self.live[client], what)(*given.get(what, []))
            self.tick()

    # --- the model ---

    def one_of(self, which: int) -> str:
        return sorted(self.live)[which % len(self.live)]

    def tick(self) -> None:
        for client in [client for client, end in self.ends.items() if end <= self.world.clock.now]:
            self.session_ended(client)
        self.sessions.tick()
        for client, since in list(self.away.items()):
            if client not in self.members or not self.members.keys() & self.live.keys():
                continue
            if since + HANDOVER * SECOND <= self.world.clock.now:
                del self.away[client]
                self.give_back(client)

    def give_back(self, client: str) -> None:
        """Return a client's QoS 1 messages in flight to the group."""
        for sent in self.sent.values():
            if sent.holder == client and sent.effective == 1 and sent.state in ("held", "forgotten"):
                sent.state = "returned" if sent.state == "held" else "perhaps"

    def session_ended(self, client: str) -> None:
        self.give_back(client)
        for sent in self.sent.values():
            if sent.holder == client and sent.state in ("held", "forgotten"):
                sent.state = "lost"
        self.leave(client)
        self.in_flight[client].clear()
        for known in (self.live, self.expiry, self.ends, self.away):
            known.pop(client, None)

    def leave(self, client: str) -> None:
        self.members.pop(client, None)
        for sent in self.sent.values():
            sent.certain &= client not in sent.unsure
        if not self.members:  # without members there is no group that messages could return to
            for sent in self.sent.values():
                if sent.state in ("unread", "returned", "perhaps"):
                    sent.state = "lost"

    def commit(self, client: str) -> None:
        """Mark a client's acknowledgements as committed."""
        for sent in self.sent.values():
            if sent.holder == client and sent.state == "acknowledged":
                sent.state = "done"

    def delivered(self, client: str, items: Sequence[object]) -> None:
        known = self.in_flight[client]
        for item in items:
            if isinstance(item, Publish):
                self.check(client, item)
            else:
                payload, _ = known.get(item.packet_id, (b"", ""))  # type: ignore[attr-defined]
                known[item.packet_id] = (payload, "pubcomp")  # type: ignore[attr-defined]
        sent = [answer for _, answer in known.values() if answer in ("puback", "pubrec")]
        assert len(sent) <= self.live[client].receive_maximum

    def check(self, client: str, item: Publish) -> None:
        sent = self.sent[item.message.payload]
        assert min(sent.qos, self.members.get(client, 2)) >= item.qos or item.dup
        if item.dup and sent.state == "perhaps" and client in sent.unsure:
            sent.effective = item.qos
        elif item.dup:
            assert sent.holder == client
            assert sent.state in ("held", "forgotten")
            assert sent.effective == item.qos
        else:
            assert item.packet_id not in self.in_flight[client]
            assert sent.state in ("unread", "returned", "perhaps")
            if sent.state == "unread" and item.qos:
                key = (sent.topic, sent.publisher)
                assert sent.number > self.newest.get(key, 0)
                self.newest[key] = sent.number
            sent.effective = item.qos
        sent.holder, sent.state = client, "held" if item.qos else "done"
        if item.qos:
            self.in_flight[client][item.packet_id] = (item.message.payload, "puback" if item.qos == 1 else "pubrec")

    def answer(self, client: str, packet_id: int, payload: bytes, answer: str) -> None:
        session, known = self.live[client], self.in_flight[client]
        assert getattr(session, answer)(packet_id)
        if answer == "pubrec":
            known[packet_id] = (payload, "nothing")
            self.sent[payload].state = "acknowledged"
        else:
            del known[packet_id]
            if payload:
                self.sent[payload].state = "acknowledged"

    # --- invariants ---

    @invariant()
    def shares_are_even(self) -> None:
        groups = list(self.sessions.groups)
        assert [TEXT] * bool(self.members) == [f"$share/{group.name}/{group.topic_filter}" for group in groups]
        for group in groups:
            assert sorted(self.members) == [member.client_id for member in group.members]
            connected = [member for member in group.members if member.connected]
            assert {member.client_id for member in connected} == self.members.keys() & self.live.keys()
            quick = [member for member in connected if not member.slow]
            for shard in range(SHARDS):
                held = [member.slices[shard] for member in quick]
                assert max(held, default=0) - min(held, default=0) <= 1
                assert sum(member.slices[shard] for member in connected) == (64 if connected else 0)

    def everything_arrives(self) -> None:
        """Deliver and acknowledge until nothing remains; after that, no message may be unread."""
        if not self.members.keys() & self.live.keys():
            return
        while True:
            out = self.sessions.deliver()
            for session, items in out:
                self.delivered(session.client_id, items)
            answers = [(client, known) for client, known in self.in_flight.items() if client in self.live]
            waiting = [(c, i, *what) for c, known in answers for i, what in known.items() if what[1] != "nothing"]
            for client, packet_id, payload, answer in waiting:
                self.answer(client, packet_id, payload, answer)
            if not out and not waiting:
                break
        left = [sent for sent in self.sent.values() if sent.qos and sent.state in ("unread", "returned")]
        assert not left
        unsure = [sent for sent in self.sent.values() if sent.qos and sent.state == "perhaps" and sent.certain]
        assert not [sent for sent in unsure if sent.unsure <= self.live.keys()]
        assert not [s for s in self.sent.values() if s.state == "held" and s.holder in self.live]


class KilledSharedHistories(SharedHistories):
    """`SharedHistories` on disk, in which the process is also killed between and during calls."""

    @rule(rows=ROWS, death=kills())
    def die_publishing(self, rows: list[tuple[int, int, int]], death: Fault) -> None:
        """Kill the process while it publishes: each message may be stored or not."""
        messages = self.messages(rows)
        with self.world.dying(death):
            self.world.db.publish(messages)
        stored = {message.payload for message in self.world.db.replay("#")}
        for message in messages:
            if message.payload not in stored:
                self.sent.pop(message.payload, None)
        self.crashed()

    @precondition(lambda self: self.live)
    @rule(limit=st.sampled_from([1, 5, 1_000]), death=kills(3))
    def die_delivering(self, limit: int, death: Fault) -> None:
        """Kill the process in a delivery: packet ids may be committed but never sent; QoS 0 messages may be lost."""
        members = frozenset(self.members.keys() & self.live.keys())
        with self.world.dying(death):
            self.sessions.deliver(limit)
        for sent in self.sent.values() if members else ():
            if sent.state in ("unread", "returned", "perhaps"):
                first = sent.state != "perhaps" or sent.certain
                sent.state, sent.unsure, sent.certain = "perhaps", sent.unsure | members, first
        self.crashed()

    @rule(death=kills())
    def die_at_a_checkpoint(self, death: Fault) -> None:
        """Kill the process during a checkpoint: acknowledgements may or may not be committed."""
        with self.world.dying(death):
            self.sessions.checkpoint()
        self.crashed()
