"""A shard writer with a replicated log: writes are prepared at once and applied later, several as one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.engine import KEYSPACES
from topicstore.shard.writer import PendingWrite, ShardWriter

NOW = 1_700_000_000_000_000
LAYOUTS = ["block", "skipstream", "wildcard_optimized", "reference"]
KEYS = [b"\2a", b"\2b"]
VALUES = st.sampled_from([None, b"1", b"2"])


class HoldingLog:
    """A replicated log that acknowledges a shard's messages and state at once, and holds them until `apply_all`.

    A real log acknowledges only applied writes. Other changes are applied before they are acknowledged, here too.
    """

    owned = True

    def __init__(self, writer: ShardWriter) -> None:
        self.writer = writer
        with writer.lock:
            writer.log = self

    def check_owned(self) -> None:
        """Raise nothing, because this site owns the shard."""

    def encode_locked(self, pending: PendingWrite) -> None:
        """Accept every write."""

    def propose_locked(self, pending: PendingWrite) -> None:
        """Record nothing, because the writer has the proposed writes."""

    def wait_for_room(self, pending: PendingWrite) -> None:
        raise AssertionError("the log is never full")

    def wait(self, pending: PendingWrite) -> None:
        if pending.change is not None:
            self.apply_all()

    def apply_all(self) -> None:
        """Apply the proposed writes, as many as possible together."""
        while self.writer.proposed:
            joined = list(takewhile(lambda one: one.change is None, self.writer.proposed))
            writes = joined or [self.writer.proposed[0]]
            for one in writes:
                one.result = one.work() if one.work is not None else 0
            self.writer.apply(writes, b"", self.writer.opened)


def message(number: int) -> ts.Message:
    return ts.Message(f"a/{number % 5}/b", b"%d" % number, f"c{number % 3}", qos=number % 2)


@contextlib.contextmanager
def holding(db: ts.Database) -> Iterator[list[HoldingLog]]:
    """Make all shards of a database hold their writes, and apply the remaining ones at the end."""
    logs = [HoldingLog(shard.writer) for shard in db.storage.shards]
    yield logs
    for log in logs:
        log.apply_all()
        with log.writer.lock:
            log.writer.log = None


def stored(db: ts.Database) -> list[Any]:
    """Return all keys and values in the engines of a database."""
    engines = [shard.writer.open_engine() for shard in db.storage.shards]
    return [pair for engine in engines for keyspace in KEYSPACES for chunk in engine.scan(keyspace) for pair in chunk]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_that_are_applied_as_one_are_stored_as_one_batch(tmp_path: Path, layout: str) -> None:
    """Writes that are applied as one leave the same bytes in the engine as one batch of all their messages."""
    clock = {"clock": lambda: NOW, "auto_compact": False}
    with ts.open(tmp_path / "one", shards=2, layout=layout, **clock) as db:
        db.store([message(number) for number in range(50)])
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    later = [message(number) for number in range(50, 120)]
    with ts.open(tmp_path / "one", **clock) as one, ts.open(tmp_path / "many", **clock) as many:
        one.store(later)
        with holding(many) as logs:
            results = [many.store(later[begin : begin + 10]) for begin in range(0, 70, 10)]
            assert len(list(many.replay("#"))) == 50, "what is held is not read"
            for log in logs:
                log.apply_all()
        assert stored(one) == [pair for pair in stored(many) if pair[0] != b"\0progress"]
        assert len({id_ for result in results for id_ in result.ids}) == 70


def delivered(follower: ts.Subscription) -> dict[int | None, list[ts.Message]]:
    """Return the messages that a follower has received, by shard."""
    found: dict[int | None, list[ts.Message]] = {}
    while batch := follower.fetch(timeout=0):
        found.setdefault(batch.shard, []).extend(batch.messages)
    return found


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(1, 5)),
        st.tuples(st.just("state"), st.sampled_from(KEYS), VALUES, VALUES),
        st.tuples(st.just("generation")),
        st.tuples(st.just("delete"), st.integers(0, 4)),
        st.tuples(st.just("apply")),
    ),
    max_size=20,
)


def run(db: ts.Database, operations: list[Any], logs: list[HoldingLog]) -> list[Any]:
    """Execute operations, and return the result or error of each."""
    found: list[Any] = []
    count = 0
    for name, *arguments in operations:
        if name == "store":
            batch = [message(number) for number in range(count, count + arguments[0])]
            count += arguments[0]
            found.append(list(db.store(batch).ids))
        elif name == "state":
            key, expect, value = arguments
            try:
                db.state(0).write([ts.StateWrite(key, value, expect=expect)])
            except ts.StateConflictError as conflict:
                found.append(str(conflict))
        elif name == "generation":
            found.append(db.add_generation())
        elif name == "delete":
            for log in logs:
                log.apply_all()  # a delete only sees what was acknowledged, and so what a real log has applied
            found.append(db.delete(f"a/{arguments[0]}/b"))
        elif logs:
            for log in logs:
                log.apply_all()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@given(operations=OPERATIONS)
@settings(deadline=None)
def test_held_writes_do_what_they_do_one_after_the_other(layout: str, operations: list[Any]) -> None:
    """Positions, conflicts, messages, state and what followers receive don't depend on when writes are applied."""
    how: dict[str, Any] = {"backend": "memory", "shards": 2, "layout": layout, "clock": lambda: NOW}
    with ts.open("one", **how) as one, ts.open("many", **how) as many:
        followers = [db.subscribe("#") for db in (one, many)]
        expected = run(one, operations, [])
        with holding(many) as logs:
            assert expected == run(many, operations, logs)
        for db in (one, many):
            db.flush()
        first, second = map(delivered, followers)
        assert first == second
        assert list(one.replay("#")) == list(many.replay("#"))
        assert [one.state(0).get(key) for key in KEYS] == [many.state(0).get(key) for key in KEYS]
