"""`Claims`: leases of sessions, which a call holds from reading their state until its changes are applied.

The sessions' lock guards what is in memory for microseconds. It is given up while an engine writes, and a claim keeps
other calls from what that write is about. So one slow write holds up only calls for the same sessions, and calls of
different threads share the flushes of the commit log.

A call takes all its claims at once, and waits for them without holding any. So no two calls wait for each other.
Acknowledgements, and what a storing thread notes, need no claim.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, TypeVar

from topicstore.contract.forking import ProcessLock

from .entrance import Entrance

__all__ = ["Claims"]

R = TypeVar("R", bound=Hashable)


class Claims(Generic[R]):
    """The claims of one open database's sessions. All methods may be called from any thread.

    A session is claimed for its subscriptions and deliveries, and an incoming exchange of QoS 2, which is a session and
    a packet id, by itself. A call within another one of the same thread, as a signal handler or a plugin makes it,
    waits for no claim: the holder might wait for this thread.

    hide: called with the sessions that were claimed.
    show: called with the sessions whose claims were released.
    """

    def __init__(
        self,
        lock: ProcessLock,
        entrance: Entrance,
        hide: Callable[[Collection[R]], object],
        show: Callable[[Collection[R]], object],
    ) -> None:
        self._entrance = entrance
        self._hide = hide
        self._show = show
        self._changed = threading.Condition(lock)
        """Notified when claims are released, and when a call waits for claims no longer. Its lock guards the rest."""
        self._taken: set[Hashable] = set()
        """The sessions and the exchanges that are claimed."""
        self._all = False
        """Whether a call has claimed everything."""
        self._waiting: dict[int, bool] = {}
        """By number, the calls that wait for claims, and whether they wait for all. They are in the order they came."""
        self._number = 0

    @contextlib.contextmanager
    def of(self, sessions: Collection[R], exchanges: Collection[tuple[R, int]] = ()) -> Iterator[None]:
        """Hold the lock and the claims of some sessions and exchanges; for none it waits for no other call's."""
        nested = self._entrance.depth > 0
        keys: set[Hashable] = {*sessions, *exchanges}
        with self._entrance.enter():
            if nested or not keys:
                yield
                return
            with self._in_line(every=False) as number:
                while self._all or self._all_come_first(number) or not self._taken.isdisjoint(keys):
                    self._changed.wait()
                self._taken |= keys
            self._hide(sessions)
            try:
                yield
            finally:
                self._release(keys)
                self._show(sessions)

    @contextlib.contextmanager
    def all(self) -> Iterator[None]:
        """Hold the lock and all claims, after those who have some. Later claims wait for it."""
        nested = self._entrance.depth > 0
        with self._entrance.enter():
            if nested:
                yield
                return
            with self._in_line(every=True) as number:
                while self._all or self._taken or self._all_come_first(number):
                    self._changed.wait()
                self._all = True
            try:
                yield
            finally:
                self._all = False
                self._changed.notify_all()

    @contextlib.contextmanager
    def piece(self) -> Iterator[Callable[[R], bool]]:
        """Hold the lock for one piece of long work, after those who wait at this moment for the lock or for claims.

        Yields what claims a session for the rest of the piece, and returns False if another call has it.
        """
        nested = self._entrance.depth > 0
        self._entrance.pass_queue()
        with self._entrance.enter():
            before, mine = self._number, dict[R, None]()

            def claim(session: R) -> bool:
                if nested or session in mine:
                    return True
                if session in self._taken:
                    return False
                self._taken.add(session)
                mine[session] = None
                self._hide((session,))
                return True

            while not nested and (self._all or any(number < before for number in self._waiting)):
                self._changed.wait()
            try:
                yield claim
            finally:
                self._release(mine)
                self._show(mine)

    @contextlib.contextmanager
    def _in_line(self, *, every: bool) -> Iterator[int]:
        number = self._number
        self._number += 1
        self._waiting[number] = every
        try:
            yield number
        finally:
            del self._waiting[number]
            self._changed.notify_all()

    def _all_come_first(self, number: int) -> bool:
        """Return whether a call that came earlier waits for all claims."""
        return any(every and earlier < number for earlier, every in self._waiting.items())

    def _release(self, keys: Collection[Hashable]) -> None:
        self._taken.difference_update(keys)
        self._changed.notify_all()
