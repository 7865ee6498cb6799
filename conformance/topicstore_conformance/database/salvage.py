"""Tests of salvage: only messages that were stored are recovered after the damage of a log, and unchanged."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest
import topicstore as ts
from topicstore import Message, MessageId

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.subjects.pairs import Pair

from .fixtures import Fixtures

__all__ = ["Salvage"]

Rows = dict[MessageId, Message]
EVERYTHING = ("#", "$SYS/#")
STRANGER = Message("SECRET/plan", b"new", "mallory")
LATER = START + 3_600_000_000


def rows_of(db: ts.Database, *filters: str) -> Rows:
    """Return the messages that replays of the filters yield, by id."""
    return {id_: message for text in filters for id_, message in replayed(db, text)}


def batch(number: int) -> list[Message]:
    """Return messages whose topics and clients partly occur in earlier batches and are partly new."""
    draw = random.Random(number)
    return [
        Message(topic, b"%d " % number + draw.randbytes(draw.choice((10, 3_000))), client, number % 3)
        for topic in (f"t/{number % 3}", f"u/{number // 2}/x", f"$SYS/{number // 3}")
        for client in ("c0", f"c{number // 4}")
    ]


def named(message: Message) -> tuple[str, str, bytes]:
    """Return a message's topic, publisher and payload."""
    return message.topic, message.client_id, message.payload


def recovered(path: Path, recovery: str) -> ts.Database:
    """Open a damaged database, ignoring warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return ts.open(path, recovery=recovery, clock=lambda: LATER)  # type: ignore[arg-type]


class Salvage(Fixtures):
    """Tests of opening with ``recovery="salvage"``."""

    @requires("persistent")
    def test_what_is_salvaged_was_stored(self, pair: Pair, directory: Path) -> None:
        """After damage in a log every salvaged message is as it was stored, and later stores don't change it."""
        path, now = directory / "db", [START]
        with pair.open(path, clock=lambda: now[0]) as db:
            db.store(batch(0))
        with pair.open(path, clock=lambda: now[0]) as db:
            for number in range(1, 40):
                now[0] += 1_000
                db.store(batch(number))
            db.flush()
            kept = shutil.copytree(path, directory / "kept")
            stored = rows_of(db, *EVERYTHING)
        logs = [log for kind in ("[0-9]*.log", "*.wal") for log in (kept / "shard-0000").glob(kind)]
        if not logs:
            pytest.skip(f"{pair.backend} keeps no logs of the kinds known here")
        largest = max(logs, key=lambda log: log.stat().st_size)
        draw = random.Random(5)
        for number in range(tries(6, 25)):
            data = bytearray(largest.read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            copies = [shutil.copytree(kept, directory / f"{number}-{recovery}") for recovery in ("before", "salvaged")]
            for copy in copies:
                (copy / "shard-0000" / largest.name).write_bytes(data)
            with recovered(copies[0], "point_in_time") as db:
                before = rows_of(db, *EVERYTHING)
            self._check(copies[1], stored, before)

    @staticmethod
    def _check(path: Path, stored: Rows, before: Rows) -> None:
        with recovered(path, "salvage") as db:
            there = rows_of(db, *EVERYTHING)
            assert before.items() <= there.items() <= stored.items()
            topics = {message.topic for message in stored.values()}
            assert there == rows_of(db, *topics)
            assert there == rows_of(db, "t/+", "+/+/x", "$SYS/+")
            assert [] == db.verify().damages
            db.store([STRANGER, *batch(50)])
            assert there.items() <= rows_of(db, *EVERYTHING).items()
        with ts.open(path, clock=lambda: 2 * LATER) as db:
            left = rows_of(db, *EVERYTHING)
            assert there.items() <= left.items()
            later = [message for id_, message in left.items() if id_ not in there]
            assert sorted(map(named, [STRANGER, *batch(50)])) == sorted(map(named, later))
            assert min(left.keys() - there.keys()) > max(stored)
            assert [] == db.verify().damages
