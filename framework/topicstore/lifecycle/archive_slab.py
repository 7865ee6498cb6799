"""`ArchiveSlab`: a generation that is read from its export as if it were local. It is read-only.

It has one stream, in order of positions. A place is ``"parquet"``, a zero byte and the next position, 8 bytes
big-endian. A place in any other form is from the time when the generation was local.

A read skips row groups by their positions in `topicstore.lifecycle.export_format.Contents`. Of other row groups, it
reads topics and positions first, and the rest only if a topic matches. All bytes are verified by digests. Each read of
damaged or missing data raises an error that names the file. Errors are not remembered, so when a disk is available
again, the database need not be reopened.

Decoded row groups of all exports that a process reads are cached, up to `_KEPT_BYTES` together, for the next batches.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from topicstore.contract.arrow import SCHEMA
from topicstore.contract.batch import MessageBatch, unread
from topicstore.contract.columns import ArrowColumn, Coded, Column, Constant, LazyColumn, Texts
from topicstore.contract.cursors import Cursor
from topicstore.contract.descriptors import naming
from topicstore.contract.engine import WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    EngineError,
    GenerationArchivedError,
    GenerationError,
    NewerFormatError,
)
from topicstore.contract.forking import remember
from topicstore.contract.layout import (
    Damage,
    DeleteStep,
    ReadCounters,
    ReadLimits,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
)
from topicstore.contract.model import Properties
from topicstore.contract.positions import Positions
from topicstore.contract.replay_plan import GenerationPlan, ReplayPlan, ShardPlan
from topicstore.contract.requests import ReadResult
from topicstore.contract.topics import TopicFilter
from topicstore.storage.directory.files import convert_os_errors
from topicstore.storage.replays import run

from .export_format import Contents, Group, Part, read_contents, read_head

__all__ = ["ArchiveSlab", "digest_of", "digests_of", "rows_of"]

_STREAM = 0
_TAG = b"parquet\0"
_KEPT_BYTES = 64 << 20
_BATCH, _BATCH_BYTES = 16_384, 8 << 20
_KNOWN = 256
"""Number of filters for which a slab caches whether they match any topic."""
_FILTERS = 4
"""Number of filters whose matching topics are cached with a row group."""
_FIRST = ["topic", "position"]
_REST = [name for name in SCHEMA.names if name not in ("topic", "properties")]
_CODED = ["topic", "client_id"]
_FIELDS = {
    "timestamp": "timestamps",
    "client_id": "client_ids",
    "qos": "qos",
    "retain": "retain",
    "payload": "payloads",
    "properties": "properties",
}
"""The columns of a `MessageBatch`, by the columns of a file from which they are made."""

Rows = npt.NDArray[np.intp]


# --- files ------------------------------------------------------------------------------


def _footer(file: int, size: int) -> bytes:
    """Return the metadata at the end of a Parquet file, with its length and the magic number."""
    tail = os.pread(file, 8, max(0, size - 8))
    length = int.from_bytes(tail[:4], "little") + 8
    if len(tail) < 8 or length > size:
        raise ValueError("it does not end like a Parquet file")
    return os.pread(file, length, size - length)


def _chunk(metadata: pq.FileMetaData, group: int, column: int) -> tuple[int, int]:
    """Return the offset and the size of a column chunk in bytes."""
    chunk = metadata.row_group(group).column(column)
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page:
        begin = min(begin, chunk.dictionary_page_offset)
    return begin, chunk.total_compressed_size


def digests_of(path: Path, metadata: pq.FileMetaData) -> tuple[str, list[bytes]]:
    """Return the digest of a file's footer, and, for each row group, those of its column chunks."""
    with _opened(path) as file:
        groups = [
            b"".join(_digest(file, *_chunk(metadata, group, column)) for column in range(metadata.num_columns))
            for group in range(metadata.num_row_groups)
        ]
        return xxhash.xxh3_64_hexdigest(_footer(file, os.fstat(file).st_size)), groups


