"""Column families, one per keyspace."""

from __future__ import annotations

from typing import Any

import rocksdict
from topicstore.contract.engine import Key, Keyspace
from topicstore.contract.key_encoding import KeyEncoding

__all__ = ["Family"]


class Family:
    """A keyspace's column family, with the encoding of its keys."""

    __slots__ = ("data", "decode", "encode", "encode_all", "handle", "name")

    def __init__(self, database: rocksdict.Rdict, keyspace: Keyspace[Any]) -> None:
        self.name = keyspace.name
        self.data = database.get_column_family(keyspace.name)
        try:
            self.handle = database.get_column_family_handle(keyspace.name)
        except BaseException:
            self.data.close()
            raise
        encoding = KeyEncoding(keyspace)
        self.encode, self.encode_all = encoding.encode, encoding.encode_all
        self.decode = None if keyspace.shape is None else encoding.decode
        """Decodes a stored key. None if keys are bytes already."""

    def encode_span(self, start: Key | None, end: Key | None) -> tuple[bytes | None, bytes | None]:
        """Return the ends of a range as bytes."""
        return (None if start is None else self.encode(start), None if end is None else self.encode(end))

    def close(self) -> None:
        """Drop the references to the database. The family's handle must be dropped before its data."""
        del self.handle
        self.data.close()
