"""The key-value state of a shard: small values with compare-and-set, committed in the same engine write as messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec

from .errors import InvalidArgumentError

__all__ = ["ANY", "AnyValue", "State", "StateWrite"]

_FRAMEWORK = (b"\0", b"\1")
"""The reserved prefixes of keys: those of the shard's own records, and of the framework's features."""


class AnyValue:
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = AnyValue()
"""The value of ``expect`` that sets no condition: the write replaces any value."""


class StateWrite(msgspec.Struct, frozen=True, gc=False):
    """A write that sets ``key`` to ``value`` (None deletes it) if its value is ``expect`` (None: if it is absent)."""

    key: bytes
    value: bytes | None
    expect: bytes | AnyValue | None = ANY

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or not self.key or not self._permitted():
            raise InvalidArgumentError(f"a state key is bytes that don't begin with zero or one, not {self.key!r}")
        if self.value is not None and not isinstance(self.value, bytes):
            raise InvalidArgumentError(f"a state value is bytes or None, not {type(self.value).__name__}")

    def _permitted(self) -> bool:
        return not self.key.startswith(_FRAMEWORK)


class State(Protocol):
    """The state of one shard."""

    def get(self, key: bytes) -> bytes | None:
        """Return the value of ``key``, or None."""

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of the keys that begin with ``prefix``, in order, from one snapshot.

        The first ``next`` takes the snapshot.
        """

    def write(self, writes: Iterable[StateWrite]) -> None:
        """Commit the writes atomically; write nothing, and raise `StateConflictError`, if a condition doesn't hold."""
