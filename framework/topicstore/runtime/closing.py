"""Reliable release of resources, even if some releases fail, or if Ctrl-C interrupts them.

`do_all` calls several functions even if some fail. `guarded` and `Closer` release resources in spite of errors and
interrupts. `Closing` supports closing inside another call of the same thread, as in a signal handler, which can't wait
for that call.
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
    "Closer",
    "Closing",
    "close_all",
    "do_all",
    "guarded",
    "raise_all",
]


class _Several(ExceptionGroup[Exception]):
    """The errors of several calls. `do_all` merges nested groups of this class into one."""


def do_all(things: Iterable[Callable[[], object]], failed: str) -> None:
    """Call each function, even if an earlier one fails; then raise the errors, as `raise_all` does."""
    failures: list[BaseException] = []
    for thing in things:
        try:
            thing()
        except BaseException as failure:  # noqa: BLE001 - raised after the others were called
            failures.extend(failure.exceptions if isinstance(failure, _Several) else [failure])
    raise_all(failures, failed)


def raise_all(failures: Sequence[BaseException], failed: str) -> None:
    """Raise the errors, if there are any; several as an `ExceptionGroup`.

    An error that isn't an `Exception`, such as `KeyboardInterrupt`, is raised alone. ``failed`` is the end of the
    group's message, such as "could not be closed".
    """
    for one in failures:
        if not isinstance(one, Exception) or len(failures) == 1:
            raise one
    if failures:
        told = [one for one in failures if isinstance(one, Exception)]
        raise _Several(f"{len(told)} things {failed}", told)


T = TypeVar("T")

Release = Callable[[], object]
"""A function that releases one resource. It must be idempotent."""


def guarded(work: Callable[[], T], release: Release) -> T:
    """Call ``work`` and return its result; call ``release`` whether ``work`` returns, raises or is interrupted.

    ``work`` acquires the resources that ``release`` releases; ``release`` must tolerate resources that were not
    acquired. An interrupt can't prevent the release: after an error or interrupt, ``release`` is called again. It must
    therefore be idempotent.

    A context manager written in Python can't guarantee this, because a signal handler may run before the first
    line of its ``__exit__``, or between the last line of its ``__enter__`` and the block. This includes context
    managers of `contextlib.contextmanager`. The exits of `threading.Lock` and of `threading.RLock` are written in C,
    and can't be interrupted. See https://github.com/python/cpython/issues/74174.
    """
    try:
        try:
            return work()
        finally:
            release()
    except BaseException:
        release()
        raise


def close_all(releases: Iterable[Release]) -> None:
    """Call each release function, even if an earlier one fails; then raise the errors, as `do_all` does."""
    do_all(releases, "could not be closed properly")


class Closer:
    """A stack of acquired resources. If an error ends the block, they are released and the error is raised unchanged.

    If the block ends without an error, the resources stay acquired, and another object takes over their release::

        with Closer() as closer:
            closer.add(open_one_thing().close)
            return Owner(open_another(), close=closer.release)
    """

    def __init__(self) -> None:
        self._releases: list[Release] = []

    def add(self, release: Release) -> None:
        """Register the function that releases an acquired resource."""
        self._releases.append(release)

    def release(self) -> None:
        """Release all resources, in reverse order, as `close_all` does. This is idempotent."""
        close_all(reversed(self._releases))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        try:
            self.release()
        except Exception as failure:  # noqa: BLE001 - the first error is the one to raise
            error.add_note(f"Giving back what was open failed too: {type(failure).__name__}: {failure}")


class Closing:
    """A helper that closes an object: in another thread if this thread has interrupted a call that must end first.

    A signal handler may use it whatever it has interrupted. The other thread is therefore not a `threading.Thread`,
    because the interrupted call may hold locks of that module.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._elsewhere: Future[None] | None = None
        """The result of closing in another thread, or None. Set atomically."""

    def run(self, close: Callable[[], object], *, within: bool) -> None:
        """Call ``close``. ``within`` means that this thread is inside a call that must end first.

        In that case another thread calls ``close``, and this method returns without waiting. An error is emitted as a
        warning. The next call of this method waits for that thread, and raises its error.
        """
        if not within:
            elsewhere, self._elsewhere = self._elsewhere, None
            close_all((close,) if elsewhere is None else (elsewhere.result, close))
        elif self._elsewhere is None:
            self._elsewhere = Future()
            start_new_thread(self._close_elsewhere, (close, self._elsewhere))

    def _close_elsewhere(self, close: Callable[[], object], done: Future[None]) -> None:
        try:
            close()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - reported by the next call of `run`
            done.set_exception(error)
            with contextlib.suppress(RuntimeWarning):  # if warnings are errors, the next call of `run` reports it
                warnings.warn(f"the {self._what} could not be closed: {error}", RuntimeWarning, stacklevel=1)
