"""Doing several things even if some of them fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

__all__ = ["do_all", "raise_all"]


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
