"""Tests of wildcard_optimized: its keys, the cost of reads, the places of readers, and verification."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore import TopicFilter
from topicstore.contract.engine import KEYS, KEYSPACES
from topicstore.contract.errors import InvalidOptionError
from topicstore.contract.options import make_options
from topicstore.contract.positions import COUNTER_BITS
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance import LayoutSubject
from topicstore_conformance.layout.fixtures import GENERATION, START, Reader, Stored, numbered, plenty
from topicstore_layouts.wildcard_optimized import slab as slab_module
from topicstore_layouts.wildcard_optimized import streams as streams_module
from topicstore_layouts.wildcard_optimized.layout import WildcardOptimizedLayout, WildcardOptimizedOptions
from topicstore_layouts.wildcard_optimized.place import MOST_STEPS, Epochs, Place, Span
from topicstore_layouts.wildcard_optimized.slab import WildcardSlab

EPOCH = 1 << COUNTER_BITS
TOPICS = [f"f/{place}/{device}/{what}" for place in ("x", "y", "z") for device in range(9) for what in ("s", "t", "u")]


def made(**options: Any) -> Stored:
    """Return an empty slab, by default with epochs of 2,048 positions and levels that vary from the second topic on."""
    layout = WildcardOptimizedLayout(WildcardOptimizedOptions(**{"epoch_bits": 0, "thresholds": (1,), **options}))
    stored = Stored(LayoutSubject(make=lambda: layout), MemoryEngine(KEYSPACES))
    stored.create()
    return stored


@pytest.fixture
def filled() -> Stored:
    """A slab with eleven epochs of 81 topics, of which some hashes collide."""
    stored = made(bits_per_topic_level=7)
    for _ in range(5):
        stored.put(numbered(TOPICS, 500), 9)
    return stored


def slab_of(stored: Stored) -> WildcardSlab:
    assert isinstance(stored.slab, WildcardSlab)
    return stored.slab


def stream_of(stored: Stored, topic: str) -> int:
    (stream,) = stored.slab.cover(TopicFilter(topic))
    return stream


def keys(stored: Stored) -> list[bytes]:
    return [key for _, key, _ in stored.pairs((KEYS,)) if isinstance(key, bytes)]


# --- keys ---------------------------------------------------------------------------


def test_few_streams_and_short_keys() -> None:
    """A slab has the streams of the learned structure, and a key has a hash for each level that varies."""
    stored = made(bits_per_topic_level=7, topic_index_bytes=2)
    stored.put(numbered(["a", "b", "c", "d/x", "e/x", "e/y", "e/z"], 70))
    assert ["+", "+/+", "+/x", "a"] == sorted(info.pattern for info in stored.slab.streams(TopicFilter("#")))
    widths = {"a": 4 + 2 + 8, "b": 4 + 2 + 9, "e/y": 4 + 2 + 10}
    sizes = {pattern: stream_of(stored, pattern) for pattern in widths}
    for topic, stream in sizes.items():
        assert {widths[topic]} == {len(key) for key in keys(stored) if key[4:6] == stream.to_bytes(2, "big")}
    assert (70, []) == stored.verify()


def test_one_key_is_known() -> None:
    """The bit fields of a key are at the offsets of the documented stored form."""
    stored = made(bits_per_topic_level=8, topic_index_bytes=1, epoch_bits=4)
    stored.put(numbered(["a", "b"], 2))
    position = START + 2
    fields = (GENERATION, 32), (2, 8), (position >> 15, 49), (0x57, 8), (position & 0x7FFF, 15)
    bits = "".join(f"{value:0{width}b}" for value, width in fields)
    assert int(bits, 2).to_bytes(14, "big") == keys(stored)[-1]


def test_ten_levels_have_bits() -> None:
    """Only ten varying levels have hashes in the keys; topics that differ in other levels are compared as strings."""
    stored = made(thresholds=(0,))
    deep = ["/".join([level] * 40) for level in "ab"]
    wide = ["/".join([*"123456789", level, other]) for level in "ab" for other in "xy"]
    stored.put(numbered([*deep, *wide], 600), 7)
    assert {4 + 4 + 8 + 80} == {len(key) for key in keys(stored)}
    for topic_filter in ["#", *deep, *wide, "a/#", "+/+/+/+/+/+/+/+/+/+/x", "+/+/+/+/+/+/+/+/+/a/#"]:
        stored.check(topic_filter)
    assert (600, []) == stored.verify()


def test_streams_without_an_index_share_the_last() -> None:
    """When the stream numbers of the keys run out, all further streams share the last one and lose nothing."""
    stored = made(topic_index_bytes=1, thresholds=(1000, 2))
    topics = [f"t{number}/{level}" for number in range(100) for level in "abcd"]
    stored.put(numbered(topics, 900), 5)
    stored.put(numbered(["$SYS/a"], 3))
    assert 255 == stored.slab.info().streams
    assert 100 * 3 + 1 == len(slab_of(stored).trie)
    for again in range(2):
        for topic_filter in ["#", "+/a", "t99/#", "t99/c", "t2/d", "$SYS/#", "t99/no"]:
            stored.check(topic_filter)
        assert "$SYS/a" not in {message.topic for _, message in Reader(stored, 255, "#").read(stored.last)}
        assert {"#"} == {i.pattern for i in stored.slab.streams(TopicFilter("#")) if i.stream == 255}
        assert (903 + again * 50, []) == stored.verify()
        stored.reopen()
        if not again:
            stored.put(numbered(topics[::-1], 50), 100)
    stored.delete("t99/#")
    stored.check()
    with pytest.raises(KeyError):
        stored.slab.begin(256, TopicFilter("#"), 0)


# --- cost of reads -----------------------------------------------------------------


def test_a_filter_leaps() -> None:
    """A read with a narrow filter seeks from one matching key to the next, and examines few keys in between."""
    stored = made(epoch_bits=10, thresholds=(5, 2))
    for _ in range(4):
        stored.put(numbered([f"t/{device}/{what}" for device in range(1_000) for what in range(4)], 4_000), 500)
    epochs = 16_000 * 500 // stored.slab.epoch + 1
    stored.reopen()
    stored.check("t/700/+")
    counters = stored.slab.counters
    assert 16 == counters.rows
    assert counters.seeks <= 10 + 3 * 2 * epochs
    assert 16 == counters.visited
    assert 0 < counters.skipped <= 128 * counters.seeks
    assert counters.skipped < 16_000 / 3


def test_a_reader_of_everything_walks() -> None:
    """A read of all messages needs one scan for each call, and skips no key."""
    stored = made()
    stored.put(numbered(TOPICS, 4_000), 3)
    stored.reopen()
    stored.check()
    counters, calls = stored.slab.counters, 2 * len(stored.slab.cover(TopicFilter("#")))
    assert (4_000, 4_000, 0) == (counters.rows, counters.visited, counters.skipped)
    assert counters.seeks <= 2 * calls


def test_a_late_start_seeks() -> None:
    """A read whose start is late in the slab examines no keys of earlier epochs."""
    stored = made()
    stored.put(numbered(TOPICS, 5_000), 20)
    stored.reopen()
    stored.check("f/+/+/t", stored.last - 3 * EPOCH)
    assert stored.slab.counters.visited + stored.slab.counters.skipped < 1_000


def test_limits_of_bytes(filled: Stored) -> None:
    """A read ends with the message that reaches the limit of bytes."""
    filled.put(numbered(["big"], 20, size=1_000))
    filled.end_epoch()
    for limit_bytes, expected in ((1, [1] * 20), (2_500, [3] * 6 + [2])):
        reader = Reader(filled, stream_of(filled, "big"), "big")
        reader.read(filled.last, limit_bytes=limit_bytes)
        assert expected == [count for count in reader.calls if count]


def test_a_step_of_a_delete_is_bounded(filled: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a delete examines a bounded number of keys, even if none matches."""
    monkeypatch.setattr(slab_module, "_LOOKED_AT", 40)
    looked_at, total = [], 0
    for step in filled.slab.delete(TopicFilter("f/+/4/+"), 0, filled.last):
        counters = filled.slab.counters
        looked_at.append(counters.visited + counters.skipped - total)
        total = counters.visited + counters.skipped
        assert step.messages == len(step.write.operations) <= 40
    assert max(looked_at) <= 40 + 128
    assert len(looked_at) >= total // 168


