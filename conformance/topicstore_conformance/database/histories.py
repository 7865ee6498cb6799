"""Tests that compare databases with a model: random sequences of calls, unusual topics, extreme sizes and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from topicstore import Message

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.profiles import MACHINE
from topicstore_conformance.conditions.tries import full, tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.database.state_machine import DatabaseMachine
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle import strategies
from topicstore_conformance.oracle.checks import check_replay
from topicstore_conformance.oracle.model import Model
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Histories"]
LARGE = 16 << 20


class Histories(Fixtures):
    """Tests that compare databases with a model."""

    def test_machine(self, pair: Pair) -> None:
        """After any sequence of operations the database holds the same messages as the model."""
        machine = type("Machine", (DatabaseMachine,), {"pair": pair})
        run_state_machine_as_test(machine, settings=settings(MACHINE, max_examples=tries(5, 30, pair.capabilities)))

    def test_every_edge_topic_by_itself(self, pair: Pair, directory: Path) -> None:
        """A replay of an unusual topic's name yields exactly the messages that were published to that topic."""
        with pair.open(directory / "db", options={pair.layout: pair.small()}) as db:
            db.store([Message(topic, str(number).encode()) for number, topic in enumerate(strategies.EDGE_TOPICS)])
            for number, topic in enumerate(strategies.EDGE_TOPICS):
                assert [(topic, str(number).encode())] == [(m.topic, m.payload) for m in db.replay(topic)]

    def test_empty_and_large_payloads(self, pair: Pair, directory: Path) -> None:
        """Empty payloads and payloads of 16 MB in one batch are read back unchanged."""
        large = bytes(range(256)) * (LARGE // 256)
        messages = [Message("a", b"", "c"), Message("a", large, "c"), Message("b", b"", "c"), Message("a", b"x", "c")]
        with pair.open(directory / "db", clock=lambda: START) as db:
            model = Model(shards=1, shard_of=db.shard_of, layout=pair.layout)
            db.store(messages)
            model.store(messages, START)
            db.store([Message("a", large)])
            model.store([Message("a", large)], START)
            check_replay(db, model, "#", batch_size=2)
            check_replay(db, model, "a")
            assert (5, []) == ((report := db.verify()).messages, report.damages)
            assert 3 == db.delete("a", 0) - 1
            assert [b""] == [message.payload for message in db.replay("#")]

    @full
    def test_more_topics_than_memory_keeps(self, pair: Pair, directory: Path) -> None:
        """With more topics than the topic cache holds, a replay of a topic yields only that topic's messages."""
        names = [f"t/{n % 97}/{n}" for n in range(36_000)]
        with pair.open(directory / "db", clock=lambda: START) as db:
            for half in ("x", "y"):
                for _ in range(2):
                    db.store([Message(f"{half}/{name}", name.encode(), "c") for name in names])
            for half in ("x", "y"):
                got = [(m.topic, m.payload) for m in db.replay(f"{half}/#", order="time")]
                assert [(f"{half}/{name}", name.encode()) for name in names] * 2 == got
            assert [b"t/3/100"] * 2 == [m.payload for m in db.replay("y/t/3/100")]

    @requires("persistent")
    def test_a_last_position_in_the_future_is_reported(self, pair: Pair, directory: Path) -> None:
        """If a last position lies in the future, opening warns, `info` reports it, and new positions follow it."""
        with pair.open(directory / "db", clock=lambda: START) as db:
            last = db.store([Message("a", b"1")]).ids[0].position
        with pytest.warns(UserWarning, match="last position lies 3 s in the future"):
            db = pair.reopen(directory / "db", clock=lambda: START - 3_001_000)
        with db:
            assert 3_000_000 == db.info().shards[0].ahead
            assert last + 1 == db.store([Message("a", b"2")]).ids[0].position
            assert [b"1", b"2"] == [message.payload for message in db.replay("a")]
