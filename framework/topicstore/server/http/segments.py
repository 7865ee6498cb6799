"""Percent-encoded names in paths: a client id or a queue name may be any text, also with slashes.

ASGI servers decode the path before routing, after which ``a%2Fb`` and ``a/b`` are the same. So routes are matched with
the raw path, and the names in it are decoded afterwards.
"""

from __future__ import annotations

from urllib.parse import unquote

from litestar.exceptions import ClientException
from litestar.types import ASGIApp, Receive, Scope, Send

__all__ = ["by_sent_path", "decoding_names"]


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
