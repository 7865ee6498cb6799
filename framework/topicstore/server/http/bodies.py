"""Decoding of request bodies."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.exceptions import ClientException

from topicstore.files.text import without_mark

__all__ = ["DecodedRequest"]


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
