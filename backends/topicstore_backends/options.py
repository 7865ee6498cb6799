"""The attrs fields of engines' options."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["whole_number"]


def whole_number(default: int, *, least: int) -> Any:
    """Return an attrs field for an option that is an integer of at least ``least``."""
    return attrs.field(default=default, validator=[attrs.validators.instance_of(int), attrs.validators.ge(least)])
