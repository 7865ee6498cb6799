"""Medians, ratios and their confidence intervals from a few repetitions. Pure functions.

Noise of times is multiplicative (a slow second slows everything by a factor), so values are compared by ratios, and
intervals are computed from logarithms. They are Student's *t* intervals at 95 %: of paired differences for values of
the same trial (Student, "The probable error of a mean", 1908), and of two samples of unequal variance for two runs
(Welch, "The generalization of 'Student's' problem", 1947).

Benchmarks have two to five repetitions. With so few, rank-based intervals can't reach 95 %, and bootstrap intervals
cover much less than they claim (Hesterberg, "What teachers should know about the bootstrap", 2015, section 4). The
intervals used here have the stated coverage from two repetitions on, but are wide then.

The value shown is the median, which a single disturbed repetition doesn't change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import attrs

__all__ = ["Ratio", "paired_ratio", "ratio"]

_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantiles of Student's *t*, for 1 to 30 degrees of freedom. More use the last, which is slightly large."""


@attrs.frozen(kw_only=True)
class Ratio:
    """A ratio of two values, with its range and confidence interval."""

    median: float
    least: float
    """The lowest ratio of any two compared repetitions."""
    most: float
    low: float
    """The lower end of the 95 % confidence interval."""
    high: float
    repetitions: int
    """The smaller number of repetitions of the two sides. With a single one the interval is unbounded."""

    @property
    def clear(self) -> bool:
        """Whether 1, which means no difference, lies outside the confidence interval."""
        return self.low > 1 or self.high < 1

    def inverse(self) -> Ratio:
        """Return the reciprocal ratio."""
        return Ratio(
            median=1 / self.median,
            least=1 / self.most,
            most=1 / self.least,
            low=1 / self.high,
            high=1 / self.low if self.low else math.inf,
            repetitions=self.repetitions,
        )


def paired_ratio(ones: Mapping[str, float], others: Mapping[str, float]) -> Ratio | None:
    """Return the ratio of ``ones`` to ``others``, which are values by a common key, such as the trial.

    Each ratio is taken within a pair of positive values, so that disturbances of both cancel out. Returns None if there
    is no pair.
    """
    ratios = [ones[key] / others[key] for key in ones.keys() & others.keys() if ones[key] > 0 and others[key] > 0]
    if not ratios:
        return None
    logs = [math.log(one) for one in ratios]
    half = math.inf if len(logs) == 1 else _t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    of_all = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return Ratio(**of_all, **_interval(statistics.fmean(logs), half), repetitions=len(ratios))


def ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return the ratio of ``ones`` to ``others``, which are unpaired positive values, at least one of each.

    The median is the ratio of the medians; ``least`` and ``most`` are the extreme ratios of any two values.
    """
    logs = [[math.log(value) for value in side] for side in (ones, others)]
    fewer = min(len(ones), len(others))
    half = math.inf if fewer == 1 else _welch(*logs)
    of_all = {
        "median": statistics.median(ones) / statistics.median(others),
        "least": min(ones) / max(others),
        "most": max(ones) / min(others),
    }
    between = _interval(statistics.fmean(logs[0]) - statistics.fmean(logs[1]), half)
    return Ratio(**of_all, **between, repetitions=fewer)


def _welch(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return half the width of Welch's confidence interval of the difference of two means."""
    parts = [(statistics.variance(side) / len(side), len(side) - 1) for side in (ones, others)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / of for part, of in parts)
    return _t(math.floor(freedom + 1e-9)) * math.sqrt(total)


def _t(freedom: int) -> float:
    return _T[min(freedom, len(_T)) - 1]


def _interval(centre: float, half: float) -> dict[str, float]:
    """Return an interval's ends from its logarithmic centre and half width; on overflow, zero and infinity."""
    try:
        return {"low": math.exp(centre - half), "high": math.exp(centre + half)}
    except OverflowError:
        return {"low": 0.0, "high": math.inf}
