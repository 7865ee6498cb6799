"""Simulated runs: complete rows of results, from a model of each contender's speed, with noise."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topicstore_benchmarks.results import SCHEMA, UNITS, phases

RunMaker = Callable[..., Path]
Row = dict[str, Any]

PHASES = phases(("replay all", "wildcard", "one device", "late start"))
_SMALL = {"fleet": (1_000_000, 9_000, 118_000_000)}
_WIDE = {**_SMALL, "lorawan": (250_000, 40_000, 21_000_000), "hot-topic": (500_000, 1, 60_000_000)}
CONTENDERS: dict[str, tuple[str, str | None, str | None, float]] = {
    "block on rocksdb": ("topicstore", "rocksdb", "block", 2.4),
    "skipstream on rocksdb": ("topicstore", "rocksdb", "skipstream", 2.1),
    "reference on rocksdb": ("topicstore", "rocksdb", "reference", 1.5),
    "block on leveldb": ("topicstore", "leveldb", "block", 1.2),
    "table on duckdb": ("topicstore", "duckdb", "table", 0.6),
    "SQLite": ("peer", None, None, 0.8),
    "Redis Streams": ("peer", None, None, 0.7),
    "NATS JetStream": ("peer", None, None, 1.0),
    "RocksDB alone": ("limit", "rocksdb", None, 6.0),
    "Parquet": ("limit", None, None, 20.0),
}
"""The kind, backend, layout and speed of each contender, by name."""
_MACHINE = {"processor": "Made Processor 3000", "cores": 2, "memory": 8 << 30}


def _values(phase: str, size: float, speed: float, messages: int) -> Iterator[tuple[str, float]]:
    if phase == "worker":
        yield "peak_memory", 2e6 * size
    elif phase == "mixed":
        for side, (metric, factor) in product(("store", "read"), (("p50", 1), ("p99", 6), ("p999", 40))):
            yield f"{side}_{metric}_ms", factor * 0.4 / speed
    else:
        rate = 400_000 * speed * (1 + PHASES.index(phase) / 5)
        yield "seconds", messages / rate
        if phase not in ("reopen", "compact"):
            yield "messages_per_second", rate
        if phase not in ("reopen", "compact", "store"):
            yield "first_message_ms", 3 / speed
        if phase in ("store", "compact"):
            yield from (("disk_bytes", messages * size), ("bytes_per_message", size))


def _missing(phase: str, kind: str, layout: str | None) -> str | None:
    if kind == "limit" and phase not in ("store", "replay all", "worker"):
        return "a limit: nothing is asked of it but store and replay all"
    return "has nothing to compact" if "compact" in phase and layout != "block" else None


def _rows(
    name: str,
    noise: float,
    changes: Mapping[tuple[str, str], float],
    workloads: Mapping[str, tuple[int, int, int]],
    durabilities: Sequence[str],
    repetitions: int,
) -> Iterator[Row]:
    chance = random.Random(sum(map(ord, name)))
    for durability, (workload, sizes), repetition in product(durabilities, workloads.items(), range(repetitions + 1)):
        about = {
            "run": name,
            "trial": f"{workload}-{durability}-{repetition}",
            "durability": durability,
            "workload": workload,
            **dict(zip(("workload_messages", "workload_topics", "workload_bytes"), sizes, strict=True)),
            "repetition": repetition,
            "metric": "status",
            "unit": "",
            "messages": sizes[0],
            "started": dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.UTC),
            "versions": json.dumps({"library": "1.2"}),
            "settings": json.dumps({"synchronous": {"commit": "NORMAL", "sync": "FULL"}[durability]}),
            "machine": json.dumps(_MACHINE),
            **dict.fromkeys(("value", "reason")),
        }
        absent = {"contender": "RabbitMQ streams", "kind": "peer", "phase": "worker", "status": "skipped"}
        if repetition == 0:
            yield about | absent | {"reason": "rabbitmq-server is not on the path"}
        drift = chance.lognormvariate(0, 0.1)
        for (contender, (kind, backend, layout, speed)), phase in product(CONTENDERS.items(), (*PHASES, "worker")):
            row = about | {"contender": contender, "kind": kind, "backend": backend, "layout": layout, "phase": phase}
            here = speed * drift * (0.2 if durability == "sync" and phase == "store" else 1)
            here *= 4 if contender == "NATS JetStream" and workload == "hot-topic" else 1
            if reason := _missing(phase, kind, layout):
                if repetition == 0:
                    yield row | {"status": "skipped", "reason": reason}
            elif (contender, phase, workload) == ("Redis Streams", "wildcard", "lorawan"):
                yield row | {"status": "failed", "reason": "replay gave 12 of 13 messages"}
            else:
                for metric, value in _values(phase, 90 / speed, here, sizes[0]):
                    change = 1 if "bytes" in metric else changes.get((contender, phase), 1)
                    value *= chance.lognormvariate(0, noise) * (
                        change if metric == "messages_per_second" else 1 / change
                    )
                    yield row | {"metric": metric, "unit": UNITS[metric], "value": value, "status": "ok"}


def _make(
    directory: Path,
    name: str = "made",
    *,
    repetitions: int = 3,
    noise: float = 0.02,
    changes: Mapping[tuple[str, str], float] | None = None,
    workloads: Mapping[str, tuple[int, int, int]] = _SMALL,
    durabilities: Sequence[str] = ("commit",),
    edit: Callable[[Row], Row | None] = lambda row: row,
) -> Path:
    run = directory / name
    run.mkdir()
    rows = map(edit, _rows(name, noise, changes or {}, workloads, durabilities, repetitions))
    table = pa.Table.from_pylist([row for row in rows if row is not None], schema=SCHEMA)
    pq.write_table(table, run / "results.parquet")
    asked = {"command": ["bench", "run", name, "--preset", "quick"], "versions": {"topicstore": "0.1.0"}}
    (run / "run.json").write_text(json.dumps(asked))
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """A function that writes a run's directory, by default with one workload and one durability.

    ``changes``: the factors by which contenders are faster, by contender and phase. ``edit``: a function that changes
    each row, or returns None to remove it.
    """
    return partial(_make, tmp_path)


@pytest.fixture(scope="session")
def wide_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with three workloads and both durabilities."""
    return _make(tmp_path_factory.mktemp("runs"), workloads=_WIDE, durabilities=("commit", "sync"))
