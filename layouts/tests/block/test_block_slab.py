"""Tests of the block slab: how batches become blocks, the cost of reads and deletes, and verification."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import Constant
from topicstore.contract.engine import DATA, KEYSPACES, META, encode_generation
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import ReadLimits
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance import LayoutSubject
from topicstore_conformance.layout.fixtures import GENERATION, SHARD, START, Reader, Stored, numbered, rows_of
from topicstore_layouts.block import batch_blocks, compaction, reading
from topicstore_layouts.block.compression import Compressor
from topicstore_layouts.block.format import MIXED, Block, block_seed, encode_block
from topicstore_layouts.block.layout import BlockLayout, BlockOptions
from topicstore_layouts.block.slab import BlockSlab
from topicstore_layouts.shared import name_table

ALL = 0


def with_options(**options: Any) -> LayoutSubject:
    layout = BlockLayout(BlockOptions(**{"thresholds": (9, 9, 0), **options}))
    return LayoutSubject(make=lambda: layout, capabilities={"position_order"})


@pytest.fixture
def stored() -> Stored:
    made = Stored(with_options(), MemoryEngine(KEYSPACES))
    made.create()
    return made


def slab_of(stored: Stored) -> BlockSlab:
    assert isinstance(stored.slab, BlockSlab)
    return stored.slab


def blocks(stored: Stored) -> list[Block]:
    """Return the blocks that are not merged."""
    return [
        Block(value, last, block_seed(last, SHARD << 32 | generation))
        for chunk in stored.engine.scan(DATA)
        for (generation, end, last), value in chunk
        if not end
    ]


def shapes(stored: Stored) -> list[tuple[int, int]]:
    """Return the stream and the number of rows of each block that is not merged."""
    return [(block.stream, block.rows) for block in blocks(stored)]


def calls(stored: Stored, topic_filter: str = "#", stream: int = ALL, **limits: Any) -> list[int]:
    """Return the number of rows that each call of a reader returned."""
    reader = Reader(stored, stream, topic_filter)
    reader.read(stored.last, **limits)
    return reader.calls[:-1]


# --- how batches become blocks ------------------------------------------------------


def test_few_streams_with_many_rows_are_split(stored: Stored) -> None:
    """A batch of few streams with many rows becomes a block per stream, and is read in order of position."""
    stored.put(numbered(["a", "b", "c"], 900))
    assert [(1, 300), (2, 300), (3, 300)] == shapes(stored)
    assert {START + 1} == {block.base for block in blocks(stored)}
    for limit in (1, 7, 299, 300, 301, 899, 900, 901):
        stored.check(limit=limit)
    assert [900] == calls(stored)


def test_many_streams_with_few_rows_share_a_block(stored: Stored) -> None:
    """Streams with few rows share one block, and each stream can be read from it."""
    stored.put(numbered(["a", "b", "c"], 767))
    assert [(MIXED, 767)] == shapes(stored)
    assert [256, 256, 255] == [len(rows) for rows in stored.streams_of("#").values()]
    for topic in "abc":
        stored.check(topic, limit=10)


def test_streams_are_numbered_in_order_of_first_use(stored: Stored) -> None:
    """The numbers of streams depend only on the stored messages, not on the topics that the process knew before."""
    topics = [f"first use {number}" for number in range(5)]
    MessageBatch.from_messages(numbered(topics[::-1], 100))
    stored.put(numbered(topics, 100))
    assert topics == [slab_of(stored).trie.pattern(stream) for stream in range(1, 6)]


def test_one_stream_is_never_mixed(stored: Stored) -> None:
    """A batch of one stream becomes a block of that stream, with one topic or with several."""
    stored.put(numbered(["a/b/1"], 1))
    stored.put(numbered([f"a/b/{number}" for number in range(50)], 50))
    assert {1} == {block.stream for block in blocks(stored)}
    assert "a/b/+" == slab_of(stored).trie.pattern(1)


def test_streams_behind_each_other_are_read_apart(stored: Stored) -> None:
    """If a block's positions don't interleave with other blocks of its batch, it is read separately."""
    stored.put([*numbered(["a"], 300), *numbered(["b", "c"], 600)])
    assert [(1, 300), (2, 300), (3, 300)] == shapes(stored)
    Reader(stored, ALL, "#").step(stored.last, limit=300)
    assert (1, 300) == (stored.slab.counters.visited, stored.slab.counters.rows)
    for limit in (100, 301, 2_000):
        stored.check(limit=limit)


def test_large_batches_are_cut_by_rows(stored: Stored) -> None:
    """A large batch is divided into parts of bounded row counts, which count as batches of their own."""
    stored.put(numbered(["a"], 20_000))
    assert [8_192, 8_192, 3_616] == [block.rows for block in blocks(stored)]
    assert 3 == len({block.base for block in blocks(stored)})
    stored.check(first=START + 8_192, limit=3_000)


def test_large_batches_are_cut_by_bytes(stored: Stored) -> None:
    """A block has at most a megabyte of payloads, or a single larger payload."""
    sizes = [600_000, 600_000, 400_000, 3_000_000, 1, 1_048_576, 0, 1]
    stored.put([Message("a", bytes(size)) for size in sizes])
    assert [1, 2, 1, 1, 2, 1] == [block.rows for block in blocks(stored)]
    stored.check()


def test_each_part_of_a_large_batch_has_blocks_of_its_own(stored: Stored) -> None:
    """Each part of a divided batch has a block for each of its streams, or a mixed block if these would be small."""
    stored.put([*numbered(["a", "b"], 8_192), *numbered(["c", "d", "e"], 700)])
    assert [(1, 4_096), (2, 4_096), (MIXED, 700)] == shapes(stored)
    for limit in (1_000, 5_000, 20_000):
        stored.check(limit=limit)
    stored.check("b", limit=1_000)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_codec(stored: Stored, compression: str) -> None:
    """Blocks that were written with one codec can be read with another one in the options."""
    stored.subject = with_options(compression=compression)
    stored.reopen()
    stored.put(numbered(["a", "b"], 700, 40))
    stored.subject = with_options()
    stored.reopen()
    stored.check()
    stored.delete("a")
    stored.check()


# --- reading ------------------------------------------------------------------------


def test_a_reader_with_a_small_limit_decodes_a_block_once(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is read in several calls with small limits is decoded once, and cached for all readers."""
    stored.put(numbered(["a", "b"], 600))
    opened = []

    class Counted(Block):
        __slots__ = ()

        def __init__(self, value: bytes, last: int, seed: int) -> None:
            opened.append(last)
            super().__init__(value, last, seed)

    monkeypatch.setattr(batch_blocks, "Block", Counted)
    assert [10] * 60 == calls(stored, limit=10)
    assert 2 == len(opened)
    stored.check("a", limit=10)
    assert 2 == len(opened)


