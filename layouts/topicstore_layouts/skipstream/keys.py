"""The keys of messages and of index entries, encoded and decoded many at a time.

Stored form (keyspace ``keys``; integers are big-endian)::

    generation:u32 0x01 stream:u32 position:u64      a message
    generation:u32 0x02 hash:u64   position:u64      an index entry

Keys are bytes, although both kinds would fit keys of numbers: NumPy converts thousands of them in one
call, while making a tuple of numbers costs a third of storing or reading a message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from topicstore.contract.positions import Positions

__all__ = ["Keys", "Numbers", "entry_keys", "message_keys"]

Numbers = npt.NDArray[np.uint64]


class Keys:
    """The encoding of one kind of keys of one generation. A key has a number (a stream or a hash) and a position."""

    def __init__(self, generation: int, kind: int, number_bytes: int) -> None:
        self._head = generation, kind
        self._one = struct.Struct(f">IB{ {4: 'I', 8: 'Q'}[number_bytes] }Q")
        number = f">u{number_bytes}"
        self._fields = np.dtype([("generation", ">u4"), ("kind", "u1"), ("number", number), ("position", ">u8")])

    def one(self, number: int, position: int) -> bytes:
        """Return the key of a number and a position."""
        key: bytes = self._one.pack(*self._head, number, position)
        return key

    def span(self, number: int, first: int, last: int) -> tuple[bytes, bytes]:
        """Return the first key and the end (exclusive) of a number's keys at positions from ``first`` to ``last``."""
        return self.one(number, first), self.one(number, last) + b"\0"

    def of_number(self, number: int) -> tuple[bytes, bytes]:
        """Return the first key, and the end (exclusive), of all keys of a number."""
        return self.span(number, 0, (1 << 64) - 1)

    def all(self) -> tuple[bytes, bytes]:
        """Return the first key, and the end (exclusive), of all keys of this kind."""
        generation, kind = self._head
        return struct.pack(">IB", generation, kind), struct.pack(">IB", generation, kind + 1)

    def many(self, numbers: Numbers | int, positions: Positions) -> list[bytes]:
        """Return a key for each position. ``numbers`` has the number in each key, or is the number in all keys."""
        keys = np.empty(len(positions), dtype=self._fields)
        keys["generation"], keys["kind"] = self._head
        keys["number"], keys["position"] = numbers, positions
        as_bytes: list[bytes] = keys.view(f"V{self._fields.itemsize}").tolist()
        return as_bytes

    def positions(self, keys: Sequence[bytes]) -> Positions:
        """Return the position of each key."""
        return self._read(keys)["position"].astype(np.uint64)

    def numbers(self, keys: Sequence[bytes]) -> Numbers:
        """Return the number of each key."""
        return self._read(keys)["number"].astype(np.uint64)

    def _read(self, keys: Sequence[bytes]) -> npt.NDArray[np.void]:
        return np.frombuffer(b"".join(keys), dtype=self._fields)


def message_keys(generation: int) -> Keys:
    """Return the encoding of message keys: stream and position."""
    return Keys(generation, 1, 4)


def entry_keys(generation: int) -> Keys:
    """Return the encoding of index entry keys: hash and position."""
    return Keys(generation, 2, 8)
