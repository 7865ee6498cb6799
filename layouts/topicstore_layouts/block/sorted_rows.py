"""Rows of many blocks as arrays, sorted by topic without a Python object per row.

A compaction turns blocks into `RowArrays`, and sorts those of all blocks together into `SortedRows`. Names become
numbers by Arrow's dictionary encoding, payloads stay in one buffer, and a radix sort finds the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from topicstore import Properties
from topicstore.contract.columns import Coded, Column, Constant, Indices, to_list
from topicstore.contract.positions import Positions

from topicstore_layouts.shared.name_table import NameTable

from .format import Block
from .packing import Array, own_times

__all__ = ["Codes", "RowArrays", "SortedRows", "arrays_of_blocks", "sort_rows"]

Codes = npt.NDArray[np.int64]
_RADIX_BITS = 16
"""NumPy sorts integers of this size by radix, in linear time."""


@attrs.frozen
class RowArrays:
    """Rows in any order, except that the rows of each topic are in order of position."""

    positions: Positions
    topics: Codes
    """The index of each row's topic in ``topic_texts``."""
    topic_texts: pa.Array
    """Topics, which may repeat."""
    streams: Codes
    """The stream of each of ``topic_texts``; 0 if it is unknown."""
    clients: Codes
    client_texts: pa.Array
    qos: Array
    retain: Array
    timestamps: Array | None
    """None if each is the time of its row's position."""
    properties: list[Properties | None] | None
    sizes: Codes
    """The number of bytes of each payload."""
    data: Any
    """A buffer of all payloads, one after the other."""


@attrs.frozen
class SortedRows:
    """Rows in order of their topics' ranks, and of positions within a topic."""

    positions: Positions
    topics: Codes
    """The index of each row's topic in ``topic_texts``. The indexes ascend."""
    topic_texts: list[str]
    """Each topic once."""
    streams: Codes
    """The stream of each of ``topic_texts``."""
    clients: Codes
    client_texts: list[str]
    qos: Array
    retain: Array
    timestamps: Array | None
    properties: list[Properties | None] | None
    offsets: Codes
    """The offsets in ``data`` at which the payloads begin, and the offset at which the last one ends."""
    data: bytes

    @property
    def raw_bytes(self) -> int:
        """The approximate bytes of all payloads and names, each name counted once."""
        return len(self.data) + sum(map(len, self.topic_texts)) + sum(map(len, self.client_texts))


def arrays_of_blocks(blocks: Sequence[Block], topics: NameTable, clients: NameTable) -> RowArrays:
    """Decode blocks, in their order. Raises `CorruptionError` if one is damaged."""
    positions = [block.positions() for block in blocks]
    times = [block.timestamps(mine) for block, mine in zip(blocks, positions, strict=True)]
    own = all(
        not isinstance(column, Constant) and np.array_equal(np.asarray(column), own_times(mine))
        for column, mine in zip(times, positions, strict=True)
    )
    topic_codes, topic_texts, streams = _names([block.topics() for block in blocks], topics)
    client_codes, client_texts, _ = _names([block.client_ids() for block in blocks], clients)
    properties = [block.properties() for block in blocks]
    without = all(isinstance(column, Constant) and column.value is None for column in properties)
    payloads = pa.concat_arrays([block.payloads().toarrow() for block in blocks])
    offsets = np.frombuffer(payloads.buffers()[1], np.int32, len(payloads) + 1, payloads.offset * 4)
    return RowArrays(
        np.concatenate(positions),
        topic_codes,
        topic_texts,
        streams,
        client_codes,
        client_texts,
        _joined([block.qos() for block in blocks], np.uint8),
        _joined([block.retain() for block in blocks], np.uint8),
        None if own else _joined(times, np.int64),
        None if without else list(chain.from_iterable(map(to_list, properties))),
        np.diff(offsets).astype(np.int64),
        memoryview(payloads.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])],
    )