def test_readers_with_small_limits_read_a_segment_once_each(stored: Stored) -> None:
    """Several readers with small limits each decode a segment once, because their rows are cached."""
    stored.put(numbered(["a", "b"], 600))
    stored.compact()
    readers = [Reader(stored, ALL, text) for text in ("#", "a", "b")]
    for _ in range(20):
        for reader in readers:
            assert 10 == len(reader.step(stored.last, limit=10).batch)
    assert 3 == stored.slab.counters.visited


def test_few_rows_of_many_segments_are_read_in_one_call(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that matches few rows of each segment is read in one call, from all segments and the blocks after them.

    A call reads as many rows as its limits allow, and the next one continues with the rows that were found.
    """
    monkeypatch.setattr(compaction, "SEGMENT_ROWS", 100)
    for _ in range(12):
        stored.put(numbered(["a", "b", "c/1", "c/2"], 100, size=50))
    stored.compact()
    stored.put(numbered(["a"], 10))
    stored.slab.counters.seeks = 0
    assert [310] == calls(stored, "a")
    assert 2 == stored.slab.counters.seeks  # a seek for the segments and a seek for the blocks
    stored.slab.counters.visited = 0
    assert [100, 100, 100, 10] == calls(stored, "a", limit=100)
    assert 12 + 1 == stored.slab.counters.visited
    assert [120, 120, 70] == calls(stored, "a", limit_bytes=6_000)
    for limit in (1, 7, 99):
        stored.check("c/1", limit=limit)


def test_large_frames_of_many_segments_are_not_held_together(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a call has read large frames, the call returns their rows, and the next call reads later segments."""
    monkeypatch.setattr(compaction, "SEGMENT_ROWS", 10)
    monkeypatch.setattr(reading, "_TOGETHER_BYTES", 250_000)
    source = random.Random(3)
    for _ in range(6):
        stored.put([Message("a", source.randbytes(10_000)) for _ in range(10)])
    stored.compact()
    assert [30, 30] == calls(stored, "a")
    stored.check("a", limit=7)


def test_a_kept_block_is_not_read_after_a_delete(stored: Stored) -> None:
    """After a delete, a reader in the middle of a cached block doesn't return the deleted rows."""
    stored.put(numbered(["a", "b"], 100))
    reader = Reader(stored, ALL, "#")
    reader.step(stored.last, limit=10)
    stored.delete("a")
    assert stored.wanted(first=START + 11) == reader.read(stored.last)


def test_a_reader_of_a_stream_passes_over_the_others(stored: Stored) -> None:
    """A reader of one stream skips blocks of other streams by their headers, and the counters show it."""
    for _ in range(5):
        stored.put(numbered(["a", "b"], 600))
    counters = stored.slab.counters
    assert (0, 0, 0, 0) == (counters.seeks, counters.visited, counters.skipped, counters.rows)
    stored.check("b")
    assert (5, 5, 1_500) == (counters.visited, counters.skipped, counters.rows)
    assert 3 == counters.seeks  # each call ends after two batches of 300 rows


def test_mixed_blocks_are_skipped_by_their_topics(stored: Stored) -> None:
    """A block of several streams without a matching topic is counted as skipped."""
    stored.put(numbered(["a", "b"], 10))
    stored.put(numbered(["a", "c"], 10))
    counters = stored.slab.counters
    assert [5] == calls(stored, "b")
    assert (1, 1, 5) == (counters.visited, counters.skipped, counters.rows)
    counters.skipped = 0
    assert [5] == calls(stored, stream=slab_of(stored).trie.learn("c"))
    assert 1 == counters.skipped


@pytest.mark.usefixtures("tiny_blocks")
def test_small_blocks_are_joined_up_to_what_is_enough(stored: Stored) -> None:
    """A call joins several small batches, up to a bounded number of rows."""
    for _ in range(10):
        stored.put(numbered(["a"], 4))
    assert [12, 12, 12, 4] == calls(stored, limit=1_000)
    assert [8] * 5 == calls(stored, limit=9)
    assert [1] * 40 == calls(stored, limit=1)


def test_readers_of_many_rows_get_large_batches(stored: Stored) -> None:
    """A reader that accepts 8,192 rows gets as many from unmerged blocks; its other limits can end a batch earlier."""
    for _ in range(50):
        stored.put(numbered(["a", "b"], 400))
    assert [8_400, 8_400, 3_200] == calls(stored, limit=32_768)
    assert [8_000, 8_000, 4_000] == calls(stored, limit=8_192)
    assert [800] * 25 == calls(stored, limit=8_191)
    assert [400] * 50 == calls(stored, limit=8_192, limit_bytes=100)


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("abcdef"), st.sampled_from("xyz"), st.integers(0, 2), st.binary(max_size=300)),
            min_size=1,
            max_size=12,
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("tiny_blocks")
def test_joined_blocks_have_the_rows_that_were_stored(batches: list[list[tuple[str, str, int, bytes]]]) -> None:
    """Joined blocks have the stored rows, as messages and as Arrow: constant columns or not, numbers or texts."""
    made = Stored(with_options(), MemoryEngine(KEYSPACES))
    made.create()
    for batch in batches:
        made.put([Message(t * 20 * (t > "d") + t, p, c * 30, qos) for t, c, qos, p in batch])
    at, found = made.slab.begin(ALL, TopicFilter("#"), 0), []
    while True:
        step = made.slab.next(ALL, TopicFilter("#"), at, ReadLimits(rows=1_000, bytes=1 << 20, bound=made.last))
        found.append(step.batch)
        at = step.place
        if step.exhausted:
            break
    stored_ = [message for _, message in made.rows]
    assert stored_ == [message for batch in found for message in batch.to_messages()]
    expected = pa.Table.from_batches([MessageBatch.from_messages(stored_).to_arrow()])
    assert expected.equals(pa.Table.from_batches([batch.to_arrow() for batch in found]).combine_chunks())


