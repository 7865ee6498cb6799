"""``/topics``: the topics that have messages, as a list and as a tree.

``/clients``, ``/latest``, ``/streams`` and ``/learned-topics`` list other contents of the database.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import attrs
import numpy as np
from litestar import get
from litestar.exceptions import ClientException
from litestar.params import QueryParameter

import topicstore as ts
from topicstore.contract.errors import InvalidFilterError
from topicstore.contract.positions import time_of
from topicstore.contract.requests import Stream
from topicstore.contract.topics import TopicFilter
from topicstore.files.formats import JsonMessage, json_message
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import After, Limit, Page, TheFilter, TheStart, fitting, time_asked
from topicstore.shard.tally_records import Tally
from topicstore.storage.counting.contents import (
    ClientTally,
    Levels,
    TopicTally,
    counted_topics,
    latest_of,
    topic_tallies,
)

__all__ = [
    "ROUTES",
]


_NAMED = 1_000
"""Most topics that a request can name."""
_Topics = Annotated[
    list[str] | None, QueryParameter(name="topic", description="Only these topics; may be given several times.")
]


@get("/clients", guards=[needs("read")], tags=["topics"], opt={"way": "heavy"}, sync_to_thread=True)
def clients(
    context: TheContext, topic_filter: TheFilter = "#", limit: Limit = 100, after: After = None
) -> Page[ClientTally]:
    """Return the ids of clients with messages on matching topics, sorted, with counts as those of ``/topics``."""
    return _page(context.db.clients(topic_filter), lambda tally: tally.client_id, limit, after)


@get("/latest", guards=[needs("read")], tags=["messages"], opt={"way": "heavy"}, sync_to_thread=True)
def latest(
    context: TheContext, topic_filter: TheFilter = "#", topic: _Topics = None, limit: Limit = 100, after: After = None
) -> Page[JsonMessage]:
    """Return the last message of each matching topic, sorted by topic.

    With ``topic`` only these topics are looked up, however many others there are; at most 1,000. Topics without
    messages are left out.
    """
    if topic is None:
        page = _page(context.db.latest(topic_filter), lambda message: message.topic, limit, after)
    else:
        page = _page(_latest_of(context.db, topic), lambda message: message.topic, limit, after)
    shown = page.items[: fitting(message.payload for message in page.items)]
    following = page.next if len(shown) == len(page.items) else shown[-1].topic
    return Page(items=list(map(json_message, shown)), next=following)


def _latest_of(db: ts.Database, topics: Sequence[str]) -> list[ts.Message]:
    """Return the last message of each of these topics that has one, sorted by topic."""
    names = sorted(set(topics))
    if len(names) > _NAMED:
        raise ClientException(f"at most {_NAMED:,} topics can be named")
    if wrong := [name for name in names if not TopicFilter(name).literal]:
        raise ts.InvalidTopicError(f"{wrong[0]!r} is a filter; name topics")
    return latest_of(db.storage, names)


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


Sort = Literal["topic", "messages", "bytes", "last"]
_SORTED_BY: dict[Sort, str] = {"messages": "messages", "bytes": "size", "last": "last"}
_COLUMNS = ("first", "last", "messages", "size")
_NUMBER = re.compile("-?[0-9]{1,20}")
TheSort = Annotated[
    Sort, QueryParameter(name="sort", description="By name, or by a number, of which the greatest comes first.")
]
TheSearch = Annotated[
    str, QueryParameter(name="search", description="Only topics that have this text in them, in any case.")
]


@get("/topics", guards=[needs("read")], tags=["topics"], opt={"way": "heavy"}, sync_to_thread=True)
def topics(
    context: TheContext,
    topic_filter: TheFilter = "#",
    search: TheSearch = "",
    sort: TheSort = "topic",
    limit: Limit = 100,
    after: After = None,
) -> Page[TopicTally]:
    """Return matching topics that have messages, with counts, bytes, first and last time, as `Database.topics`.

    Topics that begin with ``$`` only match filters that begin with ``$``.
    """
    found = _containing(context.db, topic_filter, search)
    chosen, following = _first(_numbers(sort, found), [found.topics[at] for at in found.topic.tolist()], limit, after)
    rows = np.array(chosen, np.intp)
    page = attrs.evolve(found, **{name: getattr(found, name)[rows] for name in (*_COLUMNS, "topic", "client_id")})
    return Page(items=topic_tallies(page), next=following)


@attrs.frozen(kw_only=True)
class Level:
    """A node of the topic tree, with totals of the topics at and below it."""

    name: str
    path: str
    topics: int
    """Number of topics that end at this level or below."""
    messages: int
    bytes: int
    """Bytes of payloads and topics."""
    last: int
    """The time of the last message, in microseconds since the epoch."""
    ends: bool
    """Whether a topic ends at this level."""
    below: bool
    """Whether there are topics below this level."""
    own: bool
    """Whether layouts have separate streams for this level; else its messages are in streams of a learned `+`."""


class Tree(Page[Level], kw_only=True):
    """A page of the children of a level."""

    plus: bool
    """Whether layouts have learned a wildcard here, so that messages of many levels share streams."""


@get("/topics/tree", guards=[needs("read")], tags=["topics"], opt={"way": "heavy"}, sync_to_thread=True)
def tree(
    context: TheContext,
    prefix: Annotated[
        str | None, QueryParameter(description="The level whose children are returned; without it, the first levels.")
    ] = None,
    search: TheSearch = "",
    sort: TheSort = "topic",
    limit: Limit = 100,
    after: After = None,
) -> Tree:
    """Return the children of a topic level, with totals of each, and the topic structure that layouts have learned.

    With ``search`` only matching topics count. Levels that begin with ``$`` are only found with such a ``prefix``.
    """
    if prefix is not None and not {"+", "#"}.isdisjoint(prefix.split("/")):
        raise InvalidFilterError("a prefix has no wildcards")
    levels = [] if prefix is None else prefix.split("/")
    dollar = prefix is not None and prefix.startswith("$")
    found = _containing(context.db, f"{prefix}/#" if dollar else "#", search)
    kept, plus = _learned(context.db, levels)
    below = Levels.of(found, levels)
    chosen, following = _first(_numbers(sort, below), below.names, limit, after)
    return Tree(items=[_level(below, at, levels, kept) for at in chosen], next=following, plus=plus)


def _level(below: Levels, at: int, parents: list[str], kept: set[str]) -> Level:
    name = below.names[at]
    return Level(
        name=name,
        path="/".join([*parents, name]),
        topics=int(below.topics[at]),
        messages=int(below.messages[at]),
        bytes=int(below.size[at]),
        last=time_of(int(below.last[at])),
        ends=bool(below.ends[at]),
        below=bool(below.topics[at] > below.ends[at]),
        own=name in kept,
    )


def _learned(db: ts.Database, levels: list[str]) -> tuple[set[str], bool]:
    """Return the children of a level that a layout has learned, and whether a wildcard is among them."""
    kept: set[str] = set()
    for nodes in db.learned_topics().values():
        for node in nodes:
            *parents, last = node.path or ("",)
            if len(parents) == len(levels) and all(_same(*pair) for pair in zip(parents, levels, strict=True)):
                kept.add(last)
    return kept, not kept.isdisjoint(("+", "#", "$+"))


def _same(learned: str, level: str) -> bool:
    return learned in (level, "+") or (learned == "$+" and level.startswith("$"))


def _containing(db: ts.Database, topic_filter: str, search: str) -> Tally:
    found, wanted = counted_topics(db.storage, TopicFilter(topic_filter)), search.lower()
    if not wanted:
        return found
    there = np.fromiter((wanted in topic.lower() for topic in found.topics), np.bool_, len(found.topics))
    return found.where(there[found.topic])


def _numbers(sort: Sort, of: Tally | Levels) -> list[int]:
    """Return the primary sort key of each row; the name is the secondary one."""
    if sort == "topic":
        return [0] * len(of)
    numbers: list[int] = getattr(of, _SORTED_BY[sort]).tolist()
    return [-time_of(number) for number in numbers] if sort == "last" else [-number for number in numbers]


def _first(numbers: list[int], names: list[str], limit: int, after: str | None) -> tuple[list[int], str | None]:
    """Return the first sorted rows after the token `after`, and the token for the next page."""
    rows: Iterable[tuple[int, str, int]] = zip(numbers, names, range(len(names)), strict=True)
    if after is not None:
        number, _, name = after.partition(" ")
        if not _NUMBER.fullmatch(number):
            raise ClientException("`after` is not the `next` of a page")
        last = int(number), name
        rows = (row for row in rows if row[:2] > last)
    found = heapq.nsmallest(limit + 1, rows)
    following = f"{found[limit - 1][0]} {found[limit - 1][1]}" if len(found) > limit else None
    return [row for _, _, row in found[:limit]], following


ROUTES = [topics, tree, clients, latest, streams, learned_topics]
