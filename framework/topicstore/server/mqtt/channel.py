"""The socket of one connection: writing, flow control of reads, closing, counters, memory of an incomplete packet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from topicstore.server.codec.frames import FrameReader
from topicstore.server.codec.packets import PUBLISH, PUBREL
from topicstore.server.codec.reason import ReasonCode
from topicstore.server.listeners.peer import Peer, Via, peer_of
from topicstore.server.logs import ConnectionRecord, log_connection

from .connections import Serving
from .store_thread import Client

if TYPE_CHECKING:
    from topicstore.server.listeners.websocket import WebSocketTransport

__all__ = ["Channel", "Counted", "UnfinishedPacket"]

Counted = tuple[int, int, int]
"""A packet type, a reason code, and the number of packets with both."""

_LINGER = 5.0
"""Seconds that a client has to read the last packet before its socket is closed."""


class Channel:
    """The server's side of a connection's socket, with its counters. Used in the event loop only."""

    __slots__ = (
        "_beneath",
        "_serving",
        "_since",
        "_timer",
        "_transport",
        "gone",
        "held",
        "over",
        "peer",
        "record",
        "refused",
    )

    def __init__(self, serving: Serving, transport: asyncio.Transport, via: Via) -> None:
        self._serving, self._transport = serving, transport
        self._since = serving.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.held = False
        """Whether reading from the socket is paused."""
        self._beneath = cast("WebSocketTransport", transport) if via.scheme in ("ws", "wss") else None
        self.peer: Peer = peer_of(transport, via)
        self.record = ConnectionRecord(listener=via.name, address=self.peer.address)
        self.refused = False
        """Whether the client's CONNECT was refused."""
        self.gone = False
        """Whether the socket is closed."""
        self.over = False
        """Whether the last packet was written, so that nothing more is sent."""

    @property
    def open(self) -> bool:
        """Whether packets can be written."""
        return not (self.gone or self.over)

    @property
    def unsent(self) -> int:
        """Number of written bytes that the kernel has not accepted yet."""
        return self._transport.get_write_buffer_size()

    @property
    def beneath(self) -> int:
        """Number of received bytes of an incomplete WebSocket frame; 0 without WebSocket."""
        return 0 if self._beneath is None else self._beneath.unfinished

    def arrived(self, size: int) -> None:
        """Count received bytes."""
        self.record.bytes_in += size
        self._serving.traffic.bytes_received += size

    def taken(self, packets: int, published: int) -> None:
        """Count received packets, ``published`` of which are PUBLISHes; `came` counts the others by type."""
        self.record.packets_in += packets
        self.record.messages_in += published
        self._serving.traffic.received.good[PUBLISH] += published

    def came(self, kind: int, reason: int = 0, packets: int = 1) -> None:
        """Count received packets of a type other than PUBLISH, by reason code."""
        self._serving.traffic.received.add(kind, reason, packets)

    def write(self, data: bytes, kind: int, reason: int = 0) -> None:
        """Send a packet, unless the connection is over. ``reason``: the packet's highest reason code; 0 for none."""
        self.answer(data, ((kind, reason, 1),))

    def answer(self, data: bytes, packets: Sequence[Counted]) -> None:
        """Send encoded packets, unless the connection is over. ``packets``: their numbers by type and reason code."""
        if self._put(data):
            for kind, reason, number in packets:
                self.record.packets_out += number
                self._serving.traffic.sent.add(kind, reason, number)

    def deliver(self, data: bytes, published: int, pubrels: int) -> None:
        """Send encoded PUBLISHes and PUBRELs, unless the connection is over; the arguments give their numbers."""
        if self._put(data):
            self.record.packets_out += published + pubrels
            self.record.messages_out += published
            sent = self._serving.traffic.sent.good
            sent[PUBLISH] += published
            sent[PUBREL] += pubrels

    def write_raw(self, data: bytes) -> None:
        """Send bytes whose packets another site has counted, unless the connection is over."""
        self._put(data)

    def hand_over(self, protocol: asyncio.Protocol) -> None:
        """Let another protocol receive the client's bytes, from now on."""
        self._transport.set_protocol(protocol)
        self.hold(False)

    def ends(self, reason: str, code: int) -> None:
        """Set the reason and the reason code that the connection's line in the log reports."""
        self.record.reason, self.record.code = reason, int(code)

    def _put(self, data: bytes) -> bool:
        if not data or self.gone or self.over:
            return False
        self._transport.write(data)
        self.record.bytes_out += len(data)
        self._serving.traffic.bytes_sent += len(data)
        return True

    def hold(self, hold: bool) -> bool:
        """Pause or resume reading; return whether that is a change."""
        if hold is self.held or self.gone:
            return False
        self.held = hold
        if hold:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        return True

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Set the connection's only timer to call a function after some seconds."""
        self.never()
        self._timer = self._serving.loop.call_later(seconds, call)

    def never(self) -> None:
        """Cancel the timer that `later` has set."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shut(self) -> None:
        """Send nothing more, and close the socket once the client has closed its end, or after `_LINGER` seconds.

        Closing a socket that has unread bytes would reset the connection, and the client could lose the last packet.
        """
        if self.over:
            return
        self.over = True
        self.hold(False)
        self.never()
        if self.gone or self._transport.is_closing():
            return
        self.later(_LINGER, self._transport.abort)
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has closed the socket, and the loop hasn't noticed yet
            self._transport.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        self.over = True
        self.never()
        if not self.gone:
            self._transport.abort()

    def lost(self, error: Exception | None) -> None:
        """Record that the socket is closed, and log the connection; refused logins are logged at a limited rate."""
        self.never()
        self.gone = True
        if error is not None and not self.over:
            self.record.reason = f"the connection broke: {error}"
        record = self.record
        record.seconds = round(self._serving.loop.time() - self._since, 3)
        if self.refused:
            fields = {**record.who(), "reason": record.reason, "code": record.code}
            self._serving.refused_logins.note(self.peer.site, fields)
        else:
            log_connection(record)


class UnfinishedPacket:
    """The incomplete packet of one connection, as a `topicstore.server.resource_limits.Holder`.

    Used in the event loop only.
    """

    __slots__ = ("_budget", "_channel", "_client", "_reader", "_serving", "size")

    def __init__(self, serving: Serving, client: Client, reader: FrameReader, channel: Channel) -> None:
        self._serving, self._client, self._reader, self._channel = serving, client, reader, channel
        self._budget = serving.unadmitted
        self.size = 0
        """Number of received bytes of the packet."""

    def count(self) -> None:
        """Update the packet's size in the budget; if the budget is exceeded, this may end any connection."""
        size = self._reader.held + self._channel.beneath
        if size != self.size:
            self.size = size
            self._budget.hold(self, size)

    def admit(self) -> None:
        """Move the packet's bytes to the budget of clients whose CONNECT was accepted."""
        self._budget.hold(self, 0)
        self._budget = self._serving.unfinished
        self._budget.hold(self, self.size)

    def drop(self) -> None:
        """Discard the packet, and release its bytes."""
        self._reader.drop()
        self.size = 0
        self._budget.hold(self, 0)

    @property
    def host(self) -> str:
        """The address of the client, without its port."""
        return self._channel.peer.address.rpartition(":")[0]

    @property
    def work(self) -> object:
        """The number of the packet; None while reading from the client is paused."""
        return None if self._channel.held else self._reader.begun

    @property
    def breakable(self) -> bool:
        """Always True: the packet waits for the client."""
        return True

    def break_off(self, why: str) -> None:
        """End the connection."""
        self._client.end(ReasonCode.QUOTA_EXCEEDED, why)
