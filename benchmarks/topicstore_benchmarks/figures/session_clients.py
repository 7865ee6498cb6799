"""What the figures of sessions have in common: a database, messages, and clients that acknowledge what they get."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import topicstore as ts
from topicstore.sessions import Publish, PubRel, Session

__all__ = ["acknowledge", "database", "deliver_all", "messages_of", "session_figure", "subscribers"]

from .figure import Figure


@contextmanager
def database(**options: Any) -> Iterator[ts.Database]:
    """Open a new database, and remove it afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory,
        ts.open(Path(directory) / "db", **options) as db,
    ):
        yield db


def messages_of(topic: Callable[[int], str], count: int, qos: int = 1, *, retain: bool = False) -> list[ts.Message]:
    """Return messages of 100 bytes from ten publishers; ``topic`` returns the topic of each by its number."""
    return [ts.Message(topic(n), b"%0100d" % n, f"publisher-{n % 10}", qos, retain) for n in range(count)]


def subscribers(db: ts.Database, count: int, topic_filter: Callable[[int], str], qos: int = 1) -> list[Session]:
    """Connect clients that subscribe to one filter each; ``topic_filter`` returns it by the client's number."""
    sessions = [db.sessions.open(f"client-{number}", expiry_interval=None) for number in range(count)]
    for number, session in enumerate(sessions):
        session.subscribe(topic_filter(number), qos)
    return sessions


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


def session_figure(
    data: str, name: str, value: float, unit: str = "", least: float | None = None, most: float | None = None
) -> Figure:
    """Return a figure of sessions."""
    return Figure(data=data, subject="sessions", name=name, value=value, unit=unit, least=least, most=most)
