"""A slab of bit-field keys: whatever was stored and deleted, each message comes once, however it is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import Constant, to_list
from topicstore.contract.engine import KEYS, KEYSPACES, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, InvalidOptionError
from topicstore.contract.layout import Damage
from topicstore.contract.options import make_options
from topicstore.contract.positions import COUNTER_BITS
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.faults.threads import Beside
from topicstore_conformance.oracle import strategies
from topicstore_layouts.wildcard_optimized import slab as slab_module
from topicstore_layouts.wildcard_optimized import streams as streams_module
from topicstore_layouts.wildcard_optimized.layout import WildcardOptimizedLayout, WildcardOptimizedOptions
from topicstore_layouts.wildcard_optimized.place import MOST_STEPS, Epochs, Place, Span
from topicstore_layouts.wildcard_optimized.slab import WildcardSlab

SHARD, GENERATION = 4, 2
EPOCH = 1 << COUNTER_BITS
START = EPOCH << 40
PLENTY = {"limit": 100_000, "limit_bytes": 1 << 30, "deadline": None}

Row = tuple[int, Message]


def options(**changes: Any) -> WildcardOptimizedOptions:
    """Return options with epochs of 2,048 positions, and every level varying from its second topic on."""
    return WildcardOptimizedOptions(**{"epoch_bits": 0, "thresholds": (1,), **changes})


@attrs.define
class Store:
    """A slab over an engine, and every message that should be in it."""

    engine: Engine = attrs.field(factory=lambda: MemoryEngine(KEYSPACES))
    options: WildcardOptimizedOptions = attrs.field(factory=options)
    rows: list[Row] = attrs.field(factory=list)
    last: int = START
    slab: WildcardSlab = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        slab = WildcardOptimizedLayout(self.options).open(self.engine, SHARD, GENERATION)
        assert isinstance(slab, WildcardSlab)
        self.slab = slab

    def put(self, messages: Iterable[Message], *, gap: int = 1) -> None:
        """Store a batch; its positions go up by ``gap``."""
        batch = MessageBatch.from_messages(messages)
        positions = np.arange(1, len(batch) + 1, dtype=np.uint64) * np.uint64(gap) + np.uint64(self.last)
        placed = batch.placed(positions, Constant(self.last >> COUNTER_BITS, len(batch)), SHARD)
        write = WriteBatch()
        self.slab.store(placed, write)
        self.engine.write(write)
        self.slab.committed()
        self.last = int(positions[-1])
        self.rows += zip(positions.tolist(), placed.to_messages(), strict=True)

    def delete(self, topic_filter: str, first: int = 0, last: int | None = None) -> int:
        """Delete from the slab and from the list; return how many."""
        last, before, size = self.last if last is None else last, len(self.rows), self.size()
        deleted = 0
        for step in self.slab.delete(TopicFilter(topic_filter), first, last):
            self.engine.write(step.write)
            deleted += step.messages
            size -= step.freed
        assert size == self.size()
        matches = TopicFilter(topic_filter).matches
        self.rows = [(at, m) for at, m in self.rows if not (first <= at <= last and matches(m.topic))]
        assert before - len(self.rows) == deleted
        return deleted

    def wanted(self, topic_filter: str = "#", first: int = 0, bound: int | None = None) -> list[Row]:
        """Return what a reader should get, in order of positions."""
        matches, bound = TopicFilter(topic_filter).matches, self.last if bound is None else bound
        return [(at, message) for at, message in self.rows if first <= at <= bound and matches(message.topic)]

    def read(self, topic_filter: str = "#", first: int = 0, bound: int | None = None, **limits: Any) -> list[list[Row]]:
        """Return what a reader of each stream gets, a list a call."""
        bound, calls = self.last if bound is None else bound, []
        for stream in self.slab.cover(TopicFilter(topic_filter), first):
            reader = Reader(self, topic_filter, stream, first)
            while not reader.exhausted:
                calls.append(reader.next(bound, **limits))
        return calls

    def check(self, topic_filter: str = "#", first: int = 0, bound: int | None = None, **limits: Any) -> int:
        """Hold readers against the list; return how many calls it took."""
        calls = self.read(topic_filter, first, bound, **limits)
        found = [row for call in calls for row in call]
        assert self.wanted(topic_filter, first, bound) == sorted(found, key=lambda row: row[0])
        assert_in_order(found)
        assert all(len(call) <= limits.get("limit", PLENTY["limit"]) for call in calls)
        return len(calls)

    def size(self) -> int:
        """Return the bytes of all values."""
        return sum(len(value) for _, value in self.pairs())

    def pairs(self) -> list[tuple[bytes, bytes]]:
        return [pair for chunk in self.engine.scan(KEYS) for pair in chunk]

    def stream(self, topic: str) -> int:
        (stream,) = self.slab.cover(TopicFilter(topic))
        return stream

    def verified(self) -> tuple[int, list[Damage]]:
        found = list(self.slab.verify(self.last))
        return sum(n for n in found if isinstance(n, int)), [d for d in found if isinstance(d, Damage)]


class Reader:
    """Reads one stream from a place that it keeps as bytes."""

    def __init__(self, store: Store, topic_filter: str, stream: int, first: int = 0) -> None:
        self.store, self.stream, self.filter = store, stream, TopicFilter(topic_filter)
        self.place = store.slab.begin(stream, self.filter, first)
        self.exhausted = False

    def next(self, bound: int, **limits: Any) -> list[Row]:
        step = self.store.slab.next(self.stream, self.filter, self.place, bound=bound, **{**PLENTY, **limits})
        assert step.exhausted or step.place != self.place
        self.place, self.exhausted = step.place, step.exhausted
        return rows_of(step.batch)


def rows_of(batch: MessageBatch) -> list[Row]:
    if not len(batch):
        return []
    assert [SHARD] * len(batch) == to_list(batch.shards)
    return list(zip(to_list(batch.positions), batch.to_messages(), strict=True))


def assert_in_order(rows: Iterable[Row]) -> None:
    """See that each topic's messages come in order of positions."""
    last: dict[str, int] = {}
    for position, message in rows:
        assert last.get(message.topic, -1) < position
        last[message.topic] = position


