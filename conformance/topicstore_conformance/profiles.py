"""How often, and for how long, tests try.

``TOPICSTORE_CONFORMANCE`` chooses a mode:

============  ============================================================================
``quick``     few tries, always the same ones: some seconds a suite
``full``      the default: what a change must pass before it is published
``thorough``  twenty times as many tries
============  ============================================================================
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

from .modes import MODES, VARIABLE
from .threads import PATIENCE

__all__ = ["COSTLY", "MACHINE", "MODE", "PATIENCE", "full", "tries"]

MODE = os.environ.get(VARIABLE) or "full"
"""The mode of this process and of the processes that its tests begin."""
if MODE not in MODES:
    raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, not {MODE!r}")


def tries(quick: int, full: int) -> int:
    """Return how often to try in this mode."""
    return {"quick": quick, "full": full, "thorough": 20 * full}[MODE]


full = pytest.mark.skipif(MODE == "quick", reason="only in the full mode")
"""Marks a test that takes long however seldom it tries."""

_SHRINKING = () if MODE == "quick" else (Phase.shrink,)
"""Making a failing example small takes far longer than finding it."""
_PARENT = settings(
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, *_SHRINKING),
    derandomize=MODE == "quick",
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
COSTLY = settings(_PARENT, max_examples=tries(5, 25))
"""For examples that each open a database."""
MACHINE = settings(_PARENT, max_examples=tries(5, 30), stateful_step_count=40)
"""For state machines."""
