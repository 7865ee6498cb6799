"""Tests that the stored bytes of every version stay readable; the bytes below never change.

If one of these tests fails, the stored form has changed. Old databases must stay readable: a new form
needs a new version byte or a new layout, and the bytes below stay as they are.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from topicstore import Message, MessageBatch, Properties, TopicFilter
from topicstore.contract.checksums import add_checksum
from topicstore.contract.columns import Constant, to_list
from topicstore.contract.cursors import Cursor
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, STATE, Engine, Keyspace, WriteBatch
from topicstore.contract.layout import ReadLimits
from topicstore.contract.positions import COUNTER_BITS
from topicstore.shard.records import GenerationRecord, Tail, load_generations, load_tail, put_generation, put_tail
from topicstore.shard.zones import Zone, ZoneRecord, load_zones, put_zone
from topicstore_backends.memory import MemoryEngine
from topicstore_layouts.block.compression import Compressor
from topicstore_layouts.block.format import MIXED, Block, Columns, block_seed, encode_block, frame_seed
from topicstore_layouts.block.frames import FrameRows, encode_frame, open_frame
from topicstore_layouts.block.layout import BlockLayout, BlockOptions
from topicstore_layouts.block.slab import BlockSlab
from topicstore_layouts.reference import ReferenceLayout, ReferenceOptions
from topicstore_layouts.shared import name_table
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable, coded

FIRST = 1 << 60
TIME = FIRST >> COUNTER_BITS
GENERATION = 258


def columns(payloads: list[bytes], **other: Any) -> Columns:
    rows = len(payloads)
    plain: dict[str, Any] = {
        "positions": np.arange(rows, dtype=np.uint64) + np.uint64(FIRST),
        "topics": Constant(7, rows),
        "client_ids": Constant(0, rows),
        "qos": Constant(1, rows),
        "retain": Constant(False, rows),
        "timestamps": Constant(TIME, rows),
        "properties": Constant(None, rows),
    }
    return Columns(**{**plain, **other}, payloads=payloads, sizes=list(map(len, payloads)))


# --- blocks: header, checksum, head, payloads ---------------------------------------

# Constant columns, consecutive positions, and a constant timestamp.
PLAIN = columns([b"41.5", b"42.0"])
PLAIN_BYTES = (
    "01000000020000000300000013000000130000000d0000000000000000000010000000000000001078cc4735a9c28cf8"
    "98c00700010092cf000200000000000000c00492c40434312e35c40434322e30"
)

# Timestamps that equal the times in the positions, and a payload of more than 255 bytes.
OWN_TIMES = columns([b"", b"x" * 300], timestamps=[TIME, TIME])
OWN_TIMES_BYTES = (
    "0100000002000000030000000e0000000e0000003201000000000000000000100000000000000010e42551869d1da0fb"
    "98c007000100c0c0c40400002c0192c400c5012c"
) + "78" * 300

# Every column varies, with numbers of one, two and four bytes, gaps between positions, and properties. The key
# is 100 above the last position, and the batch began 5 positions before the block.
FULL = columns(
    [b"a", b"", b"bc"],
    positions=np.array([FIRST, FIRST + 1, FIRST + 300], dtype=np.uint64),
    topics=np.array([0, 256, 70_000], dtype=np.uint32),
    client_ids=np.array([1, 0, 1], dtype=np.uint32),
    qos=[0, 1, 2],
    retain=[True, False, True],
    timestamps=[1, 2**40, 0],
    properties=[
        None,
        Properties(),
        Properties(1, 3600, "text/plain", "reply/to", b"\0\xff", (("k", "v"), ("k", ""))),
    ],
)
FULL_BYTES = (
    "01000000030000000000000077000000770000000a000000fbffffffffffff0f0000000000000010adc080bc72af1ecb"
    "98c406000001002c01c40c000000000001000070110100c403010001c403000102c4030100019200c418010000000000"
    "00000000000000010000000000000000000093c096c0c0c0c0c0909601cd0e10aa746578742f706c61696ea87265706c"
    "792f746fc40200ff9292a16ba17692a16ba0c40301000293c40161c400c4026263"
)

# Compressed head and payloads.
LARGE = columns([b"payload"] * 200, topics=np.arange(200) % 2)
LZ4_BYTES = (
    "01020200c80000000000000018000000dc0000000b07000000000000000000100000000000000010dff13e1e7e1f297b"
    "6f98c0c4c800010200b6d092cf000200000000000000c007cfdc00c8c4077061796c6f61640900ffffffffffffed5079"
    "6c6f6164"
)
ZSTD_BYTES = (
    "01010100c80000000000000023000000dc0000000b07000000000000000000100000000000000010e31c511f4b81121b"
    "28b52ffd20dcd500009898c0c4c8000192cf000200000000000000c0070100c628570428b52ffd600b069d000060dc00"
    "c8c4077061796c6f61640100fcf22f49"
)

# Topics and client ids as text: each distinct text once, and an index for each row.
TEXTS = columns([b"a", b"", b"bc"], topics=coded(["é/1", "a", "é/1"]), client_ids=Constant("x", 3))
TEXTS_BYTES = (
    "01000000030000000000000028000000280000000a00000000000000000000100000000000000010a5b573f7e49dedd2"
    "98c09292a4c3a92f31a161c4030001009291a17800010092cf000200000000000000c0c40301000293c40161c400c402"
    "6263"
)

BLOCKS = {
    "texts": (TEXTS, TEXTS_BYTES, MIXED, FIRST, FIRST + 2),
    "plain": (PLAIN, PLAIN_BYTES, 3, FIRST, FIRST + 1),
    "own times": (OWN_TIMES, OWN_TIMES_BYTES, 3, FIRST, FIRST + 1),
    "full": (FULL, FULL_BYTES, MIXED, FIRST - 5, FIRST + 400),
    "lz4": (LARGE, LZ4_BYTES, MIXED, FIRST, FIRST + 199),
    "zstd": (LARGE, ZSTD_BYTES, MIXED, FIRST, FIRST + 199),
}


def rows_of(found: Columns) -> dict[str, list[Any]]:
    return {name: to_list(getattr(found, name)) for name in found.__struct_fields__}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_blocks_are_read(name: str) -> None:
    """A stored block decodes to the expected columns and header fields."""
    expected, stored, stream, base, last = BLOCKS[name]
    block = Block(bytes.fromhex(stored), last, block_seed(last, 0))
    assert rows_of(expected) == rows_of(block.columns())
    assert (len(expected.positions), stream, base, FIRST) == (block.rows, block.stream, block.base, block.first)


@pytest.mark.parametrize("name", ["plain", "own times", "full", "texts"])
def test_blocks_are_written(name: str) -> None:
    """An uncompressed block is encoded byte for byte; compressed bytes may differ between releases of a codec."""
    given, stored, stream, base, last = BLOCKS[name]
    assert stored == encode_block(given, stream, base, block_seed(last, 0), Compressor("none", 0)).hex()


# A frame in order of topic, whose positions are stored as differences, byte by byte. It is frame 3 of a segment
# that ends 400 after its first position.
FRAME = columns(
    [b"a", b"", b"bc"],
    positions=np.array([FIRST + 7, FIRST + 300, FIRST + 2], dtype=np.uint64),
    topics=coded(["a", "a", "é/1"]),
    client_ids=coded(["x", "", "x"]),
    timestamps=[TIME, TIME + 5, TIME],
)
FRAME_BYTES = (
    "0100000103000000050000004a0000004a0000000a000000000000000000001002000000000000107abebb443e627436"
    "98c4180525d60001fe0000ff0000ff0000ff0000ff0000ff0000ff9292a161a4c3a92f31c4030000019292a178a0c403"
    "000100010092cf0002000000000000c403000500c0c40301000293c40161c400c4026263"
)


# The same frame in version 2: topics apart from the other columns, and payloads in a section of their own.
FRAME_2_BYTES = (
    "0200000103000000050000000f0000000f0000002f0000002f0000000300000000000000000000100200000000000010"
    "f2167af92987154c02000000010201006100c3a92f310098c40605250000010092a27800c403000100010092cf000200"
    "0000000000c403000500c0c403010002919403000303616263"
)


@pytest.mark.parametrize("stored", [FRAME_BYTES, FRAME_2_BYTES])
def test_frames_are_read(stored: str) -> None:
    """A frame of either version is decoded under its key."""
    end = FIRST + 400
    block = open_frame(bytes.fromhex(stored), end, frame_seed(end, 3, 0))
    assert rows_of(FRAME) == rows_of(block.columns())
    assert (True, 3, 5, FIRST, FIRST + 2) == (block.frame, block.rows, block.stream, block.base, block.first)


def test_frames_are_written() -> None:
    """A frame is encoded byte for byte under its key, in version 2."""
    seed = frame_seed(FIRST + 400, 3, 0)
    assert FRAME_2_BYTES == encode_frame(FrameRows.of(FRAME), 5, FIRST, seed, Compressor("none", 0)).hex()


# --- the trie and names -------------------------------------------------------------

LEARNED = ["a/1", "é", "b/", "$SYS/x", "/".join(["a"] * 34)]
THRESHOLDS = (2, 0)
PATTERNS = ["a/+", "é", "+/+", "$SYS/+", "a/" + "+/" * 31 + "#"]
TRIE = [
    ("00000102010000000061", "793ed6d000000002"),
    ("0000010201000000022b", "1b96845900000003"),
    ("000001020200000003", "5725b9fb00000001"),
    ("000001020100000000c3a9", "2cbe878100000004"),
    ("0000010201000000002b", "bc54c97a00000005"),
    ("000001020200000004", "7eae0bed00000002"),
    ("0000010201000000052b", "a8232dc100000006"),
    ("000001020200000006", "3ccc377f00000003"),
    ("00000102010000000124535953", "317669f900000007"),
    ("0000010201000000072b", "51d3b2c800000008"),
    ("000001020200000008", "4a4d80bc00000004"),
    ("0000010201000000032b", "993d202800000009"),
    ("0000010201000000092b", "b03aab9e0000000a"),
    ("00000102010000000a2b", "5a227fb60000000b"),
    ("00000102010000000b2b", "fc8014730000000c"),
    ("00000102010000000c2b", "05b093d00000000d"),
    ("00000102010000000d2b", "dc5ac1fc0000000e"),
    ("00000102010000000e2b", "fcc2e4870000000f"),
    ("00000102010000000f2b", "e98c1e8e00000010"),
    ("0000010201000000102b", "bda1441600000011"),
    ("0000010201000000112b", "1fe794ef00000012"),
    ("0000010201000000122b", "d9ba54b100000013"),
    ("0000010201000000132b", "64aecbed00000014"),
    ("0000010201000000142b", "cd7ea10900000015"),
    ("0000010201000000152b", "9baf15b700000016"),
    ("0000010201000000162b", "fefd3ef100000017"),
    ("0000010201000000172b", "4c22393500000018"),
    ("0000010201000000182b", "0d5e5bd900000019"),
    ("0000010201000000192b", "0d30bd500000001a"),
    ("00000102010000001a2b", "20a94f300000001b"),
    ("00000102010000001b2b", "053bb50a0000001c"),
    ("00000102010000001c2b", "eac20fb00000001d"),
    ("00000102010000001d2b", "f88800e00000001e"),
    ("00000102010000001e2b", "7a8c100b0000001f"),
    ("00000102010000001f2b", "ec998f6000000020"),
    ("0000010201000000202b", "c41d192b00000021"),
    ("0000010201000000212b", "20b2b40300000022"),
    ("0000010201000000222b", "5b8cf86100000023"),
    ("0000010201000000232b", "6ca21d4b00000024"),
    ("0000010201000000242b", "354ef2fa00000025"),
    ("0000010201000000252b", "8370736500000026"),
    ("00000102010000002623", "ab22742f00000027"),
    ("000001020200000027", "b6ca613b00000005"),
]

NAMES = ["a/é", ""]
NAME_ENTRIES = [
    ("000001021000000000", "c94cb7ba00000003612fc3a9"),
    ("0000010211612fc3a9", "10935e0f00000000"),
    ("000001021000000001", "2b10e90900000000"),
    ("0000010211", "51de06c300000001"),
]


# The same names as one record of version 2; a record of names without streams; and the marker of stored texts.
NAME_RECORD = [("000001021000000001", "0ed2e1410292c408030000000000000092a4612fc3a9a0")]
CLIENT_RECORD = [("000001022000000000", "53f11e180292c40091a163")]
MARK = [("000001021100", "19954ec802")]


def lengths(names: list[str]) -> list[int]:
    """Return the stream of each name, which here is the number of its characters."""
    return list(map(len, names))


def put(engine: Engine, entries: list[tuple[str, str]], keyspace: Any = META) -> None:
    write = WriteBatch()
    for key, value in entries:
        write.put(keyspace, bytes.fromhex(key), bytes.fromhex(value))
    engine.write(write)


def hex_of(write: WriteBatch) -> list[tuple[str, str]]:
    return [(key.hex(), value.hex()) for _, key, value in write.operations if value is not None]


def test_the_trie_is_read() -> None:
    """A stored trie loads with its streams and patterns, and numbers new streams after the stored ones."""
    engine = MemoryEngine(KEYSPACES)
    put(engine, TRIE)
    trie = LearnedTopics.load(engine, GENERATION, THRESHOLDS)
    assert (len(PATTERNS), 40) == (len(trie), trie.nodes)
    assert PATTERNS == [trie.pattern(stream) for stream in range(1, 6)]
    assert [1, 2, 3, 4, 5] == [trie.learn(topic) for topic in LEARNED]
    assert [1, 2, 3, 5] == trie.match(TopicFilter("#"))
    assert 6 == trie.learn("new")


def test_the_trie_is_written() -> None:
    """Learning the topics writes the trie's edges in order of growth, and each stream at the end of its edges."""
    trie, write = LearnedTopics(GENERATION, THRESHOLDS), WriteBatch()
    for topic in LEARNED:
        trie.learn(topic)
    trie.save(write)
    assert TRIE == hex_of(write)


