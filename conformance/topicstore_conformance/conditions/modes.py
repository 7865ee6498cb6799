"""The modes of the suites, for those that must not import what the suites need."""

from __future__ import annotations

__all__ = ["MODES", "VARIABLE"]

VARIABLE = "TOPICSTORE_CONFORMANCE"
"""Environment variable that chooses one."""
MODES = ("quick", "full", "thorough")
