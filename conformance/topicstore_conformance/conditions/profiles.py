"""The Hypothesis profile of all tests.

Every run draws the same examples, so that a result can be repeated. With ``TOPICSTORE_HYPOTHESIS=random`` each run
draws new ones. `topicstore_conformance.conditions.tries` has their number.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine, providers

from .modes import EXAMPLES
from .tries import MODE

__all__ = ["COSTLY", "MACHINE", "PROFILE", "RANDOM"]

_CHOICE = os.environ.get(EXAMPLES, "")
if _CHOICE not in ("", "random"):
    raise ValueError(f"{EXAMPLES} must be random or unset, not {_CHOICE!r}")
RANDOM = _CHOICE == "random"
"""Whether this run draws random examples."""

if not RANDOM and {"_get_local_constants", "_local_constants"} <= vars(providers).keys():
    # Hypothesis also draws constants found in the modules that are loaded at that time, so a test's examples would
    # depend on the tests before it: https://github.com/HypothesisWorks/hypothesis/pull/4356
    vars(providers)["_get_local_constants"] = type(vars(providers)["_local_constants"])

PROFILE = settings(
    max_examples=50 if MODE == "quick" else 100,
    deadline=None,
    database=None,
    derandomize=not RANDOM,
    print_blob=True,
    report_multiple_bugs=False,  # a failure shows one example, of one broken promise
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
"""The settings of all property tests. Deadlines and health checks are off, because run times and draws vary."""
if MODE == "quick" and hasattr(engine, "MAX_SHRINKING_SECONDS"):
    engine.MAX_SHRINKING_SECONDS = 10  # shrinking takes far longer than finding a failure
COSTLY = settings(PROFILE, phases=(Phase.explicit, Phase.generate, Phase.shrink))
"""The settings of property tests in which each example opens a database."""
MACHINE = settings(COSTLY, stateful_step_count=40)
"""The settings of state machines."""
