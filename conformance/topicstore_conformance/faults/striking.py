"""Faults of this process at a counted write within a call: the disk is full, or the process is killed.

Those of engines count, and the writes of other files to disk (`os.fsync`) if the caller says so.

What a killed process leaves behind is what its files hold at that moment. So a kill is a copy of the directory that is
made then, while the call goes on; the caller closes what it has open, and opens the copy.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import attrs
from hypothesis import strategies as st
from topicstore.contract.engine import Engine
from topicstore.contract.errors import StorageFullError

from .threads import wait_until

__all__ = ["Fault", "copy_open", "faults", "kills", "striking"]


@attrs.define
class Fault:
    """A fault of a call at one of the writes that it makes, counted from 1 over all engines and files."""

    kind: Literal["full", "before", "after"]
    """The disk is full at this write, or the process is killed before or after it."""
    write: int
    struck: bool = False
    """Whether the call came to this write; otherwise a kill comes after the call, and a full disk not at all."""

    @property
    def kills(self) -> bool:
        """Whether this is a kill, so that the copy is what is left."""
        return self.kind != "full"


def faults(writes: int = 2) -> st.SearchStrategy[Fault | None]:
    """Return a strategy for faults within the first writes of a call, which is none in most cases."""
    kinds = st.sampled_from(("full", "before", "after"))
    found = st.builds(Fault, kinds, st.sampled_from([1, *range(1, writes + 1)]))
    return st.one_of(*[st.none()] * 3, found)


def kills(writes: int = 2) -> st.SearchStrategy[Fault]:
    """Return a strategy for kills within the first writes of a call, or after it if it makes fewer."""
    return st.builds(Fault, st.sampled_from(("before", "after")), st.integers(1, writes))


@contextmanager
def striking(
    fault: Fault | None, engines: Iterable[Engine], directory: Path, copy: Path, *, files: bool = False
) -> Iterator[None]:
    """Make a fault happen at the writes of these engines; a kill copies the directory into the new one ``copy``.

    With ``files``, writes of files to disk count, too. The error of the full disk ends the block, and no more.
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
        """Return a write that counts, and that the fault strikes if it is the last; ``full`` is its error."""

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


def copy_open(directory: Path, copy: Path, *, unneeded: Iterable[str] = ()) -> None:
    """Copy the directory of an open database at a moment when no file in it changes, as a kill would leave it.

    Files with the ``unneeded`` names, which are patterns, are left out.
    """
    ignore = shutil.ignore_patterns(*unneeded)

    def copied() -> bool:
        with suppress(FileNotFoundError, shutil.Error):  # an engine may remove files at any time
            before = _listed(directory)
            shutil.copytree(directory, copy, symlinks=True, ignore=ignore)
            if before == _listed(directory):
                return True
        shutil.rmtree(copy, ignore_errors=True)
        return False

    wait_until(copied, f"the files of {directory} to stay as they are")


def _listed(directory: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in directory.rglob("*")}  # links may lead to files that are gone
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}