def test_rows_before_a_block_that_cannot_be_decoded_come_first(stored: Stored) -> None:
    """A block that can't be decoded despite its checksum raises an error with its name, after the rows before it."""
    for _ in range(3):
        stored.put(numbered(["a", "b"], 10))
    block = blocks(stored)[1]
    columns = replaced(block.columns(), topics=np.full(10, 7))
    seed = block_seed(block.last, SHARD << 32 | GENERATION)
    value = encode_block(columns, 0, block.base, seed, Compressor("none", 0))
    stored.replace(DATA, (GENERATION, 0, block.last), value)
    reader = Reader(stored, ALL, "#")
    assert 10 == len(reader.step(stored.last).batch)
    with pytest.raises(CorruptionError, match=f"block that ends at position {block.last}"):
        reader.step(stored.last)


def test_a_call_ends_at_its_deadline(stored: Stored) -> None:
    """A call whose deadline has passed still advances past one batch, with or without matching rows."""
    for number in range(6):
        stored.put(numbered(["a" if number == 5 else "b"], 2))
    assert [2] * 6 == calls(stored, deadline=0.0)
    assert [0, 0, 0, 0, 0, 2] == calls(stored, "a", deadline=0.0)
    assert [0, 0, 0, 0, 0, 2] == calls(stored, stream=slab_of(stored).trie.learn("a"), deadline=0.0)
    assert [12] == calls(stored, deadline=time.monotonic() + 600)


