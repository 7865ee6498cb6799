"""Running a function at one step of another: wherever Python may run the handler of a signal, or collect garbage."""

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
    """Runs once within what this thread does: where Python runs handlers of signals, or collects garbage."""

    handle: Callable[[], object]
    step: int = -1
    """When it runs, counted in calls of Python's functions and returns from C; -1: never."""
    ended: tuple[type[Exception], ...] = ()
    """The errors with which the work may end because of what the handler did."""
    kinds: dict[tuple[str, ...], int] = attrs.field(factory=dict)
    """The first step of each kind."""
    steps: int = 0

    def run(self, work: Callable[[], object]) -> None:
        """Work; errors of ``ended`` may end it."""
        profile = self._profile  # kept: when it has raised, Python forgets it, and may call it once more
        sys.setprofile(profile)
        try:
            work()
        except* self.ended:  # a writer's come in a group
            if self.step < 0:
                raise
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        modules = [one.f_globals.get("__name__") for one in (frame, frame.f_back) if one is not None]
        collecting = not {"weakref", "_weakrefset"}.isdisjoint(modules)
        generator = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if collecting or event not in ("call", "c_return") or generator:
            return  # there, an exception would not be raised, or pass over a ``finally``
        names = [frame.f_code.co_qualname, getattr(argument, "__name__", "")]
        self.kinds.setdefault((event, *names, frame.f_back.f_code.co_qualname if frame.f_back else ""), self.steps)
        if self.steps == self.step:
            self.handle()
        self.steps += 1
