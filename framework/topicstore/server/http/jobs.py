"""Jobs: long-running work that a request starts without waiting for it, such as a verification or an export.

One job of each kind runs at a time. A stopping server cancels the jobs that can be cancelled, and waits for the others,
because the database must not be closed during them.

Requests may write files only below the directory that the settings allow. The user who runs the server may write to any
directory, because this user can do so without the server (`is_owner`).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
from litestar.exceptions import ClientException, HTTPException, PermissionDeniedException, ServiceUnavailableException

from topicstore.contract.errors import TopicstoreError

__all__ = [
    "CANCELLABLE",
    "Job",
    "JobCancelledError",
    "JobRunningError",
    "Jobs",
    "Kind",
    "Progress",
    "Work",
    "place_below",
    "place_of_owner",
]


def place_below(allowed: Path | None, name: str) -> Path:
    """Return the path of a target that a request names, relative to the allowed directory.

    An absolute name must lie below the allowed directory. Raises `PermissionDeniedException` if no directory is
    allowed, and `ClientException` for a name that leads outside, by ``..`` or by a link.
    """
    if allowed is None:
        raise PermissionDeniedException(
            "this server writes no exports for requests: name a directory for them in its settings, [http] export_dir"
        )
    root = allowed.resolve()
    try:
        place = (root / name).resolve()
    except (OSError, ValueError) as bad:
        raise ClientException(f"{name!r} is not a path: {bad}") from bad
    if place == root or not place.is_relative_to(root) or ".." in Path(name).parts:
        raise ClientException(f"{name!r} is not the name of a directory below export_dir")
    return place


def place_of_owner(database: Path, name: str) -> Path:
    """Return the path of a target that the server's owner names: absolute, or relative to the database's directory.

    A relative name stays relative, so that the database records an archive relative to itself.
    """
    return Path(name) if Path(name).is_absolute() else Path(os.path.relpath(database / name))


Kind = Literal["verify", "compact", "export", "checkpoint", "retention"]
State = Literal["running", "done", "failed", "cancelled"]

CANCELLABLE: frozenset[Kind] = frozenset(("verify", "compact", "export"))
"""The kinds of work that can be cancelled between two steps. A checkpoint is a single step of the engine, and a run of
retention must complete to leave a consistent state."""
_REMEMBERED = 100
"""Number of ended jobs that are kept in memory."""

_log = logging.getLogger("topicstore.server.http")


class JobRunningError(HTTPException):
    """A job of the same kind is running. No job was started."""

    status_code = 409


class JobCancelledError(Exception):
    """Raised within a job's work when the job was cancelled."""


class Progress:
    """The progress of a job, reported by its work. Written by the job's thread; reading needs no lock."""

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self.cancelled = threading.Event()

    def tell(self, done: int, total: int | None = None) -> None:
        """Set the progress. Raises `JobCancelledError` if the job was cancelled."""
        self.done, self.total = done, total
        if self.cancelled.is_set():
            raise JobCancelledError

    def stop(self) -> bool:
        """Count a step, and return whether the job was cancelled. Called before each step."""
        self.done += 1
        return self.cancelled.is_set()


Work = Callable[[Progress], Any]
"""A function that does the work of a job, and returns its result."""


@attrs.frozen(kw_only=True)
class Job:
    """A snapshot of a job. Times are microseconds since the epoch."""

    id: int
    kind: Kind
    request: dict[str, Any]
    """The parameters of the request that started the job."""
    state: State
    cancellable: bool
    """Whether the job can be cancelled."""
    cancelling: bool
    """Whether the job was cancelled and has not ended yet."""
    started: int
    ended: int | None
    done: int
    """Completed units, depending on the kind: messages of a verification, steps of a compaction, parts of an export."""
    total: int | None
    """Total number of units; None if it is unknown."""
    progress: float | None
    """The completed share, from 0 to 1; None if it is unknown."""
    result: Any
    """The result of the work; None before its end."""
    error: str | None
    """The text of the error, if the job failed."""
    title: str | None
    """The name of the error, as in the ``title`` of a problem document."""


