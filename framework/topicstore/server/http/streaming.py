"""Streamed responses, which are generated as fast as the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any, Protocol, cast

from anyio import CancelScope
from litestar import Response
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import HTTPResponseBodyEvent, Receive, Scope, Send

from topicstore.contract.batch import MessageBatch

from .connections import connection_of
from .threads import RequestThreads, asking

__all__ = ["Measured", "Pieces", "Streamed", "ThreadedPieces"]

_SENT = 1 << 20
"""Small pieces are joined up to this many bytes before they are sent."""
_ROW = 100
"""About the bytes of a message in memory besides its payload."""
_Piece = bytes | memoryview


class Pieces(Protocol):
    """The pieces of a response body. The consumer must close them."""

    @property
    def held(self) -> int:
        """The approximate number of buffered bytes, not counting the piece that was yielded last."""

    def __aiter__(self) -> AsyncIterator[_Piece]: ...

    async def __anext__(self) -> _Piece: ...

    async def aclose(self) -> None:
        """Release all resources. May be called before the first and after the last piece."""


class ThreadedPieces:
    """Pieces that an iterator generates in threads, each on demand.

    Data generated before an error is sent, unless the error occurs within the first piece.
    """

    def __init__(self, threads: RequestThreads, pieces: Iterator[_Piece], measured: Measured) -> None:
        """Generate the first piece at once, in the caller's thread. Raises the iterator's exceptions.

        ``measured``: the batches from which the pieces are generated.
        """
        self._threads, self._measured = threads, measured
        self._pieces = _joined(pieces)
        self._first: _Piece | None = next(self._pieces, b"")
        self._making: Future[_Piece] | None = None
        """The future of the next piece, whose consumer may have been cancelled."""

    @property
    def held(self) -> int:
        """Bytes of the last batch."""
        return self._measured.size

    def __aiter__(self) -> AsyncIterator[_Piece]:
        return self

    async def __anext__(self) -> _Piece:
        piece, self._first = self._first, None
        if piece is None:
            self._making = self._threads.submit(next, self._pieces, b"")
            piece = await asyncio.wrap_future(self._making)
            self._making = None
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Close the iterator in a thread, after the piece in progress."""
        if self._making is not None:
            made = asyncio.wrap_future(self._making)
            await asyncio.wait((made,))
            _ = made.cancelled() or made.exception()  # retrieved, so that asyncio doesn't log it; the client is gone
        await asyncio.wrap_future(self._threads.at_once(self._pieces.close))


class Measured:
    """An iterable of batches that records the size of the last batch."""

    def __init__(self, batches: Generator[MessageBatch, None, None]) -> None:
        self._batches = batches
        self.size = 0
        """About the bytes of the last batch in memory."""

    def __iter__(self) -> Generator[MessageBatch, None, None]:
        with closing(self._batches):
            for batch in self._batches:
                self.size = batch.payload_bytes() + _ROW * len(batch)
                yield batch


def _joined(pieces: Iterator[_Piece]) -> Generator[_Piece]:
    """Join small pieces to larger ones. After an error, yield the rest before raising, unless it is the first piece."""
    held: list[_Piece] = []
    size, first = 0, True
    try:
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            del piece  # otherwise this name would keep a sent piece in memory
            if size >= _SENT:
                yield _taken(held)
                size, first = 0, False
    except Exception:
        if held and not first:
            yield _taken(held)
        raise
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    if held:
        yield _taken(held)


def _taken(held: list[_Piece]) -> _Piece:
    """Join pieces, and clear their list."""
    joined = held[0] if len(held) == 1 else b"".join(held)
    held.clear()
    return joined


class _Sending(ASGIStreamingResponse):
    """Sends pieces one after the other, and closes them at the end or when the client disconnects.

    The bytes held for the response count for the memory of its connection.

    If generating a piece fails, the connection is closed before the end of the body, so that the client notices.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        current = asking.get()
        if current is not None:
            current.begun = True
        self._connection = connection_of(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            pieces: Any = self.iterator
            with CancelScope(shield=True):
                await pieces.aclose()

    async def _stream(self, send: Send) -> None:
        pieces: Any = self.iterator
        async for piece in pieces:
            self._connection.hold_response(pieces.held + len(piece))
            event: HTTPResponseBodyEvent = {
                "type": "http.response.body",
                "body": cast("bytes", piece),  # any buffer, which uvicorn accepts
                "more_body": True,
            }
            await send(event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Streamed(Response[Any]):
    """A response whose body is streamed."""

    def __init__(self, pieces: Pieces, media_type: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(b"", media_type=media_type, headers=headers or {})
        self._pieces = pieces

    def to_asgi_response(self, app: Any, request: Any, **options: Any) -> ASGIResponse:
        """Return the ASGI application that sends the response."""
        headers = {**(options.get("headers") or {}), **self.headers}
        return _Sending(
            iterator=self._pieces,
            headers=headers,
            encoded_headers=options.get("encoded_headers"),
            media_type=self.media_type,
            status_code=self.status_code or options.get("status_code"),
            is_head_response=options.get("is_head_response", False),
        )
