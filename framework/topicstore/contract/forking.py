"""Forked children: a child doesn't use the objects that its parent has open. Also the locks that refuse it.

A child of ``os.fork`` has copies of all objects and none of the threads. So in the child inherited objects raise
`DatabaseClosedError`, and none of them is closed: that would wait for threads that the child lacks, or write into files
that the parent continues to use. An object that must know of a fork registers with `remember`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import ref

from .errors import DatabaseClosedError, ForkedProcessError

__all__ = ["LibraryThreads", "ProcessLock", "holds_lock", "leak", "remember"]

if TYPE_CHECKING:
    from threading import _RLock as RLock
else:
    RLock = type(threading.RLock())


class _Inherited(Protocol):
    def leave_to_parent(self) -> None: ...


_remembered: set[ref[_Inherited]] = set()
"""The registered objects. It needs no lock: a set is added to, copied and taken from in one step."""


def remember(inherited: _Inherited) -> None:
    """Register an object: its ``leave_to_parent`` is called first in every process that is forked from now on."""
    _remembered.add(ref(inherited, _remembered.discard))


def _all_remembered() -> list[_Inherited]:
    return [inherited for reference in list(_remembered) if (inherited := reference()) is not None]


def leak(*objects: object) -> None:
    """Keep objects from ever being freed, even at the end of the process."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _leave_to_parent() -> None:
    with contextlib.ExitStack() as left:  # calls each, even if another one raises
        for inherited in _all_remembered():
            left.callback(inherited.leave_to_parent)


os.register_at_fork(after_in_child=_leave_to_parent)


class ProcessLock(RLock):  # type: ignore[misc]  # RLock isn't final at run time
    """A reentrant lock that only the process that made it can take. In a forked child it raises `DatabaseClosedError`.

    There it may be held forever, by a thread that the child lacks. It costs no more than `threading.RLock`: in a
    child the class of inherited locks is replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        remember(self)

    def owned(self) -> bool:
        """Return whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # as threading.Condition does

    def retake(self) -> None:
        """Take the lock, unless this thread holds it, and let Ctrl-C wait until that is done."""
        if not self.owned():
            self._acquire_restore((1, threading.get_ident()))  # type: ignore[attr-defined]  # as threading.Condition does

    def leave_to_parent(self) -> None:
        """Make the lock refuse to be taken, in this process and its children."""
        self.__class__ = _InheritedLock


class _InheritedLock(ProcessLock):  # type: ignore[misc]
    """A lock that was inherited from the parent process. A thread that held it at the fork can release it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise DatabaseClosedError("the database was opened by another process; a fork can't use it")

    __enter__ = acquire

    def retake(self) -> None:
        if not self.owned():
            self.acquire()


def holds_lock() -> bool:
    """Return whether this thread holds a `ProcessLock`, and so must not wait for other threads that need the lock.

    A signal handler or a destructor may find itself in that position, because it runs within the call that it
    interrupts.
    """
    return any(isinstance(lock, ProcessLock) and lock.owned() for lock in _all_remembered())


def _end_without_libraries() -> None:
    """Make this process end, with its exit status, before the inherited libraries run their exit handlers.

    By then Python has finalized, and the buffers of C's streams are written. Handlers that were registered with C's
    ``atexit`` before the fork don't run. Only glibc has ``on_exit``; on other systems, end such a child with
    `os._exit`.
    """
    c = ctypes.CDLL(None)
    if hasattr(c, "on_exit"):
        for last_first in (c["_exit"], c["fcloseall"]):  # each is called with the exit status
            c.on_exit(last_first, None)


class LibraryThreads:
    """The threads that an engine's library starts once for the whole process, and that a forked child lacks.

    In the child the library would wait for them forever, even with databases of the child's own. Each library has one
    such object, a constant of a module, and the backend calls its methods before it uses the library.

    joined_at_exit: whether the library joins the threads when the process ends, where a child would wait forever.
    """

    def __init__(self, library: str, *, joined_at_exit: bool = False) -> None:
        self._library = library
        self._joined_at_exit = joined_at_exit
        self._begun = False
        self._lacking = False
        remember(self)

    def check(self) -> None:
        """Raise `ForkedProcessError` in a process that was forked after the library was used."""
        if self._lacking:
            raise ForkedProcessError(
                f"{self._library} was in use when this process was forked, and can't be used here without the threads "
                'that it left behind: begin the process with multiprocessing.get_context("spawn") or '
                '"forkserver", or fork before a database is opened'
            )

    def begin(self) -> None:
        """Call `check`, and record that the library is used from now on."""
        self.check()
        self._begun = True

    def leave_to_parent(self) -> None:
        """Record, in a forked child, that the threads don't exist there."""
        if self._begun and not self._lacking and self._joined_at_exit:
            _end_without_libraries()
        self._lacking = self._begun
