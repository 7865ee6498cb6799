"""Tests of skipstream: the messages that the index finds, the cost of reads, and verification of the index."""

from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message, TopicFilter
from topicstore.contract.engine import KEYS, KEYSPACES, Engine, WriteBatch
from topicstore.contract.layout import ReadCounters, Slab
from topicstore.contract.positions import Positions
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance import LayoutSubject
from topicstore_conformance.layout.fixtures import GENERATION, START, Reader, Stored
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.skipstream.entries import Entries
from topicstore_layouts.skipstream.keys import entry_keys, message_keys
from topicstore_layouts.skipstream.layout import SkipstreamLayout, SkipstreamOptions
from topicstore_layouts.skipstream.postings import Postings, intersect
from topicstore_layouts.skipstream.slab import SkipstreamSlab

CHUNK = 128
"""The number of pairs in a chunk of the memory backend."""


@attrs.frozen
class Limited(SkipstreamLayout):
    """A skipstream layout with hashes of few bits and a small trie."""

    options: SkipstreamOptions
    hash_bits: int
    capacity: int

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        trie = LearnedTopics.load(engine, generation, self.options.thresholds, self.capacity)
        return SkipstreamSlab(engine, shard, generation, trie, self.hash_bits)


def made(*thresholds: int, hash_bits: int = 64, capacity: int = 1_000) -> Stored:
    """Return an empty slab over an engine in memory."""
    layout = Limited(SkipstreamOptions(thresholds=thresholds or (3, 2)), hash_bits, capacity)
    stored = Stored(LayoutSubject(make=lambda: layout, capabilities={"position_order"}), MemoryEngine(KEYSPACES))
    stored.create()
    return stored


def trie_of(stored: Stored) -> LearnedTopics:
    assert isinstance(stored.slab, SkipstreamSlab)
    return stored.slab.trie


def cost(stored: Stored, text: str) -> ReadCounters:
    """Compare a replay with the expected rows, and return the counters of its cost."""
    stored.slab.counters = ReadCounters()
    stored.check(text)
    return stored.slab.counters


def pairs(stored: Stored, kind: int) -> list[tuple[bytes, bytes]]:
    """Return the stored pairs of messages (1) or of index entries (2)."""
    return [(key, value) for _, key, value in stored.pairs((KEYS,)) if isinstance(key, bytes) and key[4] == kind]


def message(topic: str, number: int = 0) -> Message:
    return Message(topic, b"%d " % number * 3, "c", 1)


# --- messages that the index finds ---


def test_limits_of_bytes() -> None:
    """A read ends with the message whose value reaches the limit in bytes."""
    stored = made(0)
    stored.put([message("ab"[n % 2]) for n in range(10)])
    size = len(pairs(stored, 1)[0][1])
    for text, limit_bytes, expected in (("#", size + 1, [2] * 5), ("a", 1, [1] * 5 + [0])):
        reader = Reader(stored, 1, text)
        reader.read(stored.last, limit_bytes=limit_bytes)
        assert expected == reader.calls[:-1]


def test_a_deadline_ends_a_long_search() -> None:
    """A read that has found nothing at its deadline ends, and the next one continues after the examined messages."""
    stored = made(0, hash_bits=1)
    stored.put([message(f"{n}") for n in range(2_000)])
    entries, reader = Entries(trie_of(stored), 1), Reader(stored, 1, "1999")
    shared = sum(entries.of(1, str(n)) == entries.wanted(1, TopicFilter("1999")) for n in range(2_000))
    assert stored.rows[-1:] == reader.read(stored.last, deadline=0.0)
    assert 1 < len(reader.calls) < shared


def test_a_stream_that_the_filter_does_not_touch() -> None:
    """A read returns nothing from a stream that has no topic that matches the filter."""
    stored = made()
    stored.put([message("a/b"), message("c/d")])
    for text in ("a/b/c", "c/+", "+", "c/b", "$SYS/#"):
        assert [] == Reader(stored, 1, text).read(stored.last)


# --- cost of reads ---


