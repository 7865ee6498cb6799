"""The section ``sessions``: the costs of live subscriptions and durable sessions."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import topicstore as ts
from topicstore.sessions import Publish, PubRel, Session

from .figure import Section, Sheet
from .serving import serving_figures
from .session_clients import acknowledge, database, messages_of, session_figure, subscribers
from .sessions_waiting import RATE, session_latency, subscriber_latency

__all__ = ["measure_sessions"]

_BATCH = 1_000
_IDLE = 2_000
"""Sessions whose memory is measured."""
_SUBSCRIBERS = 1_000


def _fan_out(sessions: int, published: int) -> tuple[float, float]:
    """Return deliveries a second of one hot topic to all sessions together, and stored copies of each message."""
    with database() as db:
        subscribers(db, sessions, lambda _: "hot/topic")
        batch, spent, delivered = messages_of(lambda _: "hot/topic", _BATCH), 0.0, 0
        for _ in range(published // _BATCH):
            db.store(batch)
            started = time.perf_counter()
            while out := db.sessions.deliver(_BATCH):
                for session, items in out:
                    delivered += acknowledge(session, items)
            spent += time.perf_counter() - started
        started = time.perf_counter()
        db.sessions.checkpoint()
        spent += time.perf_counter() - started
        if delivered != sessions * (published // _BATCH) * _BATCH:
            raise AssertionError(f"{delivered} were delivered")
        return delivered / spent, db.info().messages / (published // _BATCH * _BATCH)


def _drain(backlog: int, qos: int) -> float:
    """Return how many messages a second go through one session, each acknowledged as its QoS asks."""
    with database() as db:
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe("bus/+", qos=qos)
        for first in range(0, backlog, _BATCH):
            db.store(messages_of(lambda n, first=first: f"bus/{(first + n) % 500}", _BATCH, qos))  # type: ignore[misc]
        started, delivered = time.perf_counter(), 0
        while items := session.deliver(_BATCH):
            delivered += acknowledge(session, items) if qos == 1 else _exchange(session, items)
        session.checkpoint()
        if delivered != backlog:
            raise AssertionError(f"{delivered} of {backlog} were delivered")
        return delivered / (time.perf_counter() - started)


def _exchange(session: Session, items: Sequence[Publish | PubRel]) -> int:
    delivered = 0
    for item in items:
        if isinstance(item, PubRel):
            session.pubcomp(item.packet_id)
        else:
            session.pubrec(item.packet_id)
            delivered += 1
    return delivered


def _opening(stored: int) -> float:
    """Return the seconds to open a database with many stored sessions, and look up their filters."""
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        path = Path(directory) / "db"
        with ts.open(path) as db:
            for number in range(stored):
                session = db.sessions.open(f"client-{number}", expiry_interval=None)
                session.subscribe(f"device/{number}/#", qos=1)
                session.disconnect()
        started = time.perf_counter()
        with ts.open(path) as db:
            if not db.sessions.wants("device/7/x"):
                raise AssertionError("a stored subscription is not known")
            return time.perf_counter() - started


def _idle_bytes() -> float:
    """Return the memory of one idle session with a filter of its own."""
    with database() as db:
        sessions = []
        db.sessions.open("first", expiry_interval=None).subscribe("device/first/#", qos=1)
        gc.collect()
        tracemalloc.start()
        for number in range(_IDLE):
            session = db.sessions.open(f"client-{number}", expiry_interval=None)
            session.subscribe(f"device/{number}/#", qos=1)
            sessions.append(session)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return used / _IDLE


def _idle_subscribers() -> float:
    """Return the time to store with a thousand idle subscribers, as a multiple of the time without any."""

    def store(db: ts.Database) -> float:
        batch = messages_of(lambda n: f"bus/{n % 100}", _BATCH)
        started = time.process_time()
        for _ in range(20):
            db.store(batch)
        return time.process_time() - started

    with database() as alone, database() as crowded:
        crowd = [crowded.subscribe(f"device/{number}/#") for number in range(_SUBSCRIBERS)]
        ratios = [store(crowded) / store(alone) for _ in range(6)][1:]
        for subscription in crowd:
            subscription.close()
    return statistics.median(ratios)


def measure_sessions(
    *, sessions: int, published: int, backlog: int, stored: int, seconds: float, clients: int, rounds: int
) -> Section:
    """Measure everything, each in a database of its own.

    sessions:  sessions that follow the hot topic.
    published: messages published to it.
    backlog:   messages that one session drains.
    stored:    sessions of the database whose opening is timed.
    seconds:   seconds for which latency is measured.
    clients:   clients of the server whose figures are in `serving`.
    rounds:    how often those are measured.
    """
    fan_out, copies = _fan_out(sessions, published)
    latencies, session_latencies = subscriber_latency(seconds), session_latency(seconds)
    many, trickle, exactly_once = f"{sessions} sessions, one topic", f"{RATE:,} messages/s", backlog // 2
    figures = [
        session_figure(many, "deliveries a second, each with packet id, commit and PUBACK", fan_out, least=1_500_000),
        session_figure(many, "stored copies of a message", copies, most=1),
        session_figure(
            f"backlog of {backlog:,}",
            "messages a second through a session of QoS 1",
            _drain(backlog, 1),
            least=100_000,
        ),
        session_figure(
            f"backlog of {exactly_once:,}", "messages a second through a session of QoS 2", _drain(exactly_once, 2)
        ),
        session_figure(trickle, "subscriber, median ms behind store", statistics.median(latencies) * 1e3, most=5),
        session_figure(trickle, "subscriber, 99th percentile, ms", statistics.quantiles(latencies, n=100)[-1] * 1e3),
        session_figure(
            trickle, "session, median ms behind publish", statistics.median(session_latencies) * 1e3, most=0.15
        ),
        session_figure(
            f"{stored:,} stored sessions", "seconds to open and know their filters", _opening(stored), most=2
        ),
        session_figure(f"{_IDLE:,} idle sessions", "KB of memory each", _idle_bytes() / 1e3, most=10),
        session_figure(
            f"{_SUBSCRIBERS:,} idle subscribers", "time to store, times that beside none", _idle_subscribers()
        ),
    ]
    serving = list(serving_figures(clients, rounds))
    note = "one core; in brackets what a figure should be"
    sheets = [
        Sheet.listing("Subscriptions and sessions", {"with": "data", "figure": "name"}, figures, note=note),
        Sheet.listing(
            "What a server does with sessions", {"with": "data", "figure": "name", "unit": "unit"}, serving, note=note
        ),
    ]
    return Section(name="sessions", figures=[*figures, *serving], sheets=sheets)
