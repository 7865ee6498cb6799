"""Jobs: long work that a request asks for and doesn't wait for, such as a verification or an export.

One job of a kind runs at a time. When the server ends, those that can be cancelled are; the others end first, since a
database isn't closed in the middle of them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import attrs
from litestar.exceptions import HTTPException, ServiceUnavailableException

from topicstore.contract.errors import TopicstoreError

__all__ = ["CANCELLABLE", "Job", "JobCancelledError", "JobRunningError", "Jobs", "Kind", "Progress", "Work"]

Kind = Literal["verify", "compact", "export", "checkpoint", "retention"]
State = Literal["running", "done", "failed", "cancelled"]

CANCELLABLE: frozenset[Kind] = frozenset(("verify", "compact", "export"))
"""The kinds of work that can be cancelled between two of their steps. A checkpoint is one step of the engine, and a run
of retention leaves nothing half done only at its end."""
_REMEMBERED = 100
"""How many jobs that have ended are remembered."""

_log = logging.getLogger("topicstore.server.http")


class JobRunningError(HTTPException):
    """A job of that kind is running, and a second one has to wait. Nothing was begun."""

    status_code = 409


class JobCancelledError(Exception):
    """Raised within a job's work when it is to end."""


class Progress:
    """How far a job is, as its work tells. Written by its thread; reading needs no lock."""

    def __init__(self) -> None:
        self.done = 0
        self.total: int | None = None
        self.cancelled = threading.Event()

    def tell(self, done: int, total: int | None = None) -> None:
        """Note how far the work is. Raises `JobCancelledError` if it is to end here."""
        self.done, self.total = done, total
        if self.cancelled.is_set():
            raise JobCancelledError

    def stop(self) -> bool:
        """Say whether the work is to end, for work that asks before each of its steps."""
        self.done += 1
        return self.cancelled.is_set()


Work = Callable[[Progress], Any]
"""Does what a job is for, and returns its result."""


@attrs.frozen(kw_only=True)
class Job:
    """A job at one moment. Times are microseconds since the epoch."""

    id: int
    kind: Kind
    request: dict[str, Any]
    """What was asked for."""
    state: State
    cancellable: bool
    """Whether it can be cancelled; otherwise it goes on to its end."""
    cancelling: bool
    """Whether it was asked to end, and hasn't yet."""
    started: int
    ended: int | None
    done: int
    """What was done, in what the kind counts: messages of a verification, steps of a compaction, parts of an export."""
    total: int | None
    """Of how many; None if that isn't known before."""
    progress: float | None
    """From 0 to 1; None if it isn't known."""
    result: Any
    """What the work returned; None before its end."""
    error: str | None
    """Why it failed."""
    title: str | None
    """The name of the error, as the problem of a request has it."""


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
    """The jobs of one server. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the attributes below, and the state of each job."""
        self._running: dict[Kind, _Running] = {}
        self._ended: deque[_Running] = deque(maxlen=_REMEMBERED)
        self._ids = itertools.count(1)
        self._stopped = False
        self._threads = ThreadPoolExecutor(len(get_args(Kind)), "topicstore-job")

    def start(self, kind: Kind, request: dict[str, Any], work: Work) -> Job:
        """Begin a job.

        Raises `JobRunningError` if one of that kind is running, `ServiceUnavailableException` if the server ends.
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
        except BaseException:  # noqa: BLE001 - it is logged, and shown as the job's error
            _log.exception("job %d, a %s, failed", job.id, job.kind)
            error, title = "the server failed; its log says why", "InternalServerError"
        with self._lock:
            job.state, job.result, job.error, job.title, job.ended = state, result, error, title, _now()
            del self._running[job.kind]
            self._ended.append(job)

    def __iter__(self) -> Any:
        """Iterate over the jobs that run and those that are remembered, the newest first."""
        with self._lock:
            jobs = [*self._running.values(), *self._ended]
            return iter([job.shown() for job in sorted(jobs, key=lambda job: -job.id)])

    def find(self, number: int) -> Job | None:
        """Return a job; None if there was none of that number, or it isn't remembered any more."""
        return next((job for job in self if job.id == number), None)

    def cancel(self, number: int) -> Job | None:
        """Ask a job to end at its next step, and return it; one that can't be cancelled, or has ended, stays as it is.

        None as in `find`.
        """
        with self._lock:
            for job in self._running.values():
                if job.id == number and job.kind in CANCELLABLE:
                    job.progress.cancelled.set()
        return self.find(number)

    def stop(self) -> None:
        """Begin no more jobs, and cancel those that can be. May be called twice."""
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