def messages(topics: Sequence[str], rows: int, size: int = 4) -> list[Message]:
    """Return messages whose topics take turns, each with another payload."""
    return [
        Message(topics[n % len(topics)], n.to_bytes(size, "big"), f"c{n % 3}", n % 3, n % 2 == 0) for n in range(rows)
    ]


TOPICS = [f"f/{place}/{device}/{what}" for place in ("x", "y", "z") for device in range(9) for what in ("s", "t", "u")]
FILTERS = ["#", "f/#", "f/+/+/t", "f/y/#", "f/+/4/+", "f/z/7/s", "f/no/+/s", "f/z", "+/+/+/+", "f/+/+/+/more", "g/#"]


@pytest.fixture(
    params=[pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(64, marks=pytest.mark.slow)], ids="{} bits".format
)
def filled(request: pytest.FixtureRequest) -> Store:
    """Eleven epochs of 81 topics, with hashes that always, sometimes, and never collide."""
    store = Store(options=options(bits_per_topic_level=request.param))
    for _ in range(5):
        store.put(messages(TOPICS, 500), gap=9)
    return store


# --- keys ---------------------------------------------------------------------------


def test_few_streams_and_short_keys() -> None:
    """The learned structure makes the streams; a key has a hash for each varying level, in whole bytes."""
    store = Store(options=options(bits_per_topic_level=7, topic_index_bytes=2))
    store.put(messages(["a", "b", "c", "d/x", "e/x", "e/y", "e/z"], 70))
    assert ["+", "+/+", "+/x", "a"] == sorted(info.pattern for info in store.slab.streams(TopicFilter("#")))
    widths = {"a": 4 + 2 + 8, "b": 4 + 2 + 9, "e/y": 4 + 2 + 10}
    sizes = {pattern: store.stream(pattern) for pattern in widths}
    for topic, stream in sizes.items():
        keys = {len(key) for key, _ in store.pairs() if key[4:6] == stream.to_bytes(2, "big")}
        assert {widths[topic]} == keys
    assert (70, []) == store.verified()


