"""The orders of a replay: by position, by descending position, any, and by the messages' own timestamps.

Streams can only be read forwards. A replay in descending order therefore reads a span of time in ascending
order, and reverses it; then the span before it, and so on. The length of a span is chosen so that it has about as many
messages as requested: that of the first by the zones' counts of messages of all topics, and that of later spans by the
share of messages that matched. Where messages are sparse, spans grow fast. A span with too many messages is shortened
and read again.

In a descending replay by timestamp, the matching messages may lie anywhere in a zone. A span of a zone's length is then
read, and the newest messages are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Literal

import attrs
import numpy as np

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_integers
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import first_position, time_of
from topicstore.contract.replay_plan import Order
from topicstore.contract.requests import ReplayRequest
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
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
"""The estimated number of messages in the first span, as a multiple of those requested. The estimate may be too high,
and reading too many messages costs less than reading twice."""
_BLIND = 1_000_000
"""The length, in microseconds, of the first span before all times for which zones have counts."""
_GROWTH = 4
"""The maximum factor by which a span may be longer than the one before, or have more messages than requested."""


def newest_first(storage: Storage, request: ReplayRequest, limit: int | None) -> Iterator[MessageBatch]:
    """Yield the messages of a replay in descending order of time: at most ``limit`` messages, None for all.

    Messages stored after the call are left out. The function holds a few times the messages of a batch, or of
    ``limit`` if that is less, in memory, and always all messages of one microsecond. Raises the errors of replaying.
    """
    storage.check_open()
    bounds = [shard.writer.watermark for shard in storage.shards]
    there = [_There(shard, record) for shard in storage.shards for record in shard.generations.listed()]
    start = max(request.start, min((time_of(one.record.first_position) for one in there), default=0))
    until = max(map(time_of, bounds), default=0) + 1
    if request.until is not None:
        until = min(until, request.until)
    # Called here only to check the arguments, because the generator begins at its first `next`.
    storage.plan(attrs.evolve(request, start=until, until=until))
    return _spans(storage, request, bounds, there, start, until, limit)


@attrs.frozen
class _There:
    """A generation of a shard that existed at the call. It is kept to detect if it is dropped during the replay."""

    shard: Shard
    record: GenerationRecord

    def check(self, start: int, until: int) -> None:
        """Raise `GenerationDroppedError` if the generation was dropped and may have had messages of a span of time."""
        last = self.record.last_position
        if self.record.first_position < first_position(until) and (last is None or last >= first_position(start)):
            self.shard.generations.slab(self.record.number)


def _spans(
    storage: Storage,
    request: ReplayRequest,
    bounds: list[int],
    there: list[_There],
    start: int,
    until: int,
    limit: int | None,
) -> Iterator[MessageBatch]:
    histories = [History.of(shard, bound) for shard, bound in zip(storage.shards, bounds, strict=True)]
    span, least, blind = 0.0, start, _BLIND
    through = request.timestamps is not None
    while until > start and limit != 0:
        until = min(until, _reach(storage, request, start, until))
        if until <= start:
            return
        wanted = request.batch_size if limit is None else min(limit, request.batch_size)
        span = SIZE if through else span or _FIRST_SPAN * wanted
        first = History.time_before(histories, until, span)
        if first >= until:
            first, blind = until - blind, blind * _GROWTH
        first = max(least, first)
        asked = attrs.evolve(request, start=first, until=until)
        if through:
            found, first = _newest(storage, asked, bounds, _GROWTH * wanted)
            through, whole = not found, True
        else:
            found, whole = _read(storage, asked, bounds, _GROWTH * wanted)
        if not whole:
            if until - first > 1:
                span, blind = span / (2 * _GROWTH), max(blind // (2 * _GROWTH), 1)
                least = min(time_of(int(found[-1].positions[-1])), until - 1)
                continue
            found, _ = _read(storage, asked, bounds, None)
        for generation in there:
            generation.check(first, until)
        rows = MessageBatch.concat(found)
        turned = rows.take(np.arange(len(rows) - 1, -1, -1)[:limit])
        yield from replays.slices([turned] if len(turned) else [], request.batch_size)
        limit = None if limit is None else limit - len(turned)
        until, least = first, start
        fitting = span * wanted / len(rows) if len(rows) else span * _GROWTH
        span = min(max(fitting, span / _GROWTH), span * _GROWTH)


def _reach(storage: Storage, request: ReplayRequest, start: int, until: int) -> int:
    """Return a time, at most ``until``, from which no message has the requested timestamps, according to the zones."""
    if request.timestamps is None:
        return until
    first, last = first_position(start), first_position(until) - 1
    spans = [shard.reader.spans(request.timestamps, first, last)[-1:] for shard in storage.shards]
    return max((time_of(min(end, last)) + 1 for ((_, end),) in filter(None, spans)), default=start)


def _newest(storage: Storage, request: ReplayRequest, bounds: list[int], most: int) -> tuple[list[MessageBatch], int]:
    """Return the newest messages of a span in order, about ``most``, and the time since which they are complete.

    The whole span is read in one pass, because the messages may lie anywhere in it.
    """
    held: deque[MessageBatch] = deque()
    rows, left_out = 0, False
    for batch in _batches(storage, request, bounds):
        held.append(batch)
        rows += len(batch)
        while rows - len(held[0]) >= most:
            rows -= len(held.popleft())
            left_out = True
    if not left_out:
        return list(held), request.start
    found = MessageBatch.concat(list(held))
    first = time_of(int(found.positions[0]))  # some messages of this microsecond may have been dropped
    later = int(np.searchsorted(found.positions, np.uint64(first_position(first + 1))))
    if later < len(found):
        return [found[later:]], first + 1
    return list(_batches(storage, attrs.evolve(request, start=first), bounds)), first


def _read(
    storage: Storage, request: ReplayRequest, bounds: list[int], most: int | None
) -> tuple[list[MessageBatch], bool]:
    """Return the messages of a span in order, and whether they are complete: reading stops above ``most``."""
    held, rows = [], 0
    for batch in _batches(storage, request, bounds):
        held.append(batch)
        rows += len(batch)
        if most is not None and rows > most:
            return held, False
    return held, True


def _batches(storage: Storage, request: ReplayRequest, bounds: list[int]) -> Iterator[MessageBatch]:
    """Yield the messages of a span in ascending order, up to the bounds by shard."""
    plan = storage.plan(request)
    shards = [attrs.evolve(shard, bound=min(shard.bound, bounds[shard.shard])) for shard in plan.shards]
    yield from replays.run(attrs.evolve(plan, shards=shards), partial(storage.fetch, columns=request.columns))


ReplayOrder = Order | Literal["timestamp"]
"""An order of a replay's plan, or ``"timestamp"``, which sorts its messages by their own timestamps."""


def planned(order: ReplayOrder) -> Order:
    """Return the order of a replay's plan. Messages that are sorted by timestamp are read in order of positions."""
    return "time" if order == "timestamp" else order


def ordered(
    storage: Storage, request: ReplayRequest, order: ReplayOrder, *, reverse: bool, limit: int | None
) -> Iterator[MessageBatch]:
    """Return the batches of a replay in ``order``; see `topicstore.Database.replay`.

    The request has the order `planned`.
    """
    if limit is not None:
        check_count("limit", limit, 0)
        check_count("batch_size", request.batch_size)
        if request.timestamps is None and order != "timestamp":  # otherwise more messages may have to be read
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
