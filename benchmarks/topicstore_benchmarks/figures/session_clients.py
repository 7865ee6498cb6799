"""Helpers for the figures of sessions and of serving: a database, messages, and clients that acknowledge."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import topicstore as ts
from topicstore.sessions import Connect, Publish, PubRel, Session, SubscribeOptions

from .figure import Figure

__all__ = ["acknowledge", "connect", "database", "deliver_all", "messages_of", "open_session", "session_figure"]

_TOGETHER = 1_000
"""The number of clients that one call connects."""

session_figure = partial(Figure, subject="sessions")
"""Creates a `Figure` whose subject is sessions."""


@contextmanager
def database(**options: Any) -> Iterator[ts.Database]:
    """Yield a new database, and close and remove it afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory,
        ts.open(Path(directory) / "db", **options) as db,
    ):
        yield db


def messages_of(topic: Callable[[int], str], numbers: range, qos: int = 1, *, retain: bool = False) -> list[ts.Message]:
    """Return messages of 100 bytes from ten publishers; ``topic`` returns the topic of each by its number."""
    return [ts.Message(topic(n), b"%0100d" % n, f"publisher-{n % 10}", qos, retain) for n in numbers]


def open_session(db: ts.Database, client_id: str, topic_filter: str, qos: int = 1) -> Session:
    """Connect a client whose session doesn't expire, and subscribe it to a filter."""
    session = db.sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, qos)
    return session


def connect(db: ts.Database, count: int, topic_filter: Callable[[int], str]) -> list[Session]:
    """Connect many clients with few calls; ``topic_filter`` returns the filter of each client by its number."""
    opened: list[Session] = []
    for first in range(0, count, _TOGETHER):
        numbers = range(first, min(first + _TOGETHER, count))
        some = db.sessions.open_many([Connect(client_id=f"client-{n}", expiry_interval=None) for n in numbers])
        # True for each of them: the condition only narrows the type.
        sessions = [one for one in some if isinstance(one, Session)]
        options = SubscribeOptions(qos=1)
        db.sessions.subscribe([(one, topic_filter(n), options) for one, n in zip(sessions, numbers, strict=True)])
        opened += sessions
    return opened


def deliver_all(db: ts.Database, expected: int) -> list[tuple[Session, Sequence[Publish | PubRel]]]:
    """Deliver until no packet is left. Raises `AssertionError` unless ``expected`` packets were delivered."""
    delivered: list[tuple[Session, Sequence[Publish | PubRel]]] = []
    while out := db.sessions.deliver():
        delivered += out
    if (found := sum(len(items) for _, items in delivered)) != expected:
        raise AssertionError(f"{found:,} of {expected:,} packets were delivered")
    return delivered


def acknowledge(session: Session, items: Sequence[Publish | PubRel]) -> int:
    """Process the client's PUBACKs of all items; return the number of messages acknowledged."""
    return session.puback(*[item.packet_id for item in items])
