"""An MQTT client on a raw socket, which sends given bytes and returns received packets one by one."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Self

from topicstore_conformance.faults.threads import PATIENCE

from . import wire
from .wire import Packet, Value

__all__ = ["NEVER", "RawClient"]

NEVER = 0xFFFFFFFF
"""The session expiry interval of a session that never expires."""


class RawClient:
    """A connection to a server, not thread-safe. It sends no acknowledgement and no PINGREQ by itself."""

    def __init__(self, port: int, *, version: int = 5, host: str = "127.0.0.1", patience: float = PATIENCE) -> None:
        self.version = version
        self.connack: Packet  # set by `connect`
        self.socket = socket.create_connection((host, port), patience)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._packet_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket without DISCONNECT, like a client whose network fails."""
        self.socket.close()

    def send(self, *packets: bytes) -> None:
        """Send packets. A connection that the server has closed raises no error here; `receive` then returns None."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(b"".join(packets))

    def receive(self) -> Packet | None:
        """Return the next packet, or None if the server has closed the connection."""
        while (found := wire.split(self._buffer)) is None:
            if not self._read():
                return None
        first, begin, end = found
        body = bytes(self._buffer[begin:end])
        del self._buffer[:end]
        return wire.parse(self.version, first, body, end)

    def _read(self) -> bool:
        """Read the server's next bytes; return False if it has closed the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            return False
        except TimeoutError as error:
            waited = f"for {self.socket.gettimeout():g} seconds"
            raise AssertionError(f"the server sent nothing {waited}, and left the connection open") from error
        self._buffer += data
        return bool(data)

    def next(self) -> Packet:
        """Return the next packet; fail if the server closes the connection instead."""
        packet = self.receive()
        assert packet is not None, "the server closed the connection"
        return packet

    def expect(self, kind: str) -> Packet:
        """Return the next packet, which must be of this kind."""
        packet = self.receive()
        assert packet is not None, f"the server closed the connection instead of sending {kind}"
        assert packet.kind == kind, f"{packet} came instead of {kind}"
        return packet

    def publishes(self, count: int) -> list[Packet]:
        """Return the next ``count`` packets, which must be PUBLISH."""
        return [self.expect("PUBLISH") for _ in range(count)]

    def ended(self) -> Any:
        """Read until the server closes the connection; return the last `Packet`, or None if there was none."""
        last = None
        while (packet := self.receive()) is not None:
            last = packet
        return last

    def farewell(self) -> tuple[str, int] | None:
        """Read like `ended`; return the type and the reason code of the last packet, or None if there was none."""
        return None if (last := self.ended()) is None else (last.kind, last.reason)

    def next_id(self) -> int:
        """Return a packet identifier that this method has not returned before."""
        self._packet_id += 1
        return self._packet_id

    def connect(self, client_id: str = "", *, keep: bool = False, **options: object) -> Packet:
        """Send a CONNECT and return the CONNACK; with ``keep`` resume an existing session, which never expires."""
        if keep:
            options = {"clean": False, **({"session_expiry_interval": NEVER} if self.version == 5 else {}), **options}
        self.send(wire.connect(client_id, version=self.version, **options))  # type: ignore[arg-type]
        self.connack = self.expect("CONNACK")
        return self.connack

    def rest(self) -> bytes:
        """Read until the server closes the connection; return the bytes, which may be in any version's form."""
        while self._read():
            pass
        return bytes(self._buffer)

    def subscribe(self, *filters: str, options: int = 0, **values: Value) -> tuple[int, ...]:
        """Subscribe to filters, all with the same options; return the reason codes."""
        number = self.next_id()
        self.send(wire.subscribe(number, [(one, options) for one in filters], version=self.version, **values))
        answer = self.expect("SUBACK")
        assert answer.packet_id == number
        return answer.reasons

    def publish(self, topic: str, payload: bytes = b"", qos: int = 1, **options: object) -> Any:
        """Publish a message with the whole exchange of its QoS; return the last acknowledgement, or None for QoS 0.

        The acknowledgement must be the next packet, so the client must not be subscribed to the topic.
        """
        number = self.next_id() if qos else 0
        self.send(wire.publish(topic, payload, qos=qos, packet_id=number, version=self.version, **options))  # type: ignore[arg-type]
        if qos == 0:
            return None
        answer = self.expect("PUBACK" if qos == 1 else "PUBREC")
        assert answer.packet_id == number
        if qos == 1 or answer.reason >= 0x80:
            return answer
        self.send(wire.acknowledgement("PUBREL", number))
        return self.expect("PUBCOMP")

    def acknowledge(self, packet: Packet) -> None:
        """Acknowledge a PUBLISH with a PUBACK, or with the whole QoS 2 exchange."""
        if packet.qos == 1:
            self.send(wire.acknowledgement("PUBACK", packet.packet_id))
        elif packet.qos == 2:
            self.send(wire.acknowledgement("PUBREC", packet.packet_id))
            assert self.expect("PUBREL").packet_id == packet.packet_id
            self.send(wire.acknowledgement("PUBCOMP", packet.packet_id))

    def ping(self) -> None:
        """Send a PINGREQ, and check that the next packet is a PINGRESP."""
        self.send(wire.PINGREQ)
        self.expect("PINGRESP")

    def leave(self, reason: int = 0, **values: Value) -> None:
        """Send DISCONNECT, wait until the server closes the connection, and close the socket."""
        self.send(wire.disconnect(reason, version=self.version, **values))
        self.ended()
        self.close()
