"""``/health``: liveness and readiness, for supervisors and load balancers. No token is needed."""

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


OUTSIDE = [live, ready]
