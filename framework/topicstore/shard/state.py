"""The state of a shard: small values beside the messages, written in the same engine write.

The logical layer keeps positions and generations here, under keys that begin with a zero byte, and
sessions and what else stands on top of a store under keys that begin with a byte of one (`FrameworkWrite`).
Imports and programs that embed a store keep theirs under any other key. Values are bytes; whoever
writes them gives them a version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from topicstore.contract.engine import STATE, Reader, WriteBatch
from topicstore.contract.errors import InvalidArgumentError, StateConflictError
from topicstore.contract.state import AnyValue, StateWrite

__all__ = ["OWN", "RESERVED", "FrameworkWrite", "ShardState", "stage"]

RESERVED = b"\0"
"""What the keys of the shard itself begin with."""
OWN = b"\1"
"""What the keys of `FrameworkWrite` begin with."""


@attrs.frozen
class FrameworkWrite(StateWrite):
    """A write of the framework's own state, which programs' keys can't get in the way of. Internal to it."""

    def _permitted(self) -> bool:
        return self.key.startswith(OWN)


def stage(writes: Iterable[StateWrite], reader: Reader, batch: WriteBatch) -> None:
    """Check every condition against ``reader``, then add the writes to ``batch``.

    Raises `StateConflictError`, with nothing added, if one doesn't hold.
    """
    writes = list(writes)
    for write in writes:
        if not isinstance(write, StateWrite):
            raise InvalidArgumentError(f"a state write is a StateWrite, not a {type(write).__name__}")
        if not isinstance(write.expect, AnyValue):
            found = reader.get(STATE, write.key)
            if found != write.expect:
                raise StateConflictError(f"state {write.key!r} is {_brief(found)}, not {_brief(write.expect)}")
    for write in writes:
        if write.value is None:
            batch.delete(STATE, write.key)
        else:
            batch.put(STATE, write.key, write.value)


def _brief(value: bytes | None) -> str:
    if value is None:
        return "absent"
    return repr(value) if len(value) <= 40 else f"{value[:40]!r}… ({len(value)} bytes)"


class ShardState:
    """The state of one shard, as `Database.state` gives it."""

    def __init__(self, reader: Callable[[], Reader], write: Callable[[Sequence[StateWrite]], object]) -> None:
        self._reader = reader
        self._write = write

    def get(self, key: bytes) -> bytes | None:
        """Return the value of ``key``, or None."""
        return self._reader().get(STATE, key)

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of all keys that begin with ``prefix``, in order, as of the first item.

        Without a prefix, those of the framework are left out.
        """
        if not prefix.startswith(RESERVED):
            for chunk in self._reader().scan(STATE, prefix or b"\2", _after_prefix(prefix)):
                yield from chunk

    def write(self, writes: Iterable[StateWrite]) -> None:
        """Commit the writes together, as durable as the database's ``durability`` says.

        Raises `StateConflictError`, with nothing written, if a condition doesn't hold.
        """
        self._write(list(writes))


def _after_prefix(prefix: bytes) -> bytes | None:
    """Return the lowest key behind all that begin with ``prefix``; None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else None
