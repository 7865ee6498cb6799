"""The results of a benchmark: a Parquet file with a row for each measured value of every repetition.

A run's directory::

    <run>/run.json               the requested options, the time of the start, the machine
    <run>/trials/<name>.parquet  the rows of one trial: a workload, a durability and a repetition, all contenders;
                                 written whole, by rename, so that a run can continue with the missing ones
    <run>/results.parquet        the rows of all trials, `SCHEMA`
    <run>/summary.parquet        the median, the least and the most of each value over the trials, by Spark SQL
    <run>/report.html            the report
    <run>/workloads/             the messages
    <run>/scratch/               the files of contenders while a trial is measured
    <run>/LOCK                   held by the measuring process
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

__all__ = [
    "DEVICE",
    "LATE_START",
    "REPLAY_ALL",
    "SCHEMA",
    "STORE",
    "UNITS",
    "WILDCARD",
    "WORKER",
    "compacted",
    "phases",
]

STORE = "store"
"""The first phase. A contender that can't store takes part in no other."""
REPLAY_ALL, WILDCARD, DEVICE, LATE_START = "replay all", "wildcard", "one device", "late start"
"""Requests that every workload has: everything; what many topics match; a few single devices, one after the other,
which are read in the phase ``mixed`` too; and the last hundredth in time."""

WORKER = "worker"
"""The phase, after all others, of values of a whole worker: its memory."""


def compacted(request: str) -> str:
    """Return the phase in which a request is measured again, of contenders that can compact."""
    return f"{request}, compacted"


def phases(requests: Iterable[str], *, mixed: bool = True) -> tuple[str, ...]:
    """Return all phases with these requests, in the order in which they run.

    ``mixed`` is the last one because it stores more messages: all replays before it are of the same ones.
    """
    asked = tuple(requests)
    return (STORE, *asked, "reopen", "compact", *map(compacted, asked), *(["mixed"] if mixed else []))


UNITS = {
    "seconds": "s",
    "messages_per_second": "messages/s",
    "first_message_ms": "ms",
    "store_p50_ms": "ms",
    "store_p99_ms": "ms",
    "store_p999_ms": "ms",
    "read_p50_ms": "ms",
    "read_p99_ms": "ms",
    "read_p999_ms": "ms",
    "disk_bytes": "bytes",
    "bytes_per_message": "bytes",
    "peak_memory": "bytes",
    "memory_before": "bytes",
}
"""Metrics and their units.

``seconds`` and ``messages_per_second``: of phases that move messages, and ``seconds`` of ``reopen`` and ``compact``.
``first_message_ms``: of replays. ``store_*`` and ``read_*``: of ``mixed``, the latency of one batch stored and of one
replay of a device; ``*_p999_ms`` only of a thousand values and more. ``disk_bytes`` and ``bytes_per_message``: after
``store`` (closed) and after ``compact``.
``peak_memory``: of the phase ``worker``, the highest resident size of the worker's process;
``memory_before``: what of it was there before the contender was opened, Python and a part of the messages.
"""

_STRING = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("run", _STRING, nullable=False),  # of the directory, for comparisons
        pa.field("trial", _STRING, nullable=False),  # same trial: measured side by side, ratios hold
        pa.field("contender", _STRING, nullable=False),
        pa.field("kind", _STRING, nullable=False),  # topicstore, peer or limit
        pa.field("backend", _STRING),  # of topicstore, and of limits of an engine
        pa.field("layout", _STRING),  # of topicstore
        pa.field("durability", _STRING, nullable=False),  # commit or sync
        pa.field("workload", _STRING, nullable=False),
        pa.field("workload_messages", pa.int64(), nullable=False),
        pa.field("workload_topics", pa.int64(), nullable=False),
        pa.field("workload_bytes", pa.int64(), nullable=False),  # of topics and payloads
        pa.field("repetition", pa.int32(), nullable=False),  # from 1; 0 stands for all
        pa.field("phase", _STRING, nullable=False),  # of `phases`, or "worker"
        pa.field("metric", _STRING, nullable=False),  # of UNITS, or "status"
        pa.field("value", pa.float64()),  # null with "status"
        pa.field("unit", _STRING, nullable=False),
        pa.field("messages", pa.int64(), nullable=False),  # that the phase moved
        pa.field("status", _STRING, nullable=False),  # ok, skipped or failed
        pa.field("reason", pa.string()),  # of what was skipped or failed
        pa.field("started", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("versions", pa.string(), nullable=False),  # JSON: what the contender is made of
        pa.field("settings", pa.string(), nullable=False),  # JSON: what was set
        pa.field("machine", pa.string(), nullable=False),  # JSON: processor, cores, memory, system, Python
    ]
)
"""One row per value. A contender that could not take part, or a phase that failed, has one row with the metric
``status`` and the reason; repetition 0 of it stands for all."""
