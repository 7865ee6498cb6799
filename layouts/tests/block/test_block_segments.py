"""Tests of segments: the selection of frames by their indexes, and detection of damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
import topicstore as ts
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import DATA, INDEX, KEYSPACES, META, Engine, Key, Keyspace, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import ReadLimits
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.layout.damage import broken
from topicstore_layouts.block import compaction, reading
from topicstore_layouts.block.compression import Compressor
from topicstore_layouts.block.format import Columns, frame_seed
from topicstore_layouts.block.frames import FrameRows, encode_frame
from topicstore_layouts.block.segments import Segment, Segments
from topicstore_layouts.block.stream_ranges import StreamRanges

SHARD, GENERATION = 4, 2
START = 1_700_000_000_000_000
TOPICS = ("", "a", "a/b", "a/c", "b", "é")
Span = tuple[int, str]


# --- indexes ------------------------------------------------------------------------


def segments(engine: Engine | None = None, generation: int = GENERATION) -> Segments:
    return Segments(MemoryEngine(KEYSPACES) if engine is None else engine, SHARD, generation)


def made(spans: Sequence[tuple[int, int, int, Span, Span]], small: int, base: int = 10, end: int = 40) -> Segment:
    """Return an index of frames with the given rows, positions (lowest and highest), and topics (first and last)."""
    rows, lowest, highest, first, last = map(list, zip(*spans, strict=True)) if spans else ([], [], [], [], [])
    topics = sorted({topic for _, topic in [*first, *last]})
    places = [
        [min(held), max(held)] for topic in topics if (held := [n for n, *ends in _ends(first, last) if topic in ends])
    ]
    return Segment(
        base,
        end,
        12_345,
        np.array(rows, dtype="<u4"),
        np.array(lowest, dtype="<u8"),
        np.array(highest, dtype="<u8"),
        first,
        last,
        small,
        msgspec.msgpack.encode(topics),
        np.array(places, dtype="<u4").reshape(-1, 2),
    )


def _ends(first: Sequence[Span], last: Sequence[Span]) -> list[tuple[int, str, str]]:
    return [(number, a[1], b[1]) for number, (a, b) in enumerate(zip(first, last, strict=True))]


def segment_of(end: int = 900, base: int = 100) -> Segment:
    spans = [
        (10, base, base + 5, (1, "a"), (1, "b")),
        (70_000, base + 2, end, (1, "b"), (1, "é")),
        (1, end, end, (2, "x"), (2**32 - 1, "\U0010ffff")),
    ]
    return made(spans, 2, base, end)


def put(engine: Engine, keyspace: Keyspace, values: dict[Key, bytes | None]) -> None:
    write = WriteBatch()
    for key, value in values.items():
        if value is None:
            write.delete(keyspace, key)
        else:
            write.put(keyspace, key, value)
    engine.write(write)


def same(one: Segment, other: Segment) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        if isinstance(getattr(one, field.name), np.ndarray)
        else getattr(one, field.name) == getattr(other, field.name)
        for field in attrs.fields(Segment)
    )


def test_an_index_comes_back() -> None:
    """Every field of an index is read back, first from the engine and then from the cache."""
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    for end in (900, 2_000, 2**64 - 1):
        segments(engine).put(segment_of(end, end - 500), [b"", None, b"x"], write)
    engine.write(write)
    mine = segments(engine)
    assert 2**64 - 1 == mine.reach == mine.end(engine)
    for _ in range(2):
        found = list(mine.between(engine, 0, 2**64 - 1))
        assert all(
            same(segment_of(end, end - 500), each) for end, each in zip((900, 2_000, 2**64 - 1), found, strict=True)
        )
        newest = mine.newest()
        assert newest is not None
        assert same(found[-1], newest)
    assert [(GENERATION, end, number) for end in (900, 2_000, 2**64 - 1) for number in (0, 2)] == [
        key for chunk in engine.scan(DATA) for key, _ in chunk
    ]


def test_which_segments_a_range_touches() -> None:
    """`between` returns exactly the segments of its generation that may hold positions of a range."""
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    for generation in (GENERATION - 1, GENERATION, GENERATION + 1):
        for end in (200, 300, 500):
            segments(engine, generation).put(segment_of(end * generation, end * generation - 50), [], write)
    engine.write(write)
    mine = segments(engine)
    for first in range(340, 1_010, 7):
        for bound in range(first, 1_010, 7):
            expected = [end for end in (400, 600, 1_000) if end >= first and end - 50 <= bound]
            assert expected == [segment.end for segment in mine.between(engine, first, bound)]
    assert (-1, None) == (segments(engine, 7).end(engine), segments(engine, 7).newest())


Row = tuple[int, str, int]


@st.composite
def framed(draw: st.DrawFn) -> tuple[Segment, list[list[Row]]]:
    """Return an index and sorted rows of large and small streams in frames; a delete has emptied some frames."""
    frames: list[list[Row]] = []
    small = 0
    for streams in (st.just(1), st.just(4), st.just(6), st.sampled_from([2, 3, 5, 9])):
        small = len(frames)
        rows = sorted(draw(st.lists(st.tuples(streams, st.sampled_from(TOPICS), st.integers(10, 40)), max_size=12)))
        while rows:
            cut = draw(st.integers(1, 4))
            frames.append(rows[:cut])
            rows = rows[cut:]
    spans = [
        (len(rows), min(r[2] for r in rows), max(r[2] for r in rows), rows[0][:2], rows[-1][:2]) for rows in frames
    ]
    segment = made(spans, small)
    gone = draw(st.lists(st.sampled_from(range(len(frames))), max_size=2)) if frames else []
    return segment.without(dict.fromkeys(gone, 0)), [[] if n in gone else rows for n, rows in enumerate(frames)]


@settings(max_examples=300)
@given(framed(), st.data())
def test_frames_are_selected_by_what_they_span(drawn: tuple[Segment, list[list[Row]]], data: st.DataObject) -> None:
    """Exactly the frames are selected whose spans overlap a wanted range, so none with a matching row is missed.

    Shared frames are not selected for a stream that has frames of its own.
    """
    segment, frames = drawn
    small, own = segment.small, segment.own_streams
    bounds = st.tuples(st.sampled_from(TOPICS), st.sampled_from([*TOPICS, None]))
    by_stream = dict(sorted(data.draw(st.dictionaries(st.integers(1, 10), bounds, max_size=4)).items()))
    everything = data.draw(st.sampled_from([False, False, True]))
    wanted = StreamRanges(
        [(stream, *between) for stream, between in by_stream.items()], everything, frozenset(), by_stream
    )
    first, bound = data.draw(st.integers(5, 45)), data.draw(st.integers(5, 45))
    selected = segment.select(wanted, first, bound)
    for number, rows in enumerate(frames):
        spans = bool(rows) and segment.highest[number] >= first and segment.lowest[number] <= bound
        touched = everything or any(
            (number < small or stream not in own)
            and segment.last[number] >= (stream, low)
            and (segment.first[number] <= (stream, high) if high is not None else segment.first[number][0] <= stream)
            for stream, (low, high) in by_stream.items()
        )
        assert (number in selected) == (spans and touched)
        holds = any(
            first <= position <= bound and (everything or (stream in by_stream and _lies(topic, by_stream[stream])))
            for stream, topic, position in rows
        )
        assert number in selected or not holds


def _lies(topic: str, between: tuple[str, str | None]) -> bool:
    low, high = between
    return low <= topic and (high is None or topic <= high)


def stored_index(end: int = 900) -> tuple[MemoryEngine, bytes]:
    engine, write = MemoryEngine(KEYSPACES), WriteBatch()
    segments(engine).put(segment_of(end), [], write)
    engine.write(write)
    value = engine.get(INDEX, (GENERATION, end, 0))
    assert value is not None
    return engine, value


def test_every_flipped_bit_and_truncation_of_an_index_is_found() -> None:
    """Every flipped bit and truncation of an index is detected; a changed version byte may count as a newer version."""
    _, value = stored_index()
    mine = segments()
    assert same(segment_of(), mine.open(900, value))
    for bad in broken(value):
        error = NewerFormatError if bad[:1] > b"\1" else CorruptionError
        with pytest.raises(error, match="segment that ends at position 900"):
            segments().open(900, bad)
    with pytest.raises(CorruptionError):
        mine.open(900, value + b"\0")  # the damage is reported although the intact index is cached


def test_an_index_is_bound_to_its_key() -> None:
    """A segment's index that is read under the key of another segment, generation or shard raises `CorruptionError`."""
    engine, value = stored_index()
    for other, end in (
        (segments(), 901),
        (segments(generation=GENERATION + 1), 900),
        (Segments(engine, SHARD + 1, GENERATION), 900),
    ):
        with pytest.raises(CorruptionError, match="checksum"):
            other.open(end, value)


