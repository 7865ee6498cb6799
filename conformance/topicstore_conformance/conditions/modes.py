"""The modes of the suites, for modules that must not import what the suites need."""

from __future__ import annotations

__all__ = ["MODES", "VARIABLE"]

VARIABLE = "TOPICSTORE_CONFORMANCE"
"""The environment variable that chooses a mode."""
MODES = ("quick", "full", "thorough")
