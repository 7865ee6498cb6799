"""What publishing costs by the size of a batch, and what looking up retained messages costs."""

from __future__ import annotations

import statistics

from topicstore_benchmarks.timing import median_of, timed

from .session_clients import acknowledge, database, deliver_all, messages_of

__all__ = ["publish_times", "retained_lookups"]

SIZES = {1: 200, 10: 100, 100: 50, 1_000: 20}
"""How many messages are published with one call, and how often in a round."""
_PAGE = 1_000
"""Retained messages of a page."""


def publish_times(rounds: int) -> dict[int, float]:
    """Return the microseconds of publishing one message, by how many are published with one call.

    A connected client of QoS 1 wants all of them: they are stored. It gets them between the rounds.
    """
    with database() as db:
        client = db.sessions.open("client", expiry_interval=None)
        client.subscribe("bus/#", 1)
        found: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(rounds + 1):
            for size, calls in SIZES.items():
                batch = messages_of(lambda n: f"bus/{n % 100}", size)
                times = [timed(lambda: db.publish(batch)) for _ in range(calls)]  # noqa: B023 - called at once
                found[size].append(statistics.median(times) / size * 1e6)
                for session, items in deliver_all(db, size * calls):
                    acknowledge(session, items)
        return {size: statistics.median(values[1:]) for size, values in found.items()}


def retained_lookups(topics: int, rounds: int) -> tuple[float, float]:
    """Return the milliseconds for the first page of many retained messages below a level, and for those of ``+/7``."""
    with database() as db:
        for first in range(0, topics, 1_000):
            size = min(1_000, topics - first)
            db.publish(messages_of(lambda n, first=first: f"ret/{first + n}", size, retain=True))  # type: ignore[misc]
        if len(db.retained("+/7")) != 1:
            raise AssertionError("one retained message has this topic")
        page = median_of(lambda: db.retained("ret/#", limit=_PAGE), rounds)
        return page * 1e3, median_of(lambda: db.retained("+/7"), rounds) * 1e3