number_lists = st.binary(max_size=12) | st.sampled_from([bytes(8), bytes(16), b"\xff" * 8])
bodies = st.tuples(
    st.integers(-1, 2**64 - 1), st.integers(-1, 2**64 - 1),
    number_lists, number_lists, number_lists, number_lists,
    st.lists(st.text(max_size=2), max_size=4), st.integers(-2, 4),
    st.lists(st.text(max_size=2), max_size=2), number_lists,
)  # fmt: skip


@settings(max_examples=400)
@given(bodies | st.binary(max_size=20), st.sampled_from([0, 0, 0, -1, 1, 2**31]))
def test_a_hostile_index(body: tuple[object, ...] | bytes, more: int) -> None:
    """A fabricated index with a correct checksum is either consistent or raises `CorruptionError`."""
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    rest = ((len(raw) + more) % 2**32).to_bytes(4, "big") + zstandard.compress(raw)
    seed = frame_seed(900, 2**32 - 1, SHARD << 32 | GENERATION)
    value = b"\1" + xxhash.xxh3_64_intdigest(rest, seed=seed).to_bytes(8, "big") + rest
    try:
        segment = segments().open(900, value)
    except CorruptionError:
        return
    assert more == 0
    lengths = set(map(len, (segment.rows, segment.lowest, segment.highest, segment.first, segment.last)))
    assert 1 == len(lengths)
    frames = lengths.pop()
    assert 0 <= segment.small <= frames
    try:
        assert (len(segment.directory), 2) == segment.places.shape
    except CorruptionError:  # the directory is decoded at its first use
        return
    assert all(place < frames for place in segment.places.flat)


