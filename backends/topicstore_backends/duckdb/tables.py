"""Keyspaces as tables: keys as columns, values as pieces, and the statements over them."""

# ruff: noqa: S608 - statements are built from quoted names; values are parameters

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore.contract.engine import K, Keyspace
from topicstore.contract.errors import CorruptionError
from topicstore.contract.key_encoding import KeyEncoding

from .instance import fetch, quoted, run

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["Columns", "Span", "Table"]

PIECE = 4_000
"""Most bytes of a value in one row: fewer than the 4,096 from which on DuckDB stores a value apart from its column."""

FIRST_PIECES = 64
"""The rows of one piece each that a scan reads first, so that a small range needs only one statement."""
# The numbers of keys that a scan sorts at a time after `FIRST_PIECES`: the first, and the most for keys of integers and
# for keys that are blobs of up to 64 KB. They grow by the factor `GROWTH`.
FIRST_KEYS, MOST_NUMBERS, MOST_BLOBS = 512, 1 << 18, 1 << 12
GROWTH = 8
# The most pairs and bytes in one list of a scan.
LIST_PAIRS, LIST_BYTES = 4_096, 1 << 20

_Sizes = npt.NDArray[np.int64]


class Span(NamedTuple, Generic[K]):
    """A range of keys. None means that an end is open."""

    low: K | None = None
    high: K | None = None
    above: bool = False
    """Whether ``low`` itself lies outside the range."""
    through: bool = False
    """Whether ``high`` itself lies inside the range."""

    def behind(self, key: K, reverse: bool) -> Span[K]:
        """Return the rest of the range after a key, in ascending or descending order."""
        return Span(self.low, key, self.above) if reverse else Span(key, self.high, True, self.through)


@attrs.frozen
class Columns(Generic[K]):
    """The columns of a table that hold the keys of a keyspace, by name, and their types."""

    keys: KeyEncoding[K]
    names: tuple[str, ...]
    types: tuple[str, ...]

    @property
    def keyspace(self) -> Keyspace[K]:
        """The keyspace of the keys."""
        return self.keys.keyspace

    @classmethod
    def of(cls, keyspace: Keyspace[K], names: Sequence[str] = ()) -> Columns[K]:
        """Return the columns for a keyspace's shape, under the keyspace's own names unless others are given."""
        if keyspace.shape is None:
            types: tuple[str, ...] = ("BLOB",)
            names = names or ("key",)
        else:
            types = tuple({4: "UINTEGER", 8: "UBIGINT"}[width] for width in keyspace.shape)
            names = names or tuple(f"key_{number}" for number in range(len(types)))
        return cls(KeyEncoding(keyspace), tuple(map(quoted, names)), types)

    def condition(self, span: Span[K]) -> tuple[str, list[Any]]:
        """Return the condition that a key lies in a span, and its parameters."""
        names, types = self.names, self.types
        low, high = self._parts(span.low), self._parts(span.high)
        terms, values = ["true"], []
        # Equality of the columns in which both ends agree is quicker than the conditions below.
        while low and high and len(low) > 1 and low[0] == high[0]:
            terms.append(f"{names[0]} = ?::{types[0]}")
            values.append(low[0])
            names, types, low, high = names[1:], types[1:], low[1:], high[1:]
        for parts, sign, inside in ((low, ">", not span.above), (high, "<", span.through)):
            if parts:
                term, more = _beyond(names, types, parts, sign, inside)
                terms.append(term)
                values += more
        return " AND ".join(terms), values

    def _parts(self, key: K | None) -> tuple[Any, ...]:
        if key is None:
            return ()
        self.keys.encode(key)  # raises for a key of another shape
        return (key,) if self.keyspace.shape is None else tuple(key)

    def arrow(self, keys: Sequence[K]) -> pa.Table:
        """Return keys as columns. Raises `InvalidArgumentError` if one doesn't have the keyspace's shape."""
        encoded, shape = self.keys.encode_all(keys), self.keyspace.shape
        if shape is None:
            return pa.table({"key_0": pa.array(encoded, pa.large_binary())})
        kinds = np.dtype([(f"key_{number}", f">u{width}") for number, width in enumerate(shape)])
        numbers = np.frombuffer(b"".join(encoded), dtype=kinds)
        return pa.table({name: numbers[name].astype(f"=u{kinds[name].itemsize}") for name in kinds.names or ()})

    def from_arrow(self, columns: pa.Table) -> list[K]:
        """Return the keys in the first columns of a table."""
        lists = [columns.column(number).to_pylist() for number in range(len(self.names))]
        keys: list[Any] = lists[0] if self.keyspace.shape is None else list(zip(*lists, strict=True))
        return keys

    def listed(self, suffix: str = "") -> str:
        """Return the names separated by commas."""
        return ", ".join(name + suffix for name in self.names)

    def joined(self, one: str, other: str) -> str:
        """Return the condition that joins ``one`` with ``other``, whose key columns are ``key_0`` and so on."""
        return " AND ".join(f"{one}.{name} = {other}.key_{number}" for number, name in enumerate(self.names))

    def between(self, keys: Sequence[K], prefix: str) -> tuple[str, list[Any]]:
        """Return the condition that each column lies between the smallest and largest of ``keys``.

        The join implies this condition, but DuckDB skips row groups only if the statement contains it.
        """
        columns = [keys] if self.keyspace.shape is None else list(zip(*keys, strict=True))
        terms = [
            f"{prefix}{name} BETWEEN ?::{kind} AND ?::{kind}" for name, kind in zip(self.names, self.types, strict=True)
        ]
        return " AND ".join(terms), [end for column in columns for end in (min(column), max(column))]

    # --- statements that suit tables with other columns, too ---

    def delete(self, connection: DuckDBPyConnection, table: str, span: Span[K]) -> None:
        """Delete the rows of a table with keys in a span."""
        condition, values = self.condition(span)
        run(connection, f"DELETE FROM {table} WHERE {condition}", values)

    def delete_keys(self, connection: DuckDBPyConnection, table: str, keys: Sequence[K]) -> None:
        """Delete the rows of a table with these keys."""
        if len(keys) == 1:  # for one key, this is a quarter of a millisecond faster than the join
            self.delete(connection, table, Span(keys[0], keys[0], through=True))
            return
        bounds, values = self.between(keys, "stored.")
        statement = f"DELETE FROM {table} AS stored USING rows WHERE {self.joined('stored', 'rows')} AND {bounds}"
        run(connection, statement, values, self.arrow(keys))


