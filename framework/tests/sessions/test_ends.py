"""Ends of sessions are reported to ``on_end`` with no lock held, and ended sessions leave nothing in memory."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable

import pytest
import topicstore as ts
from topicstore.sessions import Ended, Session, Sessions
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.threads import PATIENCE, begin

SECOND = 1_000_000


def kick(sessions: Sessions, _: Clock) -> None:
    sessions.kick("client")


def expire(sessions: Sessions, _: Clock) -> None:
    sessions.expire("client")


def take_over(sessions: Sessions, _: Clock) -> None:
    sessions.open("client")


def fall_silent(sessions: Sessions, clock: Clock) -> None:
    clock.now += 60 * SECOND
    sessions.tick()


def close(sessions: Sessions, _: Clock) -> None:
    sessions.close()


ENDS = {
    kick: Ended.KICKED,
    expire: Ended.EXPIRED,
    take_over: Ended.TAKEN_OVER,
    fall_silent: Ended.KEEP_ALIVE,
    close: Ended.CLOSED,
}
End = Callable[[Sessions, Clock], None]


@pytest.mark.parametrize("end", ENDS)
def test_on_end_may_call_and_wait(sessions: Sessions, clock: Clock, end: End) -> None:
    """``on_end`` is called in the thread that ended the session, with the reason, and may wait.

    Meanwhile other threads can use the sessions.
    """
    notified: list[tuple[Ended, threading.Thread]] = []

    def on_end(session: Session, why: Ended) -> None:
        assert session.ended is why
        elsewhere = begin(lambda: sessions.open("other") if end is not close else sessions.connected("client"))
        assert elsewhere.exception(PATIENCE) is None or end is close
        notified.append((why, threading.current_thread()))

    sessions.open("client", keep_alive=10, on_end=on_end)
    end(sessions, clock)
    assert [(ENDS[end], threading.current_thread())] == notified


@pytest.mark.parametrize("end", ENDS)
def test_an_error_of_on_end_harms_no_other_session(sessions: Sessions, clock: Clock, end: End) -> None:
    """An error that ``on_end`` raises is reported as a warning, and ``on_end`` is still called for other sessions.

    The call that ended the session completes.
    """
    notified = []

    def on_end(session: Session, _: Ended) -> None:
        notified.append(session.client_id)
        raise ValueError("no such socket")

    for client_id in ("client", "another"):
        sessions.open(client_id, keep_alive=10, expiry_interval=None, on_end=on_end)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        end(sessions, clock)
    assert (notified, RuntimeWarning) == (
        ["client", "another"] if end in (fall_silent, close) else ["client"],
        warned[0].category,
    )
    assert [f"on_end of session {one!r} raised ValueError: no such socket" for one in notified] == [
        str(one.message) for one in warned
    ]
    if len(notified) == 1:
        another = sessions.connected("another")
        assert another is not None
        another.disconnect()


def test_where_warnings_are_errors_such_an_error_is_reported_all_the_same(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`threading.excepthook` reports an error of ``on_end`` if warnings are errors."""
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def on_end(*_: object) -> None:
        raise ValueError("no such socket")

    sessions.open("client", on_end=on_end)
    sessions.kick("client")
    assert ["no such socket"] == [str(one.exc_value) for one in reported]


def test_an_interruption_of_on_end_is_raised_and_the_others_are_called(sessions: Sessions, clock: Clock) -> None:
    """A KeyboardInterrupt in ``on_end`` is raised by the call that ended the sessions, after all ``on_end`` calls."""
    notified = []

    def on_end(session: Session, _: Ended) -> None:
        notified.append(session.client_id)
        raise KeyboardInterrupt

    for client_id in ("client", "another"):
        sessions.open(client_id, keep_alive=10, on_end=on_end)
    clock.now += 60 * SECOND
    with pytest.raises(KeyboardInterrupt):
        sessions.tick()
    assert ["another", "client"] == sorted(notified)
    assert sessions.connected("client") is None


def test_on_end_may_open_the_session_again(sessions: Sessions) -> None:
    """``on_end`` may open the ended session again."""
    sessions.open("client", on_end=lambda *_: sessions.open("client"))
    assert sessions.kick("client")
    assert sessions.connected("client") is not None


@pytest.mark.parametrize("db", ["memory"], indirect=True)
def test_sessions_with_a_keep_alive_leave_nothing_behind(sessions: Sessions, clock: Clock) -> None:
    """Ended sessions with a keep alive leave nothing in memory however often clients reconnect.

    The keep alive of connected clients is still enforced.
    """
    reconnects = tries(2_000, 20_000)
    kept = sessions.open("kept", keep_alive=3_600)
    for number in range(reconnects):
        session = sessions.open(f"reconnecting-{number % 10}", keep_alive=3_600)
        if number % 3:
            session.disconnect()
        clock.now += 1
    del session
    sessions.tick()
    gc.collect()
    connected = sessions.counts().connected
    assert connected <= 11
    assert connected == len(sessions._registry.keep_alive)
    there = [one.client_id for one in gc.get_objects() if isinstance(one, Session)]
    assert connected - 1 == sum(client_id.startswith("reconnecting") for client_id in there)
    assert len(sessions._registry.keep_alive._times) <= 3 * 11 + 64
    clock.now += 5_399 * SECOND
    kept.alive()
    clock.now += 2 * SECOND
    sessions.tick()
    assert kept.ended is None
    assert 1 == sessions.counts().connected
    clock.now += 5_400 * SECOND
    sessions.tick()
    assert kept.ended is Ended.KEEP_ALIVE


def test_counts(db: ts.Database, sessions: Sessions) -> None:
    """`Sessions.counts` totals connected and paused sessions, their subscriptions, and unfinished exchanges."""
    one, two = sessions.open("one", expiry_interval=None), sessions.open("two", expiry_interval=None)
    for topic_filter in ("a", "b"):
        one.subscribe(topic_filter)
    two.subscribe("a", 0)
    two.publish([ts.Message("a", b"1", "two", 2)], [7])
    sessions.deliver()
    two.pause()
    counts = sessions.counts()
    assert (2, 1, 3, 1, 1) == (
        counts.connected,
        counts.paused,
        counts.subscriptions,
        counts.in_flight,
        counts.awaiting_pubrel,
    )
    one.lost()
    two.lost()
    assert 0 == sessions.counts().connected
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        sessions.counts()
