"""Fields for the options of engines."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["whole_number"]


def whole_number(default: int, *, least: int) -> Any:
    """Return the field of an option that is a whole number."""
    return attrs.field(default=default, validator=[attrs.validators.instance_of(int), attrs.validators.ge(least)])
