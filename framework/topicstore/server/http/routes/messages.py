"""``/messages``: replaying, publishing, storing and deleting messages; their counts by time.

``GET /messages`` replays as a page or as a stream, ``POST /messages`` publishes or stores the messages of a body, and
``DELETE /messages`` deletes by filter. ``/messages/explain`` has the statistics of a replay's reads, and
``/messages/histogram`` counts messages by time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Collection
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from litestar import Request, Response, delete, get, post
from litestar.datastructures import ResponseHeader
from litestar.exceptions import ClientException, HTTPException
from litestar.params import QueryParameter

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import InvalidCursorError, ShardElsewhereError
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.publish import PublishResult
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.formats.request_bodies import READ, UNPACKED, read
from topicstore.server.http.formats.response_bodies import ARROW, WRITTEN, chosen, written
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import (
    MOST,
    PAGE_BYTES,
    SHARDS,
    TheBy,
    TheFilter,
    TheOrder,
    TheStart,
    TheUntil,
    fitting,
    shards_asked,
    time_asked,
)
from topicstore.server.http.streaming import Measured, Streamed, ThreadedPieces
from topicstore.server.mqtt.reserved_topics import check_published
from topicstore.storage.counting import histogram as histograms
from topicstore.storage.reading.explain import Explanation
from topicstore.storage.reading.pages import ReplayPlace
from topicstore.storage.storage import Storage

if TYPE_CHECKING:
    from topicstore.server.http.forwarding import Parts

__all__ = [
    "NEXT",
    "ROUTES",
]

_Limit = Annotated[int | None, QueryParameter(ge=1, description="Stop after this many messages. Default: at the end.")]


@get("/messages/explain", guards=[needs("read")], tags=["messages"], opt={"way": "heavy"}, sync_to_thread=True)
def explain(
    context: TheContext,
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    until: TheUntil = None,
    by: TheBy = "position",
    order: TheOrder = "time",
    limit: _Limit = None,
) -> Explanation:
    """Run a replay, and return counts of what it read and skipped. The request takes as long as the replay.

    With ``limit`` the replay stops after this number of messages; then ``ended`` is false, and only those are counted.
    """
    db = context.db
    times = time_asked(db, start) or 0, time_asked(db, until)
    return db.explain(topic_filter, *times, by=by, order=order, limit=limit)


@get("/messages/histogram", guards=[needs("read")], tags=["messages"], opt={"way": "heavy"}, sync_to_thread=True)
def histogram(
    context: TheContext,
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    until: TheUntil = None,
    buckets: Annotated[int, QueryParameter(ge=1, le=1_000, description="How many spans of time.")] = 60,
) -> histograms.Histogram:
    """Return the number of matching messages in each of ``buckets`` intervals of time, from ``start`` to ``until``.

    With many messages, counts are estimated from statistics, and few messages are read. Then ``exact`` is false, and
    the messages within each group of about 65,000 that were stored consecutively count as evenly distributed. A shorter
    time or a narrower filter is counted exactly.
    """
    db = context.db
    found = time_asked(db, start), time_asked(db, until)
    return histograms.histogram(db.storage, TopicFilter(topic_filter), *found, buckets)


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

    def plus(self, other: Published) -> Published:
        """Return the sum of two results."""
        return Published(
            self.count + other.count,
            self.stored + other.stored,
            self.routed + other.routed,
            self.retained + other.retained,
        )


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

    On a site of a cluster, messages of publishers whose shards other sites write are forwarded there, or the response
    is 307 with their ``Location`` if the settings say so. Then either all messages of a site are published or none.
    While a shard has no owner, the response is 503 with ``Retry-After``.
    """
    body, threads = await request.body(), context.threads
    loop = asyncio.get_running_loop()
    media_type = request.headers.get("content-type", "")
    if context.forwarder is None:
        return await loop.run_in_executor(threads, lambda: _publish(context, _batch(context, body, media_type), store))
    parts, forwarder = await loop.run_in_executor(threads, _parts, context, body, media_type), context.forwarder
    published = Published(0, 0, 0, 0)
    if parts.elsewhere:
        forwarder.check(request, parts.elsewhere, here=bool(len(parts.here)))
        headers = {"Content-Type": ARROW}
        calls = {owner: forwarder.call(request, part, headers) for owner, part in parts.elsewhere.items()}
        answers = await forwarder.ask(calls, Published)
        for answer in answers:
            if isinstance(answer, Published):
                published = published.plus(answer)
        forwarder.raise_first(answers, f"{published.count} messages of the request were published by other sites")
    if len(parts.here) or not parts.elsewhere:
        try:
            published = published.plus(await loop.run_in_executor(threads, _publish, context, parts.here, store))
        except ShardElsewhereError as moved:
            if not parts.elsewhere:
                raise
            text = f"{moved}; {published.count} messages of the request were published by other sites"
            raise HTTPException(status_code=503, detail=text, headers={"Retry-After": "1"}) from moved
    return published


