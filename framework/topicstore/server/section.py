"""The base class of all tables of the settings."""

from __future__ import annotations

import msgspec

__all__ = ["Section"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the settings file: immutable; unknown keys are errors."""