def test_one_key_is_known() -> None:
    """The fields are where the stored form says."""
    store = Store(options=options(bits_per_topic_level=8, topic_index_bytes=1, epoch_bits=4))
    store.put(messages(["a", "b"], 2))
    position = START + 2
    fields = (GENERATION, 32), (2, 8), (position >> 15, 49), (0x57, 8), (position & 0x7FFF, 15)
    bits = "".join(f"{value:0{width}b}" for value, width in fields)
    assert int(bits, 2).to_bytes(14, "big") == store.pairs()[-1][0]


def test_ten_levels_have_bits() -> None:
    """Further ones, and what lies beyond the levels that are learned, are told apart by the topic."""
    store = Store(options=options(thresholds=(0,)))
    deep = ["/".join([level] * 40) for level in "ab"]
    wide = ["/".join([*"123456789", level, other]) for level in "ab" for other in "xy"]
    store.put(messages([*deep, *wide], 600), gap=7)
    assert {4 + 4 + 8 + 80} == {len(key) for key, _ in store.pairs()}
    for topic_filter in ["#", *deep, *wide, "a/#", "+/+/+/+/+/+/+/+/+/+/x", "+/+/+/+/+/+/+/+/+/a/#"]:
        store.check(topic_filter)
    assert (600, []) == store.verified()


def test_streams_without_an_index_share_the_last() -> None:
    """Nothing is lost when indexes run out, on either side of it."""
    store = Store(options=options(topic_index_bytes=1, thresholds=(1000, 2)))
    topics = [f"t{number}/{level}" for number in range(100) for level in "abcd"]
    store.put(messages(topics, 900), gap=5)
    store.put(messages(["$SYS/a"], 3))
    assert 255 == store.slab.info().streams
    assert 100 * 3 + 1 == len(store.slab.trie)
    for again in range(2):
        for topic_filter in ["#", "+/a", "t99/#", "t99/c", "t2/d", "$SYS/#", "t99/no"]:
            store.check(topic_filter)
        shared = Reader(store, "#", 255)
        assert "$SYS/a" not in {message.topic for _, message in shared.next(store.last)}
        assert {"#"} == {i.pattern for i in store.slab.streams(TopicFilter("#")) if i.stream == 255}
        assert (903 + again * 50, []) == store.verified()
        store.reopen()
        if not again:
            store.put(messages(topics[::-1], 50), gap=100)
    store.delete("t99/#")
    store.check()
    with pytest.raises(KeyError):
        store.slab.begin(256, TopicFilter("#"), 0)


# --- reading ------------------------------------------------------------------------


@pytest.mark.parametrize("topic_filter", FILTERS)
def test_filters(filled: Store, topic_filter: str) -> None:
    """From the beginning and from the middle, up to the end and to the middle, in any helpings."""
    middle = START + 5 * EPOCH + 700
    for first, bound in ((0, None), (middle, None), (0, middle), (middle, middle + 300), (middle, START)):
        for limit in (1, 7, 16, 17, 100_000) if not first else (100,):
            filled.check(topic_filter, first, bound, limit=limit)


def test_bounds_at_the_edges_of_epochs(filled: Store) -> None:
    """Just before, at, and just behind the end of an epoch, inclusive on both sides."""
    for edge in (START, START + 3 * EPOCH):
        for first in (edge - 1, edge, edge + 1):
            for bound in (edge - 1, edge, edge + 1, edge + EPOCH - 1, edge + EPOCH):
                filled.check("f/+/+/t", first, bound)
    filled.check("f/+/+/t", 0, -1)


