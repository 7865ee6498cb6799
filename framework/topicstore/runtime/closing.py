"""Closing within another call of the same thread, as a signal handler does: that call can't be waited for.

Doing several things even if some of them fail.

Releasing resources: all of them, in reverse order, even if some releases fail or Ctrl-C comes in between.
"""

from __future__ import annotations

import contextlib
import warnings
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

__all__ = [
    "Closing",
    "Taken",
    "do_all",
    "guarded",
    "raise_all",
    "release_all",
]


class _Several(ExceptionGroup[Exception]):
    """The errors of several things. Those of a nested group are reported together with the others."""


def do_all(things: Iterable[Callable[[], object]], failed: str) -> None:
    """Call each, also after one that fails; then raise the errors, as `raise_all` does."""
    failures: list[BaseException] = []
    for thing in things:
        try:
            thing()
        except BaseException as failure:  # noqa: BLE001 - raised once the others were called
            failures.extend(failure.exceptions if isinstance(failure, _Several) else [failure])
    raise_all(failures, failed)


def raise_all(failures: Sequence[BaseException], failed: str) -> None:
    """Raise the errors, if there are any; several as an `ExceptionGroup`.

    An error that is no `Exception`, such as Ctrl-C, is raised alone. ``failed`` is the message of the group.
    """
    for one in failures:
        if not isinstance(one, Exception) or len(failures) == 1:
            raise one
    if failures:
        told = [one for one in failures if isinstance(one, Exception)]
        raise _Several(f"{len(told)} things {failed}", told)


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
    """Call each, also after one that fails; then raise the errors, as `topicstore.runtime.closing.do_all` does."""
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


class Closing:
    """Closes one thing: in this thread, or in another one if a call of this thread has to end first.

    A signal handler may use it, whatever it has interrupted. The other thread is therefore not a `threading.Thread`:
    the locks of that module may be held at that moment.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._elsewhere: Future[None] | None = None
        """The result of closing in another thread. Set in one step."""

    def run(self, close: Callable[[], object], *, within: bool) -> None:
        """Close. ``within`` says that this thread is in a call that must end first.

        In that case this returns at once. An error is given as a warning, and raised by the next call of this method,
        which waits for this one.
        """
        if not within:
            elsewhere, self._elsewhere = self._elsewhere, None
            release_all((close,) if elsewhere is None else (elsewhere.result, close))
        elif self._elsewhere is None:
            self._elsewhere = Future()
            start_new_thread(self._close_elsewhere, (close, self._elsewhere))

    def _close_elsewhere(self, close: Callable[[], object], done: Future[None]) -> None:
        try:
            close()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must be told
            done.set_exception(error)
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors, the next closing reports it
                warnings.warn(f"the {self._what} could not be closed: {error}", RuntimeWarning, stacklevel=1)
