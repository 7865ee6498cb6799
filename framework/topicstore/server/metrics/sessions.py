"""Metrics of durable sessions and queues: numbers and total lag, without a time series for each session."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import topicstore as ts
from topicstore.queues.queue import QueueInfo
from topicstore.sessions import SessionCounts

from .families import counter, gauge
from .paced import Paced
from .session_lag import SessionLag

__all__ = ["SessionsCollector"]

_QUEUE = ("queue",)


class SessionsCollector(Collector):
    """Collects the metrics of one database's sessions and open queues."""

    def __init__(self, db: ts.Database, lag: SessionLag) -> None:
        self._lag = lag
        self.number: Paced[int] = Paced(lambda: len(db.sessions.clients()))
        """Number of sessions, connected or not."""
        self.counts: Paced[SessionCounts] = Paced(lambda: db.sessions.counts())
        """Counts of the connected sessions."""
        self._queues: Paced[list[QueueInfo]] = Paced(lambda: db.queues.opened())

    def renew(self) -> None:
        """Compute the expensive values that are due. Raises `DatabaseClosedError`."""
        for one in (self.number, self.counts, self._queues, self._lag):
            one.renew()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        number, counts = self.number.value(), self.counts.value()
        for name, text, value in (
            ("topicstore_sessions", "Sessions, connected or not.", number),
            ("topicstore_connected_sessions", "Sessions whose clients are connected.", counts.connected),
            ("topicstore_paused_sessions", "Connected sessions whose clients read too slowly.", counts.paused),
            ("topicstore_subscriptions", "Subscriptions of connected sessions.", counts.subscriptions),
            (
                "topicstore_in_flight_messages",
                "Messages that were sent, or are to be sent again, and not acknowledged.",
                counts.in_flight,
            ),
            (
                "topicstore_awaiting_pubrel_messages",
                "Messages of QoS 2 that came, and wait for their PUBREL.",
                counts.awaiting_pubrel,
            ),
        ):
            yield gauge(name, text, (), [((), value)])
        yield counter(
            "topicstore_dropped_qos0_messages",
            "Messages of QoS 0 that were dropped because their client read too slowly.",
            (),
            [((), counts.missed)],
        )
        yield from self._lags()
        yield from self._depths()
        yield gauge(
            "topicstore_session_counts_age_seconds",
            "How old the counts of sessions are, the oldest of them.",
            (),
            [((), max(self.number.age, self.counts.age))],
        )

    def _lags(self) -> Iterator[Metric]:
        totals, age = self._lag.totals()
        for name, text, value in (
            ("messages", "Stored messages that are still to be delivered to all sessions together.", totals.messages),
            ("max_messages", "The same, of the session that has most.", totals.most_messages),
            (
                "max_seconds",
                "How much older than the newest message the next one of the session furthest behind is.",
                totals.most_seconds,
            ),
            ("sessions", "Sessions that are behind.", totals.lagging),
            ("unknown_sessions", "Sessions of which it could not be found out.", totals.unknown),
            ("age_seconds", "How long ago the counting of the lag began that is told here.", age),
        ):
            yield gauge(f"topicstore_session_lag_{name}", text, (), [((), value)])

    def _depths(self) -> Iterator[Metric]:
        queues = self._queues.value()
        text = "Messages of an open queue that are not committed."
        yield gauge("topicstore_queue_messages", text, _QUEUE, (((one.name,), one.messages) for one in queues))
        yield gauge("topicstore_queue_bytes", "Their bytes.", _QUEUE, (((one.name,), one.bytes) for one in queues))
        text = "Messages that found no room in a queue, or were removed to make room, since it was made."
        yield counter("topicstore_queue_dropped_messages", text, _QUEUE, (((one.name,), one.dropped) for one in queues))
