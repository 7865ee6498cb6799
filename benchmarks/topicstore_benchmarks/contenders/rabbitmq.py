"""RabbitMQ Streams: a separate node with one stream of all messages.

Streams have no wildcards, and a stream per topic would be too many: each has a process and files.
So every replay reads from its start to the end of the one stream and matches here. (Servers
from 3.13 on can leave out chunks that have none of a few given values, which helps for one topic.)
The body of a message::

    length of the topic (2 bytes, big-endian), topic, record (`encode_record`)

Nothing is compressed: RabbitMQ leaves that to publishers, which may send several messages as one entry,
which is then confirmed as one.

Up to 1,000 messages are published in one frame of the stream protocol, then their confirmations are
awaited. This module speaks the protocol itself, over a socket, as for NATS. The server knows its own times
only: a start is found by bisection of the offsets, as in SQLite.

A confirmed message is written to its file, which is ``commit``. There is no ``sync``: streams never
call fsync and rely on replicas instead.

The node is that of Debian's package. It keeps its files, cookie and configuration in the
contender's directory, is not part of any cluster, and asks an epmd of its own for names.
"""

from __future__ import annotations

import os
import shutil
import struct
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path

from topicstore import Message, TopicFilter

from .server import Server, ServerContender, ServerError, decode_record, encode_record, reach, windows

__all__ = ["RabbitmqContender", "why_missing"]

_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The server's script. The one on the PATH works only for the user rabbitmq."""
_STREAM, _PUBLISHER = "messages", "store"
_FRAME = 512 << 20
"""The most bytes of a frame, and so of a message and of a chunk."""
_CHUNKS = 8
"""The number of chunks that the server may send ahead."""

# Keys of commands, of protocol version 1
_DECLARE_PUBLISHER, _PUBLISH, _CONFIRM, _REFUSE, _PUBLISHED = 0x01, 0x02, 0x03, 0x04, 0x05
_SUBSCRIBE, _DELIVER, _CREDIT, _UNSUBSCRIBE, _CREATE = 0x07, 0x08, 0x09, 0x0C, 0x0D
_PROPERTIES, _HANDSHAKE, _AUTHENTICATE, _TUNE, _OPEN = 0x11, 0x12, 0x13, 0x14, 0x15
_RESPONSE = 0x8000
_OK, _EXISTS = 0x01, 0x05
_NOT_YET = (0x02, 0x06, 0x0F)
"""The codes for a missing or unavailable stream and for internal errors, until the stream's processes have started."""
_LAST, _OFFSET = 2, 4
"""The codes for the beginning of a subscription: at the last chunk, or at an offset."""
# Of a chunk: magic and version, type, entries, records, timestamp, epoch, first offset, checksum, lengths, reserved
_CHUNK = struct.Struct(">BBHIqQQIIII")
_PUBLISHED_MESSAGE = struct.Struct(">QI")
"""The header of a body: its number, by which the server drops duplicates, and its length."""
_USER = 0
"""The type of chunks that have messages; others keep the server's own records."""


def why_missing() -> str | None:
    """Return the missing requirement, or None."""
    if _SERVER.exists() and shutil.which("epmd"):
        return None
    return "needs a rabbitmq-server: apt-get install rabbitmq-server"


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2) + data


