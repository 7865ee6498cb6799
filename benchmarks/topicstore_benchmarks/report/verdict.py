"""The criteria of a report, and rankings by them: the winners, topicstore against the best peer, and failures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import attrs

from topicstore_benchmarks.results import STORE, WORKER, compacted

from .estimates import Ratio, paired_ratio
from .run import Contender, Problem, Run

__all__ = [
    "Criterion",
    "Failure",
    "Grid",
    "Loss",
    "Ranking",
    "Result",
    "against_peers",
    "by_criterion",
    "criteria",
    "failures",
    "losses",
    "results",
    "winners",
]


@attrs.frozen(kw_only=True)
class Criterion:
    """A metric of a phase by which contenders are compared."""

    name: str
    phase: str
    metric: str
    compacted: str | None = None
    """The phase in which the same metric is measured after ``compact``, or None."""
    more_is_better: bool = False


def criteria(run: Run) -> list[Criterion]:
    """Return the criteria for which a run may have results, in the order of the report."""
    replays = (
        Criterion(
            name=request.capitalize(),
            phase=request,
            metric="messages_per_second",
            compacted=compacted(request),
            more_is_better=True,
        )
        for request in run.requests()
    )
    return [
        Criterion(name="Store", phase=STORE, metric="messages_per_second", more_is_better=True),
        *replays,
        Criterion(name="Bytes a message", phase=STORE, metric="bytes_per_message", compacted="compact"),
        Criterion(name="Mixed, p99 of stores", phase="mixed", metric="store_p99_ms"),
        Criterion(name="Mixed, p99 of reads", phase="mixed", metric="read_p99_ms"),
        Criterion(name="Reopen", phase="reopen", metric="seconds"),
        Criterion(name="Peak memory", phase=WORKER, metric="peak_memory"),
    ]


@attrs.frozen
class Result:
    """The values of a contender, compacted or not, for one criterion, workload and durability."""

    contender: Contender
    compacted: bool
    values: Mapping[str, float]
    """The values by trial."""

    @property
    def label(self) -> str:
        """Return the contender's name, with a note if the contender was compacted."""
        return f"{self.contender.name}, compacted" if self.compacted else self.contender.name

    @property
    def median(self) -> float:
        """Return the median of the values."""
        return statistics.median(self.values.values())


@attrs.frozen(kw_only=True)
class Ranking:
    """A comparison of a result with another one for the same criterion, workload and durability."""

    result: Result
    other: Result | None
    """The other result, or None if there is no other."""
    lead: Ratio | None
    """The factor by which the result is better; None if the two have no trial in common."""

    @property
    def ahead(self) -> bool:
        """Whether the result is better than the other, by the median ratio within trials."""
        return self.lead is None or self.lead.median > 1

    @property
    def clear(self) -> bool:
        """Whether the difference is statistically significant, or there is no other result."""
        return self.other is None or (self.lead is not None and self.lead.clear)


@attrs.frozen
class Grid:
    """The rankings of one durability: a row for each criterion, a column for each workload; None without results."""

    durability: str
    rows: tuple[tuple[Criterion, tuple[Ranking | None, ...]], ...]

    def rankings(self) -> list[Ranking]:
        """Return all rankings that are not None."""
        return [ranking for _, rankings in self.rows for ranking in rankings if ranking is not None]


def results(run: Run, criterion: Criterion, workload: str, durability: str, *kinds: str) -> list[Result]:
    """Return the results of contenders of some kinds, or of all, in the order of the run's contenders.

    A contender that can compact has two results, one before and one after compaction.
    """
    phases = ((criterion.phase, False), (criterion.compacted, True))
    return [
        Result(contender, compacted, values)
        for contender in run.of_kind(*kinds)
        for phase, compacted in phases
        if phase and (values := run.of(workload, durability, contender.name, phase, criterion.metric))
    ]


def by_criterion(run: Run, workload: str, durability: str) -> list[tuple[Criterion, dict[str, Result]]]:
    """Return for each criterion the results of all contenders, by label."""
    found = [(criterion, results(run, criterion, workload, durability)) for criterion in criteria(run)]
    return [(criterion, {one.label: one for one in some}) for criterion, some in found]


_UNRANKED = "reference"
"""The layout that exists to be read and compared with; it is measured, and takes no part in the verdict."""


