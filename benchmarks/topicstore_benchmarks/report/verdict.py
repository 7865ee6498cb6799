"""The questions of a report, and the answers: what wins, our best pair against the best peer, and what is missing."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import attrs

from topicstore_benchmarks.results import STORE, WORKER, compacted

from .estimates import Ratio, paired_ratio
from .run import Contender, Problem, Run

__all__ = [
    "Failure",
    "Grid",
    "Question",
    "Ranking",
    "Result",
    "against_peers",
    "by_question",
    "failures",
    "questions",
    "results",
    "winners",
]


@attrs.frozen(kw_only=True)
class Question:
    """A question: something in which a contender can be better or worse."""

    name: str
    phase: str
    metric: str
    compacted: str | None = None
    """The phase that asks the same after ``compact``."""
    more_is_better: bool = False


def questions(run: Run) -> list[Question]:
    """Return the questions that a run may answer, in the order of the page."""
    replays = (
        Question(
            name=request.capitalize(),
            phase=request,
            metric="messages_per_second",
            compacted=compacted(request),
            more_is_better=True,
        )
        for request in run.requests()
    )
    return [
        Question(name="Store", phase=STORE, metric="messages_per_second", more_is_better=True),
        *replays,
        Question(name="Bytes a message", phase=STORE, metric="bytes_per_message", compacted="compact"),
        Question(name="Mixed, p99 of stores", phase="mixed", metric="store_p99_ms"),
        Question(name="Mixed, p99 of reads", phase="mixed", metric="read_p99_ms"),
        Question(name="Reopen", phase="reopen", metric="seconds"),
        Question(name="Peak memory", phase=WORKER, metric="peak_memory"),
    ]


@attrs.frozen
class Result:
    """A contender, as it stored or compacted, with what its repetitions gave."""

    contender: Contender
    compacted: bool
    values: Mapping[str, float]
    """By trial."""

    @property
    def label(self) -> str:
        """The contender's name, and whether it was compacted."""
        return f"{self.contender.name}, compacted" if self.compacted else self.contender.name

    @property
    def median(self) -> float:
        """The median of the values."""
        return statistics.median(self.values.values())


@attrs.frozen(kw_only=True)
class Ranking:
    """One of two results of a question with one workload and durability, as it compares with the other."""

    result: Result
    other: Result | None
    """None if no other took part."""
    lead: Ratio | None
    """How many times better the result is; None if the two were never measured side by side."""

    @property
    def ahead(self) -> bool:
        """Whether the result is the better one, by the medians of what was measured side by side."""
        return self.lead is None or self.lead.median > 1

    @property
    def clear(self) -> bool:
        """Whether the two differ beyond the noise, or there is nothing to compare with."""
        return self.other is None or (self.lead is not None and self.lead.clear)


@attrs.frozen
class Grid:
    """The answers of one durability: a row for each question, a column for each workload; None without an answer."""

    durability: str
    rows: tuple[tuple[Question, tuple[Ranking | None, ...]], ...]

    def answers(self) -> list[Ranking]:
        """Return the answers that there are."""
        return [answer for _, answers in self.rows for answer in answers if answer is not None]


def results(run: Run, question: Question, workload: str, durability: str, *kinds: str) -> list[Result]:
    """Return those of some kinds, or all, that have an answer, in the order of the run's contenders.

    A contender that can compact is in it twice, because users may compact.
    """
    phases = ((question.phase, False), (question.compacted, True))
    return [
        Result(contender, compacted, values)
        for contender in run.of_kind(*kinds)
        for phase, compacted in phases
        if phase and (values := run.of(workload, durability, contender.name, phase, question.metric))
    ]


def by_question(run: Run, workload: str, durability: str) -> list[tuple[Question, dict[str, Result]]]:
    """Return the results of all contenders by their labels, for each question."""
    found = [(question, results(run, question, workload, durability)) for question in questions(run)]
    return [(question, {one.label: one for one in some}) for question, some in found]


def winners(run: Run) -> list[Grid]:
    """Return, for each durability, who has the best median, compared with the best of another contender."""

    def winner(question: Question, workload: str, durability: str) -> Ranking | None:
        ranked = _ranked(run, question, workload, durability, "topicstore", "peer")
        if not ranked:
            return None
        other = next((one for one in ranked if one.contender != ranked[0].contender), None)
        return _answer(question, ranked[0], other)

    return _grids(run, winner)


def against_peers(run: Run) -> list[Grid]:
    """Return, for each durability, topicstore's best pair compared with the best peer; only where both took part."""

    def against_peer(question: Question, workload: str, durability: str) -> Ranking | None:
        ours = _ranked(run, question, workload, durability, "topicstore")
        theirs = _ranked(run, question, workload, durability, "peer")
        return _answer(question, ours[0], theirs[0]) if ours and theirs else None

    return _grids(run, against_peer)


def _ranked(run: Run, question: Question, workload: str, durability: str, *kinds: str) -> list[Result]:
    """Return results, the best median first."""
    found = results(run, question, workload, durability, *kinds)
    return sorted(found, key=lambda one: one.median, reverse=question.more_is_better)


def _answer(question: Question, one: Result, other: Result | None) -> Ranking:
    lead = None if other is None else paired_ratio(one.values, other.values)
    if lead is not None and not question.more_is_better:
        lead = lead.inverse()
    return Ranking(result=one, other=other, lead=lead)


def _grids(run: Run, answer: Callable[[Question, str, str], Ranking | None]) -> list[Grid]:
    grids = [
        Grid(
            durability,
            tuple(
                (question, answers)
                for question in questions(run)
                if any(answers := tuple(answer(question, workload, durability) for workload in run.workloads))
            ),
        )
        for durability in run.durabilities
    ]
    return [grid for grid in grids if grid.rows]


@attrs.frozen(kw_only=True)
class Failure:
    """What failed or was skipped for one reason, and so is missing from the figures."""

    status: str
    contender: str
    """Empty for all."""
    where: str
    """The phases, workloads and durabilities, of which those are named that aren't all; empty if all are."""
    reason: str


def failures(run: Run) -> list[Failure]:
    """Return what failed, and then what was skipped, each reason of a contender once."""
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