class _Connection:
    """A connection of the stream protocol: frames with a key, a version and a content."""

    def __init__(self, port: int) -> None:
        self._socket = reach(port)
        self._frames = self._socket.makefile("rb", 1 << 20)
        self._publishes = False

    def begin(self) -> None:
        """Log in, without heartbeats."""
        self.ask(_PROPERTIES, bytes(4))
        self.ask(_HANDSHAKE, b"")
        self.ask(_AUTHENTICATE, _text("PLAIN") + (12).to_bytes(4) + b"\0guest\0guest")
        key, limits = self.receive()
        if key != _TUNE:
            raise ConnectionError(f"the RabbitMQ server sends a frame {key:#x} instead of its limits")
        self.send(_RESPONSE | _TUNE, limits[:4] + bytes(4))
        self.ask(_OPEN, _text("/"))

    def send(self, key: int, content: bytes) -> None:
        """Send a frame."""
        self._socket.sendall(struct.pack(">IHH", len(content) + 4, key, 1) + content)

    def receive(self) -> tuple[int, bytes]:
        """Return the key and the content of the next frame."""
        size, key, _version = struct.unpack(">IHH", self._read(8))
        return key, self._read(size - 4)

    def _read(self, size: int) -> bytes:
        data: bytes = self._frames.read(size)
        if len(data) != size:
            raise ConnectionError("the RabbitMQ server has closed the connection")
        return data

    def ask(self, key: int, content: bytes, accepted: Iterable[int] = (_OK,)) -> bytes:
        """Send a request and return the response; earlier frames belong to a subscription that ends."""
        self.send(key, bytes(4) + content)
        while (received := self.receive())[0] != _RESPONSE | key:
            pass
        code = int.from_bytes(received[1][4:6])
        if code in _NOT_YET:
            raise ConnectionError(f"RabbitMQ has the code {code:#x} for request {key:#x}")
        if code not in accepted:
            raise ServerError(f"RabbitMQ refuses request {key:#x} with code {code:#x}")
        return received[1][6:]

    def published(self) -> int:
        """Return the number of the last message that was published; 0 if there is none."""
        return int.from_bytes(self.ask(_PUBLISHED, _text(_PUBLISHER) + _text(_STREAM)))

    def publish(self, messages: list[tuple[bytes, bytes]]) -> None:
        """Publish messages and wait until each is confirmed."""
        if not self._publishes:
            self.ask(_DECLARE_PUBLISHER, b"\1" + _text(_PUBLISHER) + _text(_STREAM))
            self._publishes = True
        self.send(_PUBLISH, b"\1" + len(messages).to_bytes(4) + b"".join(chain.from_iterable(messages)))
        left = len(messages)
        while left:
            key, content = self.receive()
            if key == _REFUSE:
                raise ServerError(f"not stored: RabbitMQ's code is {int.from_bytes(content[13:15]):#x}")
            if key == _CONFIRM:
                left -= int.from_bytes(content[1:5])

    def chunks(self, place: int, offset: int, ahead: int) -> Generator[bytes]:
        """Yield the chunks of the stream from a place on, until the generator is closed."""
        specification = place.to_bytes(2) + (offset.to_bytes(8) if place == _OFFSET else b"")
        self.ask(_SUBSCRIBE, b"\1" + _text(_STREAM) + specification + ahead.to_bytes(2) + bytes(4))
        try:
            while True:
                key, content = self.receive()
                if key == _DELIVER:
                    yield content[1:]
                    self.send(_CREDIT, b"\1\0\1")
        finally:
            self.ask(_UNSUBSCRIBE, b"\1")

    def close(self) -> None:
        """Close the socket without a goodbye: the server keeps nothing for a connection."""
        self._frames.close()
        self._socket.close()


