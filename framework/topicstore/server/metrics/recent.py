"""The data of the web page's charts: current totals, and a sample for each second of the last five minutes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError
from topicstore.runtime.background import BackgroundTask
from topicstore.server.codec.packets import PUBLISH
from topicstore.server.mqtt.sys_topics import Traffic

from .collectors import HasTraffic, SessionsCollector, StoreCollector
from .paced import SessionLag

__all__ = ["EVERY", "Figures", "Recent", "Series", "Totals"]

EVERY = 1.0
"""Seconds between two samples."""
_KEPT = 300


@attrs.frozen(kw_only=True)
class Totals:
    """A snapshot of a server. Counts are since the database was opened, or the server started."""

    at: int
    """The time, in microseconds since the epoch."""
    stored_messages: int
    stored_bytes: int
    """Bytes of the stored messages' payloads."""
    read_messages: int
    publishes_received: int
    """Messages received from MQTT clients."""
    publishes_sent: int
    """Messages sent to MQTT clients."""
    bytes_received: int
    bytes_sent: int
    clients: int
    """Connected MQTT clients."""
    sessions: int
    """Durable sessions, connected or not."""
    in_flight: int
    dropped_qos0: int
    lag_messages: int
    """Stored messages that are still to be delivered, in total of all sessions."""
    lag_seconds: float
    """The largest lag of a session: seconds by which its next message is older than the newest message."""
    lag_age: float
    """The age of the lag values, in seconds."""
    disk_bytes: int
    disk_free: int | None
    """Free bytes of the disk; None for a database in memory, or if the disk is missing."""


@attrs.frozen(kw_only=True)
class Series:
    """Samples as columns, the oldest first. Rates are per second, since the previous sample."""

    at: list[int]
    """Times of the samples, in microseconds since the epoch."""
    stored_messages: list[float]
    stored_bytes: list[float]
    read_messages: list[float]
    publishes_received: list[float]
    publishes_sent: list[float]
    bytes_received: list[float]
    bytes_sent: list[float]
    clients: list[int]
    """Connected clients. This column and the following ones are values, not rates."""
    lag_messages: list[int]
    lag_seconds: list[float]
    disk_bytes: list[int]


@attrs.frozen(kw_only=True)
class Figures:
    """The response of `GET /figures`."""

    every: float
    """Seconds between two samples."""
    totals: Totals
    series: Series


class Recent:
    """Takes a sample each second, and keeps the samples of five minutes. Thread-safe."""

    def __init__(
        self,
        db: ts.Database,
        server: HasTraffic,
        *,
        store: StoreCollector,
        sessions: SessionsCollector,
        lag: SessionLag,
        renew: Callable[[], object],
    ) -> None:
        """``renew`` is called before each sample, to compute expensive values that are due."""
        self._db, self._server = db, server
        self._store, self._sessions, self._lag, self._renew = store, sessions, lag, renew
        self._samples: deque[Totals] = deque(maxlen=_KEPT + 1)
        self._lock = threading.Lock()
        """Guards the samples."""
        self._task: BackgroundTask | None = None
        """The task that takes samples; None while stopped."""

    def start(self) -> None:
        """Begin to take samples, also again after `stop`. No effect if already started."""
        if self._task is not None:
            return

        def work(_woken: bool) -> None:
            try:
                self.sample()
            except DatabaseClosedError:  # the database was closed before the server ended
                task.stop()

        self._task = task = BackgroundTask("figures", work)
        task.interval = EVERY
        task.wake()

    def stop(self) -> None:
        """Stop taking samples, and wait for a sample in progress."""
        task, self._task = self._task, None
        if task is not None:
            task.stop()
            task.join()

    def sample(self) -> None:
        """Take a sample now. Raises `DatabaseClosedError`."""
        self._db.storage.check_open()
        self._renew()
        totals = self.totals()
        with self._lock:
            self._samples.append(totals)

    def totals(self) -> Totals:
        """Return the current totals. Raises `DatabaseClosedError`."""
        self._db.storage.check_open()
        counters = [shard.writer.counters for shard in self._db.storage.shards]
        traffic: Traffic = self._server.traffic
        lag, age = self._lag.totals()
        counts = self._sessions.counts.value()
        return Totals(
            at=self._db.storage.clock(),
            stored_messages=sum(one.messages for one in counters),
            stored_bytes=sum(one.payload_bytes for one in counters),
            read_messages=sum(one.read_messages for one in counters),
            publishes_received=traffic.received.good[PUBLISH],
            publishes_sent=traffic.sent.good[PUBLISH],
            bytes_received=traffic.bytes_received,
            bytes_sent=traffic.bytes_sent,
            clients=traffic.connected,
            sessions=self._sessions.number.value(),
            in_flight=counts.in_flight,
            dropped_qos0=counts.missed,
            lag_messages=lag.messages,
            lag_seconds=lag.most_seconds,
            lag_age=age,
            disk_bytes=sum(engine.disk_bytes for engine in self._store.engines.value()),
            disk_free=self._store.disk_free(),
        )

    def figures(self) -> Figures:
        """Return the current totals, and the series of samples. Raises `DatabaseClosedError`.

        Because a person looks at them, the lag is computed more often for the next ten seconds.
        """
        self._lag.watch()
        totals = self.totals()
        with self._lock:
            samples = list(self._samples)
        return Figures(every=EVERY, totals=totals, series=_series(samples))


def _series(samples: Sequence[Totals]) -> Series:
    pairs = list(pairwise(samples))

    def rates(name: str) -> list[float]:
        return [_rate(name, before, after) for before, after in pairs]

    return Series(
        at=[after.at for _, after in pairs],
        stored_messages=rates("stored_messages"),
        stored_bytes=rates("stored_bytes"),
        read_messages=rates("read_messages"),
        publishes_received=rates("publishes_received"),
        publishes_sent=rates("publishes_sent"),
        bytes_received=rates("bytes_received"),
        bytes_sent=rates("bytes_sent"),
        clients=[after.clients for _, after in pairs],
        lag_messages=[after.lag_messages for _, after in pairs],
        lag_seconds=[after.lag_seconds for _, after in pairs],
        disk_bytes=[after.disk_bytes for _, after in pairs],
    )


def _rate(name: str, before: Totals, after: Totals) -> float:
    """Return the growth of a total per second; 0 if the clock was set back."""
    passed = after.at - before.at
    return max(0.0, (getattr(after, name) - getattr(before, name)) / passed * 1e6) if passed > 0 else 0.0
