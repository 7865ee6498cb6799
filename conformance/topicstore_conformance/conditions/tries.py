"""The mode of a run, and the number of tries in it. Child processes of tests import this without Hypothesis.

``TOPICSTORE_CONFORMANCE`` chooses a mode:

============  ============================================================================
``quick``     few examples: some seconds a suite
``full``      the default: the number for checking a change before publishing
``thorough``  twenty times as many examples
============  ============================================================================

Without ``fast_seek``, where each read costs milliseconds, suites try a quarter as many examples.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest

from .modes import MODES, VARIABLE

__all__ = ["MODE", "full", "tries"]

MODE = os.environ.get(VARIABLE) or "full"
"""The mode of this process and of the processes that its tests start."""
if MODE not in MODES:
    raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, not {MODE!r}")


def tries(quick: int, full: int, capabilities: Collection[str] = ("fast_seek",)) -> int:
    """Return the number of tries in this mode, with a backend of these capabilities."""
    count = {"quick": quick, "full": full, "thorough": 20 * full}[MODE]
    return count if "fast_seek" in capabilities else -(-count // 4)


full = pytest.mark.skipif(MODE == "quick", reason="only in the full mode")
"""A pytest mark for tests that take long even with few examples."""
