"""How often, and for how long, tests try. ``TOPICSTORE_THOROUGH=1``: twenty times as often."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["COSTLY", "MACHINE", "PATIENCE", "TIMES"]

TIMES = 20 if os.environ.get("TOPICSTORE_THOROUGH") else 1
"""How many times more than usually is tried."""
_PARENT = settings(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile("topicstore-costly", _PARENT, max_examples=25 * TIMES)
settings.register_profile("topicstore-machine", _PARENT, max_examples=30 * TIMES, stateful_step_count=40)

COSTLY = settings.get_profile("topicstore-costly")
"""For examples that each open a database."""
MACHINE = settings.get_profile("topicstore-machine")
"""For state machines."""

PATIENCE = 20.0
"""Seconds after which something that should have happened at once is taken for stuck."""