def test_a_narrow_filter_reads_what_it_returns() -> None:
    """A filter for one vehicle among many reads little more than the messages that match."""
    stored = made(1, 0)
    stored.put([message(f"t/{n % 3}/{n}/x") for n in range(6_000)] + [message("t/1/4000/x"), message("t/2/4000/x")])
    for text, rows in (("t/+/4000/x", 3), ("t/1/4000/x", 2), ("t/+/4000/#", 3)):
        found = cost(stored, text)
        assert rows == found.rows
        assert found.visited < 5 * CHUNK
        assert found.seeks <= 5


def test_entries_rule_out_messages() -> None:
    """If few messages match both of two levels, a read skips messages that match only one of them."""
    stored = made(0)
    stored.put([message(f"{'a' if n % 2 else 'b'}/{'a' if n % 4 < 2 else 'c'}/{n % 64}") for n in range(4_096)])
    found = cost(stored, "a/a/1")
    assert 64 == found.rows
    assert found.visited < 600
    stored = made(0)
    stored.put([message("a/x" if n % 3 else "b/y") for n in range(4_000)] + [message("a/y")])
    found = cost(stored, "a/y")
    assert 1 == found.rows
    assert found.skipped > 1_000


def test_lists_that_do_not_overlap() -> None:
    """A read seeks past the parts of index lists that have no common positions."""
    stored = made(0)
    stored.put([message("a/x")] * 10_000)
    stored.put([message("b/y")] * 10_000)
    stored.put([message("a/y")] * 3)
    found = cost(stored, "a/y")
    assert 3 == found.rows
    assert found.visited < 3 * CHUNK


def test_dense_matches_are_read_in_passing() -> None:
    """A read whose filter matches half of a stream scans the stream instead of fetching each message by key."""
    stored = made(0)
    stored.put([message(f"{n % 2}/{n}") for n in range(8_000)])
    found = cost(stored, "1/+")
    assert 4_000 == found.rows
    assert found.visited > 11_000  # the number of visited entries includes index entries


def test_levels_below_the_last_learned() -> None:
    """Below a `#`, the first eight levels have index entries; topics that differ only in later levels are compared."""
    stored = made(capacity=0)
    deep = "/".join("abcdefgh")
    stored.put([message(f"{n}/{deep}"[: 2 * n]) for n in range(3, 9)])
    stored.put([message(f"{deep}/{n}") for n in range(500)])
    assert {"#"} == {info.pattern for info in stored.slab.streams(TopicFilter("#"))}
    found = cost(stored, f"3/{deep}"[:6])
    assert 1 == found.rows <= found.visited < 30
    assert 1 == cost(stored, f"{deep}/77").rows
    assert sum(min(8, 1 + row.topic.count("/")) for _, row in stored.rows) == len(pairs(stored, 2))
    assert (len(stored.rows), []) == stored.verify()


# --- lists of the index ---


@st.composite
def _lists(draw: st.DrawFn) -> list[list[int]]:
    """Two or three lists of positions in clusters that may overlap."""
    count = draw(st.integers(2, 3))
    clusters = st.tuples(st.integers(0, 3_000), st.integers(1, 300), st.integers(1, 7))
    lists = []
    for _ in range(count):
        spans = draw(st.lists(clusters, min_size=1, max_size=4))
        lists.append(sorted({first + n * gap for first, rows, gap in spans for n in range(rows)}))
    return lists


@given(_lists(), st.integers(0, 4_000), st.integers(0, 6_000))
def test_common_positions(lists: list[list[int]], first: int, bound: int) -> None:
    """Every common position is yielded once and in order as a candidate, and each candidate is in a list."""
    engine, keys, write = MemoryEngine(KEYSPACES), entry_keys(GENERATION), WriteBatch()
    for number, positions in enumerate(lists):
        for key in keys.many(number, np.array(positions, dtype=np.uint64)):
            write.put(KEYS, key, b"")
    engine.write(write)
    counters = ReadCounters()
    postings = [Postings(engine, keys, number, bound, counters) for number in range(len(lists))]
    candidates: list[int] = []
    for found in intersect(postings, first, bound, counters):
        assert all(found.first <= at <= found.last <= bound for at in found.positions.tolist())
        assert not candidates or candidates[-1] < found.first
        candidates += found.positions.tolist()
    shared = set.intersection(*map(set, lists))
    assert {at for at in shared if first <= at <= bound} <= set(candidates)
    assert set(candidates) <= {at for positions in lists for at in positions if first <= at <= bound}
    assert sorted(set(candidates)) == candidates