@pytest.mark.parametrize("stored", [NAME_ENTRIES, NAME_RECORD])
def test_names_are_read(stored: list[tuple[str, str]]) -> None:
    """A stored dictionary of either version returns its names and their streams, and continues its numbers."""
    engine = MemoryEngine(KEYSPACES)
    put(engine, stored)
    names = NameTable(engine, GENERATION, 0x10, lengths)
    assert NAMES == to_list(names.names(np.array([0, 1])))
    assert [3, 0] == names.streams(np.array([0, 1])).tolist()
    assert [1, 2, 0] == to_list(names.encode(["", "new", "a/é"]))


def test_names_are_written() -> None:
    """A dictionary writes the new names of a batch as one record, and a marker once it has stored a name as text."""
    engine = MemoryEngine(KEYSPACES)
    names, write = NameTable(engine, GENERATION, 0x10, lengths), WriteBatch()
    names.encode(NAMES)
    names.save(write)
    assert NAME_RECORD == hex_of(write)
    write = WriteBatch()
    clients = NameTable(engine, GENERATION, 0x20, lambda names: [0] * len(names))
    clients.encode(["c"])
    clients.save(write)
    assert CLIENT_RECORD == hex_of(write)


def test_the_mark_of_stored_texts_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full dictionary writes a marker when it stores a name as text; with the marker, no name counts as lacking."""
    monkeypatch.setattr(name_table, "MOST_BYTES", 0)
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    names = NameTable(engine, GENERATION, 0x10, lengths)
    assert names.lacks("a")
    names.encode(["a"])
    names.save(write)
    assert MARK == hex_of(write)
    put(engine, MARK)
    assert not NameTable(engine, GENERATION, 0x10, lengths).lacks("a")


# Topic 7, "t", of stream 1; client id 0, "c".
SLAB = [
    ("00000102010000000074", "43a4509c00000002"),
    ("000001020200000002", "b3aa1a6600000001"),
    ("000001021000000007", "3cf7e9870000000174"),
    ("000001021174", "8730ca3e00000007"),
    ("000001022000000000", "f07f13f50000000063"),
    ("000001022163", "1bce70c900000000"),
]


# The block PLAIN above, with the checksum for shard 0 and this generation.
SLAB_BLOCK = (
    "01000000020000000300000013000000130000000d00000000000000000000100000000000000010773adddaa8e84d1b"
    "98c00700010092cf000200000000000000c00492c40434312e35c40434322e30"
)


def test_a_slab_is_read() -> None:
    """A block slab reads a stored block with the names and the learned structure that the block needs."""
    engine = MemoryEngine(KEYSPACES)
    put(engine, SLAB)
    write = WriteBatch()
    write.put(DATA, (GENERATION, 0, FIRST + 1), bytes.fromhex(SLAB_BLOCK))
    engine.write(write)
    slab = BlockLayout(BlockOptions()).open(engine, 0, GENERATION)
    place = slab.begin(0, TopicFilter("t"), FIRST)
    assert FIRST.to_bytes(8, "big") == place
    step = slab.next(0, TopicFilter("t"), place, ReadLimits(rows=9, bytes=9, bound=FIRST + 9))
    assert [Message("t", payload, "c", 1, False, TIME) for payload in (b"41.5", b"42.0")] == step.batch.to_messages()


# Sixteen messages of two topics, stored as two batches and merged: the frame that the topics share, in both versions,
# the segment's index, and the total number of merged messages.
MERGED = [Message("é/1" if n % 4 == 3 else "a", b"%d" % n, "c", timestamp=TIME) for n in range(16)]
MERGED_OPTIONS = BlockOptions(compression="none", merged_compression="none")
MERGED_FRAME = (
    "010000011000000000000000b9000000b900000039000000000000000000001000000000000000100a3d91a50e981a89"
    "98c480000101020101020101020101f5040404000000000000000000000000ff000000000000000000000000000000ff"
    "000000000000000000000000000000ff000000000000000000000000000000ff000000000000000000000000000000ff"
    "000000000000000000000000000000ff000000000000000000000000000000ff0000009292a161a4c3a92f31c4100000"
    "00000000000000000000010101019291a163000000c0c0c41001010101010101010202020201010202dc0010c40130c4"
    "0131c40132c40134c40135c40136c40138c40139c4023130c4023132c4023133c4023134c40133c40137c4023131c402"
    "3135"
)
MERGED_FRAME_2 = (
    "0200000110000000000000000f0000000f00000033000000330000001600000000000000000000100000000000000010"
    "0bc52fd89e11ca7002000000010c04006100c3a92f310098c4100001010201010201010201010304040492a163000000"
    "c0c0c4100101010101010101020202020101020291941000161630313234353638393130313231333134333731313135"
)
MERGED_INDEX = (
    "019d9e4faa8df8c5520000005228b52ffd205215020034039acf10001bc40410000000c4080010c4080f0010c4080100"
    "00000200000092a161a4c3a92f31c4100000000000000000000000050046099ca502b80f8c3e0022"
)
INDEX_HEADER = 13
TOTAL = [("0000010230", "dbff384a10")]


def merged_slab() -> tuple[Engine, BlockSlab]:
    """Store the batches and merge them; return the engine and the slab."""
    engine = MemoryEngine(KEYSPACES)
    slab = BlockLayout(MERGED_OPTIONS).open(engine, 0, GENERATION)
    assert isinstance(slab, BlockSlab)
    for start in (0, 10):
        batch = MessageBatch.from_messages(MERGED[start : start + 10])
        positions = np.arange(start, start + len(batch), dtype=np.uint64) + np.uint64(FIRST)
        write = WriteBatch()
        slab.store(batch.placed(positions, batch.timestamps, 0), write)
        engine.write(write)
        slab.committed()
    for step in slab.compact(FIRST + 15, whole=True):
        engine.write(step.write)
    return engine, slab


@pytest.mark.parametrize("frame", [MERGED_FRAME, MERGED_FRAME_2])
def test_a_merged_slab_is_read(frame: str) -> None:
    """A block slab reads a stored segment by the filter ``#`` and by topic, and verifies it."""
    engine, _ = merged_slab()
    write = WriteBatch()
    write.put(DATA, (GENERATION, FIRST + 15, 0), bytes.fromhex(frame))
    write.put(INDEX, (GENERATION, FIRST + 15, 0), bytes.fromhex(MERGED_INDEX))
    engine.write(write)
    put(engine, TOTAL)
    slab = BlockLayout(BlockOptions()).open(engine, 0, GENERATION)
    for text, expected in (("#", MERGED), ("é/+", MERGED[3::4])):
        step = slab.next(0, TopicFilter(text), bytes(8), ReadLimits(rows=99, bytes=99, bound=FIRST + 15))
        assert expected == step.batch.to_messages()
    assert [16] == list(slab.verify(FIRST + 15))
    assert 4 == slab.backlog(20)


