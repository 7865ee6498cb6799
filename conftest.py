"""What holds for all tests of this repository."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes, and how often drawing one succeeds, says something about the machine and about luck.
settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("any machine")
