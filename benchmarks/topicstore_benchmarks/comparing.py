"""``topicstore bench compare A B``: the changes between two runs, beyond the noise.

A cell is a contender, workload, durability, phase and metric that both runs have. Its change is the ratio of the
medians, inverted if necessary so that more than 1 is better, with the interval of two samples (see
`topicstore_benchmarks.report.estimates`). Two runs are not measured side by side, so a machine that was slower during
one of them makes all its values worse. ``--relative-to`` divides times, within each trial, by those of an unchanged
contender that both runs have; then the machine's speed cancels.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import click
from rich.table import Table
from rich.text import Text
from topicstore.cli.terminal.display import console, make_table
from topicstore.cli.terminal.exits import USAGE, Failure

from .report.estimates import Ratio, ratio
from .report.quantities import quantity
from .report.run import Key, Run, load

__all__ = ["Change", "Comparison", "Verdict", "compare", "compare_command"]

Verdict = Literal["better", "worse", "same", "too noisy"]

_MORE_IS_BETTER = "messages_per_second"
_SAID_OTHERWISE = {"seconds": _MORE_IS_BETTER, "disk_bytes": "bytes_per_message"}
"""Metrics that are omitted if an equivalent metric was measured."""
_SPEEDLESS = frozenset({"disk_bytes", "bytes_per_message", "peak_memory"})
"""Metrics that don't depend on the speed of the machine."""
_STYLES: dict[Verdict, str] = {"better": "green", "worse": "bold red", "same": "dim", "too noisy": "yellow"}


@attrs.frozen(kw_only=True)
class Change:
    """One cell of both runs. Values are medians, in the metric's unit."""

    key: Key
    before: float
    after: float
    better: Ratio
    """The factor by which the cell became better, with a 95 % confidence interval; relative to a reference, if any."""
    verdict: Verdict


@attrs.frozen(kw_only=True)
class Comparison:
    """The differences between two runs."""

    differences: tuple[str, ...]
    """Differences of machine, versions and workloads in words, which may explain changes of the figures."""
    changes: tuple[Change, ...]
    only_before: tuple[Key, ...]
    """Cells that can't be compared, because only one run has them or their reference."""
    only_after: tuple[Key, ...]
    relative_to: str | None

    def count(self, verdict: Verdict) -> int:
        """Return the number of cells with a verdict."""
        return sum(change.verdict == verdict for change in self.changes)


def compare(a: Path, b: Path, *, threshold: float = 0.05, relative_to: str | None = None) -> Comparison:
    """Return the changes from ``a`` to ``b``, each a run's directory or its ``results.parquet``.

    ``better`` and ``worse``: the interval excludes 1, and the median changed by more than ``threshold``.
    ``same``: the interval lies within the threshold, or the change is clear and smaller. Everything else,
    and every figure with a single repetition on one side, is ``too noisy``.

    Raises `FileNotFoundError` for a path without results, and `ValueError` for a file of another form, a
    threshold that isn't positive, or a reference that one of the runs lacks.
    """
    if threshold <= 0:
        raise ValueError(f"a threshold must be more than 0, not {threshold}")
    runs = load(a), load(b)
    before, after = (_cells(run, relative_to) for run in runs)
    changed = _changed_workloads(*runs)
    both = [key for key in before if key in after and key.workload not in changed]
    return Comparison(
        differences=tuple(_differences(*runs)),
        changes=tuple(_change(key, before[key], after[key], runs, threshold) for key in both),
        only_before=tuple(key for key in before if key not in after or key.workload in changed),
        only_after=tuple(key for key in after if key not in before or key.workload in changed),
        relative_to=relative_to,
    )


def _change(
    key: Key, before: Mapping[str, float], after: Mapping[str, float], runs: tuple[Run, Run], threshold: float
) -> Change:
    found = ratio(list(after.values()), list(before.values()))
    better = found if key.metric == _MORE_IS_BETTER else found.inverse()
    medians = [statistics.median(run.values[key].values()) for run in runs]
    return Change(key=key, before=medians[0], after=medians[1], better=better, verdict=_verdict(better, threshold))


def _verdict(better: Ratio, threshold: float) -> Verdict:
    most = 1 + threshold
    if better.clear and not 1 / most <= better.median <= most:
        return "better" if better.median > 1 else "worse"
    if better.clear or (better.low >= 1 / most and better.high <= most):
        return "same"
    return "too noisy"


def _cells(run: Run, relative_to: str | None) -> dict[Key, Mapping[str, float]]:
    """Return the values to compare, by trial; times are relative to the reference, where it has the same times."""
    if relative_to is not None and not any(key.contender == relative_to for key in run.values):
        raise ValueError(f"the run {run.name} has no figures of {relative_to!r} to be relative to")
    found: dict[Key, Mapping[str, float]] = {}
    for key, values in run.values.items():
        if attrs.evolve(key, metric=_SAID_OTHERWISE.get(key.metric, "")) in run.values:
            continue
        if relative_to is not None and key.metric not in _SPEEDLESS:
            values = _relative(run, key, values, relative_to)
        positive = {trial: value for trial, value in values.items() if value > 0}
        if positive:
            found[key] = positive
    return found