@given(
    st.integers(1, 2**32 - 2),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=9),
)
def test_keys(generation: int, parts: list[tuple[int, int]]) -> None:
    """Encoding keys one by one or many at once is the same; keys sort like their numbers and decode to them."""
    numbers, positions = (np.array(column, dtype=np.uint64) for column in zip(*parts, strict=True))
    for keys in (message_keys(generation), entry_keys(generation)):
        made = keys.many(numbers, positions)
        assert made == [keys.one(*part) for part in parts]
        assert [parts[n] for n in np.lexsort((positions, numbers))] == [parts[made.index(key)] for key in sorted(made)]
        assert positions.tolist() == _positions(keys.positions(made))
        assert numbers.tolist() == keys.numbers(made).tolist()
        start, end = keys.all()
        assert all(start <= key < end for key in made)
        for (number, position), key in zip(parts, made, strict=True):
            start, end = keys.span(number, position, position)
            assert [key] == sorted({key for key in made if start <= key < end})


def _positions(positions: Positions) -> list[int]:
    listed: list[int] = positions.tolist()
    return listed


# --- damage ---


def test_a_message_that_lies_in_another_stream() -> None:
    """Verification reports a message that is stored under another stream than its topic's."""
    stored = made(9)
    stored.put([message("a"), message("b")])
    (key, value), _ = pairs(stored, 1)
    stored.replace(KEYS, message_keys(GENERATION).one(2, START + 1), value)
    stored.replace(KEYS, key, None)
    good, (damage,) = stored.verify()
    assert 1 == good
    assert f"message at position {START + 1}" in damage.place
    assert "'a'" in damage.reason


@pytest.mark.parametrize("damaged", [1, 500])
def test_missing_entries(damaged: int) -> None:
    """Verification reports messages whose index entries are missing; of very many it reports at least some."""
    stored = made(0)
    stored.put([message(f"{n % 7}/{n}") for n in range(1_000)])
    gone = random.Random(3).sample(pairs(stored, 2), damaged)
    for key, _ in gone:
        stored.replace(KEYS, key, None)
    good, damages = stored.verify()
    assert 1_000 == good
    at = {int.from_bytes(key[-8:], "big") for key, _ in gone}
    *named, rest = damages if damaged > 1 else [*damages, None]
    assert {int(damage.place.rpartition(" ")[2]) for damage in named} <= at
    assert all("missing" in damage.reason for damage in named)
    assert len(named) == damaged if damaged == 1 else (len(named) >= 60 and rest is not None and "more" in rest.reason)


def test_dangling_entries() -> None:
    """Verification up to a position reports the index entries without a message up to this position."""
    stored = made(0)
    stored.put([message(f"{n}") for n in range(100)])
    entries = entry_keys(GENERATION)
    stored.replace(KEYS, entries.one(7, START + 50), b"")
    stored.replace(KEYS, entries.one(8, stored.last + 1), b"")
    good, (damage,) = stored.verify()
    assert 100 == good
    assert damage.place.endswith(f"index entry 0000000000000007 at position {START + 50}")
    assert (49, []) == stored.verify(START + 49)
    stored.check("50")


def test_verification_sees_one_moment() -> None:
    """Verification reads one snapshot, which concurrent stores and deletes don't change."""
    stored = made(0)
    stored.put([message(f"{n}") for n in range(6_000)])
    rows, found = len(stored.rows), stored.slab.verify(stored.last)
    seen = [next(found)]
    stored.delete("#", START + 3_000, stored.last)
    stored.put([message("new")])
    seen += list(found)
    assert all(isinstance(n, int) for n in seen)
    assert rows == sum(n for n in seen if isinstance(n, int))
