"""The results of a run, as the report and the comparison read them: values by `Key`, and then by trial."""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq

from topicstore_benchmarks.results import SCHEMA, WORKER, compacted

__all__ = ["Contender", "Key", "MadeOf", "Problem", "Run", "Workload", "load"]

_KINDS = {"topicstore": 0, "peer": 1, "limit": 2}

Row = Mapping[str, Any]


@attrs.frozen
class Key:
    """The subject of a measured value."""

    workload: str
    durability: str
    contender: str
    phase: str
    metric: str


@attrs.frozen
class Contender:
    """A contender that was measured or skipped."""

    name: str
    kind: str
    """``topicstore``, ``peer`` or ``limit``."""
    backend: str | None
    layout: str | None


@attrs.frozen
class Workload:
    """The numbers of a workload's messages and topics, and the total bytes of topics and payloads."""

    name: str
    messages: int
    topics: int
    bytes: int


@attrs.frozen
class MadeOf:
    """The versions and settings of a contender, as text."""

    versions: Mapping[str, str]
    settings: Mapping[str, str]


@attrs.frozen
class Problem:
    """A skip or a failure, with its reason; an empty name stands for all contenders, workloads and so on."""

    status: str
    contender: str
    workload: str
    durability: str
    phase: str
    reason: str


@attrs.frozen(kw_only=True)
class Run:
    """All results of a run that are available."""

    name: str
    asked: Mapping[str, Any]
    """The contents of ``run.json``; empty if there is none."""
    contenders: Mapping[str, Contender]
    """The contenders by name: topicstore's, then peers, then limits."""
    workloads: Mapping[str, Workload]
    durabilities: tuple[str, ...]
    phases: tuple[str, ...]
    """All phases in the results, except the one of the whole worker, in the order in which they ran."""
    values: Mapping[Key, Mapping[str, float]]
    """The values by trial; values of the same trial were measured shortly after each other."""
    problems: tuple[Problem, ...]
    machines: tuple[Mapping[str, Any], ...]
    made_of: Mapping[str, Mapping[str, MadeOf]]
    """The versions and settings of measured contenders, by contender and durability."""
    repetitions: int
    trials: frozenset[str]
    """The names of the measured trials, including failed ones."""
    began: dt.datetime | None
    """The earliest start of any row, or None if there are no rows."""

    def of(self, workload: str, durability: str, contender: str, phase: str, metric: str) -> Mapping[str, float]:
        """Return the values of a metric by trial, or an empty mapping if there are none."""
        return self.values.get(Key(workload, durability, contender, phase, metric), {})

    def requests(self) -> list[str]:
        """Return the phases that are repeated after ``compact``."""
        return [phase for phase in self.phases if compacted(phase) in self.phases]

    def missing(self) -> int:
        """Return the number of the plan's trials that were not measured yet; 0 if there is no plan."""
        plan = self.asked.get("plan")
        if plan is None:
            return 0
        able = {durability for contender in plan["contenders"] for durability in contender["durabilities"]}
        durabilities = able.intersection(plan["durabilities"])
        planned: int = len(plan["workloads"]) * len(durabilities) * plan["repetitions"]
        return planned - len(self.trials)

    def of_kind(self, *kinds: str) -> Iterator[Contender]:
        """Return the contenders of some kinds, or all."""
        return (contender for contender in self.contenders.values() if not kinds or contender.kind in kinds)


