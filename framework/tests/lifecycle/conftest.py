"""Limits so small that small exports have several files and row groups, and databases to export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.lifecycle import exporting
from topicstore_conformance.faults.clock import START, Clock


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit row groups to about twenty messages, files to a few row groups, and lists of topics to five."""
    monkeypatch.setattr(exporting, "_MOST_TOPICS", 5)
    monkeypatch.setattr(exporting, "_BATCH", 7)
    monkeypatch.setattr(exporting, "_GROUP_ROWS", 20)
    monkeypatch.setattr(exporting, "_PART_BYTES", 1_500)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fill(clock: Clock) -> Callable[..., None]:
    """Return a function that stores messages of several topics and publishers, each with a new payload."""
    count = 0

    def fill(db: ts.Database, messages: int = 100) -> None:
        nonlocal count
        for number in range(count, count + messages):
            clock.now += 1_000
            system = number % 10 == 0
            topic = "$SYS/load" if system else f"fleet/bus-{number % 4}/{'speed' if number % 3 else 'door'}"
            properties = ts.Properties(content_type="text", user_properties=(("k", "1"), ("k", "2")))
            db.store(
                [
                    ts.Message(
                        topic,
                        b"%d" % number,
                        f"c{number % 5}",
                        number % 3,
                        system,
                        properties=properties if system else None,
                    )
                ]
            )
        count += messages

    return fill


@pytest.fixture(params=["memory", "rocksdb"])
def db(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, fill: Callable[..., None]
) -> Iterator[ts.Database]:
    """A database of two shards with two sealed generations of a hundred messages, and ten in the current one."""
    with ts.open(tmp_path / "db", backend=request.param, shards=2, clock=clock, auto_compact=False) as opened:
        for messages in (100, 100):
            fill(opened, messages)
            opened.add_generation()
        fill(opened, 10)
        yield opened


@pytest.fixture
def start() -> int:
    """Return the time of the first message."""
    return START + 1_000
