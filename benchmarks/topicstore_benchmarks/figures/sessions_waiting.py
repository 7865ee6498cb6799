"""How long somebody waits: a message for its delivery, and an event loop for a thread that delivers."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import topicstore as ts

from .session_clients import acknowledge, database, deliver_all, messages_of, subscribers

__all__ = ["RATE", "loop_waits", "session_latency", "subscriber_latency"]

RATE = 1_000
"""Messages a second while latency is measured."""
_BATCH = 1_000
_SWITCH = 1e-4
"""Seconds after which a thread that computes lets another one compute, while an event loop's waits are measured."""


def subscriber_latency(seconds: float) -> list[float]:
    """Return seconds from the call of ``store`` to a subscriber that has the message."""
    found: list[float] = []
    with database() as db, db.subscribe("live/#") as subscription:
        thread = threading.Thread(target=_paced(db.store, seconds))
        thread.start()
        while len(found) < int(seconds * RATE):
            messages = subscription.fetch().messages
            now = time.perf_counter()
            found += [now - float(message.payload) for message in messages]
        thread.join()
    return found


def session_latency(seconds: float) -> list[float]:
    """Return seconds from the call of ``publish`` to a waiting session's delivery with a committed packet id."""
    found: list[float] = []
    with database() as db:
        session = db.sessions.open("client", expiry_interval=None)
        session.subscribe("live/#", qos=1)
        thread = threading.Thread(target=_paced(db.publish, seconds))
        thread.start()
        while len(found) < int(seconds * RATE):
            db.sessions.wait(1)
            items = [item for item in session.deliver() if isinstance(item, ts.sessions.Publish)]
            now = time.perf_counter()
            found += [now - float(item.message.payload) for item in items]
            acknowledge(session, items)
        thread.join()
    return found


def _paced(publish: Callable[[list[ts.Message]], object], seconds: float) -> Callable[[], None]:
    """Return a function that publishes `RATE` messages a second, one at a time, each with the time of the call."""

    def run() -> None:
        begun = time.perf_counter()
        for number in range(int(seconds * RATE)):
            time.sleep(max(begun + number / RATE - time.perf_counter(), 0))
            publish([ts.Message("live/topic", repr(time.perf_counter()).encode(), "publisher", 1)])

    return run


def loop_waits(followers: int, rounds: int) -> dict[str, list[float]]:
    """Return the longest milliseconds of each round in ``alive``, ``puback`` and ``connected``, by the call's name.

    Meanwhile another thread delivers a batch to many followers. ``ended`` reads one attribute and waits for nothing:
    its time is what the machine adds. What Python adds to every call is kept out of it: no garbage is collected, and a
    thread that wants to compute waits for one that does for 0.1 ms instead of 5.
    """
    found: dict[str, list[float]] = {}
    with database() as db, _undisturbed():
        subscribers(db, followers, lambda _: "hot/topic")
        client = db.sessions.open("looked-at", expiry_interval=None)
        client.subscribe("looked-at", 1)
        for _ in range(rounds + 1):
            db.publish(messages_of(lambda _: "looked-at", _BATCH))
            unacknowledged = iter([item.packet_id for _, items in deliver_all(db, _BATCH) for item in items])
            db.publish(messages_of(lambda _: "hot/topic", _BATCH))
            calls: dict[str, Callable[[], object]] = {
                "alive": client.alive,
                "puback": lambda ids=unacknowledged: client.puback(next(ids, 1)),  # type: ignore[misc]
                "connected": lambda: db.sessions.connected("looked-at"),
                "ended": lambda: client.ended,
            }
            gc.collect()
            for name, longest in _longest_beside(db, followers * _BATCH, calls).items():
                found.setdefault(name, []).append(longest * 1e3)
            client.puback(*unacknowledged)
    return {name: values[1:] for name, values in found.items()}


def _longest_beside(db: ts.Database, deliveries: int, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the longest seconds of each call while a thread delivers everything to everybody."""
    delivered: list[object] = []

    def deliver() -> None:
        for session, items in deliver_all(db, deliveries):
            acknowledge(session, items)
        delivered.append(True)

    longest = dict.fromkeys(calls, 0.0)
    thread = threading.Thread(target=deliver)
    thread.start()
    delivering = True
    while delivering:
        # Every call is timed once even where the thread has delivered everything before it could be.
        delivering = thread.is_alive()
        for name, call in calls.items():
            time.sleep(_SWITCH)
            started = time.perf_counter()
            call()
            longest[name] = max(longest[name], time.perf_counter() - started)
    thread.join()
    if not delivered:
        raise AssertionError("the thread that delivers failed")
    return longest


@contextmanager
def _undisturbed() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(before)
