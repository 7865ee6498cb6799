"""The report: one HTML file with everything in it, which opens without a network.

Vega, the plots and the figures are inside; the file's own Content-Security-Policy forbids to load anything.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from topicstore_benchmarks.results import UNITS

from .charts import CONFIG, ROW_HEIGHT, colour, panels
from .estimates import Ratio, ratio
from .quantities import quantity, short
from .questions import QUESTIONS, Entrant, Question, entrants, standings
from .run import MadeOf, Run, load
from .verdict import against, defeats, duels, gaps, leads, matrices, places, sentence, summaries, times

__all__ = ["write_report"]

_ALL_KINDS = ("topicstore", "peer", "limit")
_SNIPPET = "window.vegaEmbed = vegaEmbed;"
"""The code by which the page's script reaches Vega's bundle."""
_BASELINE = "sqlite"
"""The initial baseline of ratios, in any case of letters; else the first peer, else the first contender."""


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` beside the results of a run, in place of an earlier one, and return its path.

    Raises `FileNotFoundError` without results, and `ValueError` if none of them is a value.
    """
    run = load(run_dir)
    if not run.values:
        raise ValueError(f"{run_dir} holds no measured value to report on")
    path = run_dir / "report.html"
    unfinished = path.with_suffix(".html.new")
    unfinished.write_text(_page(run), encoding="utf-8")
    unfinished.replace(path)
    return path


