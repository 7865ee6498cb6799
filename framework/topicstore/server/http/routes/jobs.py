"""``/jobs``: verification, compaction, export, checkpoint and retention as background jobs; ``/imports``.

``/imports`` has the progress of imports, and stores rows atomically with it. ``topicstore import`` uses these routes.
The progress is part of the state of each shard (`topicstore.cli.files.progress`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import attrs
import msgspec
import numpy as np
from litestar import Request, delete, get, post
from litestar.exceptions import ClientException, HTTPException, NotFoundException
from litestar.params import JSONBody, MsgPackBody, PathParameter

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import InvalidArgumentError, NotADatabaseError
from topicstore.contract.state import StateWrite
from topicstore.pubsub.publish import store_retaining
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.formats.request_bodies import UNPACKED, read
from topicstore.server.http.formats.response_bodies import ARROW, written
from topicstore.server.http.guards import is_owner, is_site, needs
from topicstore.server.http.jobs import Job, JobCancelledError, Kind, Progress, Work, place_below, place_of_owner
from topicstore.server.http.parameters import Page
from topicstore.server.mqtt.reserved_topics import check_published

__all__ = [
    "ROUTES",
]

_Number = Annotated[int, PathParameter(description="The job's id.")]
_KEYS = b"import/"
"""The prefix of the state keys of imports; the routes access no other keys."""


class Marker(msgspec.Struct):
    """The progress of an import in one shard."""

    shard: int
    key: bytes
    value: bytes


class Marked(msgspec.Struct, forbid_unknown_fields=True):
    """Rows of an import, with its progress."""

    rows: bytes
    """The rows in Arrow's IPC stream format."""
    markers: list[Marker]
    """The progress that is committed together with the rows."""
    stored: list[bool] | None = None
    """With ``retained``: by row, whether to store it; rows that were stored before are skipped. None: all rows."""
    retained: list[bool] | None = None
    """By row, whether a message with the retain flag becomes its topic's retained message. None: no row does."""


class Stored(msgspec.Struct):
    """The result of storing rows."""

    count: int
    lifted: int
    """Number of messages that arrived late, and were stored at the next position."""


@get("/imports", guards=[needs("write")], tags=["imports"])
async def imports(context: TheContext, request: Request[Any, Any, Any]) -> list[Marker]:
    """Return the progress of each import in each shard; keys and values are base64.

    On a site of a cluster, the owners of the shards answer, so the response includes the progress that any site had
    stored before the request. If one doesn't answer, the response is 503.
    """

    def own(shards: Collection[int]) -> list[Marker]:
        return [Marker(shard, key, value) for shard in shards for key, value in context.db.state(shard).scan(_KEYS)]

    found, missing = await context.gather(request, range(context.db.manifest.shards), own, list[Marker])
    for shard, why in missing.items():
        text = f"the progress in shard {shard} can't be read: {why}"
        raise HTTPException(status_code=503, detail=text, headers={"Retry-After": "1"})
    return sorted((marker for some in found for marker in some), key=lambda one: (one.shard, one.key))


@post("/imports", guards=[needs("write")], tags=["imports"], status_code=200)
async def store_rows(context: TheContext, request: Request[Any, Any, Any], data: MsgPackBody[Marked]) -> Stored:
    """Store rows of an import together with its progress, in one write for each shard.

    On a site of a cluster, each site stores the rows and the progress of its own shards. If one of them fails, the
    response says how many rows the others have stored; repeat the import, which continues from its progress.
    """
    loop, threads, forwarder = asyncio.get_running_loop(), context.threads, context.forwarder
    free = is_owner(request) or is_site(request)
    if forwarder is None:
        return await loop.run_in_executor(threads, _store, context, data, free)
    parts = await loop.run_in_executor(threads, _parts, context, data, free)
    here, stored = parts.pop(None, None), Stored(0, 0)
    if parts:
        forwarder.check(request, parts, here=here is not None)
        headers = {"Content-Type": "application/vnd.msgpack"}
        calls = {owner: forwarder.call(request, msgspec.msgpack.encode(part), headers) for owner, part in parts.items()}
        answers = await forwarder.ask(calls, Stored)
        for answer in answers:
            if isinstance(answer, Stored):
                stored = Stored(stored.count + answer.count, stored.lifted + answer.lifted)
        forwarder.raise_first(answers, f"other sites have stored {stored.count} rows")
    if here is not None:
        own = await loop.run_in_executor(threads, _store, context, here, free)
        stored = Stored(stored.count + own.count, stored.lifted + own.lifted)
    return stored


def _rows(context: Context, data: Marked, free: bool) -> MessageBatch:
    """Return the checked rows of an import; ``free``: whether they may have the topics of servers."""
    db = context.db
    db.storage.check_may_write()
    batch = read(data.rows, ARROW, UNPACKED * context.settings.body_size)
    if not free:
        check_published(to_iterable(batch.topics))
    for marker in data.markers:
        if not marker.key.startswith(_KEYS) or not 0 <= marker.shard < db.manifest.shards:
            raise InvalidArgumentError(f"{marker.key!r} is not the key of an import, or there is no such shard")
    for flags in (data.stored, data.retained) if data.retained is not None else ():
        if flags is not None and len(flags) != len(batch):
            raise InvalidArgumentError("stored and retained have an entry for each row")
    return batch


def _store(context: Context, data: Marked, free: bool) -> Stored:
    db, batch = context.db, _rows(context, data, free)
    state: dict[int, list[StateWrite]] = {}
    for marker in data.markers:
        state.setdefault(marker.shard, []).append(StateWrite(marker.key, marker.value))
    if data.retained is None:
        result = db.store(batch, state=state)
    else:
        stored = data.stored if data.stored is not None else [True] * len(batch)
        result = store_retaining(db.storage, batch, state, stored=stored, retained=data.retained)
    return Stored(result.count, result.lifted)


def _parts(context: Context, data: Marked, free: bool) -> dict[Any, Marked]:
    """Return the parts of an import by the sites of the cluster that store them; that of this site has the key None."""
    from topicstore.server.http.forwarding import owners_of  # imported only on a site of a cluster

    batch, site = _rows(context, data, free), context.db.cluster
    assert site is not None  # noqa: S101 - there is a forwarder
    shards = [context.db.storage.shard_of(client_id) for client_id in to_iterable(batch.client_ids)]
    owners = owners_of(site, {*shards, *(marker.shard for marker in data.markers)})
    rows: dict[Any, list[int]] = {owner: [] for owner in owners.values()}
    for row, shard in enumerate(shards):
        rows[owners[shard]].append(row)
    return {
        owner: Marked(
            rows=b"".join(written([batch.take(np.array(some, np.intp))], ARROW)),
            markers=[marker for marker in data.markers if owners[marker.shard] == owner],
            stored=None if data.stored is None else [data.stored[row] for row in some],
            retained=None if data.retained is None else [data.retained[row] for row in some],
        )
        for owner, some in rows.items()
    } or {None: data}


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
def job(context: TheContext, number: _Number) -> Job:
    """Return a job: its progress, and its result or error."""
    return _known(number, context.jobs.find(number))


@delete("/jobs/{number:int}", guards=[needs("admin")], tags=["jobs"], status_code=200, sync_to_thread=True)
def cancel_job(context: TheContext, number: _Number) -> Job:
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
        shards = context.db.storage.shards  # those that this site keeps
        total = sum(record.messages for shard in shards for record in shard.generations.listed())
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
    if os.path.lexists(target):  # False for a name that is too long: then the job fails
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

ROUTES = [imports, store_rows, jobs, start_job, job, cancel_job]
