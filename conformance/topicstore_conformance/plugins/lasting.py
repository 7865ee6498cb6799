"""Tests of the lifetime of databases with transforms: compactions, openings, other processes, kills, histories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import topicstore as ts
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from topicstore import Message

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.database.state_machine import DatabaseMachine
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.copying import copy_open
from topicstore_conformance.plugins.fixtures import Fixtures, messages, opened
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Lasting"]

DAY = 86_400_000_000
CHILD = """
import json, sys
import topicstore as ts

with ts.open(sys.argv[1]) as db:
    db.store([ts.Message("child", bytes(range(256)), "c")])
    print(json.dumps([[m.topic, m.payload.hex()] for text in ("t/#", "child") for m in db.replay(text, order="time")]))
"""


class Lasting(Fixtures):
    """Tests of the lifetime of databases whose payloads or properties plugins transform."""

    def test_machine(self, pair: Pair) -> None:
        """After any sequence of operations a database with the plugins holds the same messages as the model."""
        machine = type("Machine", (DatabaseMachine,), {"pair": pair})
        run_state_machine_as_test(machine, settings=settings(MACHINE, max_examples=tries(3, 20, pair.capabilities)))

    def test_compaction(self, db: ts.Database) -> None:
        """A first and a second compaction leave all messages unchanged."""
        for first in range(0, 60, 6):
            db.store(messages(6, first))
        for _ in range(2):
            db.compact()
            assert messages(60) == sorted(db.replay("#"), key=lambda message: message.timestamp or 0)

    def test_later(self, pair: Pair, directory: Path) -> None:
        """Messages are read back at any later time, even if the clock was set back or ahead."""
        clock = Clock()
        with opened(pair, directory / "later", clock=clock, monotonic=clock.monotonic) as db:
            db.store(messages())
            for jump in (1, DAY, 400 * DAY, -800 * DAY):
                clock.jump(jump)
                assert messages() == sorted(db.replay("#"), key=lambda message: message.timestamp or 0)

    def test_two_databases(self, pair: Pair, directory: Path) -> None:
        """Two databases with the plugins that are open at the same time don't affect each other."""
        with opened(pair, directory / "a") as one, opened(pair, directory / "b") as other:
            for number in range(5):
                one.store(messages(3, 3 * number))
                other.store([Message("other", b"%d" % number, "c", timestamp=START)])
            assert messages(15) == sorted(one.replay("#"), key=lambda message: message.timestamp or 0)
            assert [b"%d" % number for number in range(5)] == [message.payload for message in other.replay("#")]

    @requires("persistent")
    def test_reopening(self, pair: Pair, directory: Path) -> None:
        """After the database is opened again, messages in streams, retained messages and queued ones are read back."""
        for number in range(3):
            with opened(pair, directory / "db") as db:
                db.store(messages(4, 4 * number))
                db.publish([Message(f"kept/{number}", b"%d" % number, "c", retain=True)])
                db.queues.open("queue").append([Message("t", b"%d" % number, "c", timestamp=1)])
        with ts.open(directory / "db", clock=lambda: START) as db:  # the manifest names the plugins
            assert messages(12) == sorted(db.replay("t/#"), key=lambda message: message.timestamp or 0)
            assert [b"0", b"1", b"2"] == [message.payload for message in db.retained("kept/#")]
            assert [b"0", b"1", b"2"] == [message.payload for message in db.queues.open("queue").read().messages]

    @requires("persistent")
    def test_another_process(self, pair: Pair, directory: Path) -> None:
        """Two processes with different hash seeds read the values that the other has written."""
        with pair.open(directory / "db") as db:
            db.store([Message(f"t/{number}", b"%d" % number, "c") for number in range(9)])
        environment = {**os.environ, "PYTHONHASHSEED": "12345"}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(directory / "db")],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert 0 == done.returncode, done.stderr
        found = [(topic, bytes.fromhex(payload)) for topic, payload in json.loads(done.stdout)]
        expected = [(f"t/{number}", b"%d" % number) for number in range(9)] + [("child", bytes(range(256)))]
        assert expected == found
        with ts.open(directory / "db") as db:
            assert [bytes(range(256))] == [message.payload for message in db.replay("child")]

    @requires("persistent")
    def test_kill(self, pair: Pair, directory: Path) -> None:
        """After the process was killed, every acknowledged message is read back as it was stored."""
        with opened(pair, directory / "db") as db:
            for first in range(0, 12, 4):
                db.store(messages(4, first))
            copy_open(directory / "db", directory / "killed")
        with ts.open(directory / "killed", clock=lambda: START) as db:
            assert messages(12) == sorted(db.replay("#"), key=lambda message: message.timestamp or 0)
