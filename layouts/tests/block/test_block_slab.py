"""A slab of blocks: whatever was stored and deleted, each stream comes back in order, in any helpings."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import Constant, to_list
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYSPACES,
    META,
    Engine,
    Key,
    Keyspace,
    Snapshot,
    WriteBatch,
    encode_generation,
)
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import Damage
from topicstore.contract.positions import COUNTER_BITS
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.faults.threads import Beside
from topicstore_conformance.oracle import strategies
from topicstore_layouts.block import batch_blocks, compaction, deletion, reading, segments, writing
from topicstore_layouts.block import slab as slab_module
from topicstore_layouts.block.compression import Compressor
from topicstore_layouts.block.format import MIXED, Block, block_seed, encode_block
from topicstore_layouts.block.layout import BlockLayout, BlockOptions
from topicstore_layouts.block.slab import BlockSlab
from topicstore_layouts.shared import name_table

SHARD, GENERATION = 4, 2
ALL = 0
START = 1 << 60
PLENTY = {"limit": 100_000, "limit_bytes": 1 << 30, "deadline": None}

Row = tuple[int, Message]


@attrs.define
class Store:
    """A slab over an engine, and every message that should be in it."""

    engine: Engine = attrs.field(factory=lambda: MemoryEngine(KEYSPACES))
    options: BlockOptions = attrs.field(factory=lambda: BlockOptions(thresholds=(9, 9, 0)))
    rows: list[Row] = attrs.field(factory=list)
    last: int = START
    slab: BlockSlab = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        slab = BlockLayout(self.options).open(self.engine, SHARD, GENERATION)
        assert isinstance(slab, BlockSlab)
        self.slab = slab

    def put(self, messages: Iterable[Message], *, gaps: int = 1, ahead: int = 1) -> int:
        """Store a batch; its positions go up by ``gaps`` from ``ahead`` behind the last; return the first."""
        batch = MessageBatch.from_messages(messages)
        first = self.last + ahead
        positions = np.arange(len(batch), dtype=np.uint64) * np.uint64(gaps) + np.uint64(first)
        times = [m.timestamp if m.timestamp is not None else first >> COUNTER_BITS for m in batch.to_messages()]
        placed = batch.placed(positions, times, SHARD)
        write = WriteBatch()
        self.slab.store(placed, write)
        self.engine.write(write)
        self.slab.committed()
        self.last = int(positions[-1])
        self.rows += zip(positions.tolist(), placed.to_messages(), strict=True)
        return first

    def delete(self, topic_filter: str, first: int = 0, last: int | None = None) -> int:
        """Delete from the slab and from the list; return how many."""
        last, before = self.last if last is None else last, len(self.rows)
        deleted = 0
        size = self.size()
        for step in self.slab.delete(TopicFilter(topic_filter), first, last):
            self.engine.write(step.write)
            deleted += step.messages
            size -= step.freed
        assert size == self.size()
        matches = TopicFilter(topic_filter).matches
        self.rows = [(at, m) for at, m in self.rows if not (first <= at <= last and matches(m.topic))]
        assert before - len(self.rows) == deleted
        return deleted

    def compact(self, bound: int | None = None, *, whole: bool = True) -> int:
        """Merge what lies in the slab; return how many messages were rewritten."""
        rewritten, size = 0, self.size()
        for step in self.slab.compact(self.last if bound is None else bound, whole=whole):
            self.engine.write(step.write)
            rewritten += step.messages
            size -= step.freed
        assert size == self.size()
        return rewritten

    def stream(self, topic: str) -> int:
        return self.slab.trie.learn(topic)

    def wanted(self, topic_filter: str = "#", first: int = 0, bound: int | None = None, stream: int = ALL) -> list[Row]:
        """Return what a reader should get."""
        matches, bound = TopicFilter(topic_filter).matches, self.last if bound is None else bound
        return [
            (at, message)
            for at, message in self.rows
            if first <= at <= bound and matches(message.topic) and stream in (ALL, self.stream(message.topic))
        ]

    def read(
        self, topic_filter: str = "#", first: int = 0, bound: int | None = None, stream: int = ALL, **limits: Any
    ) -> list[list[Row]]:
        """Return what a reader gets, a list a call."""
        filter_, bound = TopicFilter(topic_filter), self.last if bound is None else bound
        place, exhausted, calls = self.slab.begin(stream, filter_, first), False, []
        while not exhausted:
            step = self.slab.next(stream, filter_, place, bound=bound, **{**PLENTY, **limits})
            assert step.exhausted or step.place > place
            place, exhausted = step.place, step.exhausted
            calls.append(rows_of(step.batch))
        assert int.from_bytes(place, "big") == max(bound + 1, first)
        return calls

    def check(
        self, topic_filter: str = "#", first: int = 0, bound: int | None = None, stream: int = ALL, **limits: Any
    ) -> int:
        """Hold a reader against the list; return how many calls it took."""
        calls = self.read(topic_filter, first, bound, stream, **limits)
        assert self.wanted(topic_filter, first, bound, stream) == [row for call in calls for row in call]
        assert all(len(call) <= limits.get("limit", PLENTY["limit"]) for call in calls)
        return len(calls)

    def size(self) -> int:
        """Return the bytes of all blocks, frames and indexes."""
        return sum(
            len(value) for keyspace in (DATA, INDEX) for chunk in self.engine.scan(keyspace) for _, value in chunk
        )

    def blocks(self) -> list[Block]:
        """Return the blocks that were not merged."""
        return [
            Block(value, last, block_seed(last, SHARD << 32 | generation))
            for chunk in self.engine.scan(DATA)
            for (generation, end, last), value in chunk
            if not end
        ]

    def verified(self) -> tuple[int, list[Damage]]:
        found = list(self.slab.verify(self.last))
        return sum(n for n in found if isinstance(n, int)), [d for d in found if isinstance(d, Damage)]


def rows_of(batch: MessageBatch) -> list[Row]:
    if not len(batch):
        return []
    assert [SHARD] * len(batch) == to_list(batch.shards)
    return list(zip(to_list(batch.positions), batch.to_messages(), strict=True))


def messages(topics: Sequence[str], rows: int, size: int = 4) -> list[Message]:
    """Return messages whose topics take turns, each with another payload."""
    return [
        Message(topics[n % len(topics)], n.to_bytes(size, "big"), f"c{n % 3}", n % 3, n % 2 == 0) for n in range(rows)
    ]


def concat(calls: Iterable[list[Row]]) -> list[Row]:
    return [row for call in calls for row in call]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that few messages meet every case."""
    shrink(monkeypatch)


