"""Tests of readers concurrent with a writer, compaction and deletes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from threading import Event, Lock
from typing import Any

import pytest
from topicstore import TopicFilter
from topicstore.contract.engine import WriteBatch

from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.threads import MOMENT, together
from topicstore_conformance.oracle.model import match

from .fixtures import Fixtures, Reader, Row, Stored, numbered
from .reading import TOPICS

__all__ = ["Concurrency"]


def ending(work: Callable[[], None], done: Event) -> Callable[[], None]:
    """Wrap work so that ``done`` is set when it ends, with or without an error."""

    def run() -> None:
        try:
            work()
        finally:
            done.set()

    return run


class Concurrency(Fixtures):
    """Tests of readers concurrent with writers."""

    def test_readers_beside_a_writer_and_compaction(self, stored: Stored) -> None:
        """Readers concurrent with a writer and a compaction get each message that precedes their start exactly once."""
        commit, done, reads = Lock(), Event(), list[str]()
        committed: list[tuple[int, int]] = [(stored.last, 0)]
        """Pairs of a position and the number of rows committed up to it."""

        def write() -> None:
            least, number, seen = tries(25, 120, stored.subject.backend_capabilities), 0, 0
            while number < least or (len(reads) < 20 and not done.is_set()):
                if number >= least and seen == len(reads):
                    done.wait(MOMENT)  # without pauses of the writer, readers of all messages would never catch up
                    continue
                number, seen = number + 1, len(reads)
                self._store(stored, numbered([*TOPICS, f"new/{number}/x"], 60), 1 + number % 5, commit)
                committed.append((stored.last, len(stored.rows)))

        def compact() -> None:
            while not done.wait(MOMENT):
                for step in stored.slab.compact(committed[-1][0], whole=True):
                    with commit:
                        stored.engine.write(step.write)

        def read(seed: int) -> None:
            draw = random.Random(seed)
            while not done.wait(MOMENT):
                bound, count = committed[-1]
                topic_filter = draw.choice(["#", "f/+/+/t", "f/x/#", "g", "new/#"])
                got: list[Row] = []
                for stream in stored.slab.cover(TopicFilter(topic_filter)):
                    got += Reader(stored, stream, topic_filter).read(bound, limit=draw.choice([50, 1_000]))
                expected = [row for row in stored.rows[:count] if match(topic_filter, row[1].topic)]
                assert expected == sorted(got, key=lambda row: row[0])
                reads.append(topic_filter)

        works = (write, compact, lambda: read(1), lambda: read(2))
        together(*(ending(work, done) for work in works))
        stored.check_all()
        stored.reopen()
        stored.check_all()

    @pytest.mark.parametrize("change", ["compact", "delete"])
    def test_a_change_at_any_moment_of_a_read(self, fresh: Callable[[], Stored], change: str) -> None:
        """If a slab is compacted or deleted from during a reader's calls, the reader gets all kept messages once."""
        for text, limit in (("#", 7), ("f/+/+/t", 4), ("#", 1_000)):
            moment, acted = 0, True
            while acted:
                stored = fresh()
                for count in (15, 16, 17, 18):
                    stored.put(numbered(TOPICS, count))
                    if count == 16:
                        stored.compact()
                acted = self._changed_at(moment, stored, change, text, limit)
                moment += 1 if "fast_seek" in stored.subject.backend_capabilities else 9
            assert moment >= 3

    @staticmethod
    def _changed_at(moment: int, stored: Stored, change: str, text: str, limit: int) -> bool:
        """Read while a slab is changed at a counted moment; return whether that moment was reached."""
        everything, engine, readers = stored.wanted(text), stored.act(), stored.readers([text])
        engine.arm(moment, stored.compact if change == "compact" else partial(stored.delete, "f/x/#"))
        for reader in readers:
            while not reader.exhausted:
                left, before = {position for position, _ in stored.rows}, len(reader.got)
                reader.step(stored.last, limit=limit)
                assert left >= {position for position, _ in reader.got[before:]}, "deleted before the call"
        left, got = {position for position, _ in stored.rows}, [row for reader in readers for row in reader.got]
        assert [row for row in everything if row[0] in left or row in got] == sorted(got, key=lambda row: row[0])
        return engine.left < 0

    @staticmethod
    def _store(stored: Stored, messages: list[Any], gap: int, commit: Lock) -> None:
        """Store a batch with its commit under a lock, and end its epoch, like the shard's writer."""
        batch, rows = stored.place(messages, gap)
        write = WriteBatch()
        stored.slab.store(batch, write)
        with commit:
            stored.engine.write(write)
            stored.slab.committed()
        stored.rows += rows
        stored.last = rows[-1][0] | (stored.slab.epoch - 1)
