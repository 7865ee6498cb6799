"""Stored keys: whose they are, and ranges of them that are hidden."""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from topicstore.contract.engine import Key, Keyspace
from topicstore.contract.errors import InvalidArgumentError

__all__ = ["FORMAT", "FORMAT_NAME", "HIDDEN", "KEYSPACE", "LAST", "HiddenRanges", "Pair", "Space", "space_of"]

FORMAT, HIDDEN, KEYSPACE, LAST = b"\x00", b"\x01", 0x10, b"\xff"
FORMAT_NAME = "topicstore leveldb 1"

Pair = tuple[Any, bytes]


class Space:
    """A keyspace's stored keys: its byte, and behind it the key."""

    __slots__ = ("_unpack", "encode", "end", "keyspace", "start")

    def __init__(self, keyspace: Keyspace, number: int) -> None:
        self.keyspace = keyspace
        self.start = bytes([KEYSPACE + number])
        self.end = bytes([KEYSPACE + number + 1])
        self.encode: Callable[[Key], bytes]
        """Returns the stored key. Raises `InvalidArgumentError` for one of another shape."""
        self._unpack: Callable[[bytes], tuple[Any, ...]] | None = None
        if keyspace.shape is None:
            self.encode = self._bytes_encoder()
        else:
            numbers = "".join({4: "I", 8: "Q"}[width] for width in keyspace.shape)
            self.encode = self._tuple_encoder(struct.Struct(">B" + numbers))
            self._unpack = struct.Struct(">x" + numbers).unpack

    def _bytes_encoder(self) -> Callable[[Key], bytes]:
        start, name = self.start, self.keyspace.name

        def encode(key: Key) -> bytes:
            if type(key) is bytes:
                return start + key
            raise InvalidArgumentError(f"{key!r} is not a key of keyspace {name!r}, whose keys are bytes")

        return encode

    def _tuple_encoder(self, codec: struct.Struct) -> Callable[[Key], bytes]:
        pack, keyspace = partial(codec.pack, self.start[0]), self.keyspace

        def encode(key: Key) -> bytes:
            try:
                if type(key) is not bytes:  # whose numbers would do as well
                    return pack(*key)
            except (struct.error, TypeError):
                pass
            raise InvalidArgumentError(f"{key!r} is not a key of keyspace {keyspace.name!r} (shape {keyspace.shape})")

        return encode

    def encode_span(self, start: Key | None, end: Key | None) -> tuple[bytes, bytes]:
        """Return the stored keys of a range's ends."""
        return (
            self.start if start is None else self.encode(start),
            self.end if end is None else self.encode(end),
        )

    def decode(self, key: bytes) -> Key:
        """Return the key of a stored one."""
        return key[1:] if self._unpack is None else self._unpack(key)

    def decode_all(self, pairs: list[Pair]) -> list[Pair]:
        """Return pairs with the keys of stored ones."""
        unpack = self._unpack
        if unpack is None:
            return [(key[1:], value) for key, value in pairs]
        return [(unpack(key), value) for key, value in pairs]


class HiddenRanges:
    """Ranges of stored keys that are deleted but not yet removed: ascending and apart. Never changed."""

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
        """Return the range that holds a key."""
        number = bisect_right(self._starts, key) - 1
        if number < 0 or key >= self._ends[number]:
            return None
        return self._starts[number], self._ends[number]

    def without(self, keys: Iterable[bytes]) -> HiddenRanges:
        """Return these ranges split around some keys."""
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


def space_of(spaces: dict[str, Space], keyspace: Keyspace) -> Space:
    """Return a keyspace's. Raises `InvalidArgumentError` for one that the engine was opened without."""
    try:
        return spaces[keyspace.name]
    except KeyError:
        raise InvalidArgumentError(f"the engine was opened without keyspace {keyspace.name!r}") from None
