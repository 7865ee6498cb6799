"""``/health``: liveness and readiness, for supervisors and load balancers. No token is needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import attrs
from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.positions import span_text
from topicstore.server.http.context import TheContext

__all__ = ["OUTSIDE", "obstacles"]

_TAGS = ["Health"]
_TOLERATED = 1_000_000
"""Microseconds by which the clock may be behind the last position; corrections by time servers are smaller."""


@attrs.frozen
class Liveness:
    """The result of a liveness check."""

    live: bool


@attrs.frozen
class Readiness:
    """The result of a readiness check."""

    ready: bool
    reasons: list[str]
    """A sentence for each reason why the server is not ready."""


@get("/health/live", tags=_TAGS, sync_to_thread=False)
def live() -> Liveness:
    """Report that the server responds. Without a response, the server must be restarted."""
    return Liveness(True)


@get(
    "/health/ready",
    tags=_TAGS,
    opt={"way": "health"},
    responses={503: ResponseSpec(Readiness, description="The server is not ready.", generate_examples=False)},
    sync_to_thread=True,
)
def ready(context: TheContext) -> Response[Readiness]:
    """Report whether the server can store messages.

    The server can't if a shard refuses writes, the disk is nearly full or missing, the clock is behind the last
    position, the database is closed, or the server is stopping. Then the status is 503, and ``reasons`` has a sentence
    for each.
    """
    reasons = obstacles(context.db, min_free=context.settings.min_free)
    if context.stopping.is_set():
        reasons.append("the server is stopping")
    return Response(Readiness(not reasons, reasons), status_code=503 if reasons else 200)


def obstacles(db: ts.Database, *, min_free: int) -> list[str]:
    """Return a sentence for each reason why nothing can be stored now or soon; an empty list if there is none.

    The check is cheap. The sentences contain no stored data and no paths. ``min_free`` is the least number of free
    bytes on the disk.
    """
    try:
        db.storage.check_open()
        return [*_disk(db, min_free), *_shards(db)]
    except DatabaseClosedError:
        return ["the database is closed"]


def _disk(db: ts.Database, min_free: int) -> Iterator[str]:
    if "persistent" not in db.storage.capabilities:
        return
    try:
        free = shutil.disk_usage(db.path).free
    except OSError as bad:
        yield f"the disk can't be looked at: {bad.strerror}"
        return
    if free < min_free:
        yield f"the disk is nearly full: {free:,} bytes are free, fewer than {min_free:,}"


def _shards(db: ts.Database) -> Iterator[str]:
    skew = int(db.manifest.max_skew * 1_000_000) if db.manifest.timestamps == "message" else 0
    for shard in db.storage.shards:
        if shard.writer.failure is not None:
            yield f"shard {shard.number} takes no writes; the log and /api/v5/info say why"
        ahead = shard.writer.ahead()
        if ahead > _TOLERATED + skew:
            yield f"the clock is {span_text(ahead)} behind the last position of shard {shard.number}"


OUTSIDE = [live, ready]
