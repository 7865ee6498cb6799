"""Decoding of bodies in Arrow's IPC stream format.

A compressed buffer begins with its uncompressed size, which Arrow allocates before decompression. So the sizes of all
buffers are added up first, as a protection from decompression bombs. They are found by the header of each record batch,
a table of FlatBuffers
(https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

from topicstore.contract.errors import InvalidMessageError

from .unpacked_size import Allowance, check_types, expanded_size

__all__ = ["arrow_batches"]

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""The numbers of message kinds in a message's header."""


def arrow_batches(body: bytes, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream, whose uncompressed values have at most ``most`` bytes in total.

    Raises `InvalidMessageError`, and `MessageTooLargeError` before more bytes are decompressed.
    """
    try:
        unpacked = Allowance(most)
        for message in pa.ipc.MessageReader.open_stream(body):
            unpacked.take(_unpacked(message))
        expanded = Allowance(most)
        with pa.ipc.open_stream(body) as stream:
            check_types(stream.schema)
            for batch in stream:
                expanded.take(batch.num_rows)  # before single rows are validated
                batch.validate(full=True)
                expanded.take(expanded_size(batch))
                yield batch
    except (pa.ArrowException, OSError, EOFError, struct.error) as bad:
        raise InvalidMessageError(f"the body is not a stream of Arrow's IPC format: {bad}") from bad


def _unpacked(message: pa.ipc.Message) -> int:
    """Return the uncompressed size of a message's buffers, in bytes; 0 if they are not compressed."""
    header = message.metadata.to_pybytes()
    root = _Table(header, _number("<I", header, 0))
    kind = root.field(1)
    table = root.table(2)
    if kind is not None and header[kind] == _DICTIONARY_BATCH and table is not None:
        table = table.table(1)
    elif kind is None or header[kind] != _RECORD_BATCH:
        return 0
    if table is None or table.field(3) is None:  # not compressed: no larger than the body
        return 0
    vector = table.reference(2)
    if vector is None:
        return 0
    body, size = memoryview(message.body), 0
    for number in range(_number("<I", header, vector)):
        start, length = struct.unpack_from("<qq", header, vector + 4 + 16 * number)
        if length:
            size += max(_number("<q", body, start), length)
    return size


def _number(form: str, data: bytes | memoryview, place: int) -> int:
    (value,) = struct.unpack_from(form, data, place)
    return int(value)


class _Table:
    """A table of FlatBuffers (https://flatbuffers.dev/internals/)."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place
        self._fields = place - _number("<i", data, place)

    def field(self, number: int) -> int | None:
        """Return the offset of a field; None if the table doesn't have the field."""
        entry = 4 + 2 * number
        if entry >= _number("<H", self._data, self._fields):
            return None
        offset = _number("<H", self._data, self._fields + entry)
        return self._place + offset if offset else None

    def reference(self, number: int) -> int | None:
        """Return the offset to which a field refers; None if the table doesn't have the field."""
        field = self.field(number)
        return None if field is None else field + _number("<I", self._data, field)

    def table(self, number: int) -> _Table | None:
        """Return the table to which a field refers; None if the table doesn't have the field."""
        place = self.reference(number)
        return None if place is None else _Table(self._data, place)