@pytest.mark.parametrize("filters", [["#"], ["b"], ["#", "b", "+"]])
def test_bounds_that_rise_and_fall_within_a_segment(stored: Stored, filters: list[str]) -> None:
    """Cached rows of a segment are used only within the positions that were examined, as bounds rise and fall."""
    stored.put(numbered(["a", "b", "c"], 200))
    stored.compact()
    stored.put(numbered(["a", "b"], 20))
    source = random.Random(5)
    for _ in range(150):
        text, first = source.choice(filters), START + source.randrange(220)
        bound, limit = START + source.randrange(1, 221), source.choice([3, 10, 50])
        reader = Reader(stored, ALL, text, first)
        for _ in range(3):
            at = int.from_bytes(reader.place, "big")
            found = rows_of(reader.step(bound, limit=limit).batch)
            expected = stored.wanted(text, at, bound)
            assert expected[: len(found)] == found
            assert len(found) == min(limit, len(expected)) or not reader.exhausted
            bound = min(bound + source.choice([-5, 0, 30]), stored.last)


def test_cover(stored: Stored) -> None:
    """`cover` returns the only stream that can match a filter, no stream for a topic never stored, or else ``ALL``."""
    stored.put(numbered(["a/1/x", "a/1/y", "b/1/x"], 9))
    expected = {"#": [ALL], "a/#": [1], "a/1/x": [1], "a/1/never": [], "c": [], "+/1/+": [ALL], "b/+/x": [2]}
    assert expected == {text: stored.slab.cover(TopicFilter(text)) for text in expected}
    assert ["a/1/+", "b/1/+"] == [info.pattern for info in stored.slab.streams(TopicFilter("#"))]


