"""A decorator by which tests name the normative statements of the MQTT standard that they check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["statement", "statements_of"]

F = TypeVar("F", bound=Callable[..., Any])


def statement(*numbers: str) -> Callable[[F], F]:
    """Declare the statements that a test checks: ``"3.1.0-1"`` is [MQTT-3.1.0-1] of MQTT 5."""

    def keep(test: F) -> F:
        test.mqtt_statements = (*statements_of(test), *numbers)  # type: ignore[attr-defined]
        return test

    return keep


def statements_of(test: object) -> tuple[str, ...]:
    """Return the statements that a test checks."""
    found: tuple[str, ...] = getattr(test, "mqtt_statements", ())
    return found