def shrink(patch: pytest.MonkeyPatch) -> None:
    for module, values in {
        writing: {"_SPLIT_ROWS": 3, "_MOST_ROWS": 12, "_MOST_BYTES": 300},
        slab_module: {"_ENOUGH": 6},
        deletion: {"_LOOKED_AT": 2},
        compaction: {
            "SEGMENT_ROWS": 40,
            "SEGMENT_BYTES": 2_000,
            "FRAME_ROWS": 6,
            "FRAME_BYTES": 500,
            "WORTH_ROWS": 20,
            "MOST_BLOCKS": 5,
        },
        segments: {"_ROWS_A_TOPIC": 2},
        reading: {"_FEW_FRAMES": 1},
        name_table: {"CAPACITY": 5, "LONGEST": 60},
    }.items():
        for name, value in values.items():
            patch.setattr(module, name, value)


# --- how batches become blocks ------------------------------------------------------


def test_few_streams_with_many_rows_are_split(store: Store) -> None:
    """A block a stream; they interleave on disk and come back in order of position."""
    store.put(messages(["a", "b", "c"], 900))
    assert [(1, 300), (2, 300), (3, 300)] == [(block.stream, block.rows) for block in store.blocks()]
    assert {START + 1} == {block.base for block in store.blocks()}
    for limit in (1, 7, 299, 300, 301, 899, 900, 901, 5_000):
        store.check(limit=limit)
    assert 1 == store.check()


def test_many_streams_with_few_rows_share_a_block(store: Store) -> None:
    """A mixed block serves each of its streams."""
    store.put(messages(["a", "b", "c"], 767))
    assert [(MIXED, 767)] == [(block.stream, block.rows) for block in store.blocks()]
    for topic in "abc":
        store.check(stream=store.stream(topic))
        store.check(topic, limit=10)


def test_one_stream_is_never_mixed(store: Store) -> None:
    """Neither one topic nor several topics of one stream."""
    store.put(messages(["a/b/1"], 1))
    store.put(messages([f"a/b/{number}" for number in range(50)], 50))
    assert {1} == {block.stream for block in store.blocks()}
    assert "a/b/+" == store.slab.trie.pattern(1)
    for number in range(50):
        store.check(f"a/b/{number}", stream=1)


def test_streams_behind_each_other_are_read_apart(store: Store) -> None:
    """A block that nothing of its batch can interleave with is not held back for the rest."""
    store.put([*messages(["a"], 300), *messages(["b", "c"], 600)])
    assert [(1, 300), (2, 300), (3, 300)] == [(block.stream, block.rows) for block in store.blocks()]
    step = store.slab.next(ALL, TopicFilter("#"), bytes(8), bound=store.last, **{**PLENTY, "limit": 300})
    assert (1, 300) == (store.slab.counters.visited, len(step.batch))
    for stream in (ALL, 1, 2, 3):
        for limit in (100, 301, 2_000):
            store.check(stream=stream, limit=limit)


def test_large_batches_are_cut_by_rows(store: Store) -> None:
    """Parts are batches of their own: the second doesn't interleave with the first."""
    store.put(messages(["a"], 20_000))
    assert [8_192, 8_192, 3_616] == [block.rows for block in store.blocks()]
    assert 3 == len({block.base for block in store.blocks()})
    store.check()
    store.check(first=START + 8_192, limit=3_000)


def test_large_batches_are_cut_by_bytes(store: Store) -> None:
    """A block ends before a megabyte of payloads, unless one payload is larger."""
    sizes = [600_000, 600_000, 400_000, 3_000_000, 1, 1_048_576, 0, 1]
    store.put([Message("a", bytes(size)) for size in sizes])
    assert [1, 2, 1, 1, 2, 1] == [block.rows for block in store.blocks()]
    store.check()


