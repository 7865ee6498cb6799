"""The section ``layouts``: every layout on RocksDB beside SQLite and the engine alone."""

from __future__ import annotations

from topicstore_benchmarks.contenders.catalogue import catalogue
from topicstore_benchmarks.harness.plan import Plan, Settings, WorkloadPlan
from topicstore_benchmarks.results import DEVICE, LATE_START, REPLAY_ALL, STORE, WILDCARD, compacted
from topicstore_benchmarks.workloads.definition import read

from .bounds import Bound

__all__ = ["BOUNDS", "WORKLOADS", "plan"]

WORKLOADS = ("bus", "fleet")
_BLOCK, _ENGINE, _SQLITE = "rocksdb-block", "raw rocksdb", "sqlite"
_SKIP, _OPTIMIZED, _REFERENCE = "rocksdb-skipstream", "rocksdb-wildcard_optimized", "rocksdb-reference"
_COMPACTED = compacted(_BLOCK)
_BLOCKS, _KEYED = (_BLOCK, _COMPACTED), (_SKIP, _OPTIMIZED)
_FIVE_TOPICS, _FIVE_DEVICES = "five topics", "five devices"


def _of_every_set(workload: str) -> tuple[Bound, ...]:
    return (
        Bound(workload=workload, subjects=_KEYED, name="store, times SQLite", phase=STORE, other=_SQLITE, least=2.5),
        Bound(
            workload=workload,
            subjects=_KEYED,
            name="replay all, times the engine's scan",
            phase=REPLAY_ALL,
            other=_ENGINE,
            least=0.4,
        ),
        Bound(
            workload=workload,
            subjects=(_REFERENCE, *_BLOCKS, *_KEYED),
            name="first message of a late start, ms",
            phase=LATE_START,
            metric="first_message_ms",
            most=10,
        ),
        _milliseconds(workload, _BLOCK, "reopen", "reopen", 200),
    )


def _bus(subjects: tuple[str, ...], what: str, phase: str, least: float) -> Bound:
    return Bound(
        workload="bus", subjects=subjects, name=f"{what}, times SQLite", phase=phase, other=_SQLITE, least=least
    )


def _share(subjects: tuple[str, ...], what: str, phase: str, most: float) -> Bound:
    return Bound(
        workload="bus",
        subjects=subjects,
        name=f"{what}, times a replay of all",
        phase=phase,
        metric="seconds",
        other_phase=REPLAY_ALL,
        most=most,
    )


def _milliseconds(workload: str, subject: str, what: str, phase: str, most: float) -> Bound:
    return Bound(
        workload=workload,
        subjects=(subject,),
        name=f"{what}, ms",
        phase=phase,
        metric="seconds",
        scale=1_000,
        most=most,
    )


BOUNDS = (
    _bus((_BLOCK,), "store", STORE, 8),
    _bus((_BLOCK,), "replay all", REPLAY_ALL, 2.5),
    _bus((_COMPACTED,), "replay all", REPLAY_ALL, 2),
    _bus(_BLOCKS, "one route", WILDCARD, 1.5),
    _bus(_BLOCKS, "five vehicles", "five vehicles", 1.5),
    Bound(
        workload="bus",
        subjects=_BLOCKS,
        name="bytes on disk, times SQLite's",
        phase=STORE,
        metric="bytes_per_message",
        other=_SQLITE,
        most=0.125,
    ),
    _share((_COMPACTED,), _FIVE_TOPICS, DEVICE, 0.1),
    _share((_COMPACTED,), "busiest topic", "busiest topic", 0.067),
    _milliseconds("bus", _SKIP, _FIVE_TOPICS, DEVICE, 28),
    _milliseconds("bus", _SKIP, "busiest topic", "busiest topic", 29),
    *_of_every_set("bus"),
    Bound(
        workload="fleet",
        subjects=(*_BLOCKS, *_KEYED),
        name="one metric, times the rate of all",
        phase=WILDCARD,
        other_phase=REPLAY_ALL,
        least=0.77,
    ),
    _milliseconds("fleet", _SKIP, _FIVE_DEVICES, DEVICE, 100),
    _milliseconds("fleet", _COMPACTED, _FIVE_DEVICES, DEVICE, 300),
    Bound(
        workload="fleet",
        subjects=(_BLOCK,),
        name="store, times the engine's put",
        phase=STORE,
        other=_ENGINE,
        least=0.25,
    ),
    *_of_every_set("fleet"),
)
"""Where a figure was one of a single topic or device, it is now one of the five that are asked for."""


def plan(workload: str, messages: int, repetitions: int) -> Plan:
    """Return what is measured with one of `WORKLOADS`: RocksDB's contenders and SQLite that can take part here.

    `reference`, which reads everything for every filter, takes no part in the larger one.
    """
    found = [
        spec
        for spec in catalogue().values()
        if (spec.backend == "rocksdb" or spec.name == _SQLITE) and (workload, spec.name) != ("fleet", _REFERENCE)
    ]
    return Plan(
        workloads=(WorkloadPlan.of(read(workload), messages),),
        durabilities=("commit",),
        contenders=tuple(spec for spec in found if spec.why_missing() is None),
        repetitions=repetitions,
        settings=Settings(mixed_seconds=0),
    )
