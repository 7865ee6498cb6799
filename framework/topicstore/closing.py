"""Closing within another call of the same thread, as a signal handler does: that call can't be waited for."""

from __future__ import annotations

import contextlib
import warnings
from _thread import start_new_thread
from collections.abc import Callable
from concurrent.futures import Future

from .releasing import release_all

__all__ = ["Closing"]


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
