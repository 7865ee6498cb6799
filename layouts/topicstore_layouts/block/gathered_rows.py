"""Rows picked out of several blocks and put in another order, their payloads copied only when looked at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore import MessageBatch
from topicstore.contract.columns import Coded, Column, Constant, Indices, LazyColumn, Texts, concat, take

from .format import Array, Block

__all__ = ["Rows", "gather"]

Rows = Indices | None
"""Rows of a block; None: all."""


class _Payloads(LazyColumn):
    """Payloads of rows of several blocks, in the order of ``order``. Windows of it share what was decoded."""

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
        """Return a binary array."""
        return self._parts.toarrow().take(pa.array(self._order))


class _Parts:
    """The payloads of blocks one behind the other, as they lie."""

    def __init__(self, found: Sequence[tuple[Block, Rows]]) -> None:
        self._found = found
        self._objects: npt.NDArray[np.object_] | None = None
        self._arrow: pa.Array | None = None

    def objects(self) -> npt.NDArray[np.object_]:
        """Return them as an array, out of which NumPy picks faster than Python does."""
        if self._objects is None:
            picked = (b.payloads().tolist() if rows is None else b.payloads().pick(rows) for b, rows in self._found)
            self._objects = np.array(list(chain.from_iterable(picked)), dtype=object)
        return self._objects

    def toarrow(self) -> pa.Array:
        if self._arrow is None:
            self._arrow = pa.concat_arrays([_arrow(block, rows) for block, rows in self._found])
        return self._arrow


def _arrow(block: Block, rows: Rows) -> pa.Array:
    array = block.payloads().toarrow()
    return array if rows is None else array.take(pa.array(rows))


def gather(found: Sequence[tuple[Block, Rows]], shard: int) -> tuple[MessageBatch, Array]:
    """Return rows of frames, of one or more, in order of position; and the bytes of each row's payload."""
    positions = [block.positions() for block, _ in found]
    columns = [_picked(column, found) for column in zip(*map(_columns, found, positions), strict=True)]
    at = _joined(_picked(positions, found))
    order = np.argsort(at)
    topics, clients, qos, retain, timestamps, properties, sizes = columns
    batch = MessageBatch(
        topics=take(_names(topics), order),
        payloads=_Payloads(_Parts(found), order),
        client_ids=take(_names(clients), order),
        qos=take(concat(qos), order),
        retain=take(concat(retain), order),
        timestamps=take(_joined(timestamps), order),
        properties=take(concat(properties), order),
        positions=at[order],
        shards=Constant(shard, len(order)),
    )
    return batch, take(_joined(sizes), order)


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
    return [c if rows is None else take(c, rows) for c, (_, rows) in zip(columns, found, strict=True)]


def _joined(columns: list[Column]) -> Any:
    arrays = [np.full(len(c), c.value, dtype=np.int64) if isinstance(c, Constant) else c for c in columns]
    return np.concatenate(arrays)


def _names(columns: list[Column]) -> Coded:
    """Join texts of several lists: one list behind the other, and the codes moved along."""
    lists = [[c.value] if isinstance(c, Constant) else c.texts.values.tolist() for c in columns]
    starts = np.cumsum([0, *map(len, lists)])
    codes = [
        np.full(len(c), start) if isinstance(c, Constant) else c.codes.astype(np.int64) + start
        for c, start in zip(columns, starts.tolist(), strict=False)
    ]
    return Coded(np.concatenate(codes), Texts.of(list(chain.from_iterable(lists))))