def _relative(run: Run, key: Key, values: Mapping[str, float], relative_to: str) -> Mapping[str, float]:
    """Divide by the reference in the same trial; if it has no phase after ``compact``, by the phase before."""
    for phase in (key.phase, key.phase.removesuffix(", compacted")):
        reference = run.of(key.workload, key.durability, relative_to, phase, key.metric)
        if reference:
            return {trial: values[trial] / reference[trial] for trial in values if reference.get(trial, 0) > 0}
    return {}


def _changed_workloads(a: Run, b: Run) -> list[str]:
    return [name for name in a.workloads if name in b.workloads and a.workloads[name] != b.workloads[name]]


def _differences(a: Run, b: Run) -> Iterator[str]:
    """Yield differences of the runs other than the figures, in words."""
    for name in _changed_workloads(a, b):
        yield (
            f"workload {name} is not the same and not compared: "
            f"{a.workloads[name].messages:,} messages, then {b.workloads[name].messages:,}"
        )
    if a.machines != b.machines:
        yield f"machine: {_machines(a)}, then {_machines(b)}"
    if a.repetitions != b.repetitions:
        yield f"repetitions: {a.repetitions}, then {b.repetitions}"
    yield from _made_otherwise(a, b)


def _made_otherwise(a: Run, b: Run) -> Iterator[str]:
    """Yield each difference of versions or settings once, with all contenders that have it."""
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for contender, before in a.made_of.items():
        after = b.made_of.get(contender, {})
        for durability in (one for one in before if one in after):
            for what in ("versions", "settings"):
                for difference in _changed(getattr(before[durability], what), getattr(after[durability], what)):
                    found[difference][contender] = None
    for difference, contenders in found.items():
        yield f"{difference} ({', '.join(contenders)})"


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield f"{name} {before.get(name, 'none')}, then {after.get(name, 'none')}"


def _machines(run: Run) -> str:
    return " and ".join(", ".join(f"{name} {value}" for name, value in machine.items()) for machine in run.machines)


@click.command("compare")
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--threshold", default=5.0, show_default=True, help="Percent; a smaller change counts as none.")
@click.option("--relative-to", metavar="CONTENDER", help="Divide times by those of this one, which both runs have.")
@click.option("--all", "everything", is_flag=True, help="Show what is the same or too noisy, too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead.")
@click.option("--fail-on-regression", is_flag=True, help="End with exit code 1 if anything is worse.")
def compare_command(
    a: Path,
    b: Path,
    threshold: float,
    relative_to: str | None,
    everything: bool,
    as_json: bool,
    fail_on_regression: bool,
) -> None:
    """Show the changes from run A to run B: directories of runs, or their results.parquet."""
    try:
        found = compare(a, b, threshold=threshold / 100, relative_to=relative_to)
    except (FileNotFoundError, ValueError) as error:
        raise Failure(str(error), USAGE) from error
    if as_json:
        click.echo(json.dumps(_document(found), indent=2))
    else:
        _show(found, everything=everything)
    if fail_on_regression and found.count("worse"):
        raise SystemExit(1)


def _document(found: Comparison) -> dict[str, Any]:
    return {
        "relative_to": found.relative_to,
        "differences": list(found.differences),
        "changes": [
            {
                **attrs.asdict(change.key),
                "before": change.before,
                "after": change.after,
                "times_better": change.better.median,
                "interval": _interval(change.better),
                "verdict": change.verdict,
            }
            for change in found.changes
        ],
        "only_before": [attrs.asdict(key) for key in found.only_before],
        "only_after": [attrs.asdict(key) for key in found.only_after],
    }


def _interval(better: Ratio) -> list[float] | None:
    return None if math.isinf(better.high) else [better.low, better.high]


def _show(found: Comparison, *, everything: bool) -> None:
    out = console()
    for difference in found.differences:
        out.print(f"! {difference}", style="yellow", markup=False)
    out.print(_summary(found), markup=False)
    shown = [change for change in found.changes if everything or change.verdict in ("better", "worse")]
    if shown:
        out.print(_table(shown))
    for keys, which in ((found.only_before, "first"), (found.only_after, "second")):
        for contender, count in sorted(Counter(key.contender for key in keys).items()):
            out.print(f"only the {which} run: {contender}, {count} cells", markup=False)


def _summary(found: Comparison) -> str:
    counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in _STYLES)
    relative = f", times relative to {found.relative_to}" if found.relative_to else ""
    return f"{len(found.changes)} cells{relative}: {counts}"


def _table(changes: Sequence[Change]) -> Table:
    """Return a table of the changes, the worst first."""
    rows = []
    for change in sorted(changes, key=lambda one: one.better.median):
        key, interval = change.key, _interval(change.better)
        what = (key.contender, f"{key.workload}, {key.durability}", key.phase, key.metric.replace("_", " "))
        values = quantity(key.metric, change.before), quantity(key.metric, change.after), f"{change.better.median:.2f}"
        within = "once" if interval is None else " to ".join(map(_bound, interval))
        rows.append((Text(change.verdict, style=_STYLES[change.verdict]), *what, *values, within))
    numbers = ("before>", "after>", "times better>", "95 %>")
    return make_table("verdict~", "contender~", "workload~", "phase~", "metric~", *numbers, rows=rows)


def _bound(value: float) -> str:
    """Return the end of an interval as text, "> 100" or "< 0.01" beyond these."""
    if value > 100:
        return "> 100"
    return f"{value:.2f}" if value >= 0.01 else "< 0.01"
