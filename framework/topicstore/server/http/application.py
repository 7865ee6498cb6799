"""The ASGI application: its routes, guards and error handlers, and the middleware around it.

The middleware adds security headers, answers HEAD, checks requests, and decodes them. Percent-encoded names in paths,
such as client ids and names of queues, may be any text, also with slashes. ASGI servers decode the path before routing,
after which ``a%2Fb`` and ``a/b`` are the same. So routes are matched with the raw path, and the names in it are decoded
afterwards.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import unquote

from litestar import Litestar, Request, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.enums import ScopeType
from litestar.exceptions import ClientException, ServiceUnavailableException
from litestar.types import ASGIApp, HTTPResponseBodyEvent, Message, Receive, ReceiveMessage, Scope, Send

from topicstore.files.text import without_mark

from .connections import connection_of
from .context import Context
from .document import Document, document_settings
from .guards import takes_way
from .parameters import known_parameters
from .problems import HANDLERS, problem
from .routes import (
    access,
    ds,
    generations,
    health,
    info,
    jobs,
    metrics,
    page,
    persistence,
    queues,
    retained,
    retention,
    sessions,
    sql,
    tail,
    topics,
)
from .routes import messages as replay
from .threads import Asking, asking

__all__ = ["PREFIX", "DecodedRequest", "RequestChecks", "application", "by_sent_path", "decoding_names"]

PREFIX = "/api/v5"
"""The path prefix of the API."""


class DecodedRequest(Request[Any, Any, Any]):
    """A request. A body that is nested too deeply for its decoder is a client error (400)."""

    async def body(self) -> bytes:
        """Return the body without a byte order mark, as RFC 8259 permits for JSON; Arrow never begins with one."""
        return without_mark(await super().body())

    async def json(self) -> Any:
        """Decode the body as JSON. Raises `ClientException`."""
        try:
            return await super().json()
        except RecursionError as bad:
            raise ClientException(f"the body is nested too deeply: {bad}") from bad

    async def msgpack(self) -> Any:
        """Decode the body as MessagePack. Raises `ClientException`."""
        try:
            return await super().msgpack()
        except RecursionError as bad:
            raise ClientException(f"the body is nested too deeply: {bad}") from bad


def by_sent_path(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that its scope's path is the raw, percent-encoded path."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # type: ignore[comparison-overlap] # Litestar's type is an enumeration
            scope["path"] = scope["raw_path"].decode("latin-1")
        await app(scope, receive, send)

    return call


def decoding_names(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that path parameters are percent-decoded after routing."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope["path_params"] = {
                key: unquote(value, errors="strict") if isinstance(value, str) else value
                for key, value in scope["path_params"].items()
            }
        except UnicodeDecodeError as bad:
            raise ClientException(f"the path is not UTF-8: {bad}") from bad
        await app(scope, receive, send)

    return call


_READING = ("GET", "HEAD")
_HEALTH = b"/health/"
_NO_BODY: HTTPResponseBodyEvent = {"type": "http.response.body", "body": b"", "more_body": False}
_VERSIONS = ("1.0", "1.1")
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
}
"""Headers added to each response that lacks them. Pages load nothing from other origins, and have no inline scripts and
styles."""


def _with_head(allowed: bytes) -> bytes:
    """Add HEAD to a list of allowed methods that contains GET."""
    return allowed.replace(b"GET", b"GET, HEAD") if b"HEAD" not in allowed else allowed


class RequestChecks:
    """An ASGI middleware that checks requests and completes responses of another application."""

    def __init__(self, application: ASGIApp, stopping: threading.Event) -> None:
        self._application, self._stopping = application, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != ScopeType.HTTP:
            await self._application(scope, receive, send)
            return

        head, done = scope["method"] == "HEAD", False

        async def send_with_headers(message: Message) -> None:
            nonlocal done
            if done:
                return
            if message["type"] == "http.response.start":
                headers = [
                    (name, _with_head(value) if name == b"allow" else value) for name, value in message["headers"]
                ]
                there = {name.lower() for name, _ in headers}
                headers.extend(item for item in _HEADERS.items() if item[0] not in there)
                message["headers"] = headers
            elif head:  # a response to HEAD has no body
                message, done = _NO_BODY, True
            await send(message)

        connection = connection_of(scope)

        async def receive_bounded() -> ReceiveMessage:
            message = await receive()
            if connection.refused:
                text = "the bodies of all requests take too much memory"
                raise ServiceUnavailableException(text, headers={"Retry-After": "1"})
            return message

        reads = scope["method"] in _READING
        if head:
            scope = {**scope, "method": "GET"}  # routes know GET only
        asking.set(Asking(host=connection.host, reads=reads, gone=lambda: connection.gone))
        application = self._refusal(scope) or self._application
        await application(scope, receive_bounded, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """Return an application that refuses the request; None if the request can be served.

        Requests that a proxy may parse differently are refused, against request smuggling.
        """
        if self._stopping.is_set() and not scope["raw_path"].startswith(_HEALTH):
            refused = problem(503, "the server is stopping", headers={"Connection": "close"})
            return refused.to_asgi_response(None, Request(scope))
        if scope["http_version"] not in _VERSIONS:
            refused = problem(505, "HTTP/1.1 is spoken here", headers={"Connection": "close"})
            return refused.to_asgi_response(None, Request(scope))
        values: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            values.setdefault(name, []).append(value)
        if b"transfer-encoding" in values and (b"content-length" in values or scope["http_version"] == "1.0"):
            text = "the end of the body is given in two ways, or in one that HTTP/1.0 doesn't have"
            refused = problem(400, text, headers={"Connection": "close"})
            return refused.to_asgi_response(None, Request(scope))
        if len(values.get(b"authorization", ())) > 1:
            return problem(400, "there is more than one Authorization").to_asgi_response(None, Request(scope))
        if any(value.strip().lower() not in (b"", b"identity") for value in values.get(b"content-encoding", ())):
            text = "bodies are taken as they are, without a Content-Encoding"
            refused = problem(415, text, headers={"Accept-Encoding": "identity"})
            return refused.to_asgi_response(None, Request(scope))
        return None


def application(context: Context) -> ASGIApp:
    """Return the application for one server."""
    made = Litestar(
        [
            Router(
                PREFIX,
                route_handlers=[
                    *info.ROUTES,
                    *metrics.ROUTES,
                    *access.ROUTES,
                    *ds.ROUTES,
                    *replay.ROUTES,
                    *tail.ROUTES,
                    *topics.ROUTES,
                    *sessions.ROUTES,
                    *retained.ROUTES,
                    *queues.ROUTES,
                    *persistence.ROUTES,
                    *generations.ROUTES,
                    *retention.ROUTES,
                    *jobs.ROUTES,
                    *sql.ROUTES,
                ],
            ),
            *health.OUTSIDE,
            *metrics.OUTSIDE,
            *page.OUTSIDE,
        ],
        dependencies={"context": Provide(lambda: context, sync_to_thread=False)},
        exception_handlers=HANDLERS,
        guards=[takes_way],
        logging_config=None,
        middleware=[decoding_names],
        openapi_config=document_settings(),
        request_class=DecodedRequest,
        request_max_body_size=context.settings.body_size,
        state=State({"context": context}),
    )
    made.state.document = Document(made)
    made.state.parameters = known_parameters(made)
    return RequestChecks(made, context.stopping)
