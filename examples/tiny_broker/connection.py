"""A client's connection, which splits bytes into requests and pauses reading until the requests were served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from lines import BadLineError, Request, check_length, parse
from topicstore.sessions import Session, SessionEndedError

__all__ = ["BATCHED", "Connection"]

LINGER = 10.0
"""The seconds in which a client may still read the reason why its connection was ended."""
BATCHED = ("PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP")
"""The verbs of requests that may be served together with other requests of the same client."""


class Connection(asyncio.Protocol):
    """A client's connection. Not thread-safe: used in the event loop only.

    ``ask``: a function that is called when there are requests to take.
    """

    def __init__(self, ask: Callable[[Connection], None]) -> None:
        self.session: Session | None = None
        self._full = False
        """Whether the send buffer is full, because the client reads too slowly."""
        self._ask = ask
        self._requests: deque[Request] = deque()
        self._begun = b""
        """The received part of an incomplete line."""
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport: asyncio.Transport = transport

    def data_received(self, data: bytes) -> None:
        """Split data into lines. Reading pauses until they were served, as back-pressure for fast clients."""
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
        """Add a request that reports the loss of the connection after all requests of the client."""
        self._over = True
        self._requests.append(("LOST",))
        self.go_on()

    def take(self) -> list[Request]:
        """Return the requests to serve next: all leading ones that may be served together, or a single other one.

        A client's requests are therefore served in order, and still in batches.
        """
        taken: list[Request] = []
        while self._requests and (not taken or self._requests[0][0] in BATCHED):
            taken.append(self._requests.popleft())
            if taken[0][0] not in BATCHED:
                break
        return taken

    def go_on(self) -> None:
        """Schedule received requests for the next batch, or resume reading if there are none."""
        if self._requests:
            self._transport.pause_reading()
            self._ask(self)
        elif not self._full:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Pause deliveries to a client that doesn't read, and reading from that client."""
        self._full = True
        self._transport.pause_reading()
        with contextlib.suppress(SessionEndedError):
            if self.session is not None:
                self.session.pause()

    def resume_writing(self) -> None:
        """Resume deliveries, with the next batch, and reading."""
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
            self._transport.resume_reading()  # closing a socket with unread bytes would discard the last line
            asyncio.get_running_loop().call_later(LINGER, self._transport.abort)
