"""Who may do what: each handler says which scope it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException, PermissionDeniedException, ServiceUnavailableException
from litestar.handlers import BaseRouteHandler

from topicstore.server.addresses import is_forwarded, is_loopback

from .context import Context
from .parameters import check_query
from .threads import asking
from .tokens import SCOPES, Scope, TokenFileError

__all__ = ["is_owner", "needs", "takes_way"]

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], None]

_log = logging.getLogger("topicstore.server.http")
_OWN_PAGES = ("same-origin", "none")
"""What browsers say (Sec-Fetch-Site) of requests that no page of another site has caused."""


def needs(scope: Scope) -> Guard:
    """Return a guard that lets in those who may do what ``scope`` says, and ask for what the route knows."""

    def guard(connection: Connection, _: BaseRouteHandler) -> None:
        granted = _granted(connection)
        if granted is None:
            raise NotAuthorizedException("a token is needed", headers={"WWW-Authenticate": "Bearer"})
        if SCOPES.index(granted) < SCOPES.index(scope):
            raise PermissionDeniedException(f"the token may {granted}; this needs {scope}")
        check_query(connection)

    return guard


def takes_way(_: Connection, route: BaseRouteHandler) -> None:
    """Have a request come to a thread as its route says: ``opt={"way": "heavy"}``."""
    current = asking.get()
    if current is not None:
        current.way = route.opt.get("way", current.way)


def is_owner(connection: Connection) -> bool:
    """Return whether a request comes from who runs the server: it has the token that only that user can read.

    Whoever has it may do with the files of this machine what the server may, without asking it.
    """
    context: Context = connection.app.state.context
    return context.tokens.is_own(_token(connection) or "")


def _granted(connection: Connection) -> Scope | None:
    context: Context = connection.app.state.context
    token = _token(connection)
    try:
        if token is None:
            return "admin" if _is_local(connection) and _is_open(context) else None
        return context.tokens.scope_of(token)
    except TokenFileError as bad:
        if context.told.get("tokens") != str(bad):
            context.told["tokens"] = str(bad)
            _log.error("nobody is let in by a token, nor without one: %s", bad)
        raise ServiceUnavailableException("the server can't read its tokens; its log says why") from bad


def _token(connection: Connection) -> str | None:
    """Return the token that a request shows: None if it shows nothing, an empty one if that is no token."""
    authorization = connection.headers.get("authorization")
    if authorization is None:
        return None
    kind, _, text = authorization.strip().partition(" ")
    return text.strip() if kind.lower() == "bearer" else ""


def _is_open(context: Context) -> bool:
    """Return whether this machine needs no token: whoever has settled who may do what doesn't mean that, too.

    Raises `TokenFileError`.
    """
    settings = context.settings
    if settings.anonymous != "loopback" or settings.behind_proxy:
        return False
    return not context.mqtt.restricts and not context.tokens.any()


def _is_local(connection: Connection) -> bool:
    """Return whether a person or program on this machine asks, and nobody else by means of them.

    A page of a site elsewhere can have a browser on this machine ask; then the origin is the site's. It can give its
    own name the address of this machine (DNS rebinding); then the host is the site's.
    """
    headers = connection.headers
    if connection.client is None or not is_loopback(connection.client.host):
        return False
    if is_forwarded(headers) or headers.get("sec-fetch-site", "none") not in _OWN_PAGES:
        return False
    if connection.scope["http_version"] == "1.0":  # as nginx asks if it isn't told otherwise, and names nobody
        return False
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name.lower()) and headers.get("origin", _own(connection, host)) == _own(connection, host)


def _own(connection: Connection, host: str) -> str:
    return f"{connection.scope['scheme']}://{host}"