def _batch(context: Context, body: bytes, media_type: str) -> MessageBatch:
    """Return the checked messages of a body."""
    context.db.storage.check_may_write()
    batch = read(body, media_type, UNPACKED * context.settings.body_size)
    check_published(to_iterable(batch.topics))
    return batch


def _parts(context: Context, body: bytes, media_type: str) -> Parts:
    """Return the checked messages of a body by the sites of the cluster that store them."""
    from topicstore.server.http.forwarding import parts_of

    batch, site = _batch(context, body, media_type), context.db.cluster
    assert site is not None  # noqa: S101 - there is a forwarder
    shard_of = context.db.storage.shard_of
    return parts_of(site, batch, {one: shard_of(one) for one in set(to_iterable(batch.client_ids))})


def _publish(context: Context, batch: MessageBatch, store: bool) -> Published:
    db = context.db
    result = db.store(batch) if store else db.publish(batch)
    if isinstance(result, PublishResult):
        return Published(result.count, result.stored, result.routed, result.retained)
    return Published(result.count, result.count, 0, 0)


NEXT = "Topicstore-Next"
"""The response header with the token for the next page."""
_BATCH = 4_096


@get(
    "/messages",
    guards=[needs("read")],
    tags=["messages"],
    opt={"produces": WRITTEN, "way": "heavy"},
    response_headers=[ResponseHeader(NEXT, description="What `after` is for the next page.", documentation_only=True)],
    sync_to_thread=True,
)
def replay(
    context: TheContext,
    request: Request[Any, Any, Any],
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    until: TheUntil = None,
    by: TheBy = "position",
    order: TheOrder = "time",
    reverse: Annotated[bool, QueryParameter(description="The newest first.")] = False,
    limit: Annotated[
        int | None, QueryParameter(ge=1, le=MOST, description="Return a page of at most this many messages.")
    ] = None,
    after: Annotated[
        str | None,
        QueryParameter(description="The `Topicstore-Next` of a page: go on after it. It has the filter and the times."),
    ] = None,
    fresh: Annotated[
        bool, QueryParameter(description="On a site of a cluster, first get what other sites have stored.")
    ] = True,
) -> Response[Any]:
    """Return matching messages stored before the request, as JSON lines, CSV, Arrow or Parquet by ``Accept``.

    Without ``limit`` all messages are streamed, as fast as the client reads. With ``limit`` the response is a page,
    which also ends at 16 MB of payloads. If there are more messages, its header ``Topicstore-Next`` is a token for
    ``after``, with or without ``limit``. The pages of a replay have the same messages as one response would have had.
    Messages that are stored meanwhile are not included, and messages that are deleted meanwhile are missing.

    On a site of a cluster, the response has all messages that any site had stored before the request. If the log store
    doesn't answer, the response is 503, or with ``fresh=false`` it has the messages that this site has received.

    If reading fails after the headers were sent, the connection is closed before the end of the body. Then an Arrow
    stream ends with a batch without rows, whose metadata has the problem document as ``topicstore-problem``.
    """
    media_type = chosen(request, WRITTEN)
    db = context.db
    if after is not None:
        if not {"filter", "start", "until", "by", "order", "reverse"}.isdisjoint(request.query_params):
            raise ClientException("`after` says what is replayed: leave out all but `limit`")
        place = _place(after)
    else:
        if fresh and db.cluster is not None:
            db.storage.catch_up()
        first, end = time_asked(db, start) or 0, time_asked(db, until)
        place = ReplayPlace.beginning(db.storage, topic_filter, first, end, by=by, reverse=reverse)
    if order == "any" and (reverse or limit is not None):
        raise ClientException("pages, and replays that go back, are in order of time: leave out `order`")
    if limit is None:
        measured = Measured(place.batches(db.storage, _BATCH, order=order))
        return Streamed(ThreadedPieces(context.threads, written(iter(measured), media_type), measured), media_type)
    page = _Page.read(db.storage, place, limit)
    headers = {} if page.following is None else {NEXT: _token(page.following)}
    return Response(b"".join(written(page.batches, media_type)), media_type=media_type, headers=headers)


