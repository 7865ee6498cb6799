"""Keys as ordered bytes, for engines whose keys are bytes.

The encoding
    A key of a keyspace without a shape is bytes, and is stored unchanged. A tuple is stored as the concatenation of
    its numbers, unsigned and big-endian, with the widths of the keyspace's shape. For example, ``(1, 2, 3)`` with the
    shape ``(4, 8, 8)`` is stored as the 20 bytes ``00000001 0000000000000002 0000000000000003``.

The order
    The encoding preserves the order of keys: all tuples of a shape have the same
    length, and the most significant number and byte come first.

Engines that keep several keyspaces in one map put the same prefix before all keys of a keyspace, which preserves the
order within the keyspace.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from operator import itemgetter
from typing import Generic, cast

from .engine import K, Key, Keyspace
from .errors import InvalidArgumentError

__all__ = ["KeyEncoding"]

_FORMATS = {4: "I", 8: "Q"}


class KeyEncoding(Generic[K]):
    """The encoding of the keys of one keyspace as bytes, which the module's docstring defines."""

    __slots__ = ("_pack", "_prefix", "decode", "encode", "keyspace")

    def __init__(self, keyspace: Keyspace[K], prefix: bytes = b"") -> None:
        self.keyspace = keyspace
        self._prefix = prefix
        self.encode: Callable[[K], bytes]
        """A function that encodes a key. It raises `InvalidArgumentError` for a key that doesn't fit the keyspace."""
        self.decode: Callable[[bytes], K]
        """A function that decodes the bytes of a key."""
        if keyspace.shape is None:
            self.encode, self.decode = self._encode_bytes, itemgetter(slice(len(prefix), None))
        else:
            numbers = "".join(_FORMATS[width] for width in keyspace.shape)
            pack = struct.Struct(f">{len(prefix)}s{numbers}").pack
            self._pack: Callable[..., bytes] = partial(pack, prefix) if prefix else struct.Struct(f">{numbers}").pack
            unpack = struct.Struct(f">{len(prefix)}x{numbers}").unpack
            self.encode, self.decode = self._tuple_encoder(), cast("Callable[[bytes], K]", unpack)

    def encode_all(self, keys: Sequence[K]) -> Sequence[bytes]:
        """Encode several keys, faster than one by one. Raises the errors of ``encode``."""
        types = set(map(type, keys))
        if self.keyspace.shape is None:
            if types <= {bytes}:
                encoded: Sequence[bytes] = keys  # type: ignore[assignment]  # as their types say
                return [self._prefix + key for key in encoded] if self._prefix else encoded
        elif bytes not in types:
            try:
                return list(starmap(self._pack, keys))
            except (struct.error, TypeError):
                pass  # one of the keys is invalid; the code below raises for it
        return list(map(self.encode, keys))

    def _encode_bytes(self, key: Key) -> bytes:
        if type(key) is not bytes:
            raise InvalidArgumentError(f"{key!r} is not a key of keyspace {self.keyspace.name!r}, whose keys are bytes")
        return self._prefix + key

    def _tuple_encoder(self) -> Callable[[Key], bytes]:
        """Return the encoder as a closure, which is faster than a method because it looks up no attributes."""
        pack, keyspace = self._pack, self.keyspace

        def encode(key: Key) -> bytes:
            bad: Exception | None = None
            try:
                if type(key) is not bytes:  # bytes are a sequence of numbers, which struct would accept
                    return pack(*key)
            except (struct.error, TypeError) as error:
                bad = error
            raise InvalidArgumentError(
                f"{key!r} is not a key of keyspace {keyspace.name!r} (shape {keyspace.shape})"
            ) from bad

        return encode