def test_limits_of_bytes(filled: Store) -> None:
    """A call ends with the row that reaches them, and has one at least."""
    filled.put(messages(["big"], 20, size=1_000))
    assert [1] * 20 == [len(call) for call in filled.read("big", limit_bytes=1)][:20]
    assert {3} == {len(call) for call in filled.read("big", limit_bytes=2_500)[:6]}
    filled.check(limit_bytes=500)


def test_a_deadline_in_the_past_still_moves_on(filled: Store) -> None:
    """Every call gets further, also where nothing matches."""
    for topic_filter in FILTERS:
        filled.check(topic_filter, deadline=0.0)


def test_a_filter_leaps() -> None:
    """What lies between the keys that can match is not looked at."""
    store = Store(options=options(epoch_bits=10, thresholds=(5, 2)))
    for _ in range(4):
        store.put(messages([f"t/{device}/{what}" for device in range(1_000) for what in range(4)], 4_000), gap=500)
    epochs = 16_000 * 500 // store.slab.epoch + 1
    store.reopen()
    store.check("t/700/+")
    counters = store.slab.counters
    assert 16 == counters.rows
    assert counters.seeks <= 10 + 3 * 2 * epochs
    assert 16 == counters.visited
    assert 0 < counters.skipped <= 128 * counters.seeks
    assert counters.skipped < 16_000 / 3


def test_a_reader_of_everything_walks() -> None:
    """One scan a call, and no key is passed over."""
    store = Store()
    store.put(messages(TOPICS, 4_000), gap=3)
    store.reopen()
    calls = store.check()
    counters = store.slab.counters
    assert (4_000, 4_000, 0) == (counters.rows, counters.visited, counters.skipped)
    assert counters.seeks <= 2 * calls


def test_a_late_start_seeks() -> None:
    """What is before it is not looked at, but in its own epoch."""
    store = Store()
    store.put(messages(TOPICS, 5_000), gap=20)
    store.reopen()
    store.check("f/+/+/t", store.last - 3 * EPOCH)
    assert store.slab.counters.visited + store.slab.counters.skipped < 1_000


def test_places_that_are_none(filled: Store) -> None:
    """What no call returned is refused, and so is another stream's place."""
    slab, topic_filter = filled.slab, TopicFilter("f/+/+/+")
    narrow, wide = filled.stream(TOPICS[0]), filled.stream(TOPICS[-1])
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
            slab.next(wide if bad[8:] != bytes(step) else narrow, topic_filter, bad, bound=filled.last, **PLENTY)
    for stream in (0, 99):
        with pytest.raises(ValueError, match="no stream"):
            slab.next(stream, topic_filter, place, bound=filled.last, **PLENTY)
        with pytest.raises(KeyError):
            slab.begin(stream, topic_filter, 0)


# --- epochs -------------------------------------------------------------------------


def test_what_is_visible() -> None:
    """Streams in which a level varies hide the epoch that goes on; the others hide nothing."""
    store = Store()
    store.put(messages(["a", "b", "c"], 30))
    ordered, hashed = store.stream("a"), store.stream("b")
    assert EPOCH == store.slab.epoch
    for watermark in (START, START + 5, START + EPOCH - 2):
        assert (watermark, START - 1) == tuple(store.slab.visible(s, watermark) for s in (ordered, hashed))
    assert START + EPOCH - 1 == store.slab.visible(hashed, START + EPOCH - 1)
    assert 1 << 31 == Store(options=WildcardOptimizedOptions()).slab.epoch


@st.composite
def histories(draw: st.DrawFn) -> tuple[Store, list[Message]]:
    """Return an empty slab of any shape and what may come into it."""
    drawn = options(
        bits_per_topic_level=draw(st.sampled_from([1, 2, 5, 64])),
        topic_index_bytes=draw(st.sampled_from([1, 4])),
        thresholds=draw(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)),
    )
    topics = draw(st.lists(strategies.topics(), min_size=1, max_size=6))
    return Store(options=drawn), messages(topics, draw(st.integers(1, 60)))


