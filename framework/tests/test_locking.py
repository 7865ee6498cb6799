"""Nobody starves behind a thread that takes a lock again and again; a lock may be taken several times."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from topicstore.shard.locks import FairLock, held, owned

PATIENCE = 20.0


def test_who_waits_is_next() -> None:
    """A thread that gives the lock back and takes it at once gets it after the one that waited."""
    lock, done = FairLock(), threading.Event()
    rounds = waited = 0

    def hog() -> None:
        nonlocal rounds
        while not done.is_set():
            with lock:
                rounds += 1

    with ThreadPoolExecutor() as threads:
        busy = threads.submit(hog)
        try:
            for _ in range(100):
                with lock:
                    waited += 1
        finally:
            done.set()
        busy.result(PATIENCE)
    assert waited == 100
    assert rounds


def test_a_holder_may_take_it_again() -> None:
    """Others wait until it is given back as often as it was taken, in a ``held``, a wait, or a ``with``."""
    lock, moved, entered = FairLock(), [], threading.Event()
    changed = threading.Condition(lock)

    def wait() -> None:
        with lock, changed:
            entered.set()
            assert changed.wait_for(lambda: moved, PATIENCE)
            moved.append("seen")

    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(wait)
        assert entered.wait(PATIENCE)
        with held([lock]), lock, lock:
            moved.append("moved")
            changed.notify_all()
        waiting.result(PATIENCE)
        assert moved == ["moved", "seen"]
        taken = threads.submit(lock.acquire)
        taken.result(PATIENCE)  # all of it was given back


def test_only_its_holder_gives_it_back() -> None:
    """A thread that doesn't hold it can't release it, while another holds it twice."""
    lock = FairLock()
    with lock, lock, ThreadPoolExecutor() as threads, pytest.raises(RuntimeError):
        threads.submit(lock.release).result(PATIENCE)
    with pytest.raises(RuntimeError):
        lock.release()


class Interrupted(KeyboardInterrupt):
    """As Ctrl-C raises, in the middle of anything."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """Timers of the system raise `Interrupted`."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("how", ["once", "again", "several"])
@pytest.mark.usefixtures("alarm")
def test_an_interrupt_leaves_no_lock_taken(how: str) -> None:
    """Wherever it comes, in taking, holding or giving back."""
    for number in range(200):
        locks = [FairLock() for _ in range(4)]
        with pytest.raises(Interrupted):
            _take_until(0.001 + number * 1e-6, how, locks)
        assert not [lock for lock in locks if owned(lock)]


def _take_until(seconds: float, how: str, locks: list[FairLock]) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        if how == "several":
            with held(locks):
                pass
        else:
            with locks[0]:
                if how == "again":
                    with locks[0]:
                        pass
