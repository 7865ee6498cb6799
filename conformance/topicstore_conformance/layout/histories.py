"""Random histories of stores, failed commits, deletes, compactions, damage and reopenings, compared with a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from topicstore import Message, TopicFilter

from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.oracle import strategies
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects.subject import LayoutSubject

from .damage import FINE, flipped, outcome
from .fixtures import Fixtures, Reader, Stored

__all__ = ["Histories", "SlabMachine"]

DAMAGE = "Damage is reported by readers and by verify, or changes nothing."
EXHAUSTED = "A reader that is exhausted has every message up to its bound."
MESSAGES = [
    strategies.messages(of, times=st.integers(1, 2**40)) for of in (None, None, None, strategies.hostile_topics())
]
BATCHES = st.lists(st.one_of(MESSAGES), min_size=1, max_size=8)
GAPS = st.sampled_from((1, 1, 7, 900))


class SlabMachine(RuleBasedStateMachine):
    """A state machine over one slab. Subclass it with ``make`` set, which returns an empty slab."""

    make: Callable[[], Stored]

    @initialize(first=BATCHES)
    def start(self, first: list[Message]) -> None:
        """Create a slab with some messages."""
        self.stored = type(self).make()
        self.engine = self.stored.act()
        self.readers: list[Reader] = []
        self.deleted: set[int] = set()
        self.sealed: list[Stored] = []
        """The slabs of earlier generations."""
        self.failed = False
        """Whether the last batch failed, so that some listed streams may not be stored yet; no reader begins then."""
        self.stored.put(first)

    def teardown(self) -> None:
        """Compare all slabs with their lists, before and after reopening, and let the readers read to the end."""
        if not hasattr(self, "stored"):
            return
        for stored in (*self.sealed, self.stored):
            stored.check_all()
            stored.reopen()
            stored.check_all()
        self.finish()

    def _position(self, data: st.DataObject) -> int:
        """Draw a position: the last one, that of a message, or an adjacent one."""
        near = st.sampled_from([self.stored.last, *(position for position, _ in self.stored.rows)])
        return min(data.draw(near) + data.draw(st.sampled_from((0, 0, 0, -1, 1))), self.stored.last)

    def _filter(self, data: st.DataObject) -> str:
        """Draw a topic filter, usually one that matches some stored message."""
        near = strategies.filters()
        if self.stored.rows:
            topics = sorted({message.topic for _, message in self.stored.rows})
            near = st.one_of(near, *[st.sampled_from(topics).flatmap(strategies.filters_of)] * 3)
        return data.draw(near)

    @rule(batch=BATCHES, gap=GAPS, times=st.sampled_from((1, 1, 1, 30)), arrow=st.booleans())
    def put(self, batch: list[Message], gap: int, times: int, arrow: bool) -> None:
        """Store a batch, made from messages or from Arrow columns."""
        self.stored.put(batch * times, gap, arrow=arrow)
        self.failed = False

    @rule(batch=BATCHES, gap=GAPS)
    def fail(self, batch: list[Message], gap: int) -> None:
        """Store a batch whose commit fails."""
        self.stored.fail(batch, gap)
        self.failed = True

    @rule(data=st.data(), some=st.booleans(), spared=st.sampled_from((0, 0, 1, 2)))
    def delete(self, data: st.DataObject, some: bool, spared: int) -> None:
        """Delete the messages of a filter in a range of positions, except those of up to two spared filters."""
        before = {position for position, _ in self.stored.rows}
        first, last = 0, self.stored.last
        if some and before:
            first = data.draw(st.sampled_from(sorted(before)))
            last = first + data.draw(st.integers(0, 3_000))
        span = self._filter(data), first, last, [self._filter(data) for _ in range(spared)]
        self.stored.delete(*span)
        assert self.stored.delete(*span) == 0, "A delete that is repeated finds nothing."
        self.deleted |= before - {position for position, _ in self.stored.rows}

    @rule(data=st.data(), whole=st.booleans())
    def compact(self, data: st.DataObject, whole: bool) -> None:
        """Run and commit all steps of a compaction up to some position."""
        self.stored.compact(self._position(data), whole=whole)

    @rule(whole=st.booleans())
    def lose_a_step(self, whole: bool) -> None:
        """Request a compaction step, and never commit it."""
        next(self.stored.slab.compact(self.stored.last, whole=whole), None)

    @rule(data=st.data(), moment=st.integers(0, 30), limit=st.sampled_from((1, 3, 1_000)))
    def compact_during_a_read(self, data: st.DataObject, moment: int, limit: int) -> None:
        """Run a whole compaction before or after some engine read of a reader."""
        self.engine.arm(moment, self.stored.compact)
        self.stored.check(self._filter(data), limit=limit)
        self.engine.arm(-1, bool)

    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        """Invert a bit of some value, read and verify everything, and restore the value."""
        if pairs := [pair for pair in self.stored.pairs() if pair[2]]:
            keyspace, key, value = data.draw(st.sampled_from(pairs))
            at, bit = data.draw(st.integers(0, len(value) - 1)), data.draw(st.integers(0, 7))
            assert outcome(self.stored, (keyspace, key, flipped(value, at, bit))) in FINE, DAMAGE

    @precondition(lambda self: len(self.sealed) < 3)
    @rule()
    def add_generation(self) -> None:
        """Continue in a new generation, which inherits the learned structure."""
        self.finish()
        self.sealed.append(self.stored)
        heir = Stored(self.stored.subject, self.stored.engine, self.stored.generation + 1, self.stored.last)
        heir.create(self.stored.slab)
        self.stored, self.readers, self.deleted, self.failed = heir, [], set(), False

    @rule()
    def reopen(self) -> None:
        """Open the slab again, which must have the same streams and the same learned structure."""
        before = self.stored.structure()
        self.stored.reopen()
        assert self.failed or before == self.stored.structure(), "A slab that is opened again has the same streams."

    @rule(data=st.data())
    def list_streams(self, data: st.DataObject) -> None:
        """Read all streams that are listed for a filter, which must together hold each matching message once."""
        text = self._filter(data)
        got = [row for rows in self.stored.streams_of(text).values() for row in rows]
        assert self.stored.wanted(text) == sorted(got, key=lambda row: row[0]), "Each message is in one listed stream."

    @rule()
    def end_epoch(self) -> None:
        """End the current epoch, so that all messages are visible."""
        self.stored.end_epoch()

    @rule(
        data=st.data(),
        limit=st.sampled_from((1, 3, 1_000)),
        limit_bytes=st.sampled_from((1, 300, 1 << 30)),
        late=st.booleans(),
    )
    def read(self, data: st.DataObject, limit: int, limit_bytes: int, late: bool) -> None:
        """Read the messages of some filter, from the beginning or between two positions."""
        first, bound = (self._position(data), self._position(data)) if late else (0, None)
        self.stored.check(self._filter(data), first, bound, limit=limit, limit_bytes=limit_bytes)

    @precondition(lambda self: len(self.readers) < 12 and not self.failed)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Add a reader for each stream of a filter."""
        text = self._filter(data)
        self.readers += [Reader(self.stored, i.stream, text) for i in self.stored.slab.streams(TopicFilter(text))][:4]

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), limit=st.sampled_from((1, 2, 5, 1_000)), deadline=st.sampled_from((None, 0.0)))
    def advance(self, data: st.DataObject, limit: int, deadline: float | None) -> None:
        """Let a reader read one step, up to the visible end or to an earlier position."""
        reader = data.draw(st.sampled_from(self.readers))
        before, watermark = len(reader.got), self._position(data)
        self.stored.visible(reader.stream, watermark)
        bound = min(self.stored.visible(reader.stream, self.stored.last), watermark)
        reader.step(bound, limit=limit, deadline=deadline)
        live = dict(self.stored.rows)
        got = reader.got[before:]
        assert [live.get(position) for position, _ in got] == [m for _, m in got], "No reader gets a deleted message."
        if reader.exhausted:
            fresh = Reader(self.stored, reader.stream, reader.text).read(bound)
            assert {position for position, _ in fresh} <= {position for position, _ in reader.got}, EXHAUSTED

    def finish(self) -> None:
        """Read to the end; check that each reader got every message of its stream that was not deleted, once."""
        self.stored.end_epoch()
        for reader in self.readers:
            reader.read(self.stored.last, limit=50)
            seen = [position for position, _ in reader.got]
            assert len(set(seen)) == len(seen), "A reader gets each message once."
            fresh = Reader(self.stored, reader.stream, reader.text).read(self.stored.last)
            assert all(match(reader.text, message.topic) for _, message in fresh)
            assert {position for position, _ in fresh} == set(seen) - self.deleted, "A place stays valid."


class Histories(Fixtures):
    """A test of all guarantees together, by random histories."""

    def test_random_histories(self, subject: LayoutSubject, fresh: Callable[[], Stored]) -> None:
        """After stores, failures, deletes, compactions and reopenings in any order, readers get the expected rows."""
        attributes: dict[str, Any] = {"make": staticmethod(fresh)}
        machine = type("Machine", (SlabMachine,), attributes)
        chosen = settings(
            MACHINE, max_examples=tries(18, 60, subject.backend_capabilities), stateful_step_count=25, derandomize=True
        )
        run_state_machine_as_test(machine, settings=chosen)