def test_a_merged_slab_is_written() -> None:
    """A merge writes the frame and the index byte for byte, except for the index's compression."""
    engine, _ = merged_slab()
    assert [((GENERATION, FIRST + 15, 0), MERGED_FRAME_2)] == hexed(engine, DATA)
    ((key, index),) = hexed(engine, INDEX)
    assert (GENERATION, FIRST + 15, 0) == key
    assert index_body(MERGED_INDEX) == index_body(index)
    assert TOTAL == [(key.hex(), value) for key, value in hexed(engine, META) if key[4:] == b"\x30"]


def hexed(engine: Engine, keyspace: Keyspace) -> list[tuple[Any, str]]:
    return [(key, value.hex()) for chunk in engine.scan(keyspace) for key, value in chunk]


def index_body(stored: str) -> tuple[str, bytes]:
    """Return the version and the size of an index, and its decompressed body."""
    value = bytes.fromhex(stored)
    return stored[:2] + stored[18:26], zstandard.decompress(value[INDEX_HEADER:])


# --- the reference layout -----------------------------------------------------------

REFERENCE = [
    Message("a/é", b"\0\xff", "c", 2, True, 2**40, Properties(1, 3600, "t", "r", b"x", (("k", "v"),))),
    Message("a", b"", "", 0, False, 0, None),
]
REFERENCE_BYTES = [
    ("013c68a9e77aa5415797a4612fc3a9c40200ffa16302c3cf00000100000000009601cd0e10a174a172c401789192a16ba176"),
    "019db24362f5b7cffe97a161c400a000c200c0",
]


