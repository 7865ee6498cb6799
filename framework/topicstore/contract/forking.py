"""Protection of forked children from the databases that their parent has open.

A child of ``os.fork`` has copies of all objects, but none of the threads. In the child, inherited objects therefore
raise `DatabaseClosedError`. They are never closed there: closing would wait for threads that the child lacks, or write
into files that the parent continues to use. An object that must be notified of forks registers with `remember`.
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
"""Weak references to the registered objects. No lock is needed, because set operations are atomic in CPython."""


def remember(inherited: _Inherited) -> None:
    """Register an object by a weak reference; its ``leave_to_parent`` is called at the start of every forked child."""
    _remembered.add(ref(inherited, _remembered.discard))


def _all_remembered() -> list[_Inherited]:
    return [inherited for reference in list(_remembered) if (inherited := reference()) is not None]


def leak(*objects: object) -> None:
    """Keep objects from ever being freed, even at the end of the process."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _leave_to_parent() -> None:
    with contextlib.ExitStack() as left:  # so that all callbacks run, even if one raises
        for inherited in _all_remembered():
            left.callback(inherited.leave_to_parent)


os.register_at_fork(after_in_child=_leave_to_parent)


class ProcessLock(RLock):  # type: ignore[misc]  # RLock isn't final at run time
    """A reentrant lock that raises `DatabaseClosedError` when a forked child tries to acquire it.

    In the child it may be held forever, by a thread that the child lacks. It costs no more than `threading.RLock`,
    because the class of inherited locks is replaced in the child.
    """

    def __init__(self) -> None:
        super().__init__()
        remember(self)

    def owned(self) -> bool:
        """Return whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # as threading.Condition does

    def retake(self) -> None:
        """Acquire the lock, unless this thread holds it; Ctrl-C can't interrupt the wait."""
        if not self._is_owned():  # type: ignore[attr-defined]
            self._acquire_restore((1, threading.get_ident()))  # type: ignore[attr-defined]  # as threading.Condition does

    def leave_to_parent(self) -> None:
        """Make the lock raise when acquired, in this process and its children."""
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

    This is possible in a signal handler or a destructor, because it runs inside the call that it interrupts.
    """
    return any(isinstance(lock, ProcessLock) and lock.owned() for lock in _all_remembered())


def _end_without_libraries() -> None:
    """Register exit handlers that end this process before the exit handlers of inherited libraries run.

    Python has been finalized by then, the buffers of C's streams are flushed, and the exit status is kept. Handlers
    registered with C's ``atexit`` before the fork don't run. Only glibc has ``on_exit``; on other systems, such a child
    must end with `os._exit`.
    """
    c = ctypes.CDLL(None)
    if hasattr(c, "on_exit"):
        for last_first in (c["_exit"], c["fcloseall"]):  # libc calls the last one first, each with the exit status
            c.on_exit(last_first, None)


class LibraryThreads:
    """A guard for an engine's library that starts threads for the whole process, which a forked child lacks.

    In the child the library would wait for them forever, even for databases that the child opens. Each library has one
    guard, a module-level constant, and the backend calls its methods before it uses the library.

    joined_at_exit: whether the library joins the threads at exit, where a child would wait forever.
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
        """Call `check`, and record that this process uses the library."""
        self.check()
        self._begun = True

    def leave_to_parent(self) -> None:
        """Record, in a forked child, that the threads don't exist there."""
        if self._begun and not self._lacking and self._joined_at_exit:
            _end_without_libraries()
        self._lacking = self._begun
