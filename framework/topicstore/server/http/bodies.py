"""Requests whose bodies are decoded before their handler is called."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.exceptions import ClientException

from topicstore.files.text import without_mark

__all__ = ["DecodedRequest"]


class DecodedRequest(Request[Any, Any, Any]):
    """A request. JSON and MessagePack that are nested more deeply than can be decoded are the client's mistake."""

    async def body(self) -> bytes:
        """Return the body without a byte order mark, which RFC 8259 lets readers of JSON ignore; Arrow has none."""
        return without_mark(await super().body())

    async def json(self) -> Any:
        """Return the body, which is JSON. Raises `ClientException`."""
        try:
            return await super().json()
        except RecursionError as bad:
            raise ClientException(f"the body is nested too deeply: {bad}") from bad

    async def msgpack(self) -> Any:
        """Return the body, which is MessagePack. Raises `ClientException`."""
        try:
            return await super().msgpack()
        except RecursionError as bad:
            raise ClientException(f"the body is nested too deeply: {bad}") from bad
