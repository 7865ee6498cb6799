"""Packet ids and what is in flight, against a plain model, with crashes in between."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from topicstore.sessions import SubscribeOptions
from topicstore.sessions.inflight import MAX_PACKET_ID, Flight, InflightWindow, Staged
from topicstore.sessions.records import Keys
from topicstore_conformance.conditions.profiles import MACHINE, tries

KEYS = Keys("client")


class Store:
    """The state of a shard, as far as a window needs one."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def commit(self, staged: Staged) -> None:
        for write in staged.writes:
            if write.value is None:
                del self.values[write.key]
            else:
                self.values[write.key] = write.value

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted((key, value) for key, value in self.values.items() if key.startswith(prefix)))


class Windows(RuleBasedStateMachine):
    """What the client and the store know must be what the window says, before and after a crash."""

    @initialize(start=st.integers(1, MAX_PACKET_ID))
    def begin(self, start: int) -> None:
        self.store = Store()
        self.window = InflightWindow(KEYS)
        self.window.next_id = start
        self.position = 0
        self.waiting: dict[int, tuple[str, int]] = {}
        """By packet id in use: what it waits for, and its message's position."""
        self.committed: set[int] = set()
        """Positions of QoS 2 whose PUBREC was committed, and of any QoS whose end was checkpointed."""
        self.acknowledged: set[int] = set()

    @rule(qos=st.lists(st.integers(1, 2), min_size=1, max_size=20))
    def send(self, qos: list[int]) -> None:
        ids = self.window.free_ids(len(qos))
        assert len(qos) == len(set(ids))
        assert not self.waiting.keys() & set(ids)
        assert all(1 <= packet_id <= MAX_PACKET_ID for packet_id in ids)
        positions = np.arange(self.position + 1, self.position + len(qos) + 1, dtype=np.uint64)
        self.position += len(qos)
        flight = Flight(0, "a", 0, SubscribeOptions(2), ids, qos if len(set(qos)) > 1 else qos[0], positions)
        self.commit([flight], whole=False)
        for packet_id, level, position in zip(ids, qos, positions.tolist(), strict=True):
            self.waiting[packet_id] = ("puback" if level == 1 else "pubrec", position)

    def commit(self, flights: list[Flight], *, whole: bool) -> None:
        staged = self.window.stage(flights, whole=whole)
        self.store.commit(staged)
        released = self.window.settle(staged)
        received = {i for i, (what, _) in self.waiting.items() if what == "received"}
        assert received <= set(released)
        for packet_id in received:
            self.committed.add(self.waiting[packet_id][1])
            self.waiting[packet_id] = ("pubcomp", self.waiting[packet_id][1])

    @rule(data=st.data(), share=st.sampled_from([1, 2, 3]))
    def acknowledge(self, data: st.DataObject, share: int) -> None:
        for packet_id in data.draw(st.permutations(sorted(self.waiting)))[::share]:
            what, position = self.waiting[packet_id]
            if what == "puback":
                assert not self.window.pubcomp(packet_id)
                assert self.window.puback(packet_id)
            elif what == "pubrec":
                assert not self.window.puback(packet_id)
                assert self.window.pubrec(packet_id)
                self.waiting[packet_id] = ("received", position)
                continue
            elif what == "pubcomp":
                assert self.window.pubcomp(packet_id)
            else:
                continue
            del self.waiting[packet_id]
            self.acknowledged.add(position)

    @rule(data=st.data())
    def acknowledge_many(self, data: st.DataObject) -> None:
        due = [packet_id for packet_id, (what, _) in self.waiting.items() if what == "puback"]
        some = data.draw(st.lists(st.sampled_from(due), unique=True)) if due else []
        assert len(some) == self.window.puback_many([*some, 0])
        for packet_id in some:
            self.acknowledged.add(self.waiting.pop(packet_id)[1])

    @rule()
    def checkpoint(self) -> None:
        self.commit([], whole=True)
        self.committed |= self.acknowledged

    @rule()
    def crash(self) -> None:
        self.window = InflightWindow(KEYS)
        prefixes = KEYS.prefixes()
        self.window.load(self.store.scan(prefixes["flights"]), self.store.scan(prefixes["released"]))
        resent: list[int] = []
        waiting: dict[int, tuple[str, int]] = {}
        for flight in self.window.resend:
            for packet_id, row in (flight.unsent or {}).items():
                position = int(flight.positions[row])
                assert packet_id not in waiting
                assert position not in self.committed
                resent.append(position)
                waiting[packet_id] = ("puback" if flight.qos_of(row) == 1 else "pubrec", position)
        assert sorted(resent) == resent
        for packet_id in self.window.awaiting_pubcomp:
            assert packet_id not in waiting
            position = self.waiting.get(packet_id, ("", 0))[1]
            waiting[packet_id] = ("pubcomp", position)
        self.acknowledged &= self.committed  # of the others nobody knows any more
        lost = {position for _, position in self.waiting.values()} - {position for _, position in waiting.values()}
        assert not lost
        for flight in self.window.resend:
            flight.unsent = None
        self.window.resend.clear()
        self.waiting = waiting

    @rule()
    def finish(self) -> None:
        """When everything was acknowledged, nothing is stored."""
        for packet_id, (what, _) in list(self.waiting.items()):
            if what == "puback":
                self.window.puback(packet_id)
            elif what == "pubrec":
                self.window.pubrec(packet_id)
        self.commit([], whole=True)
        for packet_id in list(self.window.awaiting_pubcomp):
            self.window.pubcomp(packet_id)
        self.waiting.clear()
        self.commit([], whole=True)
        assert {} == self.store.values

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "window"):
            assert len(self.waiting) == len(self.window)


Windows.TestCase.settings = settings(MACHINE, max_examples=tries(30, 150), stateful_step_count=30)
TestWindows = Windows.TestCase


def test_ids_wrap_around_what_is_still_in_use() -> None:
    """With all but three in use, those three are found, wherever they lie."""
    window = InflightWindow(KEYS)
    all_ids = range(1, MAX_PACKET_ID + 1)
    positions = np.arange(len(all_ids), dtype=np.uint64)
    window.settle(window.stage([Flight(0, "a", 0, SubscribeOptions(1), all_ids, 1, positions)], whole=False))
    assert 3 == window.puback_many([5, 40_000, 65_535])
    assert [5, 40_000, 65_535] == list(window.free_ids(3))
