"""The orders of a replay: by position, by descending position, any, and by the messages' own timestamps.

Streams can only be read forwards. A replay in descending order therefore reads each shard in spans of positions, the
newest span first, and reverses the messages of each span. The messages of all shards are then merged.

A layout may find the span of the newest matching messages (`topicstore.contract.layout.Slab.newest`). Otherwise the
length of a span is estimated. The first span has 1.5 times as many positions as messages are requested, which suffices
where the newest messages were stored in one batch, because a batch has consecutive positions. After a span without a
match, the next span covers a number of messages of all topics, according to the zones' counts, and this number grows
with each such span. A span with too many messages is shortened and read again.

In a descending replay by timestamp, the matching messages may lie anywhere in a zone. A span then covers a whole zone,
and only the newest of its messages are kept in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import attrs
import numpy as np

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import FIELDS, MessageBatch
from topicstore.contract.columns import to_integers
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.replay_plan import GenerationPlan, Order, ReplayPlan, ShardPlan
from topicstore.contract.requests import ReplayRequest
from topicstore.shard.zones import SIZE
from topicstore.storage import replays
from topicstore.storage.storage import Storage

from .history import History

__all__ = [
    "ReplayOrder",
    "newest_first",
    "ordered",
    "planned",
    "sorted_by_timestamp",
]

_FIRST_SPAN = 1.5
"""The number of positions in the first span, as a multiple of the messages requested. Reading a few messages too many
costs less than reading twice."""
_GROWTH = 4
"""The maximum factor by which a span may be longer than the one before, or have more messages than requested."""


def newest_first(
    storage: Storage, request: ReplayRequest, limit: int | None, bounds: Sequence[int] | None = None
) -> Iterator[MessageBatch]:
    """Yield the messages of a replay in descending order of time: at most ``limit`` messages, None for all.

    ``bounds`` are the highest positions to return, by shard; messages stored after the call are left out.

    Memory for each shard: a few times the smaller of a batch and ``limit`` messages, but at least the rows that the
    layout can only read together. Raises the errors of replaying.
    """
    storage.check_open()
    plan = storage.plan(request)
    if bounds is not None:
        shards = [attrs.evolve(shard, bound=min(shard.bound, bounds[shard.shard])) for shard in plan.shards]
        plan = attrs.evolve(plan, shards=shards)
    return _newest_first(storage, plan, limit)


def _newest_first(storage: Storage, plan: ReplayPlan, limit: int | None) -> Iterator[MessageBatch]:
    if limit == 0:
        return
    wanted = plan.batch_size if limit is None else min(limit, plan.batch_size)
    # `replays.merge` merges by ascending positions, so the sources yield the positions' complements. Of messages at
    # equal positions in several shards, the last shard's message comes first.
    sources = [_Backwards(storage, plan, shard, wanted).batches() for shard in reversed(plan.shards)]
    batches = map(_complemented, replays.merge(sources))
    yield from replays.slices(batches if limit is None else replays.limited(batches, limit), plan.batch_size)


def _complemented(batch: MessageBatch) -> MessageBatch:
    """Return a batch with each position replaced by its bitwise complement; a second call restores the positions."""
    columns = (getattr(batch, name) for name in FIELDS)
    return MessageBatch(*columns, positions=~batch.positions, shards=batch.shards)


class _Backwards:
    """The messages of one shard's part of a replay, newest first."""

    def __init__(self, storage: Storage, plan: ReplayPlan, shard: ShardPlan, wanted: int) -> None:
        self._storage = storage
        self._plan = plan
        self._shard = shard
        self._reader = storage.shards[shard.shard].reader
        self._wanted = wanted
        self._history: History | None = None

    def batches(self) -> Iterator[MessageBatch]:
        """Yield the messages in descending order of positions, with the bitwise complement of each position."""
        for part in reversed(self._shard.generations):
            last = min(self._shard.bound, part.bound)
            narrow = len(part.cursors) == 1 and self._plan.timestamps is None
            for found in self._narrowed(part, last) if narrow else self._estimated(part, last):
                while found:
                    batch = found.pop()
                    yield _complemented(batch.take(np.arange(len(batch) - 1, -1, -1)))

    def _narrowed(self, part: GenerationPlan, last: int) -> Iterator[list[MessageBatch]]:
        """Yield the messages of spans that the layout has found, as ascending batches."""
        wanted = self._wanted
        while last >= part.first:
            span = self._reader.newest(part.cursors[0], part.first, last, wanted)
            if span is None:
                yield from self._estimated(part, last)
                return
            found = list(self._read(part, *span))
            if sum(map(len, found)) < wanted:
                wanted *= _GROWTH  # fewer rows match than the layout has assumed
            yield found
            last = span[0] - 1

    def _estimated(self, part: GenerationPlan, last: int) -> Iterator[list[MessageBatch]]:
        """Yield the messages of spans whose length is estimated, as ascending batches."""
        span, back = max(int(_FIRST_SPAN * self._wanted), 1), _FIRST_SPAN * self._wanted
        through = self._plan.timestamps is not None
        while last >= part.first:
            first = min(self._before(last, SIZE) + 1, last) if through else last - span + 1
            first = max(first, part.first)
            found: deque[MessageBatch] = deque()
            rows, read = 0, last
            for batch in self._read(part, first, last):
                found.append(batch)
                rows += len(batch)
                while through and rows - len(found[0]) >= _GROWTH * self._wanted:
                    rows -= len(found.popleft())
                    first = int(found[0].positions[0])
                if not through and rows > _GROWTH * self._wanted:
                    read = int(batch.positions[-1])
                    break
            if read < last:
                span = min(max((last - first + 1) // (2 * _GROWTH), 1), last - read)
                continue
            yield list(found)
            if rows and through:
                span, through = last - first + 1, False
            if rows:
                span = max(min(int(span * self._wanted / rows), _GROWTH * span), span // _GROWTH, 1)
            else:
                back *= _GROWTH
                span = max(_GROWTH * span, first - self._before(first, back))
            last = first - 1

    def _before(self, position: int, messages: float) -> int:
        """Return a position, between which and ``position`` the shard has stored about ``messages`` messages."""
        if self._history is None:
            self._history = History.of(self._storage.shards[self._shard.shard], self._shard.bound)
        return self._history.before(position, messages)

    def _read(self, part: GenerationPlan, first: int, last: int) -> Iterator[MessageBatch]:
        """Yield the messages at positions ``first`` to ``last``, in ascending order."""
        cursors = self._reader.begin(part.cursors, first)
        if first <= last and cursors:
            plan = attrs.evolve(self._shard, bound=last, generations=[GenerationPlan(cursors, part.epoch, last, first)])
            alone = attrs.evolve(self._plan, shards=[plan], order="time")
            yield from replays.run(alone, self._storage.fetch)


ReplayOrder = Order | Literal["timestamp"]
"""An order of a replay's plan, or ``"timestamp"``, which sorts its messages by their own timestamps."""


def planned(order: ReplayOrder) -> Order:
    """Return the order of a replay's plan. Messages that are sorted by timestamp are read in order of positions."""
    return "time" if order == "timestamp" else order


def ordered(
    storage: Storage, request: ReplayRequest, order: ReplayOrder, *, reverse: bool, limit: int | None
) -> Iterator[MessageBatch]:
    """Return the batches of a replay in ``order``; see `topicstore.Database.replay`.

    ``request`` must have the order that `planned` returns.
    """
    if limit is not None:
        check_count("limit", limit, 0)
        check_count("batch_size", request.batch_size)
        if request.timestamps is None and order != "timestamp":  # other replays may read more messages than they return
            request = attrs.evolve(request, batch_size=max(1, min(limit, request.batch_size)))
    if reverse and order == "any":
        raise InvalidArgumentError("a replay that goes back is in order of time or of timestamps: leave out order")
    if reverse and order == "time":
        return newest_first(storage, request, limit)
    batches = replays.run(storage.plan(request), partial(storage.fetch, columns=request.columns))
    if order == "timestamp":
        return sorted_by_timestamp(batches, limit, request.batch_size, reverse=reverse)
    return batches if limit is None else replays.limited(batches, limit)


def sorted_by_timestamp(
    batches: Iterator[MessageBatch], limit: int | None, rows: int, *, reverse: bool
) -> Iterator[MessageBatch]:
    """Yield the first ``limit`` messages in order of timestamps, in batches of at most ``rows`` rows.

    ``batches`` are in order of positions; messages with the same timestamp keep that order. With ``reverse`` both
    orders are reversed. All messages are held in memory; with ``limit``, about twice that many, and one batch.
    """
    held: list[MessageBatch] = []
    for batch in batches:
        held.append(batch)
        if limit is not None and sum(map(len, held)) > 2 * limit:
            held = [_kept(held, limit, reverse=reverse)]
    kept = _kept(held, limit, reverse=reverse)
    yield from replays.slices([kept.take(np.arange(len(kept))[::-1]) if reverse else kept], rows)


def _kept(batches: list[MessageBatch], limit: int | None, *, reverse: bool) -> MessageBatch:
    """Sort messages by timestamp, and return the first ``limit`` of them or, with ``reverse``, the last."""
    joined = MessageBatch.concat(batches)
    order = np.argsort(to_integers(joined.timestamps), kind="stable")
    if limit is not None:
        order = order[max(len(order) - limit, 0) :] if reverse else order[:limit]
    return joined.take(order)
