"""The ``table`` layout: one row per message in a table of typed columns, so that SQL can query the history.

It needs an engine that speaks SQL (capability ``sql``), in DuckDB's dialect.

Stored form, version 1: a table ``messages`` of the keyspace ``data``, in order of position::

    generation    UINTEGER     the generation's number
    stream        UBIGINT      0: a slab is one stream
    position      UBIGINT
    shard         USMALLINT    the shard that the row was stored for
    time          TIMESTAMP    the time in the position, UTC
    timestamp     TIMESTAMP    the message's own time, UTC
    topic         VARCHAR
    client_id     VARCHAR
    qos           TINYINT
    retain        BOOLEAN
    payload       BLOB         NULL if it has more than 65,536 bytes
    payload_bytes UINTEGER     the payload's size
    properties    STRUCT       the fields of `topicstore.Properties`, NULL if there are none

and in the keyspace ``data`` itself, because a column store holds many rows in memory at a time::

    (generation, 0, position) -> xxh3 of the payload with the position as seed, 8 bytes big-endian
                                 | payload of more than 65,536 bytes

The engine's own checksums detect damage; DuckDB has one for each block of its file and each entry of its
log. The shard number detects a row of another shard. Rows are returned in the order in which
they were inserted, which DuckDB guarantees for a query of one table without ORDER BY
(https://duckdb.org/docs/2.0/sql/dialect/order_preservation.html); positions that don't increase count as
damage.

A filter becomes SQL: a literal topic is compared by ``=``, and wildcards by a regular expression over whole
topics. For a filter with very many levels, SQL compares only the prefix of the topics, and Python matches the rest.
"""

# ruff: noqa: S608 - statements are built from constants; values are parameters

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from topicstore import SCHEMA, MessageBatch, Properties, TopicFilter
from topicstore.contract.batch import FIELDS, unread
from topicstore.contract.columns import Column, Constant, LazyColumn, to_iterable, to_list
from topicstore.contract.engine import DATA, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import (
    Damage,
    DeleteStep,
    Layout,
    ReadCounters,
    ReadLimits,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
)
from topicstore.contract.positions import COUNTER_BITS
from topicstore.contract.topics import matches_any

__all__ = ["TableLayout", "TableOptions"]

_STREAM = 0
_INLINE = 65_536
"""The most bytes of a payload in its row: a query holds 2,048 rows or more in memory.

See https://github.com/duckdb/duckdb/pull/23396.
"""
_LOOKED_AT, _DELETED = 65_536, 2_000
"""Rows read between two checks of the deadline, and rows that one step of a delete examines while writers wait."""
_LEVELS = 100
"""The most levels of a filter that becomes a regular expression."""

_PROPERTIES = SCHEMA.field("properties").type
_MICROSECONDS = pa.timestamp("us")
_COLUMNS = pa.schema(
    [
        ("generation", pa.uint32()),
        ("stream", pa.uint64()),
        ("position", pa.uint64()),
        ("shard", pa.uint16()),
        ("time", _MICROSECONDS),
        ("timestamp", _MICROSECONDS),
        ("topic", pa.string()),
        ("client_id", pa.string()),
        ("qos", pa.int8()),
        ("retain", pa.bool_()),
        ("payload", pa.large_binary()),
        ("payload_bytes", pa.uint32()),
        ("properties", _PROPERTIES),
    ]
)
_READ = {
    "timestamps": "timestamp",
    "client_ids": "client_id",
    "qos": "qos",
    "retain": "retain",
    "payloads": "payload",
    "properties": "properties",
}
"""The columns of the table from which those of a `MessageBatch` are made, besides position, topic and shard."""
_BYTES = f"payload_bytes + strlen(topic) + strlen(client_id) + 8 * (payload_bytes > {_INLINE})::INTEGER"
"""The bytes of a message: its texts and payload, and the checksum of a payload that is stored separately."""
_SOUND = (
    "(topic <> '' AND client_id IS NOT NULL AND timestamp IS NOT NULL AND retain IS NOT NULL "
    "AND qos BETWEEN 0 AND 2 AND epoch_us(time) = position >> 11 AND (payload IS NULL) = "
    f"(payload_bytes > {_INLINE}) AND ifnull(octet_length(payload), payload_bytes) = payload_bytes) IS TRUE"
)
_REST = "hash(client_id, timestamp, retain, properties)"
"""The columns that verification reads only to check that they can be read."""


