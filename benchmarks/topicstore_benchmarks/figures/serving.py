"""Figures of sessions as a server uses them: many clients, small batches, an event loop that must not block.

Sessions are connected and messages are made before the clock starts. Each figure is the median over the rounds.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import topicstore as ts

from topicstore_benchmarks.timing import median_of, timed

from .figure import Figure
from .session_clients import acknowledge, connect, database, deliver_all, messages_of, open_session, session_figure

__all__ = ["serving_figures"]

SIZES = {1: 200, 10: 100, 100: 50, 1_000: 20}
"""The numbers of calls in a round, by the number of messages that a call publishes."""
_MOST_MICROSECONDS = {1: 60.0, 10: 7.0, 100: 1.0, 1_000: 0.4}
"""The upper bounds of the microseconds to publish a message, by the number of messages that a call publishes."""
_PAGE = 1_000
"""The number of retained messages on a page."""
_BATCH = 1_000
_SWITCH = 1e-4
"""The interpreter's thread switch interval, in seconds, while an event loop's waits are measured."""


def serving_figures(clients: int, rounds: int) -> Iterator[Figure]:
    """Measure all figures, each in a database of its own; yield medians over ``rounds``.

    ``clients`` is the number of clients that subscribe to a topic each. Half as many subscribe to one topic, and ten
    times as many connect. A hundred times as many topics have a retained message. Deliveries are measured for
    ``clients``, a quarter and four times as many clients, with an undelivered message for each.
    """
    yield _unicast(clients, rounds)
    yield _fan_out_of_one(clients // 2, rounds)
    yield from _qos2_incoming(clients, rounds)
    yield _connecting(clients * 10, rounds)
    yield from _publishing(rounds)
    yield from _loop_waits(clients // 2, rounds)
    yield from _retained_lookups(clients * 100, rounds)
    yield from _backlogs((clients // 4, clients, clients * 4), rounds)


def _command(number: int) -> str:
    return f"device/{number}/commands"


def _unicast(clients: int, rounds: int) -> Figure:
    with database() as db:
        connect(db, clients, _command)
        batch = messages_of(_command, range(clients))

        def serve() -> None:
            db.publish(batch)
            for session, items in deliver_all(db, clients):
                acknowledge(session, items)

        rate = clients / median_of(serve, rounds)
    name = "one message each: published, delivered, acknowledged"
    return session_figure(data=f"{clients:,} clients, a topic each", name=name, value=rate, unit="/s", least=80_000)


def _fan_out_of_one(followers: int, rounds: int) -> Figure:
    with database() as db:
        connect(db, followers, lambda _: "hot/topic")
        one, found = messages_of(lambda _: "hot/topic", range(1)), []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            db.publish(one)
            delivered = deliver_all(db, followers)
            found.append((time.perf_counter() - started) * 1e3)
            for session, items in delivered:
                acknowledge(session, items)
    data, last = f"{followers:,} clients, one topic", statistics.median(found[1:])
    return session_figure(data=data, name="one message, until the last has it", value=last, unit="ms", most=6)


def _qos2_incoming(clients: int, rounds: int) -> Iterator[Figure]:
    """Measure the rate of QoS 2 messages, one from each client, until PUBREC, and the rate of PUBRELs."""
    received, released = [], []
    with database() as db:
        open_session(db, "archive", "sensor/#")
        publishers = [db.sessions.open(f"client-{n}", expiry_interval=None) for n in range(clients)]
        batch = [ts.Message(f"sensor/{n}", b"%0100d" % n, f"client-{n}", 2) for n in range(clients)]
        for packet_id in range(1, rounds + 2):
            packets = [(session, message, packet_id) for session, message in zip(publishers, batch, strict=True)]
            pubrels = [(session, packet_id) for session in publishers]
            received.append(clients / timed(lambda: db.sessions.publish(packets)))  # noqa: B023 - called at once
            released.append(clients / timed(lambda: db.sessions.pubrel(pubrels)))  # noqa: B023
    data, received_rate = f"{clients:,} clients, a message of QoS 2 each", statistics.median(received[1:])
    yield session_figure(data=data, name="messages until PUBREC", value=received_rate, unit="/s", least=150_000)
    yield session_figure(data=data, name="PUBRELs", value=statistics.median(released[1:]), unit="/s")


def _connecting(clients: int, rounds: int) -> Figure:
    found = []
    for _ in range(rounds):
        with database() as db:
            found.append(clients / timed(lambda: connect(db, clients, lambda n: f"device/{n}/#")))
    data, rate = f"{clients:,} new clients", statistics.median(found)
    return session_figure(data=data, name="opened and subscribed", value=rate, unit="/s", least=10_000)


def _publishing(rounds: int) -> Iterator[Figure]:
    """Measure the time to publish a message, by the number of messages that a call publishes.

    A connected client subscribes to all of them with QoS 1, so they are stored. They are delivered after the calls.
    """
    found: dict[int, list[float]] = {size: [] for size in SIZES}
    with database() as db:
        open_session(db, "client", "bus/#")
        for _ in range(rounds + 1):
            for size, calls in SIZES.items():
                batch = messages_of(lambda n: f"bus/{n % 100}", range(size))
                times = [timed(lambda: db.publish(batch)) for _ in range(calls)]  # noqa: B023 - called at once
                found[size].append(statistics.median(times) / size * 1e6)
                for session, items in deliver_all(db, size * calls):
                    acknowledge(session, items)
    for size, values in found.items():
        each, most = statistics.median(values[1:]), _MOST_MICROSECONDS[size]
        yield session_figure(data=f"publish of {size:,}", name="time of a message", value=each, unit="µs", most=most)


def _retained_lookups(topics: int, rounds: int) -> Iterator[Figure]:
    """Measure the lookup of the first page of many retained messages below a level, and of those matching ``+/7``."""
    with database() as db:
        for first in range(0, topics, _BATCH):
            numbers = range(first, min(first + _BATCH, topics))
            db.publish(messages_of(lambda n: f"ret/{n}", numbers, retain=True))
        if len(db.retained("+/7")) != 1:
            raise AssertionError("one retained message has this topic")
        page = median_of(lambda: db.retained("ret/#", limit=_PAGE), rounds) * 1e3
        one = median_of(lambda: db.retained("+/7"), rounds) * 1e3
    data = f"{topics:,} retained"
    yield session_figure(data=data, name="first page of `ret/#`", value=page, unit="ms", most=2)
    yield session_figure(data=data, name="`+/7`", value=one, unit="ms", most=5)


def _backlogs(sizes: tuple[int, ...], rounds: int) -> Iterator[Figure]:
    times = [_backlog(size, rounds) for size in sizes]
    data = [f"{size:,} clients with a message each waiting" for size in sizes]
    for waiting, each in zip(data, times, strict=True):
        yield session_figure(data=waiting, name="time of a delivery", value=each, unit="µs")
    name = f"time of a delivery, times that of {sizes[0]:,}"
    yield session_figure(data=data[-1], name=name, value=times[-1] / times[0], most=1.5)


def _backlog(clients: int, rounds: int) -> float:
    """Return the microseconds of a delivery when each client has one undelivered message, published by its own call."""
    found = []
    for _ in range(rounds):
        with database() as db:
            connect(db, clients, _command)
            for message in messages_of(_command, range(clients)):
                db.publish([message])
            found.append(timed(lambda: deliver_all(db, clients)) / clients * 1e6)
    return statistics.median(found)


# --- an event loop while another thread delivers ---


def _loop_waits(followers: int, rounds: int) -> Iterator[Figure]:
    """Measure the longest duration of calls by an event loop while another thread delivers a batch to many clients.

    ``ended`` only reads an attribute, so its duration is the noise of the machine. To reduce noise from Python, garbage
    collection is off, and the thread switch interval is 0.1 ms instead of 5 ms.
    """
    found: dict[str, list[float]] = {}
    with database() as db, _undisturbed():
        connect(db, followers, lambda _: "hot/topic")
        client = open_session(db, "looked-at", "looked-at")
        for _ in range(rounds + 1):
            db.publish(messages_of(lambda _: "looked-at", range(_BATCH)))
            unacknowledged = iter([item.packet_id for _, items in deliver_all(db, _BATCH) for item in items])
            db.publish(messages_of(lambda _: "hot/topic", range(_BATCH)))
            calls: dict[str, Callable[[], object]] = {
                "longest `alive` beside it": client.alive,
                "longest `puback` beside it": lambda ids=unacknowledged: client.puback(next(ids, 1)),  # type: ignore[misc]
                "longest `connected` beside it": lambda: db.sessions.connected("looked-at"),
                "longest look at an attribute beside it": lambda: client.ended,
            }
            gc.collect()
            for name, longest in _longest_beside(db, followers * _BATCH, calls).items():
                found.setdefault(name, []).append(longest * 1e3)
            client.puback(*unacknowledged)
    for name, values in found.items():
        data, most = f"1,000 messages going to {followers:,} clients", 1 if "`" in name else None
        yield session_figure(data=data, name=name, value=statistics.median(values[1:]), unit="ms", most=most)


def _longest_beside(db: ts.Database, deliveries: int, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the longest duration of each call, in seconds, while another thread makes all deliveries."""
    delivered: list[object] = []

    def deliver() -> None:
        for session, items in deliver_all(db, deliveries):
            acknowledge(session, items)
        delivered.append(True)

    longest = dict.fromkeys(calls, 0.0)
    thread = threading.Thread(target=deliver)
    thread.start()
    delivering = True
    while delivering:
        # Checked before the calls, so that each is timed at least once, even if the thread has already ended.
        delivering = thread.is_alive()
        for name, call in calls.items():
            time.sleep(_SWITCH)
            longest[name] = max(longest[name], timed(call))
    thread.join()
    if not delivered:
        raise AssertionError("the thread that delivers failed")
    return longest


@contextmanager
def _undisturbed() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(before)
