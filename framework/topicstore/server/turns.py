"""Limits for the session changes of one batch: a turn, and the requests that wait for the following turns.

Session changes (connections and subscriptions) are expensive. A turn has a bounded number of them, so that publishes,
acknowledgements and deliveries, which are part of every turn, wait only for a bounded time. The bound is shared evenly
among waiting requests. A SUBSCRIBE of many filters continues in the following turns, behind requests that had no share
in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .asked import Asked

__all__ = ["ENDED", "LAST_ROWS", "ROWS", "SESSION", "keep_turn", "put_first"]

ROWS = 100
"""Number of filters, or of equally expensive changes, in one turn: about 10 ms."""
LAST_ROWS = 2_000
"""As `ROWS`, for a server that is shutting down."""
SESSION = 4
"""The cost of a connection's beginning or end, in filters."""

ENDED = 8
"""Number of a session's filters whose removal at the end of its connection costs as much as one changed filter."""

T = TypeVar("T")


def keep_turn(asked: Asked, rows: int) -> Asked:
    """Keep in ``asked`` the session changes of one turn, and return the other changes, in their order.

    Each kind of request gets a part of ``rows`` in proportion to its waiting requests, and at least one request of each
    kind is served.
    """
    left = Asked()
    waiting = len(asked.connects) + len(asked.disconnects) + len(asked.lost)
    waiting += len(asked.subscribes) + len(asked.unsubscribes)
    asked.connects, left.connects = _first(asked.connects, rows, waiting, lambda _: 0)
    asked.disconnects, left.disconnects = _first(asked.disconnects, rows, waiting, lambda row: row[1].session.filters)
    asked.lost, left.lost = _first(asked.lost, rows, waiting, lambda session: session.filters)
    asked.subscribes, left.subscribes = _shared_out(asked.subscribes, rows, waiting)
    asked.unsubscribes, left.unsubscribes = _shared_out(asked.unsubscribes, rows, waiting)
    return left


def _first(requests: list[T], rows: int, waiting: int, filters: Callable[[T], int]) -> tuple[list[T], list[T]]:
    """Split requests into those of this turn and the others; ``filters`` returns the filters that a request ends."""
    room = rows * len(requests) // waiting if requests else 0
    for at, request in enumerate(requests):
        room -= SESSION + filters(request) // ENDED
        if room <= 0:
            return requests[: at + 1], requests[at + 1 :]
    return requests, []


def _shared_out(
    requests: list[tuple[Any, Any, list[T]]], rows: int, waiting: int
) -> tuple[list[tuple[Any, Any, list[T]]], list[tuple[Any, Any, list[T]]]]:
    """Split requests into the portions of this turn and the rest; the next request to be served comes first."""
    room = max(rows * len(requests) // waiting, 1) if requests else 0
    share = max(room // max(len(requests), 1), 1)
    portions, begun = [], []
    for client, session, filters in requests[:room]:
        portions.append((client, session, filters[:share]))
        if len(filters) > share:
            begun.append((client, session, filters[share:]))
    return portions, requests[room:] + begun


def put_first(asked: Asked, left: Asked) -> None:
    """Insert the requests that are left of a turn before newer requests."""
    for kind in ("connects", "subscribes", "unsubscribes", "disconnects", "lost"):
        rest: Sequence[Any] = getattr(left, kind)
        if rest:
            setattr(asked, kind, [*rest, *getattr(asked, kind)])
