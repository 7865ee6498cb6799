"""Stored keys with their keyspaces, and hidden ranges of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from topicstore.contract.engine import Key, Keyspace
from topicstore.contract.key_encoding import KeyEncoding

__all__ = ["FORMAT", "FORMAT_NAME", "HIDDEN", "KEYSPACE", "LAST", "HiddenRanges", "Pair", "Space"]

FORMAT, HIDDEN, KEYSPACE, LAST = b"\x00", b"\x01", 0x10, b"\xff"
FORMAT_NAME = "topicstore leveldb 1"

Pair = tuple[Any, bytes]


class Space:
    """The stored keys of a keyspace: its byte, followed by the key."""

    __slots__ = ("decode", "encode", "encode_all", "end", "keyspace", "start")

    def __init__(self, keyspace: Keyspace[Any], number: int) -> None:
        self.keyspace = keyspace
        self.start = bytes([KEYSPACE + number])
        self.end = bytes([KEYSPACE + number + 1])
        encoding = KeyEncoding(keyspace, self.start)
        self.encode, self.encode_all, self.decode = encoding.encode, encoding.encode_all, encoding.decode

    def encode_span(self, start: Key | None, end: Key | None) -> tuple[bytes, bytes]:
        """Return the stored keys of a range's ends."""
        return (
            self.start if start is None else self.encode(start),
            self.end if end is None else self.encode(end),
        )


class HiddenRanges:
    """Ranges of stored keys that are deleted but not yet removed, ascending and disjoint. Immutable."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._starts: list[bytes] = []
        self._ends: list[bytes] = []
        for start, end in sorted(ranges):
            if start >= end:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return zip(self._starts, self._ends, strict=True)

    def around(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the range that holds a key, or None."""
        number = bisect_right(self._starts, key) - 1
        if number < 0 or key >= self._ends[number]:
            return None
        return self._starts[number], self._ends[number]

    def without(self, keys: Iterable[bytes]) -> HiddenRanges:
        """Return the ranges split around some keys, so that they no longer hide these keys."""
        inside = sorted(key for key in set(keys) if self.around(key))
        if not inside:
            return self
        ranges: list[tuple[bytes, bytes]] = []
        for start, end in self:
            at = start
            for key in inside[bisect_left(inside, start) : bisect_left(inside, end)]:
                ranges.append((at, key))
                at = key + b"\0"
            ranges.append((at, end))
        return HiddenRanges(ranges)
