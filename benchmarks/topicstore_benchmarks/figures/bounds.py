"""Figures from trials, which are run one after the other without Spark, and the bounds that contenders must meet."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from topicstore_benchmarks.contenders.catalogue import ContenderSpec, catalogue
from topicstore_benchmarks.contenders.contender import Durability
from topicstore_benchmarks.harness.dataset import make
from topicstore_benchmarks.harness.plan import Plan, Settings
from topicstore_benchmarks.harness.trial import run_trial
from topicstore_benchmarks.report.estimates import paired_ratio
from topicstore_benchmarks.report.quantities import bare
from topicstore_benchmarks.report.run import Run, load
from topicstore_benchmarks.report.verdict import Criterion, by_criterion
from topicstore_benchmarks.results import UNITS, compacted
from topicstore_benchmarks.timing import Progress
from topicstore_benchmarks.workloads.definition import Definition

from .figure import Cell, Figure, Section, Sheet

__all__ = ["Bound", "measure", "plan_of", "section_of"]

_DURABILITY: Durability = "commit"
_COMPACTED = compacted("")


@attrs.frozen(kw_only=True)
class Bound:
    """A lower or upper bound for a value of some contenders with one workload. The value is a median over trials."""

    workload: str
    subjects: tuple[str, ...]
    """The names of contenders. `results.compacted` of a name stands for the contender after compaction."""
    name: str
    phase: str
    metric: str = "messages_per_second"
    other: str = ""
    """The contender by whose value the value is divided; empty for the subject itself."""
    other_phase: str = ""
    """The phase by whose value the value is divided; empty for the same phase.

    If ``other`` and ``other_phase`` are empty, the value isn't divided.
    """
    scale: float = 1.0
    """The factor of a value that isn't divided, such as 1,000 to convert seconds to milliseconds."""
    least: float | None = None
    most: float | None = None

    def figures(self, run: Run) -> Iterator[Figure]:
        """Yield the figure of each subject that was measured."""
        for subject in self.subjects:
            value = self._value(run, subject)
            if value is not None:
                yield Figure(
                    data=self.workload,
                    subject=subject,
                    name=self.name,
                    value=value,
                    least=self.least,
                    most=self.most,
                )

    def _value(self, run: Run, subject: str) -> float | None:
        mine = self._values(run, subject, self.phase)
        if not mine:
            return None
        if not (self.other or self.other_phase):
            return statistics.median(mine.values()) * self.scale
        found = paired_ratio(mine, self._values(run, self.other or subject, self.other_phase or self.phase))
        return None if found is None else found.median

    def _values(self, run: Run, subject: str, phase: str) -> Mapping[str, float]:
        contender = subject.removesuffix(_COMPACTED)
        # Bytes on disk are measured after `store` and after `compact`.
        again = {"store": "compact"}.get(phase, compacted(phase))
        return run.of(self.workload, _DURABILITY, contender, phase if contender == subject else again, self.metric)


def plan_of(workload: Definition, messages: int, repetitions: int, takes_part: Callable[[ContenderSpec], bool]) -> Plan:
    """Return the plan for a workload, with the selected contenders that can be measured on this machine."""
    specs = filter(takes_part, catalogue().values())
    return Plan(
        workloads=(workload.limited(messages),),
        durabilities=(_DURABILITY,),
        contenders=tuple(spec for spec in specs if spec.why_missing() is None),
        repetitions=repetitions,
        settings=Settings(mixed_seconds=0),
    )


def measure(plan: Plan, progress: Progress) -> Run:
    """Generate the messages of all workloads in a temporary directory, measure every trial, and return the results.

    Raises `WorkloadError`, and `AssertionError` if a contender failed in any phase.
    """
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as name:
        directory, data = Path(name), {}
        for workload in plan.workloads:
            progress(f"{workload.name}: messages")
            data[workload.name] = make(workload, directory / "workloads").directory
        for trial in plan.trials():
            failed = run_trial(trial, plan, data[trial.workload], directory, progress).failed
            if failed:
                raise AssertionError("; ".join(failed))
        return load(directory)


def section_of(name: str, run: Run, bounds: Sequence[Bound]) -> Section:
    """Return the medians of a run's trials and its bounds, as figures and as tables."""
    measured = [
        Figure(
            data=workload,
            subject=one.label,
            name=criterion.name.lower(),
            value=one.median,
            unit=UNITS[criterion.metric],
        )
        for workload in run.workloads
        for criterion, found in by_criterion(run, workload, _DURABILITY)
        for one in found.values()
    ]
    held = [figure for bound in bounds for figure in bound.figures(run)]
    sheets = [_overview(run, workload) for workload in run.workloads]
    if held:
        columns = {"data": "data", "contender": "subject", "figure": "name"}
        sheets.append(Sheet.listing("What we hold them to", columns, held, note="medians, of ratios within a trial"))
    return Section(name=name, figures=[*measured, *held], sheets=sheets)


def _overview(run: Run, workload: str) -> Sheet:
    """Return a sheet with a column per contender and a row per criterion, in which topicstore's best is marked."""
    columns: dict[str, None] = {}
    rows = []
    for criterion, found in by_criterion(run, workload, _DURABILITY):
        ours = [one.median for one in found.values() if one.contender.kind == "topicstore"]
        best = None if len(ours) < 2 else max(ours) if criterion.more_is_better else min(ours)
        values = {label: _cell(criterion, one.median, best) for label, one in found.items()}
        if values:
            columns |= dict.fromkeys(values)
            rows.append((f"{criterion.name}, {UNITS[criterion.metric]}", values))
    about = run.workloads[workload]
    return Sheet(
        title=f"{workload}: {about.messages:,} messages, {about.topics:,} topics",
        columns=["", *columns],
        rows=[[label, *(values.get(column, Cell("")) for column in columns)] for label, values in rows],
        note="bold: the best layout",
    )


def _cell(criterion: Criterion, value: float, best: float | None) -> Cell:
    return Cell(bare(criterion.metric, value), "best" if value == best else "")
