"""Writing: a batch is turned into columns, the columns are cut by size and stream, and each part becomes a block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from topicstore import MessageBatch
from topicstore.contract.columns import Coded, Column, Constant, only, to_list
from topicstore.contract.engine import DATA, WriteBatch

from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable

from .batch_blocks import BatchBlocks
from .format import MIXED, Columns
from .packing import Array

__all__ = ["Writing"]

_MOST_ROWS = 8_192
_MOST_BYTES = 1 << 20
"""Payload bytes after which a block ends: a reader of one message may have to decompress all of them."""
_SPLIT_ROWS = 256
"""A batch is split by stream if each part has at least this many rows on average; smaller blocks don't pay off."""


class Writing:
    """The writer of one slab. Not thread-safe."""

    def __init__(self, blocks: BatchBlocks, trie: LearnedTopics, names: tuple[NameTable, NameTable]) -> None:
        self._blocks = blocks
        self._trie = trie
        self._topics, self._clients = names

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        """Add the batch's messages to ``write`` as blocks, with new names and newly learned structure."""
        if len(batch) == 1:
            self._store_message(batch, write)
        else:
            payloads = to_list(batch.payloads)
            columns: Columns[Column] = Columns(
                np.asarray(batch.positions),
                self._topics.encode(batch.topics),
                self._clients.encode(batch.client_ids),
                batch.qos,
                batch.retain,
                batch.timestamps,
                batch.properties,
                payloads,
                list(map(len, payloads)),
            )
            for part in _by_size(columns):
                base = int(part.positions[0])
                for stream, rows in self._by_stream(part):
                    last = int(rows.positions[-1])
                    write.put(DATA, self._blocks.key(last), self._blocks.encode(rows, stream, base, last))
        self._trie.save(write)
        self._topics.save(write)
        self._clients.save(write)

    def committed(self) -> None:
        """Mark names and learned structure as committed."""
        self._trie.saved()
        self._topics.saved()
        self._clients.saved()

    def _store_message(self, message: MessageBatch, write: WriteBatch) -> None:
        """Add a batch of one message as a block. Avoids NumPy arrays, whose creation would dominate the cost."""
        topic, client_id = only(message.topics), only(message.client_ids)
        number, client = self._topics.encode_one(topic), self._clients.encode_one(client_id)
        stream = self._trie.learn(topic) if number is None else self._topics.stream(number)
        value = self._blocks.encode_message(
            message, topic if number is None else number, client_id if client is None else client, stream
        )
        _, last = message.span
        write.put(DATA, self._blocks.key(last), value)

    def _by_stream(self, columns: Columns[Column]) -> list[tuple[int, Columns[Column]]]:
        streams = self._streams(columns)
        if isinstance(streams, int):
            return [(streams, columns)]
        if (streams == streams[0]).all():
            return [(int(streams[0]), columns)]
        touched = sorted(set(streams.tolist()))
        if len(streams) < _SPLIT_ROWS * len(touched):
            return [(MIXED, columns)]
        return [(stream, columns.take(np.flatnonzero(streams == stream))) for stream in touched]

    def _streams(self, columns: Columns[Column]) -> int | Array:
        """Return the stream of each row, or one stream for all rows; topics without a number are learned here."""
        topics = columns.topics
        if isinstance(topics, Constant):
            known = isinstance(topics.value, int)
            return self._topics.stream(topics.value) if known else self._trie.learn(topics.value)
        if isinstance(topics, Coded):
            # The list has only topics of this batch, so learning all of them is right.
            streams: Array = np.array(self._trie.learn_all(topics.texts.values.tolist()))[topics.codes]
            return streams
        return self._topics.encoded_streams(np.asarray(topics))


def _by_size(columns: Columns[Column]) -> Iterator[Columns[Column]]:
    """Yield the parts of a large batch, cut so that no block has too many rows or bytes."""
    sizes = columns.sizes
    if len(sizes) <= _MOST_ROWS and sum(sizes) <= _MOST_BYTES:
        yield columns
        return
    ends = np.cumsum(sizes)
    start = filled = 0
    while start < len(sizes):
        fit = int(np.searchsorted(ends, filled + _MOST_BYTES, side="right"))
        stop = min(max(fit, start + 1), start + _MOST_ROWS)
        yield columns.window(start, stop)
        start, filled = stop, int(ends[stop - 1])
