"""``GET /messages/tail``: messages as they come, as server-sent events.

The format is that of the HTML standard, section 9.2 (https://html.spec.whatwg.org/multipage/server-sent-events.html).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from litestar import Response, get
from litestar.params import HeaderParameter, QueryParameter

import topicstore as ts
from topicstore.contract.errors import DatabaseClosedError, SubscriptionClosedError
from topicstore.files.formats import encode_lines
from topicstore.pubsub.subscription import Subscription, SubscriptionBatch
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.problems import document_of
from topicstore.server.http.queries import TheFilter, TheStart, time_asked
from topicstore.server.http.streaming import Streamed

__all__ = ["ROUTES"]

_BATCH = 256
"""The most messages that are taken for a client at once."""
_PIECE = 1 << 18
"""Bytes of payloads that are written as events at once: a client that reads slowly has few of them in memory. The
messages themselves are shared by all who follow the same filter."""
_HEARTBEAT = 15.0


@get("/messages/tail", guards=[needs("read")], tags=["messages"], media_type="text/event-stream", sync_to_thread=True)
def tail(
    context: TheContext,
    topic_filter: TheFilter = "#",
    start: TheStart = None,
    heartbeat: Annotated[
        float, QueryParameter(gt=0, le=3_600, description="Seconds between two comments while nothing comes.")
    ] = _HEARTBEAT,
    last_event_id: Annotated[
        str | None, HeaderParameter(name="Last-Event-ID", description="The `id` of the last event that was read.")
    ] = None,
    after: Annotated[
        str | None, QueryParameter(description="The same, for programs that set no header; the header counts.")
    ] = None,
) -> Response[Any]:
    """Follow a filter: send the messages stored from ``start`` on, or from now on, and then new ones as they come.

    Each event is a message, as in JSON lines, and its ``id`` is the place after it. Who connects again with the last
    ``id`` that was read, as a browser's EventSource does by itself, gets each stored message that comes after it, and
    none twice; messages that are stored nowhere reach only who is connected, and a slow reader misses some of them.
    Messages of one shard come in order of positions. An event of the type ``dropped`` lists generations that were
    dropped before they were read; one of the type ``problem`` has the problem document of what ends the response before
    the server does. Comments show that the connection is alive. The response ends when the server does.
    """
    db = context.db
    last = last_event_id or after
    place = time_asked(db, start) if last is None else ts.Place.parse(last)
    subscription = db.subscribe(topic_filter, place, batch_size=_BATCH)
    return Streamed(_Events(context, subscription, heartbeat), "text/event-stream", {"Cache-Control": "no-store"})


class _Events:
    """The events of one client. It closes the subscription, which also ends when the server does."""

    def __init__(self, context: Context, subscription: Subscription, heartbeat: float) -> None:
        self._context = context
        self._subscription = subscription
        self._heartbeat = heartbeat
        self._place = subscription.place
        self._pieces = iter((self._here(),))
        """What is still to be sent of the messages that were taken last."""
        self.held = 0
        """The bytes of the messages that were taken last."""
        self._failure: Exception | None = None
        """What has ended it, once that was told."""
        context.on_stop.append(subscription.close)
        if context.stopping.is_set():
            subscription.close()

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        return self

    async def __anext__(self) -> bytes:
        piece = next(self._pieces, None)
        if piece is not None:
            return piece
        if self._failure is not None:
            raise self._failure
        try:
            batch = await self._subscription.fetch_async(timeout=self._heartbeat, executor=self._context.threads)
        except (SubscriptionClosedError, DatabaseClosedError):
            raise StopAsyncIteration from None
        except Exception as bad:  # noqa: BLE001 - it is told, and raised by the next call
            self._failure = bad
            return b"event: problem\ndata: %b\n\n" % document_of(bad)
        self.held = sum(len(message.payload) for message in batch.messages)
        self._pieces = self._written(batch)
        return next(self._pieces, b":\n\n")

    def _here(self) -> bytes:
        """Tell the place, so that a client that is cut off before the next message goes on there.

        An event without data sets the last id and is not dispatched.
        """
        return f"id: {self._place}\n\n".encode()

    def _written(self, batch: SubscriptionBatch) -> Iterator[bytes]:
        """Yield the events of a batch, in pieces."""
        if batch.dropped:
            yield b"event: dropped\ndata: %b\n\n" % msgspec.json.encode(batch.dropped)
        run, shard = batch.run, batch.shard
        done = 0
        for part in _parts(batch.messages):
            lines = encode_lines(part).splitlines()
            if run is None or shard is None:
                yield b"".join(b"data: %b\n\n" % line for line in lines)
                continue
            held = []
            for line, position in zip(lines, run.positions[done : done + len(part)], strict=True):
                self._place[shard] = position
                held.append(b"id: %b\ndata: %b\n\n" % (str(self._place).encode(), line))
            done += len(part)
            yield b"".join(held)
        if run is not None and shard is not None:
            self._place[shard] = run.position
            if batch.dropped and not batch.messages:  # or it would be told again to who connects again
                yield self._here()

    async def aclose(self) -> None:
        """End the subscription."""
        with suppress(ValueError):  # it is no longer there if it was closed before
            self._context.on_stop.remove(self._subscription.close)
        self._subscription.close()


def _parts(messages: list[ts.Message]) -> Iterator[list[ts.Message]]:
    """Yield messages in parts of about `_PIECE` bytes, each of one at least."""
    first = size = 0
    for number, message in enumerate(messages):
        size += len(message.payload)
        if size >= _PIECE:
            yield messages[first : number + 1]
            first, size = number + 1, 0
    if first < len(messages):
        yield messages[first:]


ROUTES = [tail]
