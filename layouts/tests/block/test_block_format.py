"""Tests of the stored form of blocks: round trips, and detection of damage and hostile bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import MessageBatch, Properties
from topicstore.contract.columns import Constant, to_list
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.positions import COUNTER_BITS, MAX_TIME
from topicstore_conformance.layout.damage import broken
from topicstore_conformance.oracle.strategies import properties, topics
from topicstore_layouts.block.compression import CODECS, Compressor, decompress
from topicstore_layouts.block.format import (
    MIXED,
    Block,
    Columns,
    block_seed,
    encode_block,
    encode_message,
    frame_seed,
)
from topicstore_layouts.block.layout import BlockOptions
from topicstore_layouts.block.payloads import PackedPayloads
from topicstore_layouts.shared.name_table import coded

HEADER = struct.Struct("<BBBBIIIIIQQ")
VERSION, HEAD_CODEC, PAYLOAD_CODEC, FLAGS, ROWS, STREAM, HEAD_SIZE, RAW_HEAD, RAW_PAYLOADS, BASE, FIRST = range(11)
BODY = HEADER.size + 8
SLAB = 3 << 32 | 7
FIRST_END = 1 << 60

every_codec = pytest.mark.parametrize("codec", CODECS)
codecs = st.sampled_from(list(CODECS))


def rows_of(columns: Columns) -> dict[str, list[Any]]:
    """Return every column of some rows as a list of Python objects."""
    return {name: to_list(getattr(columns, name)) for name in columns.__struct_fields__}


def encoded(columns: Columns, codec: str = "none", *, stream: int = 5, gap: int = 0, above: int = 0) -> bytes:
    """Encode columns as a block under a key that lies ``above`` their last position.

    The block's batch began ``gap`` positions before the first row.
    """
    base, last = int(columns.positions[0]) - gap, int(columns.positions[-1]) + above
    return encode_block(columns, stream, base, block_seed(last, SLAB), Compressor(codec, 3))


def opened(value: bytes, last: int) -> Block:
    """Decode a block under the key that ends in ``last``."""
    return Block(value, last, block_seed(last, SLAB))


def columns_of(payloads: list[bytes], first: int = 1 << 60, **other: Any) -> Columns:
    """Return plain columns with these payloads."""
    rows = len(payloads)
    plain: dict[str, Any] = {
        "positions": np.arange(rows, dtype=np.uint64) + np.uint64(first),
        "topics": np.arange(rows, dtype=np.uint32),
        "client_ids": Constant(0, rows),
        "qos": Constant(1, rows),
        "retain": Constant(False, rows),
        "timestamps": Constant(first >> COUNTER_BITS, rows),
        "properties": Constant(None, rows),
    }
    return Columns(**{**plain, **other}, payloads=payloads, sizes=list(map(len, payloads)))


# --- round trips --------------------------------------------------------------------


@st.composite
def formed(draw: st.DrawFn, source: random.Random, rows: int, highest: int, *, kind: type = int) -> Any:
    """Return a column of numbers up to ``highest``, drawn in any form: constant, array or list."""
    form = draw(st.sampled_from(["constant", "same", "array", "list"]))
    if form == "constant":
        return Constant(kind(draw(st.integers(0, highest))), rows)
    limit = draw(
        st.sampled_from([number for number in (1, 255, 256, 65_535, 65_536, 2**32 - 1) if number < highest] + [highest])
    )
    values = [kind(source.choice([0, limit, source.randint(0, limit)])) for _ in range(rows)]
    if form == "same":
        values = values[:1] * rows
    return np.array(values) if form == "array" else values


@st.composite
def names(draw: st.DrawFn, source: random.Random, rows: int) -> Any:
    """Return a column of names, drawn in any form: numbers, one text or several texts."""
    form = draw(st.sampled_from(["numbers", "numbers", "text", "texts"]))
    if form == "numbers":
        return draw(formed(source, rows, 2**32 - 1))
    texts = draw(st.lists(topics(), min_size=1, max_size=4))
    return Constant(texts[0], rows) if form == "text" else coded([source.choice(texts) for _ in range(rows)])


@st.composite
def blocks(draw: st.DrawFn, row_counts: st.SearchStrategy[int]) -> Columns:
    """Return columns of all forms, filled from a seed that Hypothesis draws."""
    rows, source = draw(row_counts), random.Random(draw(st.integers(0, 2**32)))
    first = draw(st.sampled_from([0, 1, 1 << 60, MAX_TIME << COUNTER_BITS]))
    most = draw(st.sampled_from([1, 2, 300, 1 << 20, 1 << 40]))
    steps = [1 if most == 1 else source.randint(1, most) for _ in range(rows - 1)]
    positions = np.cumsum([0, *steps], dtype=np.uint64) + np.uint64(first)
    times: Any = (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    match draw(st.sampled_from(["of positions", "listed", "shifted", "any"])):
        case "listed":
            times = times.tolist()
        case "shifted":
            times = np.maximum(times - 5, 0)
        case "any":
            times = draw(formed(source, rows, MAX_TIME))
    some: Any = Constant(None, rows)
    if draw(st.booleans()):
        kinds = [None, *draw(st.lists(properties(), max_size=3))]
        some = [source.choice(kinds) for _ in range(rows)]
    sizes = draw(st.sampled_from([(0,), (7,), (0, 1, 255), (255, 256), (256, 300), (0, 255, 256, 40)]))
    payloads = [source.randbytes(source.choice(sizes)) for _ in range(rows)]
    if draw(st.booleans()):
        payloads[source.randrange(rows)] = source.randbytes(draw(st.sampled_from([65_535, 65_536, 70_000])))
    return Columns(
        positions,
        draw(names(source, rows)),
        draw(names(source, rows)),
        draw(formed(source, rows, 2)),
        draw(formed(source, rows, 1, kind=bool)),
        times,
        some,
        payloads,
        list(map(len, payloads)),
    )


def check_round_trip(columns: Columns, codec: str, stream: int, gap: int, above: int) -> None:
    gap = min(gap, int(columns.positions[0]))
    value = encoded(columns, codec, stream=stream, gap=gap, above=above)
    block = opened(value, int(columns.positions[-1]) + above)
    assert (len(columns.positions), stream) == (block.rows, block.stream)
    assert (int(columns.positions[0]) - gap, int(columns.positions[0])) == (block.base, block.first)
    expected, found = rows_of(columns), rows_of(block.columns())
    assert expected == found
    assert {bool} == set(map(type, found["retain"]))
    assert msgspec.msgpack.encode(expected["payloads"]) == bytes(block.payloads()._raw)
    assert (False, expected["sizes"]) == (block.frame, to_list(block.sizes()))


@given(
    blocks(st.integers(1, 20)),
    codecs,
    st.sampled_from([MIXED, 1, 2**32 - 1]),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_what_goes_in_comes_out(columns: Columns, codec: str, stream: int, gap: int, above: int) -> None:
    """Every form of every column is decoded as it was encoded."""
    check_round_trip(columns, codec, stream, gap, above)


def test_texts_of_a_block_are_those_it_needs() -> None:
    """If a batch is divided, each block holds only the names that its own rows need."""
    columns = columns_of([b""] * 100, topics=coded([f"topic/{number}" for number in range(100)]))
    few = opened(encoded(columns.window(3, 5)), (1 << 60) + 4).topics()
    assert ["topic/3", "topic/4"] == few.texts.values.tolist() == to_list(few)
    assert isinstance(opened(encoded(columns.window(7, 8)), (1 << 60) + 7).topics(), Constant)


@settings(max_examples=36)
@given(blocks(st.sampled_from([1, 15, 16, 255, 256, 8_192, 9_000])), codecs)
def test_many_rows(columns: Columns, codec: str) -> None:
    """Blocks are decoded correctly around the row counts at which msgpack's prefixes change, and with many rows."""
    check_round_trip(columns, codec, 1, 0, 0)


