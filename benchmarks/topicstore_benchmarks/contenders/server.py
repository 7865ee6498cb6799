"""The base of contenders that are servers: a separate process on a reserved loopback port.

A server ends with the process that started it, even if that is killed. A shell beside the server waits for a
line on a pipe: `Server.stop` sends one, and the shell exits. If the parent is killed the pipe ends instead, and
the shell kills the server.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
from topicstore import Message, Properties
from topicstore_conformance.conditions.ports import hold_port

from topicstore_benchmarks.peak_memory import peak_of

from .contender import Contender, Durability

__all__ = [
    "Connection",
    "Server",
    "ServerContender",
    "ServerError",
    "decode_record",
    "encode_record",
    "reach",
    "windows",
]

# The shell replaces itself by the server, so that the child process is the server: $$ is its process id.
_WATCHED = 'exec 3<&0 </dev/null; (read -r line <&3 || kill -9 $$) >/dev/null 2>&1 & exec 3<&-; exec "$@"'
_START_SECONDS = 240
_STOP_SECONDS = 240
_ANSWER_SECONDS = 240
"""The timeouts, in seconds. Only a server that hangs reaches them."""
_WINDOW = 1_000
"""The most unconfirmed messages."""
_WINDOW_BYTES = 8 << 20
_LINES = 20
"""The number of lines of a server's log that an error quotes."""

_Record = tuple[bytes, str, int, bool, int | None, Properties | None]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class ServerError(RuntimeError):
    """A server did not start, or refused what it was asked. The message quotes the server."""


def encode_record(message: Message) -> bytes:
    """Return a message without its topic as MessagePack.

    A single value, encoded and decoded in one call, is smaller and several times faster than separate fields or
    headers.
    """
    return _encode(
        (message.payload, message.client_id, message.qos, message.retain, message.timestamp, message.properties)
    )


def decode_record(topic: str, record: bytes) -> Message:
    """Return the message that `encode_record` was given."""
    return Message(topic, *_decode(record))


class Server:
    """A process that runs until `stop` or until this process ends. ``pid`` is its id."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._peak = 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - commands of ours
                ["/bin/sh", "-c", _WATCHED, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C must not reach the server; `stop` ends it
            )
        self.pid = self._process.pid

    def wait_for(self, connect: Callable[[], _C]) -> _C:
        """Return the first connection; raises `ServerError` if the server ends, or takes too long."""
        deadline, pause = time.monotonic() + _START_SECONDS, 0.005
        while True:
            ended = self._process.poll() is not None
            try:
                return connect()
            except OSError as refused:
                if ended or time.monotonic() > deadline:
                    self.stop()
                    raise ServerError(f"the server does not answer: {refused}\n{self._last_lines()}") from refused
            time.sleep(pause)
            pause = min(2 * pause, 0.1)  # so that polling doesn't slow down the start

    def _last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([f"{self._log} ends with:", *lines[-_LINES:]])

    def peak_memory(self) -> int:
        """Return the most memory that was resident until `stop`, in bytes; 0 if the system doesn't report it."""
        if self._process.returncode is None:  # otherwise its id may belong to another process
            self._peak = peak_of(self.pid) or self._peak
        return self._peak

    def stop(self) -> None:
        """Ask the server to end, wait while it writes its data, and kill it if it hangs. May be called twice."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self.peak_memory()
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(b"\n")


class Connection(Protocol):
    """A connection to a server, for one thread at a time."""

    def begin(self) -> None:
        """Greet the server. Raises OSError while it isn't ready."""

    def close(self) -> None:
        """Close it."""


_C = TypeVar("_C", bound=Connection)


class ServerContender(Contender, Generic[_C]):
    """A contender whose messages are kept by a server, reached over connections that are used again."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        super().__init__(name, path, durability)
        self._servers: list[Server] = []
        self._idle: deque[_C] = deque()
        self._held: list[socket.socket] = []

    @abstractmethod
    def _command(self, port: int) -> list[str]:
        """Return the command that starts the server, which listens on the port and keeps its files in ``path``."""

    def _environment(self) -> Mapping[str, str] | None:
        """Return the server's environment, or None for that of this process."""
        return None

    @abstractmethod
    def _connected(self, port: int) -> _C:
        """Return a connection before its `begin`. Raises OSError if nothing listens."""

    @abstractmethod
    def _begin(self, connection: _C) -> None:
        """Create what storing requires, such as a stream. Raises OSError while that isn't possible."""

    def open(self) -> None:
        """Start the server, and wait until it has loaded its data."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._port = self._hold_port()
        self._server = Server(self._command(self._port), self.path / "server.log", self._environment())
        self._servers.append(self._server)
        try:
            self._idle.append(self._server.wait_for(self._ready))
        except BaseException:
            self._stop()
            raise

    def _hold_port(self) -> int:
        """Return a port that is reserved until the server has stopped."""
        held, port = hold_port()
        self._held.append(held)
        return port

    def _ready(self) -> _C:
        connection = self._connect()
        try:
            self._begin(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> _C:
        connection = self._connected(self._port)
        try:
            connection.begin()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def _connection(self) -> Iterator[_C]:
        """Lend a connection. It is closed if an error or an abandoned replay leaves replies unread."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def close(self) -> None:
        """Close the connections and stop the server."""
        while self._idle:
            self._idle.pop().close()
        self._stop()

    def _stop(self) -> None:
        self._server.stop()
        while self._held:
            self._held.pop().close()

    def server_memory(self) -> int:
        """Return the peak of the server's resident memory, over all times that it ran."""
        return max((server.peak_memory() for server in self._servers), default=0)


def windows(batch: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Cut a batch, of messages in two parts each, into pieces that are sent and confirmed as a whole."""
    window: list[tuple[bytes, bytes]] = []
    size = 0
    for first, second in batch:
        window.append((first, second))
        size += len(second)
        if len(window) == _WINDOW or size >= _WINDOW_BYTES:
            yield window
            window, size = [], 0
    if window:
        yield window


def reach(port: int) -> socket.socket:
    """Return a socket to a server, which raises TimeoutError if an answer takes too long."""
    reached = socket.create_connection(("127.0.0.1", port), _ANSWER_SECONDS)
    reached.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return reached
