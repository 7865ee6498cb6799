"""Runs a function at a chosen step of another function, as Python runs signal handlers and finalizers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import attrs

__all__ = ["Handler"]


@attrs.define
class Handler:
    """A simulated signal handler, which runs once at a chosen step of a function in the same thread."""

    handle: Callable[[], object]
    step: int = -1
    """The step at which the handler runs, counted in calls of Python functions and returns from C; -1: never."""
    ended: tuple[type[Exception], ...] = ()
    """The errors with which the function may end because of the handler."""
    kinds: dict[tuple[str, ...], int] = attrs.field(factory=dict)
    """The first step of each kind, which is an event, a function and its caller."""
    steps: int = 0

    def run(self, work: Callable[[], object]) -> None:
        """Run ``work`` with the handler installed.

        If the handler acts at a step (``step`` isn't negative), exceptions of the types ``ended`` are suppressed.
        """
        # A reference, because Python drops a trace function that raises, and may call it once more.
        profile = self._profile
        sys.setprofile(profile)
        try:
            work()
        except* self.ended:  # a writer raises these exceptions as a group
            if self.step < 0:
                raise
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        modules = [one.f_globals.get("__name__") for one in (frame, frame.f_back) if one is not None]
        collecting = not {"weakref", "_weakrefset"}.isdisjoint(modules)
        generator = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if collecting or event not in ("call", "c_return") or generator:
            return  # an exception raised here would be lost, or would skip a ``finally``
        names = [frame.f_code.co_qualname, getattr(argument, "__name__", "")]
        self.kinds.setdefault((event, *names, frame.f_back.f_code.co_qualname if frame.f_back else ""), self.steps)
        if self.steps == self.step:
            self.handle()
        self.steps += 1
