"""What topics put into keys, remembered by the writer: to work it out takes longer than all else about a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .learned_topics import LearnedTopics

__all__ = ["TopicParts"]


class TopicParts:
    """Bytes for each topic that came lately; for one writer.

    ``make`` returns the bytes of a topic, given its stream first; streams are learned where topics are new. No more
    than so many ``topics`` are remembered, nor more than so many ``characters`` of all of them, unless they are of
    one batch.
    """

    def __init__(self, trie: LearnedTopics, make: Callable[[int, str], bytes], topics: int, characters: int) -> None:
        self._trie = trie
        self._make = make
        self._most, self._most_characters = topics, characters
        self._known: dict[str, bytes] = {}
        self._characters = 0
        """Of all of them."""

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
        """Remember all of these topics, in place of all others if there are too many."""
        distinct = dict.fromkeys(topics)
        missing = [topic for topic in distinct if topic not in self._known]
        characters = self._characters + sum(map(len, missing))
        if len(self._known) + len(missing) > self._most or characters > self._most_characters:
            self._known, missing = {}, list(distinct)
            characters = sum(map(len, missing))
        self._characters = characters
        self._known.update(zip(missing, map(self._make, self._trie.learn_all(missing), missing), strict=True))