def _beyond(
    names: Sequence[str], types: Sequence[str], parts: Sequence[Any], sign: str, inside: bool
) -> tuple[str, list[Any]]:
    """Return the condition that the columns, as a tuple, are above or below ``parts`` in the order of tuples."""
    name, part, value = names[0], f"?::{types[0]}", parts[0]
    if len(names) == 1:
        return f"{name} {sign}{'=' * inside} {part}", [value]
    rest, values = _beyond(names[1:], types[1:], parts[1:], sign, inside)
    return f"({name} {sign}= {part} AND ({name} {sign} {part} OR ({rest})))", [value, value, *values]


class Table(Generic[K]):
    """A keyspace's table in one shard's file."""

    def __init__(self, shard: str, keyspace: Keyspace[K]) -> None:
        self.columns = Columns.of(keyspace)
        self.name = f"{shard}.main.{quoted(keyspace.name)}"
        pairs = zip(self.columns.names, self.columns.types, strict=True)
        self.definition = [*pairs, ('"part"', "UINTEGER"), ('"size"', "UBIGINT"), ('"value"', "BLOB")]

    def create(self, connection: DuckDBPyConnection) -> None:
        """Create the table if it doesn't exist."""
        columns = ", ".join(f"{name} {kind}" for name, kind in self.definition)
        run(connection, f"CREATE TABLE IF NOT EXISTS {self.name} ({columns})")

    # --- writing ---

    def insert(self, connection: DuckDBPyConnection, keys: Sequence[K], values: Sequence[bytes]) -> None:
        """Append pairs whose keys are not in the table."""
        sizes = np.fromiter(map(len, values), np.int64, len(values))
        counts = _pieces(sizes)
        ends = np.cumsum(counts)
        index = np.repeat(np.arange(len(values)), counts)
        part = np.arange(len(index)) - np.repeat(ends - counts, counts)
        starts = np.repeat(np.cumsum(sizes) - sizes, counts) + part * PIECE
        offsets = np.append(starts, sizes.sum())
        data = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
        rows = self.columns.arrow(keys).take(pa.array(index))
        rows = rows.append_column("part", pa.array(part.astype(np.uint32)))
        rows = rows.append_column("size", pa.array(sizes[index].astype(np.uint64)))
        rows = rows.append_column("value", pa.Array.from_buffers(pa.large_binary(), len(index), data))
        run(connection, f"INSERT INTO {self.name} SELECT * FROM rows", rows=rows)

    # --- reading ---

    def get(self, connection: DuckDBPyConnection, key: K) -> bytes | None:
        """Return a key's value, or None."""
        condition, values = self.columns.condition(Span(key, key, through=True))
        statement = f'SELECT "part", "size", "value" FROM {self.name} WHERE {condition}'
        rows = sorted(fetch(connection, statement, values))  # faster than sorting in SQL: there is usually one row
        if not rows:
            return None
        return self._whole([piece for _, _, piece in rows], rows[0][1])

    def get_many(self, connection: DuckDBPyConnection, keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, or None, in the order of ``keys``."""
        found: list[bytes | None] = [None] * len(keys)
        if not keys:
            return found
        wanted = self.columns.arrow(keys).append_column("place", pa.array(np.arange(len(keys), dtype=np.uint32)))
        bounds, values = self.columns.between(keys, "stored.")
        statement = (
            f'SELECT rows.place, stored."size", stored."value" FROM {self.name} AS stored, rows '
            f'WHERE {self.columns.joined("stored", "rows")} AND {bounds} ORDER BY rows.place, stored."part"'
        )
        pieces: dict[int, list[bytes]] = {}
        sizes: dict[int, int] = {}
        for place, size, piece in fetch(connection, statement, values, wanted):
            pieces.setdefault(place, []).append(piece)
            sizes[place] = size
        for place, parts in pieces.items():
            found[place] = self._whole(parts, sizes[place])
        return found

    def first(self, connection: DuckDBPyConnection, span: Span[K], reverse: bool) -> tuple[list[tuple[K, bytes]], bool]:
        """Return the first pairs of a range, from one statement with few rows, and whether the range has no others."""
        condition, values = self.columns.condition(span)
        order = self.columns.listed(suffix=" DESC" * reverse)
        statement = (
            f'SELECT {self.columns.listed()}, "size", "value" FROM {self.name} '
            f'WHERE {condition} ORDER BY {order}, "part" LIMIT {FIRST_PIECES}'
        )
        rows = fetch(connection, statement, values)
        pairs, ended, row = list[tuple[K, bytes]](), len(rows) < FIRST_PIECES, 0
        while row < len(rows):
            *parts, size, _ = rows[row]
            pieces = rows[row : row + max(-(-size // PIECE), 1)]
            if row + len(pieces) == len(rows) and not ended:  # further pieces of this value may follow
                break
            if pieces[-1][: len(parts)] != tuple(parts):
                raise self._torn()
            whole = self._whole([piece for *_, piece in pieces], size)
            key: Any = parts[0] if self.columns.keyspace.shape is None else tuple(parts)
            pairs.append((key, whole))
            row += len(pieces)
        return pairs, ended

    def keys(self, connection: DuckDBPyConnection, span: Span[K], reverse: bool, count: int) -> tuple[list[K], _Sizes]:
        """Return the first keys of a span, at most ``count``, and the sizes of their values."""
        condition, values = self.columns.condition(span)
        order = self.columns.listed(suffix=" DESC" * reverse)
        statement = (
            f'SELECT {self.columns.listed()}, "size" FROM {self.name} '
            f'WHERE "part" = 0 AND {condition} ORDER BY {order} LIMIT {count}'
        )
        found = connection.sql(statement, params=values).to_arrow_table()
        return self.columns.from_arrow(found), found.column(len(self.columns.names)).to_numpy().astype(np.int64)

    def values(self, connection: DuckDBPyConnection, keys: Sequence[K], sizes: _Sizes, reverse: bool) -> list[bytes]:
        """Return the values of keys that follow each other in the table."""
        low, high = (keys[-1], keys[0]) if reverse else (keys[0], keys[-1])
        condition, values = self.columns.condition(Span(low, high, through=True))
        order = self.columns.listed(suffix=" DESC" * reverse)
        statement = f'SELECT "value" FROM {self.name} WHERE {condition} ORDER BY {order}, "part"'
        pieces = connection.sql(statement, params=values).to_arrow_table().column(0).to_pylist()
        counts = _pieces(sizes).tolist()
        if len(pieces) != sum(counts):
            raise self._torn()
        rest = iter(pieces)
        return [
            self._whole(list(islice(rest, count)), size) for count, size in zip(counts, sizes.tolist(), strict=True)
        ]

    def _whole(self, pieces: list[bytes], size: int) -> bytes:
        value = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(value) != size:
            raise self._torn()
        return value

    def _torn(self) -> CorruptionError:
        return CorruptionError("a value's pieces are not all there", f"keyspace {self.columns.keyspace.name!r}")

    @property
    def most_keys(self) -> int:
        """The number of keys that may be sorted at a time."""
        return MOST_BLOBS if self.columns.keyspace.shape is None else MOST_NUMBERS


def lists(sizes: _Sizes) -> Iterator[slice]:
    """Cut pairs with values of these sizes into lists of at most a megabyte, or of one pair."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start]) - int(sizes[start])
        stop = int(np.searchsorted(ends, before + LIST_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + LIST_PAIRS)
        yield slice(start, stop)
        start = stop


def _pieces(sizes: _Sizes) -> _Sizes:
    """Return the number of pieces of values of these sizes; an empty value has one."""
    counts: _Sizes = np.maximum(-(-sizes // PIECE), 1)
    return counts
