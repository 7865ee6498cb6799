"""Giving back what was taken: all of it, in reverse, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

__all__ = ["Taken", "release_all"]

Release = Callable[[], object]
"""Gives one thing back. It may be called again, and does nothing if nothing is left."""


def release_all(releases: Iterable[Release]) -> None:
    """Call each, also after one that fails; then raise what failed, several as an `ExceptionGroup`.

    What is no `Exception`, such as Ctrl-C, is raised alone.
    """
    failures: list[BaseException] = []
    for release in releases:
        try:
            release()
        except BaseException as failure:  # noqa: BLE001 - raised once the others were called
            failures.extend(failure.exceptions if isinstance(failure, _Several) else [failure])
    for failed in failures:
        if not isinstance(failed, Exception) or len(failures) == 1:
            raise failed
    if failures:
        told = [failed for failed in failures if isinstance(failed, Exception)]
        raise _Several(f"{len(told)} things could not be closed properly", told)


class _Several(ExceptionGroup[Exception]):
    """What failed at one closing; that of a part of what is closed is told with the rest."""


class Taken:
    """What was taken so far. Leaving the block by an error gives it back, and the error is told as it is.

    ::

        with Taken() as taken:
            taken.add(open_one_thing().close)
            return Owner(open_another(), close=taken.release)
    """

    def __init__(self) -> None:
        self._releases: list[Release] = []

    def add(self, release: Release) -> None:
        """Something was taken; ``release`` gives it back."""
        self._releases.append(release)

    def release(self) -> None:
        """Give everything back, what was taken last first, as `release_all` does. May be called again."""
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
