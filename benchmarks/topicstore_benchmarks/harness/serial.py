"""The trials of a plan one after the other, without Spark and without anything that stays."""

from __future__ import annotations

import tempfile
from pathlib import Path

from topicstore_benchmarks.report.run import Run, load
from topicstore_benchmarks.timing import Progress

from .dataset import make
from .plan import Plan
from .trial import run_trial

__all__ = ["measure"]


def measure(plan: Plan, progress: Progress) -> Run:
    """Make the messages of all workloads, measure every trial, and return the results.

    Raises `WorkloadError`, and `AssertionError` if a contender failed in any phase.
    """
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as name:
        directory = Path(name)
        data = {}
        for workload in plan.workloads:
            progress(f"{workload.name}: messages")
            data[workload.name] = make(workload.definition, workload.messages, directory / "workloads").directory
        for trial in plan.trials():
            failed = run_trial(trial, plan, data[trial.workload], directory, progress).failed
            if failed:
                raise AssertionError("; ".join(failed))
        return load(directory)
