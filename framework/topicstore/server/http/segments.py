"""Names within paths: a client id or a queue may be any text, also with slashes, if it is percent-encoded.

ASGI servers decode the path before it is routed, and then ``a%2Fb`` can't be told from ``a/b``. So routes are found by
the path as it was sent, and the names in it are decoded after that.
"""

from __future__ import annotations

from urllib.parse import unquote

from litestar.exceptions import ClientException
from litestar.types import ASGIApp, Receive, Scope, Send

__all__ = ["by_sent_path", "decoding_names"]


def by_sent_path(app: ASGIApp) -> ASGIApp:
    """Return an application that is given each path as it was sent, still percent-encoded."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # type: ignore[comparison-overlap] # litestar's type of it is an enumeration
            scope["path"] = scope["raw_path"].decode("latin-1")
        await app(scope, receive, send)

    return call


def decoding_names(app: ASGIApp) -> ASGIApp:
    """Return a middleware of Litestar that decodes the names in a path which has found its route."""

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
