"""The questions that a report answers, and the standings of each question, workload and durability.

An entrant is a contender as it stored, or the same after ``compact``: both are in the same list,
because users may compact. Limits take no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from topicstore_benchmarks.results import CELL

from .estimates import Ratio, Spread, paired_ratio, spread
from .run import Contender, Run

__all__ = ["QUESTIONS", "Entrant", "Question", "Standing", "advantage", "entrants", "standings"]


@attrs.frozen(kw_only=True)
class Question:
    """A question: something in which a contender can be better or worse."""

    name: str
    phase: str
    metric: str
    compacted: str | None = None
    """The phase that asks the same after ``compact``."""
    sentence: str
    """Says that ``{one}`` does better with ``{workload}`` than ``{other}``, by ``{times}``, or with a ``{share}``."""
    more_is_better: bool = False

    def better(self, one: Entrant, other: Entrant) -> bool:
        """Return whether the median of one is better than that of another."""
        if self.more_is_better:
            return one.spread.median > other.spread.median
        return one.spread.median < other.spread.median


def _replay(phase: str, does: str) -> Question:
    return Question(
        name=phase.capitalize(),
        phase=phase,
        metric="messages_per_second",
        compacted=f"{phase}, compacted",
        sentence=f"{{one}} {does} {{workload}} {{times}} as fast as {{other}}",
        more_is_better=True,
    )


QUESTIONS = (
    Question(
        name="Store",
        phase="store",
        metric="messages_per_second",
        sentence="{one} stores {workload} {times} as fast as {other}",
        more_is_better=True,
    ),
    _replay("replay all", "replays all of"),
    _replay("wildcard", "answers a wildcard filter in"),
    _replay("one device", "replays one device of"),
    _replay("late start", "replays the end of"),
    Question(
        name="Mixed, p99 of stores",
        phase="mixed",
        metric="store_p99_ms",
        sentence="{one} stores into {workload} beside reads with a 99th percentile that is {share} of that of {other}",
    ),
    Question(
        name="Mixed, p99 of reads",
        phase="mixed",
        metric="read_p99_ms",
        sentence="{one} reads {workload} beside stores with a 99th percentile that is {share} of that of {other}",
    ),
    Question(
        name="Reopen",
        phase="reopen",
        metric="seconds",
        sentence="{one} opens {workload} {times} as fast as {other}",
    ),
    Question(
        name="Bytes on disk",
        phase="store",
        metric="bytes_per_message",
        compacted="compact",
        sentence="{one} keeps {workload} in {share} of the space of {other}",
    ),
    Question(
        name="Peak memory",
        phase=CELL,
        metric="peak_memory",
        sentence="{one} handles {workload} with {share} of the memory of {other}",
    ),
)
"""In the order of the page."""


@attrs.frozen
class Entrant:
    """A contender, as it stored or compacted, with what its repetitions gave."""

    contender: Contender
    compacted: bool
    values: Mapping[str, float]
    """By group."""

    @property
    def label(self) -> str:
        """The contender's name, and whether it was compacted."""
        return f"{self.contender.name}, compacted" if self.compacted else self.contender.name

    @property
    def spread(self) -> Spread:
        """The median, and from where to where values go."""
        return spread(list(self.values.values()))


@attrs.frozen(kw_only=True)
class Standing:
    """The entrants of a question with one workload and durability, best median first; at least one."""

    question: Question
    workload: str
    durability: str
    entrants: tuple[Entrant, ...]

    @property
    def first(self) -> Entrant:
        """The best median."""
        return self.entrants[0]

    @property
    def next(self) -> Entrant | None:
        """The best entrant of another contender than the first."""
        return next((one for one in self.entrants if one.contender != self.first.contender), None)

    @property
    def tied(self) -> tuple[Entrant, ...]:
        """The entrants of other contenders that are sometimes ahead of the first."""
        return tuple(
            one
            for one in self.entrants
            if one.contender != self.first.contender and not _decided(advantage(self.question, self.first, one))
        )

    def best(self, kind: str, name: str | None = None) -> Entrant | None:
        """Return the best entrant of a kind, or of one contender."""
        return next(
            (
                one
                for one in self.entrants
                if one.contender.kind == kind and (name is None or one.contender.name == name)
            ),
            None,
        )


def advantage(question: Question, one: Entrant, other: Entrant) -> Ratio | None:
    """Return how many times better one is than another, measured side by side; None if they never were."""
    found = paired_ratio(one.values, other.values)
    return found if found is None or question.more_is_better else found.inverse()


def entrants(run: Run, question: Question, workload: str, durability: str, *kinds: str) -> Iterator[Entrant]:
    """Return those of some kinds that have an answer, in the order of the run's contenders."""
    phases = ((question.phase, False), (question.compacted, True))
    for contender in run.of_kind(*kinds):
        for phase, compacted in phases:
            values = run.of(workload, durability, contender.name, phase, question.metric) if phase else {}
            if values:
                yield Entrant(contender, compacted, values)


def standings(run: Run) -> list[Standing]:
    """Return the standings of all questions with an answer, by durability, question, workload."""
    found = []
    for durability in run.durabilities:
        for question in QUESTIONS:
            for workload in run.workloads:
                ranked = sorted(
                    entrants(run, question, workload, durability, "topicstore", "peer"),
                    key=lambda one: one.spread.median,
                    reverse=question.more_is_better,
                )
                if ranked:
                    found.append(
                        Standing(question=question, workload=workload, durability=durability, entrants=tuple(ranked))
                    )
    return found


def _decided(lead: Ratio | None) -> bool:
    return lead is not None and lead.decided