def test_info(stored: Stored) -> None:
    """`info` and `backlog` count streams, names, trie nodes and merged messages, even after deletes."""
    stored.put(numbered(["a/1/x", "a/1/y", "b"], 9))
    info = stored.slab.info()
    details = {"topics with numbers": 3, "client ids with numbers": 3, "trie nodes": 2 + 4, "merged messages": 0}
    assert (2, details) == (info.streams, info.details)
    assert 9 == stored.slab.backlog(9) == stored.compact()
    stored.put(numbered(["b"], 5))
    assert (9, 5) == (stored.slab.info().details["merged messages"], stored.slab.backlog(14))
    stored.delete("b")
    assert (6, 0) == (stored.slab.info().details["merged messages"], stored.slab.backlog(6))


def test_picked_rows_are_joined_up_to_the_limit(stored: Stored) -> None:
    """A call that selects few rows of each block continues as long as one more whole block would fit its limit.

    Once the topics of some blocks are in the index, it continues as long as one more block's selected rows would fit.
    """
    for _ in range(20):
        stored.put(numbered(["a", "b", "c", "d"], 400))
    assert [700, 1_000, 300] == calls(stored, "b", limit=1_000)
    assert [1_000, 1_000] == calls(stored, "b", limit=1_000)
    assert [2_000] == calls(stored, "b")
    stored.check("b", limit=1_000)


def test_picked_rows_count_their_own_bytes(stored: Stored) -> None:
    """A limit of bytes counts the selected rows, and not all rows of their blocks."""
    for _ in range(4):
        stored.put(numbered(["a", "b"], 400, size=100))
    assert [400, 400] == calls(stored, "b", limit_bytes=30_000)


# --- deleting -----------------------------------------------------------------------


def test_delete_by_topic(stored: Stored) -> None:
    """A delete removes whole blocks of a matching stream, and rewrites shared blocks without the matching rows."""
    stored.put(numbered(["a", "b"], 600))
    stored.put(numbered(["a", "b"], 20))
    assert 310 == stored.delete("a")
    assert [(2, 300), (MIXED, 10)] == shapes(stored)
    stored.check()


def test_deleted_last_rows_leave_the_key(stored: Stored) -> None:
    """A block keeps its key when its last rows are deleted, so that readers that stopped within it find it again."""
    stored.put(numbered(["a", "b"], 10))
    stored.put(numbered(["a"], 10))
    before = [(block.last, block.base, block.stream) for block in blocks(stored)]
    stored.delete("#", stored.last - 4, stored.last)
    stored.delete("#", stored.last - 14, stored.last - 10)
    assert before == [(block.last, block.base, block.stream) for block in blocks(stored)]
    for first in range(START, stored.last + 2):
        stored.check(first=first, limit=2)


def test_delete_goes_in_small_steps(stored: Stored) -> None:
    """Each step of a delete examines a few blocks, whether any row matches or not."""
    for number in range(150):
        stored.put(numbered(["a", "b"] if number < 100 else ["c"], 10))
    steps = list(stored.slab.delete(TopicFilter("a"), 0, stored.last))
    found = [(80, 16)] * 6 + [(20, 4)] + [(0, 0)] * 3
    assert found == [(step.messages, len(step.write.operations)) for step in steps]


# --- damage -------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["names", "learned topics"])
def test_deletes_and_merges_name_the_place_of_what_is_lost(stored: Stored, lost: str) -> None:
    """Deletes and merges that need lost names or learned topics raise an error that names the slab."""
    stored.put(numbered(["a", "b"], 10))
    name = encode_generation(GENERATION) + b"\x10"
    for keyspace, key, _ in stored.learned_pairs():
        if (lost == "names") == bytes(key).startswith(name):
            stored.replace(keyspace, key, None)
    stored.reopen()
    works: list[Iterator[Any]] = [stored.slab.compact(stored.last, whole=True)]
    if lost == "names":  # a delete by the filter ``#`` doesn't look up streams
        works.append(stored.slab.delete(TopicFilter("a"), 0, stored.last))
    for work in works:
        with pytest.raises(CorruptionError) as told:
            list(work)
        assert told.value.place.startswith(f"shard {SHARD}, generation {GENERATION}, ")


