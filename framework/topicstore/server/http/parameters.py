"""Checks of query parameters, so that a misspelled ``until`` can't delete messages that were to be kept.

Unknown parameters are refused. So are parameters that are given twice, of which one would be ignored, and filters with
an unescaped ``+``, which a URL decodes as a space: ``a/+`` would become another filter, which matches nothing.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

import attrs
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.exceptions import ClientException
from litestar.routes import HTTPRoute

__all__ = ["Known", "check_query", "known_parameters"]

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
        mistakes = [_told(name, f"it is given {names[name]} times, and only one of them could count") for name in twice]
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
    return _told(name, "the wildcard + is written %2B in a URL")


def _mistake(name: str, known: AbstractSet[str]) -> dict[str, str]:
    likely = difflib.get_close_matches(name, known, n=1)
    there = f"it may have: {', '.join(sorted(known))}" if known else "it has none"
    hint = f"is {likely[0]!r} meant?" if likely else there
    return _told(name, f"the route doesn't have it; {hint}")


def _told(name: str, text: str) -> dict[str, str]:
    return {"message": text, "key": name, "source": "query"}
