"""Fixtures shared by all tests of transforms: databases with the plugins, and a probe, called after the plugins."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import topicstore as ts
from topicstore import Message
from topicstore.contract.requests import ReadRequest, ReadResult, StoreRequest, StoreResult
from topicstore.plugins import registry

from topicstore_conformance.database import fixtures
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Fixtures", "Probe", "cursor_over", "fields", "messages", "opened", "payloads_of"]

_PROBE = "topicstore-conformance-probe"
PROPERTIES = ts.Properties(content_type="text", message_expiry_interval=9, user_properties=(("k", "1"), ("k", "2")))


def messages(count: int = 12, first: int = 0) -> list[Message]:
    """Return messages that differ in every field, with their number in the payload."""
    return [
        Message(
            f"t/{number % 3}/{'xyz'[number % 2]}",
            b"payload %d" % number,
            f"c{number % 5}",
            number % 3,
            number % 4 == 3,
            START + number,
            PROPERTIES if number % 3 else None,
        )
        for number in range(first, first + count)
    ]


def fields(batch: ts.MessageBatch) -> list[tuple[Any, ...]]:
    """Return, for each row, the fields that a transform must keep: all except payload and properties."""
    return [(m.topic, m.client_id, m.qos, m.retain, m.timestamp) for m in batch.to_messages()]


def payloads_of(batch: ts.MessageBatch) -> list[bytes]:
    """Return the payload of each row."""
    return [message.payload for message in batch.to_messages()]


def cursor_over(db: ts.Database, topic: str, client_id: str) -> ts.Cursor:
    """Return a cursor over the stream with this publisher's messages of a topic; the database must hold no others."""
    list(db.replay("#"))  # ends the epoch, if the layout has epochs
    shard = db.shard_of(client_id)
    cursors = [db.cursor(stream, topic) for stream in db.streams(topic) if stream.shard == shard]
    return next(cursor for cursor in cursors if len(db.read(cursor, 1).batch))


def opened(pair: Pair, path: Path, **arguments: Any) -> ts.Database:
    """Open a database with the pair's plugins, and a clock that never advances."""
    clock = Clock()
    return pair.open(path, **{"clock": clock, "monotonic": clock.monotonic, "auto_compact": False, **arguments})


@attrs.define
class Probe:
    """A plugin that is called within all others: it records the requests they pass on, and the results they get."""

    stored: list[StoreRequest] = attrs.field(factory=list)
    """Copies of the requests to store."""
    reads: list[ReadRequest] = attrs.field(factory=list)
    """Copies of the requests to read."""
    results: list[ReadResult] = attrs.field(factory=list)
    """The results of reads."""

    @ts.hookimpl(wrapper=True)
    def topicstore_store(self, request: StoreRequest) -> Generator[None, StoreResult, StoreResult]:
        """Record a store."""
        self.stored.append(attrs.evolve(request))
        return (yield)

    @ts.hookimpl(wrapper=True)
    def topicstore_read(self, request: ReadRequest) -> Generator[None, ReadResult, ReadResult]:
        """Record a read and its result."""
        self.reads.append(attrs.evolve(request))
        result = yield
        self.results.append(result)
        return result


class Fixtures(fixtures.Fixtures):
    """Fixtures of all tests of transforms; a subclass overrides ``pair``."""

    @pytest.fixture
    def db(self, pair: Pair, directory: Path) -> Iterator[ts.Database]:
        """Yield an empty database of two shards with the plugins."""
        with opened(pair, directory / "db", shards=2) as db:
            yield db

    @pytest.fixture
    def probe(self, monkeypatch: pytest.MonkeyPatch) -> Probe:
        """Return the probe of the database `probed`."""
        probe = Probe()
        monkeypatch.setitem(registry().plugins, _PROBE, probe)
        return probe

    @pytest.fixture
    def probed(self, pair: Pair, directory: Path, probe: Probe) -> Iterator[ts.Database]:
        """Yield an empty database of two shards with the plugins and the probe, which is called last."""
        with opened(pair, directory / "probed", shards=2, plugins=(*pair.plugins, _PROBE)) as db:
            yield db
