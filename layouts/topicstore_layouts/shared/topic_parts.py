"""A cache of the parts of keys that depend on the topic only: computing these parts is most of the cost of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .learned_topics import LearnedTopics

__all__ = ["TopicParts"]


class TopicParts:
    """A cache of the key bytes of recently stored topics, for one writer.

    ``make`` returns the bytes for a stream and a topic. ``trie`` assigns new topics to streams. At most ``topics``
    topics with at most ``characters`` characters together are cached, unless one batch has more.
    """

    def __init__(self, trie: LearnedTopics, make: Callable[[int, str], bytes], topics: int, characters: int) -> None:
        self._trie = trie
        self._make = make
        self._most, self._most_characters = topics, characters
        self._known: dict[str, bytes] = {}
        self._characters = 0
        """The number of characters of all cached topics."""

    def __len__(self) -> int:
        return len(self._known)

    def of(self, topics: Sequence[str]) -> list[bytes]:
        """Return the bytes of each topic."""
        try:
            return list(map(self._known.__getitem__, topics))
        except KeyError:
            self._learn(topics)
            return list(map(self._known.__getitem__, topics))

    def _learn(self, topics: Sequence[str]) -> None:
        """Cache all of these topics; evict all others first if there are too many."""
        distinct = dict.fromkeys(topics)
        missing = [topic for topic in distinct if topic not in self._known]
        characters = self._characters + sum(map(len, missing))
        if len(self._known) + len(missing) > self._most or characters > self._most_characters:
            self._known, missing = {}, list(distinct)
            characters = sum(map(len, missing))
        self._characters = characters
        self._known.update(zip(missing, map(self._make, self._trie.learn_all(missing), missing), strict=True))
