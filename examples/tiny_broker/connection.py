"""One client's connection: it cuts bytes into requests, and reads no more until they were served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from lines import BadLineError, Request, check_length, parse
from topicstore.sessions import Session, SessionEndedError

__all__ = ["BATCHED", "Connection"]

LINGER = 10.0
"""Seconds in which a client may still read why its connection was ended."""
BATCHED = ("PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP")
"""What is served together with other requests of the same client."""


class Connection(asyncio.Protocol):
    """Used in the event loop only. ``ask`` is called when there are requests to take."""

    def __init__(self, ask: Callable[[Connection], None]) -> None:
        self.session: Session | None = None
        self._full = False
        """Whether the client reads more slowly than it is sent to."""
        self._ask = ask
        self._requests: deque[Request] = deque()
        self._begun = b""
        """The beginning of a line whose end hasn't come."""
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        """Cut lines. No more is read before they were served: a client that floods the broker holds up itself."""
        if self._over:
            return
        *lines, self._begun = (self._begun + data).split(b"\n")
        try:
            for line in lines:
                self._requests.append(parse(line.removesuffix(b"\r")))
            check_length(self._begun)
        except BadLineError as bad:
            self._requests.append(("REFUSED", str(bad)))
        self.go_on()

    def connection_lost(self, error: Exception | None) -> None:
        """Pass on that the client is gone, after all that it asked for."""
        self._over = True
        self._requests.append(("LOST",))
        self.go_on()

    def take(self) -> list[Request]:
        """Return what to serve next: one request, or all that are served together up to another one.

        So a client's requests are served in their order, and still in batches.
        """
        taken: list[Request] = []
        while self._requests and (not taken or self._requests[0][0] in BATCHED):
            taken.append(self._requests.popleft())
            if taken[0][0] not in BATCHED:
                break
        return taken

    def go_on(self) -> None:
        """Ask for what has come to be served, or read on."""
        if self._requests:
            self._transport.pause_reading()
            self._ask(self)
        elif not self._full:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Hold back a client that doesn't read: nothing is handed out for it, and nothing read from it."""
        self._full = True
        self._transport.pause_reading()
        with contextlib.suppress(SessionEndedError):
            if self.session is not None:
                self.session.pause()

    def resume_writing(self) -> None:
        """Go on: what waits in the store comes with the next hop."""
        self._full = False
        with contextlib.suppress(SessionEndedError):
            if self.session is not None:
                self.session.resume()
        self._ask(self)

    def say(self, *lines: bytes) -> None:
        """Send lines."""
        if lines and not self._over:
            self._transport.write(b"\n".join((*lines, b"")))

    def end(self, last: bytes) -> None:
        """Send a last line, and end the connection once the client has read it and hung up."""
        self.say(last)
        if not self._over:
            self._over = True
            self._requests.clear()
            self._transport.write_eof()
            self._transport.resume_reading()  # a socket that is closed with unread bytes takes the last line with it
            asyncio.get_running_loop().call_later(LINGER, self._transport.abort)
