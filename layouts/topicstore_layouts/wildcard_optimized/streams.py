"""The bit fields of a stream's keys, and their values for a topic and for a topic filter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import xxhash
from topicstore.contract.columns import Column, Constant, Indices, to_list
from topicstore.contract.engine import encode_generation
from topicstore.contract.layout import TopicNode
from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore.contract.topics import TopicFilter

from topicstore_layouts.shared.learned_topics import LearnedTopics, covers
from topicstore_layouts.shared.topic_parts import TopicParts

from .keymapper import KeyFilter, KeyMapper, Range, Source
from .place import Epochs, Span

__all__ = ["MOST_LEVELS", "KeyOptions", "StreamKeys", "Streams"]

MOST_LEVELS = 10
"""The number of varying levels of a pattern, the first ones, that get bits of a key."""
_POSITION_BITS = 64
_HASH_BITS = 64
_EVERY_POSITION = 0, (1 << _POSITION_BITS) - 1
_EVERY_HASH = 0, (1 << _HASH_BITS) - 1
_CACHED, _CACHED_CHARACTERS = 65_536, 1 << 22
"""Bounds of the cache of rows of `Parts`: the number of topics, and the characters of all of them together."""

_PART_BYTES = 8 * (2 + MOST_LEVELS)
Parts = npt.NDArray[np.uint64]
"""The fields of keys that depend on the topic alone, one row per topic: stream number, number of hashes, and ten hashes
of 64 bits, zero where a hash is missing."""


@attrs.frozen(kw_only=True)
class KeyOptions:
    """The options that all keys of a slab share."""

    index_bytes: int
    epoch_bits: int
    level_bits: int


class StreamKeys:
    """The keys of one stream."""

    __slots__ = ("_first", "_part", "epochs", "head", "mapper", "pattern", "varying", "width")

    def __init__(
        self,
        stream: int,
        prefix: bytes,
        mapper: KeyMapper,
        epochs: Epochs,
        varying: Sequence[int],
        pattern: Sequence[str],
    ) -> None:
        self.epochs = epochs
        self.varying = varying
        """The indexes of the topic levels that have a hash in the keys."""
        self.pattern = pattern
        """The levels of the topic filter that describes the stream."""
        self.mapper = mapper
        self.head = len(prefix)
        """The number of bytes before those that the mapper encodes."""
        self.width = len(prefix) + mapper.width
        self._first = int.from_bytes(prefix, "big") << mapper.bits
        self._part = stream.to_bytes(8, "big") + len(varying).to_bytes(8, "big")

    def encode(self, key: int) -> bytes:
        """Return the stored form of a key of `mapper`; ``key`` may also be the end (exclusive) of all keys."""
        return (self._first + key).to_bytes(self.width, "big")

    def decode(self, stored: bytes) -> int:
        """Return the mapper's key in a stored key."""
        return int.from_bytes(stored[self.head :], "big")

    def positions(self, stored: Sequence[bytes]) -> Positions:
        """Return the positions in stored keys."""
        rows = np.frombuffer(b"".join(stored), dtype=np.uint8).reshape(len(stored), self.width)
        return self.mapper.unpack(rows[:, self.head :], 0)

    def part(self, topic: str) -> bytes:
        """Return the row of `Parts` for a topic of the stream, as big-endian bytes."""
        part, levels = self._part, topic.split("/") if self.varying else ()
        for depth in self.varying:
            part += _hash(levels[depth])
        return part.ljust(_PART_BYTES, b"\0")

    def filter(self, hashes: Sequence[Range], span: Span) -> KeyFilter:
        """Return the filter that accepts the keys of a span whose hashes are within these ranges."""
        return self.mapper.filter([_EVERY_POSITION if span.whole else (span.first, span.last), *hashes])

    def covered(self, topic_filter: TopicFilter) -> bool:
        """Return whether every topic of the stream matches, so that topics need not be checked."""
        pattern = self.pattern
        if pattern[0] == "#" or (pattern[0][:1] == "$" and topic_filter.levels[0] in ("+", "#")):
            return False  # some topics may begin with $, which these wildcards don't match
        return covers(topic_filter, pattern)


