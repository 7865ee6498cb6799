"""Setting the wall clock doesn't change when sessions expire and wills are published, also across restarts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import StorageFullError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.sessions import Sessions, Will
from topicstore.sessions.session_store import SessionState
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.parts.machines import forget_sessions

SECOND = 1_000_000
DAY = 86_400


def opened(path: Path, clock: Clock) -> ts.Database:
    return ts.open(path, backend="rocksdb", shards=2, auto_compact=False, clock=clock, monotonic=clock.monotonic)


def will(client_id: str, delay: int) -> Will:
    """Return a will with the client id as its topic; a persistence rule stores such wills without a subscriber."""
    return Will(ts.Message(client_id, b"gone", client_id, 1), delay)


def waiting(db: ts.Database) -> set[str]:
    return {info.client_id for info in db.sessions}


def published(db: ts.Database) -> set[str]:
    wills = [message.topic for message in db.replay("#")]
    assert len(wills) == len(set(wills))
    return set(wills)


# --- random histories ---


@attrs.define
class Client:
    """A client in the model: its intervals, the elapsed time, and the clock changes that no process observed."""

    interval: int
    delay: int
    passed: int = 0
    """Elapsed seconds since the connection was lost; negative while the client is connected."""
    more: int = 0
    """Seconds by which the clock was set forward while no process ran to see it."""
    less: int = 0
    """Seconds by which the clock was set back while no process ran to see it."""

    def over(self, after: int) -> bool | None:
        """Return whether ``after`` seconds have elapsed; None if unseen clock changes allow both answers."""
        surely = self.passed - self.less >= after
        return surely if surely or self.passed + self.more < after else None


class History:
    """A database in successive processes, and a model of its clients with the time since each lost its connection."""

    def __init__(self, db: ts.Database, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        self.clients: dict[str, Client] = {}
        self.unseen = 0
        """Seconds by which the clock was set forward (negative: back) since the last tick."""

    def connect(self, interval: int, delay: int) -> None:
        """Connect a client that stays connected as long as this process lives."""
        name = f"connected-{len(self.clients)}"
        self.db.sessions.open(name, expiry_interval=interval, will=will(name, delay))
        self.clients[name] = Client(interval, delay, passed=-1)

    def lose(self, interval: int, delay: int) -> None:
        """Connect a client and lose its connection at once."""
        name = f"lost-{len(self.clients)}"
        self.db.sessions.open(name, expiry_interval=interval, will=will(name, delay)).lost()
        self.clients[name] = Client(interval, delay)

    def wait(self, seconds: int) -> None:
        """Let time pass, then tick."""
        self._pass(seconds)
        self._tick()

    def jump(self, seconds: int) -> None:
        """Set the clock while the process lives."""
        self.clock.jump(seconds * SECOND)
        self.unseen += seconds

    def close(self, down: int, jump: int) -> None:
        """Close the database and reopen it in another process; meanwhile time passes and the clock may be set."""
        self.db.sessions.close()
        self.unseen = 0
        self._lose_connected()
        self._begin(down, jump)

    def crash(self, down: int, jump: int) -> None:
        """Kill the process and open the database in another process; no process saw the jumps since the last tick."""
        self._begin(down, jump + self.unseen)
        self._lose_connected()

    def _lose_connected(self) -> None:
        for client in self.clients.values():
            client.passed = max(client.passed, 0)

    def _begin(self, down: int, jump: int) -> None:
        self._pass(down)
        self.clock.jump((jump - self.unseen) * SECOND)
        self.unseen = 0
        for client in self.clients.values():
            if client.passed >= 0:
                client.more += max(jump, 0)
                client.less += max(-jump, 0)
        forget_sessions(self.db)
        self._tick()

    def _pass(self, seconds: int) -> None:
        self.clock.now += seconds * SECOND
        for client in self.clients.values():
            client.passed += seconds if client.passed >= 0 else 0

    def _tick(self) -> None:
        while not self.db.sessions.tick():
            """The first ticks handle the sessions that a crash left open."""
        self.unseen = 0

    def check(self) -> None:
        """Check which sessions exist and which wills are published, as the model expects."""
        there, wills = waiting(self.db), published(self.db)
        for name, client in self.clients.items():
            gone = name not in there
            assert client.over(client.interval) in (gone, None), (name, client)
            assert client.over(min(client.interval, client.delay)) in (name in wills, None), (name, client)


SECONDS = st.integers(0, 100)
JUMPS = st.integers(-100, 100) | st.sampled_from([-20_000 * DAY, 20_000 * DAY])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["connect", "lose"]), st.tuples(SECONDS, SECONDS)),
    st.tuples(st.just("wait"), st.tuples(SECONDS)),
    st.tuples(st.just("jump"), st.tuples(JUMPS)),
    st.tuples(st.sampled_from(["close", "crash"]), st.tuples(SECONDS, st.just(0) | JUMPS)),
)


@contextmanager
def history() -> Iterator[History]:
    clock = Clock()
    with tempfile.TemporaryDirectory() as path:
        clocks: dict[str, Any] = {"clock": clock, "monotonic": clock.monotonic}
        with ts.open(path, backend="memory", shards=2, auto_compact=False, **clocks) as db:
            db.persistence.add()
            yield History(db, clock)


@settings(max_examples=tries(200, 2_000))
@given(steps=st.lists(STEPS, max_size=20))
def test_sessions_and_wills_have_their_time(steps: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Sessions expire and wills are published after their interval of elapsed time.

    A deviation is allowed only by as much as the clock was set while no process observed it.
    """
    with history() as run:
        for name, arguments in steps:
            getattr(run, name)(*arguments)
            if name != "jump":
                run.check()


