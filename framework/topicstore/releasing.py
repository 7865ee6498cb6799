"""Releasing resources: all of them, in reverse order, even if some releases fail or Ctrl-C comes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeVar

from .failures import do_all

__all__ = ["Taken", "guarded", "release_all"]

T = TypeVar("T")

Release = Callable[[], object]
"""Releases one resource. It may be called again, and then does nothing."""


def guarded(work: Callable[[], T], release: Release) -> T:
    """Return what ``work`` returns, after ``release``, which is called whatever ends ``work``, also Ctrl-C.

    ``work`` acquires what ``release`` releases, as far as it was acquired. An interrupt can't come between the two, nor
    skip ``release``: a call of it that was interrupted, or came after an error, is repeated. So ``release`` does
    nothing where there is nothing left to do.

    A context manager that is written in Python can't promise that, because a signal handler may run before the first
    line of its ``__exit__``, and between the last line of its ``__enter__`` and the block; `contextlib.contextmanager`
    makes such ones. The exits of `threading.Lock` and of `threading.RLock` are written in C, and can't be interrupted.
    See https://github.com/python/cpython/issues/74174.
    """
    try:
        try:
            return work()
        finally:
            release()
    except BaseException:
        release()
        raise


def release_all(releases: Iterable[Release]) -> None:
    """Call each, also after one that fails; then raise the errors, as `topicstore.failures.do_all` does."""
    do_all(releases, "could not be closed properly")


class Taken:
    """The resources taken so far. If an error ends the block, they are released and the error is raised unchanged.

    ::

        with Taken() as taken:
            taken.add(open_one_thing().close)
            return Owner(open_another(), close=taken.release)
    """

    def __init__(self) -> None:
        self._releases: list[Release] = []

    def add(self, release: Release) -> None:
        """Add a resource that was acquired; ``release`` releases it."""
        self._releases.append(release)

    def release(self) -> None:
        """Release everything, in reverse order, as `release_all` does. May be called again."""
        release_all(reversed(self._releases))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            self.release()
        except Exception as failure:  # noqa: BLE001 - the error that comes first is the one to tell
            error.add_note(f"Giving back what was open failed too: {type(failure).__name__}: {failure}")
