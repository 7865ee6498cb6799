"""``/queues``: durable, bounded queues, first in first out, of messages that wait to be forwarded."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, post, put
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import UNSET, UnsetType

import topicstore as ts
from topicstore.contract.arguments import KEEP
from topicstore.files.formats import JsonMessage, json_message
from topicstore.queues.queue import Queue, QueueInfo
from topicstore.queues.record import Overflow
from topicstore.server.http.context import TheContext
from topicstore.server.http.given_messages import GivenMessage, message_of
from topicstore.server.http.guards import needs
from topicstore.server.http.pages import Limit, Page

__all__ = ["ROUTES"]


class Bounds(msgspec.Struct, forbid_unknown_fields=True):
    """The bounds of a queue: what is left out stays as it is, null removes a bound."""

    max_messages: int | UnsetType | None = UNSET
    max_bytes: int | UnsetType | None = UNSET
    overflow: Overflow | UnsetType = UNSET


class Appended(msgspec.Struct):
    """The ids of the messages that were appended, in order; fewer if the queue had no room and drops the newest."""

    ids: list[int]


class Waiting(msgspec.Struct):
    """A message that waits in a queue."""

    id: int
    message: JsonMessage


class Upto(msgspec.Struct, forbid_unknown_fields=True):
    """The last message to remove from the head of a queue.

    Its id may be text, as the `next` of a page is: ids are larger than the numbers that JavaScript and jq keep exactly,
    and one that was rounded up would remove messages that nobody has read.
    """

    upto: Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(pattern="^[0-9]{1,20}$")]


class Committed(msgspec.Struct):
    """How many messages a commit has removed."""

    committed: int


class DroppedQueue(msgspec.Struct):
    """A queue that is gone, and how many messages waited in it."""

    queue: str
    dropped: int


@get("/queues", guards=[needs("read")], tags=["queues"], sync_to_thread=True)
def queues(context: TheContext) -> Page[QueueInfo]:
    """Return the figures of all queues, sorted by name."""
    return Page(items=list(context.db.queues))


@get("/queues/{name:str}", guards=[needs("read")], tags=["queues"], sync_to_thread=True)
def queue(context: TheContext, name: FromPath[str]) -> QueueInfo:
    """Return the figures of a queue."""
    return _queue(context.db, name).info()


@put("/queues/{name:str}", guards=[needs("write")], tags=["queues"], sync_to_thread=True)
def bound_queue(context: TheContext, name: FromPath[str], data: JSONBody[Bounds]) -> QueueInfo:
    """Create a queue if there is none of that name, and set its bounds."""
    given = {key: KEEP if value is UNSET else value for key, value in msgspec.structs.asdict(data).items()}
    return context.db.queues.open(name, **given).info()


@delete("/queues/{name:str}", guards=[needs("write")], tags=["queues"], status_code=200, sync_to_thread=True)
def drop_queue(context: TheContext, name: FromPath[str]) -> DroppedQueue:
    """Remove a queue with all messages that wait in it, for good."""
    waiting = len(_queue(context.db, name))
    context.db.queues.drop(name)
    return DroppedQueue(name, waiting)


@post("/queues/{name:str}/messages", guards=[needs("write")], tags=["queues"], sync_to_thread=True)
def append(context: TheContext, name: FromPath[str], data: JSONBody[list[GivenMessage]]) -> Appended:
    """Append messages at the end of a queue, all in one commit.

    If there is no room, the queue's `overflow` decides; `refuse` is 507, and none is appended.
    """
    return Appended(_queue(context.db, name).append(list(map(message_of, data))))


@get("/queues/{name:str}/messages", guards=[needs("read")], tags=["queues"], sync_to_thread=True)
def read(
    context: TheContext,
    name: FromPath[str],
    after: Annotated[int, QueryParameter(description="The id of the last message read.")] = 0,
    limit: Limit = 100,
) -> Page[Waiting]:
    """Return the messages that follow an id, by default from the head on, the oldest first.

    They stay in the queue until they are committed, and this may be called again. `next` is the id of the last one,
    null once no more wait.
    """
    found = _queue(context.db, name).peek(limit, after=after)
    items = [Waiting(number, json_message(message)) for number, message in zip(found.ids, found.messages, strict=True)]
    return Page(items=items, next=str(found.last) if items else None)


@post("/queues/{name:str}/commit", guards=[needs("write")], tags=["queues"], status_code=200, sync_to_thread=True)
def commit(context: TheContext, name: FromPath[str], data: JSONBody[Upto]) -> Committed:
    """Remove the messages up to and including an id, for good. It may be called again, and then removes none."""
    return Committed(_queue(context.db, name).commit(int(data.upto)))


def _queue(db: ts.Database, name: str) -> Queue:
    """Return a queue that is there: the library would create it."""
    if name not in db.queues:
        raise NotFoundException(f"there is no queue {name!r}")
    return db.queues.open(name)


ROUTES = [queues, queue, bound_queue, drop_queue, append, read, commit]
