"""Fixtures shared by all tests of the parts of a database, and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.sessions import Publish, Session

from topicstore_conformance.conditions.tries import MODE
from topicstore_conformance.database import fixtures
from topicstore_conformance.faults.striking import Fault
from topicstore_conformance.parts.machines import World
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["DAY", "SECOND", "Fixtures", "deaths", "delivered", "drop_first", "numbered", "payloads"]

SECOND = 1_000_000
DAY = 86_400 * SECOND
MOMENTS = [("before", 1), *(("after", write) for write in (1, 2, 3))]
if MODE != "quick":  # redundant: engines have the same contents after a write as before the next one
    MOMENTS += [("before", 2), ("before", 3)]
deaths = pytest.mark.parametrize("death", MOMENTS, ids=lambda moment: f"{moment[0]} write {moment[1]}", indirect=True)
"""Run a test for kills before the first write of a call, and after each of the first writes."""


def numbered(numbers: Iterable[int], topic: str = "t", qos: int = 1, client_id: str = "") -> list[Message]:
    """Return messages with these numbers as payloads, from ``client_id`` or else from three publishers."""
    return [Message(f"{topic}/{n % 4}", b"%d" % n, client_id or f"p{n % 3}", qos) for n in numbers]


def payloads(messages: Iterable[Message]) -> list[int]:
    """Return the numbers of messages."""
    return [int(message.payload) for message in messages]


def delivered(session: Session, *, acknowledge: bool = False) -> list[int]:
    """Return the numbers of the messages that a session delivers until nothing is left."""
    found: list[int] = []
    while items := [item for item in session.deliver() if isinstance(item, Publish)]:
        found += payloads(item.message for item in items)
        if acknowledge:
            session.puback(*(item.packet_id for item in items if item.qos == 1))
    return found


def drop_first(db: ts.Database) -> None:
    """Begin a generation, and drop all earlier ones."""
    newest = db.add_generation()
    for info in db.generations():
        if info.number < newest:
            db.drop_generation(info.number)


class Fixtures(fixtures.Fixtures):
    """Fixtures of all tests of parts; a subclass overrides ``pair``."""

    @pytest.fixture
    def world(self, pair: Pair) -> Iterator[World]:
        """Yield an empty database of two shards, with a clock, that can be opened again and killed."""
        world = World(pair, 2)
        try:
            yield world
        finally:
            world.close()

    @pytest.fixture
    def death(self, request: pytest.FixtureRequest) -> Fault:
        """Return the fault of this run: a kill before or after a numbered write."""
        kind, write = request.param
        return Fault(kind, write)
