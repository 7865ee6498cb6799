"""A turn of the store's thread: how much of what clients ask for is served together, and what waits for the next turns.

Changes of sessions are dear: each opens, closes or follows something. A turn takes a bounded number of them, so that
publishes, acknowledgements and deliveries, which go with every turn, never wait for longer than that. The bound is
shared out evenly: every request that waits has its part of a turn, and a SUBSCRIBE of many filters goes on in the
following turns, behind the requests that had no part in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .asked import Asked

__all__ = ["ENDED", "LAST_ROWS", "ROWS", "SESSION", "keep_turn", "put_first"]

ROWS = 100
"""Filters, or what takes as long, that change in one turn: about 10 ms."""
LAST_ROWS = 2_000
"""As many as change in one turn of a server that ends."""
SESSION = 4
"""Filters that take as long as the beginning or the end of a connection."""

ENDED = 8
"""Number of filters whose end with their connection takes as long as one change."""

T = TypeVar("T")


def keep_turn(asked: Asked, rows: int) -> Asked:
    """Leave in ``asked`` the changes of sessions that one turn serves, and return the others, in their order.

    Each kind of request gets rows in proportion to how many of it wait, and at least one request of each kind is
    served.
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
    """Return the requests of connections that a turn serves, and the others; ``filters``: how many a request ends."""
    room = rows * len(requests) // waiting if requests else 0
    for at, request in enumerate(requests):
        room -= SESSION + filters(request) // ENDED
        if room <= 0:
            return requests[: at + 1], requests[at + 1 :]
    return requests, []


def _shared_out(
    requests: list[tuple[Any, Any, list[T]]], rows: int, waiting: int
) -> tuple[list[tuple[Any, Any, list[T]]], list[tuple[Any, Any, list[T]]]]:
    """Return the portions of requests that a turn serves, and what is left of them, the next to be served first."""
    room = max(rows * len(requests) // waiting, 1) if requests else 0
    share = max(room // max(len(requests), 1), 1)
    portions, begun = [], []
    for client, session, filters in requests[:room]:
        portions.append((client, session, filters[:share]))
        if len(filters) > share:
            begun.append((client, session, filters[share:]))
    return portions, requests[room:] + begun


def put_first(asked: Asked, left: Asked) -> None:
    """Put what is left of a turn before what was asked for since."""
    for kind in ("connects", "subscribes", "unsubscribes", "disconnects", "lost"):
        rest: Sequence[Any] = getattr(left, kind)
        if rest:
            setattr(asked, kind, [*rest, *getattr(asked, kind)])