def test_a_block_of_a_newer_version(stored: Stored) -> None:
    """A block of a newer version raises `NewerFormatError`, and verification continues after it."""
    stored.put(numbered(["a"], 10))
    damaged, ((keyspace, key, value),) = stored.last, stored.pairs()
    stored.replace(keyspace, key, b"\2" + value[1:])
    stored.put(numbered(["a"], 5))
    with pytest.raises(NewerFormatError, match="version 2") as told:
        stored.check()
    assert f"shard {SHARD}, generation {GENERATION}, block that ends at position {damaged}" == told.value.place
    good, damages = stored.verify()
    assert (5, 1) == (good, len(damages))
    assert str(damaged) in damages[0].place


@pytest.mark.parametrize("change", ["positions", "topics", "unknown topic", "unknown client", "stream", "overlap"])
def test_verify_checks_what_blocks_hold(stored: Stored, change: str) -> None:
    """Verification reports a block with a correct checksum whose content the slab would not have written."""
    stored.put(numbered(["a", "b"], 600))
    block = blocks(stored)[0]
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
            stored.put(numbered(["a"], 3))
            block = blocks(stored)[-1]
            columns, base = block.columns(), block.base - 100
    seed = block_seed(block.last, SHARD << 32 | GENERATION)
    value = encode_block(columns, stream, base, seed, Compressor("none", 0))
    stored.replace(DATA, (GENERATION, 0, block.last), value)
    assert [f"block that ends at position {block.last}"] == [d.place.split(", ")[-1] for d in stored.verify()[1]]


def replaced(columns: Any, **change: Any) -> Any:
    return type(columns)(**{name: getattr(columns, name) for name in columns.__struct_fields__} | change)


def test_verify_checks_names(stored: Stored) -> None:
    """Verification reads the names of topics and client ids from the engine, and not from memory."""
    stored.put(numbered(["a", "b"], 6))
    for kind in (0x10, 0x20):
        stored.replace(META, encode_generation(GENERATION) + bytes((kind, 0, 0, 0, 1)), bytes(4) + b"other")
    assert {"topic names", "client id names"} == {damage.place.split(", ")[-1] for damage in stored.verify()[1]}


def test_heads_need_no_payloads_and_only_matching_streams(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading heads decompresses no payloads, and decodes no block of a stream that the filter can't match."""
    for number in range(20):
        stored.put(numbered([f"a/{number % 4}/x"], 10, size=1_000))
    decoded: list[int] = []
    columns = Block._columns
    monkeypatch.setattr(Block, "payloads", None)
    monkeypatch.setattr(Block, "_columns", lambda block: decoded.append(block.last) or columns(block))  # type: ignore[func-returns-value]
    for text, rows in (("a/1/x", 50), ("a/1/#", 50), ("#", 200), ("b/#", 0)):
        decoded.clear()
        found = list(stored.slab.heads(TopicFilter(text), 0, stored.last))
        assert rows == sum(len(heads.positions) for heads in found)
        assert rows // 10 == len(set(decoded))


def test_heads_of_texts_and_numbers_are_joined(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are correct if the dictionary has only some of the names, and the others are stored as strings."""
    monkeypatch.setattr(name_table, "MOST_BYTES", 5 * (name_table.NAME_BYTES + sys.getsizeof("a/20")))
    for first in (0, 2, 9):
        stored.put(numbered([f"a/{number}" for number in range(first, first + 4)], 40))
    stored.put(numbered(["a/20"], 10))
    (heads,) = stored.slab.heads(TopicFilter("#"), 0, stored.last)
    assert [message.topic for _, message in stored.rows] == list(heads.topics)
    assert [message.client_id for _, message in stored.rows] == list(heads.client_ids)