@attrs.frozen(kw_only=True)
class TableOptions:
    """The table layout has no options."""


class TableLayout(Layout):
    """A layout with one row per message in an SQL table."""

    Options = TableOptions

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        """Create the table with the first generation, so that it can be queried while it is empty."""
        write.put_rows(DATA, "messages", _COLUMNS.empty_table(), 0)

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        """Return the slab of one generation of one shard."""
        return TableSlab(engine, shard, generation)


# --- filters ------------------------------------------------------------------------------


class _Condition(NamedTuple):
    """The SQL condition for the topics of a filter."""

    sql: str
    values: tuple[str, ...]
    exact: bool
    """Whether all topics that meet the condition match the filter."""


_ANY = _Condition("true", (), True)
_LARGE = _Condition(f"payload_bytes > {_INLINE}", (), True)


def _condition(topic_filter: TopicFilter) -> _Condition:
    """Return the condition for topics that match a filter, as exactly as SQL evaluates it in reasonable time."""
    levels = topic_filter.levels
    if topic_filter.literal:
        return _Condition("topic = ?", (topic_filter.text,), True)
    terms, values = [], []
    if levels[0] in ("+", "#"):
        terms.append("NOT starts_with(topic, '$')")
    fixed = next(number for number, level in enumerate(levels) if level in ("+", "#"))
    prefix = "/".join(levels[:fixed])
    if prefix:
        terms.append("starts_with(topic, ?)")
        values.append(prefix)
    exact = len(levels) <= _LEVELS
    if exact and levels != ("#",):
        terms.append("regexp_full_match(topic, ?, 's')")
        values.append(_pattern(levels))
    return _Condition(" AND ".join(terms) or "true", tuple(values), exact)


def _pattern(levels: Sequence[str]) -> str:
    """Return the regular expression of the topics that match a filter's levels."""
    parts = ["[^/]*" if level == "+" else re.escape(level) for level in levels if level != "#"]
    return "/".join(parts) + ("(?:/.*)?" if levels[-1] == "#" else "")


# --- the slab -----------------------------------------------------------------------------