@attrs.frozen
class _Page:
    batches: list[MessageBatch]
    following: ReplayPlace | None
    """The beginning of the next page; None on the last page."""

    @classmethod
    def read(cls, storage: Storage, place: ReplayPlace, limit: int) -> _Page:
        """Read a page of at most ``limit`` messages."""
        kept: list[MessageBatch] = []
        left, room = limit, PAGE_BYTES
        with closing(place.batches(storage, min(limit + 1, _BATCH))) as batches:
            for batch in batches:
                rows = min(left, fitting(to_iterable(batch.payloads), room, least=int(not kept)))
                if rows:
                    kept.append(batch[:rows])
                if rows < len(batch):
                    return cls(kept, place.after(kept[-1]))
                left, room = left - rows, room - kept[-1].payload_bytes()
        return cls(kept, None)


def _token(place: ReplayPlace) -> str:
    return base64.urlsafe_b64encode(place.to_bytes()).decode().rstrip("=")


def _place(token: str) -> ReplayPlace:
    try:
        data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as bad:
        raise InvalidCursorError(f"`after` is not a token of a page: {bad}") from bad
    return ReplayPlace.from_bytes(data)


@attrs.frozen
class Deleted:
    """The number of deleted messages."""

    deleted: int


@delete("/messages", guards=[needs("admin")], tags=["messages"], status_code=200, opt={"way": "heavy"})
async def delete_messages(
    context: TheContext,
    request: Request[Any, Any, Any],
    topic_filter: Annotated[str, QueryParameter(name="filter", description="A topic filter of MQTT.")],
    start: TheStart = None,
    until: TheUntil = None,
    by: TheBy = "position",
) -> Deleted:
    """Delete matching messages stored before the request, in chunks; an interrupted request can be repeated.

    On a site of a cluster, each site deletes the messages of its own shards. If one of them fails, the response says
    how many messages the others have deleted.
    """
    loop, db = asyncio.get_running_loop(), context.db
    TopicFilter(topic_filter)  # raises an error before other sites get requests

    def own(shards: Collection[int] | None) -> int:
        return db.delete(topic_filter, time_asked(db, start) or 0, time_asked(db, until), by=by, shards=shards)

    if context.forwarder is None or db.cluster is None:
        return Deleted(await loop.run_in_executor(context.threads, own, None))
    from topicstore.server.http.forwarding import owners_of  # imported only on a site of a cluster

    wanted: dict[Any, list[int]] = {}
    for shard, owner in owners_of(db.cluster, shards_asked(request, db.manifest.shards)).items():
        wanted.setdefault(owner, []).append(shard)
    here = wanted.pop(None, None)
    forwarder, deleted = context.forwarder, 0
    if wanted:
        forwarder.check(request, wanted, here=here is not None)
        calls = {one: forwarder.call(request, b"", {SHARDS: ",".join(map(str, some))}) for one, some in wanted.items()}
        answers = await forwarder.ask(calls, Deleted)
        deleted = sum(answer.deleted for answer in answers if isinstance(answer, Deleted))
        forwarder.raise_first(answers, f"other sites have deleted {deleted} messages")
    if here is not None:
        deleted += await loop.run_in_executor(context.threads, own, here)
    return Deleted(deleted)


ROUTES = [publish, replay, delete_messages, explain, histogram]
