"""Faults in this process at a counted write within a call: the disk is full, or the process is killed.

Writes of engines are counted and, if the caller asks for it, calls of `os.fsync`.

A killed process leaves its files as they are at that moment. A kill is therefore simulated by a copy of the directory,
after which the call continues. The caller then closes the database and opens the copy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import attrs
from hypothesis import strategies as st
from topicstore.contract.engine import Engine
from topicstore.contract.errors import StorageFullError

from .copying import copy_open

__all__ = ["Fault", "faults", "kills", "striking"]


@attrs.define
class Fault:
    """A fault at one of a call's writes, which are counted from 1 over all engines and files."""

    kind: Literal["full", "before", "after"]
    """The disk is full at this write, or the process is killed before or after it."""
    write: int
    struck: bool = False
    """Whether the call reached this write. If not, a kill happens after the call, and a full disk has no effect."""

    @property
    def kills(self) -> bool:
        """Whether this fault is a kill, after which the copy is the database to open."""
        return self.kind != "full"


def faults(writes: int = 2) -> st.SearchStrategy[Fault | None]:
    """Return a strategy for faults within the first ``writes`` writes of a call, mostly None."""
    kinds = st.sampled_from(("full", "before", "after"))
    found = st.builds(Fault, kinds, st.sampled_from([1, *range(1, writes + 1)]))
    return st.one_of(*[st.none()] * 3, found)


def kills(writes: int = 2) -> st.SearchStrategy[Fault]:
    """Return a strategy for kills within the first ``writes`` writes of a call, or after a call with fewer."""
    return st.builds(Fault, st.sampled_from(("before", "after")), st.integers(1, writes))


@contextmanager
def striking(
    fault: Fault | None, engines: Iterable[Engine], directory: Path, copy: Path, *, files: bool = False
) -> Iterator[None]:
    """Inject a fault into a write of ``engines`` during the ``with`` block.

    A kill is simulated by a copy of ``directory`` to the new directory ``copy``. With ``files``, calls of `os.fsync`
    count as writes, too. The error of a full disk ends the block and is suppressed.
    """
    if fault is None:
        yield
        return
    strike = _Strike(fault, directory, copy, fault.write)
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(patch.object(engine, "write", strike.within(engine.write, StorageFullError("no room"))))
        if files:
            no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            stack.enter_context(patch.object(os, "fsync", strike.within(os.fsync, no_room)))
        try:
            yield
        except StorageFullError:
            if not fault.struck or fault.kills:
                raise
    if fault.kills and not fault.struck:
        copy_open(directory, copy)


@attrs.define
class _Strike:
    fault: Fault
    directory: Path
    copy: Path
    left: int

    def within(self, write: Any, full: Exception) -> Any:
        """Wrap a write: count its calls, and inject the fault into the chosen call; ``full`` is a full disk's error."""

        def counted(*arguments: Any, **options: Any) -> None:
            self.left -= 1
            last = not self.left
            if last and self.fault.kind != "after":
                self.happen(full)
            write(*arguments, **options)
            if last and self.fault.kind == "after":
                self.happen(full)

        return counted

    def happen(self, full: Exception) -> None:
        self.fault.struck = True
        if not self.fault.kills:
            raise full
        copy_open(self.directory, self.copy)
