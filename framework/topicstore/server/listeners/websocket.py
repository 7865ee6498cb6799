"""MQTT over WebSocket (RFC 6455; MQTT 5, section 6), with the same interface to the server as TCP.

`WebSocketEdge` handles the socket. After the handshake, the server's connection gets a `WebSocketTransport`, to which
it writes as to any asyncio transport. Frames may split packets anywhere, so their data is passed on as a stream of
bytes.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Iterable
from typing import Any, cast
from urllib.parse import urlsplit

from websockets.datastructures import Headers, MultipleValuesError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from topicstore.server.config.model import Limits
from topicstore.server.config.units import is_forwarded, is_loopback
from topicstore.server.logs import ConnectionRecord, log_connection

from .peer import FROM_ELSEWHERE, ConnectionFactory, Via, peer_of

__all__ = ["WebSocketEdge", "WebSocketTransport"]

_LINGER = 5.0
"""Seconds that a client has to answer the close frame."""
_SMALLEST_MESSAGE = 1 << 20
"""Bytes that a WebSocket message may always have, because one message may contain many packets. It is also the limit of
the first message, because no CONNECT is larger."""
_SMALLEST_HELD = 256
"""An incomplete frame with more bytes than this can't be a close frame."""
_LARGEST_HANDSHAKE = 64 << 10
"""Most bytes that a client may send before its handshake is complete."""

_log = logging.getLogger("topicstore.server.websocket")
_log.setLevel(logging.WARNING)  # the server itself logs a line for each connection


class WebSocketEdge(asyncio.Protocol):
    """One connection of a WebSocket listener: the handshake, then conversion between frames and bytes."""

    def __init__(
        self, connect: ConnectionFactory, via: Via, *, path: str, origins: tuple[str, ...], limits: Limits
    ) -> None:
        self._connect, self._via, self._path, self._origins = connect, via, path, origins
        self._patience = limits.connect_timeout
        self._frames = ServerProtocol(
            subprotocols=[Subprotocol("mqtt")],
            max_size=_SMALLEST_MESSAGE,
            logger=_log,
        )
        self._largest = max(limits.packet_size, _SMALLEST_MESSAGE)
        """Most bytes of a message after the first one."""
        self._timer: asyncio.TimerHandle | None = None
        self._inner: asyncio.Protocol | None = None
        self._socket: asyncio.Transport  # set by `connection_made`
        self._record: ConnectionRecord  # for connections that fail before MQTT begins
        self._since = 0.0
        self._full = self._holds = self._inner_holds = False
        self._ends = False
        """Whether received bytes are discarded, because a frame was incomplete when the connection was closed."""

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the handshake, at most for the connect timeout."""
        self._socket, loop = cast("asyncio.Transport", transport), asyncio.get_running_loop()
        self._since = loop.time()
        self._record = ConnectionRecord(listener=self._via.name, address=peer_of(transport, self._via).address)
        self._record.reason = "there was no WebSocket handshake"
        self._timer = loop.call_later(self._patience, self._socket.abort)

    def data_received(self, data: bytes) -> None:
        """Pass on the data of frames; automatic answers of the library, such as pongs, are sent first."""
        if self._inner is None:
            self._record.bytes_in += len(data)
        if self._ends:
            return
        self._frames.receive_data(data)
        events = self._frames.events_received()
        self._flush()
        for event in events:
            if isinstance(event, Request):
                self._answer(event)
            else:
                self._take(cast("Frame", event))
        if self._inner is None:
            if self._record.bytes_in > _LARGEST_HANDSHAKE:
                self._record.reason = "the WebSocket handshake is too large"
                self._socket.abort()
        elif not self._open:
            if self.unfinished > _SMALLEST_HELD:
                self._drop()
        elif not events:
            self._inner.data_received(b"")  # no data, only the sign that an incomplete frame has grown

    def serve_by(self, inner: asyncio.Protocol) -> None:
        """Let another protocol be the server's connection."""
        self._inner = inner

    @property
    def unfinished(self) -> int:
        """Number of received bytes of an incomplete frame."""
        return len(self._frames.reader.buffer)

    def eof_received(self) -> bool | None:
        """Close the connection, because a WebSocket can't be half-closed."""
        self._frames.receive_eof()
        self._flush()
        return None

    def pause_writing(self) -> None:
        """Pause the server's connection, too."""
        self._full = True
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Resume reading, and the server's connection."""
        self._full = False
        self.hold(pings=False)
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the server's connection; if there is none yet, log the end of the connection."""
        self._stop_timer()
        if self._inner is not None:
            self._inner.connection_lost(exc)
        else:
            self._record.seconds = round(asyncio.get_running_loop().time() - self._since, 3)
            log_connection(self._record)

    # --- the handshake ---

    def _answer(self, request: Request) -> None:
        response = self._refusal(request)
        if response is None:
            response = self._frames.accept(request)
        self._frames.send_response(response)
        self._flush()
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS and self._open:
            self._stop_timer()
            self._inner = self._connect(self._via)
            elsewhere = _from_elsewhere(request.headers)
            self._inner.connection_made(WebSocketTransport(self, self._socket, from_elsewhere=elsewhere))
        elif response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self._record.reason = (
                f"the WebSocket handshake was refused with {response.status_code}: {_first_line(response)}"
            )

    def _refusal(self, request: Request) -> Any:
        if request.path.partition("?")[0] != self._path:
            return self._frames.reject(http.HTTPStatus.NOT_FOUND, f"MQTT is at {self._path}.\n")
        origins = request.headers.get_all("Origin")
        if self._origins and origins and not set(origins) <= set(self._origins):
            return self._frames.reject(http.HTTPStatus.FORBIDDEN, "Pages of this origin may not connect.\n")
        return None

    # --- frames ---

    @property
    def _open(self) -> bool:
        return self._frames.state is OPEN and not self._frames.eof_sent

    def _take(self, frame: Frame) -> None:
        """Pass on a frame's data. MQTT uses binary frames only [MQTT-6.0.0-1]."""
        if frame.opcode is Opcode.PING and self._full:
            self.hold(pings=True)  # a client that doesn't read would make pongs pile up in memory
        if self._inner is None or not self._open:
            return
        if frame.opcode is Opcode.TEXT:
            self._frames.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is sent in binary frames")
            self._flush()
        elif frame.opcode in (Opcode.BINARY, Opcode.CONT) and frame.data:
            self._frames.max_size = self._largest
            self._inner.data_received(bytes(frame.data))

    def hold(self, *, pings: bool | None = None, inner: bool | None = None) -> None:
        """Pause reading, or resume it if neither this object nor the server's connection requires the pause."""
        self._holds = self._holds if pings is None else pings
        self._inner_holds = self._inner_holds if inner is None else inner
        if self._socket.is_closing():
            return
        if self._holds or (self._inner_holds and self._open):
            self._socket.pause_reading()
        else:
            self._socket.resume_reading()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes in one frame; after the end of the connection they are discarded, as by every transport."""
        if self._open and data:
            self._frames.send_binary(bytes(data))
            self._flush()

    def _drop(self) -> None:
        """Discard an incomplete frame and all further data, because only a close frame would still matter."""
        self._ends = True
        self._frames.reader.buffer.clear()

    def close(self) -> None:
        """Send written bytes and a close frame; the socket is closed when the client has answered."""
        if self._open:
            if self.unfinished > _SMALLEST_HELD:
                self._drop()
            self._frames.send_close(CloseCode.NORMAL_CLOSURE)
            self._flush()
            self.hold(inner=False)
            self._timer = asyncio.get_running_loop().call_later(_LINGER, self._socket.abort)

    def _flush(self) -> None:
        for data in self._frames.data_to_send():
            if data:
                self._socket.write(data)
            else:  # the library marks the end of the data by an empty item
                self._socket.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _first_line(response: Response) -> str:
    """Return the first line of a refusal's body."""
    return (response.body or b"").decode(errors="replace").partition("\n")[0]


