"""What the figures of sessions and of serving have in common: a database, messages, and clients that acknowledge."""

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
"""How many clients connect with one call."""

session_figure = partial(Figure, subject="sessions")
"""Returns a figure of sessions."""


@contextmanager
def database(**options: Any) -> Iterator[ts.Database]:
    """Open a new database, and remove it afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory,
        ts.open(Path(directory) / "db", **options) as db,
    ):
        yield db


def messages_of(topic: Callable[[int], str], numbers: range, qos: int = 1, *, retain: bool = False) -> list[ts.Message]:
    """Return messages of 100 bytes from ten publishers; ``topic`` returns the topic of each by its number."""
    return [ts.Message(topic(n), b"%0100d" % n, f"publisher-{n % 10}", qos, retain) for n in numbers]


def open_session(db: ts.Database, client_id: str, topic_filter: str, qos: int = 1) -> Session:
    """Connect a client, whose session doesn't expire, and which subscribes to a filter."""
    session = db.sessions.open(client_id, expiry_interval=None)
    session.subscribe(topic_filter, qos)
    return session


def connect(db: ts.Database, count: int, topic_filter: Callable[[int], str]) -> list[Session]:
    """Connect clients, many with one call, which subscribe to a filter each; it is found by the client's number."""
    opened: list[Session] = []
    for first in range(0, count, _TOGETHER):
        numbers = range(first, min(first + _TOGETHER, count))
        some = db.sessions.open_many([Connect(client_id=f"client-{n}", expiry_interval=None) for n in numbers])
        sessions = [one for one in some if isinstance(one, Session)]  # all, as it raises what goes wrong
        options = SubscribeOptions(qos=1)
        db.sessions.subscribe([(one, topic_filter(n), options) for one, n in zip(sessions, numbers, strict=True)])
        opened += sessions
    return opened


def deliver_all(db: ts.Database, expected: int) -> list[tuple[Session, Sequence[Publish | PubRel]]]:
    """Deliver until nothing waits. Raises `AssertionError` unless ``expected`` packets were handed out."""
    delivered: list[tuple[Session, Sequence[Publish | PubRel]]] = []
    while out := db.sessions.deliver():
        delivered += out
    if (found := sum(len(items) for _, items in delivered)) != expected:
        raise AssertionError(f"{found:,} of {expected:,} packets were delivered")
    return delivered


def acknowledge(session: Session, items: Sequence[Publish | PubRel]) -> int:
    """Send the PUBACKs of all items; return how many there were."""
    return session.puback(*[item.packet_id for item in items])
