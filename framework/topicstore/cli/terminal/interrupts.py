"""Ctrl-C and SIGTERM: they end every command alike, an import between two batches and never within one."""

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
    """Raise `KeyboardInterrupt` on SIGTERM from now on, also as process 1 of a container, unless it is ignored."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class Interrupts:
    """While entered, Ctrl-C or SIGTERM waits for the end of a `held` block; a second one doesn't.

    An interrupted write would close its shard to further ones, because it would be unknown
    whether it took effect. In other threads than the main one this does nothing.
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
        """Run a block to its end, then raise the KeyboardInterrupt that came meanwhile, unless an outer block does."""
        outer, self._held = self._held, True
        try:
            yield
        finally:
            self._held = outer
        if self._pending and not outer:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Within a `held` block, raise the KeyboardInterrupt that came before or comes during this one."""
        outer, self._held = self._held, False
        try:
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt
            yield
        finally:
            self._held = outer
