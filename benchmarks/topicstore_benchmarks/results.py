"""The results of a benchmark: a Parquet file with a row for each measured value of every repetition.

A run's directory::

    <run>/run.json               the requested options, the time of the start, the machine
    <run>/trials/<name>.parquet  the rows of one trial: a workload, a durability and a repetition, all contenders;
                                 written by rename, so that an interrupted run continues with the missing trials
    <run>/results.parquet        the rows of all trials, `SCHEMA`
    <run>/summary.parquet        the median, minimum and maximum of each value over the trials, by Spark SQL
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
"""The first phase. A contender for which it fails runs no other phase."""
REPLAY_ALL, WILDCARD, DEVICE, LATE_START = "replay all", "wildcard", "one device", "late start"
"""The requests of every workload: all messages; a filter that many topics match; a few single devices, one after the
other, which the phase ``mixed`` reads, too; and the last hundredth of the messages."""

WORKER = "worker"
"""The phase, after all others, that reports values of the whole worker: its memory."""


def compacted(request: str) -> str:
    """Return the name of the phase in which a request is measured again after compaction."""
    return f"{request}, compacted"


def phases(requests: Iterable[str], *, mixed: bool = True) -> tuple[str, ...]:
    """Return all phases with these requests, in the order in which they run.

    ``mixed`` is the last one because it stores more messages, and all replays must read the same ones.
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
``peak_memory``: of the phase ``worker``, the peak resident memory of the worker's process;
``memory_before``: the same before the contender was opened, which includes Python and a part of the messages.
"""

_STRING = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("run", _STRING, nullable=False),  # the name of the run's directory, for comparisons
        pa.field("trial", _STRING, nullable=False),  # values of one trial may be compared by ratios
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
        pa.field("messages", pa.int64(), nullable=False),  # that the phase stored or read
        pa.field("status", _STRING, nullable=False),  # ok, skipped or failed
        pa.field("reason", pa.string()),  # why it was skipped or failed
        pa.field("started", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("versions", pa.string(), nullable=False),  # JSON: the versions of the contender's libraries
        pa.field("settings", pa.string(), nullable=False),  # JSON: the contender's settings
        pa.field("machine", pa.string(), nullable=False),  # JSON: processor, cores, memory, system, Python
    ]
)
"""The columns of the results, which have one row per value.

A skipped contender, or a phase that was skipped or failed, has one row with the metric ``status`` and the reason; its
repetition is 0 if it stands for all repetitions.
"""
