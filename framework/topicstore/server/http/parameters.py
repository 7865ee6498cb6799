"""Query parameters: those that several routes share, pagination, and checks.

The checks prevent, for example, that a misspelled ``until`` is ignored and too many messages are deleted. They refuse
unknown parameters, parameters that are given twice, and filters with an unescaped ``+``. In a URL a ``+`` stands for a
space, so ``a/+`` would become another filter, which matches nothing.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import parse_qsl, unquote_plus

import attrs
import msgspec
from litestar import Litestar, Request
from litestar.connection import ASGIConnection
from litestar.exceptions import ClientException
from litestar.params import QueryParameter
from litestar.routes import HTTPRoute

import topicstore as ts
from topicstore.contract.replay_plan import By, Order
from topicstore.contract.times import instant

__all__ = [
    "MOST",
    "PAGE_BYTES",
    "SHARDS",
    "After",
    "Known",
    "Limit",
    "Page",
    "TheBy",
    "TheFilter",
    "TheOrder",
    "TheStart",
    "TheUntil",
    "check_query",
    "fitting",
    "known_parameters",
    "shards_asked",
    "time_asked",
]

T = TypeVar("T")

SHARDS = "Topicstore-Shards"
"""The header of a request that another site of a cluster sends for some shards; its value is these, with commas."""
MOST = 10_000
"""The most items of a page."""
PAGE_BYTES = 16 << 20
"""Most bytes of payloads in a page of messages, unless its first message has more."""
Limit = Annotated[int, QueryParameter(ge=1, le=MOST, description="The most items of the page.")]
"""The type of the parameter ``limit``; its default is 100."""
After = Annotated[str | None, QueryParameter(description="The `next` of the page before; left out for the first.")]
"""The type of the parameter ``after``; its default is None."""


def fitting(payloads: Iterable[bytes], room: int = PAGE_BYTES, *, least: int = 1) -> int:
    """Return how many of the payloads, from the first on, have at most ``room`` bytes together; at least ``least``."""
    return max(sum(end <= room for end in accumulate(map(len, payloads))), least)


class Page(msgspec.Struct, Generic[T], kw_only=True):
    """One page of a list."""

    items: list[T]
    next: str | None = None
    """The parameter ``after`` of the next page; None on the last page."""


def shards_asked(request: Request[Any, Any, Any], count: int) -> Sequence[int]:
    """Return the shards for which a request was sent: without the header, all ``count``. Raises `ClientException`."""
    text = request.headers.get(SHARDS)
    if text is None:
        return range(count)
    parts = text.split(",")
    if not set(map(str, range(count))).issuperset(parts):
        raise ClientException(f"{SHARDS} has numbers of shards, not {text[:100]!r}")
    return list(map(int, parts))


TheFilter = Annotated[str, QueryParameter(name="filter", description="A topic filter of MQTT. Default: `#`.")]
TheStart = Annotated[
    str | None,
    QueryParameter(
        name="start",
        description="The time of the first message: ISO 8601, `-2h`, `now`, or microseconds. Default: the beginning.",
    ),
]
TheUntil = Annotated[
    str | None,
    QueryParameter(name="until", description="The time after the last message, in the same forms. Default: no end."),
]
TheBy = Annotated[
    By,
    QueryParameter(
        name="by",
        description="The times with which `start` and `until` are compared: those of storing, or the messages' own.",
    ),
]
TheOrder = Annotated[
    Order,
    QueryParameter(
        name="order", description="`time`, or `any`: each publisher's order in each topic, which is quicker to read."
    ),
]


def time_asked(db: ts.Database, when: str | None) -> int | None:
    """Parse a time of a query to microseconds since the epoch. Raises `InvalidArgumentError`."""
    return None if when is None else instant(when, db.clock, allow_ancient=db.storage.allow_ancient)


_EXPLAINED = 10
"""Most unknown names for which an error has suggestions, because a query may have tens of thousands."""
_OF_TOPICS = ("filter", "topic", "prefix")


@attrs.frozen
class Known:
    """The query parameters of a route."""

    names: AbstractSet[str]
    repeated: AbstractSet[str]
    """Names of parameters that may be given several times."""


def known_parameters(application: Litestar) -> Mapping[tuple[str, str], Known]:
    """Return the query parameters of all routes in the OpenAPI document, by path and method, without building it."""
    found: dict[tuple[str, str], Known] = {}
    for route in application.routes:
        for method, (handler, read) in route.route_handler_map.items() if isinstance(route, HTTPRoute) else ():
            if handler.resolve_include_in_schema():
                found[route.path_format, method] = Known(
                    names=frozenset(one.field_alias for one in read.expected_query_params),
                    repeated=frozenset(one.field_alias for one in read.expected_query_params if one.is_sequence),
                )
    return found


def check_query(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """Raise `ClientException` for query parameters that are unknown, repeated or wrongly escaped.

    For routes outside of the OpenAPI document, nothing is checked.
    """
    query = connection.scope["query_string"]
    if not query:
        return
    given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    names = Counter(name for name, _ in given)
    known: Known | None = connection.app.state.parameters.get(
        (connection.scope["path_template"], str(connection.scope.get("method")))
    )
    if known is None:
        return
    if mistakes := [_mistake(name, known.names) for name in sorted(names.keys() - known.names)[:_EXPLAINED]]:
        raise ClientException("there are query parameters that nothing reads", extra=mistakes)
    if twice := [name for name, times in names.items() if times > 1 and name not in known.repeated]:
        mistakes = [
            _problem(name, f"it is given {names[name]} times, and only one of them could count") for name in twice
        ]
        raise ClientException("there are query parameters that are given more than once", extra=mistakes)
    if mistakes := [*filter(None, map(_plus, query.decode("latin-1").split("&")))]:
        raise ClientException("a + in a URL is a space, and no level of a topic is meant to be blank", extra=mistakes)


def _plus(pair: str) -> dict[str, str] | None:
    """Return the error for a topic or filter with a blank level, which an unescaped ``+`` causes; None if valid."""
    name, _, value = pair.partition("=")
    name = unquote_plus(name)
    levels = re.split("/|%2F", value, flags=re.IGNORECASE)
    if name not in _OF_TOPICS or not any("+" in level and not unquote_plus(level).strip() for level in levels):
        return None
    return _problem(name, "the wildcard + is written %2B in a URL")


def _mistake(name: str, known: AbstractSet[str]) -> dict[str, str]:
    likely = difflib.get_close_matches(name, known, n=1)
    there = f"it may have: {', '.join(sorted(known))}" if known else "it has none"
    hint = f"is {likely[0]!r} meant?" if likely else there
    return _problem(name, f"the route doesn't have it; {hint}")


def _problem(name: str, text: str) -> dict[str, str]:
    return {"message": text, "key": name, "source": "query"}
