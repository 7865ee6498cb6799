"""The index entries that a topic has, and those that a filter requires.

A message has an entry for each level of its topic that varies within its stream: those learned as
``+``, and the first eight that a last ``#`` stands for, if the topic has them. An entry's hash is
computed from the stream, the level's number and its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
from topicstore import TopicFilter
from topicstore.contract.columns import Column, to_list
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.topic_parts import TopicParts

from .keys import Numbers

__all__ = ["Entries"]

_REST_LEVELS = 8
"""The number of levels below a ``#`` that have entries."""
_WORD = 8
_KNOWN_TOPICS = 65_536
_KNOWN_CHARACTERS = 16 << 20


class Entries:
    """The index entries of one slab's topics.

    ``bits`` is the number of bits kept of each hash, at most 64. Hashes of different levels, tokens and streams may be
    equal, so readers must check the messages' topics.
    """

    def __init__(self, trie: LearnedTopics, bits: int = 64) -> None:
        self._dropped = 64 - bits
        self._varying = _VaryingOf(trie)
        self._parts = TopicParts(trie, self._part, _KNOWN_TOPICS, _KNOWN_CHARACTERS)
        """A topic's stream and hashes, 8 bytes each."""

    # --- topics ---

    def of(self, stream: int, topic: str) -> list[int]:
        """Return the distinct hashes of a topic of a stream."""
        return list(dict.fromkeys(self._split([self._part(stream, topic)])[2].tolist()))

    def learn(self, topics: Column) -> tuple[Numbers, npt.NDArray[np.intp], Numbers]:
        """Return each topic's stream and number of entries, and the hashes of all entries, one after the other.

        New topics are assigned to streams. Only the writer may call this.
        """
        return self._split(self._parts.of(to_list(topics)))

    def _part(self, stream: int, topic: str) -> bytes:
        """Return a topic's stream and its complete hashes as words of 8 bytes."""
        varying, levels = self._varying[stream], topic.encode().split(b"/")
        depths: Sequence[int] = varying.depths
        if depths and depths[-1] >= len(levels):  # the topic has fewer levels than a "#" may stand for
            depths = [depth for depth in depths if depth < len(levels)]
        return varying.head + b"".join(map(xxh3_64_digest, map(levels.__getitem__, depths), varying.seeds))

    def _split(self, parts: list[bytes]) -> tuple[Numbers, npt.NDArray[np.intp], Numbers]:
        """Return the result of `learn` from topics' parts."""
        sizes = np.fromiter(map(len, parts), np.intp, len(parts)) // _WORD
        words = np.frombuffer(b"".join(parts), dtype=">u8").astype(np.uint64)
        firsts = np.cumsum(sizes) - sizes
        hashes = np.ones(len(words), dtype=bool)
        hashes[firsts] = False
        return words[firsts], sizes - 1, words[hashes] >> np.uint64(self._dropped)

    # --- filters ---

    def wanted(self, stream: int, topic_filter: TopicFilter) -> list[int]:
        """Return the hashes that a topic of a stream must have to match a filter."""
        varying = self._varying[stream]
        asked = [(topic_filter.level(d), seed) for d, seed in zip(varying.depths, varying.seeds, strict=True)]
        return [xxh3_64_intdigest(level.encode(), seed) >> self._dropped for level, seed in asked if level != "+"]


@attrs.frozen
class _Varying:
    """The levels of a stream that have index entries."""

    head: bytes
    """The stream's number as bytes."""
    depths: tuple[int, ...]
    seeds: tuple[int, ...]
    """The seeds of the levels' hashes."""


class _VaryingOf(dict[int, _Varying]):
    """The levels with entries by stream, computed on first access."""

    def __init__(self, trie: LearnedTopics) -> None:
        self._trie = trie

    def __missing__(self, stream: int) -> _Varying:
        depths, levels = self._trie.varying(stream), self._trie.levels(stream)
        if levels[-1] == "#":
            depths += tuple(range(len(levels) - 1, len(levels) - 1 + _REST_LEVELS))
        seeds = tuple(stream << 16 | depth for depth in depths)
        self[stream] = _Varying(stream.to_bytes(_WORD, "big"), depths, seeds)
        return self[stream]
