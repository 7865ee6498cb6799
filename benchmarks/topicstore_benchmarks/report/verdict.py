"""The answers in sentences and tables: the winners, where a peer is ahead of topicstore, and what is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs

from topicstore_benchmarks.results import PHASES

from .estimates import Ratio
from .questions import QUESTIONS, Entrant, Question, Standing, advantage
from .run import Contender, Problem, Run

__all__ = [
    "Against",
    "Duel",
    "Gap",
    "Matrix",
    "Place",
    "Summary",
    "against",
    "defeats",
    "duels",
    "gaps",
    "leads",
    "matrices",
    "places",
    "sentence",
    "summaries",
    "times",
]


@attrs.frozen(kw_only=True)
class Place:
    """The winner of one comparison, or that it is undecided."""

    standing: Standing
    kind: str
    """Of the winner; ``open`` where there is none, because several are ahead by turns."""
    winners: tuple[str, ...]
    """One, or all that are ahead by turns."""
    rival: Entrant | None
    """The next one; of those that are ahead by turns, the second. None if no other took part."""
    lead: Ratio | None
    """How many times better the first is than the rival; None if they were never side by side."""

    @property
    def decided(self) -> bool:
        """Whether one has won."""
        return len(self.winners) == 1

    @property
    def clear(self) -> bool:
        """Whether the winner is ahead beyond the noise, or was alone."""
        return self.decided and (self.lead is None or self.lead.clear)


@attrs.frozen
class Matrix:
    """The places of one durability: one row per question, one column per workload; None without an answer."""

    durability: str
    workloads: tuple[str, ...]
    rows: tuple[tuple[Question, tuple[Place | None, ...]], ...]


@attrs.frozen(kw_only=True)
class Duel:
    """topicstore's best pair against one peer, in one comparison."""

    standing: Standing
    ours: Entrant
    peer: Entrant
    lead: Ratio
    """How many times better topicstore's pair is."""

    @property
    def outcome(self) -> str:
        """``ahead`` or ``behind``, of topicstore: in every repetition, or clearly; else ``undecided``."""
        if not self.lead.decided:
            return "undecided"
        return "ahead" if self.lead.median > 1 else "behind"

    @property
    def clear(self) -> bool:
        """Whether the outcome stands beyond the noise."""
        return self.lead.clear


@attrs.frozen(kw_only=True)
class Against:
    """All duels with one peer, largest lead first."""

    peer: Contender
    ahead: tuple[Duel, ...]
    behind: tuple[Duel, ...]
    undecided: tuple[Duel, ...]


@attrs.frozen(kw_only=True)
class Summary:
    """How topicstore's best pair did in one question against the best peer, over workloads and durabilities."""

    question: Question
    ahead: tuple[Duel, ...]
    behind: tuple[Duel, ...]
    undecided: tuple[Duel, ...]


@attrs.frozen(kw_only=True)
class Gap:
    """What is missing from the figures, and why. Empty names stand for all."""

    status: str
    contenders: tuple[str, ...]
    phases: tuple[str, ...]
    workloads: tuple[str, ...]
    durabilities: tuple[str, ...]
    reason: str


def matrices(run: Run, standings: Sequence[Standing]) -> list[Matrix]:
    """Return a matrix a durability."""
    places = {(standing.durability, standing.question, standing.workload): _place(standing) for standing in standings}
    workloads = tuple(run.workloads)
    return [
        Matrix(
            durability,
            workloads,
            tuple(
                (question, tuple(places.get((durability, question, workload)) for workload in workloads))
                for question in QUESTIONS
                if any((durability, question, workload) in places for workload in workloads)
            ),
        )
        for durability in run.durabilities
    ]


def _place(standing: Standing) -> Place:
    level = (standing.first, *standing.tied)
    rival = level[1] if len(level) > 1 else standing.next
    return Place(
        standing=standing,
        kind=standing.first.contender.kind if len(level) == 1 else "open",
        winners=tuple(one.label for one in level),
        rival=rival,
        lead=None if rival is None else advantage(standing.question, standing.first, rival),
    )


def duels(standings: Iterable[Standing]) -> list[Duel]:
    """Return every meeting of topicstore's best pair and a peer in the same group."""
    found = []
    for standing in standings:
        ours = standing.best("topicstore")
        peers = {one.contender.name for one in standing.entrants if one.contender.kind == "peer"}
        for name in sorted(peers):
            peer = standing.best("peer", name)
            lead = ours and peer and advantage(standing.question, ours, peer)
            if ours and peer and lead:
                found.append(Duel(standing=standing, ours=ours, peer=peer, lead=lead))
    return found


