"""Publishing after a close and from several threads; `DatabasePartsSuite` covers each message's outcome."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import topicstore as ts
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import together


@pytest.fixture(params=["memory", "rocksdb"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", backend=request.param, shards=3, clock=Clock()) as opened:
        yield opened


def stored(db: ts.Database) -> list[bytes]:
    return [message.payload for message in db.replay("#", order="time")]


def test_a_closed_database_takes_nothing(tmp_path: Path) -> None:
    """A closed database refuses to publish any message, including a message that would not be stored."""
    with ts.open(tmp_path / "db", backend="memory") as db:
        db.publish([ts.Message("l", b"1")])
    with pytest.raises(ts.DatabaseClosedError):
        db.publish([ts.Message("l", b"1")])
    with pytest.raises(ts.DatabaseClosedError):
        db.retained("#")


def test_publishers_in_threads(db: ts.Database) -> None:
    """Publishers whose batches span several shards don't deadlock; each topic retains its last message."""
    db.persistence.add("#")
    topics = [f"t/{number}" for number in range(7)]

    def work(number: int) -> None:
        for turn in range(60):
            order = topics[turn % 7 :] + topics[: turn % 7]
            payload = b"%d %d" % (number, turn)
            db.publish([ts.Message(topic, payload, f"client {number} {topic}", retain=True) for topic in order])

    together(*(partial(work, number) for number in range(4)))
    assert 4 * 60 * 7 == len(stored(db))
    assert topics == [message.topic for message in db.retained("#")]
    assert {59} == {int(message.payload.split()[1]) for message in db.retained("#")}
