"""The locks of sessions: `SessionMutex` guards the state in memory; `SessionLocks` locks the stored state by session.

The mutex is held for microseconds. It is released while an engine writes (`SessionMutex.released`); meanwhile the locks
of the sessions that are being written keep other calls from them. So one slow write holds up only calls for the same
sessions, and concurrent calls share an fsync of the write-ahead log (group commit).

A call acquires all its locks at once, and waits for them without holding any, which rules out deadlocks.
Acknowledgements, and events recorded by a storing thread, need no lock.

Callbacks of the program are not called under the mutex, where they would block all other calls. The same thread calls
them after it has released the mutex.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable
from functools import partial
from itertools import repeat
from typing import Generic, NoReturn, Protocol, TypeVar

from topicstore.contract.errors import DatabaseClosedError, NestedCallError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import do_all, guarded
from topicstore.runtime.locks import FairLock, owned

__all__ = ["Around", "SessionLocks", "SessionMutex"]

T = TypeVar("T")

_Call = tuple[str, Callable[[], object]]


class Around(Protocol):
    """Calls a function with a lock held, or with a lock released, and returns the function's result."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call ``work``."""


class _Thread(threading.local):
    """The nesting depth of the current thread's calls, and its callbacks to run after it has released the mutex."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class SessionMutex(FairLock):  # type: ignore[misc]  # RLock isn't final at run time
    """The lock of one open database's sessions: fair, with time limits, and with callbacks after its release.

    Long work is done in steps and acquires the mutex for each of them, so that a waiting thread runs in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = _Thread()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # type: ignore[override]
        """Acquire the mutex, and return True; return False after ``timeout`` seconds, if that isn't negative.

        A wait with a time limit has no place in the queue of waiting threads.
        """
        if not blocking or timeout >= 0:
            return ProcessLock.acquire(self, blocking, timeout)
        super().acquire()
        return True

    __enter__ = acquire  # type: ignore[assignment]

    def hold(self, work: Callable[[], T]) -> T:
        """Call ``work`` under the mutex, and then, after its release, the callbacks of this thread.

        Return the result of ``work``. Reentrant: a thread that holds the mutex may call this again, for example in a
        signal handler or a plugin.
        """
        thread, depth, nested = self._thread, self._thread.depth, owned(self)

        def held() -> T:
            thread.depth = depth + 1
            if not nested:
                self.acquire()
            return work()

        def leave() -> None:
            thread.depth = depth
            if not nested and owned(self):
                self.release()

        try:
            return guarded(held, leave)
        finally:
            if thread.calls and not thread.depth and not owned(self):
                do_all([lambda: _warning(*thread.calls.pop(0))] * len(thread.calls), "failed")

    def released(self, work: Callable[[], T]) -> T:
        """Release the mutex, call ``work``, for example an engine write, and reacquire it; return the result.

        In a nested call the mutex stays held, because the outer call of the thread may rely on it.
        """
        if self._thread.depth != 1 or not owned(self):
            return work()

        def free() -> T:
            self.release()
            return work()

        return guarded(free, self.retake)

    def within(self, end: float | None, work: Callable[[bool], T]) -> T:
        """Wait for the mutex until ``end``, a time of `time.monotonic`, and call ``work``; return its result.

        The argument of ``work`` is whether the mutex is held.
        """
        if owned(self):
            return work(True)

        def leave() -> None:
            if owned(self):
                self.release()

        if end is None:
            return guarded(lambda: work(self.acquire()), leave)
        return guarded(lambda: work(self.acquire(timeout=max(end - time.monotonic(), 0.0))), leave)

    def after_release(self, what: str, call: Callable[[], object]) -> None:
        """Register a callback of the program, which this thread, the holder, calls after releasing the mutex.

        An error of the callback is reported as a `RuntimeWarning` that begins with ``what``, because the caller that
        ended another client's session can't handle it.
        """
        self._thread.calls.append((what, call))

    def leave_to_parent(self) -> None:
        """Make the mutex raise when acquired, in this process and its children."""
        self.__class__ = _InheritedMutex


