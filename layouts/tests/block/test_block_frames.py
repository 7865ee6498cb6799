"""Tests of frames: both versions give the same rows, few or all, and damage and hostile bytes are found."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.batch import ALL_FIELDS
from topicstore.contract.columns import Coded, Column, Constant, LazyColumn, to_list
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.positions import COUNTER_BITS, MAX_TIME
from topicstore_conformance.layout.damage import broken
from topicstore_conformance.oracle.strategies import properties, topics
from topicstore_layouts.block import frames
from topicstore_layouts.block.compression import CODECS, Compressor
from topicstore_layouts.block.format import MIXED, Block, Columns, frame_seed
from topicstore_layouts.block.frames import Frame, FrameRows, encode_frame, open_frame
from topicstore_layouts.block.gathered_rows import gather
from topicstore_layouts.block.packing import pack_names, pack_numbers, pack_times
from topicstore_layouts.shared.name_table import coded

SLAB = 3 << 32 | 7
END = 1 << 63
SEED = frame_seed(END, 2, SLAB)
HEADER = struct.Struct("<BBBBIIIIIIIQQ")
VERSION, FLAGS, ROWS, RAW_TOPICS, RAW_COLUMNS, PAYLOADS = 0, 3, 4, 7, 9, 10
codecs = st.sampled_from(list(CODECS))


def encode_first_version(columns: Columns, stream: int, base: int, seed: int, compress: Compressor) -> bytes:
    """Return a frame of version 1, as earlier versions of topicstore wrote it."""
    positions, some = columns.positions, columns.properties
    first = positions.min()
    steps = np.diff(positions, prepend=first)
    packed = None if steps[0] == 0 and (steps[1:] == 1).all() else steps.view(np.uint8).reshape(-1, 8).T.tobytes()
    head = msgspec.msgpack.encode(
        (
            packed,
            pack_names(columns.topics),
            pack_names(columns.client_ids),
            pack_numbers(columns.qos),
            pack_numbers(columns.retain),
            pack_times(columns.timestamps, positions),
            None if isinstance(some, Constant) else to_list(some),
            pack_numbers(columns.sizes),
        )
    )
    payloads = msgspec.msgpack.encode(columns.payloads)
    (head_codec, stored_head), (codec, stored) = compress(head), compress(payloads)
    sizes = len(positions), stream, len(stored_head), len(head), len(payloads)
    header = struct.pack("<BBBBIIIIIQQ", 1, head_codec, codec, 1, *sizes, base, int(first))
    hasher = xxhash.xxh3_64(header + stored_head + stored, seed=seed)
    return header + struct.pack("<Q", hasher.intdigest()) + stored_head + stored


def both(columns: Columns, stream: int = 5, codec: str = "none") -> list[Block]:
    """Return the rows as frames of both versions."""
    first = encode_first_version(columns, stream, 1, SEED, Compressor(codec, 3))
    second = encode_frame(FrameRows.of(columns), stream, 1, SEED, Compressor(codec, 3))
    return [open_frame(first, END, SEED), open_frame(second, END, SEED)]


def rows_of(columns: Columns) -> dict[str, list[Any]]:
    """Return every column of some rows as a list of Python objects."""
    return {name: to_list(getattr(columns, name)) for name in columns.__struct_fields__}


def some_of(draw: st.DrawFn, values: Sequence[Any], rows: int, source: random.Random) -> Column:
    """Return a column of these values: one for all rows, or any for each."""
    if draw(st.booleans()):
        return Constant(values[0], rows)
    return [source.choice(values) for _ in range(rows)]


@st.composite
def framed(draw: st.DrawFn, most: int = 24) -> Columns:
    """Return the columns of a frame: rows in order of topic and position, with columns of any form."""
    rows, source = draw(st.integers(1, most)), random.Random(draw(st.integers(0, 2**32)))
    first = draw(st.sampled_from([0, 1, 1 << 60, (MAX_TIME - (1 << 20)) << COUNTER_BITS]))
    step = draw(st.sampled_from([1, 2, 300, 1 << 20, 1 << 24]))
    positions = np.cumsum([0, *(source.randint(1, step) for _ in range(rows - 1))], dtype=np.uint64) + np.uint64(first)
    texts = sorted(draw(st.lists(topics(), min_size=1, max_size=5, unique=True)))
    numbers = [source.randrange(len(texts)) for _ in range(rows)]
    order = sorted(range(rows), key=numbers.__getitem__)  # stable, so the positions of a topic still increase
    positions = positions[np.array(order)]
    held = [texts[numbers[row]] for row in order]
    clients = draw(st.lists(st.one_of(st.just(""), topics()), min_size=1, max_size=4))
    times: Any = (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    if draw(st.booleans()):
        times = some_of(draw, [0, 7, MAX_TIME], rows, source)
    sizes = draw(st.sampled_from([(0,), (7,), (0, 1, 255), (255, 256, 3), (0, 40, 700)]))
    payloads = [source.randbytes(source.choice(sizes)) for _ in range(rows)]
    return Columns(
        positions,
        Constant(held[0], rows) if len(set(held)) == 1 and draw(st.booleans()) else coded(held),
        Constant(clients[0], rows) if draw(st.booleans()) else coded([source.choice(clients) for _ in range(rows)]),
        some_of(draw, [0, 1, 2], rows, source),
        some_of(draw, [False, True], rows, source),
        times,
        some_of(draw, [None, *draw(st.lists(properties(), max_size=3))], rows, source),
        payloads,
        list(map(len, payloads)),
    )


@pytest.fixture(autouse=True)
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sections of few rows."""
    monkeypatch.setattr(frames, "_SECTION_BYTES", 500)