def load(path: Path) -> Run:
    """Read the results of a run's directory, which may be incomplete, or of a single Parquet file.

    Raises `FileNotFoundError` if there are none, and `ValueError` if columns are missing.
    """
    directory = path.is_dir()
    trials, results = path / "trials", path / "results.parquet"
    table = _table(trials if trials.is_dir() else results if directory else path)
    described = path / "run.json"
    asked = json.loads(described.read_text()) if directory and described.exists() else {}
    rows = table.to_pylist()
    contenders = _contenders(rows)
    phases = tuple(dict.fromkeys(row["phase"] for row in rows if row["phase"] != WORKER))
    return Run(
        name=rows[0]["run"] if rows else path.stem,
        asked=asked,
        contenders=contenders,
        workloads=_workloads(rows),
        durabilities=tuple(sorted({row["durability"] for row in rows if row["status"] != "skipped"})),
        phases=phases,
        values=_values(rows, (*phases, WORKER)),
        problems=_problems(rows, phases) + tuple(_refused(asked, contenders)),
        machines=tuple(json.loads(text) for text in sorted({row["machine"] for row in rows})),
        made_of=_made_of(rows, contenders),
        repetitions=max((row["repetition"] for row in rows if row["status"] == "ok"), default=0),
        trials=frozenset(row["trial"] for row in rows if row["repetition"] > 0),
        began=min((row["started"] for row in rows), default=None),
    )


def _table(file: Path) -> pa.Table:
    table = pq.read_table(file)
    missing = set(SCHEMA.names) - set(table.column_names)
    if missing:
        raise ValueError(f"{file} holds no results: it has no column {', '.join(sorted(missing))}")
    return table


def _contenders(rows: Iterable[Row]) -> dict[str, Contender]:
    found = {Contender(row["contender"], row["kind"], row["backend"] or None, row["layout"] or None) for row in rows}
    ordered = sorted(found, key=lambda one: (_KINDS[one.kind], one.backend or "", one.layout or "", one.name))
    return {one.name: one for one in ordered}


def _workloads(rows: Iterable[Row]) -> dict[str, Workload]:
    about = ("workload", "workload_messages", "workload_topics", "workload_bytes")
    return {row["workload"]: Workload(*(row[name] for name in about)) for row in rows}


def _values(rows: Iterable[Row], order: Sequence[str]) -> dict[Key, dict[str, float]]:
    found: defaultdict[Key, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["repetition"] > 0 and row["status"] == "ok" and row["value"] is not None:
            key = Key(row["workload"], row["durability"], row["contender"], row["phase"], row["metric"])
            found[key][row["trial"]] = row["value"]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0].phase)))


def _problems(rows: Iterable[Row], order: Sequence[str]) -> tuple[Problem, ...]:
    found = {_problem(row) for row in rows if row["status"] != "ok"}
    places = ("", *order)
    return tuple(sorted(found, key=lambda one: (*attrs.astuple(one)[:4], places.index(one.phase))))


def _problem(row: Row) -> Problem:
    phase, reason = "" if row["phase"] == WORKER else row["phase"], row["reason"] or "no reason given"
    return Problem(row["status"], row["contender"], row["workload"], row["durability"], phase, reason.strip())


def _refused(asked: Mapping[str, Any], contenders: Mapping[str, Contender]) -> Iterator[Problem]:
    """Yield the workloads that ``run.json`` lists as skipped, and the skipped contenders that have no rows."""
    for name, reason in asked.get("skipped_workloads", {}).items():
        yield Problem("skipped", "", name, "", "", reason)
    for name, reason in asked.get("skipped_contenders", {}).items():
        if name not in contenders:
            yield Problem("skipped", name, "", "", "", reason)


def _made_of(rows: Iterable[Row], contenders: Iterable[str]) -> dict[str, dict[str, MadeOf]]:
    found: dict[str, dict[str, MadeOf]] = {name: {} for name in contenders}
    for row in rows:
        if row["status"] == "ok" and row["durability"] not in found[row["contender"]]:
            made = MadeOf(_texts(row["versions"]), _texts(row["settings"]))
            found[row["contender"]][row["durability"]] = made
    return {name: dict(sorted(by_durability.items())) for name, by_durability in found.items() if by_durability}


def _texts(document: str) -> dict[str, str]:
    return {name: str(value) for name, value in json.loads(document).items()}