@settings(max_examples=150)
@given(st.data(), histories())
def test_any_sequence_of_calls(data: st.DataObject, history: tuple[Store, list[Message]]) -> None:
    """Bounds up and down, limits, restarts, deletes and stores in between: each message once, in its topic's order."""
    store, rows = history
    store.put(rows, gap=data.draw(st.sampled_from([1, 60, 700, 2_048])))
    topic_filter = data.draw(st.one_of(strategies.filters(), st.just("#")))
    first = data.draw(st.integers(START - 10, store.last + 10))
    readers = {s: Reader(store, topic_filter, s, first) for s in range(1, store.slab.info().streams + 1)}
    got: dict[int, list[Row]] = {stream: [] for stream in readers}
    ends: dict[int, int] = dict.fromkeys(readers, 0)
    deleted: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        stream = data.draw(st.sampled_from(sorted(readers)))
        match data.draw(st.sampled_from(["next", "next", "next", "next", "reopen", "put", "delete"])):
            case "reopen":
                store.reopen()
            case "put":
                store.put(rows[: data.draw(st.integers(1, len(rows)))], gap=data.draw(st.sampled_from([1, 300])))
            case "delete":
                before = {at for at, _ in store.rows}
                lowest = data.draw(st.integers(START, store.last))
                store.delete(data.draw(strategies.filters()), lowest, lowest + data.draw(st.integers(0, EPOCH)))
                deleted += before - {at for at, _ in store.rows}
            case _:
                reader, bound = readers[stream], data.draw(st.integers(START - 1, store.last))
                call = reader.next(bound, limit=data.draw(st.integers(1, 9)), limit_bytes=400)
                got[stream] += call
                assert all(first <= at <= bound for at, _ in call)
                if reader.exhausted:
                    ends[stream] = max(ends[stream], bound)
                    assert missing(store, got, topic_filter, first, stream, bound) == []
    for stream, reader in readers.items():
        while got[stream].extend(reader.next(store.last, limit=7)) or not reader.exhausted:
            pass
        assert_in_order(got[stream])
    found = [row for rows_ in got.values() for row in rows_]
    known = [at for at, _ in found]
    assert len(set(known)) == len(known)
    assert store.wanted(topic_filter, first) == sorted(
        (row for row in found if row[0] not in deleted), key=lambda row: row[0]
    )


def missing(
    store: Store, got: dict[int, list[Row]], topic_filter: str, first: int, stream: int, bound: int
) -> list[Row]:
    """Return what a reader that has everything up to a bound does not have."""
    have = {at for at, _ in got[stream]}
    wanted = store.wanted(topic_filter, first, bound)
    return [row for row in wanted if row[0] not in have and store.slab._streams.find(row[1].topic) == stream]


@given(st.data())
def test_a_staircase_is_what_was_read(data: st.DataObject) -> None:
    """After any bounds and stops, the steps hold exactly the keys and positions that were read."""
    epochs = Epochs(3, 5)  # two bits of hash before the three of the position
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
    """Say whether a span asks for the message of a key and position below the seventh epoch."""
    return span.start <= 7 << 5 | key < span.end and (span.whole or span.first <= 7 << 3 | position <= span.last)


def test_too_many_lower_bounds_are_refused() -> None:
    """A place has a bounded number of steps; one more is told, and a higher bound leads on."""
    store = Store(options=options(thresholds=(0,)))
    store.put(messages([f"t{number}" for number in range(200)], 1_000))
    reader = Reader(store, "#", 1)
    bound = store.last - MOST_STEPS
    got = [row for lower in range(MOST_STEPS) for row in reader.next(store.last - lower, limit=1)]
    with pytest.raises(ValueError, match=f"{MOST_STEPS} ever lower bounds"):
        reader.next(bound, limit=1)
    while not reader.exhausted:
        got += reader.next(store.last)
    assert store.wanted() == sorted(got, key=lambda row: row[0])