def test_reference_values_are_read_and_written() -> None:
    """The reference layout stores one value per message under its position, byte for byte."""
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    slab = ReferenceLayout(ReferenceOptions()).open(engine, 0, GENERATION)
    positions = np.array([FIRST, FIRST + 1], dtype=np.uint64)
    batch = MessageBatch.from_messages(REFERENCE)
    slab.store(batch.placed(positions, batch.timestamps, 0), write)
    keys = [(GENERATION, 0, FIRST), (GENERATION, 0, FIRST + 1)]
    entries = [(DATA, key, bytes.fromhex(value)) for key, value in zip(keys, REFERENCE_BYTES, strict=True)]
    assert entries == write.operations
    engine.write(write)
    step = slab.next(0, TopicFilter("#"), bytes(8), ReadLimits(rows=9, bytes=9, bound=FIRST + 9))
    assert REFERENCE == step.batch.to_messages()


# --- the logical layer --------------------------------------------------------------

TAIL = Tail(last_position=FIRST, last_time=5, lifted=1, messages=300, live_bytes=70_000, writes=9)
ZONED = msgspec.structs.replace(TAIL, zone=Zone(FIRST - 9, 300, ((3, 4), (70_000_000, 70_000_005))))
GENERATIONS = [
    GenerationRecord(
        number=2,
        layout="block",
        format=1,
        options={"thresholds": [100, 20], "compression": "lz4", "level": 1},
        created=2**50,
        first_position=FIRST,
    ),
    GenerationRecord(
        number=258,
        layout="reference",
        format=2,
        options={},
        created=1,
        first_position=2,
        sealed=3,
        last_position=4,
        dropped=True,
        messages=5,
        live_bytes=6,
    ),
    GenerationRecord(
        version=2,
        number=3,
        layout="block",
        format=1,
        options={},
        created=1,
        first_position=2,
        sealed=3,
        last_position=4,
        messages=5,
        archive="../cold",
    ),
]
NUMBER = attrgetter("number")
STATE_ENTRIES = [
    (
        "007461696c",
        "b58c1eaf9801cf10000000000000000501cd012cce000111700993cf0ffffffffffffff7cd012c9292030492ce042c1d80ce042c1d85",
    ),
    (
        "0067656e65726174696f6e00000002",
        (
            "422845019d0102a5626c6f636b0183aa7468726573686f6c6473926414ab636f6d7072657373696f6ea36c7a34a56c65"
            "76656c01cf0004000000000000cf1000000000000000c0c0c20000c0"
        ),
    ),
    ("0067656e65726174696f6e00000102", "61fecf6e9d01cd0102a97265666572656e6365028001020304c30506c0"),
    ("0067656e65726174696f6e00000003", "67bed2279d0203a5626c6f636b018001020304c20500a72e2e2f636f6c64"),
]

