"""Forked children: what a process has open stays its own.

A child of ``os.fork`` has copies of all objects and none of the threads. So in it what was inherited is refused with
`DatabaseClosedError`, and nothing of it is closed: that would wait for threads that a fork lacks, or write into files
that the parent goes on using. Each object that must know of it is told by `remember`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import TYPE_CHECKING, NoReturn, Protocol
from weakref import WeakSet

from .errors import DatabaseClosedError, ForkedProcessError

__all__ = ["LibraryThreads", "ProcessLock", "leak", "remember"]

if TYPE_CHECKING:
    from threading import _RLock as RLock
else:
    RLock = type(threading.RLock())


class _Inherited(Protocol):
    def leave_to_parent(self) -> None: ...


_remembered: WeakSet[_Inherited] = WeakSet()


def remember(inherited: _Inherited) -> None:
    """Call the object's ``leave_to_parent`` in every process that is forked from now on, before anything else there."""
    _remembered.add(inherited)


def leak(*objects: object) -> None:
    """Keep objects from ever being freed, also at the end of the process."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _leave_to_parent() -> None:
    with contextlib.ExitStack() as left:  # each, whatever another raises
        for inherited in list(_remembered):
            left.callback(inherited.leave_to_parent)


os.register_at_fork(after_in_child=_leave_to_parent)


class ProcessLock(RLock):  # type: ignore[misc]  # in truth it is not final
    """A reentrant lock that only the process that made it takes. In a forked child, `DatabaseClosedError` is raised.

    Some thread that the child lacks may hold it there, for ever. It costs no more than `threading.RLock`: a child
    gives the locks that it inherits another class.
    """

    def __init__(self) -> None:
        super().__init__()
        remember(self)

    def leave_to_parent(self) -> None:
        """Refuse to be taken, in this process and its children."""
        self.__class__ = _InheritedLock


class _InheritedLock(ProcessLock):  # type: ignore[misc]
    """The lock of another process. Who holds it here, because the fork came from within, can give it back."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise DatabaseClosedError("the database was opened by another process; a fork can't use it")

    __enter__ = acquire


class LibraryThreads:
    """The threads that an engine's library begins once for the whole process, and that a forked child lacks.

    There the library waits for them for ever, also with databases of the child's own. One object a library, as a
    constant of a module; a backend asks it before it does anything.
    """

    def __init__(self, library: str) -> None:
        self._library = library
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
        """Do as `check` does, and remember that the library is used from now on."""
        self.check()
        self._begun = True

    def leave_to_parent(self) -> None:
        """Remember in a child that the threads are not there."""
        self._lacking = self._begun
