"""Tests of deletes and of verification at the borders of batches and merged units, and of deletes that spare topics."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import pytest
from topicstore import Message, TopicFilter
from topicstore.contract.engine import META
from topicstore.contract.errors import CorruptionError, NewerFormatError

from topicstore_conformance.conditions.tries import tries

from .damage import FINE, flipped, outcome
from .fixtures import VALUES, Fixtures, Reader, Stored, numbered
from .reading import FILTERS, TOPICS

__all__ = ["Borders"]

SIZES = (7, 1, 2, 16, 3, 30, 1, 1, 64, 5, 12, 9, 33, 2, 8, 20, 1, 17)
"""The numbers of messages of the batches at whose borders deletes begin and end."""
EXCEPTIONS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257)
"""Numbers of filters to spare."""


first = itemgetter(0)


def asked_before(stored: Stored) -> None:
    """Read and check the messages of every filter before a change, so that the slab's caches hold the old results."""
    for text in FILTERS:
        stored.check(text)


class Borders(Fixtures):
    """Tests of deletes at borders, and of verification of every keyspace."""

    @pytest.mark.parametrize("merged", [False, True])
    @pytest.mark.parametrize("text", ["#", "f/x/#"])
    def test_deletes_at_the_borders_of_batches(self, stored: Stored, merged: bool, text: str) -> None:
        """A delete of any part of a batch, or across its ends, removes exactly its range, also of merged batches."""
        batches = [[row[0] for row in stored.put(numbered(TOPICS, size), 3)] for size in SIZES]
        if merged:
            stored.compact()
        for number, batch in enumerate(batches[1:-1], 1):
            before, after = batches[number - 1], batches[number + 1]
            first, last = (
                (batch[0], batch[0]),
                (batch[-1], batch[-1]),
                (batch[0], batch[-1]),
                (before[-1], batch[0]),
                (batch[0] + 1, batch[-1] - 1),
                (batch[0] - 1, batch[-1] + 1),
                (batch[-1] + 1, after[0] - 1),
                (batch[-1], after[0]),
            )[number % 8]
            asked_before(stored)  # also reads by every filter the messages that remain after the previous delete
            stored.delete(text, first, last)
            stored.check_all()
        asked_before(stored)
        stored.reopen()
        stored.check_all()
        stored.compact()
        stored.check_all()

    def test_deletes_at_every_position(self, stored: Stored) -> None:
        """A delete of one or of two messages, wherever in a merged slab, removes exactly these messages."""
        stored.put(numbered(["a", "b", "c/d"], tries(90, 300, stored.subject.backend_capabilities)))
        stored.compact()
        stored.put(numbered(["a", "b", "c/d"], 30))
        positions = [position for position, _ in stored.rows]
        for at in (0, len(positions) - 1, *range(1, len(positions) - 1, 4)):
            assert stored.delete("#", positions[at], positions[at]) == 1
            stored.check("#")
        stored.check_all()
        for at in range(2, len(positions) - 2, 16):
            stored.delete("a", positions[at], positions[at + 2])
            stored.check("a")
        stored.check_all()
        stored.compact()
        stored.check_all()

    @pytest.mark.parametrize("merged", [False, True])
    def test_any_number_of_topics_is_spared(self, stored: Stored, merged: bool) -> None:
        """A delete spares the topics of any number of filters, in any sequence, and removes exactly the others."""
        kept = ["f/x/3/s", "g", "$SYS/a/b"]
        for count in EXCEPTIONS:
            stored.put(numbered(TOPICS, 66))
            if merged:
                stored.compact()
            other = [f"none/{number}" for number in range(max(count - 3, 0))]
            spare: Sequence[str] = (*other, *kept)[-count:] if count else ()
            last, first = stored.last, stored.rows[-66][0]
            asked_before(stored)
            stored.delete("#", first, last, spare if count % 2 else list(spare))
            stored.check_all()
            assert stored.delete("#", first, last, spare) == 0
        stored.put(numbered(TOPICS, 66))
        for filters in (["+/x/#"], ["f/+/+/t", "f/+/1/+"], ["#"], ["g", "g", "g/#"], ["+"], ["f/#", "+/y/1/t"]):
            stored.delete("f/#", stored.rows[-66 if len(stored.rows) > 66 else 0][0], stored.last, filters)
            stored.check_all()
        stored.delete("$SYS/#", 0, stored.last, ["#", "+/a/b"])
        stored.check_all()
        asked_before(stored)

    def test_reads_between_steps_of_a_delete(self, stored: Stored) -> None:
        """Before and after each step of a delete is committed, readers get every remaining message exactly once."""
        for _ in range(60):
            stored.put(numbered(TOPICS, 44))
        stored.compact(stored.rows[1_000][0])
        last, gone = stored.last, 0
        matching = len(stored.wanted("f/+/+/t")) - len(stored.wanted("f/x/3/t"))
        kept = {row[0] for row in stored.wanted("#") if not TopicFilter("f/+/+/t").matches(row[1].topic)}
        kept |= {row[0] for row in stored.wanted("f/x/3/t")}
        everything = dict(stored.rows)

        def check() -> None:
            found = [row for reader in stored.readers(["#"]) for row in reader.read(last)]
            positions = {position for position, _ in found}
            assert len(positions) == len(found) == len(kept) + matching - gone
            assert kept <= positions
            assert all(everything[position] == message for position, message in found)

        steps = stored.slab.delete(TopicFilter("f/+/+/t"), 0, last, [TopicFilter("f/x/3/t")])
        for number, step in enumerate(steps):
            if number % 3 == 0:
                check()
            stored.engine.write(step.write)
            gone += step.messages
            if number % 3 == 1:
                check()
        stored.forget("f/+/+/t", 0, last, ["f/x/3/t"])
        assert gone == matching
        stored.check_all()

    @pytest.mark.parametrize("abandoned", [False, True])
    def test_deletes_of_what_is_being_read(self, stored: Stored, abandoned: bool) -> None:
        """A committed step of a delete hides its messages from all readers, even if the delete is then abandoned."""
        for _ in range(4):
            stored.put(numbered(TOPICS, 66))
        stored.compact()
        stored.put(numbered(TOPICS, 44))
        stored.end_epoch()
        for topic in ("f/x/1/s", "f/y/+/t", "f/#"):
            readers = stored.readers(FILTERS)
            for reader in readers:
                reader.step(stored.last, limit=5)
            steps = stored.slab.delete(TopicFilter(topic), 0, stored.last)
            for step in steps:
                stored.engine.write(step.write)
                if abandoned:
                    break
                self._check_against_another_slab(stored, readers)
            del steps
            self._check_against_another_slab(stored, readers)
        stored.check_all()

    @staticmethod
    def _check_against_another_slab(stored: Stored, readers: Sequence[Reader]) -> None:
        """Check that readers return the rows of a newly opened slab, and expect all of its rows from now on."""
        slab = stored.slab
        stored.reopen()
        readers_of_all = stored.readers(stored.everything())
        there = sorted((row for reader in readers_of_all for row in reader.read(stored.last)), key=first)
        expected = []
        for reader in readers:
            other = Reader(stored, reader.stream, reader.text)
            other.place = reader.place
            expected.append(other.read(stored.last))
        stored.slab = slab
        found = []
        for reader in readers:
            other = Reader(stored, reader.stream, reader.text)
            other.place = reader.place
            found.append(other.read(stored.last))
        assert expected == found
        stored.rows = there

    # --- verification ---

    @pytest.fixture
    def varied(self, stored: Stored) -> Stored:
        """Return a slab with values in all stored forms, and in all keyspaces that the layout uses."""
        for gap in (1, 5, 1):
            stored.put(numbered(TOPICS, 60), gap)
        stored.compact()
        stored.put([Message(f"new/{n}", b"%d" % n, f"client {n}") for n in range(20)])
        stored.put(numbered(TOPICS, 30))
        if not stored.pairs():
            pytest.skip("the layout keeps no values that could be damaged")
        return stored

    def test_damage_in_each_keyspace_is_reported(self, varied: Stored) -> None:
        """A flipped bit in the first, a middle or the last value of a keyspace is reported by reads and `verify`."""
        wrong = []
        for keyspace in VALUES:
            found = [pair for pair in varied.pairs((keyspace,)) if pair[2]]
            for _, key, value in dict.fromkeys(found[at] for at in (0, len(found) // 2, -1) if found):
                for at in {0, len(value) // 2, len(value) - 1}:
                    ended = outcome(varied, (keyspace, key, flipped(value, at, 3)))
                    if ended not in FINE:
                        wrong.append((keyspace.name, key, at, ended))
        for keyspace, key, value in varied.pairs((META,)):
            ended = outcome(varied, (keyspace, key, flipped(value, len(value) - 1, 0))) if value else FINE[0]
            if ended not in (*FINE, ("told", "right"), ("told", "fewer")):
                wrong.append((keyspace.name, key, len(value) - 1, ended))
        assert wrong == []

    def test_all_damage_is_reported(self, varied: Stored) -> None:
        """`verify` reports every damaged value, not only the first, and counts the other messages."""
        pairs = [pair for pair in varied.pairs() if len(pair[2]) > 20]
        alone = []
        for keyspace, key, value in pairs[:: max(len(pairs) // 8, 1)]:
            bad = flipped(value, len(value) // 2, 2)
            varied.replace(keyspace, key, bad)
            varied.reopen()
            told = {damage.place for damage in self._verified(varied)[1]}
            varied.replace(keyspace, key, value)
            if told:
                alone.append(((keyspace, key, value, bad), told))
        if len(alone) < 2:
            pytest.skip("no two values report their damage")
        alone = [alone[0], alone[-1]]  # two distant ones, because one value's report may cover its neighbours
        for (keyspace, key, _, bad), _ in alone:
            varied.replace(keyspace, key, bad)
        varied.reopen()
        good, damages = self._verified(varied)
        places = {damage.place for damage in damages}
        assert [told for _, told in alone if not told & places] == [], "verify leaves out some of several damages"
        assert good < len(varied.rows)
        for (keyspace, key, value, _), _ in alone:
            varied.replace(keyspace, key, value)
        varied.reopen()
        varied.check_all()

    @staticmethod
    def _verified(stored: Stored) -> tuple[int, list[Any]]:
        """Return the result of `Stored.verify`; an error counts as a report of one damage."""
        try:
            return stored.verify()
        except (CorruptionError, NewerFormatError) as error:
            raise AssertionError(f"verify ends at the first damage: {error}") from error

    def test_verification_ends_at_its_bound(self, stored: Stored) -> None:
        """`verify` counts every message up to its bound, and no later one if an unmerged batch ends at the bound."""
        if stored.slab.epoch != 1:
            pytest.skip("the layout reads epochs as a whole")
        ends = [stored.put(numbered(TOPICS, size), 3)[-1][0] for size in (60, 1, 40, 7, 60)]
        for number, end in enumerate(ends):
            assert stored.verify(end) == (sum(position <= end for position, _ in stored.rows), []), f"batch {number}"
        assert stored.verify(stored.rows[0][0] - 1) == (0, [])
        stored.compact()
        for position, _ in stored.rows[::7]:
            good, damages = stored.verify(position)
            assert damages == []
            assert sum(at <= position for at, _ in stored.rows) <= good <= len(stored.rows)
        stored.check_all()