def test_an_index_gets_no_more_memory_than_its_size_says() -> None:
    """The size in an index's zstd frame doesn't determine how much memory is allocated."""
    huge = bytes.fromhex("28b52ffde0") + (1 << 50).to_bytes(8, "little") + b"\1\0\0"
    for size in (10, 2**28 + 1, 2**32 - 1):
        rest = size.to_bytes(4, "big") + huge
        seed = frame_seed(900, 2**32 - 1, SHARD << 32 | GENERATION)
        value = b"\1" + xxhash.xxh3_64_intdigest(rest, seed=seed).to_bytes(8, "big") + rest
        with pytest.raises(CorruptionError):
            segments().open(900, value)


# --- damage in a database -----------------------------------------------------------


@attrs.define
class Merged:
    """A database of three segments of sixty messages each, followed by two unmerged batches."""

    db: ts.Database

    @property
    def engine(self) -> Engine:
        return self.db.storage.shards[0].writer.open_engine()

    @property
    def segments(self) -> list[Segment]:
        mine = Segments(self.engine, 0, 1)
        return list(mine.between(self.engine, 0, 2**64 - 1))

    def get(self, keyspace: Keyspace, key: Key) -> bytes:
        value = self.engine.get(keyspace, key)
        assert value is not None
        return value

    def put(self, keyspace: Keyspace, key: Key, value: bytes | None) -> None:
        put(self.engine, keyspace, {key: value})

    def put_index(self, segment: Segment) -> None:
        """Store an index with a correct checksum and any content."""
        write = WriteBatch()
        Segments(self.engine, 0, 1).put(segment, [], write)
        self.engine.write(write)

    def verified(self) -> tuple[int, list[str]]:
        """Return the number of intact messages, and where verification found damage."""
        report = self.db.verify()
        assert all(damage.place.startswith(PLACE) for damage in report.damages)
        return report.messages, [damage.place.removeprefix(PLACE) for damage in report.damages]

    def read(self, first: int = 0) -> tuple[list[Message], str]:
        """Read from a position on with a small limit; return the messages, and where damage stopped the reader."""
        cursor = self.db.storage.begin(0, 1, 0, ts.TopicFilter("#"), first)
        rows: list[Message] = []
        caught_up = False
        while not caught_up:
            try:
                result = self.db.read(cursor, 7)
            except CorruptionError as bad:
                return rows, bad.place.removeprefix(PLACE)
            rows += result.batch.to_messages()
            cursor, caught_up = result.cursor, result.caught_up
        return rows, ""


