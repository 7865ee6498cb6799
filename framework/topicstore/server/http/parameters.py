"""Query parameters that a route doesn't know are refused: a misspelled ``until`` must not delete what was to stay."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.exceptions import ClientException
from litestar.openapi.spec import Operation, Parameter

__all__ = ["check_known", "known_parameters"]

_EXPLAINED = 10
"""For how many unknown names of a request likely ones are looked for: a query may have tens of thousands."""
Names = Mapping[tuple[str, str], AbstractSet[str]]
"""The names of query parameters by the path of a route and the method."""


def known_parameters(application: Litestar) -> Names:
    """Return the query parameters of all routes that the OpenAPI document has."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for path, item in (application.openapi_schema.paths or {}).items():
        for method, operation in vars(item).items():
            if isinstance(operation, Operation):
                parameters = [one for one in operation.parameters or () if isinstance(one, Parameter)]
                found[path, method.upper()] = frozenset(one.name for one in parameters if one.param_in == "query")
    return found


def check_known(connection: ASGIConnection[Any, Any, Any, Any]) -> None:
    """Raise `ClientException` for query parameters that the route of a request doesn't have.

    A route that isn't in the document takes any.
    """
    given = set(connection.query_params)
    names: Names = connection.app.state.parameters
    known = names.get((connection.scope["path_template"], str(connection.scope.get("method"))), given)
    unknown = sorted(given - known)
    if mistakes := [_mistake(name, known) for name in unknown[:_EXPLAINED]]:
        raise ClientException("there are query parameters that nothing reads", extra=mistakes)


def _mistake(name: str, known: AbstractSet[str]) -> dict[str, str]:
    likely = difflib.get_close_matches(name, known, n=1)
    there = f"it may have: {', '.join(sorted(known))}" if known else "it has none"
    hint = f"is {likely[0]!r} meant?" if likely else there
    return {"message": f"the route doesn't have it; {hint}", "key": name, "source": "query"}