@attrs.define(eq=False)
class _Running:
    id: int
    kind: Kind
    request: dict[str, Any]
    started: int
    progress: Progress = attrs.field(factory=Progress)
    state: State = "running"
    ended: int | None = None
    result: Any = None
    error: str | None = None
    title: str | None = None

    def shown(self) -> Job:
        done, total = self.progress.done, self.progress.total
        share = 1.0 if self.state == "done" else None if total is None else min(done / max(total, 1), 1.0)
        return Job(
            id=self.id,
            kind=self.kind,
            request=self.request,
            state=self.state,
            cancellable=self.kind in CANCELLABLE,
            cancelling=self.state == "running" and self.progress.cancelled.is_set(),
            started=self.started,
            ended=self.ended,
            done=done,
            total=total,
            progress=share,
            result=self.result,
            error=self.error,
            title=self.title,
        )


class Jobs:
    """The jobs of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the following attributes, and the state of each job."""
        self._running: dict[Kind, _Running] = {}
        self._ended: deque[_Running] = deque(maxlen=_REMEMBERED)
        self._ids = itertools.count(1)
        self._stopped = False
        self._threads = ThreadPoolExecutor(len(get_args(Kind)), "topicstore-job")

    def start(self, kind: Kind, request: dict[str, Any], work: Work) -> Job:
        """Start a job in a thread.

        Raises `JobRunningError` if a job of the same kind is running, `ServiceUnavailableException` if the server
        stops.
        """
        with self._lock:
            if self._stopped:
                raise ServiceUnavailableException("the server ends, and begins no more jobs")
            if kind in self._running:
                raise JobRunningError(f"job {self._running[kind].id} is a {kind} too, and runs; wait, or cancel it")
            job = _Running(next(self._ids), kind, request, _now())
            self._running[kind] = job
            self._threads.submit(self._run, job, work)
            return job.shown()

    def _run(self, job: _Running, work: Work) -> None:
        state: State = "failed"
        result, error, title = None, None, None
        try:
            result, state = work(job.progress), "done"
        except JobCancelledError:
            state = "cancelled"
        except (TopicstoreError, OSError, Warning) as bad:
            error, title = str(bad), type(bad).__name__
        except BaseException:  # noqa: BLE001 - it is logged, and becomes the job's error
            _log.exception("job %d, a %s, failed", job.id, job.kind)
            error, title = "the server failed; its log says why", "InternalServerError"
        with self._lock:
            job.state, job.result, job.error, job.title, job.ended = state, result, error, title, _now()
            del self._running[job.kind]
            self._ended.append(job)

    def __iter__(self) -> Any:
        """Iterate over snapshots of running jobs and of the last ended jobs, the newest first."""
        with self._lock:
            jobs = [*self._running.values(), *self._ended]
            return iter([job.shown() for job in sorted(jobs, key=lambda job: -job.id)])

    def find(self, number: int) -> Job | None:
        """Return a snapshot of a job; None if there is no such job, or it ended too long ago."""
        return next((job for job in self if job.id == number), None)

    def cancel(self, number: int) -> Job | None:
        """Cancel a job at its next step, and return its snapshot; no effect if it can't be cancelled or has ended.

        Returns None as `find` does.
        """
        with self._lock:
            for job in self._running.values():
                if job.id == number and job.kind in CANCELLABLE:
                    job.progress.cancelled.set()
        return self.find(number)

    def stop(self) -> None:
        """Refuse new jobs, and cancel running jobs that can be cancelled. Idempotent."""
        with self._lock:
            self._stopped = True
            for job in self._running.values():
                if job.kind in CANCELLABLE:
                    job.progress.cancelled.set()

    def join(self) -> None:
        """Wait until all jobs have ended, after `stop`."""
        self._threads.shutdown()


def _now() -> int:
    return time.time_ns() // 1_000
