"""``GET /messages/tail``: new messages as server-sent events.

The format is defined by the HTML standard, section 9.2
(https://html.spec.whatwg.org/multipage/server-sent-events.html).
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
from topicstore.server.http.parameters import TheFilter, TheStart, time_asked
from topicstore.server.http.problems import document_of
from topicstore.server.http.streaming import Streamed

__all__ = ["ROUTES"]

_BATCH = 256
"""Most messages that are fetched for a client at once."""
_PIECE = 1 << 18
"""About the most bytes of payloads that are encoded at once, so that a slow client occupies little memory. Clients with
the same filter share the messages themselves."""
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
    """Follow a filter: send the stored messages from ``start`` on, and then new messages as they arrive.

    Without ``start``, only new messages are sent. Each event is a message, encoded as in JSON lines, and its ``id`` is
    the cursor after the message. A client that reconnects with the last ``id``, as a browser's EventSource does,
    receives each later stored message exactly once. Messages that are not stored reach only connected clients, and slow
    clients miss some of them. Messages of one shard are sent in order of positions.

    An event of the type ``dropped`` lists generations that were dropped before they were read. An event of the type
    ``problem`` has the problem document of an error that ends the response. Comments are sent as heartbeats. The
    response ends when the server stops.
    """
    db = context.db
    last = last_event_id or after
    place = time_asked(db, start) if last is None else ts.Place.parse(last)
    subscription = db.subscribe(topic_filter, place, batch_size=_BATCH)
    return Streamed(_Events(context, subscription, heartbeat), "text/event-stream", {"Cache-Control": "no-store"})


class _Events:
    """The events for one client. `aclose` closes the subscription, and so does the stop of the server."""

    def __init__(self, context: Context, subscription: Subscription, heartbeat: float) -> None:
        self._context = context
        self._subscription = subscription
        self._heartbeat = heartbeat
        self._place = subscription.place
        self._pieces = iter((self._here(),))
        """The remaining events of the last batch."""
        self.held = 0
        """Bytes of the last batch's payloads."""
        self._failure: Exception | None = None
        """The error that ends the response, once its event was sent."""
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
        except Exception as bad:  # noqa: BLE001 - it is sent as an event, and raised by the next call
            self._failure = bad
            return b"event: problem\ndata: %b\n\n" % document_of(bad)
        self.held = sum(len(message.payload) for message in batch.messages)
        self._pieces = self._written(batch)
        return next(self._pieces, b":\n\n")

    def _here(self) -> bytes:
        """Return an event with the current cursor, so that a client can resume even before the next message.

        An event without data only sets the client's last event id, and is not dispatched.
        """
        return f"id: {self._place}\n\n".encode()

    def _written(self, batch: SubscriptionBatch) -> Iterator[bytes]:
        """Yield the events of a batch, in pieces."""
        if batch.dropped:
            yield b"event: dropped\ndata: %b\n\n" % msgspec.json.encode(batch.dropped)
        read_slice, shard = batch.read_slice, batch.shard
        done = 0
        for part in _parts(batch.messages):
            lines = encode_lines(part).splitlines()
            if read_slice is None or shard is None:
                yield b"".join(b"data: %b\n\n" % line for line in lines)
                continue
            held = []
            for line, position in zip(lines, read_slice.positions[done : done + len(part)], strict=True):
                self._place[shard] = position
                held.append(b"id: %b\ndata: %b\n\n" % (str(self._place).encode(), line))
            done += len(part)
            yield b"".join(held)
        if read_slice is not None and shard is not None:
            self._place[shard] = read_slice.position
            if batch.dropped and not batch.messages:  # an id, so that a reconnect doesn't repeat the event
                yield self._here()

    async def aclose(self) -> None:
        """Close the subscription. Idempotent."""
        with suppress(ValueError):  # an earlier call has removed the callback
            self._context.on_stop.remove(self._subscription.close)
        self._subscription.close()


def _parts(messages: list[ts.Message]) -> Iterator[list[ts.Message]]:
    """Split messages into parts of about `_PIECE` bytes, each with at least one message."""
    first = size = 0
    for number, message in enumerate(messages):
        size += len(message.payload)
        if size >= _PIECE:
            yield messages[first : number + 1]
            first, size = number + 1, 0
    if first < len(messages):
        yield messages[first:]


ROUTES = [tail]