def test_more_rows_than_a_short_array_has() -> None:
    """Payloads are found by their sizes also from 65,536 rows on, where msgpack's array header is longer."""
    for rows in (65_535, 65_536):
        payloads = [bytes((number & 0xFF,)) * (number % 3) for number in range(rows)]
        columns = columns_of(payloads)
        block = opened(encoded(columns), int(columns.positions[-1]))
        few = np.array([rows - 1, 0, 255, 65_000])
        assert [payloads[row] for row in few] == block.payloads().pick(few)
        assert payloads == block.payloads().toarrow().to_pylist()
        assert payloads == block.payloads().tolist()


@pytest.mark.parametrize("kind", [bytes, memoryview, bytearray])
def test_any_kind_of_bytes_can_be_read(kind: Callable[[bytes], bytes]) -> None:
    """A block can be decoded from bytes, a memory view or a bytearray, which engines may return."""
    columns = columns_of([b"a" * 200, b"b"])
    assert rows_of(columns) == rows_of(opened(kind(encoded(columns)), int(columns.positions[-1])).columns())


def test_constant_columns_take_no_room() -> None:
    """A thousand rows with one topic and consecutive positions take little more than their payloads."""
    columns = columns_of([b"x"] * 1_000, topics=Constant(70_000, 1_000), qos=[1] * 1_000)
    assert len(encoded(columns)) < BODY + 3 + 3 * 1_000 + 30


