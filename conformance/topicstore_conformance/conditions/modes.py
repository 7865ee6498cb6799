"""The modes of the suites, in a module without third-party imports."""

from __future__ import annotations

__all__ = ["EXAMPLES", "MODES", "VARIABLE"]

VARIABLE = "TOPICSTORE_CONFORMANCE"
"""The environment variable that chooses a mode."""
EXAMPLES = "TOPICSTORE_HYPOTHESIS"
"""The environment variable that chooses between reproducible examples and random ones."""
MODES = ("quick", "full", "thorough")