PLACE = "shard 0, generation 1, "
TOTAL = "segments"
SENT = [
    Message(f"small/{n % 25}" if n % 5 == 0 else f"big/{n % 2}", b"%03d" % n, f"c{n % 2}", timestamp=n)
    for n in range(200)
]


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Merged]:
    """Make segments of eight frames: three for each of two large streams, and two that small streams share."""
    for name, value in {"SEGMENT_ROWS": 60, "FRAME_ROWS": 10}.items():
        monkeypatch.setattr(compaction, name, value)
    with ts.open(tmp_path / "db", backend="memory", auto_compact=False, clock=lambda: START) as db:
        for start in range(0, 180, 20):
            db.store(SENT[start : start + 20])
        db.compact()
        for start in (180, 190):
            db.store(SENT[start : start + 10])
        made = Merged(db)
        shapes = [(s.messages, len(s.rows), s.small, len(s.directory)) for s in made.segments]
        assert [(60, 8, 6, 7)] * 3 == shapes
        assert (SENT, "") == made.read()
        assert (200, []) == made.verified()
        yield made


def named(segment: Segment, *numbers: int) -> list[str]:
    """Return how errors name these frames of a segment; without frames, how they name the segment's index."""
    place = f"segment that ends at position {segment.end}"
    return [f"{place}, frame {number}" for number in numbers] or [place]


def check_stopped(merged: Merged, place: str) -> None:
    """Check that damage in the second segment stops a reader, and that all other segments are readable."""
    segment = merged.segments[1] if "frame" in place else None
    end = int(place.split()[5].rstrip(","))
    assert segment is None or segment.end == end
    assert (SENT[:60], place) == merged.read()
    assert (SENT[120:], "") == merged.read(end + 1)


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("at", [1, 47, -1])
def test_a_damaged_frame(merged: Merged, number: int, at: int) -> None:
    """Readers and deletes report a damaged frame, and verification counts all other messages as intact."""
    segment = merged.segments[1]
    key = (1, segment.end, number)
    value = merged.get(DATA, key)
    merged.put(DATA, key, flipped(value, at % len(value)))
    assert (200 - segment.rows[number], named(segment, number)) == merged.verified()
    check_stopped(merged, *named(segment, number))
    with pytest.raises(CorruptionError, match=f"frame {number}"):
        list(merged.db.replay(segment.first[number][1]))
    with pytest.raises(CorruptionError, match=f"frame {number}"):
        merged.db.delete("#")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_damage_in_segments_that_are_read_together(merged: Merged, number: int) -> None:
    """The messages of the segments before a damaged frame are read first, also if all segments are read together."""
    segment = merged.segments[number]
    damaged = next(n for n in range(len(segment.rows)) if segment.first[n][1] == "big/1")
    key = (1, segment.end, damaged)
    merged.put(DATA, key, flipped(merged.get(DATA, key), -1))
    cursor = merged.db.storage.begin(0, 1, 0, ts.TopicFilter("big/1"), 0)
    rows: list[Message] = []
    with pytest.raises(CorruptionError, match="frame") as raised:  # noqa: PT012 - each read may raise
        while True:
            result = merged.db.read(cursor, 1_000)
            assert not result.caught_up
            rows += result.batch.to_messages()
            cursor = result.cursor
    assert [message for message in SENT[: 60 * number] if message.topic == "big/1"] == rows
    assert raised.value.place.endswith(*named(segment, damaged))


