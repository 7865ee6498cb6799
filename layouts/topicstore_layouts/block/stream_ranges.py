"""The streams of a slab that a filter may match, with a range of topics in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from topicstore import TopicFilter

from topicstore_layouts.shared.learned_topics import LearnedTopics, covers

from .matching import Range, topic_range

__all__ = ["StreamRanges", "StreamRangesCache"]

_KEPT, _KEPT_BYTES = 64, 16 << 20
"""The number of cached filters, and the approximate bytes for all of them; a single one may take more."""
_STREAM_BYTES = 400
"""The approximate bytes of memory that a stream takes besides its topics."""
_WHOLE: Range = ("", None)


@attrs.frozen
class StreamRanges:
    """The ranges of topics that one filter may match in one stream, or in all streams."""

    ranges: Sequence[tuple[int, str, str | None]]
    """Streams in order of their numbers, with the lowest and highest topic (None: no highest) of each."""
    everything: bool
    """Whether all topics of all streams match."""
    covered: frozenset[int]
    """The streams of which all topics match."""
    by_stream: Mapping[int, Range]
    """The same ranges by stream."""

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the ranges take."""
        texts = sum(len(low) + len(high) for _, low, high in self.ranges if high is not None)
        return _STREAM_BYTES * len(self.ranges) + texts


class StreamRangesCache:
    """A cache of the ranges of recently used filters. They are computed again when the trie has grown."""

    def __init__(self, trie: LearnedTopics) -> None:
        self._trie = trie
        self._kept: dict[tuple[str, int | None], tuple[int, StreamRanges, int]] = {}
        """The ranges by filter and stream, with the number of streams at that time, and their bytes of memory."""

    def of(self, topic_filter: TopicFilter, stream: int | None) -> StreamRanges:
        """Return the ranges of a filter in a stream; None stands for all streams."""
        key, size = (topic_filter.text, stream), len(self._trie)
        known, wanted, _ = self._kept.get(key, (-1, None, 0))
        if wanted is None or known != size:
            wanted = self._find(topic_filter, stream)
            self._keep(key, size, wanted)
        return wanted

    def _keep(self, key: tuple[str, int | None], size: int, wanted: StreamRanges) -> None:
        """Cache these ranges, and keep as many earlier ones as there is room for, the newest first."""
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
            # A filter that begins with a wildcard matches nothing in a stream that begins with "$".
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
