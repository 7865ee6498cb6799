"""The locks of sessions: `Entrance` guards the state in memory, and `Claims` the sessions that a call is changing.

`Entrance` acquires the sessions' lock fairly, and runs callbacks after its release. Python's locks are not fair: a
thread that releases a lock can usually reacquire it before a waiting thread wakes. So a thread holds a second lock, the
queue, while it waits for the sessions' lock. Long work is done in steps, and acquires and releases the queue before
each step, so that a thread that waits there runs first. Callbacks of the program are not called under the lock, where
they would block all other calls. The same thread calls them after it has released the lock.

The sessions' lock is held for microseconds. It is released while an engine writes (`Entrance.released`), and meanwhile
a claim keeps other calls from the sessions that are being written. So one slow write holds up only calls for the same
sessions, and concurrent calls share an fsync of the write-ahead log (group commit).

A call takes all its claims at once, and waits for them without holding any, which rules out deadlocks.
Acknowledgements, and events recorded by a storing thread, need no claim.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable
from functools import partial
from itertools import repeat
from typing import Generic, Protocol, TypeVar

from topicstore.contract.errors import NestedCallError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import do_all, guarded

__all__ = [
    "Around",
    "Claims",
    "Entrance",
]

T = TypeVar("T")

_Call = tuple[str, Callable[[], object]]


class Around(Protocol):
    """Calls a function with a lock held, or with a lock released, and returns the function's result."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call ``work``."""


class _Thread(threading.local):
    """The nesting depth of the current thread's calls, and its callbacks to run after it has released the lock."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class Entrance:
    """Fair access to the sessions' lock. All methods are thread-safe."""

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self._queue = ProcessLock()
        """Held by a thread that waits for the lock. Work in steps acquires it only between steps."""
        self._thread = _Thread()

    def hold(self, work: Callable[[], T]) -> T:
        """Call ``work`` under the lock, then, after its release, the thread's callbacks; return the result of ``work``.

        Reentrant: a thread that holds the lock may call this again, for example in a signal handler or a plugin.
        """
        thread, lock, depth = self._thread, self._lock, self._thread.depth
        nested = lock.owned()

        def held() -> T:
            thread.depth = depth + 1
            if not nested:  # the queue is not for a nested call: a thread there may wait for this one
                with self._queue:
                    lock.acquire()
            return work()

        def leave() -> None:
            thread.depth = depth
            if not nested and lock.owned():
                lock.release()

        try:
            return guarded(held, leave)
        finally:
            self._call()

    def released(self, work: Callable[[], T]) -> T:
        """Release the lock, call ``work``, for example an engine write, and reacquire the lock; return the result.

        In a nested call the lock is kept, because the outer call of the thread may rely on it.
        """
        lock = self._lock
        if self._thread.depth != 1 or not lock.owned():
            return work()

        def free() -> T:
            lock.release()
            return work()

        return guarded(free, lock.retake)

    def pass_queue(self) -> None:
        """Wait until the thread in the queue has acquired the lock. Does nothing if this thread holds the lock."""
        if not self._lock.owned():
            with self._queue:
                pass

    def within(self, end: float | None, work: Callable[[bool], T]) -> T:
        """Wait for the lock until ``end``, a time of `time.monotonic`, and call ``work``; return its result.

        The argument of ``work`` is whether the lock is held.
        """
        lock = self._lock
        if lock.owned():
            return work(True)
        timeout = -1.0 if end is None else max(end - time.monotonic(), 0.0)

        def leave() -> None:
            if lock.owned():
                lock.release()

        return guarded(lambda: work(lock.acquire(timeout=timeout)), leave)

    def afterwards(self, what: str, call: Callable[[], object]) -> None:
        """Register a callback of the program, which this thread, the lock's holder, calls after releasing the lock.

        An error of the callback is reported as a `RuntimeWarning` that begins with ``what``, because the caller that
        ended another client's session can't handle it.
        """
        self._thread.calls.append((what, call))

    def _call(self) -> None:
        calls = self._thread.calls
        if calls and not self._thread.depth and not self._lock.owned():
            do_all([lambda: _shown(*calls.pop(0))] * len(calls), "failed")


def _shown(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as failure:  # noqa: BLE001 - reported below, because this thread's caller can't handle it
        told = f"{what} raised {type(failure).__name__}: {failure}"
        try:
            warnings.warn(told, RuntimeWarning, stacklevel=1)
        except RuntimeWarning:  # where warnings are errors, it is reported like an error that ends a thread
            threading.excepthook(
                threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, threading.current_thread()))
            )


R = TypeVar("R", bound=Hashable)


