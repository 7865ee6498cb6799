"""Ctrl-C and SIGTERM, which end every command the same way. They end an import between batches, never within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupts", "interrupt_on_sigterm"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt_on_sigterm() -> None:
    """Make SIGTERM raise `KeyboardInterrupt`, unless the signal is ignored.

    The default action would do nothing in process 1 of a container.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class Interrupts:
    """A context manager in which Ctrl-C and SIGTERM wait for the end of a `held` block; a second signal doesn't wait.

    Interrupting a write would make its shard refuse further writes, because it would be unknown whether the write took
    effect. In threads other than the main one, the class does nothing.
    """

    def __init__(self) -> None:
        self._held = False
        self._pending = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if not self._held or self._pending:
            raise KeyboardInterrupt
        self._pending = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Run the block to its end, and then raise KeyboardInterrupt if a signal came meanwhile.

        Within another `held` block, the outer block raises it.
        """
        outer, self._held = self._held, True
        try:
            yield
        finally:
            self._held = outer
        if self._pending and not outer:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Allow interruption within a `held` block: raise KeyboardInterrupt for an earlier signal or one during it."""
        outer, self._held = self._held, False
        try:
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._held = outer
