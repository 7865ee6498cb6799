"""``/retained``: the retained messages, at most one for each topic."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, put
from litestar.exceptions import ClientException, NotFoundException
from litestar.params import JSONBody, QueryParameter

import topicstore as ts
from topicstore.files.formats import JsonMessage, json_message
from topicstore.server.http.context import TheContext
from topicstore.server.http.formats.request_bodies import GivenMessage, message_of
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import After, Limit, Page, fitting
from topicstore.server.mqtt.reserved_topics import check_published

__all__ = ["ROUTES"]

_Filter = Annotated[str, QueryParameter(name="filter", description="A topic filter of MQTT.")]


class Cleared(msgspec.Struct):
    """A topic whose retained message was cleared."""

    topic: str
    cleared: bool


@get("/retained", guards=[needs("read")], tags=["retained"], sync_to_thread=True)
def retained(
    context: TheContext, topic_filter: _Filter = "#", after: After = None, limit: Limit = 100
) -> Page[JsonMessage]:
    """Return a page of the unexpired retained messages that match a filter, sorted by topic.

    `next` is the last topic of the page; null on the last page.
    """
    found = context.db.retained(topic_filter, after=after, limit=limit + 1)
    shown = found[: min(limit, fitting(message.payload for message in found))]
    return Page(items=list(map(json_message, shown)), next=shown[-1].topic if len(shown) < len(found) else None)


@put("/retained", guards=[needs("write")], tags=["retained"], sync_to_thread=True)
def set_retained(context: TheContext, data: JSONBody[GivenMessage]) -> JsonMessage:
    """Publish a message that becomes its topic's retained message; subscribers receive it like other messages.

    Its payload must not be empty; `DELETE /retained` clears a retained message.
    """
    message = msgspec.structs.replace(message_of(data), retain=True)
    check_published([message.topic])
    if not message.payload:
        raise ClientException("a retained message has a payload; DELETE /retained?topic=… clears a topic's")
    context.db.publish([message])
    return json_message(message)


@delete("/retained", guards=[needs("write")], tags=["retained"], status_code=200, sync_to_thread=True)
def clear_retained(
    context: TheContext, topic: Annotated[str, QueryParameter(description="The topic, without wildcards.")]
) -> Cleared:
    """Clear the retained message of a topic by publishing an empty message, which subscribers receive."""
    if not _there(context.db, topic):
        raise NotFoundException(f"topic {topic!r} has no retained message")
    context.db.publish([ts.Message(topic, b"", retain=True)])
    return Cleared(topic, cleared=True)


def _there(db: ts.Database, topic: str) -> bool:
    if "+" in topic or "#" in topic:
        raise ts.InvalidTopicError(f"{topic!r} is a filter; name one topic")
    return bool(db.retained(topic, limit=1))


ROUTES = [retained, set_retained, clear_retained]
