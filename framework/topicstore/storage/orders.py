"""The orders of a replay: by position, by position from its end, any, and by the messages' own timestamps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs
import numpy as np

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_integers
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.replay_plan import Order
from topicstore.contract.requests import ReplayRequest

from . import replays
from .reversing import newest_first
from .storage import Storage

__all__ = ["ReplayOrder", "ordered", "planned", "sorted_by_timestamp"]

ReplayOrder = Order | Literal["timestamp"]
"""An order of a replay's plan, or ``"timestamp"``: its messages are sorted by their own timestamps."""


def planned(order: ReplayOrder) -> Order:
    """Return the order of the plan of a replay: messages that are sorted afterwards are read in order of positions."""
    return "time" if order == "timestamp" else order


def ordered(
    storage: Storage, request: ReplayRequest, order: ReplayOrder, *, reverse: bool, limit: int | None
) -> Iterator[MessageBatch]:
    """Yield the batches of a replay whose plan has the order `planned`; see `topicstore.Database.replay`."""
    if limit is not None:
        check_count("limit", limit, 0)
        check_count("batch_size", request.batch_size)
        if request.timestamps is None and order != "timestamp":  # else more may have to be read to find as many
            request = attrs.evolve(request, batch_size=max(1, min(limit, request.batch_size)))
    if reverse and order == "any":
        raise InvalidArgumentError("a replay that goes back is in order of time or of timestamps: leave out order")
    if reverse and order == "time":
        return newest_first(storage, request, limit)
    batches = replays.run(storage.plan(request), storage.fetch)
    if order == "timestamp":
        return sorted_by_timestamp(batches, limit, request.batch_size, reverse=reverse)
    return batches if limit is None else replays.limited(batches, limit)


def sorted_by_timestamp(
    batches: Iterator[MessageBatch], limit: int | None, rows: int, *, reverse: bool
) -> Iterator[MessageBatch]:
    """Yield the first ``limit`` messages in order of timestamps, in batches of at most the given number of rows.

    The batches are in order of positions, and so are messages of one timestamp. With ``reverse`` both orders are
    reversed. All messages are in memory; with ``limit`` about twice as many as that, and one batch.
    """
    held: list[MessageBatch] = []
    for batch in batches:
        held.append(batch)
        if limit is not None and sum(map(len, held)) > 2 * limit:
            held = [_kept(held, limit, reverse=reverse)]
    kept = _kept(held, limit, reverse=reverse)
    yield from replays.slices([kept.take(np.arange(len(kept))[::-1]) if reverse else kept], rows)


def _kept(batches: list[MessageBatch], limit: int | None, *, reverse: bool) -> MessageBatch:
    """Sort messages by timestamp, and keep the first ``limit`` of them, or with ``reverse`` the last."""
    joined = MessageBatch.concat(batches)
    order = np.argsort(to_integers(joined.timestamps), kind="stable")
    if limit is not None:
        order = order[max(len(order) - limit, 0) :] if reverse else order[:limit]
    return joined.take(order)
