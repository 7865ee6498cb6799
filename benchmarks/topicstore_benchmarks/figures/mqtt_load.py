"""``python -m topicstore_benchmarks.figures.mqtt_load LOAD PORT JSON``: load on an MQTT server, in this process.

Clients are raw sockets that speak MQTT 3.1.1, because client libraries take longer for a message than the servers do.
Packets are made before the clock starts; those that come have one size, so that many are read and acknowledged at
once. A load prints its result as JSON, a number or a list of numbers.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import numpy as np

from topicstore_benchmarks.harness.hardware import resident

__all__ = ["LOADS", "PATIENCE", "raise_file_limit"]

PATIENCE = 120.0
"""Seconds without anything from the server after which a load gives up."""
_PAYLOAD = 100
_TOPIC = "load/{:05}"
"""Topics have one length, so that packets have."""
_CHUNK = 1 << 18


def _frame(first: int, body: bytes) -> bytes:
    length = len(body)
    head = bytes((length,)) if length < 128 else bytes((length & 127 | 128, length >> 7))
    return bytes((first,)) + head + body


def _text(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def _publish(topic: str, packet_id: int, qos: int, payload: bytes = b"x" * _PAYLOAD) -> bytes:
    number = struct.pack(">H", packet_id) if qos else b""
    return _frame(0x30 | qos << 1, _text(topic) + number + payload)


_SIZE = len(_publish(_TOPIC.format(0), 1, 1))
"""Bytes of a PUBLISH of QoS 1 or 2."""
_ID = _SIZE - _PAYLOAD - 2
"""Where the packet id stands in it."""


class _Client:
    """A connection, whose client was accepted."""

    def __init__(self, port: int, client_id: str, *, clean: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""
        try:
            self.send(_frame(0x10, _text("MQTT") + bytes((4, clean << 1, 0, 0)) + _text(client_id)))
            answer = self.take(4)
            if answer[0] != 0x20 or answer[3] != 0:
                raise ConnectionError(f"the server refuses a client: {answer.hex()}")
        except BaseException:
            self.socket.close()
            raise

    def send(self, data: bytes | bytearray) -> None:
        self.socket.sendall(data)

    def take(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            data = self.socket.recv(count - len(found))
            if not data:
                raise ConnectionError("the server has closed the connection")
            found += data
        return found

    def whole(self, size: int) -> bytes:
        """Return what has come, as far as it consists of whole packets of this size."""
        data = self.socket.recv(_CHUNK)
        if not data:
            raise ConnectionError("the server has closed the connection")
        data = self.rest + data
        end = len(data) - len(data) % size
        self.rest = data[end:]
        return data[:end]

    def subscribe(self, topic_filter: str, qos: int = 1) -> None:
        self.send(_frame(0x82, b"\x00\x01" + _text(topic_filter) + bytes((qos,))))
        if self.take(5)[4] > 2:
            raise ConnectionError(f"the server refuses the filter {topic_filter}")

    def close(self, *, wait: bool = False) -> None:
        """Disconnect; with ``wait``, return when the server has closed the connection."""
        self.send(b"\xe0\x00")
        if wait:
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(_CHUNK):
                pass
        self.socket.close()


@contextmanager
def _clients(port: int, names: list[str]) -> Iterator[list[_Client]]:
    with ExitStack() as closing:
        made = []
        for name in names:
            client = _Client(port, name)
            closing.callback(client.close)
            made.append(client)
        yield made


class _Poll:
    """Which clients have something to read."""

    def __init__(self, clients: list[_Client]) -> None:
        self._selector = selectors.DefaultSelector()
        for client in clients:
            self._selector.register(client.socket, selectors.EVENT_READ, client)

    def ready(self) -> Iterator[_Client]:
        events = self._selector.select(PATIENCE)
        if not events:
            raise TimeoutError(f"the server has sent nothing for {PATIENCE:.0f} seconds")
        for key, _ in events:
            yield key.data


def _kept(port: int, name: str, topic_filter: str, qos: int) -> None:
    """Leave a session behind, for which the server keeps what matches."""
    client = _Client(port, name, clean=False)
    with client.socket:
        client.subscribe(topic_filter, qos)
        client.close(wait=True)


def _puback(packets: bytes) -> bytearray:
    """Return the PUBACKs of whole PUBLISH packets."""
    count = len(packets) // _SIZE
    out = bytearray(b"\x40\x02\x00\x00" * count)
    out[2::4] = packets[_ID::_SIZE]
    out[3::4] = packets[_ID + 1 :: _SIZE]
    return out


class _Ring:
    """A client's messages, of which no more than ``window`` are under way; their packet ids come around."""

    def __init__(self, client: _Client, topic: str, window: int, messages: int, qos: int) -> None:
        self.client, self.window, self.left = client, window, messages
        self._packets = b"".join(_publish(topic, number, qos) for number in range(1, window + 1)) * 2
        self._next = 0

    def send(self, count: int, before: bytes = b"") -> None:
        """Send the next messages, not more than are left."""
        count = min(count, self.left)
        self.left -= count
        data = before + self._packets[self._next * _SIZE : (self._next + count) * _SIZE]
        self._next = (self._next + count) % self.window
        if data:
            self.client.send(data)