class TableSlab(Slab):
    """A slab with one stream. A reader's place is the next position, 8 bytes big-endian."""

    def __init__(self, engine: Engine, shard: int, generation: int) -> None:
        self.counters = ReadCounters()
        self._engine = engine
        self._shard = shard
        self._generation = generation
        self._largest: int | None = None
        """The bytes of the largest payload ever stored; None until the first read computes it."""

    # --- writing ---

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add the rows to a write batch, and separately the payloads that are too large for a row."""
        sizes = _sizes(batch.payloads)
        large = np.flatnonzero(sizes > _INLINE)
        rows = self._rows(batch, sizes, large)
        texts = sum(pc.sum(pc.binary_length(rows[name])).as_py() for name in ("topic", "client_id"))
        write.put_rows(DATA, "messages", rows, texts + int(sizes.sum()) - int(sizes[large].sum()))
        payloads = to_list(batch.payloads) if len(large) else []
        for row in large.tolist():
            position, payload = int(batch.positions[row]), payloads[row]
            write.put(DATA, self._key(position), _digest(payload, position) + payload)
        if self._largest is not None:
            self._largest = max(self._largest, int(sizes.max()))

    def _rows(self, batch: MessageBatch, sizes: npt.NDArray[np.uint32], large: npt.NDArray[np.intp]) -> pa.Table:
        """Return a batch as rows of the table."""
        count = len(batch)
        positions = np.asarray(batch.positions, dtype=np.uint64)
        bare = MessageBatch(**{name: getattr(batch, name) for name in FIELDS} | {"payloads": Constant(b"", count)})
        given = bare.to_arrow()
        columns = {name: given.column(name) for name in ("topic", "client_id", "qos", "retain", "properties")}
        columns |= {
            "generation": pa.array(np.full(count, self._generation, dtype=np.uint32)),
            "stream": pa.array(np.full(count, _STREAM, dtype=np.uint64)),
            "position": pa.array(positions),
            "shard": pa.array(np.full(count, self._shard, dtype=np.uint16)),
            "time": pa.array((positions >> np.uint64(COUNTER_BITS)).view(np.int64)).cast(_MICROSECONDS),
            "timestamp": given.column("timestamp").cast(_MICROSECONDS),
            "payload": _inline(batch.payloads, large),
            "payload_bytes": pa.array(sizes),
        }
        return pa.table([columns[name] for name in _COLUMNS.names], names=_COLUMNS.names)

    def _key(self, position: int) -> tuple[int, int, int]:
        return self._generation, _STREAM, position

    def committed(self) -> None:
        """Do nothing: no state in memory depends on the commit; a payload that wasn't stored only slows reads."""

    # --- reading ---

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        """Return stream 0, which holds all messages, for every filter."""
        return [StreamInfo(stream=_STREAM, pattern="#")]

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        """Return the place of a reader that starts at a position."""
        if stream != _STREAM:
            raise KeyError(stream)
        return position.to_bytes(8, "big")

    def reached(self, stream: int, place: bytes) -> int:
        """Return the last position that a reader at this place has passed."""
        if len(place) != 8:
            raise ValueError(place)
        return int.from_bytes(place, "big") - 1

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, limits: ReadLimits) -> SlabStep:
        """Query the rows from the place on: all in one query, or some at a time if there is a deadline."""
        if stream != _STREAM:
            raise KeyError(stream)
        if len(place) != 8:
            raise ValueError(place)
        at = int.from_bytes(place, "big")
        condition = _condition(topic_filter)
        read = ", ".join(["position, topic, shard", *(_READ[name] for name in _READ if name in limits.columns)])
        rows: pa.Table | None = None
        bound, deadline = limits.bound, limits.deadline
        while at <= bound:
            last = bound if deadline is None else self._row_position(at, bound, _LOOKED_AT)
            stop = self._stop(condition, at, last, limits)
            rows = self._select(read, condition, at, stop, limits.rows)
            at = stop + 1 if rows.num_rows < limits.rows else int(rows["position"][-1].as_py()) + 1
            if rows.num_rows or (deadline is not None and time.monotonic() >= deadline):
                break
        batch = MessageBatch.empty() if rows is None else self._batch(rows, condition, topic_filter, limits)
        self.counters.rows += len(batch)
        return SlabStep(batch=batch, place=at.to_bytes(8, "big"), exhausted=at > bound)

    def _select(self, columns: str, condition: _Condition, first: int, last: int, limit: int | None) -> pa.Table:
        """Return columns of the rows from one position to another, in their order."""
        statement = (
            f"SELECT {columns} FROM messages WHERE generation = ? AND position BETWEEN ?::UBIGINT AND ?::UBIGINT "
            f"AND {condition.sql}" + ("" if limit is None else f" LIMIT {limit}")
        )
        self.counters.seeks += 1
        rows = self._engine.sql(statement, (self._generation, first, last, *condition.values))
        self.counters.visited += rows.num_rows
        return rows

    def _row_position(self, first: int, last: int, rows: int) -> int:
        """Return the position of the row number ``rows`` from ``first`` on, or ``last`` if there are fewer rows."""
        statement = (
            "SELECT position FROM messages WHERE generation = ? AND position BETWEEN ?::UBIGINT AND ?::UBIGINT "
            f"LIMIT 1 OFFSET {rows - 1}"
        )
        found = self._engine.sql(statement, (self._generation, first, last))
        return int(found["position"][0].as_py()) if found.num_rows else last

    def _stop(self, condition: _Condition, first: int, last: int, limits: ReadLimits) -> int:
        """Return the position up to which payloads reach the limit of bytes, which the last one may exceed."""
        if "payloads" not in limits.columns:
            return last
        if self._largest is None:
            found = self._engine.sql(
                "SELECT max(payload_bytes) FROM messages WHERE generation = ?", (self._generation,)
            )
            self._largest = int(found.column(0)[0].as_py() or 0)
        if limits.rows * self._largest <= limits.bytes:
            return last
        rows = self._select("position, payload_bytes", condition, first, last, limits.rows)
        row = int(np.searchsorted(np.cumsum(rows["payload_bytes"].to_numpy(), dtype=np.uint64), limits.bytes))
        return int(rows["position"][row].as_py()) if row < rows.num_rows else last

    def _batch(
        self, rows: pa.Table, condition: _Condition, topic_filter: TopicFilter, limits: ReadLimits
    ) -> MessageBatch:
        """Return the matching rows as messages, with columns that stay in Arrow."""
        self._check(rows)
        if not condition.exact:
            topics = rows["topic"].combine_chunks().dictionary_encode()
            fits = pa.array([topic_filter.matches(topic) for topic in topics.dictionary.to_pylist()], pa.bool_())
            rows = rows.filter(pc.take(fits, topics.indices))
        payloads: list[bytes | None] | None = None
        if "payloads" in limits.columns and rows["payload"].null_count:
            payloads = self._payloads(rows)
            if None in payloads:  # some rows were deleted since the query
                kept = np.flatnonzero([payload is not None for payload in payloads])
                rows, payloads = rows.take(kept), [payloads[row] for row in kept]
        if not rows.num_rows:
            return MessageBatch.empty()
        columns: dict[str, Any] = {
            name: _CONVERTED.get(name, _column)(rows[column]) if name in limits.columns else unread(name, rows.num_rows)
            for name, column in _READ.items()
        }
        return MessageBatch(
            topics=_column(rows["topic"]),
            **(columns if payloads is None else columns | {"payloads": payloads}),
            positions=rows["position"].to_numpy(),
            shards=Constant(self._shard, rows.num_rows),
        )

    def _check(self, rows: pa.Table) -> None:
        """Raise `CorruptionError` for rows of another shard or in another order."""
        positions = rows["position"].to_numpy()
        wrong = np.append(positions[1:] <= positions[:-1], False) | (rows["shard"].to_numpy() != self._shard)
        if wrong.any():
            place = self._place(int(positions[int(np.flatnonzero(wrong)[0])]))
            raise CorruptionError("the row is another shard's, or in the wrong place", place)

    def _payloads(self, rows: pa.Table) -> list[bytes | None]:
        """Return all payloads, including separately stored ones; None for one that was deleted meanwhile."""
        payloads: list[bytes | None] = rows["payload"].to_pylist()
        missing = [row for row, payload in enumerate(payloads) if payload is None]
        positions = rows["position"].to_numpy()[missing].tolist()
        values = self._engine.get_many(DATA, [self._key(position) for position in positions])
        for row, position, value in zip(missing, positions, values, strict=True):
            payloads[row] = None if value is None else self._large(position, value)
        gone = [position for position, value in zip(positions, values, strict=True) if value is None]
        if gone and (there := self._select("position", _ANY, gone[0], gone[-1], None)["position"].to_pylist()):
            lost = sorted(set(gone).intersection(there))
            if lost:
                raise CorruptionError("the payload is missing", self._place(lost[0]))
        return payloads

    def _large(self, position: int, value: bytes) -> bytes:
        payload = value[8:]
        if value[:8] != _digest(payload, position):
            raise CorruptionError("the checksum of the payload is wrong", self._place(position))
        return payload

    def _place(self, position: int) -> str:
        return f"shard {self._shard}, generation {self._generation}, message at position {position}"

    # --- the rest ---

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        """Delete matching rows, and their separately stored payloads; each step examines two thousand rows."""
        condition = _condition(topic_filter)
        while first <= last:
            stop = self._row_position(first, last, _DELETED)
            rows = self._select(f"position, topic, {_BYTES} AS bytes", condition, first, stop, None)
            if not condition.exact:
                rows = rows.filter(pa.array(map(topic_filter.matches, rows["topic"].to_pylist()), pa.bool_()))
            if spare:
                goes = [not matches_any(spare, topic) for topic in rows["topic"].to_pylist()]
                rows = rows.filter(pa.array(goes, pa.bool_()))
            write = WriteBatch()
            for position in rows["position"].to_pylist():
                write.delete(DATA, self._key(position))
            yield DeleteStep(write=write, messages=rows.num_rows, freed=pc.sum(rows["bytes"]).as_py() or 0)
            first = stop + 1

    def info(self) -> SlabInfo:
        """Return the number of streams, which is one."""
        return SlabInfo(streams=1)

    def verify(self, bound: int) -> Iterator[Damage | int]:
        """Check every column of every row; yield the damage of each bad row and the number of intact rows."""
        first = 0
        while first <= bound:
            stop = bound
            try:
                stop = self._row_position(first, bound, _LOOKED_AT)
                yield from self._verify(first, stop)
            except CorruptionError as bad:
                place = f"shard {self._shard}, generation {self._generation}, positions {first} to {stop}"
                yield Damage(place=bad.place if "position " in bad.place else place, reason=bad.reason)
            first = stop + 1

    def _verify(self, first: int, last: int) -> Iterator[Damage | int]:
        columns = f"position, shard, payload_bytes, {_SOUND} AS sound, {_REST} AS rest"
        rows = self._select(columns, _ANY, first, last, None)
        self._check(rows)
        damages = [
            Damage(place=self._place(position), reason="the row contradicts itself")
            for position in rows.filter(pc.invert(rows["sound"]))["position"].to_pylist()
        ]
        if (pc.max(rows["payload_bytes"]).as_py() or 0) > _INLINE:
            damages += self._verify_large(first, last)
        yield from damages
        yield rows.num_rows - len(damages)

    def _verify_large(self, first: int, last: int) -> Iterator[Damage]:
        """Read the separately stored payloads, one at a time, because each may have many megabytes."""
        large = self._select("position, payload", _LARGE, first, last, None)
        for row in range(large.num_rows):
            try:
                self._payloads(large.slice(row, 1))
            except CorruptionError as bad:
                yield Damage(place=bad.place, reason=bad.reason)


