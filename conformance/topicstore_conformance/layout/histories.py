"""Random histories: stores that succeed and fail, deletes, compactions and reopenings, against a plain list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from topicstore import Message, TopicFilter

from topicstore_conformance.conditions.profiles import MACHINE, tries
from topicstore_conformance.oracle import strategies
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects.subject import LayoutSubject

from .fixtures import Fixtures, Reader, Stored

__all__ = ["Histories", "SlabMachine"]

BATCHES = st.lists(strategies.messages(times=st.integers(1, 2**40)), min_size=1, max_size=8)
GAPS = st.sampled_from((1, 1, 7, 900))


class SlabMachine(RuleBasedStateMachine):
    """A state machine over one slab. Subclass it with ``make`` set, which returns an empty slab."""

    make: Callable[[], Stored]

    @initialize(first=BATCHES)
    def start(self, first: list[Message]) -> None:
        """Make a slab with some messages in it."""
        self.stored = type(self).make()
        self.readers: list[Reader] = []
        self.deleted: set[int] = set()
        self.failed = False
        """Whether streams may be listed that no commit has stored yet; no reader begins with those."""
        self.stored.put(first)

    def teardown(self) -> None:
        """Check that everything is as the list has it, and that readers get to the end."""
        if not hasattr(self, "stored"):
            return
        self.stored.check_all()
        self.stored.reopen()
        self.stored.check_all()
        self.finish()

    def _filter(self, data: st.DataObject) -> str:
        """Draw a filter, usually one that some stored message matches."""
        near = strategies.filters()
        if self.stored.rows:
            topics = sorted({message.topic for _, message in self.stored.rows})
            near = st.one_of(near, *[st.sampled_from(topics).flatmap(strategies.filters_of)] * 3)
        return data.draw(near)

    @rule(batch=BATCHES, gap=GAPS, times=st.sampled_from((1, 1, 1, 30)))
    def put(self, batch: list[Message], gap: int, times: int) -> None:
        """Store a batch."""
        self.stored.put(batch * times, gap)
        self.failed = False

    @rule(batch=BATCHES, gap=GAPS)
    def fail(self, batch: list[Message], gap: int) -> None:
        """Store a batch whose commit fails."""
        self.stored.fail(batch, gap)
        self.failed = True

    @rule(data=st.data(), some=st.booleans())
    def delete(self, data: st.DataObject, some: bool) -> None:
        """Delete the messages of a filter, at all positions or at some."""
        before = {position for position, _ in self.stored.rows}
        first, last = 0, self.stored.last
        if some and before:
            first = data.draw(st.sampled_from(sorted(before)))
            last = first + data.draw(st.integers(0, 3_000))
        self.stored.delete(self._filter(data), first, last)
        self.deleted |= before - {position for position, _ in self.stored.rows}

    @rule(whole=st.booleans())
    def compact(self, whole: bool) -> None:
        """Take all steps of a compaction."""
        self.stored.compact(whole=whole)

    @rule()
    def reopen(self) -> None:
        """Open the slab again."""
        self.stored.reopen()

    @rule()
    def end_epoch(self) -> None:
        """Let an epoch pass."""
        self.stored.end_epoch()

    @rule(data=st.data(), limit=st.sampled_from((1, 3, 1_000)), late=st.booleans())
    def read(self, data: st.DataObject, limit: int, late: bool) -> None:
        """Read the messages of some filter, from the beginning or from the middle."""
        first = 0
        if late and self.stored.rows:
            first = data.draw(st.sampled_from([position for position, _ in self.stored.rows]))
        self.stored.check(self._filter(data), first, limit=limit)

    @precondition(lambda self: len(self.readers) < 12 and not self.failed)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Add a reader for each stream of a filter."""
        text = self._filter(data)
        self.readers += [Reader(self.stored, i.stream, text) for i in self.stored.slab.streams(TopicFilter(text))][:4]

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), limit=st.sampled_from((1, 2, 5, 1_000)), deadline=st.sampled_from((None, 0.0)))
    def advance(self, data: st.DataObject, limit: int, deadline: float | None) -> None:
        """Let a reader go on, as far as messages are visible."""
        reader = data.draw(st.sampled_from(self.readers))
        before = len(reader.got)
        reader.step(self.stored.slab.visible(reader.stream, self.stored.last), limit=limit, deadline=deadline)
        live = dict(self.stored.rows)
        assert [live.get(position) for position, _ in reader.got[before:]] == [m for _, m in reader.got[before:]]

    def finish(self) -> None:
        """Check that each reader gets every message of its stream that was not deleted, once."""
        self.stored.end_epoch()
        for reader in self.readers:
            reader.read(self.stored.last, limit=50)
            seen = [position for position, _ in reader.got]
            assert len(set(seen)) == len(seen)
            fresh = Reader(self.stored, reader.stream, reader.text).read(self.stored.last)
            assert all(match(reader.text, message.topic) for _, message in fresh)
            assert {position for position, _ in fresh} == set(seen) - self.deleted


class Histories(Fixtures):
    """The promise that covers all others."""

    def test_random_histories(self, subject: LayoutSubject, fresh: Callable[[], Stored]) -> None:
        """Whatever is stored, lost, deleted, compacted and opened again, in any order, readers get what a list has."""
        attributes: dict[str, Any] = {"make": staticmethod(fresh)}
        machine = type("Machine", (SlabMachine,), attributes)
        chosen = settings(
            MACHINE, max_examples=tries(15, 60, subject.backend_capabilities), stateful_step_count=25, derandomize=True
        )
        run_state_machine_as_test(machine, settings=chosen)
