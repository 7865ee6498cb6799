"""Timers of sessions: an end or expiry that fails is retried, and delays no other session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import topicstore as ts
from topicstore.contract.errors import EngineError
from topicstore.sessions import Publish, PubRel, Sessions
from topicstore.sessions.records import Keys
from topicstore.sessions.session_store import SessionState, encode_session
from topicstore.shard.state import FrameworkWrite
from topicstore_conformance.faults.clock import Clock

Publishing = Callable[..., None]
Crash = Callable[[], Sessions]
SECOND = 1_000_000


def payloads(items: list[Publish | PubRel]) -> list[str]:
    return [item.message.payload.decode() for item in items if isinstance(item, Publish)]


@pytest.mark.parametrize("failure", [EngineError, KeyboardInterrupt])
def test_a_session_that_was_stored_as_open_and_is_not_expires(
    sessions: Sessions, clock: Clock, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """A session that was stored as connected although opening it failed still expires.

    The refused client may never return, and messages would be stored for ever for a session that didn't expire.
    """
    for client in ("client", "other"):
        session = sessions.open(client, expiry_interval=10)
        session.subscribe(f"{client}/#", 1)
        session.lost()
    sessions.tick()

    def fail(_states: SessionState, _client_id: str) -> None:
        raise failure("not now")

    with monkeypatch.context() as patches:
        patches.setattr(SessionState, "followed", fail)
        with pytest.raises(failure):
            sessions.open("client", expiry_interval=10)
    other = sessions.open("other", expiry_interval=10)
    assert sessions["client"].connected
    sessions.tick()
    assert not sessions["client"].connected
    clock.now += 11 * SECOND
    sessions.tick()
    assert "client" not in sessions
    assert not sessions.wants("client/1")
    assert other.ended is None
    assert sessions["other"].connected


@pytest.mark.parametrize("after", ["overtaken", "committed"])
def test_a_session_whose_end_fails_is_not_waited_for(
    sessions: Sessions, clock: Clock, publish: Publishing, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """A session isn't reported as ready again and again if ending it fails, before or after the commit."""
    silent = sessions.open("silent", keep_alive=10, expiry_interval=None)
    silent.subscribe("a/#", 1)
    other = sessions.open("other", expiry_interval=None)
    other.subscribe("a/#", 1)
    assert [] == sessions.deliver()
    states = sessions._registry.states
    if after == "overtaken":
        found = states.find("silent")
        assert found is not None
        elsewhere = encode_session("silent", msgspec.structs.replace(found.record, guard=found.record.guard + 5))
        states.states[states.shard_of("silent")].write([FrameworkWrite(Keys("silent").session, elsewhere.stored)])
    else:
        timers, failing = SessionState.timers, [EngineError("the disk is gone")]

        def fail_once(self: SessionState, shard: int) -> Any:
            if failing and silent.ended is not None:
                raise failing.pop()
            return timers(self, shard)

        monkeypatch.setattr(SessionState, "timers", fail_once)
    for _ in range(3):
        clock.now += 30 * SECOND
        sessions.tick()
    assert silent.ended is not None
    assert [] == sessions.deliver()
    assert not sessions.wait(0)
    publish("new")
    assert ["new"] == payloads([item for _, items in sessions.deliver() for item in items])


@pytest.mark.parametrize("kept", ["mark", "timer"])
def test_a_session_that_can_not_be_read_keeps_no_other_waiting(
    sessions: Sessions, clock: Clock, crash: Crash, kept: str
) -> None:
    """A session that can't be read delays no other session that a crash left open or that expires.

    The damage is reported, and the session is retried later.
    """
    for number in range(3):
        sessions.open(f"client-{number}", expiry_interval=5)
        if kept == "timer":
            sessions.open(f"client-{number}", expiry_interval=5).lost()
    damaged, state = (
        Keys("client-1").session,
        sessions._registry.states.states[sessions._registry.states.shard_of("client-1")],
    )
    whole = state.get(damaged)
    state.write([FrameworkWrite(damaged, b"\xff")])
    if kept == "mark":
        sessions = crash()
        with pytest.raises(ts.CorruptionError):
            sessions.tick()
        assert [False] * 2 == [sessions[f"client-{number}"].connected for number in (0, 2)]
    clock.now += 6 * SECOND
    with pytest.raises((ts.CorruptionError, ExceptionGroup)):
        sessions.tick()
    for number in (0, 2):
        with pytest.raises(ts.SessionNotFoundError):
            sessions[f"client-{number}"]
    state.write([FrameworkWrite(damaged, whole)])
    for _ in range(2):  # the first tick only ends the session's connection
        clock.now += 6 * SECOND
        assert 0 < sessions.tick()
    with pytest.raises(ts.SessionNotFoundError):
        sessions["client-1"]


def test_failing_timers_keep_no_later_one_waiting(
    sessions: Sessions, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many timers fail, later timers run: each tick continues after the timers that the last tick tried."""
    monkeypatch.setattr("topicstore.sessions.session_expiry._CHUNK", 3)
    damaged = [f"client-{number}" for number in range(16)]
    for client_id in (*damaged, *"abcdefgh"):
        sessions.open(client_id, expiry_interval=5 if client_id in damaged else 6).lost()
    states = sessions._registry.states
    whole = {client_id: states.states[states.shard_of(client_id)].get(Keys(client_id).session) for client_id in damaged}
    for client_id in damaged:
        states.write_for(client_id, [FrameworkWrite(Keys(client_id).session, b"\xff")])
    clock.now += 6 * SECOND
    for _ in range(len(damaged)):
        with contextlib.suppress(ts.CorruptionError, ExceptionGroup):
            sessions.tick()
        clock.now += SECOND
    assert set(damaged) == set(states.clients())
    for client_id, stored in whole.items():
        states.write_for(client_id, [FrameworkWrite(Keys(client_id).session, stored)])
    for _ in range(len(damaged)):
        clock.now += SECOND
        sessions.tick()
    assert [] == list(sessions)


@pytest.mark.parametrize(("method", "left_open"), [("timers", False), ("left_open", True), ("write", True)])
def test_what_is_due_is_done_after_an_error_of_the_engine(
    sessions: Sessions, clock: Clock, crash: Crash, monkeypatch: pytest.MonkeyPatch, method: str, *, left_open: bool
) -> None:
    """After an engine error while reading or writing, the next tick does the due work."""
    session = sessions.open("client", expiry_interval=5)
    if left_open:
        sessions = crash()
    else:
        session.lost()
        clock.now += 5 * SECOND
    works = getattr(SessionState, method)
    failing = [EngineError("the disk is gone")] * 2

    def fail(*arguments: Any) -> Any:
        if failing:
            raise failing.pop()
        return works(*arguments)

    with monkeypatch.context() as patches:
        patches.setattr(SessionState, method, fail)
        with pytest.raises((EngineError, ExceptionGroup)):
            sessions.tick()
        failing.clear()
        for _ in range(2):
            clock.now += 5 * SECOND
            sessions.tick()
    assert [] == list(sessions)
