"""The plugin that registers the built-in kinds of workloads."""

from __future__ import annotations

from topicstore import hookimpl
from topicstore.contract.plugin_specs import WorkloadSpec

__all__ = ["topicstore_workloads"]


@hookimpl
def topicstore_workloads() -> list[WorkloadSpec]:
    """Return the specifications of the built-in kinds."""
    return [
        WorkloadSpec(
            name="made",
            target="topicstore_benchmarks.workloads.made:MadeWorkload",
            summary="messages of devices that report in turns, at random, or a few of them most of the time",
        ),
        WorkloadSpec(
            name="file",
            target="topicstore_benchmarks.workloads.file:FileWorkload",
            summary="messages of a Parquet file, in its order",
        ),
    ]