ZONE_ENTRIES = [
    (
        "007a6f6e65000000021000000000000000",
        "3eed4a529401cf1000000000000000cf1000000000000009929203049209cf0004000000000000",
    ),
    ("007a6f6e65000001020000000000000009", "d575a7c39401090890"),
]


def test_tails_and_generations_are_read() -> None:
    """Records of shards and generations decode to all fields, and fields appended by a later version are ignored."""
    engine = MemoryEngine(KEYSPACES)
    put(engine, STATE_ENTRIES, STATE)
    assert (ZONED, sorted(GENERATIONS, key=NUMBER)) == (load_tail(engine), list(load_generations(engine)))
    key = STATE_ENTRIES[0][0]
    longer = msgspec.msgpack.encode([*msgspec.structs.astuple(ZONED), "more"])
    put(engine, [(key, add_checksum(bytes.fromhex(key), longer).hex())], STATE)
    assert load_tail(engine) == ZONED


def test_tails_without_a_zone_are_read() -> None:
    """A tail record of an older version, which had no zones, loads without a zone."""
    engine = MemoryEngine(KEYSPACES)
    put(engine, [("007461696c", "081c35659701cf10000000000000000501cd012cce0001117009")], STATE)
    assert load_tail(engine) == TAIL


def test_zones_are_read_and_written() -> None:
    """A zone is stored under its generation and first position, and loads for that generation only."""
    zones = [ZoneRecord(first=FIRST, last=FIRST + 9, spans=((3, 4), (9, 2**50))), ZoneRecord(first=9, last=8, spans=())]
    write, engine = WriteBatch(), MemoryEngine(KEYSPACES)
    for generation, zone in zip((2, 258), zones, strict=True):
        put_zone(write, generation, zone)
    assert ZONE_ENTRIES == hex_of(write)
    put(engine, ZONE_ENTRIES, STATE)
    assert [[zones[0]], [zones[1]], []] == [list(load_zones(engine, generation)) for generation in (2, 258, 3)]


def test_tails_without_the_number_of_writes_are_read() -> None:
    """A tail record of an older version, which didn't count writes, loads with zero writes."""
    engine = MemoryEngine(KEYSPACES)
    put(engine, [("007461696c", "9fb25ea49601cf10000000000000000501cd012cce00011170")], STATE)
    assert msgspec.structs.replace(TAIL, writes=0) == load_tail(engine)


def test_tails_and_generations_are_written() -> None:
    """Records of shards and generations are encoded byte for byte, under keys that begin with a zero byte."""
    write = WriteBatch()
    put_tail(write, ZONED)
    for record in GENERATIONS:
        put_generation(write, record)
    assert STATE_ENTRIES == hex_of(write)


def test_cursors_are_read_and_written() -> None:
    """A cursor is encoded and decoded byte for byte, because programs keep cursors for years."""
    cursor = Cursor(b"0123456789abcdef", 1, 2, 3, "fleet/+/#", bytes(8))
    stored = "0133724144452dacd496c41030313233343536373839616263646566010203a9666c6565742f2b2f23c4080000000000000000"
    assert stored == cursor.to_bytes().hex()
    assert cursor == Cursor.from_bytes(bytes.fromhex(stored))
