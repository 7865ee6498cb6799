"""The modes of the suites, for modules that must not import what the suites need."""

from __future__ import annotations

__all__ = ["EXAMPLES", "MODES", "VARIABLE"]

VARIABLE = "TOPICSTORE_CONFORMANCE"
"""The environment variable that chooses a mode."""
EXAMPLES = "TOPICSTORE_HYPOTHESIS"
"""The environment variable that chooses between the same examples and random ones."""
MODES = ("quick", "full", "thorough")