def digest_of(path: Path) -> str:
    """Return the digest of a whole file."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            hasher.update(data)
    return hasher.hexdigest()


def _digest(file: int, begin: int, size: int) -> bytes:
    return xxhash.xxh3_64_digest(os.pread(file, size, begin))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            yield file
    finally:
        os.close(file)


class _File:
    """A Parquet file of an export, whose metadata has been read and verified."""

    def __init__(self, path: Path, part: Part) -> None:
        self._path = path
        self._part = part
        with _opened(path) as file:
            size = os.fstat(file).st_size
            if size != part.size:
                raise ValueError(f"it has {size:,} bytes, not {part.size:,}")
            footer = _footer(file, size)
        if xxhash.xxh3_64_hexdigest(footer) != part.footer:
            raise ValueError("the checksum of its footer is wrong")
        self._metadata = pq.read_metadata(pa.BufferReader(b"PAR1" + footer))

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Return columns of a row group. Raises `ValueError` if a column's digest is wrong."""
        wanted = set(columns)
        leaves = [self._metadata.schema.column(leaf).path.split(".")[0] for leaf in range(self._metadata.num_columns)]
        digests = self._part.groups[group].chunks
        with _opened(self._path) as file:
            for leaf, name in enumerate(leaves):
                begin, size = _chunk(self._metadata, group, leaf)
                if name in wanted and _digest(file, begin, size) != digests[8 * leaf : 8 * leaf + 8]:
                    raise ValueError(f"the checksum of column {name} is wrong")
        with pq.ParquetFile(self._path, metadata=self._metadata, read_dictionary=_CODED) as parquet:
            return parquet.read_row_group(group, columns=list(columns), use_threads=False)


# --- row groups -------------------------------------------------------------------------


class _Place(NamedTuple):
    """The location of a row group."""

    part: int
    number: int
    group: Group


class _RowGroup:
    """A row group, decoded as far as needed."""

    def __init__(self, first: pa.Table) -> None:
        self.positions: Positions = first["position"].to_numpy()
        self.topics = _coded(first["topic"])
        self.rest: pa.Table | None = None
        """The other columns, those that were read so far; None if there are none."""
        self._matches: dict[str, npt.NDArray[np.bool_]] = {}

    def rows(self, topic_filter: TopicFilter, first: int, last: int) -> Rows:
        """Return the rows whose topics match, with positions from ``first`` to ``last``, inclusive."""
        matches = self._matches.get(topic_filter.text)
        if matches is None:
            texts = self.topics.texts.values
            matches = np.fromiter(map(topic_filter.matches, texts), np.bool_, len(texts))
            if len(self._matches) < _FILTERS:
                self._matches[topic_filter.text] = matches
        begin, end = np.searchsorted(self.positions, np.array([first, last + 1], dtype=np.uint64))
        rows: Rows = np.flatnonzero(matches[self.topics.codes[begin:end]]) + begin
        return rows

    @property
    def size(self) -> int:
        """The approximate size in memory, in bytes."""
        return 12 * len(self.positions) + (0 if self.rest is None else self.rest.nbytes)


class _Kept:
    """The cache of the row groups used most recently, of all slabs of the process. Empty in a forked child."""

    def __init__(self) -> None:
        self.leave_to_parent()
        remember(self)

    def leave_to_parent(self) -> None:
        """Start empty, with a new lock, in a forked child: the thread that held the old lock doesn't exist there."""
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._groups: OrderedDict[tuple[object, int, int], tuple[_RowGroup, int]] = OrderedDict()
        self._size = 0

    def get(self, key: tuple[object, int, int]) -> _RowGroup | None:
        with self._lock:
            found = self._groups.get(key)
            if found is not None:
                self._groups.move_to_end(key)
            return None if found is None else found[0]

    def keep(self, key: tuple[object, int, int], group: _RowGroup) -> None:
        """Cache a row group as the most recently used one, with its current size."""
        with self._lock:
            self._remove_locked(key)
            self._groups[key] = group, group.size
            self._size += group.size
            while self._size > _KEPT_BYTES:  # even the new one, if its payloads exceed the limit
                self._remove_locked(next(iter(self._groups)))

    def _remove_locked(self, key: tuple[object, int, int]) -> None:
        _, size = self._groups.pop(key, (None, 0))
        self._size -= size


_kept = _Kept()


# --- the slab ---------------------------------------------------------------------------


