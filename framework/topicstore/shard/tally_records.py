"""`Tally`, message counts by topic and client id, and the stored form of tally tables in a shard's state.

A row counts the messages of one topic and one client id: it has the positions of the first and the last message, the
number of messages, and the bytes of their payloads and of their topics in UTF-8. Rows are in order of topics, then of
client ids. Stored tallies never count topics that begin with ``$`` (see `covers`); tallies in memory may.

Stored form (state keyspace, keys begin with a zero byte)::

    00 "tallies" u32 generation                            -> TallyIndex, written with every change of a table
    00 "tally" u32 generation u64 last position u32 part   -> TallyPart, a part of the table that ends at the position

Both are records (`topicstore.shard.record_codec`) of version 1. A part has at most about 256 kB before compression, or
one row; older databases also have parts of a megabyte. The parts of a table are in order of its rows. A part's data is
a msgpack array, compressed with zstd: topics, client ids, the lowest position, then the columns. Each column is stored
as eight planes of the bytes of 64-bit numbers, the lowest bytes first. The columns are the index of the topic (delta to
the row before), the index of the client id, the first position (offset from the lowest of the part), the last position
(offset from the first), the number of messages, and their bytes.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, Self, TypeVar

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Coded, Column, Constant, LazyColumn, to_iterable
from topicstore.contract.engine import STATE, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError
from topicstore.contract.positions import Positions
from topicstore.contract.topics import TopicFilter

from .record_codec import RecordCodec

__all__ = [
    "Gathering",
    "Tally",
    "TallyIndex",
    "TallyRange",
    "covers",
    "encoded_parts",
    "lengths",
    "load_index",
    "load_tally",
    "put_index",
    "remove_parts",
    "remove_tallies",
    "sum_tables",
]

Codes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint64]

T = TypeVar("T", bound="Tally")
_HELD = 65_536
"""The minimum number of rows that a `Gathering` buffers before it adds them to its total."""


def covers(topic_filter: TopicFilter) -> bool:
    """Return whether stored tallies count all messages that a filter matches.

    They count the messages that ``#`` matches, which excludes topics that begin with ``$`` (MQTT 5, section 4.7.2).
    """
    return not topic_filter.text.startswith("$")


@attrs.frozen(eq=False)
class Tally:
    """Columns of equal length, with a row for each pair of topic and client id that has messages."""

    topics: Sequence[str]
    """The distinct topics, in order. Some may have no row."""
    client_ids: Sequence[str]
    """The distinct client ids, in order. Some may have no row."""
    topic: Codes
    """The index of each row's topic in `topics`."""
    client_id: Codes
    """The index of each row's client id in `client_ids`."""
    first: Positions
    last: Positions
    messages: Numbers
    size: Numbers
    """The total size of each row's payloads and topics, in bytes."""

    @classmethod
    def empty(cls) -> Self:
        """Return the tally of no messages."""
        nothing = np.empty(0, np.uint64)
        return cls([], [], nothing, nothing, nothing, nothing, nothing, nothing)

    @classmethod
    def of(cls, batch: MessageBatch) -> Self:
        """Count stored messages by topic and client id."""
        rows = len(batch)
        if not rows:
            return cls.empty()
        topics, topic = _coded(batch.topics, rows)
        client_ids, client_id = _coded(batch.client_ids, rows)
        positions = np.asarray(batch.positions, np.uint64)
        size = _sizes(batch.payloads, rows) + lengths(topics).astype(np.uint64)[topic]
        ones = np.ones(rows, np.uint64)
        return _summed(cls(topics, client_ids, topic, client_id, positions, positions, ones, size))

    @classmethod
    def sum(cls, tallies: Sequence[Self]) -> Self:
        """Return the sum of several tallies."""
        tallies = [tally for tally in tallies if len(tally)]
        if not tallies:
            return cls.empty()
        if len(tallies) == 1:
            return tallies[0]
        topics, topic = _merged([(tally.topics, tally.topic) for tally in tallies])
        client_ids, client_id = _merged([(tally.client_ids, tally.client_id) for tally in tallies])
        rest = [np.concatenate([getattr(t, name) for t in tallies]) for name in ("first", "last", "messages", "size")]
        return _summed(cls(topics, client_ids, topic, client_id, *rest))

    def __len__(self) -> int:
        return len(self.topic)

    @property
    def count(self) -> int:
        """The number of messages counted."""
        return int(self.messages.sum())

    def matching(self, topic_filter: TopicFilter) -> npt.NDArray[np.bool_]:
        """Return, for each row, whether its topic matches."""
        matches = np.zeros(len(self.topics), np.bool_)
        begin, end = _reached(topic_filter, self.topics)
        if topic_filter.text.endswith("/#") and "+" not in topic_filter.levels:
            matches[begin:end] = True
            above = topic_filter.text[:-2]  # ``a/#`` also matches ``a``
            at = bisect_left(self.topics, above)
            if self.topics[at : at + 1] == [above]:
                matches[at] = True
        else:
            fits = _pattern(topic_filter).fullmatch
            texts = self.topics[begin:end]
            matches[begin:end] = np.fromiter((fits(text) is not None for text in texts), np.bool_, len(texts))
        return matches[self.topic]

    def where(self, rows: npt.NDArray[np.bool_]) -> Self:
        """Return a tally of the rows for which ``rows`` is true."""
        if rows.all():
            return self
        topics, topic = _in_use(self.topics, self.topic[rows])
        client_ids, client_id = _in_use(self.client_ids, self.client_id[rows])
        rest = (column[rows] for column in (self.first, self.last, self.messages, self.size))
        return type(self)(topics, client_ids, topic, client_id, *rest)

    def window(self, start: int, stop: int) -> Self:
        """Return a tally of the rows from ``start`` to before ``stop``, at least one."""
        lowest, highest = int(self.topic[start]), int(self.topic[stop - 1])
        client_ids, client_id = _in_use(self.client_ids, self.client_id[start:stop])
        rest = (column[start:stop] for column in (self.first, self.last, self.messages, self.size))
        topic = self.topic[start:stop] - np.uint64(lowest)
        return type(self)(self.topics[lowest : highest + 1], client_ids, topic, client_id, *rest)

    def split_after(self, topic: str, client_id: str) -> tuple[Self, Self]:
        """Return a tally of the rows up to a pair of topic and client id, inclusive, and one of the rows after it."""
        lowest, highest = bisect_left(self.topics, topic), bisect_right(self.topics, topic)
        begin, end = np.searchsorted(self.topic, np.array([lowest, highest], np.uint64)).tolist()
        client_ids = np.uint64(bisect_right(self.client_ids, client_id))
        stop = begin + int(np.searchsorted(self.client_id[begin:end], client_ids))
        return (
            self.window(0, stop) if stop else self.empty(),
            self.window(stop, len(self)) if stop < len(self) else self.empty(),
        )

    def without_hidden(self) -> Self:
        """Return the tally without topics that begin with ``$``, which no table counts."""
        begin, end = bisect_left(self.topics, "$"), bisect_left(self.topics, chr(ord("$") + 1))
        return self if begin == end else self.where((self.topic < np.uint64(begin)) | (self.topic >= np.uint64(end)))

    def by_topic(self) -> Self:
        """Return the tally summed by topic, with an empty client id."""
        return _summed(attrs.evolve(self, client_ids=[""], client_id=np.zeros(len(self), np.uint64)))

    def by_client(self) -> Self:
        """Return the tally summed by client id, with an empty topic."""
        return _summed(attrs.evolve(self, topics=[""], topic=np.zeros(len(self), np.uint64)))

    def without(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Self | None:
        """Return the tally without the matching messages with positions from ``first`` to ``last``.

        Messages whose topics match one of ``spare`` are kept. Returns this tally itself if nothing is removed. Returns
        None if the result can't be computed, because a row has messages both inside and outside of the range.
        """
        gone = self.matching(topic_filter)
        for spared in spare:
            gone &= ~self.matching(spared)
        gone = gone & (self.last >= np.uint64(first)) & (self.first <= np.uint64(last))
        if not gone.any():
            return self
        if (self.first[gone] < np.uint64(first)).any() or (self.last[gone] > np.uint64(last)).any():
            return None
        return self.where(~gone)


def _reached(topic_filter: TopicFilter, topics: Sequence[str]) -> tuple[int, int]:
    """Return a range of indices in the sorted topics that includes all topics that match a filter.

    For a filter that ends with ``/#`` the parent topic itself may lie outside of the range.
    """
    if topic_filter.literal:
        at = bisect_left(topics, topic_filter.text)
        return at, min(at + 1, len(topics))
    span = _span(topic_filter)
    if span is None:
        return 0, len(topics)
    return bisect_left(topics, span[0] + "/"), bisect_left(topics, span[1])


def _span(topic_filter: TopicFilter) -> tuple[str, str] | None:
    """Return the lowest topic that a filter may match, and a text after the highest; None if all may match."""
    fixed = list(takewhile(lambda level: level not in ("+", "#"), topic_filter.levels))
    if not fixed:
        return None
    lowest = "/".join(fixed)
    return lowest, lowest + ("\0" if topic_filter.literal else chr(ord("/") + 1))


def _pattern(topic_filter: TopicFilter) -> re.Pattern[str]:
    """Return a regular expression for the topics that a filter matches; it is faster for many topics."""
    *levels, last = ("[^/]*" if level == "+" else re.escape(level) for level in topic_filter.levels)
    text = "/".join(levels)
    if topic_filter.levels[-1] == "#":
        text += "(/.*)?" if levels else ".*"
    else:
        text += "/" + last if levels else last
    return re.compile(("(?![$])" if topic_filter.levels[0] in ("+", "#") else "") + text, re.DOTALL)


def _summed(tally: T) -> T:
    """Return the tally with one row for each pair of topic and client id, in order."""
    if not len(tally):
        return tally
    keys = tally.topic * np.uint64(len(tally.client_ids)) + tally.client_id
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return type(tally)(
        tally.topics,
        tally.client_ids,
        tally.topic[order][starts],
        tally.client_id[order][starts],
        np.minimum.reduceat(tally.first[order], starts),
        np.maximum.reduceat(tally.last[order], starts),
        np.add.reduceat(tally.messages[order], starts),
        np.add.reduceat(tally.size[order], starts),
    )


class Gathering:
    """A running sum of tallies, which bounds the memory for adding many small tallies."""

    def __init__(self, change: Callable[[Tally], Tally] = lambda tally: tally) -> None:
        """Create an empty sum. ``change`` is applied to each tally before it is added."""
        self._change = change
        self._total = Tally.empty()
        self._held: list[Tally] = []
        self._rows = 0

    def add(self, tally: Tally) -> None:
        """Add a tally."""
        changed = self._change(tally)
        self._held.append(changed)
        self._rows += len(changed)
        if self._rows > max(_HELD, len(self._total)):
            self.total()

    def total(self) -> Tally:
        """Return the sum of all tallies that were added."""
        self._total = Tally.sum([self._total, *self._held])
        self._held, self._rows = [], 0
        return self._total


def _coded(column: Column, rows: int) -> tuple[list[str], Codes]:
    """Return the distinct texts of a column, in order, and the index of each row's text."""
    if isinstance(column, Constant):
        return [column.value], np.zeros(rows, np.uint64)
    if isinstance(column, Coded):
        used, places = np.unique(column.codes, return_inverse=True)
        return _joined([(column.texts.values[used].tolist(), places)])
    seen: dict[str, int] = {}
    codes = np.fromiter((seen.setdefault(text, len(seen)) for text in to_iterable(column)), np.uint64, rows)
    return _joined([(list(seen), codes)])


def _merged(parts: Sequence[tuple[Sequence[str], npt.NDArray[Any]]]) -> tuple[Sequence[str], Codes]:
    """Do the same as `_joined` for columns with sorted texts; avoid sorting if one column has all texts."""
    largest = max((texts for texts, _ in parts), key=len)
    places = {text: place for place, text in enumerate(largest)}
    codes = []
    for texts, code in parts:
        try:
            codes.append(np.fromiter(map(places.__getitem__, texts), np.uint64, len(texts))[code])
        except KeyError:
            return _joined(parts)
    return largest, np.concatenate(codes)


def _joined(parts: Iterable[tuple[Sequence[str], npt.NDArray[Any]]]) -> tuple[list[str], Codes]:
    """Return the distinct texts of several columns, in order, and the index of each row's text, column by column."""
    parts = list(parts)
    joined = sorted(set().union(*(texts for texts, _ in parts)))
    places = {text: place for place, text in enumerate(joined)}
    codes = [np.fromiter(map(places.__getitem__, texts), np.uint64, len(texts))[code] for texts, code in parts]
    return joined, np.concatenate(codes)


def _in_use(texts: Sequence[str], codes: Codes) -> tuple[list[str], Codes]:
    """Return the texts without those that no row has, and the rows' indices in them."""
    used, places = np.unique(codes, return_inverse=True)
    return [texts[number] for number in used.tolist()], places.astype(np.uint64)


def _sizes(payloads: Column, rows: int) -> Numbers:
    """Return the number of bytes of each payload."""
    if isinstance(payloads, Constant):
        return np.full(rows, len(payloads.value), np.uint64)
    if isinstance(payloads, LazyColumn):
        import pyarrow.compute as pc

        sizes: Numbers = pc.binary_length(payloads.toarrow()).to_numpy(zero_copy_only=False).astype(np.uint64)
        return sizes
    return np.fromiter(map(len, to_iterable(payloads)), np.uint64, rows)


_VERSION = 1
_INDEX = b"\0tallies"
_PART = b"\0tally"
_PART_BYTES = 1 << 18
_ROW_BYTES = 48


class TallyRange(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """The index entry of one table: it counts a generation's messages with positions in (``before``, ``last``]."""

    before: int
    last: int
    level: int
    """The table's merge level: 0 for a new table, else one more than that of the tables merged into it."""
    messages: int
    parts: int


class TallyIndex(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The tables of a generation in order of positions. Their ranges don't overlap."""

    version: int = _VERSION
    ranges: tuple[TallyRange, ...] = ()


class _TallyPart(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    version: int = _VERSION
    size: int
    """The size of the data before compression, in bytes."""
    data: bytes


_Rows = tuple[list[str], list[str], int, bytes, bytes, bytes, bytes, bytes, bytes]
"""The data of a part: topics, client ids, the lowest position, and the columns."""

_INDEXES = RecordCodec(TallyIndex, _VERSION)
_PARTS = RecordCodec(_TallyPart, _VERSION)
_ROWS = msgspec.msgpack.Decoder(_Rows)


def load_index(reader: Reader, generation: int) -> TallyIndex:
    """Return the index of a generation's tally tables."""
    key = _INDEX + encode_generation(generation)
    data = reader.get(STATE, key)
    return TallyIndex() if data is None else _INDEXES.decode(key, data, f"state: tallies of generation {generation}")


def put_index(write: WriteBatch, generation: int, index: TallyIndex) -> None:
    """Add the index of a generation's tally tables to a write."""
    key = _INDEX + encode_generation(generation)
    write.put(STATE, key, _INDEXES.encode(key, index))


def load_tally(
    reader: Reader, generation: int, counted: TallyRange, topic_filter: TopicFilter | None = None
) -> Iterator[Tally]:
    """Yield the parts of a table that may count messages of a filter; None stands for all messages.

    Raises `CorruptionError` if a part that is read is damaged or missing.
    """
    keys = _keys(generation, counted)
    place = f"state: tally of generation {generation} up to position {counted.last}"

    @functools.cache
    def part(number: int) -> Tally:
        return _load_part(reader, keys[number], place)

    span = None if topic_filter is None else _span(topic_filter)
    if span is None:
        yield from (_load_part(reader, key, place) for key in keys)
        return
    lowest, end = span
    # A topic may continue in the next part, so the search is for the last part that begins before the lowest topic.
    begin = bisect_left(range(1, len(keys)), True, key=lambda number: part(number).topics[0] >= lowest)
    yield from takewhile(lambda found: found.topics[0] < end, map(part, range(begin, len(keys))))


def _load_part(reader: Reader, key: bytes, place: str) -> Tally:
    data = reader.get(STATE, key)
    if data is None:
        raise CorruptionError("a part of it is missing", place)
    part = _PARTS.decode(key, data, place)
    try:
        return _unpacked(zstandard.ZstdDecompressor().decompress(part.data, max_output_size=part.size))
    except (zstandard.ZstdError, msgspec.DecodeError) as bad:
        raise CorruptionError(str(bad), place) from bad


def sum_tables(tables: Sequence[Iterator[Tally]]) -> Iterator[Tally]:
    """Yield the sum of several tables, each given as its parts in order, in parts of about `_HELD` rows in order.

    Parts are read as they are needed, so memory doesn't grow with the rows of the tables.
    """
    held = list[Tally]()
    read = dict.fromkeys(range(len(tables)), ("", ""))
    """The last pair read from each table, unless all of the table was read."""
    while read:
        number = min(read, key=read.__getitem__)
        part = next(tables[number], None)
        if part is None:
            del read[number]
            continue
        held.append(part)
        read[number] = part.topics[int(part.topic[-1])], part.client_ids[int(part.client_id[-1])]
        if sum(map(len, held)) >= _HELD:
            end = min(read.values())  # the rows of all tables up to this pair have been read
            cut = [part.split_after(*end) for part in held]
            yield Tally.sum([before for before, _ in cut])
            held = [after for _, after in cut if len(after)]
    yield Tally.sum(held)


def encoded_parts(
    generation: int, counted: TallyRange, tallies: Iterable[Tally]
) -> tuple[TallyRange, list[tuple[bytes, bytes]]]:
    """Return a table's range with its numbers of messages and of parts, and the key and value of each part.

    ``tallies`` have the table's rows in order; each is encoded before the next is requested.
    """
    compress, records, messages = zstandard.ZstdCompressor().compress, list[_TallyPart](), 0
    for tally in tallies:
        messages += tally.count
        for part in _cut(tally):
            raw = _packed(part)
            records.append(_TallyPart(size=len(raw), data=compress(raw)))
    counted = msgspec.structs.replace(counted, parts=len(records), messages=messages)
    keys = _keys(generation, counted)
    return counted, [(key, _PARTS.encode(key, part)) for key, part in zip(keys, records, strict=True)]


def remove_parts(write: WriteBatch, generation: int, counted: TallyRange) -> None:
    """Add the removal of a table to a write, to which the caller must also add the generation's new index."""
    for key in _keys(generation, counted):
        write.delete(STATE, key)


def remove_tallies(write: WriteBatch, generation: int) -> None:
    """Add the removal of all tables of a generation to a write."""
    write.delete_range(STATE, _PART + encode_generation(generation), _PART + encode_generation(generation + 1))
    write.delete(STATE, _INDEX + encode_generation(generation))


def _keys(generation: int, counted: TallyRange) -> list[bytes]:
    prefix = _PART + encode_generation(generation) + counted.last.to_bytes(8, "big")
    return [prefix + part.to_bytes(4, "big") for part in range(counted.parts)]


def _cut(tally: Tally) -> Iterator[Tally]:
    """Split a tally into parts of bounded size."""
    if not len(tally):
        return
    new_topic, new_client = (
        np.diff(codes, prepend=codes[:1] + np.uint64(1)) != 0 for codes in (tally.topic, tally.client_id)
    )
    sizes = np.full(len(tally), _ROW_BYTES)
    sizes[new_topic] += lengths(tally.topics)[tally.topic[new_topic]]
    sizes[new_client] += lengths(tally.client_ids)[tally.client_id[new_client]]
    ends = np.cumsum(sizes)
    start = 0
    while start < len(tally):
        before = int(ends[start]) - int(sizes[start])
        stop = max(int(np.searchsorted(ends, before + _PART_BYTES, side="right")), start + 1)
        yield tally.window(start, stop)
        start = stop


def lengths(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the number of bytes of each text in UTF-8."""
    found = np.fromiter(map(len, texts), np.int64, len(texts))
    if not "".join(texts).isascii():
        found = np.fromiter((len(text.encode()) for text in texts), np.int64, len(texts))
    return found


def _packed(part: Tally) -> bytes:
    lowest = int(part.first.min())
    return msgspec.msgpack.encode(
        (
            part.topics,
            part.client_ids,
            lowest,
            _planes(np.diff(part.topic, prepend=np.uint64(0))),
            _planes(part.client_id),
            _planes(part.first - np.uint64(lowest)),
            _planes(part.last - part.first),
            _planes(part.messages),
            _planes(part.size),
        )
    )


def _unpacked(raw: bytes) -> Tally:
    topics, client_ids, lowest, *columns = _ROWS.decode(raw)
    topic, client_id, first, span, messages, size = map(_numbers, columns)
    first = first + np.uint64(lowest)
    return Tally(topics, client_ids, np.cumsum(topic, dtype=np.uint64), client_id, first, first + span, messages, size)


def _planes(column: npt.NDArray[np.uint64]) -> bytes:
    """Return the lowest bytes of all numbers, then the next bytes, and so on, which compresses well."""
    return column.astype("<u8").view(np.uint8).reshape(-1, 8).T.tobytes()


def _numbers(planes: bytes) -> npt.NDArray[np.uint64]:
    numbers = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(8, -1).T).view("<u8").ravel()
    return numbers.astype(np.uint64)
