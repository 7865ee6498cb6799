"""What all tables of the settings have in common."""

from __future__ import annotations

import msgspec

__all__ = ["Section"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file of settings: strict, and never changed."""
