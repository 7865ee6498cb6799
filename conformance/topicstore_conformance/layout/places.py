"""Tests of places: bytes that store a reader's offset in a stream, and stay valid whatever happens to the slab."""

from __future__ import annotations

import pytest
from topicstore import TopicFilter

from .fixtures import Fixtures, Reader, Stored, numbered, plenty
from .reading import FILTERS, TOPICS

__all__ = ["Places"]


def half_read(stored: Stored) -> list[Reader]:
    """Return readers that stopped in the middle of the messages."""
    readers = stored.readers(FILTERS)
    for number, reader in enumerate(readers):
        for _ in range(1 + number % 3):
            if not reader.exhausted:
                reader.step(stored.last, limit=13)
    return readers


class Places(Fixtures):
    """Tests of places."""

    @pytest.fixture
    def half_full(self, stored: Stored) -> Stored:
        """Return a slab with five batches."""
        for gap in (1, 40, 7, 3, 1):
            stored.put(numbered(TOPICS, 60), gap)
        return stored

    def test_places_survive_all_changes(self, half_full: Stored) -> None:
        """A reader continues at its place after reopening, stores, deletes and compaction, without gaps or repeats."""
        readers = half_read(half_full)
        half_full.reopen()
        for number in range(10):
            half_full.put(numbered(TOPICS, 30), 1 + number)
        middle = [row[0] for row in half_full.rows]
        half_full.delete("f/x/#", middle[20], middle[250])
        half_full.delete("f/+/3/+")
        half_full.delete("#", middle[60], middle[80])
        deleted = set(middle) - {row[0] for row in half_full.rows}
        half_full.compact()
        half_full.put(numbered(TOPICS, 60))
        seen = {id(reader): len(reader.got) for reader in readers}
        for reader in readers[::2]:
            reader.step(half_full.last if half_full.slab.epoch == 1 else half_full.rows[-61][0], limit=11)
        half_full.compact()
        half_full.reopen()
        half_full.end_epoch()
        for reader in readers:
            reader.read(half_full.last, limit=29)
        half_full.check_read(readers, deleted)
        late = [row[0] for reader in readers for row in reader.got[seen[id(reader)] :]]
        assert deleted.isdisjoint(late)

    def test_places_say_what_was_read(self, half_full: Stored) -> None:
        """`Slab.reached` is None, or a position from the highest that was read to the slab's last one."""
        for reader in half_read(half_full):
            reached = half_full.slab.reached(reader.stream, reader.place)
            if reached is not None:
                assert max((row[0] for row in reader.got), default=-1) <= reached <= half_full.last

    def test_streams_that_are_not_there(self, half_full: Stored) -> None:
        """`Slab.begin` raises KeyError for an unknown stream, and `Slab.next` raises KeyError or ValueError."""
        topic_filter = TopicFilter("#")
        known = {info.stream for t in half_full.everything() for info in half_full.slab.streams(TopicFilter(t))}
        known |= set(half_full.slab.cover(topic_filter))
        place = half_full.slab.begin(min(known), topic_filter, 0)
        for stream in (max(known) + 1, max(known) + 1_000, 2**40):
            with pytest.raises(KeyError):
                half_full.slab.begin(stream, topic_filter, 0)
            with pytest.raises((KeyError, ValueError)):
                half_full.slab.next(stream, topic_filter, place, plenty(half_full.last))

    def test_places_that_are_none(self, half_full: Stored) -> None:
        """`Slab.next` raises ValueError for bytes that are not a place of the slab."""
        topic_filter = TopicFilter("f/#")
        for info in half_full.slab.streams(topic_filter):
            place = half_full.slab.begin(info.stream, topic_filter, half_full.rows[9][0])
            for bad in (b"", place[:-1], place + b"\0", place * 2, b"\xff"):
                with pytest.raises(ValueError):  # noqa: PT011 - the words are the layout's
                    half_full.slab.next(info.stream, topic_filter, bad, plenty(half_full.last))
