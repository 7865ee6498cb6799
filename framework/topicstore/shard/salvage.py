"""Salvage: recovering the readable messages after damage in the middle of a shard's log.

Later writes may depend on the missing ones, which may have defined names or streams, or deleted or merged messages.
Therefore nothing is written on top of the damaged state: the shard continues from the state before the damage.
A read-only view shows all remaining writes. The later messages that the layout can read from it are stored again at
their positions. A layout returns a message as it was stored or raises an error (`Slab.next`); unreadable messages are
left out.
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
    """The result of a salvage: the readable messages that were written after the damage, to be stored again."""

    end: Tail = attrs.field(factory=Tail)
    """The last readable tail."""
    messages: MessageBatch = attrs.field(factory=MessageBatch.empty)
    """The readable messages, in order of positions."""
    others: int = 0
    """The number of lost messages, as far as the stored counts show."""
    unreadable: CorruptionError | NewerFormatError | None = None
    """The error because of which nothing can be read, or None."""

    def store_in(self, shard: Shard) -> None:
        """Store the messages in a shard, in one engine write, and fsync it."""
        shard.writer.store_again(self.messages, self.end)
        shard.writer.flush()

    def __str__(self) -> str:
        if self.unreadable is not None:
            return f"nothing can be read: {self.unreadable}"
        return f"{len(self.messages):,} messages were salvaged, {self.others:,} others are lost"


def salvage(open_before: Callable[[], Shard], open_left: Callable[[], Shard]) -> Salvaged | None:
    """Return the readable messages that were written after the damage, or None if no write after it is readable.

    open_before: opens the shard as it was before the damage.
    open_left:   opens a view of all readable writes of the shard, with gaps.

    The function closes both shards. They are never open at the same time.
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
    """Return the readable messages after position ``last``, in order, each once."""
    found = [
        batch
        for record, slab in left.generations.with_slabs()
        if record.last_position is None or record.last_position > last
        for batch in _of_slab(slab, last + 1, left.writer.tail.last_position)
    ]
    messages = MessageBatch.concat(found)
    if not found:
        return messages
    # A message is read twice if the write that moved it is missing, or if a layout returns it for two filters.
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
    """One stream of a slab, up to position ``last``; parts of it may be unreadable."""

    slab: Slab
    stream: int
    topic_filter: TopicFilter
    last: int

    def read(self, first: int) -> Iterator[MessageBatch]:
        """Yield the readable messages from position ``first`` on. Some messages close to damage may be left out."""
        at: int | None = first
        limit, place = _ROWS, None
        while at is not None:
            try:
                step = self._next(self._begin(at) if place is None else place, limit)
            except _DAMAGED:
                if limit == 1:
                    at, place = self._behind(at), None
                limit = max(limit // 8, 1)  # smaller steps, to reach all messages before the damage
                continue
            if len(step.batch):
                yield step.batch
                at = max(at, int(np.max(np.asarray(step.batch.positions))) + 1)
            if step.exhausted:
                return
            place, limit = step.place, min(2 * limit, _ROWS)

    def _behind(self, at: int) -> int | None:
        """Return a position after ``at`` from which messages can be read; None if there is none.

        The extent of the damage is unknown, so the search doubles its step until it finds a readable position. Then a
        bisection narrows the gap.
        """
        damaged = at | self.slab.epoch - 1  # the end of the epoch, within which messages aren't in order of positions
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