def test_rows_that_compress_badly_are_left_as_they_are() -> None:
    """A block that doesn't compress is stored uncompressed, so that no codec enlarges it."""
    columns = columns_of([random.Random(1).randbytes(4_000)])
    for codec in CODECS:
        value = encoded(columns, codec)
        assert len(value) == len(encoded(columns))
        assert (0, 0) == HEADER.unpack_from(value)[HEAD_CODEC : PAYLOAD_CODEC + 1]


@settings(max_examples=100)
@given(blocks(st.just(1)), st.integers(0, 2**32 - 1), codecs)
def test_one_message_has_the_columns_of_a_block(columns: Columns, stream: int, codec: str) -> None:
    """A block of `encode_message` decodes to the same columns and fields as a block of `encode_block`."""
    last = int(columns.positions[0])
    names = to_list(columns.topics)[0], to_list(columns.client_ids)[0]
    message = MessageBatch(
        ["unused"],
        columns.payloads,
        ["unused"],
        columns.qos,
        columns.retain,
        columns.timestamps,
        columns.properties,
        positions=last,
    )
    value = encode_message(message, *names, stream, block_seed(last, SLAB), Compressor(codec, 3))
    block, other = opened(value, last), opened(encoded(columns, codec, stream=stream), last)
    assert rows_of(columns) == rows_of(other.columns()) == rows_of(block.columns())
    assert (other.rows, other.stream, other.base, other.first) == (block.rows, block.stream, block.base, block.first)


@every_codec
def test_the_codec_is_used(codec: str) -> None:
    """A section that compresses is stored with the chosen codec's number."""
    columns = columns_of([b"payload" * 10] * 200, topics=np.arange(200) % 2)
    number = {"none": 0, "zstd": 1, "lz4": 2}[codec]
    assert (number, number) == HEADER.unpack_from(encoded(columns, codec))[HEAD_CODEC : PAYLOAD_CODEC + 1]


def test_codecs_are_those_of_the_options() -> None:
    """The options accept each supported codec and no other."""
    assert list(CODECS) == [BlockOptions(compression=codec).compression for codec in CODECS]
    with pytest.raises(ValueError, match="compression"):
        BlockOptions(compression="gzip")  # type: ignore[arg-type]


@given(blocks(st.integers(1, 40)), st.data())
def test_columns_are_cut_and_picked(columns: Columns, data: st.DataObject) -> None:
    """`Columns.take` and `Columns.window` select the same rows from every column."""
    rows = len(columns.positions)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    picked = data.draw(st.lists(st.integers(0, rows - 1), unique=True).map(sorted))
    whole = rows_of(columns)
    assert {name: values[start:stop] for name, values in whole.items()} == rows_of(columns.window(start, stop))
    assert {name: [values[row] for row in picked] for name, values in whole.items()} == rows_of(
        columns.take(np.array(picked, dtype=np.intp))
    )


