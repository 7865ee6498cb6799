"""The section ``sessions``: the costs of live subscriptions and durable sessions."""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import topicstore as ts
from topicstore.sessions import Publish, PubRel, Session

from topicstore_benchmarks.timing import timed

from .figure import Figure, Section, Sheet
from .serving import serving_figures
from .session_clients import acknowledge, connect, database, messages_of, open_session, session_figure

__all__ = ["measure_sessions"]

_BATCH = 1_000
_RATE = 1_000
"""The messages a second while latency is measured."""
_IDLE = 2_000
"""The number of sessions whose memory is measured."""
_SUBSCRIBERS = 1_000


def measure_sessions(
    *, sessions: int, published: int, backlog: int, stored: int, seconds: float, clients: int, rounds: int
) -> Section:
    """Measure all figures, each in a database of its own.

    sessions:  the number of sessions that subscribe to the hot topic.
    published: the number of messages published to the hot topic.
    backlog:   the number of messages that one session drains.
    stored:    the number of sessions in the database whose opening is timed.
    seconds:   the duration of the latency measurements, in seconds.
    clients:   the number of clients in the figures of `serving`.
    rounds:    the number of rounds of the figures of `serving`.
    """
    figures = [
        *_fan_out(sessions, published),
        _drain(backlog, 1, least=100_000),
        _drain(backlog // 2, 2),
        *_latencies(seconds),
        _opening(stored),
        _idle_bytes(),
        _idle_subscribers(),
    ]
    serving = list(serving_figures(clients, rounds))
    note = "one core; in brackets what a figure should be"
    columns = {"with": "data", "figure": "name"}
    sheets = [
        Sheet.listing("Subscriptions and sessions", columns, figures, note=note),
        Sheet.listing("What a server does with sessions", {**columns, "unit": "unit"}, serving, note=note),
    ]
    return Section(name="sessions", figures=[*figures, *serving], sheets=sheets)


def _fan_out(sessions: int, published: int) -> Iterator[Figure]:
    """Measure the deliveries of one topic to all sessions together, and the number of stored copies of a message."""
    published -= published % _BATCH
    with database() as db:
        connect(db, sessions, lambda _: "hot/topic")
        batch, spent, delivered = messages_of(lambda _: "hot/topic", range(_BATCH)), 0.0, 0
        for _ in range(published // _BATCH):
            db.store(batch)
            started = time.perf_counter()
            while out := db.sessions.deliver(_BATCH):
                for session, items in out:
                    delivered += acknowledge(session, items)
            spent += time.perf_counter() - started
        spent += timed(db.sessions.checkpoint)
        if delivered != sessions * published:
            raise AssertionError(f"{delivered} were delivered")
        copies = db.info().messages / published
    data, name = f"{sessions} sessions, one topic", "deliveries a second, each with packet id, commit and PUBACK"
    yield session_figure(data=data, name=name, value=delivered / spent, least=1_500_000)
    yield session_figure(data=data, name="stored copies of a message", value=copies, most=1)


def _drain(backlog: int, qos: int, least: float | None = None) -> Figure:
    """Measure the rate at which one session drains a backlog, with the acknowledgements of its QoS."""
    with database() as db:
        session = open_session(db, "client", "bus/+", qos)
        for first in range(0, backlog, _BATCH):
            db.store(messages_of(lambda n: f"bus/{n % 500}", range(first, first + _BATCH), qos))
        started, delivered = time.perf_counter(), 0
        while items := session.deliver(_BATCH):
            delivered += acknowledge(session, items) if qos == 1 else _exchange(session, items)
        session.checkpoint()
        if delivered != backlog:
            raise AssertionError(f"{delivered} of {backlog} were delivered")
        rate = delivered / (time.perf_counter() - started)
    name = f"messages a second through a session of QoS {qos}"
    return session_figure(data=f"backlog of {backlog:,}", name=name, value=rate, least=least)


def _exchange(session: Session, items: Sequence[Publish | PubRel]) -> int:
    delivered = 0
    for item in items:
        if isinstance(item, PubRel):
            session.pubcomp(item.packet_id)
        else:
            session.pubrec(item.packet_id)
            delivered += 1
    return delivered


def _latencies(seconds: float) -> Iterator[Figure]:
    data = f"{_RATE:,} messages/s"
    with database() as db, db.subscribe("live/#") as subscription:
        found = _latency(db.store, lambda: subscription.fetch().messages, seconds)
    median, last = statistics.median(found), statistics.quantiles(found, n=100)[-1]
    yield session_figure(data=data, name="subscriber, median ms behind store", value=median, most=5)
    yield session_figure(data=data, name="subscriber, 99th percentile, ms", value=last)
    with database() as db:
        session, undelivered = open_session(db, "client", "live/#"), list[Publish | PubRel]()

        def receive() -> list[ts.Message]:
            acknowledge(session, undelivered)
            db.sessions.wait(1)
            undelivered[:] = session.deliver()
            return [item.message for item in undelivered if isinstance(item, Publish)]

        median = statistics.median(_latency(db.publish, receive, seconds))
    yield session_figure(data=data, name="session, median ms behind publish", value=median, most=0.15)


def _latency(
    publish: Callable[[list[ts.Message]], object], receive: Callable[[], Sequence[ts.Message]], seconds: float
) -> list[float]:
    """Return the milliseconds from each call of ``publish``, at a steady rate, until its message is received."""
    count, found = int(seconds * _RATE), list[float]()

    def run() -> None:
        begun = time.perf_counter()
        for number in range(count):
            time.sleep(max(begun + number / _RATE - time.perf_counter(), 0))
            publish([ts.Message("live/topic", repr(time.perf_counter()).encode(), "publisher", 1)])

    thread = threading.Thread(target=run)
    thread.start()
    while len(found) < count:
        messages = receive()
        now = time.perf_counter()
        found += [(now - float(message.payload)) * 1e3 for message in messages]
    thread.join()
    return found


def _opening(stored: int) -> Figure:
    """Measure the time to open a database with many stored sessions and to look up one of their filters."""
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        path = Path(directory) / "db"
        with ts.open(path) as db:
            for number in range(stored):
                open_session(db, f"client-{number}", f"device/{number}/#").disconnect()
        started = time.perf_counter()
        with ts.open(path) as db:
            if not db.sessions.wants("device/7/x"):
                raise AssertionError("a stored subscription is not known")
            taken = time.perf_counter() - started
    data = f"{stored:,} stored sessions"
    return session_figure(data=data, name="seconds to open and know their filters", value=taken, most=2)


def _idle_bytes() -> Figure:
    """Measure the memory of an idle session with a filter of its own."""
    with database() as db:
        open_session(db, "first", "device/first/#")
        gc.collect()
        tracemalloc.start()
        sessions = [open_session(db, f"client-{number}", f"device/{number}/#") for number in range(_IDLE)]
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] / len(sessions)
        tracemalloc.stop()
    return session_figure(data=f"{_IDLE:,} idle sessions", name="KB of memory each", value=used / 1e3, most=10)


def _idle_subscribers() -> Figure:
    """Measure the time to store with idle subscribers, as a multiple of the time without."""

    def store(db: ts.Database) -> float:
        batch = messages_of(lambda n: f"bus/{n % 100}", range(_BATCH))
        started = time.process_time()
        for _ in range(20):
            db.store(batch)
        return time.process_time() - started

    with database() as alone, database() as crowded:
        crowd = [crowded.subscribe(f"device/{number}/#") for number in range(_SUBSCRIBERS)]
        ratio = statistics.median([store(crowded) / store(alone) for _ in range(6)][1:])
        for subscription in crowd:
            subscription.close()
    data = f"{_SUBSCRIBERS:,} idle subscribers"
    return session_figure(data=data, name="time to store, times that beside none", value=ratio)
