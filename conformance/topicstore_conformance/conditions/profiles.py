"""How often, and for how long, tests try.

``TOPICSTORE_CONFORMANCE`` chooses a mode:

============  ============================================================================
``quick``     few tries, always the same ones: some seconds a suite
``full``      the default: what a change must pass before it is published
``thorough``  twenty times as many tries
============  ============================================================================

Without ``fast_seek``, where each read costs milliseconds, what is tried with other data every time is
tried a quarter as often.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, Phase, settings

from .modes import MODES, VARIABLE

__all__ = ["COSTLY", "MACHINE", "MODE", "PROFILE", "full", "tries"]

MODE = os.environ.get(VARIABLE) or "full"
"""The mode of this process and of the processes that its tests begin."""
if MODE not in MODES:
    raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, not {MODE!r}")


def tries(quick: int, full: int, capabilities: Collection[str] = ("fast_seek",)) -> int:
    """Return how often to try in this mode, with a backend of these capabilities."""
    count = {"quick": quick, "full": full, "thorough": 20 * full}[MODE]
    return count if "fast_seek" in capabilities else -(-count // 4)


full = pytest.mark.skipif(MODE == "quick", reason="only in the full mode")
"""Marks a test that takes long however seldom it tries."""

PROFILE = settings(
    deadline=None,
    database=None,
    derandomize=MODE == "quick",
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""What holds for every example: how long one takes, and how often drawing one succeeds, tells of the machine and of
luck; what was found can be repeated."""
_SHRINKING = () if MODE == "quick" else (Phase.shrink,)
"""Making a failing example small takes far longer than finding it."""
COSTLY = settings(PROFILE, phases=(Phase.explicit, Phase.generate, *_SHRINKING))
"""For examples that each open a database."""
MACHINE = settings(COSTLY, stateful_step_count=40)
"""For state machines."""
