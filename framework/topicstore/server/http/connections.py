"""HTTP connections of uvicorn, with limits for their number, for slow clients, and for their memory."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import h11
from litestar.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from topicstore.server.resource_limits import MemoryBudget

__all__ = ["Connection", "connection_of", "connections"]

_CONNECTION = "topicstore.connection"
"""The key of the ASGI scope's extensions under which a request's connection is stored."""

_LEAST = 16 << 10
"""Fewest bytes of a body that a client must send in each period."""
_STALLED = 10
"""Number of periods in which a client may read nothing of a response."""
_MOST_DISCARDED = 16 << 20
"""Most bytes of a body that are read and discarded after an early response, so that the client can read it."""

_connections_log = logging.getLogger("topicstore.server.http")


class _Flow(FlowControl):
    """Flow control that counts the server's read pauses, in which a client isn't slow."""

    pauses = 0

    def pause_reading(self) -> None:
        self.pauses += 1
        super().pause_reading()


class Connection(H11Protocol):
    """One HTTP connection. A check every ``period`` seconds closes the connection if its client makes no progress.

    While the server waits for the client, the client must begin a request, or send `_LEAST` bytes of its body, in each
    period.
    """

    def __init__(self, *args: Any, most: int, period: float, memory: MemoryBudget, **named: Any) -> None:
        super().__init__(*args, **named)
        self._most, self._period = most, period
        self._memory = memory
        self._body = self._response = 0
        """Bytes of the request's body in memory, and bytes that are held for the response."""
        self._counted: object = None
        """The request to which `_body` belongs."""
        self.refused = False
        """Whether the request is to be answered with 503, because its body takes too much memory."""
        self._arrived = self._discarded = self._stalled = 0
        self._discarding: object = None
        """The request whose body is discarded; `_discarded` counts the bytes."""
        self._before: tuple[object, ...] = ()
        """The connection's state at the last check."""
        self._arrived_before = self._waiting_before = 0
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a new connection, or refuse it with 503 if there are too many."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if len(self.connections) > self._most:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()
        else:
            self._look = self.loop.call_later(self._period, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the check, and release the connection's memory."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)
        self._hold(0, 0)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and count those of a body in the memory budget."""
        if self.transport.is_closing():
            return
        self._arrived += len(data)
        if self.conn.our_state is h11.DONE:
            if self._discarding is not self.cycle:
                self._discarding, self._discarded = self.cycle, 0
            self._discarded += len(data)
            if self._discarded > _MOST_DISCARDED:
                self.transport.abort()
                return
        super().data_received(data)
        if self._waits_for_body or self._body:
            if self._counted is not self.cycle:
                self._counted, self._body, self.refused = self.cycle, 0, False
            self._hold(self._body + len(data), self._response)

    def handle_events(self) -> None:
        """Store this connection in the scope of each new request."""
        super().handle_events()
        if self.cycle is not None:
            extensions: Any = self.cycle.scope.setdefault("extensions", {})
            extensions[_CONNECTION] = self

    def on_response_complete(self) -> None:
        """Release the memory of the request."""
        self._hold(0, 0)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait until the client reads; if the memory budget is exceeded, a waiting connection is ended."""
        super().pause_writing()
        self._memory.make_room()

    # --- the memory budget ---

    @property
    def host(self) -> str:
        """The client's address, without its port."""
        return "" if self.client is None else self.client[0]

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected. Thread-safe."""
        return self.transport.is_closing()

    @property
    def work(self) -> object:
        """Always None: `_check` ends slow clients, not the memory budget."""
        return None

    @property
    def _waits_for_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE

    @property
    def breakable(self) -> bool:
        """Whether the server waits for the client to send the rest of a body, or to read more of a response."""
        return self.flow.write_paused or (self._waits_for_body and not self.refused)

    def hold_response(self, size: int) -> None:
        """Set the number of bytes held for a response. If the budget is exceeded, this may end any connection."""
        if not self.gone:
            self._hold(self._body, size)

    def break_off(self, why: str) -> None:
        """Answer a request with an incomplete body with 503; end the connection of a client that doesn't read."""
        if self.flow.write_paused:
            _connections_log.warning("the connection of %s was ended: %s", self.host, why)
            self.transport.abort()
        else:
            self.refused = True
            self.cycle.body = bytearray()
            self.cycle.message_event.set()

    def _hold(self, body: int, response: int) -> None:
        if (body, response) != (self._body, self._response):
            self._body, self._response = body, response
            self._memory.hold(self, body + response)

    def _check(self) -> None:
        """Close the connection if its client made no progress since the last check; else schedule the next one."""
        if self._too_slow() or self._takes_nothing():
            self.transport.abort()
        else:
            self._look = self.loop.call_later(self._period, self._check)

    def _too_slow(self) -> bool:
        assert isinstance(self.flow, _Flow)  # noqa: S101 - as it was made above
        state = self.conn.their_state
        now = (self.cycle, state, self.flow.pauses)
        before, self._before = self._before, now
        arrived, self._arrived_before = self._arrived - self._arrived_before, self._arrived
        if now != before or self.flow.read_paused:
            return False
        return state is h11.IDLE or (state is h11.SEND_BODY and arrived < _LEAST)

    def _takes_nothing(self) -> bool:
        waiting = self.transport.get_write_buffer_size()
        stuck = self.flow.write_paused and waiting == self._waiting_before
        self._waiting_before = waiting
        self._stalled = self._stalled + 1 if stuck else 0
        return self._stalled >= _STALLED


def connection_of(scope: Scope) -> Connection:
    """Return the `Connection` on which a request arrived."""
    extensions: Any = scope["extensions"]
    found: Connection = extensions[_CONNECTION]
    return found


def connections(most: int, period: float, memory: MemoryBudget) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn.

    ``most`` is the most connections at the same time, ``period`` the seconds between checks of a connection, and
    ``memory`` the budget of all connections.
    """
    made: Any = partial(Connection, most=most, period=period, memory=memory)
    return made  # type: ignore[no-any-return]