# --- columns ------------------------------------------------------------------------------


def _digest(payload: bytes, position: int) -> bytes:
    return xxhash.xxh3_64_digest(payload, seed=position)


def _as_arrow(column: Column) -> pa.Array | None:
    """Return a column that is already in Arrow, else None."""
    if isinstance(column, LazyColumn):
        column = column.toarrow()
    return column if isinstance(column, pa.Array) else None


def _sizes(payloads: Column) -> npt.NDArray[np.uint32]:
    array = _as_arrow(payloads)
    if array is None:
        return np.fromiter(map(len, to_iterable(payloads)), np.uint32, len(payloads))
    sizes: npt.NDArray[np.uint32] = pc.binary_length(array).to_numpy().astype(np.uint32)
    return sizes


def _inline(payloads: Column, large: npt.NDArray[np.intp]) -> pa.Array:
    """Return the payloads that are stored in their rows, with null for the others."""
    array = _as_arrow(payloads)
    if array is not None and not len(large):
        return array
    values: list[bytes | None] = list(to_iterable(payloads))
    for row in large.tolist():
        values[row] = None
    # A binary array holds at most 2 GB, and the payloads may be larger together.
    return pa.array(values, pa.large_binary())


def _column(column: pa.ChunkedArray) -> Column:
    return _ArrowColumn(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())