# --- damage -------------------------------------------------------------------------


def sample() -> Columns:
    """Return columns that use every field and that every codec can compress."""
    rows = 60
    return columns_of(
        [b"%d" % number + b"x" * 10 for number in range(rows)],
        positions=np.arange(rows, dtype=np.uint64) * np.uint64(3) + np.uint64(1 << 50),
        topics=np.arange(rows) % 300 * 7,
        client_ids=np.arange(rows) % 2,
        qos=[0, 1, 2] * 20,
        retain=[True, False] * 30,
        timestamps=[number * 9 for number in range(rows)],
        properties=[None, Properties(1, 9, "c/t", "r", b"x", (("a", "b"),))] * 30,
    )


def restamp(fields: list[int], body: bytes, last: int) -> bytes:
    """Return a block with this header and body and a correct checksum."""
    header = HEADER.pack(*fields)
    return header + xxhash.xxh3_64_intdigest(header + body, seed=block_seed(last, SLAB)).to_bytes(8, "little") + body


def take_apart(value: bytes) -> tuple[list[int], bytes]:
    return list(HEADER.unpack_from(value)), value[BODY:]


@every_codec
def test_every_flipped_bit_and_truncation_is_found(codec: str) -> None:
    """Every flipped bit and truncation of a block is detected; a changed version byte may count as a newer version."""
    columns = sample()
    value, last = encoded(columns, codec), int(columns.positions[-1])
    assert rows_of(columns) == rows_of(opened(value, last).columns())
    for bad in [*broken(value), value + value]:
        with pytest.raises(NewerFormatError if bad[:1] > b"\1" else CorruptionError):
            opened(bad, last)


def test_a_block_is_bound_to_its_key() -> None:
    """A block under another position, generation or shard has a wrong checksum."""
    columns = sample()
    value, last = encoded(columns), int(columns.positions[-1])
    for wrong in (0, last - 1, last + 1, 2**64 - 1):
        with pytest.raises(CorruptionError, match="checksum"):
            opened(value, wrong)
    for slab in (0, SLAB - 1, SLAB + 1, SLAB + (1 << 32)):
        with pytest.raises(CorruptionError, match="checksum"):
            Block(value, last, block_seed(last, slab))


def test_seeds_differ() -> None:
    """Blocks, frames and indexes of nearby positions and slabs have different checksum seeds."""
    ends = [*range(20), FIRST_END, FIRST_END + 1, 2**64 - 1]
    slabs = [0, 1, 2, 1 << 32, SLAB]
    seeds = [block_seed(end, slab) for end in ends for slab in slabs]
    seeds += [frame_seed(end, number, slab) for end in ends for slab in slabs for number in (*range(200), 2**32 - 1)]
    assert len(seeds) == len(set(seeds))
    assert max(seeds) < 2**64


def test_flags_of_a_later_version() -> None:
    """Unknown flags raise `NewerFormatError` with their value."""
    columns = sample()
    fields, body = take_apart(encoded(columns))
    for flags in (2, 3, 255):
        fields[FLAGS] = flags
        with pytest.raises(NewerFormatError, match=f"{flags:#x}"):
            opened(restamp(fields, body, 9), 9)


def test_a_newer_block_says_so() -> None:
    """A higher version raises `NewerFormatError`; a lower one, which was never written, is damage."""
    for version in (2, 3, 255):
        with pytest.raises(NewerFormatError, match=f"version {version}"):
            opened(bytes((version,)) + encoded(sample())[1:], 1)
    for value in (b"", b"\0", b"\1", b"\0" * 100):
        with pytest.raises(CorruptionError, match="not a block"):
            opened(value, 1)


