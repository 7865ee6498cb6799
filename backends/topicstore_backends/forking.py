"""Forked children: an open engine belongs to the parent, and nothing of it is closed in a child.

Engines close when Python collects them. In a child that would wait for threads that a fork lacks, or
write into files that the parent goes on using.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["leak", "remember"]


class _OpenEngine(Protocol):
    def leave_to_parent(self) -> None: ...


_engines: WeakSet[_OpenEngine] = WeakSet()


def remember(engine: _OpenEngine) -> None:
    """Let an engine know, from now on, when it finds itself in a forked child."""
    _engines.add(engine)


def leak(*objects: object) -> None:
    """Keep objects from ever being freed, also at the end of the process."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _leave_to_parent() -> None:
    with contextlib.ExitStack() as left:  # each, whatever another raises
        for engine in list(_engines):
            left.callback(engine.leave_to_parent)


os.register_at_fork(after_in_child=_leave_to_parent)