def sort_rows(
    parts: Sequence[RowArrays],
    find_all: Callable[[list[str]], list[int]],
    rank: Callable[[Codes, Codes, pa.Array], Codes],
) -> SortedRows:
    """Return the rows of all parts in order of their topics.

    ``find_all`` returns the streams of topics. ``rank`` gets the code of each row, and the stream and the text of each
    code, and returns the codes in the order that the topics are to have. A part's positions follow those of the part
    before it.
    """
    codes, texts, places = _unified([(part.topics, part.topic_texts) for part in parts])
    clients, client_texts, _ = _unified([(part.clients, part.client_texts) for part in parts])
    streams = np.zeros(len(texts), np.int64)
    for part, mapped in zip(parts, places, strict=True):
        streams[mapped] = np.maximum(streams[mapped], part.streams)
    unknown = np.flatnonzero(streams == 0)
    if len(unknown):
        streams[unknown] = find_all(texts.take(pa.array(unknown)).to_pylist())
    ranked = rank(codes, streams, texts)
    ranks = np.empty(len(texts), np.int64)
    ranks[ranked] = np.arange(len(texts))
    order = _stable_order(ranks[codes])
    sizes = np.concatenate([part.sizes for part in parts])
    data, offsets = _taken([part.data for part in parts], sizes, order)
    return SortedRows(
        np.concatenate([part.positions for part in parts])[order],
        ranks[codes][order],
        texts.take(pa.array(ranked)).to_pylist(),
        streams[ranked],
        clients[order],
        client_texts.to_pylist(),
        np.concatenate([part.qos for part in parts])[order],
        np.concatenate([part.retain for part in parts])[order],
        _times(parts, order),
        _properties(parts, order),
        offsets,
        data,
    )


def _names(columns: Sequence[Column], table: NameTable) -> tuple[Codes, pa.Array, Codes]:
    """Return the codes of all rows, the texts, and the stream of each text; 0 if it is unknown."""
    numbers = [np.asarray(column) for column in columns if isinstance(column, np.ndarray)]
    numbers += [np.array([c.value]) for c in columns if isinstance(c, Constant) and isinstance(c.value, int)]
    used = np.unique(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)
    texts: list[str] = table.names(used).tolist() if len(used) else []
    streams = table.streams(used).astype(np.int64) if len(used) else np.empty(0, np.int64)
    codes: list[Array] = []
    for column in columns:
        if isinstance(column, Coded):
            codes.append(column.codes.astype(np.int64) + len(texts))
            texts += column.texts.values.tolist()
        elif isinstance(column, Constant) and isinstance(column.value, str):
            codes.append(np.full(len(column), len(texts), np.int64))
            texts.append(column.value)
        elif isinstance(column, Constant):
            codes.append(np.full(len(column), np.searchsorted(used, column.value), np.int64))
        else:
            codes.append(np.searchsorted(used, np.asarray(column)))
    known = np.concatenate([streams, np.zeros(len(texts) - len(streams), np.int64)])
    return np.concatenate(codes), pa.array(texts, pa.string()), known


def _unified(columns: Sequence[tuple[Codes, pa.Array]]) -> tuple[Codes, pa.Array, list[Codes]]:
    """Join coded columns; return the codes, each text once, and the new code of each text of each column."""
    encoded = pa.concat_arrays([texts for _, texts in columns]).dictionary_encode()
    numbers = encoded.indices.to_numpy().astype(np.int64)
    ends = np.cumsum([len(texts) for _, texts in columns])
    places = np.split(numbers, ends[:-1])
    codes = np.concatenate([mapped[codes] for (codes, _), mapped in zip(columns, places, strict=True)])
    return codes, encoded.dictionary, places


def _stable_order(codes: Codes) -> Indices:
    """Return the indexes that sort codes; equal ones keep their order."""
    order: Indices = np.argsort(codes.astype(np.uint16), kind="stable")
    if len(codes) and int(codes.max()) >> _RADIX_BITS:
        order = order[np.argsort((codes[order] >> _RADIX_BITS).astype(np.uint16), kind="stable")]
    return order


def _taken(buffers: list[Any], sizes: Codes, order: Indices) -> tuple[bytes, Codes]:
    """Return the payloads in another order in one buffer, and their offsets."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = buffers[0] if len(buffers) == 1 else b"".join(buffers)
    buffers.clear()
    stored = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    taken = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(sizes), stored).take(pa.array(order))
    return (taken.buffers()[2] or pa.py_buffer(b"")).to_pybytes(), np.concatenate([[0], np.cumsum(sizes[order])])


def _times(parts: Sequence[RowArrays], order: Indices) -> Array | None:
    if all(part.timestamps is None for part in parts):
        return None
    times = [own_times(part.positions) if part.timestamps is None else part.timestamps for part in parts]
    sorted_times: Array = np.concatenate(times)[order]
    return sorted_times


def _properties(parts: Sequence[RowArrays], order: Indices) -> list[Properties | None] | None:
    if all(part.properties is None for part in parts):
        return None
    rows = [[None] * len(part.positions) if part.properties is None else part.properties for part in parts]
    joined = list(chain.from_iterable(rows))
    return list(map(joined.__getitem__, order.tolist()))


def _joined(columns: Sequence[Column], dtype: npt.DTypeLike) -> Array:
    return np.concatenate(
        [
            np.full(len(c), c.value, dtype=dtype) if isinstance(c, Constant) else np.asarray(c, dtype=dtype)
            for c in columns
        ]
    )
