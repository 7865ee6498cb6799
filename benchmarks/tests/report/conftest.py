"""Runs that were never run: rows of the full form, from a model of who is how fast, with noise."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topicstore_benchmarks.results import SCHEMA, UNITS, phases

RunMaker = Callable[..., Path]

PHASES = phases(("replay all", "wildcard", "one device", "late start"))
_SMALL = {"fleet": (1_000_000, 9_000, 118_000_000)}
_WIDE = {
    **_SMALL,
    "lorawan": (250_000, 40_000, 21_000_000),
    "hot-topic": (500_000, 1, 60_000_000),
}
_TOPICSTORE = [
    (backend, layout)
    for backend, layouts in {
        "rocksdb": ("block", "skipstream", "wildcard_optimized", "reference"),
        "leveldb": ("block", "skipstream"),
        "duckdb": ("table",),
    }.items()
    for layout in layouts
]
CONTENDERS: dict[str, tuple[str, str | None, str | None, float]] = {
    **{f"{layout} on {backend}": ("topicstore", backend, layout, 2.4 - 0.3 * number)
       for number, (backend, layout) in enumerate(_TOPICSTORE)},
    "SQLite": ("peer", None, None, 0.8),
    "Redis Streams": ("peer", None, None, 0.7),
    "NATS JetStream": ("peer", None, None, 1.0),
    "RocksDB alone": ("limit", "rocksdb", None, 6.0),
    "Parquet": ("limit", None, None, 20.0),
}  # fmt: skip
"""Name -> kind, backend, layout, speed."""
_MACHINE = {
    "processor": "Made Processor 3000",
    "cores": 2,
    "memory": 8 << 30,
    "system": "Linux 6.1",
    "python": "3.11.7",
}


def _metrics(phase: str, speed: float, messages: int) -> Iterator[tuple[str, float]]:
    if phase == "mixed":
        for who in ("store", "read"):
            for metric, factor in (("p50", 1), ("p99", 6), ("p999", 40)):
                yield f"{who}_{metric}_ms", factor * 0.4 / speed
        return
    rate = 400_000 * speed * (1 + PHASES.index(phase) / 5)
    yield "seconds", messages / rate
    if phase not in ("reopen", "compact"):
        yield "messages_per_second", rate
    if phase not in ("reopen", "compact", "store"):
        yield "first_message_ms", 3 / speed
    if phase in ("store", "compact"):
        yield "disk_bytes", messages * 90 / speed
        yield "bytes_per_message", 90 / speed


def _missing(phase: str, kind: str, layout: str | None) -> str | None:
    if kind == "limit" and phase not in ("store", "replay all"):
        return f"a limit: nothing is asked of it but {PHASES[0]} and {PHASES[1]}"
    if "compact" in phase and layout != "block":
        return "has nothing to compact"
    return None


class _Maker:
    """Makes the rows of a run."""

    def __init__(self, name: str, seed: int, noise: float, changes: Mapping[tuple[str, str], float]) -> None:
        self._random = random.Random(seed)
        self._name, self._noise, self._changes = name, noise, changes

    def rows(
        self, workloads: Mapping[str, tuple[int, int, int]], durabilities: Sequence[str], repetitions: int
    ) -> Iterator[dict[str, Any]]:
        for durability in durabilities:
            for workload, sizes in workloads.items():
                yield from self._absent(workload, sizes, durability)
                for repetition in range(repetitions + 1):
                    drift = self._random.lognormvariate(0, 0.1)
                    for contender in CONTENDERS:
                        yield from self._cell(contender, workload, sizes, durability, repetition, drift)

    def _cell(
        self, contender: str, workload: str, sizes: tuple[int, int, int], durability: str, repetition: int, drift: float
    ) -> Iterator[dict[str, Any]]:
        kind, _backend, layout, speed = CONTENDERS[contender]
        about = self._row(contender, workload, sizes, durability, repetition)
        for phase in PHASES:
            if reason := _missing(phase, kind, layout):
                if repetition == 0:
                    yield about | {"phase": phase, "status": "skipped", "reason": reason}
                continue
            if (contender, phase) == ("Redis Streams", "wildcard") and workload == "lorawan":
                yield about | {"phase": phase, "status": "failed", "reason": "replay gave 12 of 13 messages"}
                continue
            here = speed * (0.2 if durability == "sync" and phase == "store" else 1) * drift
            here *= 4 if contender == "NATS JetStream" and workload == "hot-topic" else 1
            for metric, value in _metrics(phase, here, sizes[0]):
                yield about | self._value(contender, phase, metric, value)
        yield about | self._value(contender, "worker", "peak_memory", 2e8 / speed)

    def _value(self, contender: str, phase: str, metric: str, value: float) -> dict[str, Any]:
        change = 1 if "bytes" in metric else self._changes.get((contender, phase), 1)
        value *= self._random.lognormvariate(0, self._noise)
        value = value * change if metric == "messages_per_second" else value / change
        return {"phase": phase, "metric": metric, "unit": UNITS[metric], "value": value, "status": "ok", "reason": None}

    def _absent(self, workload: str, sizes: tuple[int, int, int], durability: str) -> Iterator[dict[str, Any]]:
        row = self._row("RabbitMQ streams", workload, sizes, durability, 0)
        yield row | {
            "kind": "peer",
            "phase": "worker",
            "status": "skipped",
            "reason": "rabbitmq-server is not on the path",
        }

    def _row(
        self, contender: str, workload: str, sizes: tuple[int, int, int], durability: str, repetition: int
    ) -> dict[str, Any]:
        kind, backend, layout, _speed = CONTENDERS.get(contender, ("peer", None, None, 1))
        return {
            "run": self._name,
            "trial": f"{workload}-{durability}-{repetition}",
            "contender": contender,
            "kind": kind,
            "backend": backend,
            "layout": layout,
            "durability": durability,
            "workload": workload,
            "workload_messages": sizes[0],
            "workload_topics": sizes[1],
            "workload_bytes": sizes[2],
            "repetition": repetition,
            "metric": "status",
            "value": None,
            "unit": "",
            "messages": sizes[0],
            "started": dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
            "versions": json.dumps({"library": "1.2"}),
            "settings": json.dumps({"synchronous": {"commit": "NORMAL", "sync": "FULL"}[durability]}),
            "machine": json.dumps(_MACHINE),
        }


def _make(
    directory: Path,
    name: str = "made",
    *,
    repetitions: int = 3,
    noise: float = 0.02,
    changes: Mapping[tuple[str, str], float] | None = None,
    workloads: Mapping[str, tuple[int, int, int]] = _SMALL,
    durabilities: Sequence[str] = ("commit",),
    edit: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda row: row,
) -> Path:
    run = directory / name
    run.mkdir()
    maker = _Maker(name, sum(map(ord, name)), noise, changes or {})
    rows = [edit(row) for row in maker.rows(workloads, durabilities, repetitions)]
    table = pa.Table.from_pylist([row for row in rows if row is not None], schema=SCHEMA)
    pq.write_table(table, run / "results.parquet")
    asked = {"command": ["bench", "run", name, "--preset", "quick"], "versions": {"topicstore": "0.1.0"}}
    (run / "run.json").write_text(json.dumps(asked))
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """Make a run's directory: one workload, one durability.

    ``changes``: by contender and phase, how many times as fast it is as else. ``edit``: what becomes of a row.
    """
    return partial(_make, tmp_path)


@pytest.fixture(scope="session")
def wide_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three workloads and both durabilities."""
    return _make(tmp_path_factory.mktemp("runs"), workloads=_WIDE, durabilities=("commit", "sync"))