@given(framed(), codecs, st.sampled_from([MIXED, 1, 2**32 - 1]))
def test_frames_are_decoded_as_they_were_encoded(columns: Columns, codec: str, stream: int) -> None:
    """Every column of a frame of either version is decoded as it was encoded, and the header describes the columns."""
    expected = rows_of(columns)
    assert [Block, Frame] == list(map(type, both(columns, stream, codec)))
    for frame in both(columns, stream, codec):
        assert expected == rows_of(frame.columns())
        assert (True, stream, 1, END, len(columns.positions)) == (
            *(frame.frame, frame.stream, frame.base, frame.last, frame.rows),
        )
        assert int(columns.positions.min()) == frame.first
        assert expected["sizes"] == to_list(frame.sizes())
        assert expected["payloads"] == frame.payloads().toarrow().to_pylist()


@given(framed(), st.data())
def test_topics_of_a_frame_are_found_by_prefix(columns: Columns, data: st.DataObject) -> None:
    """A frame of either version finds the topics that begin with a prefix, and the rows that have any of them."""
    held = to_list(columns.topics)
    topic = data.draw(st.sampled_from(held))
    prefix = topic[: data.draw(st.integers(0, len(topic)))]
    expected = sorted({topic for topic in held if topic.startswith(prefix)})
    wanted = data.draw(st.sets(st.sampled_from(expected)))
    for frame in both(columns):
        number, found = frame.topics_with(prefix)
        assert expected == found
        mask = frame.rows_of_topics(number, np.array([topic in wanted for topic in found], np.bool_))
        assert [topic in wanted for topic in held] == mask.tolist()
        assert [] == frame.topics_with(topic + "/\U0010fffd")[1]


@given(framed(), codecs, st.data())
def test_few_rows_of_a_frame(columns: Columns, codec: str, data: st.DataObject) -> None:
    """A frame of either version has the rows of each topic together, and returns any range of neighbouring rows."""
    rows, held = len(columns.positions), to_list(columns.topics)
    start = data.draw(st.integers(0, rows - 1))
    chosen = slice(start, data.draw(st.integers(start + 1, rows)))
    expected = rows_of(columns.window(chosen.start, chosen.stop))
    for frame in both(columns, data.draw(st.sampled_from([MIXED, 5])), codec):
        assert expected == rows_of(frame.cut(chosen, ALL_FIELDS))
        fewer = rows_of(frame.cut(chosen, frozenset({"topics"})))
        assert ([], [], [""] * (chosen.stop - start)) == (fewer["payloads"], fewer["sizes"], fewer["client_ids"])
    for text in {*held, "in/no/frame"}:
        mine = [row for row, each in enumerate(held) if each == text]
        for frame in both(columns, codec=codec):
            found = frame.rows_of(text)
            assert mine == ([] if found is None else [*range(rows)[found]])
            if found is not None:
                part = slice(data.draw(st.integers(found.start, found.stop - 1)), found.stop)
                assert rows_of(columns.window(part.start, part.stop)) == rows_of(frame.cut(part, ALL_FIELDS))


@given(framed(60), st.data())
def test_any_payloads_of_a_frame(columns: Columns, data: st.DataObject) -> None:
    """Any selection of a frame's payloads can be read, before and after all payloads were decoded."""
    rows = data.draw(st.lists(st.integers(0, len(columns.payloads) - 1), unique=True).map(sorted))
    expected = [columns.payloads[row] for row in rows]
    for frame in both(columns, codec="zstd"):
        payloads = frame.payloads()
        assert expected == payloads.pick(np.array(rows, dtype=np.intp))
        assert columns.payloads == payloads.tolist() == payloads.objects().tolist()
        assert expected == payloads.pick(np.array(rows, dtype=np.intp))


