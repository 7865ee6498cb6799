"""``POST /messages``: publishing or storing the messages of a body."""

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
    """The result of publishing the messages of a request."""

    count: int
    stored: int
    """Number of messages that were stored."""
    routed: int
    """Number of messages that were only delivered to current subscribers."""
    retained: int
    """Number of messages that became their topics' retained messages."""


@post("/messages", guards=[needs("write")], tags=["messages"], status_code=200, opt={"consumes": tuple(READ)})
async def publish(
    context: TheContext,
    request: Request[Any, Any, Any],
    store: Annotated[bool, QueryParameter(description="Store all, whether or not anybody asks for them.")] = False,
) -> Published:
    """Publish the messages of the body, by its ``Content-Type``: JSON, JSON lines, an Arrow stream, or Parquet.

    JSON is an object or a list of objects; JSON lines have one object a line. An object has ``topic``, and either
    ``payload``, which is text or any other JSON, or ``payload_base64``. Optional keys are ``client_id``, ``qos``,
    ``retain``, ``timestamp`` and ``properties``. Arrow and Parquet have columns with the same names.

    As with MQTT, a message is stored if a persistence rule or a durable session requires it. With ``store`` all
    messages are stored, and retained messages don't change. Either all messages of a body are published or none; an
    error has the index of the first invalid message, from 0.
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