def against(run: Run, met: Sequence[Duel]) -> list[Against]:
    """Return the duels by peer, in the order of the run's contenders."""
    return [
        Against(peer=peer, **_by_outcome([duel for duel in met if duel.peer.contender == peer]))
        for peer in run.of_kind("peer")
        if any(duel.peer.contender == peer for duel in met)
    ]


def summaries(met: Sequence[Duel]) -> list[Summary]:
    """Return how each question went: of the duels of one standing only that with the best peer."""
    hardest: dict[tuple[Question, str, str], Duel] = {}
    for duel in met:
        standing = duel.standing
        key = (standing.question, standing.workload, standing.durability)
        peers = [one.contender for one in standing.entrants if one.contender.kind == "peer"]
        if duel.peer.contender == peers[0]:
            hardest[key] = duel
    return [
        Summary(question=question, **_by_outcome(of_question))
        for question in QUESTIONS
        if (of_question := [duel for (asked, *_), duel in hardest.items() if asked == question])
    ]


def _by_outcome(met: Iterable[Duel]) -> dict[str, tuple[Duel, ...]]:
    ranked = sorted(met, key=lambda one: -one.lead.median)
    return {
        outcome: tuple(duel for duel in ranked if duel.outcome == outcome)
        for outcome in ("ahead", "behind", "undecided")
    }


def defeats(met: Iterable[Duel], *, clear: bool) -> list[tuple[Duel, ...]]:
    """Return where a peer is ahead of topicstore's best pair, clearly or not, furthest first; durabilities together."""
    return _alike(duel for duel in met if duel.outcome == "behind" and duel.clear == clear)


def _alike(met: Iterable[Duel]) -> list[tuple[Duel, ...]]:
    found: defaultdict[tuple[str, Question, str], list[Duel]] = defaultdict(list)
    for duel in sorted(met, key=lambda duel: duel.lead.median):
        found[duel.peer.contender.name, duel.standing.question, duel.standing.workload].append(duel)
    return [tuple(duels) for duels in found.values()]


def sentence(question: Question, one: str, other: str, workload: str, lead: Ratio) -> str:
    """Return in words by how much one is better than another."""
    share = f"{100 / lead.median:.0f} %" if lead.median < 100 else f"{100 / lead.median:.2g} %"
    return question.sentence.format(
        one=one, other=other, workload=workload, times=f"{times(lead.median)} times", share=share
    )


def places(run: Run, met: Sequence[Duel]) -> str:
    """Return in which workloads duels were, with the durability where it wasn't in all of them."""
    if len(met) == len(run.workloads) * len(run.durabilities) > 1:
        return "all workloads"
    by_workload = {
        name: [duel.standing.durability for duel in met if duel.standing.workload == name] for name in run.workloads
    }
    return ", ".join(
        name if len(of) == len(run.durabilities) else f"{name} ({', '.join(of)})"
        for name, of in by_workload.items()
        if of
    )


def leads(met: Sequence[Duel]) -> str:
    """Return from where to where the ratios of duels go; of those where topicstore is behind, how far."""
    medians = [1 / duel.lead.median if duel.outcome == "behind" else duel.lead.median for duel in met]
    low, high = times(min(medians)), times(max(medians))
    return f"{low} times" if low == high else f"{low} to {high} times"


def times(value: float) -> str:
    """Return a ratio with the digits that mean something: 1.04, 1.8, 230."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1.1 else f"{value:.2f}"


def gaps(run: Run) -> list[Gap]:
    """Return what was skipped or failed: failures one by one, first; what was skipped for one reason together."""
    failed = [_gap(run, [problem]) for problem in run.problems if problem.status == "failed"]
    return failed + _skipped(run, [problem for problem in run.problems if problem.status != "failed"])


def _skipped(run: Run, problems: Iterable[Problem]) -> list[Gap]:
    by_contender: defaultdict[tuple[str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        by_contender[problem.contender, problem.reason].append(problem)
    alike: defaultdict[Gap, list[str]] = defaultdict(list)
    for (contender, _reason), group in by_contender.items():
        alike[attrs.evolve(_gap(run, group), contenders=())].append(contender)
    return [attrs.evolve(gap, contenders=tuple(filter(None, names))) for gap, names in alike.items()]


def _gap(run: Run, problems: Sequence[Problem]) -> Gap:
    return Gap(
        status=problems[0].status,
        contenders=(problems[0].contender,),
        phases=_unless_all((problem.phase for problem in problems), PHASES),
        workloads=_unless_all((problem.workload for problem in problems), run.workloads),
        durabilities=_unless_all((problem.durability for problem in problems), run.durabilities),
        reason=problems[0].reason,
    )


def _unless_all(some: Iterable[str], everything: Iterable[str]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(some))
    return () if "" in found or set(found) >= set(everything) else found
