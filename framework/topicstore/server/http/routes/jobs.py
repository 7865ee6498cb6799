"""``/jobs``: verification, compaction, export, checkpoint and retention as background jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec
from litestar import Request, delete, get, post
from litestar.exceptions import ClientException, NotFoundException
from litestar.params import FromPath, JSONBody

from topicstore.contract.errors import NotADatabaseError
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.export_places import place_below, place_of_owner
from topicstore.server.http.guards import is_owner, needs
from topicstore.server.http.jobs import Job, JobCancelledError, Kind, Progress, Work
from topicstore.server.http.pages import Page

__all__ = ["ROUTES"]


class JobRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A job to start."""

    kind: Kind
    target: str | None = None
    """For an export or a checkpoint: the directory to write, below ``export_dir`` of the settings."""
    generations: list[int] | None = None
    """For an export: the generations to export; by default all sealed ones."""
    drop: bool = False
    """For an export: whether to remove the exported generations from the database, which then reads the export."""


@get("/jobs", guards=[needs("read")], tags=["jobs"], sync_to_thread=True)
def jobs(context: TheContext) -> Page[Job]:
    """Return the running jobs and the last hundred ended jobs, the newest first."""
    return Page(items=list(context.jobs))


@post("/jobs", guards=[needs("admin")], tags=["jobs"], status_code=202, sync_to_thread=True)
def start_job(context: TheContext, request: Request[Any, Any, Any], data: JSONBody[JobRequest]) -> Job:
    """Start a job; `GET /jobs/{id}` reports its progress. If a job of the same kind is running, the response is 409."""
    work = _WORK[data.kind](context, data, _place(context, request, data.target))
    asked = {key: value for key, value in msgspec.to_builtins(data).items() if key != "kind"}
    return context.jobs.start(data.kind, asked, work)


@get("/jobs/{number:int}", guards=[needs("read")], tags=["jobs"], sync_to_thread=True)
def job(context: TheContext, number: FromPath[int]) -> Job:
    """Return a job: its progress, and its result or error."""
    return _known(number, context.jobs.find(number))


@delete("/jobs/{number:int}", guards=[needs("admin")], tags=["jobs"], status_code=200, sync_to_thread=True)
def cancel_job(context: TheContext, number: FromPath[int]) -> Job:
    """Cancel a job at its next step. Checkpoints and retention runs can't be cancelled: the response is 409.

    The work that a compaction or an export has completed is kept, and the next job continues from there.
    """
    found = _known(number, context.jobs.cancel(number))
    if found.state == "running" and not found.cancellable:
        raise ClientException(f"a {found.kind} can't be cancelled: it ends by itself", status_code=409)
    return found


def _known(number: int, found: Job | None) -> Job:
    if found is None:
        raise NotFoundException(f"there is no job {number}; a hundred that have ended are remembered")
    return found


def _place(context: Context, request: Request[Any, Any, Any], name: str | None) -> Path | None:
    """Return the directory that a target names. Raises if the request may not write to it."""
    if not name:
        return None
    return (
        place_of_owner(context.db.path, name) if is_owner(request) else place_below(context.settings.export_dir, name)
    )


# --- the work of each kind ---


def _verify(context: Context, _: JobRequest, __: Path | None) -> Work:
    def work(progress: Progress) -> dict[str, Any]:
        total = context.db.info().messages
        report = context.db.verify(lambda messages: progress.tell(messages, total))
        return {"ok": report.ok, "messages": report.messages, "damages": report.damages}

    return work


def _compact(context: Context, _: JobRequest, __: Path | None) -> Work:
    def work(progress: Progress) -> Any:
        report = context.db.compact(stop=progress.stop)
        if progress.cancelled.is_set():
            raise JobCancelledError
        return report

    return work


def _export(context: Context, request: JobRequest, place: Path | None) -> Work:
    target = _target(request, place)
    archives = context.db.archives
    write = archives.archive if request.drop else archives.export

    def work(progress: Progress) -> dict[str, Any]:
        report = write(target, generations=request.generations, progress=progress.tell)
        return {**attrs.asdict(report), "dropped": request.drop}

    return work


def _checkpoint(context: Context, request: JobRequest, place: Path | None) -> Work:
    target = _target(request, place)
    if os.path.lexists(target):  # False for a name that is too long, which makes the job fail
        raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")

    def work(_: Progress) -> dict[str, Any]:
        context.db.checkpoint(target)
        return {"target": str(target), "messages": context.db.info().messages}

    return work


def _retention(context: Context, _: JobRequest, __: Path | None) -> Work:
    return lambda _: context.db.retention.run()


def _target(request: JobRequest, place: Path | None) -> Path:
    if place is None:
        raise ClientException(f"a job of kind {request.kind} needs a target, the directory to write")
    return place


_WORK: dict[Kind, Callable[[Context, JobRequest, Path | None], Work]] = {
    "verify": _verify,
    "compact": _compact,
    "export": _export,
    "checkpoint": _checkpoint,
    "retention": _retention,
}

ROUTES = [jobs, start_job, job, cancel_job]