def test_a_directory_that_cannot_be_decoded(merged: Merged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that needs the directory of an index raises an error that names the segment."""
    monkeypatch.setattr(reading, "_FEW_FRAMES", 0)
    segment = merged.segments[1]
    merged.put_index(listing(segment, [*segment.directory, 5]))
    with pytest.raises(CorruptionError, match="list of topics") as raised:
        list(merged.db.replay("big/0"))
    assert raised.value.place.endswith(*named(segment))
    assert (SENT, "") == merged.read()


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes((value[at] ^ 1,)) + value[at + 1 :]


def test_a_frame_of_a_newer_version(merged: Merged) -> None:
    """A frame of a newer version raises `NewerFormatError`, and verification continues after it."""
    segment = merged.segments[1]
    merged.put(DATA, (1, segment.end, 2), b"\3" + merged.get(DATA, (1, segment.end, 2))[1:])
    with pytest.raises(NewerFormatError, match="version 3") as told:
        merged.read()
    assert told.value.place.endswith(*named(segment, 2))
    assert (200 - segment.rows[2], named(segment, 2)) == merged.verified()


def test_missing_frames(merged: Merged) -> None:
    """Readers and verification report missing frames, whichever way they look frames up.

    That holds whether one frame or all frames of a segment are missing.
    """
    segment = merged.segments[1]
    merged.put(DATA, (1, segment.end, 4), None)
    assert (200 - segment.rows[4], named(segment, 4)) == merged.verified()
    check_stopped(merged, *named(segment, 4))
    with pytest.raises(CorruptionError, match="frame 4: it is missing"):
        list(merged.db.replay("big/0"))
    assert [message for message in SENT if message.topic == "big/1"] == list(merged.db.replay("big/1"))
    for number in range(len(segment.rows)):
        merged.put(DATA, (1, segment.end, number), None)
    assert (140, named(segment, *range(8))) == merged.verified()
    check_stopped(merged, *named(segment, 0))


@pytest.mark.parametrize("at", [1, 9, -1])
def test_a_damaged_index(merged: Merged, at: int) -> None:
    """Readers and deletes report a damaged index, and verification continues with later segments and blocks."""
    segment = merged.segments[1]
    key = (1, segment.end, 0)
    value = merged.get(INDEX, key)
    merged.put(INDEX, key, flipped(value, at % len(value)))
    assert (140, [*named(segment), TOTAL]) == merged.verified()
    check_stopped(merged, *named(segment))
    with pytest.raises(CorruptionError, match="segment that ends at"):
        list(merged.db.replay("big/0"))
    with pytest.raises(CorruptionError, match="segment that ends at"):
        merged.db.delete("#")


@pytest.mark.parametrize("text", ["#", "big/0", "none/+"])
def test_damage_behind_the_bound_is_none_of_a_readers_business(merged: Merged, text: str) -> None:
    """A read up to a bound doesn't fail because of damage after the bound."""
    first, second, _ = merged.segments
    merged.put(INDEX, (1, second.end, 0), b"")
    slab = merged.db.storage.shards[0].generations.slab(1)
    step = slab.next(0, ts.TopicFilter(text), bytes(8), ReadLimits(rows=99, bytes=1 << 20, bound=first.end))
    matches = ts.TopicFilter(text).matches
    assert [message for message in SENT[:60] if matches(message.topic)] == step.batch.to_messages()
    assert (True, first.end + 1) == (step.exhausted, int.from_bytes(step.place, "big"))


def test_a_missing_index(merged: Merged) -> None:
    """Verification detects a missing index by comparing with the stored total number of messages."""
    merged.put(INDEX, (1, merged.segments[1].end, 0), None)
    assert (140, [TOTAL]) == merged.verified()


def changed(segment: Segment, **more: int) -> Segment:
    """Return an index with differences added to fields of frame 1."""
    values = {name: getattr(segment, name).copy() for name in more}
    for name, difference in more.items():
        values[name][1] = int(values[name][1]) + difference
    return attrs.evolve(segment, **values)


def ends(given: Sequence[Span], number: int, stream: int, topic: str) -> list[Span]:
    """Return the first or last rows of all frames, with one frame's row replaced."""
    return [(stream, topic) if n == number else end for n, end in enumerate(given)]


def placed(segment: Segment, topic: int, first: int, last: int) -> Segment:
    """Return an index whose directory places a topic in other frames."""
    places = segment.places.copy()
    places[topic] = first, last
    return attrs.evolve(segment, places=places)


def listing(segment: Segment, directory: Sequence[object]) -> Segment:
    """Return an index with another directory."""
    return attrs.evolve(segment, listed=msgspec.msgpack.encode(directory))


Wrong = Callable[[Segment], tuple[Segment, list[str]]]
WRONG: dict[str, Wrong] = {
    "rows": lambda s: (s.without({1: int(s.rows[1]) + 1}), [*named(s, 1), TOTAL]),
    "no rows": lambda s: (s.without({1: 0}), [TOTAL]),
    "lowest": lambda s: (changed(s, lowest=1), named(s, 1)),
    "highest": lambda s: (changed(s, highest=-1), named(s, 1)),
    "first topic": lambda s: (attrs.evolve(s, first=ends(s.first, 7, s.first[7][0], "small/4")), named(s, 7)),
    "last topic": lambda s: (attrs.evolve(s, last=ends(s.last, 6, s.last[6][0], "small/")), named(s, 6)),
    "order of streams": lambda s: (attrs.evolve(s, first=ends(s.first, 4, 9, "big/1")), named(s)),
    "small streams": lambda s: (attrs.evolve(s, small=8), named(s)),
    "base": lambda s: (attrs.evolve(s, base=s.base + 1), named(s, *range(8))),
    "overlap": lambda s: (attrs.evolve(s, base=s.base - 30), named(s)),
    "topic listed": lambda s: (listing(s, ["big", *s.directory[1:]]), named(s, 0, 1, 2)),
    "number listed": lambda s: (listing(s, [1, *s.directory[1:]]), named(s, *range(8))),
    "too many listed": lambda s: (listing(s, [*s.directory, "big"]), named(s, *range(8))),
    "place listed": lambda s: (placed(s, 0, 0, 1), named(s, 2)),
}
"""Changes of an index, with the places of damage that verification then reports."""


@pytest.mark.parametrize("what", list(WRONG))
def test_verify_checks_what_an_index_says(merged: Merged, what: str) -> None:
    """Verification reports an index with a correct checksum that doesn't describe its frames."""
    index, places = WRONG[what](merged.segments[1])
    merged.put_index(index)
    assert places == merged.verified()[1]


def test_verify_checks_what_frames_hold(merged: Merged) -> None:
    """Verification reports a frame with rows out of order, of another stream, or with wrong lengths."""
    segment = merged.segments[1]
    segments = Segments(merged.engine, 0, 1)
    blocks = segments.frames(merged.engine, segment, range(8))
    columns, stream = blocks[0].columns(), blocks[0].stream
    reverse = columns.take(np.arange(blocks[0].rows)[::-1])
    lying = Columns(*[getattr(columns, name) for name in columns.__struct_fields__[:-1]], columns.sizes[::-1])
    lying.sizes[0] += 1
    for bad, of in ((reverse, stream), (columns, stream + 1), (blocks[3].columns(), stream), (lying, stream)):
        seed = segments.frame_seed(segment.end, 0)
        value = encode_frame(FrameRows.of(bad), of, segment.base, seed, Compressor("none", 0))
        merged.put(DATA, (1, segment.end, 0), value)
        assert named(segment, 0) == merged.verified()[1]


def test_verify_checks_that_streams_with_frames_share_none(merged: Merged) -> None:
    """Verification reports shared frames with rows of a stream that has frames of its own: readers don't find these."""
    segment = merged.segments[1]
    shared = segment.first[6][0]
    span = (shared, segment.first[0][1])
    merged.put_index(attrs.evolve(segment, first=[span, *segment.first[1:]], last=[span, *segment.last[1:]]))
    assert named(segment, 0, 6) == merged.verified()[1]


TOTAL_KEY = bytes((0, 0, 0, 1, 0x30))


@pytest.mark.parametrize("change", ["flipped", "cut", "garbled", "wrong"])
def test_a_damaged_total(merged: Merged, change: str) -> None:
    """With a damaged total, all messages can be read, deleted and merged; verification reports it until a write."""
    value = merged.get(META, TOTAL_KEY)
    assert b"\xcc\xb4" == strip_checksum(TOTAL_KEY, value)
    bad = {
        "flipped": flipped(value, -1 % len(value)),
        "cut": value[:3],
        "garbled": add_checksum(TOTAL_KEY, b"\xc1"),
        "wrong": add_checksum(TOTAL_KEY, b"\x07"),
    }[change]
    merged.put(META, TOTAL_KEY, bad)
    assert (200, [TOTAL]) == merged.verified()
    assert (SENT, "") == merged.read()
    assert (193 if change == "wrong" else 20) == merged.db.storage.shards[0].rewriter.backlog()
    if change != "wrong":
        assert 40 == merged.db.delete("small/#")
        merged.db.compact()
        assert (160, []) == merged.verified()


def test_a_damaged_total_and_a_damaged_index(merged: Merged) -> None:
    """With a damaged total and index, the database opens, and all other messages are counted and readable."""
    merged.put(META, TOTAL_KEY, b"")
    key = (1, merged.segments[1].end, 0)
    merged.put(INDEX, key, flipped(merged.get(INDEX, key), 30))
    assert 200 - 120 == merged.db.storage.shards[0].rewriter.backlog()
    assert 140 == merged.verified()[0]
