"""The key-value state of a shard: small values that are committed in the same engine write as messages.

The shard stores its positions and generations here, under keys that begin with byte 0. Features of the framework, such
as sessions, store their state under keys that begin with byte 1 (`FrameworkWrite`).
Imports, and applications that embed a database, use all other keys. Values are bytes; the code that writes
a value is responsible for versioning its format.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from topicstore.contract.engine import STATE, Key, Keyspace, Reader, WriteBatch
from topicstore.contract.errors import InvalidArgumentError, StateConflictError
from topicstore.contract.state import ANY, AnyValue, StateWrite

__all__ = [
    "HEAD",
    "OWN",
    "RESERVED",
    "Applied",
    "FrameworkWrite",
    "ProposedState",
    "ShardState",
    "StateReader",
    "stage",
]

_Chunk = list[tuple[bytes, bytes]]

RESERVED = b"\0"
"""The prefix of the shard's own keys."""
OWN = b"\1"
"""The prefix of the keys of `FrameworkWrite`."""
HEAD = 3
"""The number of bytes at the beginning of a key by which `Applied` distinguishes keys."""


class Applied(NamedTuple):
    """The last write that changed certain keys, as applied from a replicated log by this process.

    A cache of these keys' values is outdated when this value differs from the one at the time of caching. Opening,
    reopening or copying the shard also counts as such a write; without a log, nothing else does.
    """

    number: int
    """The number of the write in the shard."""
    time: int
    """The time of applying it, in microseconds of the database's monotonic clock."""


class FrameworkWrite(StateWrite, frozen=True, gc=False):
    """A write of the framework's own state, under keys that applications can't use."""

    def __post_init__(self) -> None:  # replaces the slower checks of `StateWrite`, because these writes are frequent
        if self.key[:1] != OWN:
            raise InvalidArgumentError(f"a key of the framework begins with one, not {self.key!r}")


class StateReader(Protocol):
    """The interface for reading values of state: that of an engine, or of `ProposedState`."""

    def get(self, keyspace: Keyspace[bytes], key: bytes) -> bytes | None:
        """Return the value of ``key``, or None if the key is absent."""

    def get_many(self, keyspace: Keyspace[bytes], keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, or None if the key is absent, in the order of ``keys``."""


class ProposedState:
    """The engine's state with the changes of proposed writes, which are not applied to the engine yet."""

    def __init__(self, engine: Reader) -> None:
        self._engine = engine
        self._writes: deque[dict[Key, bytes | None]] = deque()
        self._values: dict[Key, bytes | None] = {}
        """The newest proposed value of each key."""
        self._counts: Counter[Key] = Counter()
        """The number of proposed writes of each key."""

    def add(self, write: WriteBatch) -> None:
        """Add the state changes of a proposed write."""
        changes = {key: value for keyspace, key, value in write.operations if keyspace is STATE}
        self._writes.append(changes)
        self._values.update(changes)
        self._counts.update(changes.keys())

    def applied(self) -> None:
        """Remove the oldest write, because the engine has it."""
        for key in self._writes.popleft():
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key], self._values[key]

    def get(self, keyspace: Keyspace[bytes], key: bytes) -> bytes | None:
        """Return the value of the newest write of ``key``, proposed or applied, or None."""
        return self._values[key] if key in self._values else self._engine.get(keyspace, key)

    def get_many(self, keyspace: Keyspace[bytes], keys: Sequence[bytes]) -> list[bytes | None]:
        """Return, for each key, the value of its newest write, proposed or applied, or None."""
        found = self._engine.get_many(keyspace, keys)
        return [self._values.get(key, value) for key, value in zip(keys, found, strict=True)]


def stage(writes: Iterable[StateWrite], reader: StateReader, batch: WriteBatch) -> None:
    """Check every condition against ``reader``, then add the writes to ``batch``.

    A write whose value is the same object as its expected value is only a condition, and isn't added. Raises
    `StateConflictError`, with nothing added, if a condition doesn't hold.
    """
    conditions: list[StateWrite] = []
    keys: list[bytes] = []
    values: list[bytes | None] = []
    for write in writes:
        if not isinstance(write, StateWrite):
            raise InvalidArgumentError(f"a state write is a StateWrite, not a {type(write).__name__}")
        expected, value = write.expect, write.value
        if expected is not ANY and not isinstance(expected, AnyValue):
            conditions.append(write)
            if value is not None and value is expected:
                continue
        keys.append(write.key)
        values.append(value)
    if conditions:
        _check(conditions, reader)
    batch.change_many(STATE, keys, values)


def _check(conditions: list[StateWrite], reader: StateReader) -> None:
    keys = [write.key for write in conditions]
    stored = reader.get_many(STATE, keys) if len(keys) > 1 else [reader.get(STATE, keys[0])]
    for write, found in zip(conditions, stored, strict=True):
        if found != write.expect:
            raise StateConflictError(f"state {write.key!r} is {_brief(found)}, not {_brief(write.expect)}")


def _brief(value: bytes | AnyValue | None) -> str:
    if not isinstance(value, bytes):
        return "absent"
    return repr(value) if len(value) <= 40 else f"{value[:40]!r}… ({len(value)} bytes)"


class ShardState:
    """The state of one shard, as `Database.state` returns it."""

    def __init__(
        self,
        shard: int,
        reader: Callable[[], Reader],
        write: Callable[[Sequence[StateWrite]], object],
        last_applied: Callable[[bytes], Applied] | None = None,
        undisturbed: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        self.shard = shard
        self._reader = reader
        self._write = write
        self.last_applied = last_applied
        """Returns the last applied write of a log that changed keys which begin with these `HEAD` bytes, or fewer. It
        needs no lock, and reads nothing. None without a log."""
        self._undisturbed = undisturbed
        """Calls a function that reads; again if the contents of the shard were replaced meanwhile. None without a log.
        """

    def __repr__(self) -> str:
        return f"<ShardState of shard {self.shard}>"

    def get(self, key: bytes) -> bytes | None:
        """Return the value of ``key``, or None."""
        if self._undisturbed is None:
            return self._reader().get(STATE, key)
        found: bytes | None = self._undisturbed(lambda: self._reader().get(STATE, key))
        return found

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, or None, in the order of ``keys``."""
        if self._undisturbed is None:
            return self._reader().get_many(STATE, keys)
        found: list[bytes | None] = self._undisturbed(lambda: self._reader().get_many(STATE, keys))
        return found

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of the keys that begin with ``prefix``, in order, from one snapshot.

        The first ``next`` takes the snapshot. Without a prefix, the framework's keys are left out.
        """
        if prefix.startswith(RESERVED):
            return
        end = _after_prefix(prefix)
        if self._undisturbed is None:
            chunks = self._reader().scan(STATE, prefix or b"\2", end)
        else:
            chunks, first = self._undisturbed(lambda: _begun(self._reader().scan(STATE, prefix or b"\2", end)))
            yield from first
        for chunk in chunks:
            yield from chunk

    def write(self, writes: Iterable[StateWrite]) -> None:
        """Commit the writes atomically, with the database's ``durability``.

        Raises `StateConflictError`, with nothing written, if a condition doesn't hold.
        """
        self._write(list(writes))


def _begun(chunks: Iterator[_Chunk]) -> tuple[Iterator[_Chunk], _Chunk]:
    """Begin a scan, which takes its snapshot; return it with its first chunk, empty if there is none."""
    return chunks, next(chunks, [])


def _after_prefix(prefix: bytes) -> bytes | None:
    """Return the lowest key after all keys that begin with ``prefix``; None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else None