# --- real restarts ---


@pytest.mark.parametrize("jump", [20_000 * DAY, -20_000 * DAY], ids=["forward", "back"])
@pytest.mark.parametrize("seen", ["by a tick", "by the closing", "as the database is opened"])
def test_a_jump_does_not_count_after_a_restart(tmp_path: Path, jump: int, seen: str) -> None:
    """Setting the clock while a process runs changes no expiry interval or will delay, even after a restart.

    Devices without a battery-backed clock set their clock in this way after each boot.
    """
    clock = Clock()
    with opened(tmp_path / "db", clock) as db:
        db.persistence.add()
        if seen == "as the database is opened":
            clock.jump(jump * SECOND)
        db.sessions.open("client", expiry_interval=60, will=will("client", 40)).lost()
        if seen != "as the database is opened":
            clock.jump(jump * SECOND)
        if seen == "by a tick":
            db.sessions.tick()
    clock.now += 39 * SECOND
    with opened(tmp_path / "db", clock) as db:
        db.sessions.tick()
        assert ({"client"}, set()) == (waiting(db), published(db))
        info = db.sessions["client"]
        assert (clock.now + SECOND, clock.now + 21 * SECOND) == (info.will_due, info.expires)
        clock.now += SECOND
        db.sessions.tick()
        assert ({"client"}, {"client"}) == (waiting(db), published(db))
        clock.now += 20 * SECOND
        db.sessions.tick()
        assert set() == waiting(db)


def test_a_clock_that_is_wrong_at_a_restart_and_then_set_right_keeps_nothing_for_ever(tmp_path: Path) -> None:
    """A device whose clock starts in 1970 at each boot keeps no expired session for ever.

    Sessions last longer than their expiry interval only by time that the device couldn't measure.
    """
    clock = Clock()
    for _ in range(3):
        with opened(tmp_path / "db", clock) as db:
            db.sessions.open("client", expiry_interval=60).disconnect()
            db.sessions.tick()
        clock.now += 10 * SECOND
        clock.jump(-clock.now)
        with opened(tmp_path / "db", clock) as db:
            assert {"client"} == waiting(db)
            clock.now += 59 * SECOND
            clock.jump(START)
            db.sessions.tick()
            assert {"client"} == waiting(db)
            clock.now += SECOND
            db.sessions.tick()
            assert set() == waiting(db)


# --- shown times, and failures ---


def test_times_are_shown_by_the_clock_as_it_is_set(sessions: Sessions, clock: Clock) -> None:
    """After a tick has noticed that the clock was set, all reported times are those of the new clock."""
    sessions.open("client", expiry_interval=60, will=will("client", 40)).lost()
    clock.jump(DAY * SECOND)
    sessions.tick()
    info = sessions["client"]
    assert (clock.now, clock.now + 40 * SECOND, clock.now + 60 * SECOND) == (info.created, info.will_due, info.expires)


def test_a_jump_that_could_not_be_noted_is_noted_by_the_next_tick(
    sessions: Sessions, clock: Clock, crash: Callable[[], Sessions]
) -> None:
    """If recording a clock jump fails, the next tick records it, and other due work isn't delayed."""
    sessions.tick()
    sessions.open("client", expiry_interval=60).disconnect()
    sessions.open("gone", expiry_interval=1).disconnect()
    clock.jump(DAY * SECOND)
    clock.now += SECOND
    commit = SessionState.commit

    def no_room_for_clocks(
        state: SessionState, by_shard: Mapping[int, Sequence[StateWrite]]
    ) -> Mapping[int, TopicstoreError]:
        if any(one.key == b"\1c" for writes in by_shard.values() for one in writes):
            return dict.fromkeys(by_shard, StorageFullError("the disk is full"))
        return commit(state, by_shard)

    with patch.object(SessionState, "commit", no_room_for_clocks):
        sessions.tick()
    assert ["client"] == [info.client_id for info in sessions]
    sessions.tick()
    after = crash()
    after.tick()
    assert ["client"] == [info.client_id for info in after]


def test_the_clocks_are_written_when_one_was_set_and_once_an_hour(sessions: Sessions, clock: Clock) -> None:
    """Ticks store the clocks' readings only after a jump of at least a second, and once an hour."""
    with patch.object(SessionState, "commit", return_value={}) as write:
        for passed in (0, 1, 3_598):
            clock.now += passed * SECOND
            sessions.tick()
        assert 1 == write.call_count
        clock.now += SECOND
        sessions.tick()
        assert 2 == write.call_count
        clock.jump(SECOND - 1)
        sessions.tick()
        assert 2 == write.call_count
        clock.jump(1)
        sessions.tick()
        assert 3 == write.call_count


@pytest.mark.parametrize("ahead", [-1, 0, 3_600])
@pytest.mark.parametrize("text", ["a", "$share/group/a"])
def test_a_subscription_with_a_start_gets_what_comes_after_the_clock_was_set_back(
    db: ts.Database, sessions: Sessions, clock: Clock, text: str, ahead: int
) -> None:
    """A subscription with a start receives a message that is published after the clock was set back.

    The message's position may lie before the start.
    """
    session = sessions.open("client", expiry_interval=None)
    db.publish([ts.Message("a", b"before", "publisher", 1)])
    clock.now += 10 * SECOND
    session.subscribe(text, 1, start=clock.now + ahead * SECOND)
    clock.jump(-5 * SECOND)
    db.publish([ts.Message("a", b"after", "publisher", 1)])
    assert [b"after"] == [item.message.payload for item in session.deliver()]  # type: ignore[union-attr]
