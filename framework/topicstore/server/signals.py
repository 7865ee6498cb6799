"""Signal handling of a server's process: SIGTERM and SIGINT drain the server, SIGHUP reloads its settings."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import asyncio

__all__ = ["INTERRUPTED", "Signals", "hold_signals"]

INTERRUPTED = 130
"""The exit code after a second signal, which ends the program at once."""

_NUMBERS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


def hold_signals() -> None:
    """Block the server's signals until its `Signals` are entered, so that no signal is lost or kills the process.

    Must be called before other threads are started. After those `Signals` are left, SIGHUP is ignored, so that it can't
    kill a program that is about to exit.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


class Signals:
    """A context in which only a second SIGTERM or SIGINT ends the process at once.

    A signal that arrives before `handled` is entered is delivered then; a signal after `handled` was left is only
    recorded. In threads other than the main thread, no signals are handled, and the attributes don't change.
    """

    def __init__(self) -> None:
        self.ended = False
        """Whether SIGTERM or SIGINT was received."""
        self._hung_up = False
        """Whether SIGHUP was received and not handled yet."""
        self._end: Callable[[], object] | None = None
        self._reload: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}
        """The previous handlers; empty while the context isn't entered, and in other threads."""

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, self._arrived) for number in _NUMBERS}
            held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            self._before = {**before, **({signal.SIGHUP: signal.SIG_IGN} if signal.SIGHUP in held else {})}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        return self

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, {}
        if before:
            # A signal that arrives while its handler is replaced makes Python report an error, so signals are blocked.
            signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hung_up = self._reload is None
            call = self._reload
        elif self.ended:
            os._exit(INTERRUPTED)  # ends a server that hangs; acknowledged messages are stored
        else:
            self.ended = True
            call = self._end
        if call is not None:
            call()

    @contextlib.contextmanager
    def handled(
        self, loop: asyncio.AbstractEventLoop, *, end: Callable[[], object], reload: Callable[[], object]
    ) -> Iterator[None]:
        """Call functions in an event loop for each signal, at once for signals that came before. Entered in that loop.

        After the context, signals are only recorded. The event loop's own signal handlers are not used: when the loop
        removes them, a signal could kill the process.
        """

        def reload_unless_ended() -> None:
            if not self.ended:  # of pending signals, Python handles SIGHUP before SIGTERM
                reload()

        self._end = partial(loop.call_soon_threadsafe, end)
        self._reload = partial(loop.call_soon_threadsafe, reload_unless_ended)
        if self.ended:
            end()
        elif self._hung_up:
            reload()
        try:
            with _woken(loop) if self._before else contextlib.nullcontext():
                yield
        finally:
            self._end = self._reload = None


@contextlib.contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Wake a loop for each signal, because Python runs handlers only in the main thread, between bytecodes."""
    with contextlib.ExitStack() as entered:
        waking, woken = map(entered.enter_context, socket.socketpair())
        for one in (waking, woken):
            one.setblocking(False)
        loop.add_reader(woken, woken.recv, 1_024)
        entered.callback(loop.remove_reader, woken)
        before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        entered.callback(signal.set_wakeup_fd, before)
        yield
