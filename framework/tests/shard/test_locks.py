"""`FairLock` is fair and reentrant."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
from topicstore.runtime.locks import FairLock, holding, owned
from topicstore_conformance.faults.threads import PATIENCE, begin, held_elsewhere, wait_until


def test_a_waiting_thread_is_next() -> None:
    """A thread that releases the lock and acquires it again gets it after a waiting thread."""
    lock = FairLock()
    order: list[str] = []

    def take(name: str) -> None:
        with lock:
            order.append(name)

    for _ in range(20):
        with lock:
            waiting = begin(lambda: take("waiting"))
            wait_until(lambda: held_elsewhere(lock._turn), "the thread is the next in line")
        take("again")
        waiting.result(PATIENCE)
    assert order == ["waiting", "again"] * 20


def test_a_holder_may_take_it_again() -> None:
    """Other threads wait until the lock was released as often as it was acquired, directly or by a condition."""
    lock, moved, entered = FairLock(), [], threading.Event()
    changed = threading.Condition(lock)

    def wait() -> None:
        with lock, changed:
            entered.set()
            assert changed.wait_for(lambda: moved, PATIENCE)
            moved.append("seen")

    def move() -> None:
        with lock, lock:
            moved.append("moved")
            changed.notify_all()

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(wait)
        assert entered.wait(PATIENCE)
        holding([lock], move)
        waiting.result(PATIENCE)
        assert moved == ["moved", "seen"]
        taken = threads.submit(lock.acquire)
        taken.result(PATIENCE)  # the lock is completely released


def test_only_its_holder_releases_it() -> None:
    """A thread that doesn't hold the lock can't release it."""
    lock = FairLock()
    with lock, lock, ThreadPoolExecutor() as threads, pytest.raises(RuntimeError):
        threads.submit(lock.release).result(PATIENCE)
    with pytest.raises(RuntimeError):
        lock.release()


class Interrupted(KeyboardInterrupt):
    """The exception that a test raises as an interruption at a chosen step."""


def interrupted_at(step: int, work: Callable[[], None]) -> bool:
    """Call a function, and interrupt it at a step; return whether the step was reached.

    Steps are the points where Python runs signal handlers: the beginning of a function and the return from C code.
    Resuming a generator is no such point, because an exception raised there would skip its ``finally``.
    """

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal step
        generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        step -= event == "c_return" or (event == "call" and not generator)
        if step == 0:
            raise Interrupted

    try:
        sys.setprofile(count)
        work()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("how", ["once", "again", "several"])
def test_an_interrupt_leaves_no_lock_taken(how: str) -> None:
    """An interrupt at any step of acquiring, holding or releasing leaves no lock acquired."""
    for step in itertools.count(1):
        locks = [FairLock() for _ in range(4)]
        came = interrupted_at(step, lambda locks=locks: take(how, locks))  # type: ignore[misc]
        assert not [lock for lock in locks if owned(lock) or owned(lock._turn)]
        if not came:
            break
    assert step > 5


def take(how: str, locks: list[FairLock]) -> None:
    if how == "several":
        holding(locks, lambda: None)
    elif how == "once":
        with locks[0]:
            pass
    else:
        with locks[0], locks[0]:
            pass
