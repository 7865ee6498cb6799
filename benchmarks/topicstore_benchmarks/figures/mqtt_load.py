"""``python -m topicstore_benchmarks.figures.mqtt_load LOAD PORT JSON``: a load generator for MQTT servers.

Clients are raw sockets that speak MQTT 3.1.1, because client libraries need more time for a message than the servers.
Packets are encoded before the clock starts. Received packets have a fixed size, so that many are read and acknowledged
in one step. A load prints its result as JSON, a number or a list of numbers.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import numpy as np

from topicstore_benchmarks.harness.hardware import resident

__all__ = ["LOADS", "PATIENCE", "raise_file_limit"]

PATIENCE = 120.0
"""The timeout of a load in seconds, during which the server sends nothing."""
_PAYLOAD = 100
_TOPIC = "load/{:05}"
"""The format of topics, all of which have the same length, so that packets have the same size."""
_HOT = _TOPIC.format(0)
_CHUNK = 1 << 18


def _frame(first: int, body: bytes) -> bytes:
    length = len(body)
    head = bytes((length,)) if length < 128 else bytes((length & 127 | 128, length >> 7))
    return bytes((first,)) + head + body


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def _publish(topic: str, number: int, qos: int = 1) -> bytes:
    """Return the PUBLISH of a message with a number from 0; packet identifiers wrap around."""
    return _frame(0x30 | qos << 1, _text(topic) + struct.pack(">H", number % 65_535 + 1) + b"x" * _PAYLOAD)


_SIZE = len(_publish(_HOT, 0))
"""The size in bytes of a PUBLISH with QoS 1 or 2."""
_ID = _SIZE - _PAYLOAD - 2
"""The offset of the packet identifier in a PUBLISH."""


class _Client:
    """A client's connection, on which a CONNECT was sent, and a SUBSCRIBE if a topic filter is given."""

    def __init__(self, port: int, client_id: str, topic_filter: str = "", *, clean: bool = True, qos: int = 1) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest, self._subscribing = b"", topic_filter
        request = _frame(0x10, _text("MQTT") + bytes((4, clean << 1, 0, 0)) + _text(client_id))
        if topic_filter:
            request += _frame(0x82, b"\x00\x01" + _text(topic_filter) + bytes((qos,)))
        self.socket.sendall(request)

    def accepted(self) -> None:
        """Wait for the CONNACK and the SUBACK. Raises `ConnectionError` if the server refuses one of the requests."""
        answer = self.take(4)
        if answer[0] != 0x20 or answer[3] != 0:
            raise ConnectionError(f"the server refuses a client: {answer.hex()}")
        if self._subscribing and self.take(5)[4] > 2:
            raise ConnectionError(f"the server refuses the filter {self._subscribing}")

    def _received(self, most: int) -> bytes:
        data = self.socket.recv(most)
        if not data:
            raise ConnectionError("the server has closed the connection")
        return data

    def take(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            found += self._received(count - len(found))
        return found

    def whole(self, size: int) -> bytes:
        """Return the received packets of this size that are complete; the rest is buffered."""
        data = self.rest + self._received(_CHUNK)
        end = len(data) - len(data) % size
        self.rest = data[end:]
        return data[:end]

    def acknowledged(self) -> int:
        """Return the number of PUBACKs received in one read."""
        return len(self.whole(4)) // 4

    def take_messages(self) -> int:
        """Acknowledge the messages received in one read; return their number."""
        packets = self.whole(_SIZE)
        if packets:
            self.socket.sendall(_puback(packets))
        return len(packets) // _SIZE

    def close(self) -> None:
        with suppress(OSError):
            self.socket.sendall(b"\xe0\x00")
        self.socket.close()


@contextmanager
def _clients(
    port: int, name: str, count: int, topic_filter: Callable[[int], str] = lambda _: "", *, clean: bool = True
) -> Iterator[list[_Client]]:
    """Yield connected clients; ``topic_filter`` returns the filter that each subscribes to, by its number."""
    with ExitStack() as closing:
        made = []
        for number in range(count):
            made.append(_Client(port, f"{name}-{number}", topic_filter(number), clean=clean))
            closing.callback(made[-1].close)
            made[-1].accepted()
        yield made


class _Poll:
    """A selector of the clients that have data to read."""

    def __init__(self, clients: Sequence[_Client]) -> None:
        self._selector = selectors.DefaultSelector()
        for client in clients:
            self._selector.register(client.socket, selectors.EVENT_READ, client)

    def ready(self) -> Iterator[_Client]:
        events = self._selector.select(PATIENCE)
        if not events:
            raise TimeoutError(f"the server has sent nothing for {PATIENCE:.0f} seconds")
        for key, _ in events:
            yield key.data


def _leave_session(port: int, name: str, qos: int) -> None:
    """Create a disconnected session that subscribes to all messages; return when the server has closed the socket."""
    client = _Client(port, name, "load/#", clean=False, qos=qos)
    with client.socket:
        client.accepted()
        client.socket.sendall(b"\xe0\x00")
        client.socket.shutdown(socket.SHUT_WR)
        while client.socket.recv(_CHUNK):
            pass


def _puback(packets: bytes) -> bytearray:
    """Return the PUBACKs of whole PUBLISH packets."""
    count = len(packets) // _SIZE
    out = bytearray(b"\x40\x02\x00\x00" * count)
    out[2::4] = packets[_ID::_SIZE]
    out[3::4] = packets[_ID + 1 :: _SIZE]
    return out


class _Ring:
    """The encoded messages of a client, to some topics in turn; packet identifiers repeat with the topics.

    It sends at most ``messages`` messages.
    """

    def __init__(self, client: _Client, topics: Sequence[str], messages: int, qos: int = 1) -> None:
        self.client, self._around, self._left = client, len(topics), messages
        self._packets = b"".join(_publish(topic, number, qos) for number, topic in enumerate(topics)) * 2
        self._next = 0

    def send(self, count: int, before: bytes = b"") -> None:
        """Send the bytes ``before``, and then the next ``count`` messages or as many as are left."""
        count = min(count, self._left)
        self._left -= count
        data = before + self._packets[self._next * _SIZE : (self._next + count) * _SIZE]
        self._next = (self._next + count) % self._around
        if data:
            self.client.socket.sendall(data)


def publish(port: int, clients: int, window: int, messages: int, qos: int) -> float:
    """Return the messages a second that all clients publish and get acknowledged by PUBACK or PUBCOMP.

    ``window``: the number of in-flight messages of each client. A disconnected session subscribes to all messages.
    """
    _leave_session(port, f"keeper-{qos}", qos)
    with _clients(port, "writer", clients) as writers:
        each = messages // clients
        rings = {w: _Ring(w, [_TOPIC.format(n)] * window, each, qos) for n, w in enumerate(writers)}
        poll, missing = _Poll(writers), each * clients
        started = time.perf_counter()
        for ring in rings.values():
            ring.send(window)
        while missing:
            for client in poll.ready():
                rows = np.frombuffer(client.whole(4), np.uint8).reshape(-1, 4)
                released = rows[rows[:, 0] == 0x50].copy()  # PUBRECs, which are answered by PUBRELs
                released[:, 0] = 0x62
                done = len(rows) - len(released)
                missing -= done
                rings[client].send(done, released.tobytes())
        return each * clients / (time.perf_counter() - started)


def backlog(port: int, messages: int) -> float:
    """Return the acknowledged messages a second of a client that was offline when they were published."""
    _leave_session(port, "reader", 1)
    with _clients(port, "writer", 1) as (writer,):
        ring, missing = _Ring(writer, [_HOT] * 500, messages), messages
        ring.send(500)
        while missing:
            count = writer.acknowledged()
            missing -= count
            ring.send(count)
    started = time.perf_counter()
    reader, missing = _Client(port, "reader", clean=False), messages
    with reader.socket:
        reader.accepted()
        while missing > 0:
            missing -= reader.take_messages()
        seconds = time.perf_counter() - started
        reader.close()
    return messages / seconds


def _deliver(rings: Mapping[_Client, _Ring], readers: Sequence[_Client], messages: int, window: int) -> float:
    """Return the seconds until ``messages`` messages were delivered and acknowledged.

    ``window``: the number of in-flight messages of each publisher.
    """
    poll, missing, started = _Poll([*rings, *readers]), messages, time.perf_counter()
    for ring in rings.values():
        ring.send(window)
    while missing > 0:
        for client in poll.ready():
            if client in rings:
                rings[client].send(client.acknowledged())
            else:
                missing -= client.take_messages()
    return time.perf_counter() - started


def fan_out(port: int, readers: int, messages: int) -> float:
    """Return the deliveries a second of one topic's messages to all readers together, with twenty in flight."""
    with _clients(port, "reader", readers, lambda _: _HOT) as all_readers, _clients(port, "writer", 1) as (writer,):
        rings = {writer: _Ring(writer, [_HOT] * 20, messages)}
        return readers * messages / _deliver(rings, all_readers, readers * messages, 20)


def last_receiver(port: int, readers: int, messages: int) -> list[float]:
    """Return the milliseconds until the last reader has received a message, for each of several successive messages."""
    with _clients(port, "reader", readers, lambda _: _HOT) as all_readers, _clients(port, "writer", 1) as (writer,):
        poll, found, ring = _Poll(all_readers), [], _Ring(writer, [_HOT], messages)
        for _ in range(messages):
            missing, started = readers, time.perf_counter()
            ring.send(1)
            acknowledged = []
            while missing:
                for client in poll.ready():
                    if packets := client.whole(_SIZE):
                        missing -= 1
                        acknowledged.append((client, _puback(packets)))
            found.append((time.perf_counter() - started) * 1e3)
            for client, puback in acknowledged:
                client.socket.sendall(puback)
            writer.take(4)
        return found


def unicast(port: int, readers: int, messages: int) -> float:
    """Return the acknowledged deliveries a second to readers with a topic each.

    There are ten publishers, each with 200 messages in flight.
    """
    with _clients(port, "reader", readers, _TOPIC.format) as all_readers, _clients(port, "writer", 10) as writers:
        each = messages // len(writers)
        rings = {
            writer: _Ring(writer, [_TOPIC.format((number * each + one) % readers) for one in range(each)], each)
            for number, writer in enumerate(writers)
        }
        return each * len(writers) / _deliver(rings, all_readers, each * len(writers), 200)


def latency(port: int, rate: int, seconds: float) -> list[float]:
    """Return the milliseconds from sending each QoS 1 message to its delivery, at a steady rate a second."""
    with _clients(port, "reader", 1, lambda _: _HOT) as (reader,), _clients(port, "writer", 1) as (writer,):
        reader.socket.setblocking(False)
        writer.socket.setblocking(False)
        count = int(rate * seconds)
        sent: list[float] = []
        found: list[float] = []
        started = time.perf_counter()
        gave_up = started + seconds + PATIENCE
        while len(found) < count:
            now = time.perf_counter()
            if now > gave_up:
                raise TimeoutError("the server does not deliver")
            if len(sent) < count and now >= started + len(sent) / rate:
                writer.socket.sendall(_publish(_HOT, len(sent)))
                sent.append(now)
            try:
                packets = reader.whole(_SIZE)
            except BlockingIOError:
                pass
            else:
                arrived = time.perf_counter()
                found += [(arrived - sent[len(found) + n]) * 1e3 for n in range(len(packets) // _SIZE)]
                reader.socket.sendall(_puback(packets))
            with suppress(BlockingIOError):
                writer.socket.recv(_CHUNK)
        return found


def connects(port: int, clients: int, together: int) -> float:
    """Return how many clients a second connect and subscribe, each to one filter, ``together`` at a time."""
    started = time.perf_counter()
    with ExitStack() as closing:
        for first in range(0, clients, together):
            numbers = range(first, min(first + together, clients))
            some = [_Client(port, f"client-{number}", f"device/{number}/#") for number in numbers]
            for one in some:
                closing.enter_context(one.socket)
                one.accepted()
        return clients / (time.perf_counter() - started)


def idle(port: int, clients: int, server: int) -> float:
    """Return the memory in bytes that the server needs for each idle client with a session and a subscription.

    server: the id of the server's process.
    """
    with _clients(port, "first", 100, "first/{}/#".format):
        pass
    before = resident(server)
    with _clients(port, "client", clients, "device/{}/#".format, clean=False):
        return (resident(server) - before) / clients


def raise_file_limit() -> None:
    """Raise the limit of open files of this process and its children to the maximum that the system allows."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


LOADS: dict[str, Callable[..., float | list[float]]] = {
    load.__name__: load for load in (publish, backlog, fan_out, last_receiver, unicast, latency, connects, idle)
}


def _main() -> None:
    load, port, options = sys.argv[1:]
    raise_file_limit()
    cores = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_setaffinity") and (others := cores - os.sched_getaffinity(0)):
        os.sched_setaffinity(0, others)  # the server runs on the core that it inherited
    gc.disable()
    sys.stdout.buffer.write(msgspec.json.encode(LOADS[load](int(port), **msgspec.json.decode(options))))


if __name__ == "__main__":
    _main()
