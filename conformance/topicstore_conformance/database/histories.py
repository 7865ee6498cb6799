"""Promises about any history of calls: the database answers as the model does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from topicstore import Message

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import COSTLY, MACHINE, full, tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.database.state_machine import DatabaseMachine
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle import strategies
from topicstore_conformance.oracle.checks import check_all, check_replay, replayed
from topicstore_conformance.oracle.model import Model
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Histories"]
LARGE = 16 << 20


class Histories(Fixtures):
    """Promises about the result of any history of calls, and about messages of every kind and number."""

    def test_machine(self, pair: Pair) -> None:
        """After any sequence of operations the database holds what the model says."""
        machine = type("Machine", (DatabaseMachine,), {"pair": pair})
        run_state_machine_as_test(machine, settings=settings(MACHINE, max_examples=tries(8, 30, pair.capabilities)))

    def test_hostile_topics(self, pair: Pair) -> None:
        """Every topic that MQTT 5 permits is stored, found by every filter that matches, and comes back unchanged."""

        @settings(COSTLY, max_examples=tries(5, 25, pair.capabilities))
        @given(
            st.lists(strategies.messages(strategies.hostile_topics()), min_size=1, max_size=12),
            st.lists(strategies.filters(strategies.hostile_topics()), max_size=4),
            st.data(),
        )
        def check(messages: list[Message], filters: list[str], data: st.DataObject) -> None:
            own = [data.draw(strategies.filters_of(message.topic)) for message in messages[:3]]
            options = {pair.layout: pair.small()}
            with (
                quick_directory() as directory,
                pair.open(Path(directory, "db"), shards=2, options=options, clock=lambda: START) as db,
            ):
                model = Model(shards=2, shard_of=db.shard_of, layout=pair.layout)
                for part in (messages[:5], messages[5:]):
                    db.store(part)
                    model.store(part, START)
                for topic_filter in ("#", "$SYS/#", "+/#", *filters, *own, messages[0].topic):
                    fits = len(topic_filter.encode()) <= 65_535
                    if fits and ("+" in topic_filter or "#" in topic_filter or topic_filter):
                        check_replay(db, model, topic_filter, order="time")
                check_all(db, model)

        check()

    def test_every_edge_topic_by_itself(self, pair: Pair, directory: Path) -> None:
        """Each unusual topic is found under its own name, with only the messages that were published to it."""
        with pair.open(directory / "db", options={pair.layout: pair.small()}) as db:
            db.store([Message(topic, str(number).encode()) for number, topic in enumerate(strategies.EDGE_TOPICS)])
            for number, topic in enumerate(strategies.EDGE_TOPICS):
                assert [(topic, str(number).encode())] == [(m.topic, m.payload) for m in db.replay(topic)]

    def test_empty_and_large_payloads(self, pair: Pair, directory: Path) -> None:
        """An empty payload and one of 16 MB come back unchanged, beside each other."""
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

    def test_a_long_batch(self, pair: Pair, directory: Path) -> None:
        """Tens of thousands of messages stored in one call come back in order, for each publisher and all together."""
        messages = [Message(f"a/{n % 7}", b"%d" % n, f"c{n % 11}", n % 3, n % 5 == 0) for n in range(30_000)]
        with pair.open(directory / "db", shards=2, clock=lambda: START) as db:
            model = Model(shards=2, shard_of=db.shard_of, layout=pair.layout)
            assert [row.id for row in model.store(messages, START)] == db.store(messages).ids
            check_replay(db, model, "#", batch_size=4096)
            check_replay(db, model, "a/3", order="time", batch_size=999)
            assert (30_000, []) == ((report := db.verify()).messages, report.damages)

    @full
    def test_more_topics_than_memory_keeps(self, pair: Pair, directory: Path) -> None:
        """However many topics there are, none is mistaken for another."""
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
    def test_positions_increase_over_restarts(self, pair: Pair, directory: Path) -> None:
        """No position is given twice, after a clock was set back, the last message was deleted, or a restart."""
        path, seen = directory / "db", []
        for moment, ahead in ((0, False), (-(10**9), True), (0, False), (500, False), (-(10**6), True)):
            told = pytest.warns(UserWarning, match="future") if ahead else contextlib.nullcontext()
            with told:
                db = pair.open(path, clock=lambda now=START + moment: now)
            with db:
                seen += [id_.position for id_ in db.store([Message("a", b"1"), Message("b", b"2")]).ids]
                assert 1 == db.delete("b")
                seen += [id_.position for id_ in db.store([Message("b", b"3")]).ids]
                assert 1 == db.delete("b")
                assert 0 == db.delete("b")
        assert sorted(set(seen)) == seen
        with ts.open(path, clock=lambda: START + 10**6) as db:
            assert seen[::3] == [id_.position for id_, _ in replayed(db)]

    @requires("persistent")
    def test_a_last_position_in_the_future_is_told(self, pair: Pair, directory: Path) -> None:
        """If last positions lie in the future, opening warns and `info` says so, and storing continues after them."""
        with pair.open(directory / "db", clock=lambda: START) as db:
            last = db.store([Message("a", b"1")]).ids[0].position
        with pytest.warns(UserWarning, match="last position lies 3 s in the future"):
            db = ts.open(directory / "db", clock=lambda: START - 3_001_000)
        with db:
            assert 3_000_000 == db.info().shards[0].ahead
            assert last + 1 == db.store([Message("a", b"2")]).ids[0].position
            assert [b"1", b"2"] == [message.payload for message in db.replay("a")]

    def test_state_scan_is_ordered_and_hides_what_is_not_its_own(self, pair: Pair, directory: Path) -> None:
        """A shard's state comes in order of keys, by prefix, without the store's own keys."""
        keys = [b"\x02", b"a", b"a\0", b"ab", b"b", b"\xff", b"\xff\xff", b"\xff\xff\x01"]
        with pair.open(directory / "db", shards=2) as db:
            db.state(1).write([ts.StateWrite(key, key * 2) for key in reversed(keys)])
            assert [(key, key * 2) for key in keys] == list(db.state(1).scan())
            assert [b"a", b"a\0", b"ab"] == [key for key, _ in db.state(1).scan(b"a")]
            assert [b"\xff\xff", b"\xff\xff\x01"] == [key for key, _ in db.state(1).scan(b"\xff\xff")]
            assert [] == list(db.state(1).scan(b"\0"))
            assert [] == list(db.state(0).scan())