# --- storing ------------------------------------------------------------------------


def test_more_topics_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory begins anew; one batch may have more than it holds."""
    monkeypatch.setattr(streams_module, "_CACHED", 10)
    store = Store()
    remembered = []
    for first, count in ((0, 5), (3, 7), (8, 4), (0, 30), (40, 1)):
        store.put(messages([f"t/{number}" for number in range(first, first + count)], 40))
        remembered.append(len(store.slab._streams._topics))
    assert [5, 10, 4, 30, 1] == remembered
    store.check()
    assert (200, []) == store.verified()


def test_a_failed_write_is_made_up_for() -> None:
    """The next batch carries the structure that the lost one would have stored."""
    store = Store()
    batch = MessageBatch.from_messages(messages(["new/1", "new/2", "new/3"], 4))
    store.slab.store(batch.placed(np.arange(4, dtype=np.uint64), Constant(0, 4), SHARD), WriteBatch())
    store.put(messages(["new/3", "newer"], 4))
    store.reopen()
    store.check()
    assert (4, []) == store.verified()


def test_a_generation_inherits_the_structure() -> None:
    """The next generation begins with the learned wildcards, and none of the streams."""
    store = Store()
    store.put(messages(TOPICS, 81))
    layout, write = WildcardOptimizedLayout(store.options), WriteBatch()
    layout.create(store.engine, SHARD, GENERATION + 1, store.slab, write)
    store.engine.write(write)
    child = layout.open(store.engine, SHARD, GENERATION + 1)
    assert isinstance(child, WildcardSlab)
    assert (0, "f/+/+/+") == (child.info().streams, child.trie.pattern(child.trie.learn("f/new/b/c")))
    first = WriteBatch()
    layout.create(store.engine, SHARD, 1, None, first)
    assert not first


def test_reopening_finds_it_on_disk(open_rocksdb: Callable[[], Engine]) -> None:
    """On a real engine, with streams that stay the same."""
    store = Store(open_rocksdb())
    for number in range(3):
        store.put(messages(TOPICS, 700), gap=17)
        store.put(messages([f"more/{number}/{n}" for n in range(9)], 50, 2_000))
        store.delete("f/+/4/#", START + 1_000 * number, store.last - 100)
        store.engine.close()
        store.engine = open_rocksdb()
        store.reopen()
        for topic_filter in FILTERS:
            store.check(topic_filter, limit=400)
        assert (len(store.rows), []) == store.verified()
    learned = {node.path: node.stream for node in store.slab.learned()}
    assert store.slab.trie.pattern(learned["f", "+", "+", "+"] or 0) == "f/+/+/+"
    store.engine.close()


# --- deleting -----------------------------------------------------------------------


def test_deletes(filled: Store) -> None:
    """Of a topic, of some positions, of everything; twice is as once."""
    middle = START + 2 * EPOCH + 100
    for topic_filter, first, last in (("f/z/7/s", 0, None), ("f/+/4/+", middle, 2 * middle), ("f/+/+/t", 0, middle)):
        assert filled.delete(topic_filter, first, last) > 0
        assert 0 == filled.delete(topic_filter, first, last)
        filled.check()
    filled.delete("#")
    assert [] == filled.pairs()


def test_a_step_of_a_delete_is_bounded(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at so many keys and a list more, and may find nothing."""
    monkeypatch.setattr(slab_module, "_LOOKED_AT", 40)
    looked_at, total = [], 0
    for step in filled.slab.delete(TopicFilter("f/+/4/+"), 0, filled.last):
        counters = filled.slab.counters
        looked_at.append(counters.visited + counters.skipped - total)
        total = counters.visited + counters.skipped
        assert step.messages == len(step.write.operations) <= 40
    assert max(looked_at) <= 40 + 128
    assert len(looked_at) >= total // 168


