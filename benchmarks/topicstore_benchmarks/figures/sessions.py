"""The section ``sessions``: what live subscriptions and durable sessions cost."""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import topicstore as ts
from topicstore.sessions import Session

from .figure import Figure, Section, Sheet

__all__ = ["measure_sessions"]

_BATCH = 1_000
_IDLE = 2_000
"""Sessions whose memory is measured."""
_SUBSCRIBERS = 1_000
_RATE = 1_000
"""Messages a second while latency is measured."""


@contextmanager
def _database() -> Iterator[ts.Database]:
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory, ts.open(Path(directory) / "db") as db:
        yield db


def _messages(topic: Callable[[int], str], count: int, qos: int) -> list[ts.Message]:
    return [ts.Message(topic(n), b"%0100d" % n, f"publisher-{n % 10}", qos) for n in range(count)]


def _fan_out(sessions: int, published: int) -> tuple[float, float]:
    """Return deliveries a second of one hot topic to all sessions together, and stored copies of each message."""
    with _database() as db:
        for number in range(sessions):
            db.sessions.open(f"client-{number}", expiry_interval=None).subscribe("hot/topic", qos=1)
        batch, spent, delivered = _messages(lambda _: "hot/topic", _BATCH, 1), 0.0, 0
        for _ in range(published // _BATCH):
            db.store(batch)
            started = time.perf_counter()
            while out := db.sessions.deliver(_BATCH):
                for session, items in out:
                    delivered += _acknowledge(session, items)
            spent += time.perf_counter() - started
        started = time.perf_counter()
        db.sessions.checkpoint()
        spent += time.perf_counter() - started
        if delivered != sessions * (published // _BATCH) * _BATCH:
            raise AssertionError(f"{delivered} were delivered")
        return delivered / spent, db.info().messages / (published // _BATCH * _BATCH)


def _drain(backlog: int, qos: int) -> float:
    """Return how many messages a second go through one session, each acknowledged as its QoS asks."""
    with _database() as db:
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe("bus/+", qos=qos)
        for first in range(0, backlog, _BATCH):
            db.store(_messages(lambda n, first=first: f"bus/{(first + n) % 500}", _BATCH, qos))  # type: ignore[misc]
        started, delivered = time.perf_counter(), 0
        while items := session.deliver(_BATCH):
            delivered += _acknowledge(session, items) if qos == 1 else _exchange(session, items)
        session.checkpoint()
        if delivered != backlog:
            raise AssertionError(f"{delivered} of {backlog} were delivered")
        return delivered / (time.perf_counter() - started)


def _acknowledge(session: Session, items: list[ts.sessions.Delivery | ts.sessions.Release]) -> int:
    for item in items:
        session.puback(item.packet_id)
    return len(items)


def _exchange(session: Session, items: list[ts.sessions.Delivery | ts.sessions.Release]) -> int:
    delivered = 0
    for item in items:
        if isinstance(item, ts.sessions.Release):
            session.pubcomp(item.packet_id)
        else:
            session.pubrec(item.packet_id)
            delivered += 1
    return delivered


def _paced(db: ts.Database, seconds: float) -> Callable[[], None]:
    """Return what stores `_RATE` messages a second, one at a time, each with the time of the call in it."""

    def publish() -> None:
        begun = time.perf_counter()
        for number in range(int(seconds * _RATE)):
            time.sleep(max(begun + number / _RATE - time.perf_counter(), 0))
            db.store([ts.Message("live/topic", repr(time.perf_counter()).encode(), "publisher", 1)])

    return publish


def _latency(seconds: float) -> list[float]:
    """Return seconds from the call of ``store`` to a subscriber that has the message."""
    found: list[float] = []
    with _database() as db, db.subscribe("live/#") as subscription:
        thread = threading.Thread(target=_paced(db, seconds))
        thread.start()
        while len(found) < int(seconds * _RATE):
            messages = subscription.fetch().messages
            now = time.perf_counter()
            found += [now - float(message.payload) for message in messages]
        thread.join()
    return found


def _session_latency(seconds: float) -> list[float]:
    """Return the same to a session's delivery, its packet id committed."""
    found: list[float] = []
    with _database() as db:
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe("live/#", qos=1)
        thread = threading.Thread(target=_paced(db, seconds))
        thread.start()
        while len(found) < int(seconds * _RATE):
            db.sessions.wait(1)
            items = [item for item in session.deliver() if isinstance(item, ts.sessions.Delivery)]
            now = time.perf_counter()
            found += [now - float(item.message.payload) for item in items]
            _acknowledge(session, list(items))
        thread.join()
    return found


def _opening(stored: int) -> float:
    """Return the seconds to open a database with many stored sessions, and ask what they want."""
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
    with _database() as db:
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
    """Return the time to store beside a thousand idle subscribers, times that beside none."""

    def store(db: ts.Database) -> float:
        batch = _messages(lambda n: f"bus/{n % 100}", _BATCH, 1)
        started = time.process_time()
        for _ in range(20):
            db.store(batch)
        return time.process_time() - started

    with _database() as alone, _database() as crowded:
        crowd = [crowded.subscribe(f"device/{number}/#") for number in range(_SUBSCRIBERS)]
        ratios = [store(crowded) / store(alone) for _ in range(6)][1:]
        for subscription in crowd:
            subscription.close()
    return statistics.median(ratios)


def measure_sessions(*, sessions: int, published: int, backlog: int, stored: int, seconds: float) -> Section:
    """Measure everything, each in a database of its own.

    sessions:  that follow the hot topic.
    published: to it.
    backlog:   messages that one session drains.
    stored:    sessions of the database whose opening is timed.
    seconds:   for which latency is measured.
    """
    fan_out, copies = _fan_out(sessions, published)
    latencies, session_latencies = _latency(seconds), _session_latency(seconds)
    many, trickle, exactly_once = f"{sessions} sessions, one topic", f"{_RATE:,} messages/s", backlog // 2
    figures = [
        _figure(many, "deliveries a second, each with packet id, commit and PUBACK", fan_out, least=200_000),
        _figure(many, "stored copies of a message", copies, most=1),
        _figure(
            f"backlog of {backlog:,}",
            "messages a second through a session of QoS 1",
            _drain(backlog, 1),
            least=100_000,
        ),
        _figure(
            f"backlog of {exactly_once:,}", "messages a second through a session of QoS 2", _drain(exactly_once, 2)
        ),
        _figure(trickle, "subscriber, median ms behind store", statistics.median(latencies) * 1e3, most=5),
        _figure(trickle, "subscriber, 99th percentile, ms", statistics.quantiles(latencies, n=100)[-1] * 1e3),
        _figure(trickle, "session, median ms behind store", statistics.median(session_latencies) * 1e3, most=5),
        _figure(f"{stored:,} stored sessions", "seconds to open and know their filters", _opening(stored), most=2),
        _figure(f"{_IDLE:,} idle sessions", "KB of memory each", _idle_bytes() / 1e3, most=10),
        _figure(f"{_SUBSCRIBERS:,} idle subscribers", "time to store, times that beside none", _idle_subscribers()),
    ]
    sheet = Sheet.listing(
        "Subscriptions and sessions",
        {"with": "data", "figure": "name"},
        figures,
        note="one core; in brackets what a figure should be",
    )
    return Section(name="sessions", figures=figures, sheets=[sheet])


def _figure(data: str, name: str, value: float, least: float | None = None, most: float | None = None) -> Figure:
    return Figure(data=data, subject="sessions", name=name, value=value, least=least, most=most)