def test_more_topics_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full cache of topics is emptied; a batch may have more topics than the cache holds."""
    monkeypatch.setattr(streams_module, "_CACHED", 10)
    stored = made()
    remembered = []
    for first, count in ((0, 5), (3, 7), (8, 4), (0, 30), (40, 1)):
        stored.put(numbered([f"t/{number}" for number in range(first, first + count)], 40))
        remembered.append(len(slab_of(stored)._streams._topics))
    assert [5, 10, 4, 30, 1] == remembered
    stored.check()
    assert (200, []) == stored.verify()


# --- places -------------------------------------------------------------------------


def test_places_that_are_none(filled: Stored) -> None:
    """Bytes that aren't a place, and the place of another stream, raise `ValueError`."""
    slab, topic_filter = filled.slab, TopicFilter("f/+/+/+")
    narrow, wide = stream_of(filled, TOPICS[0]), stream_of(filled, TOPICS[-1])
    place = slab.begin(wide, topic_filter, START + 77)
    step = len(place) - 8
    for bad in (
        b"",
        place[:-1],
        place + b"\0",
        place[:7],
        place + place[8:],
        place[:8] + bytes(step),
        place[:8] + b"\xff" * step,
        place[:8] + b"".join(key.to_bytes(step - 2, "big") + bytes(2) for key in (1, 2)),
        slab.begin(narrow, topic_filter, START) + bytes(step),
    ):
        with pytest.raises(ValueError, match=r"bytes|steps"):
            slab.next(wide if bad[8:] != bytes(step) else narrow, topic_filter, bad, plenty(filled.last))


