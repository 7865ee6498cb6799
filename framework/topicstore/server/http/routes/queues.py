"""``/queues``: durable, bounded first-in, first-out queues of messages to be forwarded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, post, put
from litestar.exceptions import NotFoundException
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec import UNSET, UnsetType

import topicstore as ts
from topicstore.contract.arguments import KEEP
from topicstore.files.formats import JsonMessage, json_message
from topicstore.queues.queue import Queue, QueueInfo
from topicstore.queues.record import Overflow
from topicstore.server.http.context import TheContext
from topicstore.server.http.formats.request_bodies import GivenMessage, message_of
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import Limit, Page

__all__ = ["ROUTES"]

_Name = Annotated[str, PathParameter(description="The queue's name, percent-encoded.")]


class Bounds(msgspec.Struct, forbid_unknown_fields=True):
    """The bounds of a queue. A field that is left out doesn't change; null removes a bound."""

    max_messages: int | UnsetType | None = UNSET
    max_bytes: int | str | UnsetType | None = UNSET
    overflow: Overflow | UnsetType = UNSET


class Appended(msgspec.Struct):
    """The ids of the appended messages, in order; fewer than requested if a full queue drops the newest messages."""

    ids: list[int]


class Waiting(msgspec.Struct):
    """A message in a queue, with its id."""

    id: int
    message: JsonMessage


class Upto(msgspec.Struct, forbid_unknown_fields=True):
    """The last message to remove from the head of a queue.

    The id may be a string, as the `next` of a page is: ids exceed the integers that JavaScript and jq represent
    exactly, and an id that was rounded up would remove unread messages.
    """

    upto: Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(pattern="^[0-9]{1,20}$")]


class Committed(msgspec.Struct):
    """The number of messages that a commit removed."""

    committed: int


class DroppedQueue(msgspec.Struct):
    """A queue that was dropped, and the number of messages that were in it."""

    queue: str
    dropped: int


@get("/queues", guards=[needs("read")], tags=["queues"], sync_to_thread=True)
def queues(context: TheContext) -> Page[QueueInfo]:
    """Return the sizes and bounds of all queues, sorted by name."""
    return Page(items=list(context.db.queues))


@get("/queues/{name:str}", guards=[needs("read")], tags=["queues"], sync_to_thread=True)
def queue(context: TheContext, name: _Name) -> QueueInfo:
    """Return the sizes and bounds of a queue."""
    return _queue(context.db, name).info()


@put("/queues/{name:str}", guards=[needs("write")], tags=["queues"], sync_to_thread=True)
def bound_queue(context: TheContext, name: _Name, data: JSONBody[Bounds]) -> QueueInfo:
    """Set the bounds of a queue; create the queue if it doesn't exist."""
    given = {key: KEEP if value is UNSET else value for key, value in msgspec.structs.asdict(data).items()}
    return context.db.queues.open(name, **given).info()


@delete("/queues/{name:str}", guards=[needs("write")], tags=["queues"], status_code=200, sync_to_thread=True)
def drop_queue(context: TheContext, name: _Name) -> DroppedQueue:
    """Permanently remove a queue with all its messages."""
    waiting = len(_queue(context.db, name))
    context.db.queues.drop(name)
    return DroppedQueue(name, waiting)


@post("/queues/{name:str}/messages", guards=[needs("write")], tags=["queues"], sync_to_thread=True)
def append(context: TheContext, name: _Name, data: JSONBody[list[GivenMessage]]) -> Appended:
    """Append messages to a queue, all in one commit.

    If the queue is full, its `overflow` decides; with `refuse` the response is 507, and no message is appended.
    """
    return Appended(_queue(context.db, name).append(list(map(message_of, data))))


@get("/queues/{name:str}/messages", guards=[needs("read")], tags=["queues"], sync_to_thread=True)
def read(
    context: TheContext,
    name: _Name,
    after: Annotated[int, QueryParameter(description="The id of the last message read.")] = 0,
    limit: Limit = 100,
) -> Page[Waiting]:
    """Return the messages after an id, by default from the head, the oldest first.

    Messages stay in the queue until they are committed, so that a read can be repeated. `next` is the id of the last
    message, or null if there are no messages.
    """
    found = _queue(context.db, name).peek(limit, after=after)
    items = [Waiting(number, json_message(message)) for number, message in zip(found.ids, found.messages, strict=True)]
    return Page(items=items, next=str(found.last) if items else None)


@post("/queues/{name:str}/commit", guards=[needs("write")], tags=["queues"], status_code=200, sync_to_thread=True)
def commit(context: TheContext, name: _Name, data: JSONBody[Upto]) -> Committed:
    """Permanently remove the messages up to and including an id. Idempotent."""
    return Committed(_queue(context.db, name).commit(int(data.upto)))


def _queue(db: ts.Database, name: str) -> Queue:
    """Return an existing queue, because the library would create a missing one."""
    if name not in db.queues:
        raise NotFoundException(f"there is no queue {name!r}")
    return db.queues.open(name)


ROUTES = [queues, queue, bound_queue, drop_queue, append, read, commit]