def test_each_part_of_a_cut_batch_is_split_by_itself(store: Store) -> None:
    """Rows that change their streams in the middle of a batch."""
    store.put([*messages(["a", "b"], 8_192), *messages(["c", "d", "e"], 700)])
    assert [(1, 4_096), (2, 4_096), (MIXED, 700)] == [(block.stream, block.rows) for block in store.blocks()]
    for limit in (1_000, 5_000, 20_000):
        store.check(limit=limit)
    store.check("b", limit=1_000, stream=2)


def test_every_column_comes_back() -> None:
    """Through split, mixed and single blocks, joined into one batch and not."""

    @settings(max_examples=40)
    @given(st.lists(st.lists(strategies.messages(), min_size=1, max_size=9), min_size=1, max_size=4))
    def check(batches: list[list[Message]]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            shrink(patch)
            one = Store(options=BlockOptions(thresholds=(2, 1)))
            for batch in batches:
                one.put(batch)
            one.check()
            one.reopen()
            one.check(limit=3)
            assert (len(one.rows), []) == one.verified()

    check()


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_codec(compression: Any) -> None:
    """What one option wrote another one reads."""
    store = Store(options=BlockOptions(compression=compression, thresholds=(9,)))
    store.put(messages(["a", "b"], 700, 40))
    store.options = BlockOptions(thresholds=(9,))
    store.reopen()
    store.check()
    store.delete("a")
    store.check()


# --- any sequence -------------------------------------------------------------------

LONG = "long/" + "x" * 60
TOPICS = ["a", "b", "a/b", "a/c", "$x/a", "d/1/2", "d/2/2", "d/3/2", "/", LONG]
FILTERS = ["#", "a", "+", "a/#", "a/+", "d/+/2", "d/1/2", "$x/#", "no/such", "b", "+/+", "/#", LONG]


@st.composite
def batches(draw: st.DrawFn) -> list[Message]:
    """Make batches of one stream, of few and of many, in turns and in runs."""
    topics = draw(st.lists(st.sampled_from(TOPICS), min_size=1, max_size=4))
    runs = draw(st.lists(st.tuples(st.sampled_from(topics), st.integers(1, 8)), min_size=1, max_size=8))
    size = draw(st.sampled_from([0, 1, 60, 299, 400]))
    return [Message(topic, bytes((n,)) * size) for topic, rows in runs for n in range(rows)]


STEPS = st.sampled_from(["put", "put", "put", "delete", "reopen", "compact", "compact some", "lose a step"])


@settings(max_examples=90)
@given(st.data())
def test_any_sequence_of_batches_and_deletes(data: st.DataObject) -> None:
    """Whatever is stored, merged, deleted, reopened: every stream, filter, limit, place and bound is served right."""
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        store = Store(options=BlockOptions(thresholds=(9, 1)))
        for step in data.draw(st.lists(STEPS, min_size=1, max_size=10)):
            somewhere = st.integers(START, store.last + 3)
            match step:
                case "put":
                    gaps = data.draw(st.sampled_from([1, 1, 2, 5_000]))
                    store.put(data.draw(batches()), gaps=gaps, ahead=data.draw(st.sampled_from([1, 1, 9_000])))
                case "delete":
                    first, last = data.draw(somewhere), min(data.draw(somewhere), store.last)
                    store.delete(data.draw(st.sampled_from(FILTERS)), first, last)
                case "compact":
                    store.compact(min(data.draw(somewhere | st.just(store.last)), store.last))
                case "compact some":
                    store.compact(whole=False)
                case "lose a step":  # whoever asked for it never committed it, nor came back for another
                    next(store.slab.compact(store.last, whole=True), None)
                case _:
                    store.reopen()
            somewhere = st.integers(START, store.last + 3)
            streams = [ALL, *(info.stream for info in store.slab.streams(TopicFilter("#")))]
            for _ in range(3):
                store.check(
                    data.draw(st.sampled_from(FILTERS)),
                    data.draw(st.just(0) | somewhere),
                    min(store.last, data.draw(somewhere)),
                    data.draw(st.sampled_from(streams)),
                    limit=data.draw(st.sampled_from([1, 2, 5, 13, 100_000])),
                    limit_bytes=data.draw(st.sampled_from([1, 500, 1 << 30])),
                    deadline=data.draw(st.sampled_from([None, 0.0])),
                )
            check_cover(store)
            assert (len(store.rows), []) == store.verified()


def check_cover(store: Store) -> None:
    """Hold the streams to read for a filter against the list: each message comes once."""
    for text in FILTERS:
        topic_filter = TopicFilter(text)
        cover = store.slab.cover(topic_filter)
        assert store.wanted(text) == sorted(
            row for stream in cover for row in concat(store.read(text, stream=stream, limit=9))
        )
        listed = [info.stream for info in store.slab.streams(topic_filter)]
        assert store.wanted(text) == sorted(
            (row for stream in listed for row in concat(store.read(text, stream=stream))), key=lambda row: row[0]
        )


# --- reading ------------------------------------------------------------------------


def test_a_reader_with_a_small_limit_decodes_a_block_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block it is in the middle of is kept, for every reader."""
    store.put(messages(["a", "b"], 600))
    opened = []

    class Counted(Block):
        __slots__ = ()

        def __init__(self, value: bytes, last: int, seed: int) -> None:
            opened.append(last)
            super().__init__(value, last, seed)

    monkeypatch.setattr(batch_blocks, "Block", Counted)
    assert 60 == store.check(limit=10)
    assert 2 == len(opened)
    store.check("a", limit=10)
    assert 2 == len(opened)


def test_a_kept_block_is_not_read_after_a_delete(store: Store) -> None:
    """A reader in the middle of a block sees what was deleted from it since."""
    store.put(messages(["a", "b"], 100))
    first = store.slab.next(
        ALL, TopicFilter("#"), START.to_bytes(8, "big"), bound=store.last, **{**PLENTY, "limit": 10}
    )
    store.delete("a")
    step = store.slab.next(ALL, TopicFilter("#"), first.place, bound=store.last, **PLENTY)
    assert store.wanted(first=START + 11) == rows_of(step.batch)
    assert 45 == len(step.batch)


def test_a_reader_of_a_stream_passes_over_the_others(store: Store) -> None:
    """By their headers alone, and the counters say so."""
    for _ in range(5):
        store.put(messages(["a", "b"], 600))
    counters = store.slab.counters
    assert (0, 0, 0, 0) == (counters.seeks, counters.visited, counters.skipped, counters.rows)
    store.check(stream=store.stream("b"), limit=100_000)
    calls = counters.seeks
    assert (5, 5, 1_500) == (counters.visited, counters.skipped, counters.rows)
    assert calls == 3  # two batches of 300 rows are enough for a call


def test_mixed_blocks_are_skipped_by_their_topics(store: Store) -> None:
    """A block that has no topic for the filter is counted as passed over."""
    store.put(messages(["a", "b"], 10))
    store.put(messages(["a", "c"], 10))
    store.check("b")
    assert (1, 1, 5) == (store.slab.counters.visited, store.slab.counters.skipped, store.slab.counters.rows)
    store.slab.counters.skipped = 0
    store.check(stream=store.stream("c"))
    assert 1 == store.slab.counters.skipped


@pytest.mark.usefixtures("tiny")
def test_small_blocks_are_joined_up_to_what_is_enough(store: Store) -> None:
    """One call reads several batches, but not many more rows than it needs to."""
    for _ in range(10):
        store.put(messages(["a"], 2))
    assert [6, 6, 6, 2] == list(map(len, store.read()))
    assert [4, 4, 4, 4, 4] == list(map(len, store.read(limit=5)))
    assert [1] * 20 == list(map(len, store.read(limit=1)))


def test_a_call_ends_when_it_has_its_bytes(store: Store) -> None:
    """After about as many as were asked for, and never without a row."""
    for _ in range(10):
        store.put([Message("a", bytes(1_000))] * 2)
    assert [2] * 10 == list(map(len, store.read(limit_bytes=1)))
    assert [4] * 5 == list(map(len, store.read(limit_bytes=3_000)))
    assert [20] == list(map(len, store.read()))


def test_a_call_ends_at_its_deadline(store: Store) -> None:
    """Having moved on past one batch at least, whether it held something or not."""
    for number in range(6):
        store.put(messages(["a" if number == 5 else "b"], 2))
    assert [2] * 6 == list(map(len, store.read(deadline=0.0)))
    assert [0, 0, 0, 0, 0, 2] == list(map(len, store.read("a", deadline=0.0)))
    assert [0, 0, 0, 0, 0, 2] == list(map(len, store.read(stream=store.stream("a"), deadline=0.0)))
    assert [12] == list(map(len, store.read(deadline=time.monotonic() + 600)))


def test_a_bound_in_the_middle_of_a_batch(store: Store) -> None:
    """Nothing above it is read, in split and mixed blocks; the reader goes on later from there."""
    store.put(messages(["a", "b"], 600))
    store.put(messages(["a", "b"], 10))
    for bound in (START, START + 1, START + 300, START + 599, START + 600, START + 605):
        for limit in (7, 100_000):
            store.check(bound=bound, limit=limit)
            store.check("b", bound=bound, limit=limit, stream=store.stream("b"))
    read: list[Row] = []
    place = store.slab.begin(ALL, TopicFilter("#"), 0)
    for bound in range(START, store.last + 1, 61):
        step = store.slab.next(ALL, TopicFilter("#"), place, bound=bound, **PLENTY)
        assert (True, (bound + 1).to_bytes(8, "big")) == (step.exhausted, step.place)
        read, place = read + rows_of(step.batch), step.place
    assert store.wanted(bound=bound) == read


@pytest.mark.parametrize("filters", [["#"], ["b"], ["#", "b", "+"]])
def test_bounds_that_rise_and_fall_within_a_segment(store: Store, filters: list[str]) -> None:
    """What was kept of it for the next call serves only as far as it was read, and from where."""
    store.put(messages(["a", "b", "c"], 200))
    store.compact()
    store.put(messages(["a", "b"], 20))
    source = random.Random(5)
    for _ in range(150):
        text, first = source.choice(filters), START + source.randrange(220)
        bound, limit = START + source.randrange(1, 221), source.choice([3, 10, 50])
        for _ in range(3):
            place = store.slab.begin(ALL, TopicFilter(text), first)
            step = store.slab.next(ALL, TopicFilter(text), place, bound=bound, **{**PLENTY, "limit": limit})
            expected = store.wanted(text, first, bound)
            assert rows_of(step.batch) == expected[: len(step.batch)]
            assert len(step.batch) == min(limit, len(expected)) or not step.exhausted
            first, bound = int.from_bytes(step.place, "big"), bound + source.choice([-5, 0, 30])
            bound = min(bound, store.last)


def test_a_place_between_positions(store: Store) -> None:
    """A time at which nothing was stored: the next message follows."""
    store.put(messages(["a", "b"], 600), gaps=10)
    store.put(messages(["a"], 5), gaps=1_000, ahead=100_000)
    for first in (START + 2, START + 11, START + 12, store.last - 1_500, store.last, store.last + 1):
        for stream in (ALL, store.stream("a"), store.stream("b")):
            store.check(first=first, stream=stream)


def test_a_place_behind_the_bound(store: Store) -> None:
    """There is nothing, and the place stays."""
    store.put(messages(["a"], 5))
    place = (store.last + 100).to_bytes(8, "big")
    step = store.slab.next(ALL, TopicFilter("#"), place, bound=store.last, **PLENTY)
    assert (0, place, True) == (len(step.batch), step.place, step.exhausted)


def test_places_and_streams_that_are_not_its_own(store: Store) -> None:
    """Streams are checked at the beginning, places at every call."""
    store.put(messages(["a"], 5))
    for stream in (2, 99):
        with pytest.raises(KeyError):
            store.slab.begin(stream, TopicFilter("#"), 0)
    for stream, place in ((ALL, b""), (ALL, bytes(7)), (ALL, bytes(9)), (2, bytes(8))):
        with pytest.raises(ValueError, match="b'"):
            store.slab.next(stream, TopicFilter("#"), place, bound=store.last, **PLENTY)


def test_cover(store: Store) -> None:
    """Nothing for a topic never stored, one stream where one is enough, else one pass over all."""
    store.put(messages(["a/1/x", "a/1/y", "b/1/x"], 9))
    expected = {"#": [ALL], "a/#": [1], "a/1/x": [1], "a/1/never": [], "c": [], "+/1/+": [ALL], "b/+/x": [2]}
    assert expected == {text: store.slab.cover(TopicFilter(text)) for text in expected}
    assert ["a/1/+", "b/1/+"] == [info.pattern for info in store.slab.streams(TopicFilter("#"))]


def test_an_empty_slab(store: Store) -> None:
    """Everything works and gives nothing."""
    assert [[]] == store.read(bound=START)
    assert ([], []) == (store.slab.streams(TopicFilter("#")), store.slab.cover(TopicFilter("#")))
    assert 0 == store.delete("#", 0, START)
    assert (0, []) == store.verified()
    assert 0 == store.slab.info().streams


def test_info(store: Store) -> None:
    """Streams, names and nodes."""
    store.put(messages(["a/1/x", "a/1/y", "b"], 9))
    info = store.slab.info()
    details = {"topics with numbers": 3, "client ids with numbers": 3, "trie nodes": 2 + 4, "merged messages": 0}
    assert (2, details) == (info.streams, info.details)
    assert 9 == store.slab.backlog(9) == store.compact()
    store.put(messages(["b"], 5))
    assert (9, 5) == (store.slab.info().details["merged messages"], store.slab.backlog(14))
    store.delete("b")
    assert (6, 0) == (store.slab.info().details["merged messages"], store.slab.backlog(6))


def test_slabs_keep_apart() -> None:
    """Other generations in the same engine, before and behind, are never touched."""
    engine = MemoryEngine(KEYSPACES)
    stores = []
    for generation in (1, 2, 3):
        store = Store(engine)
        slab = BlockLayout(store.options).open(engine, SHARD, generation)
        assert isinstance(slab, BlockSlab)
        store.slab = slab
        store.put(messages([f"t{generation}", "both"], 20 * generation))
        stores.append(store)
    stores[1].delete("both")
    for store in stores:
        store.check()
        assert (len(store.rows), []) == store.verified()


# --- deleting -----------------------------------------------------------------------


@pytest.mark.parametrize("topics", [["a"], ["a", "b"], [f"t{number}" for number in range(100)]])
@pytest.mark.parametrize("gaps", [1, 3])
def test_delete_ranges(topics: list[str], gaps: int) -> None:
    """The first rows of a batch, the last ones, some in the middle, one, all but one, and all."""
    for low, high in ((0, 99), (500, 599), (200, 300), (42, 42), (1, 599), (0, 598), (0, 599)):
        store = Store()
        first = store.put(messages(topics, 600), gaps=gaps)
        store.put(messages(topics, 600), gaps=gaps)
        assert high - low + 1 == store.delete("#", first + low * gaps, first + high * gaps)
        for limit in (7, 100_000):
            store.check(limit=limit)
            store.check(first=first + 250 * gaps, limit=limit)
            store.check(first=first + high * gaps, limit=limit, stream=store.stream(topics[-1]))
        store.put(messages(topics, 3))
        store.reopen()
        store.check()
        assert (len(store.rows), []) == store.verified()


def test_delete_by_topic(store: Store) -> None:
    """Whole blocks go where a stream has its own, rows where blocks are shared."""
    store.put(messages(["a", "b"], 600))
    store.put(messages(["a", "b"], 20))
    assert 310 == store.delete("a")
    assert [(2, 300), (MIXED, 10)] == [(block.stream, block.rows) for block in store.blocks()]
    store.check()
    assert 310 == store.delete("+")
    assert [] == store.blocks()
    store.check()


def test_deleted_last_rows_leave_the_key(store: Store) -> None:
    """A block stays under its key, so that readers in the middle of it find it again."""
    store.put(messages(["a", "b"], 10))
    store.put(messages(["a"], 10))
    before = [(block.last, block.base, block.stream) for block in store.blocks()]
    store.delete("#", store.last - 4, store.last)
    store.delete("#", store.last - 14, store.last - 10)
    assert before == [(block.last, block.base, block.stream) for block in store.blocks()]
    for first in range(START, store.last + 2):
        store.check(first=first, limit=2)


def test_delete_twice(store: Store) -> None:
    """The second time there is nothing, and nothing is written."""
    store.put(messages(["a", "b"], 20))
    assert 10 == store.delete("a")
    assert [] == [step for step in store.slab.delete(TopicFilter("a"), 0, store.last) if step.write or step.messages]


def test_delete_goes_in_small_steps(store: Store) -> None:
    """Each looks at a few blocks, whether it finds something or not, and may be the last."""
    for number in range(150):
        store.put(messages(["a", "b"] if number < 100 else ["c"], 10))
    steps = list(store.slab.delete(TopicFilter("a"), 0, store.last))
    found = [(80, 16)] * 6 + [(20, 4)] + [(0, 0)] * 3
    assert found == [(step.messages, len(step.write.operations)) for step in steps]
    store.engine.write(steps[0].write)
    assert 1_500 - 80 == sum(block.rows for block in store.blocks())
    store.reopen()
    again = list(store.slab.delete(TopicFilter("a"), 0, store.last))
    assert [0, *[80] * 5, 20, 0, 0, 0] == [step.messages for step in again]
    for step in again:
        store.engine.write(step.write)
    store.rows = [row for row in store.rows if row[1].topic != "a"]
    store.check()


def test_a_place_survives_the_deletion_of_what_it_stood_before(store: Store) -> None:
    """The reader goes on with what follows."""
    store.put(messages(["a", "b"], 600))
    step = store.slab.next(1, TopicFilter("a"), bytes(8), bound=store.last, **{**PLENTY, "limit": 100})
    store.delete("#", START + 150, START + 400)
    rest = store.slab.next(1, TopicFilter("a"), step.place, bound=store.last, **PLENTY)
    assert store.wanted("a", int.from_bytes(step.place, "big")) == rows_of(rest.batch)


# --- persistence --------------------------------------------------------------------


def test_reopening_finds_it_on_disk(open_rocksdb: Callable[[], Engine]) -> None:
    """Split, mixed and cut batches, deletes, and streams that stay the same."""
    store = Store(open_rocksdb())
    known: dict[str, int] = {}
    for number in range(3):
        store.put(messages(["a", "b", "c/d"], 900))
        store.put(messages([f"t/{n}/x" for n in range(60)], 200))
        store.put(messages([f"bus-{number}-{n}" for n in range(9)], 50, 2_000))
        store.delete("a", START + 100 * number, store.last - 100)
        store.engine.close()
        store.engine = open_rocksdb()
        store.reopen()
        topics = {message.topic for _, message in store.rows}
        assert known == {topic: store.stream(topic) for topic in known}
        known = {topic: store.stream(topic) for topic in topics}
        for stream in (ALL, *known.values()):
            store.check(stream=stream, limit=400)
        assert (len(store.rows), []) == store.verified()
    store.engine.close()


def test_a_generation_inherits_the_structure() -> None:
    """The next generation begins with the learned wildcards, and none of the streams."""
    store = Store(options=BlockOptions(thresholds=(9, 2)))
    store.put(messages([f"t/{number}" for number in range(5)], 5))
    layout, write = BlockLayout(store.options), WriteBatch()
    layout.create(store.engine, SHARD, GENERATION + 1, store.slab, write)
    store.engine.write(write)
    child = layout.open(store.engine, SHARD, GENERATION + 1)
    assert isinstance(child, BlockSlab)
    assert (0, 4) == (child.info().streams, child.info().details["trie nodes"])
    assert "t/+" == child.trie.pattern(child.trie.learn("t/0"))
    first = WriteBatch()
    layout.create(store.engine, SHARD, 1, None, first)
    assert not first


def test_a_failed_write_is_made_up_for() -> None:
    """The next batch carries the names and the structure that the lost one would have stored."""
    store = Store()
    lost, kept = messages(["new/1", "new/2"], 4), messages(["new/2", "newer"], 4)
    batch = MessageBatch.from_messages(lost)
    store.slab.store(batch.placed(np.arange(4, dtype=np.uint64), Constant(0, 4), SHARD), WriteBatch())
    store.put(kept)
    store.reopen()
    store.check()
    assert (4, []) == store.verified()


# --- damage -------------------------------------------------------------------------


def rewrite(store: Store, last: int, change: Callable[[bytes], bytes | None]) -> None:
    """Write around the slab: change the block that ends at a position."""
    key = GENERATION, 0, last
    value = store.engine.get(DATA, key)
    assert value is not None
    changed, write = change(value), WriteBatch()
    if changed is None:
        write.delete(DATA, key)
    else:
        write.put(DATA, key, changed)
    store.engine.write(write)


def test_damage_is_named_and_the_rest_is_readable(store: Store) -> None:
    """Reading stops at it with its place; what lies around it is there."""
    lasts = []
    for _ in range(3):
        store.put(messages(["a", "b"], 600))
        lasts.append(store.last)
    rewrite(store, lasts[1], lambda value: value[:-1] + bytes((value[-1] ^ 1,)))
    place = f"shard {SHARD}, generation {GENERATION}, block that ends at position {lasts[1]}"
    with pytest.raises(CorruptionError, match=place) as caught:
        store.check()
    assert place == caught.value.place
    store.check(bound=lasts[0])
    store.check(first=lasts[1] + 1)
    assert (1_500, [place]) == (store.verified()[0], [damage.place for damage in store.verified()[1]])


@pytest.mark.parametrize("lost", ["names", "learned topics"])
def test_deletes_and_merges_name_the_place_of_what_is_lost(store: Store, lost: str) -> None:
    """They look for names and streams outside of any block."""
    store.put(messages(["a", "b"], 10))
    name = encode_generation(GENERATION) + b"\x10"
    write = WriteBatch()
    for key in [key for chunk in store.engine.scan(META) for key, _ in chunk]:
        if (lost == "names") == key.startswith(name):
            write.delete(META, key)
    store.engine.write(write)
    store.reopen()
    works: list[Iterator[Any]] = [store.slab.compact(store.last, whole=True)]
    if lost == "names":  # a delete of all streams asks for none
        works.append(store.slab.delete(TopicFilter("a"), 0, store.last))
    for work in works:
        with pytest.raises(CorruptionError) as told:
            list(work)
        assert told.value.place.startswith(f"shard {SHARD}, generation {GENERATION}, ")


def test_a_block_of_a_newer_version(store: Store) -> None:
    """Readers say that it is newer; verify goes on behind it."""
    store.put(messages(["a"], 10))
    rewrite(store, store.last, lambda value: b"\2" + value[1:])
    damaged = store.last
    store.put(messages(["a"], 5))
    with pytest.raises(NewerFormatError, match="version 2") as told:
        store.check()
    assert f"shard {SHARD}, generation {GENERATION}, block that ends at position {damaged}" == told.value.place
    good, damages = store.verified()
    assert (5, 1) == (good, len(damages))
    assert str(damaged) in damages[0].place


@pytest.mark.parametrize("change", ["positions", "topics", "unknown topic", "unknown client", "stream", "overlap"])
def test_verify_checks_what_blocks_hold(store: Store, change: str) -> None:
    """A block may be whole and yet not be what the slab would have written."""
    store.put(messages(["a", "b"], 600))
    block = store.blocks()[0]
    columns, stream, base = block.columns(), block.stream, block.base
    match change:
        case "positions":
            order = np.array([0, 2, 1, *range(3, block.rows)])
            columns = replaced(columns, positions=columns.positions[order])
        case "topics":
            columns = replaced(columns, topics=Constant(1, block.rows))
        case "unknown topic":
            columns = replaced(columns, topics=Constant(7, block.rows))
        case "unknown client":
            columns = replaced(columns, client_ids=Constant(7, block.rows))
        case "stream":
            stream = 2
        case _:
            store.put(messages(["a"], 3))
            block = store.blocks()[-1]
            columns, base = block.columns(), block.base - 100
    write = WriteBatch()
    seed = block_seed(block.last, SHARD << 32 | GENERATION)
    value = encode_block(columns, stream, base, seed, Compressor("none", 0))
    write.put(DATA, (GENERATION, 0, block.last), value)
    store.engine.write(write)
    assert [f"block that ends at position {block.last}"] == [d.place.split(", ")[-1] for d in store.verified()[1]]


def replaced(columns: Any, **change: Any) -> Any:
    return type(columns)(**{name: getattr(columns, name) for name in columns.__struct_fields__} | change)


def test_verify_checks_names(store: Store) -> None:
    """Topics and client ids, in the engine rather than in memory."""
    store.put(messages(["a", "b"], 6))
    for kind in (0x10, 0x20):
        write = WriteBatch()
        write.put(META, encode_generation(GENERATION) + bytes((kind, 0, 0, 0, 1)), bytes(4) + b"other")
        store.engine.write(write)
    assert {"topic names", "client id names"} == {damage.place.split(", ")[-1] for damage in store.verified()[1]}


# --- at any moment ------------------------------------------------------------------


class Interleaved(MemoryEngine):
    """Does something else before or after one of the things that it is asked for."""

    def __init__(self) -> None:
        super().__init__(KEYSPACES)
        self._left = -1
        self._action: Callable[[], object] = bool

    def arm(self, moment: int, action: Callable[[], object]) -> None:
        """Do something when so many moments have passed."""
        self._left, self._action = moment, action

    def disarm(self) -> bool:
        """Say whether it was done."""
        done, self._left = self._left < 0, -1
        return done

    def _moment(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._action()

    def get(self, keyspace: Keyspace, key: Key) -> bytes | None:
        self._moment()
        value = super().get_many(keyspace, [key])[0]
        self._moment()
        return value

    def scan(self, *arguments: Any, **options: Any) -> Iterator[list[tuple[Key, bytes]]]:
        self._moment()
        for chunk in super().scan(*arguments, **options):
            self._moment()
            yield chunk

    def snapshot(self) -> Snapshot:
        self._moment()
        view = super().snapshot()
        self._moment()
        return view


def interleaved(merged: int) -> tuple[Store, Interleaved]:
    """Return a slab of four batches, the first of which are in segments."""
    engine = Interleaved()
    store = Store(engine)
    for number in range(4):
        store.put(messages(["a", "b", "c"], 25 + number))
        if number + 1 == merged:
            store.compact()
    return store, engine


READS: list[dict[str, Any]] = [
    {},
    {"limit": 7},
    {"limit": 1, "first": START + 40, "bound": START + 70},
    {"limit": 20, "first": START + 80},
    {"topic_filter": "b", "limit": 7},
    {"topic_filter": "b", "stream": 2},
]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("merged", [0, 2, 4])
@pytest.mark.parametrize("reads", READS, ids=range(len(READS)))
def test_a_merge_at_any_moment_of_a_read(reads: dict[str, Any], merged: int) -> None:
    """The reader gets everything, once and in order."""
    moment, done = 0, True
    while done:
        store, engine = interleaved(merged)
        if merged == 4:
            store.put(messages(["a", "b"], 10))
        engine.arm(moment, store.compact)
        store.check(**reads)
        done, moment = engine.disarm(), moment + 1
    assert moment >= 3


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("merged", [0, 2, 4])
@pytest.mark.parametrize("limit", [4, 7, 30, 1_000])
def test_a_delete_at_any_moment_of_a_read(limit: int, merged: int) -> None:
    """What isn't deleted comes once and in order; what is, in no call that began after the delete returned."""
    moment, done = 0, True
    while done:
        store, engine = interleaved(merged)
        everything, deletes = store.wanted(), list[int]()
        engine.arm(moment, lambda store=store, deletes=deletes: deletes.append(store.delete("a")))  # type: ignore[misc]
        place, exhausted, found = bytes(8), False, list[Row]()
        while not exhausted:
            began_behind = bool(deletes)
            step = store.slab.next(ALL, TopicFilter("#"), place, bound=store.last, **{**PLENTY, "limit": limit})
            rows = rows_of(step.batch)
            assert not (began_behind and any(message.topic == "a" for _, message in rows))
            found += rows
            place, exhausted = step.place, step.exhausted
        done, moment = engine.disarm(), moment + 1
        left = [row for row in everything if row[1].topic != "a" or row in found]
        assert left == found
        store.check(limit=limit)
    assert moment >= 3


# --- threads ------------------------------------------------------------------------


def test_readers_run_beside_the_writer() -> None:
    """They see all of what was committed before they began, in order, and nothing behind their bound."""
    store, source = Store(), random.Random(1)
    batches = [messages([f"t{n % 7}", "a", "b"], 60 if n % 5 else 900) for n in range(60)]
    committed: list[int] = [START]

    def read() -> None:
        count = len(committed) - 1
        bound = committed[count]
        topic = source.choice(["#", "a", "+", "t3"])
        expected = sum(TopicFilter(topic).matches(m.topic) for batch in batches[:count] for m in batch)
        positions = []
        for stream in store.slab.cover(TopicFilter(topic)):
            calls = store.read(topic, bound=bound, stream=stream, limit=source.choice([50, 1_000]))
            positions += [at for at, _ in concat(calls)]
        assert sorted(set(positions)) == positions
        assert expected <= len(positions)
        assert not positions or positions[-1] <= bound

    with Beside(read, read):
        for batch in batches:
            store.put(batch)
            committed.append(store.last)
    store.check()


def test_readers_run_beside_a_delete() -> None:
    """What is not deleted is always there, once."""
    store = Store()
    for number in range(60):
        store.put(messages(["keep", "go"], 20 if number % 3 else 600))
    kept = store.wanted("keep")

    def read(limit: int) -> None:
        found = concat(store.read(limit=limit))
        assert kept == [row for row in found if row[1].topic == "keep"]

    with Beside(lambda: read(100), lambda: read(5_000)):
        for first in range(START, store.last + 1, 2_000):
            store.delete("go", first, min(first + 1_999, store.last))
    assert kept == store.rows
    store.check()


def test_picked_rows_are_joined_up_to_the_limit(store: Store) -> None:
    """A narrow filter's call goes on as long as a whole block more would fit, however few rows of each it wants."""
    for _ in range(20):
        store.put(messages(["a", "b", "c", "d"], 400))
    assert [2_000] == list(map(len, store.read("b")))
    assert [700, 700, 600] == list(map(len, store.read("b", limit=1_000)))
    assert store.wanted("b") == concat(store.read("b", limit=1_000))


def test_picked_rows_count_their_own_bytes(store: Store) -> None:
    """Not those of the blocks they were picked out of."""
    for _ in range(4):
        store.put(messages(["a", "b"], 400, size=100))
    assert [400, 400] == list(map(len, store.read("b", limit_bytes=30_000)))
