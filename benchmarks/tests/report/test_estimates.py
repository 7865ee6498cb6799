"""Ratios and confidence intervals from a few repetitions."""

from __future__ import annotations

import math
import random

import pytest
from topicstore_benchmarks.report.estimates import paired_ratio, ratio

_ROUNDS = 3_000


@pytest.mark.parametrize("repetitions", [2, 3, 5, 12])
def test_an_interval_of_pairs_holds_the_true_ratio_nineteen_times_of_twenty(repetitions: int) -> None:
    """The 95 % interval of paired ratios covers the true ratio in 95 % of cases, despite large common noise."""
    chance = random.Random(repetitions)

    def holds() -> bool:
        drift = [chance.lognormvariate(0, 1) for _ in range(repetitions)]
        ones = {str(at): 2 * by * chance.lognormvariate(0, 0.1) for at, by in enumerate(drift)}
        others = {str(at): by * chance.lognormvariate(0, 0.1) for at, by in enumerate(drift)}
        found = paired_ratio(ones, others)
        assert found is not None
        return found.low <= 2 <= found.high

    held = sum(holds() for _ in range(_ROUNDS)) / _ROUNDS
    assert 0.935 < held < 0.965


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 3), (3, 7), (5, 5)])
def test_an_interval_of_two_samples_holds_the_true_ratio_at_least_as_often(before: int, after: int) -> None:
    """The 95 % interval of unpaired samples covers the true ratio in at least 95 % of cases.

    Degrees of freedom are rounded down, which makes the interval slightly wider.
    """
    chance = random.Random(before * 100 + after)

    def holds() -> bool:
        ones = [3 * chance.lognormvariate(0, 0.2) for _ in range(after)]
        found = ratio(ones, [chance.lognormvariate(0, 0.05) for _ in range(before)])
        return found.low <= 3 <= found.high

    assert 0.935 < sum(holds() for _ in range(_ROUNDS)) / _ROUNDS


def test_a_single_repetition_says_nothing_clear() -> None:
    found = paired_ratio({"a": 90.0}, {"a": 3.0})

    assert found is not None
    assert (30.0, 0.0, math.inf, 1) == (found.median, found.low, found.high, found.repetitions)
    assert not found.clear
    assert not ratio([90.0], [3.0, 3.0, 3.0]).clear


def test_ratios_are_of_pairs_only() -> None:
    found = paired_ratio({"a": 2.0, "b": 40.0, "c": 7.0}, {"a": 1.0, "b": 10.0, "d": 1.0})

    assert found is not None
    assert (3.0, 2.0, 4.0, 2) == (found.median, found.least, found.most, found.repetitions)
    assert None is paired_ratio({"a": 2.0}, {"b": 1.0})
    assert None is paired_ratio({"a": 2.0}, {"a": 0.0})


def test_the_inverse_says_the_same_of_the_other_side() -> None:
    ones, others = {"a": 2.0, "b": 9.0, "c": 4.0}, {"a": 1.0, "b": 3.0, "c": 2.5}
    found, turned = paired_ratio(ones, others), paired_ratio(others, ones)

    assert found is not None
    assert turned is not None
    inverse = found.inverse()
    for name in ("median", "least", "most", "low", "high"):
        assert getattr(turned, name) == pytest.approx(getattr(inverse, name))
    assert found.clear == inverse.clear


def test_values_that_are_all_the_same_leave_no_doubt() -> None:
    """Values without any variance, such as bytes on disk, yield an exact interval."""
    found = ratio([30.0, 30.0], [60.0, 60.0])

    assert (0.5, 0.5, 0.5) == (found.median, pytest.approx(found.low), pytest.approx(found.high))
    assert found.clear


def test_values_further_apart_than_floats_reach_leave_everything_open() -> None:
    found = ratio([1e-300, 1e300], [1.0, 1e300])

    assert (0.0, math.inf) == (found.low, found.high)
    assert not found.clear