@given(st.lists(framed(), min_size=1, max_size=4), st.data())
def test_rows_are_gathered_from_frames_of_both_versions(several: list[Columns], data: st.DataObject) -> None:
    """Rows of frames of both versions come in order of position, whether they are few, some or all."""
    found, expected = [], []
    for number, columns in enumerate(several):
        moved = msgspec.structs.replace(
            columns, positions=columns.positions % np.uint64(1 << 40) + np.uint64(number << 50)
        )
        rows = len(moved.positions)
        start = data.draw(st.integers(0, rows - 1))
        chosen: Any = data.draw(
            st.sampled_from([None, slice(start, rows), slice(start, start + 1), np.arange(start, rows, 2)])
        )
        found.append((data.draw(st.sampled_from(both(moved))), chosen))
        picked = moved.take(np.arange(rows)[slice(None) if chosen is None else chosen])
        expected += list(zip(*(rows_of(picked)[name] for name in COLUMNS), strict=True))
    batch, sizes = gather(found, 3, ALL_FIELDS)
    columns_of = (batch.positions, batch.topics, batch.client_ids, batch.payloads, batch.properties, batch.timestamps)
    assert sorted(expected, key=lambda row: row[0]) == list(zip(*map(to_list, columns_of), strict=True))
    assert list(map(len, to_list(batch.payloads))) == sizes.tolist()
    if isinstance(batch.payloads, LazyColumn):
        assert batch.payloads.tolist() == batch.payloads.toarrow().to_pylist()


COLUMNS = ("positions", "topics", "client_ids", "payloads", "properties", "timestamps")


def sample() -> FrameRows:
    """Return rows of which every column varies, in several sections."""
    source = random.Random(4)
    payloads = [source.randbytes(100) for _ in range(20)]
    columns = Columns(
        np.array([(1 << 60) + 977 * (n % 5) + n for n in range(20)], dtype=np.uint64),
        coded([f"t/{n // 5}" for n in range(20)]),
        coded([f"c{n % 3}" for n in range(20)]),
        [n % 3 for n in range(20)],
        [n % 2 == 0 for n in range(20)],
        list(range(20)),
        Constant(None, 20),
        payloads,
        list(map(len, payloads)),
    )
    return FrameRows.of(columns)


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_and_truncation_is_found(codec: str) -> None:
    """No changed bit and no truncation of a frame goes unnoticed."""
    value = encode_frame(sample(), 5, 1, SEED, Compressor(codec, 3))
    for bad in broken(value):
        with pytest.raises((CorruptionError, NewerFormatError)):
            open_frame(bad, END, SEED)
    for seed in (frame_seed(END, 3, SLAB), frame_seed(END - 1, 2, SLAB), frame_seed(END, 2, SLAB + 1)):
        with pytest.raises(CorruptionError):
            open_frame(value, END, seed)


def restamped(value: bytes, change: Callable[[list[Any]], None], body: bytes | None = None) -> bytes:
    """Return a frame with another header or body, and the checksum that fits."""
    fields = list(HEADER.unpack_from(value))
    change(fields)
    header, rest = HEADER.pack(*fields), value[HEADER.size + 8 :] if body is None else body
    digest = xxhash.xxh3_64_intdigest(header + rest, seed=SEED)
    return header + struct.pack("<Q", digest) + rest


def setting(field: int, number: int) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        fields[field] = number

    return change


@pytest.mark.parametrize(("field", "number"), [(VERSION, 3), (FLAGS, 3)])
def test_a_newer_frame_says_so(field: int, number: int) -> None:
    """A frame of a later version, or with a flag that this version doesn't know, is newer, not damaged."""
    value = encode_frame(sample(), 5, 1, SEED, Compressor("none", 3))
    with pytest.raises(NewerFormatError):
        open_frame(restamped(value, setting(field, number)), END, SEED)


def read_all(value: bytes) -> None:
    """Read a frame in every way."""
    for ways in (
        lambda frame: frame.columns(),
        lambda frame: frame.payloads().toarrow(),
        lambda frame: frame.cut(frame.rows_of("t/1"), ALL_FIELDS),
        lambda frame: frame.topics_with("t/"),
    ):
        ways(open_frame(value, END, SEED))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("field", "number"), [(ROWS, 0), (ROWS, 19), (ROWS, 2**31), (RAW_TOPICS, 5), (RAW_COLUMNS, 2**32 - 1)]
)
def test_hostile_headers(codec: str, field: int, number: int) -> None:
    """A header with a correct checksum whose counts or sizes don't fit the frame is reported as damage."""
    value = encode_frame(sample(), 5, 1, SEED, Compressor(codec, 3))
    with pytest.raises(CorruptionError):
        read_all(restamped(value, setting(field, number)))


