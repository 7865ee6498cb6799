"""Which index entries a topic has, and which a filter asks for.

A message has an entry for each level of its topic that varies within its stream: those learned as
``+``, and of those that a last ``#`` stands for the first eight, as far as the topic has them. An
entry's hash is of the stream, the level's number and its text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from topicstore import TopicFilter
from topicstore.columns import Column, to_list
from xxhash import xxh3_64_intdigest

from topicstore_layouts.learned import MAX_LEVELS, LearnedTopics

from .keys import Numbers

__all__ = ["Entries"]

_REST_LEVELS = 8
"""Levels that a ``#`` stands for and that have entries."""
_WORD = 8
_PACK = [struct.Struct(f"={words}Q").pack for words in range(1 + MAX_LEVELS + _REST_LEVELS + 1)]
"""What packs so many words."""
_KNOWN_TOPICS = 65_536
_KNOWN_CHARACTERS = 16 << 20


class Entries:
    """The index entries of one slab's topics.

    ``bits``: how many of a hash are kept, at most 64. Whoever looks something up must expect entries
    of other levels, tokens and streams among those of the hash, however many bits there are.
    """

    def __init__(self, trie: LearnedTopics, bits: int = 64) -> None:
        self._trie = trie
        self._dropped = 64 - bits
        self._varying = _Varying(trie)
        self._known: dict[str, bytes] = {}
        """Of a topic its stream and hashes, 8 bytes each: a cache of the writer's."""
        self._characters = 0

    # --- topics ---

    def of(self, stream: int, topic: str) -> list[int]:
        """Return the hashes of a topic of a stream, each once."""
        levels, dropped = topic.split("/"), self._dropped
        hashes = [
            xxh3_64_intdigest(levels[depth].encode(), seed) >> dropped
            for depth, seed in self._varying[stream]
            if depth < len(levels)
        ]
        return hashes if len(hashes) < 2 or len(set(hashes)) == len(hashes) else list(dict.fromkeys(hashes))

    def learn(self, topics: Column) -> tuple[Numbers, npt.NDArray[np.intp], Numbers]:
        """Return each topic's stream, how many entries it has, and the entries' hashes one behind the other.

        Streams are learned where topics are new. For the writer alone.
        """
        names = to_list(topics)
        try:
            parts = list(map(self._known.__getitem__, names))
        except KeyError:
            self._learn(names)
            parts = list(map(self._known.__getitem__, names))
        sizes = np.fromiter(map(len, parts), np.intp, len(parts)) // _WORD
        words = np.frombuffer(b"".join(parts), dtype=np.uint64)
        firsts = np.cumsum(sizes) - sizes
        hashes = np.ones(len(words), dtype=bool)
        hashes[firsts] = False
        return words[firsts], sizes - 1, words[hashes]

    def _learn(self, names: Iterable[str]) -> None:
        """Put all of these topics into the cache, in place of all others if it is full."""
        distinct = dict.fromkeys(names)
        missing = [name for name in distinct if name not in self._known]
        if len(self._known) + len(missing) > _KNOWN_TOPICS or self._characters > _KNOWN_CHARACTERS:
            self._known, self._characters, missing = {}, 0, list(distinct)
        for name, stream in zip(missing, self._trie.learn_all(missing), strict=True):
            hashes = self.of(stream, name)
            self._known[name] = _PACK[1 + len(hashes)](stream, *hashes)
            self._characters += len(name)

    # --- filters ---

    def wanted(self, stream: int, topic_filter: TopicFilter) -> list[int]:
        """Return the hashes that every matching topic of a stream has."""
        asked = [(topic_filter.level(depth), seed) for depth, seed in self._varying[stream]]
        return [xxh3_64_intdigest(level.encode(), seed) >> self._dropped for level, seed in asked if level != "+"]


class _Varying(dict[int, list[tuple[int, int]]]):
    """Of each stream the levels that have entries, each with the seed of its hashes; found when first asked for."""

    def __init__(self, trie: LearnedTopics) -> None:
        self._trie = trie

    def __missing__(self, stream: int) -> list[tuple[int, int]]:
        depths, levels = self._trie.varying(stream), self._trie.levels(stream)
        if levels[-1] == "#":
            depths += tuple(range(len(levels) - 1, len(levels) - 1 + _REST_LEVELS))
        self[stream] = [(depth, stream << 16 | depth) for depth in depths]
        return self[stream]