class ArchiveSlab(Slab):
    """One shard's part of a generation, in a directory of an export that is read on demand."""

    def __init__(self, directory: Path, database: str, shard: int, generation: int, messages: int) -> None:
        self.counters = ReadCounters()
        self._directory = directory
        self._whose = (database, shard, generation, messages)
        self._shard = shard
        self._messages = messages
        self._contents: Contents | None = None
        self._places: list[_Place] = []
        self._files: dict[int, _File] = {}
        self._matching: dict[str, bool] = {}
        self._key = object()

    # --- contents ---

    @property
    def contents(self) -> Contents:
        """The contents file of the export. Raises `CorruptionError` if it is missing, or of another generation."""
        if self._contents is None:
            with self._named(self._directory):
                contents = read_contents(self._directory)
            if contents is None:
                raise CorruptionError("there is no complete export", self._place(self._directory))
            found = (contents.database, contents.shard, contents.generation, contents.messages)
            if found != self._whose:
                reason = "it is the export of database {}, shard {}, generation {}, with {:,} messages".format(*found)
                raise CorruptionError(reason, self._place(self._directory))
            self._places = [
                _Place(part, number, group)
                for part, file in enumerate(contents.parts)
                for number, group in enumerate(file.groups)
            ]
            self._contents = contents
        return self._contents

    def _place(self, path: Path) -> str:
        _, shard, generation, _ = self._whose
        return f"shard {shard}, generation {generation}, {path}"

    @contextmanager
    def _named(self, path: Path, within: str = "") -> Iterator[None]:
        """Convert errors of reading a file to `CorruptionError`, but a lack of permission to `EngineError`."""
        try:
            with convert_os_errors():
                yield
        except PermissionError as bad:
            raise EngineError(f"{self._place(path)}: {bad}") from bad
        except (OSError, ValueError, KeyError, pa.ArrowException) as bad:
            raise CorruptionError(str(bad) or type(bad).__name__, self._place(path) + within) from bad
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, self._place(path)) from bad

    # --- reading ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return the only stream; an empty list if it is certain that no topic matches."""
        return [StreamInfo(stream=_STREAM, pattern="#")] if self._messages and self._may_match(topic_filter) else []

    def _may_match(self, topic_filter: TopicFilter) -> bool:
        found = self._matching.get(topic_filter.text)
        if found is None:
            topics = self.contents.topics
            found = topics is None or any(map(topic_filter.matches, topics))
            if len(self._matching) < _KNOWN:
                self._matching[topic_filter.text] = found
        return found

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place of a position, in a form that differs from the places of layouts."""
        if stream != _STREAM:
            raise KeyError(stream)
        return _place_at(position)

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Read row groups, beginning at the place, up to the limits.

        Raises `GenerationArchivedError` for a place from the time when the generation was local.
        """
        at = start = self._position_of(stream, place)
        batches: list[MessageBatch] = []
        rows = size = 0
        self.counters.seeks += 1
        for where in self._behind(at):
            if where.group.first > limits.bound:
                break
            late = limits.deadline is not None and at > start and time.monotonic() >= limits.deadline
            if rows >= limits.rows or size >= limits.bytes or late:
                return _step(batches, at, exhausted=False)
            batch, more, at = self._take(where, topic_filter, at, limits, rows, size)
            batches.append(batch)
            rows, size = rows + len(batch), size + more
            if at <= min(limits.bound, where.group.last):
                return _step(batches, at, exhausted=False)
        return _step(batches, max(at, limits.bound + 1), exhausted=True)

    def _position_of(self, stream: int, place: bytes) -> int:
        if stream != _STREAM or len(place) != len(_TAG) + 8 or not place.startswith(_TAG):
            _, shard, generation, _ = self._whose
            raise GenerationArchivedError(
                f"generation {generation} of shard {shard} was archived since the cursor was made; "
                "all its messages are there: begin again after the last that was read"
            )
        return int.from_bytes(place[len(_TAG) :], "big")

    def _behind(self, position: int) -> Iterator[_Place]:
        """Yield the row groups whose last position is not before ``position``, in order."""
        if self.contents.messages:
            begin = bisect_left(self._places, position, key=lambda where: where.group.last)
            yield from self._places[begin:]

    def _take(
        self, where: _Place, topic_filter: TopicFilter, first: int, limits: ReadLimits, rows_before: int, size: int
    ) -> tuple[MessageBatch, int, int]:
        """Return the first matching rows of a row group, the bytes of their payloads, and the next position to read.

        ``rows_before`` and ``size``: the rows and bytes that the call of `next` has already read.
        """
        group, last = self._group(where), limits.bound
        rows = group.rows(topic_filter, first, last)
        if not len(rows):
            self.counters.skipped += 1
            return MessageBatch.empty(), 0, min(where.group.last, last) + 1
        rows_left, bytes_left = limits.rows - rows_before, limits.bytes - size
        batch, taken = self._batch(where, group, rows[:rows_left], bytes_left, limits.columns)
        self.counters.visited += 1
        self.counters.rows += len(batch)
        whole = len(batch) == len(rows)
        return batch, taken, (min(where.group.last, last) if whole else int(batch.positions[-1])) + 1

    def _group(self, where: _Place) -> _RowGroup:
        key = (self._key, where.part, where.number)
        group = _kept.get(key)
        if group is None:
            group = _RowGroup(self._read(where, _FIRST))
            _kept.keep(key, group)
        return group

    def _read(self, where: _Place, columns: Sequence[str]) -> pa.Table:
        part = self.contents.parts[where.part]
        path = self._directory / part.name
        with self._named(path, f", row group {where.number}"):
            file = self._files.get(where.part)
            if file is None:
                file = self._files[where.part] = _File(path, part)
            return file.read(where.number, columns)

    def _batch(
        self, where: _Place, group: _RowGroup, rows: Rows, most: int, columns: frozenset[str]
    ) -> tuple[MessageBatch, int]:
        """Return the first of the rows with about ``most`` bytes of payloads, and the number of these bytes."""
        wanted = [name for name in _rest_of(where.group) if _FIELDS[name] in columns]
        rest = self._rest(where, group, wanted)
        size = 0
        if "payload" in wanted:
            payloads = rest["payload"].chunk(0)
            ends = np.frombuffer(payloads.buffers()[1], np.int32)[payloads.offset :]
            sizes = np.cumsum(ends[rows + 1] - ends[rows])
            rows = rows[: int(np.searchsorted(sizes, most)) + 1]
            size = int(sizes[len(rows) - 1])
        together = int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        found: dict[str, Any] = {_FIELDS[name]: unread(_FIELDS[name], len(rows)) for name in _FIELDS}
        for name in wanted:
            chosen = rest[name][int(rows[0]) : int(rows[-1]) + 1] if together else rest[name].take(rows)
            found[_FIELDS[name]] = _CONVERTED[name](chosen)
        batch = MessageBatch(
            topics=Coded(group.topics.codes[rows], group.topics.texts),
            **found,
            positions=group.positions[rows],
            shards=Constant(self._shard, len(rows)),
        )
        return batch, size

    def _rest(self, where: _Place, group: _RowGroup, wanted: Sequence[str]) -> pa.Table:
        """Return the columns of a row group that were read already, and those of ``wanted``, which are read now."""
        known = [] if group.rest is None else group.rest.column_names
        if group.rest is None or not set(wanted) <= set(known):
            names = [name for name in _rest_of(where.group) if name in known or name in wanted]
            group.rest = (self._read(where, names) if names else pa.table({})).combine_chunks()
            _kept.keep((self._key, where.part, where.number), group)
        return group.rest

    # --- refused calls ---

    def _refuse(self) -> NoReturn:
        _, _, generation, _ = self._whose
        raise GenerationError(
            f"generation {generation} lies in the export {self._directory}, which is never changed: "
            "nothing can be stored in it or deleted from it; it can be dropped as a whole"
        )

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Raise `GenerationError`, because an export is never changed."""
        self._refuse()

    def committed(self) -> None:
        """Raise `GenerationError`, because nothing can be stored in an export."""
        self._refuse()

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Raise `GenerationError`, because nothing can be deleted from an export."""
        self._refuse()

    # --- inspecting ---

    def info(self) -> SlabInfo:
        """Return the location and size of the export, or a description of its damage."""
        details: dict[str, str | int] = {"exported to": str(self._directory)}
        try:
            details |= {"files": len(self.contents.parts), "file bytes": self.contents.size}
        except (CorruptionError, NewerFormatError) as bad:
            details["damage"] = str(bad)
        return SlabInfo(streams=int(self._messages > 0), details=details)

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Read every byte of every file, and every row, without caches; yield damage and numbers of rows."""
        self._contents, self._files = None, {}
        try:
            parts = self.contents.parts
            self._check_head()
        except CorruptionError as bad:
            yield Damage(place=bad.place, reason=bad.reason)
            return
        for number, part in enumerate(parts):
            damaged = False
            for where in self._places:
                if where.part == number:
                    found = self._verify_group(where)
                    damaged |= isinstance(found, Damage)
                    yield found
            if not damaged:
                yield from self._verify_file(self._directory / part.name, part)

    def _check_head(self) -> None:
        """Raise `CorruptionError` if the export's head is damaged or missing, as the export can't be restored then."""
        target = self._directory.parent.parent
        with self._named(target):
            head = read_head(target)
        if head is None or head.database != self._whose[0]:
            raise CorruptionError("it does not say whose export it is", self._place(target))

    def _verify_group(self, where: _Place) -> Damage | int:
        try:
            rows = _RowGroup(self._read(where, _FIRST)).positions
            self._read(where, [*_REST, "properties"])
        except CorruptionError as bad:
            return Damage(place=bad.place, reason=bad.reason)
        return len(rows)

    def _verify_file(self, path: Path, part: Part) -> Iterator[Damage]:
        """Yield the damage of a whole file, including bytes that belong to no row."""
        try:
            with self._named(path):
                whole = digest_of(path) == part.digest
        except CorruptionError as bad:
            yield Damage(place=bad.place, reason=bad.reason)
            return
        if not whole:
            yield Damage(place=self._place(path), reason="the checksum of the file is wrong")


def rows_of(slabs: Sequence[ArchiveSlab]) -> Iterator[MessageBatch]:
    """Yield all rows of slabs of any shards and generations, in order of positions, then of shards."""
    by_place = {(slab.contents.shard, slab.contents.generation): slab for slab in slabs}
    filters = sorted({text for slab in slabs for text in slab.contents.filters})
    plans = [
        _plan([by_place[place] for place in sorted(by_place) if place[0] == shard], shard, text)
        for shard in sorted({shard for shard, _ in by_place})
        for text in filters
    ]

    def fetch(cursor: Cursor, bound: int, limit: int) -> ReadResult:
        slab = by_place[cursor.shard, cursor.generation]
        limits = ReadLimits(rows=limit, bytes=_BATCH_BYTES, bound=bound)
        step = slab.next(_STREAM, cursor.filter, cursor.place, limits)
        moved = cursor.advance(step.place)
        return ReadResult(batch=step.batch, cursor=moved, end_of_stream=step.exhausted, caught_up=step.exhausted)

    return run(ReplayPlan(shards=plans, order="time", batch_size=_BATCH, timestamps=None), fetch)


def _plan(slabs: Sequence[ArchiveSlab], shard: int, text: str) -> ShardPlan:
    generations = [
        GenerationPlan([Cursor(b"", shard, slab.contents.generation, _STREAM, text, _place_at(0))], 1)
        for slab in slabs
        if text in slab.contents.filters
    ]
    return ShardPlan(shard=shard, bound=max(slab.contents.last_position for slab in slabs), generations=generations)


def _rest_of(group: Group) -> list[str]:
    return [*_REST, "properties"] if group.properties else _REST


def _place_at(position: int) -> bytes:
    return _TAG + position.to_bytes(8, "big")


def _step(batches: list[MessageBatch], at: int, *, exhausted: bool) -> SlabStep:
    return SlabStep(batch=MessageBatch.concat(batches), place=_place_at(at), exhausted=exhausted)


# --- columns ----------------------------------------------------------------------------


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _coded(column: pa.ChunkedArray) -> Coded:
    """Convert a dictionary-encoded column of texts."""
    array = _array(column.unify_dictionaries())
    values = np.empty(len(array.dictionary), dtype=object)
    values[:] = array.dictionary.to_pylist()
    texts = Texts(values)
    texts.count = len(values)
    return Coded(array.indices.to_numpy(), texts)


def _folded(column: pa.ChunkedArray) -> Column:
    """Convert a column; return a `Constant` if all its values are equal."""
    ends = pc.min_max(column)
    if ends["min"] == ends["max"]:
        return Constant(ends["min"].as_py(), len(column))
    return ArrowColumn(_array(column))


def _properties_of(column: pa.ChunkedArray) -> Column:
    if column.null_count == len(column):
        return Constant(None, len(column))
    return _PropertiesColumn(_array(column))


_CONVERTED: dict[str, Callable[[pa.ChunkedArray], Column]] = {
    "timestamp": lambda column: column.cast(pa.int64()).to_numpy(),
    "client_id": _coded,
    "qos": _folded,
    "retain": _folded,
    "payload": lambda column: ArrowColumn(_array(column)),
    "properties": lambda column: _properties_of(column),
}
"""The conversion of each column of a file."""


class _PropertiesColumn(LazyColumn):
    """A column of properties, converted to `Properties` on first use."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array
        self._list: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return _PropertiesColumn(self._array[index]) if isinstance(index, slice) else self.tolist()[index]

    def tolist(self) -> list[Any]:
        """Return `Properties`, and None where there are none."""
        if self._list is None:
            self._list = [None if fields is None else _properties(fields) for fields in self._array.to_pylist()]
        return self._list

    def toarrow(self) -> pa.Array:
        """Return the properties as the Arrow array that was read."""
        return self._array


def _properties(fields: dict[str, Any]) -> Properties:
    pairs = fields.pop("user_properties")
    return Properties(**fields, user_properties=tuple((pair["name"], pair["value"]) for pair in pairs))
