"""The section ``layouts``: every layout on RocksDB, compared with SQLite and with the bare engine."""

from __future__ import annotations

from functools import partial

from topicstore_benchmarks.contenders.catalogue import ContenderSpec
from topicstore_benchmarks.harness.plan import Plan
from topicstore_benchmarks.results import DEVICE, LATE_START, REPLAY_ALL, STORE, WILDCARD, compacted
from topicstore_benchmarks.workloads.definition import read

from .bounds import Bound, plan_of

__all__ = ["BOUNDS", "WORKLOADS", "plan"]

WORKLOADS = ("bus", "fleet")
_BLOCK, _ENGINE, _SQLITE = "rocksdb-block", "raw rocksdb", "sqlite"
_SKIP, _OPTIMIZED, _REFERENCE = "rocksdb-skipstream", "rocksdb-wildcard_optimized", "rocksdb-reference"
_COMPACTED = compacted(_BLOCK)
_BLOCKS, _KEYED = (_BLOCK, _COMPACTED), (_SKIP, _OPTIMIZED)


def _of_every_set(workload: str) -> tuple[Bound, ...]:
    bound = partial(Bound, workload=workload)
    late = "first message of a late start, ms"
    everybody = (_REFERENCE, *_BLOCKS, *_KEYED)
    return (
        bound(subjects=_KEYED, name="store, times SQLite", phase=STORE, other=_SQLITE, least=2.5),
        bound(subjects=_KEYED, name="replay all, times the engine's scan", phase=REPLAY_ALL, other=_ENGINE, least=0.4),
        bound(subjects=everybody, name=late, phase=LATE_START, metric="first_message_ms", most=10),
        _milliseconds(workload, _BLOCK, "reopen", "reopen", 200),
    )


def _milliseconds(workload: str, subject: str, what: str, phase: str, most: float) -> Bound:
    bound = partial(Bound, metric="seconds", scale=1_000)
    return bound(workload=workload, subjects=(subject,), name=f"{what}, ms", phase=phase, most=most)


_bus, _fleet = partial(Bound, workload="bus"), partial(Bound, workload="fleet")
_beside_sqlite = partial(_bus, other=_SQLITE)
_share = partial(_bus, subjects=(_COMPACTED,), metric="seconds", other_phase=REPLAY_ALL)

BOUNDS = (
    _beside_sqlite(subjects=(_BLOCK,), name="store, times SQLite", phase=STORE, least=8),
    _beside_sqlite(subjects=(_BLOCK,), name="replay all, times SQLite", phase=REPLAY_ALL, least=2.5),
    _beside_sqlite(subjects=(_COMPACTED,), name="replay all, times SQLite", phase=REPLAY_ALL, least=2),
    _beside_sqlite(subjects=_BLOCKS, name="one route, times SQLite", phase=WILDCARD, least=1.5),
    _beside_sqlite(subjects=_BLOCKS, name="five vehicles, times SQLite", phase="five vehicles", least=1.5),
    _beside_sqlite(
        subjects=_BLOCKS, name="bytes on disk, times SQLite's", phase=STORE, metric="bytes_per_message", most=0.125
    ),
    _share(name="five topics, times a replay of all", phase=DEVICE, most=0.1),
    _share(name="busy topic, times a replay of all", phase="busy topic", most=0.067),
    _milliseconds("bus", _SKIP, "five topics", DEVICE, 28),
    _milliseconds("bus", _SKIP, "busy topic", "busy topic", 29),
    *_of_every_set("bus"),
    _fleet(
        subjects=(*_BLOCKS, *_KEYED),
        name="one metric, times the rate of all",
        phase=WILDCARD,
        other_phase=REPLAY_ALL,
        least=0.77,
    ),
    _milliseconds("fleet", _SKIP, "five devices", DEVICE, 100),
    _milliseconds("fleet", _COMPACTED, "five devices", DEVICE, 300),
    _fleet(subjects=(_BLOCK,), name="store, times the engine's put", phase=STORE, other=_ENGINE, least=0.25),
    *_of_every_set("fleet"),
)
"""The bounds of this section, for both workloads."""


def plan(workload: str, messages: int, repetitions: int) -> Plan:
    """Return the plan for one of `WORKLOADS`, with RocksDB's contenders and SQLite.

    The larger workload is not measured with `reference`, which reads all messages for every filter.
    """

    def takes_part(spec: ContenderSpec) -> bool:
        return (spec.backend == "rocksdb" or spec.name == _SQLITE) and (workload, spec.name) != ("fleet", _REFERENCE)

    return plan_of(read(workload), messages, repetitions, takes_part)