def _from_elsewhere(headers: Headers) -> bool:
    """Return whether a client on this machine acts for another machine, as a proxy or a browser with a page does.

    Otherwise any web page opened on this machine would have the rights of this machine.
    """
    if is_forwarded(headers):
        return True
    try:
        origin = headers.get("Origin")
    except MultipleValuesError:
        return True
    if origin is None:
        return False
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return True
    return host is None or not is_loopback(host)


class WebSocketTransport(asyncio.Transport):
    """The asyncio transport of the server's connection, which sends bytes as WebSocket frames.

    The connection receives ``b""`` whenever an incomplete frame has grown.
    """

    def __init__(self, edge: WebSocketEdge, socket: asyncio.Transport, *, from_elsewhere: bool) -> None:
        super().__init__({FROM_ELSEWHERE: from_elsewhere})
        self._edge, self._socket = edge, socket
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the socket transport's information, and whether the client is on another machine."""
        if name == FROM_ELSEWHERE:
            return super().get_extra_info(name, default)
        return self._socket.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass the data of frames on to another protocol."""
        self._edge.serve_by(cast("asyncio.Protocol", protocol))

    @property
    def unfinished(self) -> int:
        """Number of received bytes of an incomplete frame, which were not passed on yet."""
        return self._edge.unfinished

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes in one frame."""
        if not self._closing:
            self._edge.send(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Join buffers, and send them in one frame."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """Return False, because a WebSocket can't be half-closed."""
        return False

    def write_eof(self) -> None:
        """Raise NotImplementedError, because a WebSocket can't be half-closed."""
        raise NotImplementedError("a WebSocket can't be half-closed")

    def close(self) -> None:
        """Send written bytes, then a close frame; data that the client still sends is discarded."""
        self._closing = True
        self._edge.close()

    def abort(self) -> None:
        """Close the socket at once."""
        self._closing = True
        self._socket.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closing or closed, by either side."""
        return self._closing or self._socket.is_closing()

    def pause_reading(self) -> None:
        """Pause reading from the socket; bytes that were read are still passed on."""
        if not self._closing:
            self._edge.hold(inner=True)

    def resume_reading(self) -> None:
        """Resume reading from the socket."""
        if not self._closing:
            self._edge.hold(inner=False)

    def is_reading(self) -> bool:
        """Return whether reading from the socket is not paused."""
        return not self._closing and self._socket.is_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the sizes at which writing is paused and resumed."""
        self._socket.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes."""
        return self._socket.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the sizes at which writing is resumed and paused."""
        return self._socket.get_write_buffer_limits()
