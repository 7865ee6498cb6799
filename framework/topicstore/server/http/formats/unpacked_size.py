"""Sizes of decoded values before they are expanded, so that a small body can't fill the memory."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from topicstore.contract.errors import InvalidMessageError, MessageTooLargeError

__all__ = ["ROW", "Allowance", "check_types", "expanded_size"]

ROW = 16
"""Bytes that each row and each list element counts besides its values, so that the number of empty ones is limited."""

_BINARY: tuple[Callable[[pa.DataType], bool], ...] = (
    types.is_string,
    types.is_large_string,
    types.is_binary,
    types.is_large_binary,
)
_SINGLE = (
    *_BINARY,
    types.is_integer,
    types.is_boolean,
    types.is_timestamp,
    types.is_fixed_size_binary,
    types.is_null,
)


class Allowance:
    """The number of bytes that a body may still expand to."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, size: int) -> None:
        """Subtract bytes. Raises `MessageTooLargeError` if fewer are left."""
        self._left -= size
        if self._left < 0:
            raise MessageTooLargeError(f"the body unpacks to more than {self._most:,} bytes: send it in parts")


def check_types(schema: pa.Schema) -> None:
    """Raise `InvalidMessageError` for a type whose values could expand from a few bytes to many."""
    for field in schema:
        kind = field.type
        if not (_single(kind.value_type) if types.is_dictionary(kind) else _plain(kind)):
            raise InvalidMessageError(f"column {field.name!r} is {field.type}, which messages don't have")


def _plain(kind: pa.DataType) -> bool:
    if types.is_struct(kind):
        return all(_plain(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind):
        inner: pa.DataType = kind.value_type
        return _plain(inner)
    return _single(kind)


def _single(kind: pa.DataType) -> bool:
    return any(one(kind) for one in _SINGLE)


def expanded_size(batch: pa.RecordBatch) -> int:
    """Return the size of a record batch in bytes, with dictionaries expanded to their values."""
    rows: int = batch.num_rows
    return rows * ROW + sum(map(_size, batch.columns))


def _size(column: pa.Array) -> int:
    kind = column.type
    if types.is_struct(kind):
        return sum(map(_size, column.flatten()))
    if types.is_list(kind) or types.is_large_list(kind):
        elements = column.flatten()  # may be many elements without bytes, such as nulls
        return len(elements) * ROW + _size(elements)
    if types.is_dictionary(kind):
        return _size_of_values(column)
    size: int = column.nbytes
    return size


def _size_of_values(column: pa.Array) -> int:
    """Return the size of a dictionary-encoded column in bytes, after its values are expanded."""
    values = column.dictionary
    if not any(one(values.type) for one in _BINARY):
        width: int = values.type.byte_width if types.is_fixed_size_binary(values.type) else ROW
        return len(column) * max(width, ROW)
    lengths = pc.take(pc.binary_length(values), column.indices)
    expanded: int = pc.sum(lengths.cast(pa.int64())).as_py() or 0
    return expanded