class RabbitmqContender(ServerContender[_Connection]):
    """A RabbitMQ node with the plugin for streams."""

    def open(self) -> None:
        """Start epmd, without which no node starts, then the node."""
        if self.durability == "sync":
            raise ServerError("RabbitMQ streams never call fsync, so there is no durability 'sync'")
        self.path.mkdir(parents=True, exist_ok=True)
        self._fresh = not (self.path / "data").exists()
        self._names_port = self._hold_port()
        command = [str(shutil.which("epmd")), "-address", "127.0.0.1", "-port", str(self._names_port)]
        self._names = Server(command, self.path / "epmd.log")
        try:
            super().open()
        except BaseException:
            self._names.stop()
            raise

    def close(self) -> None:
        """Stop both."""
        super().close()
        self._names.stop()

    def _command(self, port: int) -> list[str]:
        options = {"stream.listeners.tcp.1": f"127.0.0.1:{port}", "listeners.tcp": "none", **self.settings()}
        logging = {"log.console": "true", "log.console.level": "warning", "log.file": "false"}
        lines = [f"{name} = {value}\n" for name, value in {**options, **logging}.items()]
        (self.path / "rabbitmq.conf").write_text("".join(lines))
        (self.path / "enabled_plugins").write_text("[rabbitmq_stream].\n")
        return [str(_SERVER)]

    def _environment(self) -> Mapping[str, str]:
        path = self.path.resolve()
        return {
            **os.environ,
            "ERL_EPMD_PORT": str(self._names_port),
            "HOME": str(path),
            "RABBITMQ_CONFIG_FILE": str(path / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(path / "none"),
            "RABBITMQ_DIST_PORT": str(self._hold_port()),  # another node's port would be refused
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(path / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(path),
            "RABBITMQ_MNESIA_BASE": str(path / "data"),
            "RABBITMQ_NODENAME": "peer@localhost",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "yes",  # makes the script become the node instead of waiting for it
        }

    def _connected(self, port: int) -> _Connection:
        return _Connection(port)

    def _begin(self, connection: _Connection) -> None:
        connection.ask(_CREATE, _text(_STREAM) + bytes(4), (_OK, _EXISTS))
        self._number = connection.published()
        if self._fresh:
            self._check_saved()

    def _check_saved(self) -> None:
        """Raise `ConnectionError` until the stream's processes are on record: a node killed before forgets them.

        That takes a second, after which the header of Erlang's table says that it was closed properly.
        """
        for names in self.path.glob("data/*/coordination/*/names.dets"):
            if names.read_bytes()[8:12] == bytes(4):
                raise ConnectionRefusedError("the stream's name is not on disk yet")

    def store(self, batch: list[Message]) -> None:
        """Store a batch; every message is confirmed."""
        with self._connection() as connection:
            for window in windows(self._numbered(batch)):
                connection.publish(window)

    def _numbered(self, batch: list[Message]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the header of each body, and the body."""
        for message in batch:
            body = _text(message.topic) + encode_record(message)
            self._number += 1
            yield _PUBLISHED_MESSAGE.pack(self._number, len(body)), body

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Read everything from the start on, up to the present end."""
        matches = TopicFilter(topic_filter).matches
        names = lru_cache(1 << 17)(bytes.decode)
        wanted = lru_cache(1 << 17)(lambda topic: matches(names(topic)))
        with self._connection() as connection:
            end = _end(connection)
            first = bisect_left(range(end), start, key=partial(_time, connection)) if start else 0
            for body in _bodies(connection, first, end):
                topic, record = _halves(body)
                if wanted(topic):
                    yield decode_record(names(topic), record)

    def versions(self) -> Mapping[str, str]:
        """Return the version of the server. There is no client library."""
        (folder,) = _SERVER.parents[1].glob("lib/rabbitmq_server-*")
        return {"rabbitmq-server": folder.name.rpartition("-")[2]}

    def settings(self) -> Mapping[str, object]:
        """Return the options that aren't defaults."""
        return {"stream.frame_max": _FRAME}


def _end(connection: _Connection) -> int:
    """Return the offset after the last message."""
    if not connection.published():
        return 0  # there is no last chunk to wait for
    with closing(connection.chunks(_LAST, 0, 1)) as chunks:
        _magic, _kind, _entries, records, _time, _epoch, first, *_ = _CHUNK.unpack_from(next(chunks))
        end: int = first + records
        return end


def _time(connection: _Connection, offset: int) -> int:
    with closing(_bodies(connection, offset, offset + 1, ahead=1)) as bodies:
        return decode_record("", _halves(next(bodies))[1]).timestamp or 0


def _halves(body: bytes) -> tuple[bytes, bytes]:
    """Return the topic and the record of a body."""
    middle = 2 + int.from_bytes(body[:2])
    return body[2:middle], body[middle:]


def _bodies(connection: _Connection, first: int, end: int, ahead: int = _CHUNKS) -> Generator[bytes]:
    """Yield the bodies of the messages from one offset to another."""
    if first == end:
        return
    with closing(connection.chunks(_OFFSET, first, ahead)) as chunks:
        for chunk in chunks:
            _magic, kind, entries, records, *_, begin, _checksum, _size, _trailer, _reserved = _CHUNK.unpack_from(chunk)
            if kind == _USER:
                yield from islice(_entries(chunk, entries), max(0, first - begin), max(0, end - begin))
            if begin + records >= end:
                return


def _entries(chunk: bytes, count: int) -> Iterator[bytes]:
    """Yield the entries of a chunk. An entry is one message: batches within entries are never published."""
    place = _CHUNK.size
    for _entry in range(count):
        behind = place + 4 + int.from_bytes(chunk[place : place + 4])
        yield chunk[place + 4 : behind]
        place = behind
