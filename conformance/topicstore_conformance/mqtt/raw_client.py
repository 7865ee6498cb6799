"""A client that sends bytes over a socket, and returns the packets that come back, one by one."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Self

from topicstore_conformance.faults.threads import PATIENCE

from . import wire
from .wire import Packet, Value

__all__ = ["NEVER", "RawClient"]

NEVER = 0xFFFFFFFF
"""The session expiry interval of a session that stays."""


class RawClient:
    """A connection to a server, for one thread. It does nothing by itself: no acknowledgement, no keep-alive."""

    def __init__(self, port: int, *, version: int = 5) -> None:
        self.version = version
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._packet_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection without a word, as a client does whose network fails."""
        self.socket.close()

    def send(self, *packets: bytes) -> None:
        """Send packets. It is no error if the server has closed the connection: `receive` tells."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(b"".join(packets))

    def receive(self) -> Packet | None:
        """Return the next packet; None when the server has closed the connection."""
        while (found := wire.split(self._buffer)) is None:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data
        first, begin, end = found
        body = bytes(self._buffer[begin:end])
        del self._buffer[:end]
        return wire.parse(self.version, first, body, end)

    def expect(self, kind: str) -> Packet:
        """Return the next packet, which must be of this kind."""
        packet = self.receive()
        assert packet is not None, f"the server closed the connection instead of sending {kind}"
        assert packet.kind == kind, f"{packet} came instead of {kind}"
        return packet

    def publishes(self, count: int) -> list[Packet]:
        """Return the next packets, which must be PUBLISH."""
        return [self.expect("PUBLISH") for _ in range(count)]

    def ended(self) -> Any:
        """Read until the server has closed the connection; return the last `Packet`, None if there was none."""
        last = None
        while (packet := self.receive()) is not None:
            last = packet
        return last

    def farewell(self) -> tuple[str, int] | None:
        """Read as `ended` does; return the type and the reason code of the last packet, None if there was none."""
        return None if (last := self.ended()) is None else (last.kind, last.reason)

    def next_id(self) -> int:
        """Return a packet id that wasn't used in this connection."""
        self._packet_id += 1
        return self._packet_id

    def connect(self, client_id: str = "", *, keep: bool = False, **options: object) -> Packet:
        """Send a CONNECT, return the CONNACK; with ``keep`` the session is resumed if it is there, and stays."""
        if keep:
            options = {"clean": False, **({"session_expiry_interval": NEVER} if self.version == 5 else {}), **options}
        self.send(wire.connect(client_id, version=self.version, **options))  # type: ignore[arg-type]
        return self.expect("CONNACK")

    def subscribe(self, *filters: str, options: int = 0, **values: Value) -> tuple[int, ...]:
        """Subscribe to filters, all with the same options; return the reason codes."""
        number = self.next_id()
        self.send(wire.subscribe(number, [(one, options) for one in filters], version=self.version, **values))
        answer = self.expect("SUBACK")
        assert answer.packet_id == number
        return answer.reasons

    def publish(self, topic: str, payload: bytes = b"", qos: int = 1, **options: object) -> Any:
        """Publish a message and do all that its QoS asks for; return the last answer, a `Packet`, None for QoS 0.

        The answer must be the next packet, so a client that is subscribed to the topic can't use it.
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
        """Send the PUBACK of a PUBLISH, or take part in the exchange of QoS 2 to its end."""
        if packet.qos == 1:
            self.send(wire.acknowledgement("PUBACK", packet.packet_id))
        elif packet.qos == 2:
            self.send(wire.acknowledgement("PUBREC", packet.packet_id))
            assert self.expect("PUBREL").packet_id == packet.packet_id
            self.send(wire.acknowledgement("PUBCOMP", packet.packet_id))

    def ping(self) -> None:
        """Send a PINGREQ, and get the PINGRESP as the next packet."""
        self.send(wire.PINGREQ)
        self.expect("PINGRESP")

    def leave(self, reason: int = 0, **values: Value) -> None:
        """Disconnect in order, and wait until the server has closed the connection."""
        self.send(wire.disconnect(reason, version=self.version, **values))
        self.ended()
        self.close()
