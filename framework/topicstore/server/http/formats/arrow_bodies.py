"""Bodies that are streams of Arrow's IPC format.

A compressed buffer begins with its unpacked size, which Arrow reserves before it unpacks. So the sizes of all buffers
are added up before anything is read. They are found through the header of each record batch, which is a table of
FlatBuffers (https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

from topicstore.contract.errors import InvalidMessageError

from .unpacked_size import Allowance, check_types, expanded_size

__all__ = ["arrow_batches"]

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Kinds of messages of a stream, by the number that its header has."""


def arrow_batches(body: bytes, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream, whose values have together at most ``most`` bytes.

    Raises `InvalidMessageError`, and `MessageTooLargeError` before more is unpacked.
    """
    try:
        unpacked = Allowance(most)
        for message in pa.ipc.MessageReader.open_stream(body):
            unpacked.take(_unpacked(message))
        expanded = Allowance(most)
        with pa.ipc.open_stream(body) as stream:
            check_types(stream.schema)
            for batch in stream:
                expanded.take(batch.num_rows)  # before they are looked at one by one
                batch.validate(full=True)
                expanded.take(expanded_size(batch))
                yield batch
    except (pa.ArrowException, OSError, EOFError, struct.error) as bad:
        raise InvalidMessageError(f"the body is not a stream of Arrow's IPC format: {bad}") from bad


def _unpacked(message: pa.ipc.Message) -> int:
    """Return the bytes that a message's buffers have once they are unpacked."""
    header = message.metadata.to_pybytes()
    root = _Table(header, _number("<I", header, 0))
    kind = root.field(1)
    table = root.table(2)
    if kind is not None and header[kind] == _DICTIONARY_BATCH and table is not None:
        table = table.table(1)
    elif kind is None or header[kind] != _RECORD_BATCH:
        return 0
    if table is None or table.field(3) is None:  # not compressed: no more than what was sent
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
        """Return the place of a field; None if the table hasn't got it."""
        entry = 4 + 2 * number
        if entry >= _number("<H", self._data, self._fields):
            return None
        offset = _number("<H", self._data, self._fields + entry)
        return self._place + offset if offset else None

    def reference(self, number: int) -> int | None:
        """Return the place to which a field refers."""
        field = self.field(number)
        return None if field is None else field + _number("<I", self._data, field)

    def table(self, number: int) -> _Table | None:
        """Return the table to which a field refers."""
        place = self.reference(number)
        return None if place is None else _Table(self._data, place)