@every_codec
@pytest.mark.parametrize("field", [ROWS, HEAD_SIZE, RAW_HEAD, RAW_PAYLOADS, HEAD_CODEC, PAYLOAD_CODEC])
def test_hostile_sizes(codec: str, field: int) -> None:
    """A header with wrong sizes and a correct checksum raises an error, without large allocations."""
    columns = sample()
    value, last = encoded(columns, codec), int(columns.positions[-1])
    fields, body = take_apart(value)
    assert value == restamp(fields, body, last)
    good = fields[field]
    wide = field not in (HEAD_CODEC, PAYLOAD_CODEC)
    for hostile in {0, 1, 2, 3, 255, *((good - 1, good + 1, 2 * good, 2**31 - 1, 2**31, 2**32 - 1) if wide else ())} - {
        good
    }:
        fields[field] = hostile
        with pytest.raises(CorruptionError):
            opened(restamp(fields, body, last), last).columns()


def test_a_frame_that_says_more_than_the_header() -> None:
    """The size in a zstd frame doesn't determine how much memory is allocated."""
    huge = bytes.fromhex("28b52ffde0") + (1 << 50).to_bytes(8, "little") + b"\1\0\0"
    for stored in (huge, zstandard.compress(b"a" * 100_000), b"", b"(\xb5/\xfd"):
        with pytest.raises(CorruptionError):
            decompress(1, memoryview(stored), 10)


def test_lz4_can_only_make_so_much() -> None:
    """A size that an lz4 block can't decompress to raises an error, because raw lz4 doesn't store its size."""
    stored = pa.compress(b"a" * 1_000, "lz4_raw", asbytes=True)
    assert b"a" * 1_000 == bytes(decompress(2, memoryview(stored), 1_000))
    for size in (0, 1, 999, 255 * len(stored) + 1, 2**32 - 1):
        with pytest.raises(CorruptionError):
            decompress(2, memoryview(stored), size)


def test_an_unknown_codec() -> None:
    """An unknown codec number raises an error that names it."""
    with pytest.raises(CorruptionError, match="no codec 3"):
        decompress(3, memoryview(b"abc"), 3)


numbers = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 3),
    st.binary(max_size=9),
    st.sampled_from([b"\0\1\2", b"\xff" * 3, b"\xff" * 12, b"\xff" * 24, b"\0" * 24]),
    st.none(),
)
hostile_names = numbers | st.tuples(st.lists(st.text(max_size=2), max_size=3), numbers)
heads = st.tuples(
    numbers, hostile_names, hostile_names, numbers, numbers,
    st.none() | st.tuples(numbers, numbers),
    st.none() | st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=7), max_size=4),
    numbers,
)  # fmt: skip


@settings(max_examples=400)
@given(heads | st.binary(max_size=20), st.booleans())
def test_a_hostile_head(head: tuple[Any, ...] | bytes, frame: bool) -> None:
    """A fabricated head with a correct checksum either decodes to three rows or raises `CorruptionError`."""
    columns = columns_of([b"a", b"", b"b" * 300])
    fields, body = take_apart(encoded(columns))
    payloads = body[fields[HEAD_SIZE] :]
    made = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    fields[HEAD_SIZE] = fields[RAW_HEAD] = len(made)
    fields[FLAGS] = frame
    block = opened(restamp(fields, made + payloads, 9), 9)
    for read in (block.columns, lambda: block.payloads().toarrow(), lambda: block.payloads().pick(np.array([2]))):
        try:
            found = read()
        except CorruptionError:
            continue
        if isinstance(found, Columns):
            assert {3} == {len(values) for values in rows_of(found).values()}


def test_a_head_that_is_not_utf_8() -> None:
    """Text in properties that is not UTF-8 raises `CorruptionError`."""
    columns = columns_of([b"a"], properties=[Properties(content_type="\x01\x02\x03")])
    fields, body = take_apart(encoded(columns))
    assert 1 == body.count(b"\1\2\3")
    with pytest.raises(CorruptionError, match="decoded"):
        opened(restamp(fields, body.replace(b"\1\2\3", b"\xff\2\3"), 9), 9).columns()


# --- payloads -----------------------------------------------------------------------


def packed(payloads: list[bytes], view: Callable[[bytes], Any] = bytes, *, even: bool = False) -> PackedPayloads:
    """Return payloads in their stored form; with ``even`` their size is a constant."""
    sizes: Any = np.array(list(map(len, payloads)), dtype=np.uint32)
    if even:
        sizes = Constant(len(payloads[0]), len(payloads))
    return PackedPayloads(view(msgspec.msgpack.encode(payloads)), sizes)


