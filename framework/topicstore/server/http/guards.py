"""Authorization of requests: each handler declares the scope that it requires."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException, PermissionDeniedException, ServiceUnavailableException
from litestar.handlers import BaseRouteHandler

from topicstore.server.config.units import is_forwarded, is_loopback

from .context import Context
from .parameters import check_query
from .threads import asking
from .tokens import SCOPES, Scope, TokenFileError

__all__ = ["GRANTED", "granted", "is_owner", "is_site", "needs", "takes_way"]

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], None]

GRANTED = "Topicstore-Granted"
"""The header of a request that another site of a cluster forwards; its value is the scope that the client has there."""

_log = logging.getLogger("topicstore.server.http")
_OWN_PAGES = ("same-origin", "none")
"""Values of the header Sec-Fetch-Site for requests that were not caused by another site's page."""


def needs(scope: Scope) -> Guard:
    """Return a guard that requires a scope, and refuses query parameters that the route doesn't have."""

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        found = granted(connection)
        if found is None:
            raise NotAuthorizedException("a token is needed", headers={"WWW-Authenticate": "Bearer"})
        if SCOPES.index(found) < SCOPES.index(scope):
            raise PermissionDeniedException(f"the token may {found}; this needs {scope}")
        check_query(connection)

    return guard


def takes_way(_: Connection, route: BaseRouteHandler) -> None:
    """Set the class of threads that serve a request, from the route's option such as ``opt={"way": "heavy"}``."""
    current = asking.get()
    if current is not None:
        current.way = route.opt.get("way", current.way)


def is_owner(connection: Connection) -> bool:
    """Return whether a request is from the user who runs the server, by the token that only this user can read.

    This user can access the same files as the server, even without the server.
    """
    context: Context = connection.app.state.context
    return context.tokens.is_own(_token(connection) or "")


def is_site(connection: Connection) -> bool:
    """Return whether another site of the cluster has forwarded a request, which that site has checked."""
    context: Context = connection.app.state.context
    return context.tokens.is_of_cluster(_token(connection) or "")


def granted(connection: Connection) -> Scope | None:
    """Return the scope of a request, by its token or its origin; None if it has none.

    The scope of a client's request that another site of the cluster forwards is the one granted by the forwarding site.

    Raises `ServiceUnavailableException` if the tokens can't be read.
    """
    context: Context = connection.app.state.context
    token = _token(connection)
    try:
        if token is None:
            return "admin" if _is_local(connection) and _is_open(context) else None
        if context.tokens.is_of_cluster(token):
            given = connection.headers.get(GRANTED, "")
            return next((scope for scope in SCOPES if scope == given), None)
        return context.tokens.scope_of(token)
    except TokenFileError as bad:
        if context.logged.get("tokens") != str(bad):
            context.logged["tokens"] = str(bad)
            _log.error("nobody is let in by a token, nor without one: %s", bad)
        raise ServiceUnavailableException("the server can't read its tokens; its log says why") from bad


def _token(connection: Connection) -> str | None:
    """Return the request's token: None without an Authorization header, empty if the header has no bearer token."""
    authorization = connection.headers.get("authorization")
    if authorization is None:
        return None
    kind, _, text = authorization.strip().partition(" ")
    return text.strip() if kind.lower() == "bearer" else ""


def _is_open(context: Context) -> bool:
    """Return whether requests from this machine need no token, which is only so without any access settings.

    Raises `TokenFileError`.
    """
    settings = context.settings
    if settings.anonymous != "loopback" or settings.behind_proxy:
        return False
    return not context.mqtt.restricts and not context.tokens.any()


def _is_local(connection: Connection) -> bool:
    """Return whether a request comes from this machine, and not from another site's page or through a proxy.

    A page of another site can make a browser on this machine send a request; then the origin is that site. The site's
    name can also resolve to this machine (DNS rebinding); then the Host header has that name.
    """
    headers = connection.headers
    if connection.client is None or not is_loopback(connection.client.host):
        return False
    if is_forwarded(headers) or headers.get("sec-fetch-site", "none") not in _OWN_PAGES:
        return False
    if connection.scope["http_version"] == "1.0":  # nginx's default version, sent without a header that shows the proxy
        return False
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name.lower()) and headers.get("origin", _own(connection, host)) == _own(connection, host)


def _own(connection: Connection, host: str) -> str:
    return f"{connection.scope['scheme']}://{host}"