class Streams:
    """The streams of a slab: those of the learned structure that have an index of their own.

    The highest index serves all other streams. In it, keys are positions.
    """

    def __init__(self, generation: int, trie: LearnedTopics, options: KeyOptions) -> None:
        self._trie = trie
        self._options = options
        self._prefix = encode_generation(generation)
        self._shared = (1 << 8 * options.index_bytes) - 1
        self._mappers = [_mapper(levels, options) for levels in range(MOST_LEVELS + 1)]
        self._epochs = [_epochs(mapper, options) for mapper in self._mappers]
        self._keys: dict[int, StreamKeys] = {}
        self._topics = TopicParts(trie, self._part, _CACHED, _CACHED_CHARACTERS)

    # --- streams ---

    def __len__(self) -> int:
        """Return the number of streams."""
        return min(len(self._trie), self._shared)

    def match(self, topic_filter: TopicFilter) -> list[int]:
        """Return the streams whose topics may match."""
        return list(dict.fromkeys(min(stream, self._shared) for stream in self._trie.match(topic_filter)))

    def find(self, topic: str) -> int | None:
        """Return the stream of a topic; None if it has none."""
        stream = self._trie.find(topic)
        return None if stream is None else min(stream, self._shared)

    def stream_of(self, pair: tuple[bytes, bytes]) -> int:
        """Return the stream in the stored key of a pair of key and value."""
        return int.from_bytes(pair[0][len(self._prefix) :][: self._options.index_bytes], "big")

    def describe(self, stream: int) -> str:
        """Return the topic filter that all topics of a stream match."""
        return "#" if stream == self._shared else self._trie.pattern(stream)

    def learned(self) -> Iterator[TopicNode]:
        """Yield the learned nodes; a node whose stream has no index of its own has the shared index's stream."""
        for node in self._trie.describe():
            if node.stream is not None and node.stream > self._shared:
                yield attrs.evolve(node, stream=self._shared)
            else:
                yield node

    def keys(self, stream: int) -> StreamKeys:
        """Return the keys of a stream. Raises `KeyError` if there is no such stream."""
        keys = self._keys.get(stream)
        if keys is None:
            if not 0 < stream <= len(self):
                raise KeyError(stream)
            keys = self._keys[stream] = self._make_keys(stream)
        return keys

    def is_ordered(self, stream: int) -> bool:
        """Return whether a stream exists and is read in order of position."""
        return 0 < stream <= len(self) and not self.keys(stream).varying

    def _make_keys(self, stream: int) -> StreamKeys:
        shared = stream == self._shared
        varying = () if shared else self._trie.varying(stream)[:MOST_LEVELS]
        mapper = self._mappers[len(varying)]
        prefix = self._prefix + stream.to_bytes(self._options.index_bytes, "big")
        pattern = ("#",) if shared else self._trie.path(stream)
        return StreamKeys(stream, prefix, mapper, self._epochs[len(varying)], varying, pattern)

    # --- filters ---

    def hashes(self, stream: int, topic_filter: TopicFilter) -> list[Range]:
        """Return the ranges of the hashes in a stream's keys that a filter accepts."""
        levels = topic_filter.levels
        wanted = [levels[depth] if depth < len(levels) else "#" for depth in self.keys(stream).varying]
        return [_EVERY_HASH if level in ("+", "#") else (int.from_bytes(_hash(level), "big"),) * 2 for level in wanted]

    # --- topics ---

    def pack(self, parts: Parts, positions: Positions) -> Iterator[tuple[Indices, list[bytes]]]:
        """Yield the stored keys of messages in order of keys, some at a time, with the indexes of the messages."""
        counts = parts[:, 1]
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            mapper = self._mappers[count]
            part = parts[rows]
            body = mapper.pack([positions[rows], *part[:, 2 : 2 + count].T])
            keys = self._stored(part[:, 0], body)
            order = np.argsort(keys.view(f"S{keys.shape[1]}").ravel())
            yield rows[order], keys[order].view(f"V{keys.shape[1]}").ravel().tolist()

    def _stored(self, indexes: npt.NDArray[np.uint64], body: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        size = self._options.index_bytes
        stored = np.empty((len(body), len(self._prefix) + size + body.shape[1]), dtype=np.uint8)
        stored[:, : len(self._prefix)] = np.frombuffer(self._prefix, dtype=np.uint8)
        stored[:, len(self._prefix) : len(self._prefix) + size] = (
            indexes.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - size :]
        )
        stored[:, len(self._prefix) + size :] = body
        return stored

    def learn(self, topics: Column) -> Parts:
        """Return a row of `Parts` for each topic, and assign new topics to streams. Only the writer may call this."""
        names = [topics.value] if isinstance(topics, Constant) else to_list(topics)
        parts = _parts(b"".join(self._topics.of(names)))
        return np.repeat(parts, len(topics), axis=0) if isinstance(topics, Constant) else parts

    def parts(self, topics: Sequence[str], stream: int) -> Parts:
        """Return a row of `Parts` for each of some topics of one stream."""
        keys = self.keys(stream)
        known = {topic: keys.part(topic) for topic in set(topics)}
        return _parts(b"".join(map(known.__getitem__, topics)))

    def _part(self, stream: int, topic: str) -> bytes:
        keys = self._keys.get(stream) or self.keys(min(stream, self._shared))
        return keys.part(topic)


def _hash(level: str) -> bytes:
    return xxhash.xxh3_64_digest(level.encode())


def _parts(joined: bytes) -> Parts:
    return np.frombuffer(joined, dtype=">u8").reshape(-1, _PART_BYTES // 8).astype(np.uint64)


def _epochs(mapper: KeyMapper, options: KeyOptions) -> Epochs:
    low = COUNTER_BITS + options.epoch_bits if mapper.dimensions > 1 else 0
    return Epochs(low, mapper.bits - _POSITION_BITS + low)


def _mapper(levels: int, options: KeyOptions) -> KeyMapper:
    """Return the mapper for the keys of a stream with this many varying levels; dimension 0 is the position.

    The others are hashes of 64 bits, of which the highest bits are used.
    """
    if not levels:
        return KeyMapper([Source(0, 0, _POSITION_BITS)])
    low, bits = COUNTER_BITS + options.epoch_bits, options.level_bits
    hashes = [Source(1 + level, _HASH_BITS - bits, bits) for level in range(levels)]
    return KeyMapper([Source(0, low, _POSITION_BITS - low), *hashes, Source(0, 0, low)])