def _properties_of(column: pa.ChunkedArray) -> Column:
    if column.null_count == len(column):
        return Constant(None, len(column))
    return _PropertiesColumn(column.combine_chunks())


def _folded(column: pa.ChunkedArray) -> Column:
    """Return a column, as a `Constant` if all its values are equal."""
    ends = pc.min_max(column)
    if ends["min"] == ends["max"]:
        return Constant(ends["min"].as_py(), len(column))
    return _column(column)


_CONVERTED: dict[str, Callable[[pa.ChunkedArray], Column]] = {
    "client_ids": _folded,
    "qos": _folded,
    "retain": _folded,
    "timestamps": lambda column: column.cast(pa.int64()).to_numpy(),
    "properties": _properties_of,
}
"""The conversions of columns that don't just stay in Arrow."""


class _ArrowColumn(LazyColumn):
    """A column that stays in Arrow until Python objects are needed."""

    def __init__(self, array: pa.Array) -> None:
        self._array = array
        self._list: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self._array[index]) if isinstance(index, slice) else self.tolist()[index]

    def tolist(self) -> list[Any]:
        """Return the values as Python objects."""
        if self._list is None:
            self._list = self._objects()
        return self._list

    def _objects(self) -> list[Any]:
        return self._array.to_pylist()  # type: ignore[no-any-return]

    def toarrow(self) -> pa.Array:
        """Return the values as an Arrow array."""
        return self._array


class _PropertiesColumn(_ArrowColumn):
    """The column of properties, whose Python objects differ from those that Arrow makes."""

    def _objects(self) -> list[Any]:
        return [None if fields is None else _properties(fields) for fields in self._array.to_pylist()]


def _properties(fields: dict[str, Any]) -> Properties:
    pairs = fields.pop("user_properties") or ()
    return Properties(**fields, user_properties=tuple((pair["name"], pair["value"]) for pair in pairs))
