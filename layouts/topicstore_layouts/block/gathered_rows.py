"""Rows selected from several blocks in a new order, whose payloads are copied only when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore import MessageBatch
from topicstore.contract.batch import unread
from topicstore.contract.columns import Coded, Column, Constant, Indices, LazyColumn, Texts, concat, take, window
from topicstore.contract.errors import CorruptionError

from .format import Block, Columns
from .packing import Array

__all__ = ["Rows", "concat_names", "count", "gather", "picked"]

Rows = Indices | slice | None
"""Rows of a block: their indexes, or a slice from one row to before another. None means all rows."""

_FEW = 4
"""Rows are copied one by one if less than one row in this many of each frame is wanted."""


def count(block: Block, rows: Rows) -> int:
    """Return the number of selected rows of a block."""
    if rows is None:
        return block.rows
    return int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)


def picked(column: Column, rows: Rows) -> Column:
    """Return the selected rows of a column of a block."""
    if rows is None:
        return column
    return window(column, rows.start, rows.stop) if isinstance(rows, slice) else take(column, rows)


class _Payloads(LazyColumn):
    """Payloads of rows of several blocks, in the order of ``order``. Slices share the decoded payloads."""

    def __init__(self, parts: _Parts, order: Indices) -> None:
        self._parts = parts
        self._order = order
        self._list: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return _Payloads(self._parts, self._order[index]) if isinstance(index, slice) else self.tolist()[index]

    def tolist(self) -> list[bytes]:
        """Return the payloads."""
        if self._list is None:
            self._list = self._parts.objects()[self._order].tolist()
        return self._list

    def toarrow(self) -> pa.Array:
        """Return the payloads as a binary array."""
        return self._parts.toarrow().take(pa.array(self._order))


class _Parts:
    """The payloads of blocks, concatenated in stored order."""

    def __init__(self, found: Sequence[tuple[Block, Rows]]) -> None:
        self._found = found
        self._objects: npt.NDArray[np.object_] | None = None
        self._arrow: pa.Array | None = None

    def objects(self) -> npt.NDArray[np.object_]:
        """Return the payloads as an array, from which NumPy selects faster than Python does."""
        if self._objects is None:
            self._objects = np.concatenate([_objects(block, rows) for block, rows in self._found])
        return self._objects

    def toarrow(self) -> pa.Array:
        if self._arrow is None:
            self._arrow = pa.concat_arrays([_arrow(block, rows) for block, rows in self._found])
        return self._arrow


def _objects(block: Block, rows: Rows) -> npt.NDArray[np.object_]:
    payloads = block.payloads()
    return payloads.objects() if rows is None else np.array(payloads.pick(rows), dtype=object)


def _arrow(block: Block, rows: Rows) -> pa.Array:
    array = block.payloads().toarrow()
    if isinstance(rows, slice):
        return array.slice(rows.start, rows.stop - rows.start)
    return array if rows is None else array.take(pa.array(rows))


def gather(found: Sequence[tuple[Block, Rows]], shard: int, columns: frozenset[str]) -> tuple[MessageBatch, Array]:
    """Return rows of one or more frames in order of position, and the number of bytes of each row's payload.

    Payloads and client ids are returned only if they are among ``columns``; without payloads, the bytes are 0.
    """
    few = [block.cut(rows, columns) for block, rows in found if isinstance(rows, slice) and _are_few(block, rows)]
    if len(few) == len(found):
        return _joined_few(few, shard, columns)
    positions = [block.positions() for block, _ in found]
    chosen = [_picked(column, found) for column in zip(*map(_columns, found, positions), strict=True)]
    at = _joined(_picked(positions, found))
    order = np.argsort(at)
    topics, clients, qos, retain, timestamps, properties, sizes = chosen
    payloads = "payloads" in columns
    batch = MessageBatch(
        topics=take(concat_names(topics), order),
        payloads=_Payloads(_Parts(found), order) if payloads else unread("payloads", len(order)),
        client_ids=take(concat_names(clients), order) if "client_ids" in columns else unread("client_ids", len(order)),
        qos=take(concat(qos), order),
        retain=take(concat(retain), order),
        timestamps=_joined(timestamps)[order],
        properties=take(concat(properties), order),
        positions=at[order],
        shards=Constant(shard, len(order)),
    )
    return batch, _joined(sizes)[order] if payloads else np.zeros(len(order), dtype=np.int64)


def _are_few(block: Block, rows: slice) -> bool:
    return _FEW * count(block, rows) < block.rows


def _joined_few(parts: Sequence[Columns[Column]], shard: int, columns: frozenset[str]) -> tuple[MessageBatch, Array]:
    """Return copied rows of one or more frames in order of position, and the number of bytes of each row's payload."""
    at = np.concatenate([part.positions for part in parts])
    payloads = "payloads" in columns
    batch = MessageBatch(
        topics=concat([part.topics for part in parts]),
        payloads=[each for part in parts for each in part.payloads] if payloads else unread("payloads", len(at)),
        client_ids=concat([part.client_ids for part in parts]),
        qos=concat([part.qos for part in parts]),
        retain=concat([part.retain for part in parts]),
        timestamps=concat([part.timestamps for part in parts]),
        properties=concat([part.properties for part in parts]),
        positions=at,
        shards=Constant(shard, len(at)),
    )
    sizes = np.array([size for part in parts for size in part.sizes], dtype=np.int64)
    if (at[1:] > at[:-1]).all():
        return batch, sizes
    order = np.argsort(at)
    return batch.take(order), sizes[order]


def _columns(found: tuple[Block, Rows], positions: Any) -> tuple[Column, ...]:
    block = found[0]
    return (
        block.topics(),
        block.client_ids(),
        block.qos(),
        block.retain(),
        block.timestamps(positions),
        block.properties(),
        block.sizes(),
    )


def _picked(columns: Sequence[Column], found: Sequence[tuple[Block, Rows]]) -> list[Column]:
    return [c if rows is None else picked(c, rows) for c, (_, rows) in zip(columns, found, strict=True)]


def _joined(columns: list[Column]) -> Array:
    return np.concatenate(
        [np.full(len(c), c.value, dtype=np.int64) if isinstance(c, Constant) else np.asarray(c) for c in columns]
    )


def concat_names(columns: Sequence[Column]) -> Coded:
    """Concatenate columns of texts: their lists of distinct texts, and their row codes, shifted accordingly."""
    texts: list[str] = []
    codes = []
    for column in columns:
        if isinstance(column, Coded):
            codes.append(column.codes.astype(np.int64) + len(texts))
            texts += column.texts.values.tolist()
        elif isinstance(column, Constant):
            codes.append(np.full(len(column), len(texts)))
            texts.append(column.value)
        else:
            raise CorruptionError("a frame has numbers in place of names")
    return Coded(np.concatenate(codes), Texts.of(texts))