def publish(port: int, clients: int, window: int, messages: int, qos: int) -> float:
    """Return messages a second whose PUBACK or PUBCOMP has come, of all clients; a session that is away gets them."""
    _kept(port, f"keeper-{qos}", "load/#", qos)
    with _clients(port, [f"writer-{number}" for number in range(clients)]) as writers:
        rings = {w: _Ring(w, _TOPIC.format(n), window, messages // clients, qos) for n, w in enumerate(writers)}
        poll, missing = _Poll(writers), messages // clients * clients
        started = time.perf_counter()
        for ring in rings.values():
            ring.send(window)
        while missing:
            for client in poll.ready():
                rows = np.frombuffer(client.whole(4), np.uint8).reshape(-1, 4)
                released = rows[rows[:, 0] == 0x50].copy()  # PUBRECs, answered by PUBRELs
                released[:, 0] = 0x62
                done = len(rows) - len(released)
                missing -= done
                rings[client].send(done, released.tobytes())
        return messages // clients * clients / (time.perf_counter() - started)


def backlog(port: int, messages: int) -> float:
    """Return messages a second to one client that was away while they were published, each acknowledged."""
    _kept(port, "reader", "load/#", 1)
    with _clients(port, ["writer"]) as (writer,):
        ring, missing = _Ring(writer, _TOPIC.format(0), 500, messages, 1), messages
        ring.send(500)
        while missing:
            count = len(writer.whole(4)) // 4
            missing -= count
            ring.send(count)
    started = time.perf_counter()
    reader, missing = _Client(port, "reader", clean=False), messages
    with reader.socket:
        while missing > 0:
            packets = reader.whole(_SIZE)
            missing -= len(packets) // _SIZE
            if packets:
                reader.send(_puback(packets))
        seconds = time.perf_counter() - started
        reader.close()
    return messages / seconds


def _readers(port: int, count: int, topic: Callable[[int], str], closing: ExitStack) -> list[_Client]:
    readers = closing.enter_context(_clients(port, [f"reader-{number}" for number in range(count)]))
    for number, reader in enumerate(readers):
        reader.subscribe(topic(number))
    return readers


def _deliver(poll: _Poll, writer: _Client, ring: _Ring, missing: int) -> None:
    """Go on until as many messages were delivered and acknowledged."""
    while missing > 0:
        for client in poll.ready():
            if client is writer:
                ring.send(len(client.whole(4)) // 4)
            elif packets := client.whole(_SIZE):
                missing -= len(packets) // _SIZE
                client.send(_puback(packets))


def fan_out(port: int, readers: int, messages: int) -> float:
    """Return deliveries a second of one topic's messages to all readers together, twenty messages under way."""
    with ExitStack() as closing:
        all_readers = _readers(port, readers, lambda _: _TOPIC.format(0), closing)
        (writer,) = closing.enter_context(_clients(port, ["writer"]))
        poll = _Poll([writer, *all_readers])
        ring = _Ring(writer, _TOPIC.format(0), 20, messages, 1)
        started = time.perf_counter()
        ring.send(20)
        _deliver(poll, writer, ring, readers * messages)
        return readers * messages / (time.perf_counter() - started)


def last_receiver(port: int, readers: int, messages: int) -> list[float]:
    """Return for each message, one after the other, the milliseconds until the last reader has it."""
    with ExitStack() as closing:
        all_readers = _readers(port, readers, lambda _: _TOPIC.format(0), closing)
        (writer,) = closing.enter_context(_clients(port, ["writer"]))
        poll, found = _Poll(all_readers), []
        ring = _Ring(writer, _TOPIC.format(0), 1, messages, 1)
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
                client.send(puback)
            writer.take(4)
        return found


def unicast(port: int, readers: int, messages: int) -> float:
    """Return deliveries a second to readers with a topic each, acknowledged; ten publishers, 200 messages under way."""
    with ExitStack() as closing:
        all_readers = _readers(port, readers, _TOPIC.format, closing)
        writers = closing.enter_context(_clients(port, [f"writer-{number}" for number in range(10)]))
        poll = _Poll([*writers, *all_readers])
        each = messages // len(writers)
        queues: dict[_Client, bytes] = {}
        for number, writer in enumerate(writers):
            topics = [_TOPIC.format((number * each + one) % readers) for one in range(each)]
            queues[writer] = b"".join([_publish(topic, n % 65_535 + 1, 1) for n, topic in enumerate(topics)])
        sent = dict.fromkeys(writers, 0)
        missing, started = each * len(writers), time.perf_counter()

        def send(writer: _Client, count: int) -> None:
            piece = queues[writer][sent[writer] : sent[writer] + count * _SIZE]
            sent[writer] += len(piece)
            if piece:
                writer.send(piece)

        for writer in writers:
            send(writer, 200)
        while missing > 0:
            for client in poll.ready():
                if client in queues:
                    send(client, len(client.whole(4)) // 4)
                elif packets := client.whole(_SIZE):
                    missing -= len(packets) // _SIZE
                    client.send(_puback(packets))
        return each * len(writers) / (time.perf_counter() - started)


def latency(port: int, rate: int, seconds: float) -> list[float]:
    """Return the milliseconds from sending each message of QoS 1 until its reader has it, at a steady rate."""
    with ExitStack() as closing:
        (reader,) = _readers(port, 1, lambda _: _TOPIC.format(0), closing)
        (writer,) = closing.enter_context(_clients(port, ["writer"]))
        reader.socket.setblocking(False)
        writer.socket.setblocking(False)
        count = int(rate * seconds)
        sent: list[float] = []
        found: list[float] = []
        started = time.perf_counter()
        gave_up = started + seconds + PATIENCE
        buffer = b""
        while len(found) < count:
            now = time.perf_counter()
            if now > gave_up:
                raise TimeoutError("the server does not deliver")
            if len(sent) < count and now >= started + len(sent) / rate:
                sent.append(now)
                writer.send(_publish(_TOPIC.format(0), len(sent) % 65_535 + 1, 1))
            try:
                buffer += reader.socket.recv(_CHUNK)
            except BlockingIOError:
                pass
            else:
                arrived = time.perf_counter()
                packets = buffer[: len(buffer) - len(buffer) % _SIZE]
                buffer = buffer[len(packets) :]
                found += [(arrived - sent[len(found) + n]) * 1e3 for n in range(len(packets) // _SIZE)]
                reader.socket.sendall(_puback(packets))
            with suppress(BlockingIOError):
                writer.socket.recv(_CHUNK)
        for client in (reader, writer):
            client.socket.setblocking(True)
        return found


def connects(port: int, clients: int, together: int) -> float:
    """Return clients a second that connect and subscribe to a filter of their own, some at a time."""
    started = time.perf_counter()
    with ExitStack() as closing:
        for first in range(0, clients, together):
            sockets = []
            for number in range(first, min(first + together, clients)):
                one = closing.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE))
                name = f"client-{number}"
                connect = _frame(0x10, _text("MQTT") + b"\x04\x02\x00\x00" + _text(name))
                one.sendall(connect + _frame(0x82, b"\x00\x01" + _text(f"device/{number}/#") + b"\x01"))
                sockets.append(one)
            for one in sockets:
                data = b""
                while len(data) < 9:
                    more = one.recv(100)
                    if not more:
                        raise ConnectionError("the server has closed a connection")
                    data += more
        return clients / (time.perf_counter() - started)


def idle(port: int, clients: int, server: int) -> float:
    """Return the bytes of memory that the server's process grows by for each idle client with a session and a filter.

    server: the id of its process.
    """
    with _clients(port, [f"first-{number}" for number in range(100)]) as few:
        for number, client in enumerate(few):
            client.subscribe(f"first/{number}/#")
    before = resident(server)
    with ExitStack() as closing:
        for number in range(clients):
            client = _Client(port, f"client-{number}", clean=False)
            closing.callback(client.close)
            client.subscribe(f"device/{number}/#")
        return (resident(server) - before) / clients


def raise_file_limit() -> None:
    """Let this process, and those that it starts, have as many sockets as the system allows."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


LOADS: dict[str, Callable[..., float | list[float]]] = {
    load.__name__: load
    for load in (
        publish,
        backlog,
        fan_out,
        last_receiver,
        unicast,
        latency,
        connects,
        idle,
    )
}


def _main() -> None:
    load, port, options = sys.argv[1:]
    raise_file_limit()
    cores = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_setaffinity") and (others := cores - os.sched_getaffinity(0)):
        os.sched_setaffinity(0, others)  # the server has the one that it inherited
    gc.disable()
    sys.stdout.buffer.write(msgspec.json.encode(LOADS[load](int(port), **msgspec.json.decode(options))))


if __name__ == "__main__":
    _main()