class Claims(Generic[R]):
    """The claims of one open database's sessions. All methods are thread-safe.

    A claim on a session covers its subscriptions and deliveries. An incoming exchange of QoS 2, identified by session
    and packet id, has a claim of its own. Calls for the same claim wait in the order of their arrival. A nested call
    (made within another call of the same thread, as by a signal handler or a plugin) uses the claims of its thread. It
    never waits for another thread, which might be waiting for this one; it raises `NestedCallError` instead.

    hide: called with the sessions that were claimed.
    show: called with the sessions whose claims were released; if a call is interrupted, perhaps without `hide` before.
    """

    def __init__(
        self,
        lock: ProcessLock,
        entrance: Entrance,
        hide: Callable[[Collection[R]], object],
        show: Callable[[Collection[R]], object],
    ) -> None:
        self._lock = lock
        self._entrance = entrance
        self._hide = hide
        self._show = show
        self._changed = threading.Condition(lock)
        """Notified when claims are released, and when a call stops waiting. Its lock guards the attributes below."""
        self._taken: dict[Hashable, int] = {}
        """The claimed sessions and exchanges, and the threads that hold the claims."""
        self._all: int | None = None
        """The thread that holds the claim on all sessions."""
        self._waiting: dict[int, set[Hashable] | None] = {}
        """By number of call, in the order of arrival, the claims for which it waits; None: all."""
        self._number = 0
        self._callers: set[int] = set()
        """The threads that hold claims or wait for some."""

    def entered(self) -> bool:
        """Return whether the calling thread holds claims or waits for some; then it can't close the sessions."""
        return threading.get_ident() in self._callers

    def of(self, sessions: Collection[R], work: Callable[[], T], exchanges: Collection[tuple[R, int]] = ()) -> T:
        """Call ``work`` under the lock, holding the claims of some sessions and exchanges; return its result.

        Without sessions and exchanges, only the lock is waited for.
        """
        keys: set[Hashable] = {*sessions, *exchanges}
        me, held = threading.get_ident(), self._lock.owned()

        def claimed() -> T:
            if not keys or self._nested(me, keys, held=held):
                return work()
            number = self._next()

            def take() -> T:
                self._callers.add(me)
                self._wait(number, keys)
                self._taken.update(dict.fromkeys(keys, me))
                self._hide(sessions)
                return work()

            return guarded(take, partial(self._release, number, me, sessions, exchanges))

        return self._entrance.hold(claimed)

    def all(self, work: Callable[[], T]) -> T:
        """Call ``work`` under the lock, holding the claim on all sessions; return its result.

        Waits until all other claims are released; later calls wait for this one.
        """
        me, held = threading.get_ident(), self._lock.owned()

        def claimed() -> T:
            if self._nested(me, None, held=held):
                return work()
            number = self._next()

            def take() -> T:
                self._callers.add(me)
                self._wait(number, None)
                self._all = me
                return work()

            return guarded(take, partial(self._release, number, me))

        return self._entrance.hold(claimed)

    def piece(self, work: Callable[[Callable[[R], bool]], T]) -> T:
        """Call ``work``, one step of long work, under the lock; return its result.

        Calls that already wait for the lock or for claims run before it. ``work`` is called with a function that claims
        a session for the rest of the step, and returns False if another call holds that claim.
        """
        me, held, mine = threading.get_ident(), self._lock.owned(), dict[R, None]()

        def claim(session: R) -> bool:
            if session not in self._taken:
                mine[session] = None
                self._taken[session] = me
                self._hide((session,))
            return session in mine

        def claimed() -> T:
            if self._nested(me, (), held=held):
                return work(lambda session: self._taken.get(session, me) == me)
            number = self._next()

            def take() -> T:
                self._callers.add(me)
                while self._all is not None or any(earlier < number for earlier in self._waiting):
                    self._wait_for_change()
                return work(claim)

            return guarded(take, partial(self._release, number, me, mine))

        self._entrance.pass_queue()
        return self._entrance.hold(claimed)

    def _nested(self, me: int, keys: Collection[Hashable] | None, *, held: bool) -> bool:
        """Return whether the call is nested in another call of its thread. Raises `NestedCallError`; see the class.

        held: whether the thread held the lock before the call.
        """
        if not held and me not in self._callers:
            return False
        taken = self._taken.values() if keys is None else map(self._taken.get, keys, repeat(me))
        if self._all not in (None, me) or any(owner != me for owner in taken):
            raise NestedCallError(
                "another thread's call is changing these sessions: a call within another one of the same thread, as a "
                "signal handler makes it, can't wait for that"
            )
        return True

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _wait(self, number: int, keys: set[Hashable] | None) -> None:
        """Wait until no call holds any of the claims, and no earlier call waits for one of them."""
        self._waiting[number] = keys
        while self._all is not None or self._has_any(keys) or self._earlier_wants_any(number, keys):
            self._wait_for_change()
        del self._waiting[number]

    def _wait_for_change(self) -> None:
        guarded(self._changed.wait, self._lock.retake)  # an interrupted `wait` may not have reacquired the lock

    def _has_any(self, keys: set[Hashable] | None) -> bool:
        return bool(self._taken) if keys is None else not self._taken.keys().isdisjoint(keys)

    def _earlier_wants_any(self, number: int, keys: set[Hashable] | None) -> bool:
        return any(
            earlier < number and (wanted is None or keys is None or not wanted.isdisjoint(keys))
            for earlier, wanted in self._waiting.items()
        )

    def _release(
        self, number: int, me: int, sessions: Collection[R] = (), exchanges: Collection[tuple[R, int]] = ()
    ) -> None:
        """Stop waiting, and release the claims that the thread has taken. Idempotent."""
        self._waiting.pop(number, None)
        mine = [session for session in sessions if self._taken.get(session) == me]
        self._show(mine)
        for key in (*mine, *exchanges):
            if self._taken.get(key) == me:
                del self._taken[key]
        if self._all == me:
            self._all = None
        self._callers.discard(me)
        if self._lock.owned():  # false in a forked child
            self._changed.notify_all()