POSITIONS, CLIENTS, QOS, RETAIN, TIMES, PROPERTIES, LENGTHS, SECTIONS = range(8)


@pytest.mark.parametrize(
    ("field", "content"),
    [
        (POSITIONS, b"abc"),
        (POSITIONS, bytes(20 * 9)),
        (CLIENTS, ("a", b"\1" * 20)),
        (CLIENTS, ("a", 1)),
        (CLIENTS, ("a", b"")),
        (QOS, b"\0" * 3),
        (QOS, -1),
        (TIMES, (0, b"\0")),
        (PROPERTIES, [None]),
        (LENGTHS, 99),
        (LENGTHS, 101),
        (LENGTHS, b"\xff" * 20),
        (LENGTHS, b"\xff" * 160),
        (LENGTHS, 2**63 - 1),
        (SECTIONS, []),
        (SECTIONS, [(20, 0, 1_999, 1_999)]),
        (SECTIONS, [(20, 9, 2_000, 2_000)]),
        (SECTIONS, [(19, 0, 2_000, 2_000)]),
        (SECTIONS, [(20, 0, 2_000, 1_000)]),
    ],
)
def test_hostile_columns(field: int, content: Any) -> None:
    """A column with a correct checksum whose form or values can't occur in the frame is reported as damage."""
    value = encode_frame(sample(), 5, 1, SEED, Compressor("none", 3))
    begin, fields = HEADER.size + 8, HEADER.unpack_from(value)
    middle, end = begin + fields[6], begin + fields[6] + fields[8]
    columns = msgspec.msgpack.decode(value[middle:end])
    columns[field] = content
    raw = msgspec.msgpack.encode(columns)

    def change(fields: list[Any]) -> None:
        fields[8] = fields[9] = len(raw)

    with pytest.raises(CorruptionError):
        read_all(restamped(value, change, value[begin:middle] + raw + value[end:]))


@pytest.mark.parametrize(
    "topics",
    [
        b"",
        struct.pack("<IB", 4, 1) + b"\5\5\5\5",
        struct.pack("<IB", 4, 1) + b"\5\5\5\6\0t/0\0t/1\0t/2\0t/3\0",
        struct.pack("<IB", 3, 1) + b"\5\5\5\0t/0\0t/1\0t/2\0t/3\0",
        struct.pack("<IB", 4, 3) + b"\5\5\5\5\0t/0\0t/1\0t/2\0t/3\0",
        struct.pack("<IB", 0, 1) + b"\0t/1\0",
        struct.pack("<IB", 4, 1) + b"\5\5\5\5\0t/0\0t/1\0\xff\0t/3\0",
    ],
)
def test_hostile_topics(topics: bytes) -> None:
    """A list of topics with a correct checksum that can't be the list of the frame is reported as damage."""
    value = encode_frame(sample(), 5, 1, SEED, Compressor("none", 3))
    end = HEADER.size + 8 + HEADER.unpack_from(value)[6]

    def change(fields: list[Any]) -> None:
        fields[6] = fields[7] = len(topics)

    with pytest.raises(CorruptionError):
        read_all(restamped(value, change, topics + value[end:]))


def test_few_rows_decompress_few_sections() -> None:
    """To read a few payloads, only the sections that hold them are decompressed."""
    value = encode_frame(sample(), 5, 1, SEED, Compressor("none", 3))
    frame = open_frame(value, END, SEED)
    sections = frame.payloads()._sections
    assert len(sections) == 4
    damaged = [each if number == 1 else each._replace(codec=9) for number, each in enumerate(sections)]
    payloads = type(frame.payloads())(damaged, frame.sizes())
    expected = frame.columns().payloads
    assert expected[6:9] == payloads.pick(slice(6, 9))
    assert [expected[7]] == payloads.pick(np.array([7]))
    with pytest.raises(CorruptionError):
        payloads.pick(slice(4, 9))


def test_names_of_a_frame_are_texts() -> None:
    """A frame refuses columns whose names are still numbers of a dictionary."""
    columns = both(FIVE)[1].columns()
    assert isinstance(columns.topics, Coded)
    with pytest.raises(CorruptionError, match="numbers in place of names"):
        FrameRows.of(msgspec.structs.replace(columns, topics=np.arange(5)))


FIVE = Columns(
    np.arange(5, dtype=np.uint64),
    coded(["a", "b", "b", "c", "d"]),
    Constant("c", 5),
    Constant(0, 5),
    Constant(False, 5),
    Constant(0, 5),
    Constant(None, 5),
    [b""] * 5,
    [0] * 5,
)
