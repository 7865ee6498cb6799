"""Connections of HTTP clients: uvicorn's, with bounds on how many there are, and on how slow a client may be."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["Connection", "connections"]

_LEAST = 16 << 10
"""Bytes of a body that a client sends in each period at least."""
_STALLED = 10
"""Periods in which a client may take nothing of a response."""
_MOST_DISCARDED = 16 << 20
"""Bytes of a body that are still read, and thrown away, after the response; so that the client can read why."""


class _Flow(FlowControl):
    """Counts how often the server has stopped reading: then it isn't the client that is slow."""

    pauses = 0

    def pause_reading(self) -> None:
        self.pauses += 1
        super().pause_reading()


class Connection(H11Protocol):
    """One connection. Every ``period`` seconds it is looked at, and one whose client makes no progress is broken off.

    In a period a client must begin a request, or send `_LEAST` bytes of its body, if the server waits for that.
    """

    def __init__(self, *args: Any, most: int, period: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self._most, self._period = most, period
        self._arrived = self._discarded = self._stalled = 0
        self._discarding: object = None
        """The request whose body is thrown away; `_discarded` counts the bytes of it."""
        self._before: tuple[object, ...] = ()
        """What was seen when the connection was looked at the last time."""
        self._arrived_before = self._waiting_before = 0
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a new connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if len(self.connections) > self._most:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()
        else:
            self._look = self.loop.call_later(self._period, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came from the client."""
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

    def _check(self) -> None:
        """Break the connection off if its client made no progress since the last time; else look again later."""
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


def connections(most: int, period: float) -> type[asyncio.Protocol]:
    """Return what uvicorn makes connections with: at most so many at the same time, each looked at so often."""
    made: Any = partial(Connection, most=most, period=period)
    return made  # type: ignore[no-any-return]
