"""``/health``: for whoever starts the server, and whoever sends clients to it. Nobody needs a token."""

from __future__ import annotations

import attrs
from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec

from topicstore.server.health import obstacles
from topicstore.server.http.context import TheContext

__all__ = ["OUTSIDE"]

_TAGS = ["Health"]


@attrs.frozen
class Liveness:
    """That the server answers."""

    live: bool


@attrs.frozen
class Readiness:
    """Whether the server can do its work."""

    ready: bool
    reasons: list[str]
    """A sentence for each thing that is in the way."""


@get("/health/live", tags=_TAGS, sync_to_thread=False)
def live() -> Liveness:
    """Say that the server answers. If it doesn't, it must be started again."""
    return Liveness(True)


@get(
    "/health/ready",
    tags=_TAGS,
    opt={"way": "health"},
    responses={503: ResponseSpec(Readiness, description="The server is not ready.", generate_examples=False)},
    sync_to_thread=True,
)
def ready(context: TheContext) -> Response[Readiness]:
    """Say whether the server can store messages.

    It can't if a shard takes no writes, the disk is nearly full or gone, the clock is behind the last position, the
    database is closed, or the server is stopping. The status is 503 then, and ``reasons`` has a sentence for each
    reason.
    """
    reasons = obstacles(context.db, min_free=context.settings.min_free)
    if context.stopping.is_set():
        reasons.append("the server is stopping")
    return Response(Readiness(not reasons, reasons), status_code=503 if reasons else 200)


OUTSIDE = [live, ready]
