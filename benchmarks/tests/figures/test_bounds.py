"""The bounds that contenders must meet: figures from invented and from measured trials."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[bench]"')

from topicstore_benchmarks.contenders.catalogue import ContenderSpec
from topicstore_benchmarks.figures import layouts, limits
from topicstore_benchmarks.figures.bounds import Bound, measure, section_of
from topicstore_benchmarks.figures.figure import Figure
from topicstore_benchmarks.report.run import Run, load
from topicstore_benchmarks.results import SCHEMA, UNITS
from topicstore_conformance.conditions.skipping import need_data

KINDS = {"sqlite": "peer", "raw rocksdb": "limit"}
Values = Mapping[tuple[str, str, str], float]
"""The values of a trial by contender, phase and metric."""


def made_up(directory: Path, *trials: Values) -> Run:
    """Return a run with the given values of trials of the workload ``fleet``."""
    rows = [
        {
            "run": "run",
            "trial": f"fleet-commit-{number}",
            "contender": contender,
            "kind": KINDS.get(contender, "topicstore"),
            "durability": "commit",
            "workload": "fleet",
            "workload_messages": 1_000,
            "workload_topics": 10,
            "workload_bytes": 9_000,
            "repetition": number,
            "phase": phase,
            "metric": metric,
            "value": value,
            "unit": UNITS[metric],
            "messages": 1_000,
            "status": "ok",
            "started": dt.datetime.now(dt.UTC),
            **dict.fromkeys(("versions", "settings", "machine"), "{}"),
        }
        for number, values in enumerate(trials, 1)
        for (contender, phase, metric), value in values.items()
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), directory / "results.parquet")
    return load(directory / "results.parquet")


def figures(run: Run, **bound: object) -> dict[str, tuple[float, bool | None]]:
    made = Bound(workload="fleet", name="it", **bound)  # type: ignore[arg-type]
    return {one.subject: (round(one.value, 6), one.held) for one in made.figures(run)}


RATE = "messages_per_second"


def test_ratios_are_medians_of_ratios_within_a_trial(tmp_path: Path) -> None:
    """A ratio is the median of ratios within trials, so a trial that was slow for both sides doesn't distort it."""
    trials = [
        {("block", "store", RATE): 40.0 / slow, ("sqlite", "store", RATE): rate / slow}
        for slow, rate in ((1, 10), (100, 20), (1, 5))
    ]
    run = made_up(tmp_path, *trials)
    assert {"block": (4.0, True)} == figures(run, subjects=("block",), phase="store", other="sqlite", least=4)
    assert {"block": (4.0, False)} == figures(run, subjects=("block",), phase="store", other="sqlite", least=4.1)


def test_values_by_themselves_and_of_another_phase(tmp_path: Path) -> None:
    """A bound applies to a value, or to its ratio to another phase; contenders without values yield no figure."""
    run = made_up(tmp_path, {("block", "wildcard", "seconds"): 0.5, ("block", "replay all", "seconds"): 2.0})
    asked = {"subjects": ("block", "absent"), "phase": "wildcard", "metric": "seconds"}
    assert {"block": (0.5, True)} == figures(run, **asked, most=0.5)
    assert {"block": (0.25, False)} == figures(run, **asked, other_phase="replay all", most=0.2)


def test_what_is_compacted(tmp_path: Path) -> None:
    """A bound on a compacted contender uses its values after ``compact``, and the peer's uncompacted ones."""
    values = {
        ("block", "wildcard", RATE): 10.0,
        ("block", "wildcard, compacted", RATE): 30.0,
        ("block", "store", "bytes_per_message"): 50.0,
        ("block", "compact", "bytes_per_message"): 20.0,
        ("sqlite", "wildcard", RATE): 15.0,
        ("sqlite", "store", "bytes_per_message"): 100.0,
    }
    run = made_up(tmp_path, values)
    both = ("block", "block, compacted")
    found = figures(run, subjects=both, phase="wildcard", other="sqlite", least=1.5)
    assert {"block": (0.666667, False), "block, compacted": (2.0, True)} == found
    found = figures(run, subjects=both, phase="store", metric="bytes_per_message", other="sqlite", most=0.3)
    assert {"block": (0.5, False), "block, compacted": (0.2, True)} == found


def test_the_overview_marks_the_best_layout(tmp_path: Path) -> None:
    """The overview marks the best layout in each row, by the highest rate or the lowest value, and never SQLite."""
    values = {
        ("block", "store", RATE): 2_000.0,
        ("skipstream", "store", RATE): 1_000.0,
        ("sqlite", "store", RATE): 9_000.0,
        ("block", "reopen", "seconds"): 0.5,
        ("skipstream", "reopen", "seconds"): 0.25,
    }
    found = section_of("layouts", made_up(tmp_path, values), ())
    text = found.sheets[0].markdown()
    assert "fleet: 1,000 messages, 10 topics" in text
    assert "| Store, messages/s | **2.00 k** | 1.00 k | 9.00 k |" in text
    assert "| Reopen, s | 0.50 | **0.25** |  |" in text
    assert Figure(data="fleet", subject="block", name="store", value=2_000.0, unit="messages/s") in found.figures


@pytest.mark.parametrize(("section", "workload"), [(layouts, "bus"), (layouts, "fleet"), (limits, "one-topic-random")])
def test_every_bound_is_of_something_measured(section: object, workload: str) -> None:
    """Every bound yields a figure for each of its contenders that was measured."""
    if workload == "bus":
        need_data("bus.parquet")
    told: list[str] = []
    run = measure(section.plan(workload, 2_000, 1), told.append)  # type: ignore[attr-defined]
    bounds = [bound for bound in section.BOUNDS if bound.workload == workload]  # type: ignore[attr-defined]
    there = {name.partition(",")[0] for name in run.contenders} | {"rocksdb-block"}
    expected = {(b.name, s) for b in bounds for s in b.subjects if s.partition(",")[0] in there}
    assert expected
    found = section_of("it", run, bounds).figures
    assert expected == {(one.name, one.subject) for one in found if one.held is not None}
    assert [f"{workload}: messages", f"{workload}-commit-1: store"] == told[:2]


def test_a_wrong_replay_fails_all_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong replay of one contender raises AssertionError, so that no figures are reported for any."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "harness"))
    faulty = ContenderSpec(name="faulty", kind="peer", target="faulty_contenders:Losing")
    plan = msgspec.structs.replace(layouts.plan("fleet", 1_000, 1), contenders=(faulty,))
    with pytest.raises(AssertionError, match="faulty, replay all: wrong replay: a replay of '#' from 0 gave 999 of "):
        measure(plan, lambda _: None)


@pytest.mark.parametrize("workload", limits.WORKLOADS)
def test_messages_of_the_limits(workload: str) -> None:
    """Payloads of the section ``limits`` have about 128 bytes, and the workload's name states the number of topics."""
    (made,) = (one.make() for one in limits.plan(workload, 2_000, 1).workloads)
    table = pa.Table.from_batches([made.part(number) for number in range(made.parts)])
    sizes = set(map(len, table["payload"].to_pylist()))
    assert sizes <= set(range(120, 137))
    assert (1 if workload.startswith("one-topic") else 1_000) == len(set(table["topic"].to_pylist()))
