"""Long-running work of a server, as jobs: start a job, poll its state, and return its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from .connection import Connection
from .problems import Problem, error_of

__all__ = ["run_job"]

T = TypeVar("T")

_FIRST_LOOK, _SLOWEST = 0.02, 0.5
"""The seconds before the first poll of a job, and the most between two polls."""


class _Job(msgspec.Struct):
    id: int
    state: Literal["running", "done", "failed", "cancelled"]
    done: int
    result: Any
    error: str | None
    title: str | None = None
    """The name of the exception class if the job failed."""


def run_job(
    connection: Connection, kind: str, result: type[T], *, progress: Callable[[int], None] | None = None, **asked: Any
) -> T:
    """Run a job in the server, wait for its end, and return its result. Raises the error with which the job failed.

    ``progress`` is called after each poll with the number of items done so far; the unit depends on the job.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    job = connection.change("POST", "/jobs", _Job, json={"kind": kind, **given})
    pause = _FIRST_LOOK
    while job.state == "running":
        time.sleep(pause)
        pause = min(pause * 2, _SLOWEST)
        job = connection.get(f"/jobs/{job.id}", _Job)
        if progress is not None:
            progress(job.done)
    if job.state != "done":
        raise error_of(Problem(title=job.title or "", detail=job.error or f"the {kind} was cancelled"), connection.url)
    return msgspec.convert(job.result, result)