def test_what_is_visible() -> None:
    """The current epoch is hidden in streams in which a topic level varies, and visible in other streams."""
    stored = made()
    stored.put(numbered(["a", "b", "c"], 30))
    ordered, hashed = stream_of(stored, "a"), stream_of(stored, "b")
    assert EPOCH == stored.slab.epoch
    for watermark in (START, START + 5, START + EPOCH - 2):
        assert (watermark, START - 1) == tuple(stored.slab.visible(s, watermark) for s in (ordered, hashed))
    assert START + EPOCH - 1 == stored.slab.visible(hashed, START + EPOCH - 1)
    assert 1 << 31 == made(epoch_bits=20).slab.epoch


@given(st.data())
def test_a_staircase_is_what_was_read(data: st.DataObject) -> None:
    """After any sequence of bounds and interruptions, a place represents exactly the keys that were read."""
    epochs = Epochs(3, 5)  # two bits of hash before three bits of position
    keys = sorted((hashed << 3 | position, position) for hashed in range(4) for position in range(8))
    first = data.draw(st.integers(0, 7))
    place = Place.before(epochs, 7 << 3 | first)
    read = {(key, position) for key, position in keys if position < first}
    for bound in data.draw(st.lists(st.integers(0, 7), max_size=12)):
        place = Place.decode(epochs, place.encode())
        if place.epoch != 7:
            break
        rows = [row for span in place.spans(7 << 3 | bound) for row in keys if in_span(*row, span)]
        assert [(key, position) for key, position in keys if position <= bound and (key, position) not in read] == rows
        stop = data.draw(st.integers(0, len(rows)))
        read |= set(rows[:stop])
        place = place.moved((7 << 5) + rows[stop - 1][0] + 1, 7 << 3 | bound) if stop else place
        place = place.done(7 << 3 | bound) if stop == len(rows) else place
    else:
        left = [row for span in place.spans(7 << 3 | 7) for row in keys if in_span(*row, span)]
        assert sorted(set(keys) - read) == sorted(left)


def in_span(key: int, position: int, span: Span) -> bool:
    """Return whether a span contains a key and position, given relative to epoch 7."""
    return span.start <= 7 << 5 | key < span.end and (span.whole or span.first <= 7 << 3 | position <= span.last)


def test_too_many_lower_bounds_are_refused() -> None:
    """A place that would need more than the maximum number of steps raises an error; a higher bound works."""
    stored = made(thresholds=(0,))
    stored.put(numbered([f"t{number}" for number in range(200)], 1_000))
    reader = Reader(stored, 1, "#")
    for lower in range(MOST_STEPS):
        reader.step(stored.last - lower, limit=1)
    with pytest.raises(ValueError, match=f"{MOST_STEPS} ever lower bounds"):
        reader.step(stored.last - MOST_STEPS, limit=1)
    reader.read(stored.last)
    assert stored.wanted() == sorted(reader.got, key=lambda row: row[0])


# --- damage -------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["position", "hash", "stream", "unknown stream", "length", "padding"])
def test_verify_checks_keys(change: str) -> None:
    """Verification reports an intact value whose key doesn't match its topic and position."""
    stored = made(bits_per_topic_level=3)
    stored.put(numbered(["a", "b", "c/d", "c/e"], 100))
    key = next(key for key in keys(stored) if key[7] == stream_of(stored, "b"))
    value = stored.engine.get(KEYS, key)
    size = len(key)
    number = int.from_bytes(key, "big")
    changed = {
        "position": number ^ 1 << 6,
        "hash": number ^ 1 << 17,
        "stream": number ^ 3 << 8 * (size - 8),
        "unknown stream": number ^ 99 << 8 * (size - 8),
        "length": number << 8,
        "padding": number | 1,
    }[change]
    stored.replace(KEYS, key, None)
    stored.replace(KEYS, changed.to_bytes(size + (change == "length"), "big"), value)
    good, damages = stored.verify()
    assert (99, 1) == (good, len(damages))


# --- options ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("bits_per_topic_level", [1, 64], [0, 65, "x"]),
        ("epoch_bits", [0, 40], [-1, 41]),
        ("topic_index_bytes", [1, 8], [0, 9]),
        ("thresholds", [[0], [1, 2]], [[], [-1]]),
    ],
)
def test_options(name: str, good: list[Any], bad: list[Any]) -> None:
    """Options at their limits work, and values beyond the limits are refused."""
    for value in good:
        stored = made(**{name: value})
        stored.put(numbered(TOPICS, 200), 9)
        stored.check("f/+/+/t")
        stored.check("f/+/2/+", limit=10)
    for value in bad:
        with pytest.raises(InvalidOptionError):
            make_options("w", WildcardOptimizedOptions, {name: value})