SHAPES = {
    "one": [b"a"],
    "empty": [b""] * 5,
    "even": [bytes((number,)) * 9 for number in range(40)],
    "short": [b"x" * number for number in range(256)],
    "middle": [b"y" * (256 + number) for number in range(20)],
    "long": [b"z" * 65_536, b"w" * 70_000],
    "mixed": [b"", b"a" * 255, b"b" * 256, b"c" * 65_535, b"d" * 65_536, *[b"e"] * 30],
    "16 rows": [b"f" * (number % 4) for number in range(16)],
    "15 rows": [b"g" * (number % 4) for number in range(15)],
    "long even": [bytes((number,)) * 300 for number in range(20)],
    "very long even": [bytes((number,)) * 66_000 for number in range(17)],
}
every_shape = pytest.mark.parametrize("shape", list(SHAPES))
views = pytest.mark.parametrize(
    "view", [bytes, memoryview, lambda raw: memoryview(pa.py_buffer(raw))], ids=["bytes", "memoryview", "arrow"]
)


def evenly(payloads: list[bytes]) -> list[bool]:
    """Return the allowed values of ``even`` for these payloads: False, and True if all have one size."""
    return [False, True] if len(set(map(len, payloads))) == 1 else [False]


@every_shape
@views
def test_payloads_agree_in_every_form(shape: str, view: Callable[[bytes], Any]) -> None:
    """Payloads are the same whether read as a list, as an Arrow array, or picked in any number and order."""
    payloads, source = SHAPES[shape], random.Random(1)
    rows = len(payloads)
    for even in evenly(payloads):
        assert payloads == packed(payloads, view, even=even).tolist()
        arrow = packed(payloads, view, even=even).toarrow()
        arrow.validate(full=True)
        assert pa.array(payloads, pa.binary()) == arrow
        for count in {0, 1, rows // 5, rows // 4, rows // 2, rows}:
            picked = np.array(source.sample(range(rows), count), dtype=np.intp)
            for order in (picked, np.sort(picked), np.sort(picked)[::-1]):
                column = packed(payloads, view, even=even)
                expected = [payloads[row] for row in order]
                assert expected == column.pick(order)
                column.tolist()
                assert expected == column.pick(order)
        assert (rows, payloads[-1], payloads[1:3]) == (len(column), column[-1], column[1:3])
        assert payloads == list(column)


def test_the_list_is_the_same_each_time() -> None:
    """The list of payloads is decoded only once."""
    column = packed([b"a", b"b"])
    assert column.tolist() is column.tolist()


@every_shape
def test_lengths_that_lie(shape: str) -> None:
    """Wrong lengths of payloads never make a read return wrong bytes; `CorruptionError` may be raised instead."""
    payloads = SHAPES[shape]
    raw = msgspec.msgpack.encode(payloads)
    rows = len(payloads)
    for wrong in (1, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1):
        sizes = np.array(list(map(len, payloads)), dtype=np.uint64)
        sizes[rows // 2] = len(payloads[rows // 2]) + wrong
        for column in (PackedPayloads(raw, sizes), PackedPayloads(raw, Constant(len(payloads[0]) + wrong, rows))):
            for read in (column.toarrow, lambda column=column: column.pick(np.arange(rows // 5))):
                try:
                    found = read()
                except CorruptionError:
                    continue
                assert payloads[: len(found)] == (found.to_pylist() if isinstance(found, pa.Array) else found)


def test_a_list_of_another_length() -> None:
    """A number of payloads that differs from the number of rows raises `CorruptionError`."""
    raw = msgspec.msgpack.encode([b"a", b"b"])
    for rows in (1, 3):
        with pytest.raises(CorruptionError, match="2 payloads"):
            PackedPayloads(raw, Constant(1, rows)).tolist()
    with pytest.raises(CorruptionError, match="decoded"):
        PackedPayloads(raw[:-1], Constant(1, 2)).tolist()
