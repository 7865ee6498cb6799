"""``/clients``, ``/latest``, ``/streams`` and ``/learned-topics``: contents of the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import attrs
from litestar import get
from litestar.params import QueryParameter

from topicstore.contract.requests import Stream
from topicstore.files.formats import JsonMessage, json_message
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.pages import After, Limit, Page, fitting
from topicstore.server.http.queries import TheFilter, TheStart, time_asked
from topicstore.storage.counting.contents import ClientTally

__all__ = ["ROUTES"]


@get("/clients", guards=[needs("read")], tags=["topics"], opt={"way": "heavy"}, sync_to_thread=True)
def clients(
    context: TheContext, topic_filter: TheFilter = "#", limit: Limit = 100, after: After = None
) -> Page[ClientTally]:
    """Return the ids of clients with messages on matching topics, sorted, with counts as those of ``/topics``."""
    return _page(context.db.clients(topic_filter), lambda tally: tally.client_id, limit, after)


@get("/latest", guards=[needs("read")], tags=["messages"], opt={"way": "heavy"}, sync_to_thread=True)
def latest(
    context: TheContext, topic_filter: TheFilter = "#", limit: Limit = 100, after: After = None
) -> Page[JsonMessage]:
    """Return the last message of each matching topic, sorted by topic."""
    page = _page(context.db.latest(topic_filter), lambda message: message.topic, limit, after)
    shown = page.items[: fitting(message.payload for message in page.items)]
    following = page.next if len(shown) == len(page.items) else shown[-1].topic
    return Page(items=list(map(json_message, shown)), next=following)


@get("/streams", guards=[needs("read")], tags=["topics"], opt={"way": "heavy"}, sync_to_thread=True)
def streams(
    context: TheContext,
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    limit: Limit = 100,
    after: After = None,
) -> Page[Stream]:
    """Return the streams that may contain matching messages at or after ``start``."""
    found = context.db.streams(topic_filter, time_asked(context.db, start) or 0)
    found.sort(key=lambda stream: (stream.shard, stream.generation, stream.number))
    return _page(found, lambda one: f"{one.shard:05d}-{one.generation:010d}-{one.number:020d}", limit, after)


@attrs.frozen(kw_only=True)
class LearnedTopic:
    """A node of the tree in which a layout stores the learned structure of topics."""

    shard: int
    generation: int
    path: str
    """The node's topic levels: literals, ``+``, or a last ``#``."""
    stream: int | None
    """The stream of topics that end at the node; None if there is none."""


@get("/learned-topics", guards=[needs("read")], tags=["topics"], opt={"way": "heavy"}, sync_to_thread=True)
def learned_topics(
    context: TheContext,
    generation: Annotated[int | None, QueryParameter(description="Only this generation.")] = None,
    limit: Limit = 100,
    after: After = None,
) -> Page[LearnedTopic]:
    """Return the learned topic structure of all generations or of one, sorted by shard, generation and path."""
    found = [
        LearnedTopic(shard=shard, generation=number, path="/".join(node.path), stream=node.stream)
        for (shard, number), nodes in sorted(context.db.learned_topics(generation).items())
        for node in sorted(nodes, key=lambda node: "/".join(node.path))
    ]
    return _page(found, lambda one: f"{one.shard:05d}-{one.generation:010d}-{one.path}", limit, after)


def _page(items: Sequence[Any], name: Callable[[Any], str], limit: int, after: str | None) -> Page[Any]:
    """Return the page of items after a name. ``items`` must be sorted by name."""
    left = items if after is None else [item for item in items if name(item) > after]
    return Page(items=list(left[:limit]), next=name(left[limit - 1]) if len(left) > limit else None)


ROUTES = [clients, latest, streams, learned_topics]
