"""Tests of readers: limits, bounds, deadlines, exhaustion, order, and the division of messages among streams."""

from __future__ import annotations

import time

import attrs
import pytest
from topicstore import Message, TopicFilter
from topicstore.contract.columns import to_list

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries

from .fixtures import START, Fixtures, Reader, Stored, matches_pattern, numbered, plenty

__all__ = ["Reading"]

TOPICS = [f"f/{place}/{device}/{what}" for place in "xy" for device in range(5) for what in "st"] + ["g", "$SYS/a/b"]
FILTERS = ("#", "f/#", "f/+/+/t", "f/y/#", "f/+/4/+", "f/y/3/s", "f/no/+/s", "g", "+", "$SYS/#", "f/+/+/+/more")


class Reading(Fixtures):
    """Tests of `Slab.streams`, `Slab.cover`, `Slab.begin` and `Slab.next`."""

    @pytest.fixture
    def filled(self, stored: Stored) -> Stored:
        """Return a slab with three batches."""
        for gap in (1, 40, 7):
            stored.put(numbered(TOPICS, 120), gap)
        return stored

    def test_the_limit_of_rows(self, filled: Stored) -> None:
        """A call returns at most as many rows as its limit, and the calls together return every message once."""
        count = tries(len(FILTERS), len(FILTERS), filled.subject.backend_capabilities)
        for topic_filter in FILTERS[:count]:
            for limit in (1, 2, 7, 120, 10_000):
                filled.check(topic_filter, limit=limit)

    def test_the_limit_of_bytes(self, filled: Stored) -> None:
        """A call exceeds its limit of bytes by at most about a megabyte, and returns at least one row."""
        filled.put(numbered(["big"], 40, size=100_000))
        filled.end_epoch()
        (stream,) = filled.slab.cover(TopicFilter("big"))
        for limit_bytes, most in ((1, 12), (500_000, 22), (1 << 30, 40)):
            reader, before = Reader(filled, stream, "big"), 0
            while len(reader.got) < 40:
                reader.step(filled.last, limit_bytes=limit_bytes)
                assert len(reader.got) - before <= most
                before = len(reader.got)
            filled.check("#", limit_bytes=limit_bytes)

    def test_the_bound(self, filled: Stored) -> None:
        """Readers get all rows up to the bound (inclusive) and none after it, also for a bound before all rows."""
        positions = [row[0] for row in filled.rows]
        for bound in (0, START, positions[0], positions[0] - 1, positions[100], positions[200] + 3, positions[-1]):
            for topic_filter in ("#", "f/+/+/t", "f/y/3/s", "g"):
                filled.check(topic_filter, 0, bound, limit=50)

    def test_the_columns_that_are_asked_for(self, filled: Stored) -> None:
        """A read of some columns returns the same messages as a read of all columns, and the same values."""
        for text in ("#", "f/+/+/t", "f/y/3/s"):
            for stream in filled.slab.cover(TopicFilter(text)):
                place = filled.slab.begin(stream, TopicFilter(text), 0)
                whole = filled.slab.next(stream, TopicFilter(text), place, plenty(filled.last)).batch
                for columns in (frozenset[str](), {"payloads"}, {"client_ids", "properties"}, {"qos", "timestamps"}):
                    limits = attrs.evolve(plenty(filled.last), columns=frozenset(columns))
                    some = filled.slab.next(stream, TopicFilter(text), place, limits).batch
                    assert whole.positions.tolist() == some.positions.tolist()
                    for name in ("topics", *columns):
                        assert to_list(getattr(whole, name)) == to_list(getattr(some, name))

    def test_the_start_is_inclusive(self, filled: Stored) -> None:
        """A new place begins with the first message at or after its position."""
        positions = [row[0] for row in filled.rows]
        for first in (0, START, positions[0], positions[0] + 1, positions[150], positions[150] + 1, positions[-1]):
            for topic_filter in ("#", "f/+/+/t", "f/y/3/s", "g"):
                filled.check(topic_filter, first, limit=50)
        filled.check("#", positions[-1] + 1)
        filled.check("#", positions[150], positions[150])
        first = filled.last + 9
        readers = [Reader(filled, stream, "g", first) for stream in filled.slab.cover(TopicFilter("g"))]
        assert [[]] * len(readers) == [reader.read(filled.last) for reader in readers]
        filled.put(numbered(["g"], 20))
        filled.end_epoch()
        assert filled.wanted("g", first) == [row for reader in readers for row in reader.read(filled.last)]

    def test_a_deadline_that_is_past(self, filled: Stored) -> None:
        """A call whose deadline has passed still advances the reader's place, and no message is missed."""
        for topic_filter in FILTERS:
            filled.check(topic_filter, deadline=0.0)
            filled.check(topic_filter, deadline=time.monotonic() + 1_000, limit=30)

    def test_a_deadline_bounds_a_call(self, stored: Stored) -> None:
        """A call whose deadline has passed returns at most 65,536 rows, however many more it may return."""
        for count in (60_000, 6_000):
            stored.put([Message("same", b"", "same", timestamp=7)] * count)
        stored.end_epoch()
        every, limits = TopicFilter("#"), plenty(stored.last, deadline=0.0)
        for stream in stored.slab.cover(every):
            step = stored.slab.next(stream, every, stored.slab.begin(stream, every, 0), limits)
            assert len(step.batch) <= 65_536

    def test_readers_of_one_filter_take_turns(self, filled: Stored) -> None:
        """Interleaved readers of one filter, from any place and with any columns, each get all messages after it."""
        filled.end_epoch()
        positions = [position for position, _ in filled.rows]
        for compacted in (False, True):
            for text in ("#", "f/+/+/t"):
                first = (positions[200], 0, positions[90], positions[200] + 1)
                streams = filled.slab.cover(TopicFilter(text))
                readers = [[Reader(filled, stream, text, start) for stream in streams] for start in first]
                for limit in (3, 7, 20, 500):
                    for reader in (one for ones in readers for one in ones):
                        some = plenty(filled.last, limit=limit)
                        if not reader.exhausted:
                            for columns in ({"payloads"}, {"client_ids", "qos"}):
                                asked = attrs.evolve(some, columns=frozenset(columns))
                                filled.slab.next(reader.stream, reader.filter, reader.place, asked)
                            reader.step(filled.last, limit=limit)
                for ones, start in zip(readers, first, strict=True):
                    for reader in ones:
                        reader.read(filled.last)
                    rows = [row for one in ones for row in one.got]
                    assert filled.wanted(text, start) == sorted(rows, key=lambda row: row[0])
            if not compacted:
                filled.compact()

    def test_exhausted_is_not_said_too_early(self, filled: Stored) -> None:
        """An exhausted stream has no message between the place and the bound, and later messages are still read."""
        readers = filled.readers(FILTERS)
        for limit in (3, 1_000):
            for reader in readers:
                reader.read(filled.last, limit=limit)
            filled.put(numbered(TOPICS, 60), 3)
            filled.end_epoch()
        for reader in readers:
            reader.read(filled.last)
        filled.check_read(readers)

    def test_bounds_that_grow_step_by_step(self, stored: Stored) -> None:
        """A stream that is read up to the visible end after each batch yields each message once and in order."""
        readers: dict[int, Reader] = {}
        for number in range(30):
            stored.put(numbered(TOPICS, 20), 1 + 300 * (number % 3))
            for info in stored.slab.streams(TopicFilter("f/#")):
                reader = readers.setdefault(info.stream, Reader(stored, info.stream, "f/#"))
                reader.read(stored.slab.visible(info.stream, stored.last), limit=7)
        stored.end_epoch()
        for reader in readers.values():
            reader.read(stored.last)
        stored.check_read(list(readers.values()))

    # --- order ---

    def test_a_publishers_messages_keep_their_order(self, filled: Stored) -> None:
        """One publisher's messages of one topic are read in the order stored, for any filter and limits."""
        filled.end_epoch()
        for topic_filter in FILTERS:
            for limit in (5, 1_000):
                last: dict[tuple[str, str], int] = {}
                for stream in filled.slab.cover(TopicFilter(topic_filter)):
                    for position, message in Reader(filled, stream, topic_filter).read(filled.last, limit=limit):
                        of = message.client_id, message.topic
                        assert last.get(of, -1) < position
                        last[of] = position

    @requires("position_order")
    def test_a_stream_is_in_order_of_positions(self, filled: Stored) -> None:
        """With ``position_order`` streams are read in order of position, and all committed messages are visible."""
        assert filled.slab.epoch == 1
        filled.compact()
        filled.put(numbered(TOPICS, 120))
        for topic_filter in FILTERS:
            for stream in filled.slab.cover(TopicFilter(topic_filter)):
                assert filled.last == filled.slab.visible(stream, filled.last)
                positions = [row[0] for row in Reader(filled, stream, topic_filter).read(filled.last, limit=31)]
                assert sorted(positions) == positions

    def test_what_is_visible_never_changes(self, filled: Stored) -> None:
        """No position above the watermark is visible, and all epochs that ended below it are."""
        epoch = filled.slab.epoch
        assert epoch >= 1
        assert epoch & (epoch - 1) == 0
        for info in filled.slab.streams(TopicFilter("#")):
            for watermark in (START, START + 5, START + 5 * epoch - 1, START + 5 * epoch, filled.last):
                visible = filled.slab.visible(info.stream, watermark)
                assert (watermark + 1) // epoch * epoch - 1 <= visible <= watermark

    # --- streams ---

    def test_streams_share_the_messages(self, filled: Stored) -> None:
        """Each matching message is in exactly one of the listed streams, and in one of those that cover the filter."""
        for topic_filter in FILTERS:
            got = [row for rows in filled.streams_of(topic_filter).values() for row in rows]
            assert filled.wanted(topic_filter) == sorted(got, key=lambda row: row[0])
            filled.check(topic_filter)

    def test_cover_with_a_start_leaves_nothing_out(self, filled: Stored) -> None:
        """`Slab.cover` may omit streams that end before the start, but no message from the start on is missed."""
        filled.put([*numbered(["f/x/2/s", "f/x/3/t", "f/y/2/t", "f/y/3/s"], 4), Message("late/1", b"", "c")], 1_000)
        filled.reopen()
        filled.put([Message("late/2", b"", "c"), *numbered(TOPICS[:2], 3)], 1_000)
        for first, _ in filled.rows[360:364]:
            filled.check("f/#", first)
        for _ in range(2):
            for first in (filled.rows[100][0], filled.rows[-5][0], filled.rows[-1][0], filled.last + 9):
                for topic_filter in ("late/#", *FILTERS):
                    filled.check(topic_filter, first)
            filled.put([Message("late/1", b"", "c"), *numbered(TOPICS, 9)], 1_000)

    def test_a_streams_pattern_matches_its_topics(self, filled: Stored) -> None:
        """All topics of a stream match its pattern, in which ``$+`` is any first level that begins with ``$``."""
        for topic_filter in filled.everything():
            patterns = {info.stream: info.pattern for info in filled.slab.streams(TopicFilter(topic_filter))}
            for stream, rows in filled.streams_of(topic_filter).items():
                for topic in {message.topic for _, message in rows}:
                    assert matches_pattern(patterns[stream], topic), (patterns[stream], topic)

    def test_counters_count_rows(self, filled: Stored) -> None:
        """The counters report the number of messages returned, and positive numbers of seeks and visited entries."""
        filled.reopen()
        before = filled.slab.counters.rows
        filled.check("f/#")
        counters = filled.slab.counters
        assert len(filled.wanted("f/#")) == counters.rows - before
        assert counters.seeks > 0
        assert counters.visited > 0

    def test_info_counts_streams(self, filled: Stored) -> None:
        """`Slab.info` reports the number of streams."""
        numbers = {i.stream for t in filled.everything() for i in filled.slab.streams(TopicFilter(t))}
        assert len(numbers) == filled.slab.info().streams