class _InheritedMutex(SessionMutex):  # type: ignore[misc]
    """A mutex that was inherited from the parent process. A thread that held it at the fork can release it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise DatabaseClosedError("the database was opened by another process; a fork can't use it")

    __enter__ = acquire

    def retake(self) -> None:
        if not owned(self):
            self.acquire()


def _warning(what: str, call: Callable[[], object]) -> None:
    """Call a callback, and report its error as a warning."""
    try:
        call()
    except Exception as failure:  # noqa: BLE001 - reported below, because this thread's caller can't handle it
        text = f"{what} raised {type(failure).__name__}: {failure}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=1)
        except RuntimeWarning:  # if warnings are errors, report the failure as an error that ends a thread
            threading.excepthook(
                threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, threading.current_thread()))
            )


R = TypeVar("R", bound=Hashable)
R_contra = TypeVar("R_contra", bound=Hashable, contravariant=True)


class ReadyQueue(Protocol[R_contra]):
    """The queue of the sessions that have packets to deliver."""

    def hide_locked(self, sessions: Collection[R_contra]) -> None:
        """Leave locked sessions out of the queue."""

    def show_locked(self, sessions: Collection[R_contra]) -> None:
        """Queue sessions again whose locks were released, even if an interruption prevented `hide_locked`."""


class SessionLocks(Generic[R]):
    """The lock table of one open database's sessions. All methods are thread-safe.

    The lock of a session covers its subscriptions and deliveries. An incoming exchange of QoS 2, identified by session
    and packet id, has a lock of its own. Calls for the same lock get it in the order of their arrival (FIFO).

    A nested call (made within another call of the same thread, as by a signal handler or a plugin) uses the locks of
    its thread. It never waits for another thread, which might be waiting for this one; it raises `NestedCallError`
    instead.
    """

    def __init__(self, mutex: SessionMutex, ready: ReadyQueue[R]) -> None:
        self._mutex = mutex
        self._ready = ready
        self._changed = threading.Condition(mutex)
        """Notified when locks are released, and when a call stops waiting. The mutex guards the attributes below."""
        self._owners: dict[Hashable, int] = {}
        """The locked sessions and exchanges, and the threads that hold the locks."""
        self._owner_of_all: int | None = None
        """The thread that holds the lock of all sessions."""
        self._waiting: dict[int, set[Hashable] | None] = {}
        """By number of call, in the order of arrival, the locks for which it waits; None: all."""
        self._number = 0
        self._callers: set[int] = set()
        """The threads that hold locks or wait for some."""

    def entered(self) -> bool:
        """Return whether the calling thread holds locks or waits for some; then it can't close the sessions."""
        return threading.get_ident() in self._callers

    def hold(self, sessions: Collection[R], work: Callable[[], T], exchanges: Collection[tuple[R, int]] = ()) -> T:
        """Call ``work`` under the mutex, holding the locks of some sessions and exchanges; return its result.

        Without sessions and exchanges, only the mutex is waited for.
        """
        keys: set[Hashable] = {*sessions, *exchanges}
        return self._hold(keys, sessions, work) if keys else self._mutex.hold(work)

    def hold_all(self, work: Callable[[], T]) -> T:
        """Call ``work`` under the mutex, holding the lock of all sessions; return its result.

        Waits until all other locks are released; later calls wait for this one.
        """
        return self._hold(None, (), work)

    def _hold(self, keys: set[Hashable] | None, sessions: Collection[R], work: Callable[[], T]) -> T:
        """Call ``work`` with these locks held, of which ``sessions`` are those of sessions; None: the lock of all."""
        me, held = threading.get_ident(), owned(self._mutex)

        def locked() -> T:
            if self._nested(me, keys, held=held):
                return work()
            self._number += 1
            number = self._number

            def acquire() -> T:
                self._callers.add(me)
                self._waiting[number] = keys
                while self._must_wait(number, keys):
                    self._wait_for_change()
                del self._waiting[number]
                if keys is None:
                    self._owner_of_all = me
                else:
                    self._owners.update(dict.fromkeys(keys, me))
                    self._ready.hide_locked(sessions)
                return work()

            return guarded(acquire, partial(self._release, number, me, keys or (), sessions))

        return self._mutex.hold(locked)

    def step(self, work: Callable[[Callable[[R], bool]], T]) -> T:
        """Call ``work``, one step of long work, under the mutex; return its result.

        Calls that already wait for the mutex or for locks run before it. ``work`` is called with a function that locks
        a session for the rest of the step, and returns False if another call holds that lock.
        """
        me, held, mine = threading.get_ident(), owned(self._mutex), dict[R, None]()

        def lock(session: R) -> bool:
            if session not in self._owners:
                mine[session] = None
                self._owners[session] = me
                self._ready.hide_locked((session,))
            return session in mine

        def locked() -> T:
            if self._nested(me, (), held=held):
                return work(lambda session: self._owners.get(session, me) == me)
            self._number += 1
            number = self._number

            def acquire() -> T:
                self._callers.add(me)
                while self._owner_of_all is not None or (self._waiting and min(self._waiting) < number):
                    self._wait_for_change()
                return work(lock)

            return guarded(acquire, partial(self._release, number, me, mine, mine))

        return self._mutex.hold(locked)

    def _nested(self, me: int, keys: Collection[Hashable] | None, *, held: bool) -> bool:
        """Return whether the call is nested in another call of its thread. Raises `NestedCallError`; see the class.

        held: whether the thread held the mutex before the call.
        """
        if not held and me not in self._callers:
            return False
        taken = self._owners.values() if keys is None else map(self._owners.get, keys, repeat(me))
        if self._owner_of_all not in (None, me) or any(owner != me for owner in taken):
            raise NestedCallError(
                "another thread's call is changing these sessions: a call within another one of the same thread, as a "
                "signal handler makes it, can't wait for that"
            )
        return True

    def _must_wait(self, number: int, keys: set[Hashable] | None) -> bool:
        """Return whether another call holds one of the locks, or an earlier call waits for one of them."""
        if self._owner_of_all is not None:
            return True
        if self._owners and (keys is None or not self._owners.keys().isdisjoint(keys)):
            return True
        if len(self._waiting) == 1:
            return False
        return any(
            earlier < number and (wanted is None or keys is None or not wanted.isdisjoint(keys))
            for earlier, wanted in self._waiting.items()
        )

    def _wait_for_change(self) -> None:
        guarded(self._changed.wait, self._mutex.retake)  # an interrupted `wait` may not have reacquired the mutex

    def _release(self, number: int, me: int, keys: Collection[Hashable], sessions: Collection[R]) -> None:
        """Stop waiting, and release the locks that the thread holds. Idempotent."""
        self._waiting.pop(number, None)
        self._ready.show_locked([session for session in sessions if self._owners.get(session) == me])
        for key in keys:
            if self._owners.get(key) == me:
                del self._owners[key]
        if self._owner_of_all == me:
            self._owner_of_all = None
        self._callers.discard(me)
        if owned(self._mutex):  # a forked child doesn't own it
            self._changed.notify_all()
