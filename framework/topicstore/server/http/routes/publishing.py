"""``POST /messages``: publishing, and storing, what a body holds."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import attrs
from litestar import Request, post
from litestar.params import QueryParameter

from topicstore.contract.columns import to_iterable
from topicstore.pubsub.publishing import PublishResult
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.formats.read import READ, UNPACKED, read
from topicstore.server.http.guards import needs
from topicstore.server.reserved_topics import check_published

__all__ = ["ROUTES"]


@attrs.frozen
class Published:
    """What became of the messages of a request."""

    count: int
    stored: int
    """How many were stored."""
    routed: int
    """How many were only passed on to current subscribers."""
    retained: int
    """How many became their topics' retained messages."""


@post("/messages", guards=[needs("write")], tags=["messages"], status_code=200, opt={"consumes": tuple(READ)})
async def publish(
    context: TheContext,
    request: Request[Any, Any, Any],
    store: Annotated[bool, QueryParameter(description="Store all, whether or not anybody asks for them.")] = False,
) -> Published:
    """Publish the messages of the body, by its ``Content-Type``: JSON, JSON lines, a stream of Arrow, or Parquet.

    JSON is an object or a list of objects; in JSON lines each is a line. They have ``topic`` and ``payload``, which is
    text or any other JSON, or ``payload_base64``; and, if need be, ``client_id``, ``qos``, ``retain``, ``timestamp``
    and ``properties``. Arrow and Parquet have columns of the same names.

    A message is stored if a persistence rule or a durable session asks for it, as if it came by MQTT; with ``store``
    in any case, and then nobody's retained messages change. Either all messages of a body are published or none; the
    error names the first wrong one, counting from 0.
    """
    body = await request.body()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        context.threads, _publish, context, body, request.headers.get("content-type", ""), store
    )


def _publish(context: Context, body: bytes, media_type: str, store: bool) -> Published:
    db = context.db
    db.storage.check_may_write()
    batch = read(body, media_type, UNPACKED * context.settings.body_size)
    check_published(to_iterable(batch.topics))
    result = db.store(batch) if store else db.publish(batch)
    if isinstance(result, PublishResult):
        return Published(result.count, result.stored, result.routed, result.retained)
    return Published(result.count, result.count, 0, 0)


ROUTES = [publish]
