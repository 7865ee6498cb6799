"""What a filter wants of a slab: which streams, and between which topics in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from topicstore import TopicFilter

from topicstore_layouts.shared.learned_topics import LearnedTopics, covers

from .matching import Range, topic_range

__all__ = ["StreamRanges", "StreamRangesCache"]

_KEPT, _KEPT_BYTES = 64, 16 << 20
"""Filters whose streams are kept, and the memory that those may take, about, unless they are of one filter."""
_STREAM_BYTES = 400
"""Memory that a stream takes besides its topics, about."""
_WHOLE: Range = ("", None)


@attrs.frozen
class StreamRanges:
    """What one filter wants of one stream, or of all."""

    ranges: Sequence[tuple[int, str, str | None]]
    """Streams in order of their numbers, with the lowest and highest topic (None: no highest) of each."""
    everything: bool
    """All topics of all streams match."""
    covered: frozenset[int]
    """Streams all of whose topics match."""
    by_stream: Mapping[int, Range]
    """The same ranges, to look up."""

    @property
    def memory(self) -> int:
        """Bytes that it takes, about."""
        texts = sum(len(low) + len(high) for _, low, high in self.ranges if high is not None)
        return _STREAM_BYTES * len(self.ranges) + texts


class StreamRangesCache:
    """What the filters used last want. Worked out anew when the trie has grown."""

    def __init__(self, trie: LearnedTopics) -> None:
        self._trie = trie
        self._kept: dict[tuple[str, int | None], tuple[int, StreamRanges, int]] = {}
        """By filter and stream: with how many streams it was found, and the memory that it takes."""

    def of(self, topic_filter: TopicFilter, stream: int | None) -> StreamRanges:
        """Return what a filter wants of a stream; None: of all."""
        key, size = (topic_filter.text, stream), len(self._trie)
        known, wanted, _ = self._kept.get(key, (-1, None, 0))
        if wanted is None or known != size:
            wanted = self._find(topic_filter, stream)
            self._keep(key, size, wanted)
        return wanted

    def _keep(self, key: tuple[str, int | None], size: int, wanted: StreamRanges) -> None:
        """Keep what was found, and as many of those before as there is room for, the newest first."""
        memory = wanted.memory
        held, room = [(key, (size, wanted, memory))], _KEPT_BYTES - memory
        for other, each in reversed(list(self._kept.items())[-_KEPT + 1 :]):
            room -= each[2]
            if room < 0:
                break
            if other != key:
                held.append((other, each))
        self._kept = dict(reversed(held))

    def _find(self, topic_filter: TopicFilter, stream: int | None) -> StreamRanges:
        if stream is None:
            streams = self._trie.match(topic_filter)
        else:
            # A filter that begins with a wildcard sees nothing of a stream that begins with "$".
            hidden = topic_filter.levels[0] in ("+", "#") and self._trie.pattern(stream).startswith("$")
            streams = [] if hidden else [stream]
        levels = [self._trie.levels(number) for number in streams]
        covered = frozenset(s for s, learned in zip(streams, levels, strict=True) if covers(topic_filter, learned))
        ranges = [
            (s, *(_WHOLE if s in covered else topic_range(learned, topic_filter)))
            for s, learned in zip(streams, levels, strict=True)
        ]
        by_stream = {stream: (low, high) for stream, low, high in ranges}
        return StreamRanges(ranges, len(covered) == len(self._trie), covered, by_stream)
