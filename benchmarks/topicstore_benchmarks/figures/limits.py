"""The section ``limits``: the layout `block`, compared with puts and scans of the bare engine below it.

Messages have 128 bytes, JSON or random (incompressible) ones, and belong to various numbers of topics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topicstore_benchmarks.harness.plan import Plan
from topicstore_benchmarks.results import REPLAY_ALL, STORE
from topicstore_benchmarks.workloads.definition import Definition

from .bounds import Bound, plan_of

__all__ = ["BOUNDS", "WORKLOADS", "plan"]

_TOPICS: dict[str, dict[str, Any]] = {
    "one-topic": {"topic": "fleet/eu/bus-7/speed", "devices": 1, "device": "fleet/eu/bus-7/+"},
    "one-line": {"topic": "fleet/eu/bus-{device}/speed", "devices": 1_000, "device": "fleet/eu/bus-{device}/+"},
    "hundred-lines": {
        "topic": "fleet/line-{line}/bus-{device}/speed",
        "devices": 1_000,
        "groups": {"line": 100},
        "device": "fleet/line-{line}/bus-{device}/+",
    },
}
_PAYLOADS: dict[str, dict[str, Any]] = {
    "json": {
        "high": 90,
        "payload": '{"bus":"bus-{device:04}","speed":{value:04.1f},"at":{ms},"n":{number:010},"lat":30.26715,'
        '"lon":-97.74306,"heading":180,"doors":"closed"}',
    },
    "random": {"bytes": [128, 128]},
}
WORKLOADS = tuple(f"{topics}-{payload}" for topics in _TOPICS for payload in _PAYLOADS)

_LEAST = {
    ("one-topic", "rocksdb"): (1.2, 1.5),
    ("one-topic", "leveldb"): (1.1, 0.9),
    ("one-line", "rocksdb"): (0.8, 1.1),
    ("hundred-lines", "rocksdb"): (0.5, 0.5),
    ("hundred-lines", "leveldb"): (0.45, 0.4),
}
"""The lower bounds of the rates of storing and of replaying everything with `block`, as multiples of the engine's."""


def _bounds() -> Iterator[Bound]:
    for (topics, engine), least in _LEAST.items():
        for payload in _PAYLOADS:
            for phase, ratio in zip((STORE, REPLAY_ALL), least, strict=True):
                yield Bound(
                    workload=f"{topics}-{payload}",
                    subjects=(f"{engine}-block",),
                    name=f"{phase}, times the engine's",
                    phase=phase,
                    other=f"raw {engine}",
                    least=ratio,
                )


BOUNDS = tuple(_bounds())


def plan(workload: str, messages: int, repetitions: int) -> Plan:
    """Return the plan for one of `WORKLOADS`, with `block` and the bare engines."""
    engines, layouts = ("rocksdb", "leveldb"), (None, "block")
    return plan_of(
        _definition(workload, messages),
        messages,
        repetitions,
        lambda spec: spec.backend in engines and spec.layout in layouts,
    )


def _definition(name: str, messages: int) -> Definition:
    topics, _, payload = name.rpartition("-")
    values = {
        "kind": "made",
        "messages": messages,
        "client_id": "gateway-{gateway}",
        "qos": 1,
        "wildcard": "fleet/+/+/speed",
        "metrics": [{"name": "speed", **_PAYLOADS[payload]}],
        **_TOPICS[topics],
    }
    values["groups"] = {"gateway": 10, **values.get("groups", {})}
    return Definition(name=name, source=f"the section limits, {name}", values=values)
