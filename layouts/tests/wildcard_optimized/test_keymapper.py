"""Tests of bit-field keys against brute force: round trips, order, and the next key that a filter accepts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from topicstore_layouts.wildcard_optimized.keymapper import KeyFilter, KeyMapper, Source


@st.composite
def mappers(draw: st.DrawFn, most_bits: int = 11, most_size: int = 4) -> KeyMapper:
    """Return a mapper whose dimensions are divided into sources of random sizes, in random order."""
    parts_of_one = st.lists(st.integers(1, most_size), min_size=1, max_size=3).filter(lambda parts: sum(parts) <= 64)
    sizes = draw(st.lists(parts_of_one, min_size=1, max_size=3))
    queues, total = [], 0
    for dimension, parts in enumerate(sizes):
        total += sum(parts)
        offset, sources = sum(parts), []
        for size in parts:
            offset -= size
            sources.append(Source(dimension, offset, size))
        queues.append(sources)
    if total > most_bits:
        queues = [[Source(0, 0, most_size)]]
    order = draw(st.permutations([dimension for dimension, sources in enumerate(queues) for _ in sources]))
    return KeyMapper([queues[dimension].pop(0) for dimension in order])


def spaces(mapper: KeyMapper) -> list[int]:
    """Return the number of values of each dimension."""
    bits = [0] * mapper.dimensions
    for source in mapper.sources:
        bits[source.dimension] = max(bits[source.dimension], source.offset + source.size)
    return [1 << size for size in bits]


def vectors(mapper: KeyMapper) -> st.SearchStrategy[list[int]]:
    return st.tuples(*(st.integers(0, space - 1) for space in spaces(mapper))).map(list)


def all_keys(mapper: KeyMapper) -> range:
    """Return every key as a number; the padding bits at the end are zero."""
    return range(0, 1 << mapper.bits, 1 << mapper.shifts[-1])


@st.composite
def filtered(draw: st.DrawFn) -> tuple[KeyMapper, list[tuple[int, int]]]:
    """Return a mapper and a span for each of its sources: one value, all values, or some."""
    mapper = draw(mappers())
    spans = []
    for source in mapper.sources:
        lowest = draw(st.integers(0, source.full))
        spans.append(draw(st.sampled_from([(0, source.full), (lowest, lowest), (lowest, source.full)])))
        if draw(st.booleans()):
            spans[-1] = lowest, draw(st.integers(lowest, source.full))
    return mapper, spans


def let_through(mapper: KeyMapper, spans: list[tuple[int, int]]) -> list[int]:
    """Return, by brute force, the keys whose fields all lie within the given spans."""
    found = []
    for key in all_keys(mapper):
        fields = [key >> shift & source.full for source, shift in zip(mapper.sources, mapper.shifts, strict=True)]
        if all(lowest <= field <= highest for field, (lowest, highest) in zip(fields, spans, strict=True)):
            found.append(key)
    return found


# --- keys ---------------------------------------------------------------------------


@given(st.data())
def test_there_and_back(data: st.DataObject) -> None:
    """A vector is encoded to a key of whole bytes, which decodes to the same vector."""
    mapper = data.draw(mappers())
    vector = data.draw(vectors(mapper))
    key = mapper.encode(vector)
    assert vector == mapper.decode(key)
    assert key in all_keys(mapper)
    assert mapper.bits == 8 * mapper.width
    assert mapper.width == len(key.to_bytes(mapper.width, "big"))


@given(st.data())
def test_keys_are_ordered_by_their_sources(data: st.DataObject) -> None:
    """Keys are ordered by their sources, of which the first is the most significant."""
    mapper = data.draw(mappers())
    one, other = data.draw(vectors(mapper)), data.draw(vectors(mapper))

    def fields(vector: list[int]) -> list[int]:
        return [source.of(vector[source.dimension]) for source in mapper.sources]

    assert (fields(one) < fields(other)) == (mapper.encode(one) < mapper.encode(other))


@given(st.data())
def test_many_at_once(data: st.DataObject) -> None:
    """Packing and unpacking whole columns gives the same results as one vector at a time."""
    mapper = data.draw(mappers(most_bits=576, most_size=64))
    rows = data.draw(st.lists(vectors(mapper), min_size=1, max_size=5))
    columns = np.array(rows, dtype=np.uint64).T
    packed = mapper.pack(list(columns))
    assert [mapper.encode(row).to_bytes(mapper.width, "big") for row in rows] == [row.tobytes() for row in packed]
    for dimension in range(mapper.dimensions):
        assert columns[dimension].tolist() == mapper.unpack(packed, dimension).tolist()


def test_bits_that_no_source_holds_are_lost() -> None:
    """A key holds only the bits of its sources, padded to whole bytes."""
    mapper = KeyMapper([Source(1, 4, 4), Source(0, 0, 3)])
    assert (1, 2, 8) == (mapper.width, mapper.dimensions, mapper.bits)
    assert 0b1010_101_0 == mapper.encode([0b101, 0b1010_1111])
    assert [0b101, 0b1010_0000] == mapper.decode(0b1010_101_0)


# --- filters ------------------------------------------------------------------------


@given(filtered())
def test_ratchet_finds_the_next_key(case: tuple[KeyMapper, list[tuple[int, int]]]) -> None:
    """`ratchet` returns the lowest accepted key that is at least the given number, and None if there is none."""
    mapper, spans = case
    good, through = let_through(mapper, spans), KeyFilter(mapper, spans)
    expected: int | None = None
    remaining = good.copy()
    for number in range((1 << mapper.bits) - 1, -1, -1):
        if remaining and remaining[-1] == number:
            expected = remaining.pop()
        assert expected == through.ratchet(number)
    assert through.ratchet(1 << mapper.bits) is None


@given(filtered(), st.binary(max_size=3))
def test_mask_and_spans_say_the_same(case: tuple[KeyMapper, list[tuple[int, int]]], front: bytes) -> None:
    """`select` accepts exactly the keys within the spans, even with additional bytes before each key."""
    mapper, spans = case
    good, through = set(let_through(mapper, spans)), KeyFilter(mapper, spans)
    keys = list(all_keys(mapper))
    stored = [front + key.to_bytes(mapper.width, "big") for key in keys]
    assert [at for at, key in enumerate(keys) if key in good] == list(through.select(stored))
    assert through.free == (len(good) == len(keys))


@given(st.data())
def test_a_filter_of_ranges(data: st.DataObject) -> None:
    """A filter accepts every vector within its ranges, and no other vector if each range consists of aligned blocks.

    If a filter accepts every key, its attribute `free` is true, so that no key need be checked.
    """
    mapper = data.draw(mappers())
    ranges = [sorted(data.draw(st.tuples(*[st.integers(0, space - 1)] * 2))) for space in spaces(mapper)]
    through = mapper.filter([(lowest, highest) for lowest, highest in ranges])
    within = {key for key in all_keys(mapper) if is_within(mapper.decode(key), ranges)}
    found = {key for key in all_keys(mapper) if through.ratchet(key) == key}
    assert within <= found
    assert through.free == (len(found) == len(all_keys(mapper)))
    if all(map(aligned, range(mapper.dimensions), ranges, [mapper] * mapper.dimensions)):
        assert within == found


def is_within(vector: list[int], ranges: list[list[int]]) -> bool:
    return all(lowest <= value <= highest for value, (lowest, highest) in zip(vector, ranges, strict=True))


def aligned(dimension: int, limits: list[int], mapper: KeyMapper) -> bool:
    """Return whether a range consists of aligned blocks.

    After the first source in which its ends differ, all later sources of the dimension must cover all of their values.
    """
    lowest, highest = limits
    differ = False
    for source in mapper.sources:
        if source.dimension == dimension:
            if differ and (source.of(lowest), source.of(highest)) != (0, source.full):
                return False
            differ = differ or source.of(lowest) != source.of(highest)
    return True
