"""`Claims`: leases of sessions, which a call holds from reading their state until its changes are applied.

The sessions' lock guards what is in memory for microseconds. It is given up while an engine writes, and a claim keeps
other calls from what that write is about. So one slow write holds up only calls for the same sessions, and calls of
different threads share the flushes of the commit log.

A call takes all its claims at once, and waits for them without holding any. So no two calls wait for each other.
Acknowledgements, and what a storing thread notes, need no claim.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from functools import partial
from itertools import repeat
from typing import Generic, TypeVar

from topicstore.contract.errors import NestedCallError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import guarded

from .entrance import Entrance

__all__ = ["Claims"]

R = TypeVar("R", bound=Hashable)
T = TypeVar("T")


class Claims(Generic[R]):
    """The claims of one open database's sessions. All methods may be called from any thread.

    A session is claimed for its subscriptions and deliveries, and an incoming exchange of QoS 2, which is a session and
    a packet id, by itself. Calls that want the same wait in the order they came. A call within another one of the same
    thread, as a signal handler or a plugin makes it, uses the claims of that thread, and waits for no other: the holder
    might wait for this thread. It raises `NestedCallError` if another thread has what it claims.

    hide: called with the sessions that were claimed.
    show: called with the sessions whose claims were released, or which the call that claims them did not come to hide.
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
        """Notified when claims are released, and when a call waits for claims no longer. Its lock guards the rest."""
        self._taken: dict[Hashable, int] = {}
        """The sessions and the exchanges that are claimed, and the threads that have them."""
        self._all: int | None = None
        """The thread that has claimed everything."""
        self._waiting: dict[int, set[Hashable] | None] = {}
        """By number, what the calls wait for; None: all. They are in the order they came."""
        self._number = 0
        self._callers: set[int] = set()
        """The threads that have claims or wait for some."""

    def entered(self) -> bool:
        """Return whether this thread has claims or waits for some: that call must end before sessions are closed."""
        return threading.get_ident() in self._callers

    def of(self, sessions: Collection[R], work: Callable[[], T], exchanges: Collection[tuple[R, int]] = ()) -> T:
        """Return what ``work`` returns under the lock, with the claims of some sessions and exchanges.

        For none it waits for no other call's.
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
        """Return what ``work`` returns under the lock, with all claims, after those who have some.

        Later claims wait for it.
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
        """Return what ``work``, one piece of long work, returns under the lock.

        It comes after those who wait at this moment for the lock or for claims. ``work`` is called with what claims a
        session for the rest of the piece, and returns False if another call has it.
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
        """Return whether the call is within another one of its thread. Raises `NestedCallError`; see the class.

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
        """Wait until no call has any of the claims, and none that came earlier waits for any."""
        self._waiting[number] = keys
        while self._all is not None or self._has_any(keys) or self._earlier_wants_any(number, keys):
            self._wait_for_change()
        del self._waiting[number]

    def _wait_for_change(self) -> None:
        guarded(self._changed.wait, self._lock.retake)  # an interrupted `wait` may not have taken the lock again

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
        """Wait no longer, and release the claims of a thread, as far as it came to take them. May be repeated."""
        self._waiting.pop(number, None)
        mine = [session for session in sessions if self._taken.get(session) == me]
        self._show(mine)
        for key in (*mine, *exchanges):
            if self._taken.get(key) == me:
                del self._taken[key]
        if self._all == me:
            self._all = None
        self._callers.discard(me)
        if self._lock.owned():  # it isn't in a forked child
            self._changed.notify_all()
