"""The report: one self-contained static HTML file, without scripts and external resources."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from topicstore.storage.directory.manifest import DEFAULT_BACKEND, DEFAULT_LAYOUT

from topicstore_benchmarks.results import UNITS

from .charts import Picture, colour, pictures
from .estimates import Ratio
from .quantities import bare, quantity, short
from .run import MadeOf, Run, load
from .verdict import Loss, against_peers, by_criterion, criteria, failures, losses, winners

__all__ = ["render", "write_report"]


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` to the directory of a run, replacing an existing one, and return its path.

    Raises `FileNotFoundError` if there are no results, and `ValueError` if they have no measured value.
    """
    run = load(run_dir)
    if not run.values:
        raise ValueError(f"{run_dir} holds no measured value to report on")
    path = run_dir / "report.html"
    unfinished = path.with_suffix(".html.new")
    unfinished.write_text(render(run, list(pictures(run))), encoding="utf-8")
    unfinished.replace(path)
    return path


def render(run: Run, drawn: Sequence[Picture]) -> str:
    """Return the HTML of the report with these charts."""
    environment = Environment(
        loader=PackageLoader("topicstore_benchmarks", "report"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "times": _times, "quantity": quantity}
    met = against_peers(run)
    rankings = [ranking for grid in met for ranking in grid.rankings()]
    skipped = run.asked.get("skipped_contenders", ())
    return environment.get_template("page.html").render(
        run=run,
        winners=winners(run),
        against_peers=met,
        ahead=[ranking for ranking in rankings if ranking.ahead],
        behind=[ranking for ranking in rankings if not ranking.ahead],
        pictures=drawn,
        medians=[_medians(run, name, durability) for name in run.workloads for durability in run.durabilities],
        columns=[(criterion.name, UNITS[criterion.metric]) for criterion in criteria(run)],
        summaries={one["name"]: one.get("summary", "") for one in run.asked.get("plan", {}).get("workloads", ())},
        failures=failures(run),
        budget=run.asked.get("plan", {}).get("settings", {}).get("budget"),
        left_out=len({*run.contenders, *skipped} - run.made_of.keys()),
        backends={one.backend: colour(one) for one in run.of_kind("topicstore") if one.name in run.made_of},
        made_of={name: _made_of(by_durability) for name, by_durability in run.made_of.items()},
        losses=_losses(run),
        machines=[_machine(machine) for machine in run.machines],
        command=_command(run),
        asked=json.dumps(run.asked, indent=2, ensure_ascii=False),
    )


_DEFAULT = DEFAULT_BACKEND, DEFAULT_LAYOUT
"""The backend and the layout of a database for which nothing else is chosen."""
_YARDSTICK = "sqlite"
"""The peer with which the default pair is compared by itself."""


def _losses(run: Run) -> list[Loss] | None:
    """Return where the default pair is behind SQLite; None unless both were measured."""
    pair = next((one for one in run.of_kind("topicstore") if (one.backend, one.layout) == _DEFAULT), None)
    peer = next((one for one in run.of_kind("peer") if one.name.lower() == _YARDSTICK), None)
    if pair is None or peer is None or not {pair.name, peer.name} <= run.made_of.keys():
        return None
    return losses(run, pair, peer)


def _medians(run: Run, workload: str, durability: str) -> dict[str, Any]:
    """Return a table's data: for each result its medians in the order of the criteria, or None without a value."""
    columns, order = by_criterion(run, workload, durability), list(run.contenders)
    found = {label: one for _, column in columns for label, one in column.items()}
    rows = {
        label: [
            bare(criterion.metric, column[label].median) if label in column else None for criterion, column in columns
        ]
        for label in sorted(found, key=lambda label: (order.index(found[label].contender.name), found[label].compacted))
    }
    return {"workload": workload, "durability": durability, "rows": rows}


def _command(run: Run) -> str:
    """Return the shell command that repeats the run, from the arguments in run.json."""
    words = [str(word) for word in run.asked.get("command", ())]
    arguments = words[words.index("run") :] if "run" in words else ["run", run.name]
    return shlex.join(["topicstore", "bench", *arguments])


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: quantity("peak_memory", value) if name == "memory" and isinstance(value, int) else str(value)
        for name, value in machine.items()
    }


def _made_of(by_durability: Mapping[str, MadeOf]) -> MadeOf:
    """Return the versions and settings of a contender, merged over all durabilities."""
    return MadeOf(
        _together({durability: made.versions for durability, made in by_durability.items()}),
        _together({durability: made.settings for durability, made in by_durability.items()}),
    )


def _together(by_durability: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Merge values by name; a value that differs between durabilities, or that some lack, names its durabilities."""
    found = {}
    for name in dict.fromkeys(name for document in by_durability.values() for name in document):
        values = {durability: document[name] for durability, document in by_durability.items() if name in document}
        alike = len(values) == len(by_durability) and len(set(values.values())) == 1
        of_each = ", ".join(f"{value} ({durability})" for durability, value in values.items())
        found[name] = next(iter(values.values())) if alike else of_each
    return found


def _times(ratio: Ratio) -> str:
    """Return a ratio as text, with significant digits and the range over the repetitions."""
    if ratio.repetitions == 1:
        return f"{_digits(ratio.median)}× (measured once)"
    return f"{_digits(ratio.median)}× ({_digits(ratio.least)} to {_digits(ratio.most)})"


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1.1 else f"{value:.2f}"
