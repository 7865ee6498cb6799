"""Salvage: reading the messages that are left after damage in a shard's log.

After damage, writes are missing on which later ones may depend: they may have defined names or streams, deleted
messages or merged them. So nothing is ever written on top of such a state. The shard continues from the moment before
the damage. The messages after it that the layout can read, from a view of everything that is left, are stored again at
the positions that they have. A layout returns messages as they were stored or raises an error (`Slab.next`); those
that it can't read are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import ReadLimits, Slab, SlabStep
from topicstore.contract.topics import TopicFilter

from .records import Tail
from .rewriter import filters_of_all
from .shard import Shard

__all__ = ["Salvaged", "messages_behind", "salvage"]

_ROWS = 4_096
_BYTES = 4 << 20
_DAMAGED = CorruptionError, NewerFormatError


@attrs.frozen
class Salvaged:
    """The messages after damage."""

    end: Tail = attrs.field(factory=Tail)
    """The last tail that can be read."""
    messages: MessageBatch = attrs.field(factory=MessageBatch.empty)
    """The messages that can be read, in order of positions."""
    others: int = 0
    """The number of other messages that there were, as far as the counts show."""
    unreadable: CorruptionError | NewerFormatError | None = None
    """The reason why nothing at all can be read, or None."""

    def store_in(self, shard: Shard) -> None:
        """Store the messages again, in one engine write, and return when they are on disk."""
        shard.writer.store_again(self.messages, self.end)
        shard.writer.flush()

    def __str__(self) -> str:
        if self.unreadable is not None:
            return f"nothing can be read: {self.unreadable}"
        return f"{len(self.messages):,} messages were salvaged, {self.others:,} others are lost"


def salvage(open_before: Callable[[], Shard], open_left: Callable[[], Shard]) -> Salvaged | None:
    """Return the messages after damage in a shard, or None if there are none.

    open_before: opens the shard as it was before the damage.
    open_left:   opens everything that is left of the shard, with gaps.

    Both shards are closed again, and they are never open at the same time.
    """
    with closing(open_before()) as before:
        start, count, writable = before.writer.tail, _count(before), before.generations.current > 0
    try:
        left = open_left()
    except _DAMAGED as unreadable:
        return Salvaged(unreadable=unreadable)
    with closing(left):
        end = left.writer.tail
        if end.writes <= start.writes:
            return None
        messages = messages_behind(left, start.last_position) if writable else MessageBatch.empty()
        return Salvaged(end, messages, max(_count(left) - count - len(messages), 0))


def messages_behind(left: Shard, last: int) -> MessageBatch:
    """Return the messages after a position that can be read, in order, each once."""
    found = [
        batch
        for record, slab in left.generations.with_slabs()
        if record.last_position is None or record.last_position > last
        for batch in _of_slab(slab, last + 1, left.writer.tail.last_position)
    ]
    messages = MessageBatch.concat(found)
    if not found:
        return messages
    # A message comes twice if the write that moved it is missing, or if a layout returns it for two filters.
    _, rows = np.unique(np.asarray(messages.positions, dtype=np.uint64), return_index=True)
    return messages.take(rows)


def _count(shard: Shard) -> int:
    sealed = sum(record.messages for record in shard.generations.listed() if record.sealed is not None)
    return sealed + shard.writer.tail.messages


def _of_slab(slab: Slab, first: int, last: int) -> Iterator[MessageBatch]:
    try:
        filters = filters_of_all(slab)
    except _DAMAGED:
        return
    for text in filters:
        topic_filter = TopicFilter(text)
        try:
            streams = slab.cover(topic_filter, first)
        except _DAMAGED:
            continue
        for stream in streams:
            yield from _Stream(slab, stream, topic_filter, last).read(first)


@attrs.frozen
class _Stream:
    """One stream of a slab, up to a position, parts of which may be unreadable."""

    slab: Slab
    stream: int
    topic_filter: TopicFilter
    last: int

    def read(self, first: int) -> Iterator[MessageBatch]:
        """Yield the messages from a position on that can be read. Some that are close to damage may be left out."""
        at: int | None = first
        limit, place = _ROWS, None
        while at is not None:
            try:
                step = self._next(self._begin(at) if place is None else place, limit)
            except _DAMAGED:
                if limit == 1:
                    at, place = self._behind(at), None
                limit = max(limit // 8, 1)  # so that no message before the damage is given up
                continue
            if len(step.batch):
                yield step.batch
                at = max(at, int(np.max(np.asarray(step.batch.positions))) + 1)
            if step.exhausted:
                return
            place, limit = step.place, min(2 * limit, _ROWS)

    def _behind(self, at: int) -> int | None:
        """Return a position after ``at`` from which messages can be read; None if there is none.

        The steps grow, because the extent of damage is unknown. Then a bisection finds the first such position.
        """
        damaged = at | self.slab.epoch - 1  # within an epoch the next position is unknown
        step = 1
        while not self._readable(readable := min(damaged + step, self.last + 1)):
            damaged, step = readable, 2 * step
        while readable - damaged > 1:
            middle = (damaged + readable) // 2
            if self._readable(middle):
                readable = middle
            else:
                damaged = middle
        return None if readable > self.last else readable

    def _readable(self, position: int) -> bool:
        try:
            return position > self.last or bool(self._next(self._begin(position), 1))
        except _DAMAGED:
            return False

    def _begin(self, position: int) -> bytes:
        return self.slab.begin(self.stream, self.topic_filter, position)

    def _next(self, place: bytes, limit: int) -> SlabStep:
        limits = ReadLimits(rows=limit, bytes=_BYTES, bound=self.last)
        return self.slab.next(self.stream, self.topic_filter, place, limits)
