"""The figures of a server that stands on sessions: many clients, small batches, an event loop that must not wait."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from .figure import Figure
from .publishing import publish_times, retained_lookups
from .session_clients import session_figure
from .sessions_many import backlog_of_many, connecting, fan_out_of_one, qos2_incoming, unicast
from .sessions_waiting import loop_waits

__all__ = ["serving_figures"]

_PUBLISH = {1: 60.0, 10: 7.0, 100: 1.0, 1_000: 0.4}
"""The most microseconds of publishing one message, by how many are published with one call."""


def serving_figures(clients: int, rounds: int) -> Iterator[Figure]:
    """Measure everything, each in databases of its own; yield medians of ``rounds``.

    ``clients`` have a topic each. From it follow the other numbers: half as many follow one topic, ten times as many
    connect, a hundred times as many topics have a retained message, and a quarter to four times as many wait for a
    message each.
    """
    yield from _traffic(clients, rounds)
    for size, each in publish_times(rounds).items():
        yield session_figure(f"publish of {size:,}", "time of a message", each, "µs", most=_PUBLISH[size])
    yield from _waits(clients // 2, rounds)
    topics = clients * 100
    page, one = retained_lookups(topics, rounds)
    yield session_figure(f"{topics:,} retained", "first page of `ret/#`", page, "ms", most=2)
    yield session_figure(f"{topics:,} retained", "`+/7`", one, "ms", most=5)
    yield from _backlogs(clients, rounds)


def _traffic(clients: int, rounds: int) -> Iterator[Figure]:
    followers, strangers = clients // 2, clients * 10
    name = "one message each: published, delivered, acknowledged"
    data = f"{clients:,} clients, a topic each"
    yield session_figure(data, name, statistics.median(unicast(clients, rounds)), "/s", least=80_000)
    last = statistics.median(fan_out_of_one(followers, rounds))
    yield session_figure(f"{followers:,} clients, one topic", "one message, until the last has it", last, "ms", most=6)
    received, released = map(statistics.median, qos2_incoming(clients, rounds))
    data = f"{clients:,} clients, a message of QoS 2 each"
    yield session_figure(data, "messages until PUBREC", received, "/s", least=150_000)
    yield session_figure(data, "PUBRELs", released, "/s")
    connected = statistics.median(connecting(strangers, rounds))
    yield session_figure(f"{strangers:,} new clients", "opened and subscribed", connected, "/s", least=10_000)


def _waits(followers: int, rounds: int) -> Iterator[Figure]:
    data = f"1,000 messages going to {followers:,} clients"
    waits = {name: statistics.median(values) for name, values in loop_waits(followers, rounds).items()}
    for name in ("alive", "puback", "connected"):
        yield session_figure(data, f"longest `{name}` beside it", waits[name], "ms", most=1)
    yield session_figure(data, "longest look at an attribute beside it", waits["ended"], "ms")


def _backlogs(clients: int, rounds: int) -> Iterator[Figure]:
    sizes = (clients // 4, clients, clients * 4)
    times = [statistics.median(backlog_of_many(size, rounds)) for size in sizes]
    for size, each in zip(sizes, times, strict=True):
        yield session_figure(f"{size:,} clients with a message each waiting", "time of a delivery", each, "µs")
    name = f"time of a delivery, times that of {sizes[0]:,}"
    yield session_figure(f"{sizes[-1]:,} clients with a message each waiting", name, times[-1] / times[0], most=1.5)
