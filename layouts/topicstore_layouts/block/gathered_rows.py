"""Rows selected from several blocks in a new order, whose payloads are copied only when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore import MessageBatch
from topicstore.contract.batch import unread
from topicstore.contract.columns import Coded, Column, Constant, Indices, LazyColumn, Texts, concat, take
from topicstore.contract.errors import CorruptionError

from .format import Array, Block
from .payloads import PackedPayloads

__all__ = ["Rows", "concat_names", "gather"]

Rows = Indices | None
"""The indexes of rows of a block. None means all rows."""


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
        """Return a binary array."""
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
            picked = (b.payloads().tolist() if rows is None else b.payloads().pick(rows) for b, rows in self._found)
            self._objects = np.array(list(chain.from_iterable(picked)), dtype=object)
        return self._objects

    def toarrow(self) -> pa.Array:
        if self._arrow is None:
            if all(rows is None for _, rows in self._found):
                self._arrow = PackedPayloads.joined([block.payloads() for block, _ in self._found]).toarrow()
            else:
                self._arrow = pa.concat_arrays([_arrow(block, rows) for block, rows in self._found])
        return self._arrow


def _arrow(block: Block, rows: Rows) -> pa.Array:
    array = block.payloads().toarrow()
    return array if rows is None else array.take(pa.array(rows))


def gather(found: Sequence[tuple[Block, Rows]], shard: int, columns: frozenset[str]) -> tuple[MessageBatch, Array]:
    """Return rows of one or more frames in order of position, and the number of bytes of each row's payload.

    Payloads and client ids are returned only if they are among ``columns``; without payloads, the bytes are 0.
    """
    positions = [block.positions() for block, _ in found]
    picked = [_picked(column, found) for column in zip(*map(_columns, found, positions), strict=True)]
    at = _joined(_picked(positions, found))
    order = np.argsort(at)
    topics, clients, qos, retain, timestamps, properties, sizes = picked
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


def _joined(columns: list[Column]) -> Array:
    return np.concatenate(
        [np.full(len(c), c.value, dtype=np.int64) if isinstance(c, Constant) else np.asarray(c) for c in columns]
    )


def concat_names(columns: Sequence[Column]) -> Coded:
    """Concatenate columns of texts: their lists, and their codes shifted accordingly."""
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