def _page(run: Run) -> str:
    environment = Environment(
        loader=PackageLoader("topicstore_benchmarks.report"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "times": times, "within": _within}
    environment.globals |= {
        "quantity": quantity,
        "sentence": sentence,
        "places": places,
        "leads": leads,
        "colour": colour,
        "questions": QUESTIONS,
        "row_height": ROW_HEIGHT,
    }
    ranked = standings(run)
    met = duels(ranked)
    return environment.get_template("page.html").render(
        run=run,
        matrices=matrices(run, ranked),
        duels=met,
        defeats=defeats(met, clear=True),
        likely_defeats=defeats(met, clear=False),
        summaries=summaries(met),
        against=against(run, met),
        gaps=gaps(run),
        budget=run.asked.get("plan", {}).get("settings", {}).get("budget"),
        left_out=len({*run.contenders, *run.asked.get("skipped_contenders", ())} - run.made_of.keys()),
        workloads=[_workload(run, name) for name in run.workloads],
        made_of={name: _made_of(by_durability) for name, by_durability in run.made_of.items()},
        machines=[_machine(machine) for machine in run.machines],
        sync_costs=_sync_costs(run),
        command=_command(run),
        asked=json.dumps(run.asked, indent=2, ensure_ascii=False),
        vega=_vega(),
        figures=_embedded(_figures(run)),
        config=_embedded(CONFIG),
        embedded=_embedded,
    )


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed in the versions that Altair writes for, as one script."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(snippet=_SNIPPET, vl_version=version)


def _workload(run: Run, name: str) -> dict[str, Any]:
    return {
        "about": run.workloads[name],
        "summary": _summary(run, name),
        "durabilities": [
            {
                "name": durability,
                "panels": panels(run, name, durability),
                "numbers": _numbers(run, name, durability),
            }
            for durability in run.durabilities
        ],
    }


def _numbers(run: Run, workload: str, durability: str) -> list[dict[str, Any]]:
    """Return a row an entrant, its medians in the order of the questions."""
    columns = [
        {one.label: one for one in entrants(run, question, workload, durability, *_ALL_KINDS)} for question in QUESTIONS
    ]
    bests = [_best(question, column.values()) for question, column in zip(QUESTIONS, columns, strict=True)]
    labels = {label: one for column in columns for label, one in column.items()}
    order = list(run.contenders)
    return [
        {
            "label": label,
            "kind": one.contender.kind,
            "cells": [
                {"text": quantity(question.metric, column[label].spread.median), "best": label == best}
                if label in column
                else None
                for question, column, best in zip(QUESTIONS, columns, bests, strict=True)
            ],
        }
        for label, one in sorted(
            labels.items(), key=lambda item: (order.index(item[1].contender.name), item[1].compacted)
        )
    ]


def _sync_costs(run: Run) -> list[tuple[str, list[Ratio | None]]]:
    """Return how many times as fast each contender stores under ``sync`` as under ``commit``, by workload."""
    found = []
    for contender in run.contenders:
        rates = [
            [
                list(run.of(name, durability, contender, "store", "messages_per_second").values())
                for durability in ("sync", "commit")
            ]
            for name in run.workloads
        ]
        if any(sync and commit for sync, commit in rates):
            found.append((contender, [ratio(sync, commit) if sync and commit else None for sync, commit in rates]))
    return found


def _best(question: Question, some: Iterable[Entrant]) -> str | None:
    taking_part = [one for one in some if one.contender.kind != "limit"]
    best = max if question.more_is_better else min
    return best(taking_part, key=lambda one: one.spread.median).label if taking_part else None


def _figures(run: Run) -> dict[str, Any]:
    """Return all values, as the page's script reads them: names once, then cells that point at them."""
    names: dict[str, list[str]] = {
        field: list(dict.fromkeys(getattr(key, field) for key in run.values))
        for field in ("workload", "durability", "contender", "phase", "metric")
    }
    groups = {group: number for number, group in enumerate(sorted({g for by in run.values.values() for g in by}))}
    return {
        "names": names,
        "kinds": [run.contenders[name].kind for name in names["contender"]],
        "units": [UNITS[metric] for metric in names["metric"]],
        "questions": [
            [question.name, question.phase, question.compacted, question.metric, question.more_is_better]
            for question in QUESTIONS
        ],
        "baseline": _baseline(run),
        "cells": [
            [
                *(names[field].index(getattr(key, field)) for field in names),
                {groups[group]: float(f"{value:.5g}") for group, value in by.items()},
            ]
            for key, by in run.values.items()
        ],
    }


def _baseline(run: Run) -> str:
    measured = {key.contender for key in run.values}
    names = [one.name for one in run.of_kind("peer", *_ALL_KINDS) if one.name in measured]
    peers = [one.name for one in run.of_kind("peer") if one.name in measured]
    return next((name for name in names if _BASELINE in name.lower()), (peers or names)[0])


def _command(run: Run) -> str:
    """Return the shell command that repeats the run, from the arguments in run.json."""
    words = [str(word) for word in run.asked.get("command", ())]
    arguments = words[words.index("run") :] if "run" in words else ["run", run.name]
    return shlex.join(["topicstore", "bench", *arguments])


def _summary(run: Run, workload: str) -> str:
    """Return how the run's plan describes a workload; nothing if it doesn't."""
    planned = run.asked.get("plan", {}).get("workloads", ())
    return next((one.get("summary", "") for one in planned if one["name"] == workload), "")


def _machine(machine: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: quantity("peak_memory", value) if name == "memory" and isinstance(value, int) else str(value)
        for name, value in machine.items()
    }


def _made_of(by_durability: Mapping[str, MadeOf]) -> MadeOf:
    """Return the versions and settings of a contender under all durabilities."""
    versions = {durability: made.versions for durability, made in by_durability.items()}
    settings = {durability: made.settings for durability, made in by_durability.items()}
    return MadeOf(_together(versions), _together(settings))


def _together(by_durability: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return values by name; of one that not all durabilities have, which have it."""
    found = {}
    for name in dict.fromkeys(name for document in by_durability.values() for name in document):
        values = {durability: document[name] for durability, document in by_durability.items() if name in document}
        alike = len(values) == len(by_durability) and len(set(values.values())) == 1
        of_each = ", ".join(f"{value} ({durability})" for durability, value in values.items())
        found[name] = next(iter(values.values())) if alike else of_each
    return found


def _within(found: Ratio) -> str:
    """Return from where to where the repetitions go, or that there is one."""
    if found.repetitions == 1:
        return "measured once"
    return f"{times(found.least)} to {times(found.most)}"


def _embedded(document: Mapping[str, Any]) -> str:
    """Return JSON that can stand inside a script element, whatever its strings hold."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