def test_a_place_survives_the_deletion_of_what_it_stood_before(filled: Store) -> None:
    """The reader goes on with what follows."""
    reader = Reader(filled, "#", filled.stream(TOPICS[-1]))
    got = reader.next(filled.last, limit=500)
    filled.delete("#", got[400][0], got[-1][0] + 900)
    while not reader.exhausted:
        got += reader.next(filled.last, limit=500)
    left = {at for at, _ in filled.rows}
    of_stream = [row for row in filled.rows if filled.stream(row[1].topic) == reader.stream]
    assert of_stream == sorted((row for row in got if row[0] in left), key=lambda row: row[0])


# --- damage -------------------------------------------------------------------------


def test_damage_is_named_and_the_rest_is_readable(filled: Store) -> None:
    """Reading stops at it with its place; verify tells of it and goes on."""
    key, value = filled.pairs()[700]
    position = filled.slab._streams.keys(key[7]).positions([key]).tolist()[0]
    put_raw(filled, key, value[:-1] + bytes((value[-1] ^ 1,)))
    with pytest.raises(CorruptionError, match=f"message at position {position}"):
        filled.check()
    filled.check(bound=position - 1)
    filled.check(first=position + 1)
    good, damages = filled.verified()
    assert (len(filled.rows) - 1, 1) == (good, len(damages))
    assert key.hex() in damages[0].place


@pytest.mark.parametrize("change", ["position", "hash", "stream", "unknown stream", "length", "padding"])
def test_verify_checks_keys(change: str) -> None:
    """A whole value under a key that the slab would not have made."""
    store = Store(options=options(bits_per_topic_level=3))
    store.put(messages(["a", "b", "c/d", "c/e"], 100))
    key, value = next(pair for pair in store.pairs() if pair[0][7] == store.stream("b"))
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
    write = WriteBatch()
    write.delete(KEYS, key)
    write.put(KEYS, changed.to_bytes(size + (change == "length"), "big"), value)
    store.engine.write(write)
    good, damages = store.verified()
    assert (99, 1) == (good, len(damages))


def put_raw(store: Store, key: bytes, value: bytes) -> None:
    """Write around the slab."""
    write = WriteBatch()
    write.put(KEYS, key, value)
    store.engine.write(write)


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
    """At their limits they work, beyond they are refused."""
    for value in good:
        store = Store(options=make_options("w", WildcardOptimizedOptions, {name: value}))
        store.put(messages(TOPICS, 200), gap=9)
        store.check("f/+/+/t")
        store.check("f/+/2/+", limit=10)
    for value in bad:
        with pytest.raises(InvalidOptionError):
            make_options("w", WildcardOptimizedOptions, {name: value})


# --- threads ------------------------------------------------------------------------


def test_readers_run_beside_the_writer() -> None:
    """They see all of what was committed before they began, once, and nothing behind their bound."""
    store = Store(options=options(bits_per_topic_level=4))
    source, other = random.Random(5), random.Random(6)
    batches = [messages(source.sample(TOPICS, 20), source.choice([1, 60, 300])) for _ in range(60)]
    committed: list[int] = [START]

    def read() -> None:
        count = len(committed) - 1
        bound = committed[count]
        topic = other.choice(["#", "f/+/+/t", "f/x/#"])
        expected = sum(TopicFilter(topic).matches(m.topic) for batch in batches[:count] for m in batch)
        rows = [row for call in store.read(topic, bound=bound, limit=other.choice([50, 1_000])) for row in call]
        assert_in_order(rows)
        assert expected == len(rows) == len({at for at, _ in rows})

    with Beside(read, read):
        for batch in batches:
            store.put(batch, gap=source.choice([1, 30]))
            committed.append(store.last)
    store.check()
