"""Promises about timestamps: messages are found by their own times, in whatever order they came."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.shard import zones

from topicstore_conformance.database.fixtures import Fixtures, both_timestamps
from topicstore_conformance.faults.clock import START
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["OwnTimes"]

HOUR = 3_600_000_000


def check(db: ts.Database, held: list[Message]) -> None:
    """Replay by timestamps an hour without messages, and some with, and compare with what must be there."""
    everything = list(db.replay("#", order="time"))
    assert sorted(message.payload for message in held) == sorted(message.payload for message in everything)
    for hour in (0, 1, 8):
        start, until = START - hour * HOUR, START - (hour - 1) * HOUR
        among = [message for message in everything if start <= (message.timestamp or 0) < until]
        assert among == list(db.replay("#", start, until, by="timestamp", order="time"))
        assert among[:-3:-1] == list(db.replay("#", start, until, by="timestamp", reverse=True, limit=2))
        some = [message.payload for message in among if message.topic == "t/1/x"]
        assert sorted(some) == sorted(m.payload for m in db.replay("t/1/+", start, until, by="timestamp"))


class OwnTimes(Fixtures):
    """Promises about replays by timestamp."""

    @both_timestamps
    def test_own_times_are_asked_for_exactly(
        self, pair: Pair, directory: Path, monkeypatch: pytest.MonkeyPatch, timestamps: str
    ) -> None:
        """A replay by timestamp gives every message of those times, however late it came, and no other."""
        monkeypatch.setattr(zones, "SIZE", 20)
        draw = random.Random(timestamps)
        held: list[Message] = []
        how: dict[str, Any] = {"timestamps": timestamps, "late": "lift", "shards": 2}
        with pair.open(directory / "db", clock=lambda: START, **how) as db:
            for generation in range(2):
                if generation:
                    db.add_generation()
                for batch in range(6):
                    late = draw.choice([0, 0, 0, 11 - batch])
                    new = [
                        Message(f"t/{n % 3}/x", b"%d/%d/%d" % (generation, batch, n), f"c{n % 5}", timestamp=time)
                        for n in range(draw.choice([1, 7, 30]))
                        for time in [START - (late or 3 * (1 - generation)) * HOUR - draw.randrange(HOUR)]
                    ]
                    db.store(new)
                    held += new
            check(db, held)
            db.delete("t/0/x")
            db.compact()
            held = [message for message in held if message.topic != "t/0/x"]
            check(db, held)
        if "persistent" in pair.capabilities:
            with ts.open(directory / "db", mode="r", clock=lambda: START) as db:
                check(db, held)
            with ts.open(directory / "db", clock=lambda: START) as db:
                db.drop_generation(1)
                check(db, [message for message in held if not message.payload.startswith(b"0/")])