def winners(run: Run) -> list[Grid]:
    """Return for each durability the results with the best median, compared with the best of another contender."""

    def winner(criterion: Criterion, workload: str, durability: str) -> Ranking | None:
        ranked = _ranked(run, criterion, workload, durability, "topicstore", "peer")
        if not ranked:
            return None
        other = next((one for one in ranked if one.contender != ranked[0].contender), None)
        return _ranking(criterion, ranked[0], other)

    return _grids(run, winner)


def against_peers(run: Run) -> list[Grid]:
    """Return for each durability topicstore's best result compared with the best peer's, if both have one."""

    def against_peer(criterion: Criterion, workload: str, durability: str) -> Ranking | None:
        ours = _ranked(run, criterion, workload, durability, "topicstore")
        theirs = _ranked(run, criterion, workload, durability, "peer")
        return _ranking(criterion, ours[0], theirs[0]) if ours and theirs else None

    return _grids(run, against_peer)


@attrs.frozen(kw_only=True)
class Loss:
    """A criterion for which the default pair is behind a peer."""

    criterion: Criterion
    workload: str
    durability: str
    ranking: Ranking
    """The default pair's best result, compared with the peer's best."""


def losses(run: Run, default: Contender, peer: Contender) -> list[Loss]:
    """Return the criteria for which the default pair's median within trials is behind a peer's, the clear ones first.

    Of a contender that can compact, the better result counts.
    """
    found = []
    for durability in run.durabilities:
        for criterion in criteria(run):
            for workload in run.workloads:
                ours, theirs = (
                    [one for one in _ranked(run, criterion, workload, durability) if one.contender == contender]
                    for contender in (default, peer)
                )
                if ours and theirs and not (ranking := _ranking(criterion, ours[0], theirs[0])).ahead:
                    found.append(Loss(criterion=criterion, workload=workload, durability=durability, ranking=ranking))
    return sorted(found, key=lambda one: not one.ranking.clear)


def _ranked(run: Run, criterion: Criterion, workload: str, durability: str, *kinds: str) -> list[Result]:
    """Return the results in order of their medians, the best first; without those of the reference layout."""
    found = [one for one in results(run, criterion, workload, durability, *kinds) if one.contender.layout != _UNRANKED]
    return sorted(found, key=lambda one: one.median, reverse=criterion.more_is_better)


def _ranking(criterion: Criterion, one: Result, other: Result | None) -> Ranking:
    lead = None if other is None else paired_ratio(one.values, other.values)
    if lead is not None and not criterion.more_is_better:
        lead = lead.inverse()
    return Ranking(result=one, other=other, lead=lead)


def _grids(run: Run, ranking: Callable[[Criterion, str, str], Ranking | None]) -> list[Grid]:
    grids = [
        Grid(
            durability,
            tuple(
                (criterion, rankings)
                for criterion in criteria(run)
                if any(rankings := tuple(ranking(criterion, workload, durability) for workload in run.workloads))
            ),
        )
        for durability in run.durabilities
    ]
    return [grid for grid in grids if grid.rows]


@attrs.frozen(kw_only=True)
class Failure:
    """All failures or skips of a contender with the same reason."""

    status: str
    contender: str
    """The contender's name; empty for all contenders."""
    where: str
    """The affected phases, workloads and durabilities, as text; each is left out if all of its kind are affected."""
    reason: str


def failures(run: Run) -> list[Failure]:
    """Return failures and then skips, grouped by contender and reason."""
    found: defaultdict[tuple[str, str, str], list[Problem]] = defaultdict(list)
    for problem in run.problems:
        found[problem.status, problem.contender, problem.reason].append(problem)
    return [
        Failure(status=status, contender=contender, where=_where(run, problems), reason=reason)
        for (status, contender, reason), problems in sorted(found.items(), key=lambda item: item[0][0] != "failed")
    ]


def _where(run: Run, problems: Sequence[Problem]) -> str:
    parts = (
        ({problem.phase: None for problem in problems}, run.phases),
        ({problem.workload: None for problem in problems}, run.workloads),
        ({problem.durability: None for problem in problems}, run.durabilities),
    )
    return "; ".join(", ".join(some) for some, all_ in parts if "" not in some and not some.keys() >= set(all_))
