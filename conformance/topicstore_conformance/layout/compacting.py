"""Tests of compaction, which changes how messages are stored but not the messages that readers see."""

from __future__ import annotations

import random

from topicstore.contract.layout import CompactStep

from .fixtures import Fixtures, Reader, Stored, numbered
from .reading import FILTERS, TOPICS

__all__ = ["Compacting"]


class Compacting(Fixtures):
    """Tests of `Slab.compact` and `Slab.backlog`."""

    def test_compaction_changes_nothing(self, stored: Stored) -> None:
        """Readers get the same messages before and after complete, partial and repeated compactions."""
        for round_ in range(4):
            for gap in (1, 30):
                stored.put(numbered(TOPICS, 150), gap)
            stored.compact(whole=round_ % 2 == 0)
            stored.check_all()
            for topic_filter in FILTERS:
                stored.check(topic_filter, stored.rows[100][0], stored.rows[-50][0], limit=40)
            if round_ == 2:
                stored.reopen()
        stored.compact()
        stored.delete("f/x/#", stored.rows[50][0], stored.rows[700][0])
        stored.compact()
        stored.check_all()

    def test_the_backlog_is_what_waits(self, stored: Stored) -> None:
        """A slab's backlog is at most its number of messages, and zero if it is empty or fully compacted."""
        assert stored.slab.backlog(0) == 0
        for _ in range(5):
            stored.put(numbered(TOPICS, 100))
            assert 0 <= stored.slab.backlog(len(stored.rows)) <= len(stored.rows)
        waiting = stored.slab.backlog(len(stored.rows))
        rewritten = stored.compact()
        assert stored.slab.backlog(len(stored.rows)) == 0
        assert rewritten >= waiting
        stored.reopen()
        assert stored.slab.backlog(len(stored.rows)) == 0

    def test_compaction_ends_at_its_bound(self, stored: Stored) -> None:
        """A compaction rewrites no message after its bound, also where the bound is within a batch."""
        batches = [[row[0] for row in stored.put(numbered(TOPICS, 60), gap)] for gap in (1, 30, 1)]
        for bound in (batches[0][0] - 1, batches[0][30], batches[1][-1], batches[2][30]):
            before = sum(position <= bound for position, _ in stored.rows)
            assert stored.compact(bound) <= before
            stored.check_all()
        stored.put(numbered(TOPICS, 30))
        stored.compact()
        stored.delete("f/x/#")
        assert stored.compact(stored.rows[0][0] - 1) == 0

    def test_steps_that_are_never_committed(self, stored: Stored) -> None:
        """A compaction step that is never committed changes nothing, and compaction can begin again."""
        for _ in range(6):
            stored.put(numbered(TOPICS, 100))
            steps = stored.slab.compact(stored.last, whole=True)
            next(steps, None)
            del steps
            stored.check_all()
        stored.compact()
        assert not stored.slab.backlog(len(stored.rows))
        stored.check_all()
        stored.reopen()
        stored.check_all()

    def test_stores_beside_compaction(self, stored: Stored) -> None:
        """Messages stored between a compaction step's creation and its commit stay, and so do readers' places."""
        draw = random.Random(1)
        for _ in range(20):
            stored.put(numbered(TOPICS, 60), draw.choice([1, 20]))
        readers = stored.readers(FILTERS)
        for step in stored.slab.compact(stored.last, whole=True):
            self._commit(stored, step, readers)
        stored.end_epoch()
        for reader in readers:
            reader.read(stored.last, limit=50)
        stored.check_read(readers)
        stored.check_all()

    def test_deletes_between_steps_of_a_compaction(self, stored: Stored) -> None:
        """Messages deleted between two steps of a compaction stay deleted, and all other messages are kept."""
        topics = [f"t/{number}" for number in range(20)]
        for half in range(2):
            for _ in range(30):
                stored.put(numbered(topics[::-1], 10 + half))
            if half == 0:
                stored.compact()
        for step in stored.slab.compact(stored.last, whole=True):
            stored.engine.write(step.write)
            stored.delete(topics.pop() if topics else "#")
        stored.check_all()
        stored.reopen()
        stored.check_all()

    @staticmethod
    def _commit(stored: Stored, step: CompactStep, readers: list[Reader]) -> None:
        """Store messages, read, commit a step, and read again."""
        stored.put(numbered(["f/x/1/t", "g"], 10))
        stored.end_epoch()
        for reader in readers:
            reader.step(stored.last, limit=5)
        stored.engine.write(step.write)
        for reader in readers:
            reader.step(stored.last, limit=5)
