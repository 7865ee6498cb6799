"""Decoding of bodies in Arrow's IPC stream format, and of Parquet files, protected from decompression bombs.

Sizes are added up before values are decompressed, and again before dictionaries are expanded.

Arrow: a compressed buffer begins with its uncompressed size, which Arrow allocates before decompression. These sizes
are found by the header of each record batch, a table of FlatBuffers
(https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc).

Parquet: the sizes in the footer may be wrong, and a page is decompressed to the size in its own header. So the headers
of all pages are read first. They and the footer use Thrift's compact protocol
(https://parquet.apache.org/docs/file-format/, https://github.com/apache/parquet-format). The offsets of columns are
also read here, because a damaged footer makes pyarrow's `RowGroupMetaData.column` end the process.

Dictionary-encoded strings stay encoded until their expanded size is known. Within ``properties`` this isn't possible;
each value there counts as large as the whole dictionary. Each value of a fixed-length column counts with that length,
also nulls and repeated values. With DELTA_BYTE_ARRAY, where values share prefixes, a few bytes of a page can expand to
any size, so such pages are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from topicstore.contract.errors import InvalidMessageError, MessageTooLargeError

__all__ = ["arrow_batches", "parquet_batches"]

_ROW = 16
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
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""The numbers of message kinds in the header of a message of Arrow's IPC format."""
_UNPACKED, _PACKED, _DATA, _DICTIONARY, _DATA_V2 = 2, 3, 5, 7, 8
"""Field ids of a Parquet page header: its sizes, and the kind-specific headers, which begin with the values' count."""
_ENCODING = {_DATA: 2, _DATA_V2: 4}
"""By kind, the field id of the values' encoding in the kind-specific header."""
_DELTA_BYTE_ARRAY = 7
_COUNTED = re.compile(r"parquet-mr version 1\.(?:[3-9]|[1-9][0-9]+)\.[0-9]")
"""Versions of parquet-mr whose column sizes include the dictionary page. For older versions Arrow reads beyond the
column's size in the footer, where pages were not checked."""
_FOOTER_ROWS, _FOOTER_GROUPS, _GROUP_COLUMNS, _COLUMN_PLACES = 3, 4, 1, 3
"""Field ids of the footer, of a row group, and of a column chunk."""
_PACKED_SIZE, _DATA_START, _DICTIONARY_START = 7, 9, 11
"""Field ids of a column's metadata."""
_DEEPEST = 12
"""Maximum nesting of structs and lists in a footer."""
_WIDTHS = {1: 1, 2: 1, 3: 1, 7: 8}
"""Bytes of the types that are skipped: booleans in a list, a byte, a double."""
_ROWS = 16_384


class _Allowance:
    """The number of bytes that a body may still expand to."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def take(self, size: int) -> None:
        """Subtract bytes. Raises `MessageTooLargeError` if fewer are left."""
        self._left -= size
        if self._left < 0:
            raise MessageTooLargeError(f"the body unpacks to more than {self._most:,} bytes: send it in parts")


def _check_types(schema: pa.Schema) -> None:
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


def _expanded_size(batch: pa.RecordBatch) -> int:
    """Return the size of a record batch in bytes, with dictionaries expanded to their values."""
    rows: int = batch.num_rows
    return rows * _ROW + sum(map(_size, batch.columns))


def _size(column: pa.Array) -> int:
    kind = column.type
    if types.is_struct(kind):
        return sum(map(_size, column.flatten()))
    if types.is_list(kind) or types.is_large_list(kind):
        elements = column.flatten()  # elements such as nulls have no bytes, and may be very many
        return len(elements) * _ROW + _size(elements)
    if types.is_dictionary(kind):
        return _size_of_values(column)
    size: int = column.nbytes
    return size


def _size_of_values(column: pa.Array) -> int:
    """Return the size of a dictionary-encoded column in bytes, after its values are expanded."""
    values = column.dictionary
    if not any(one(values.type) for one in _BINARY):
        width: int = values.type.byte_width if types.is_fixed_size_binary(values.type) else _ROW
        return len(column) * max(width, _ROW)
    lengths = pc.take(pc.binary_length(values), column.indices)
    expanded: int = pc.sum(lengths.cast(pa.int64())).as_py() or 0
    return expanded


def arrow_batches(body: bytes, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream, whose uncompressed values have at most ``most`` bytes in total.

    Raises `InvalidMessageError`, and `MessageTooLargeError` before more bytes are decompressed.
    """
    try:
        unpacked = _Allowance(most)
        for message in pa.ipc.MessageReader.open_stream(body):
            unpacked.take(_unpacked(message))
        expanded = _Allowance(most)
        with pa.ipc.open_stream(body) as stream:
            _check_types(stream.schema)
            for batch in stream:
                expanded.take(batch.num_rows)  # limits the rows before they are validated
                batch.validate(full=True)
                expanded.take(_expanded_size(batch))
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
    if table is None or table.field(3) is None:  # an uncompressed batch is no larger than the body
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
        """Return the offset that a field's value points to; None if the table doesn't have the field."""
        field = self.field(number)
        return None if field is None else field + _number("<I", self._data, field)

    def table(self, number: int) -> _Table | None:
        """Return the table to which a field refers; None if the table doesn't have the field."""
        place = self.reference(number)
        return None if place is None else _Table(self._data, place)


def parquet_batches(body: bytes, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a file, whose uncompressed values have at most ``most`` bytes in total.

    Raises `InvalidMessageError`, and `MessageTooLargeError` before more bytes are decompressed.
    """
    try:
        source = pa.BufferReader(body)
        metadata = pq.read_metadata(source)
        if "parquet-mr" in metadata.created_by.lower() and _COUNTED.match(metadata.created_by) is None:
            raise InvalidMessageError(
                f"Parquet files of the writer {metadata.created_by!r} are not read: it is too old"
            )
        columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
        _check_pages(body, columns, _Allowance(most))
        texts = [one.path for one in columns if one.physical_type == "BYTE_ARRAY" and "." not in one.path]
        expanded, left = _Allowance(most), metadata.num_rows
        with pq.ParquetFile(source, read_dictionary=texts) as file:
            _check_types(file.schema_arrow)
            for batch in file.iter_batches(_ROWS, use_threads=False):
                expanded.take(_expanded_size(batch))
                left -= batch.num_rows
                yield batch
        if left:
            raise InvalidMessageError(
                f"the Parquet file is damaged: {left:,} of its rows are in not all of its columns"
            )
    except (pa.ArrowException, OSError, IndexError) as bad:
        raise InvalidMessageError(f"the body is not a Parquet file: {bad}") from bad


def _check_pages(body: bytes, columns: Sequence[pq.ColumnSchema], allowance: _Allowance) -> None:
    """Take the uncompressed size of all pages from the allowance. Raises `IndexError` for damaged metadata."""
    footer = _Compact(body, len(body) - 8 - int.from_bytes(body[-8:-4], "little")).struct()
    allowance.take(_field_size(footer, _FOOTER_ROWS) * _ROW)
    for group in _list(footer, _FOOTER_GROUPS):
        parts = _list(group, _GROUP_COLUMNS)
        if len(parts) != len(columns):
            raise IndexError("a row group has other columns than the file")
        for part, column in zip(parts, columns, strict=True):
            _check_column(body, part.get(_COLUMN_PLACES), column, allowance)


def _check_column(body: bytes, places: Any, column: pq.ColumnSchema, allowance: _Allowance) -> None:
    start = _field_size(places, _DATA_START)
    if _DICTIONARY_START in places:
        start = min(start, _field_size(places, _DICTIONARY_START))
    end = start + _field_size(places, _PACKED_SIZE)
    values = dictionary = 0
    reader = _Compact(body, start)
    while reader.place < end:
        page = reader.struct()
        unpacked, packed = _field_size(page, _UNPACKED), _field_size(page, _PACKED)
        allowance.take(_ROW + unpacked)
        if _DICTIONARY in page:
            dictionary += unpacked
        for kind, encoding in _ENCODING.items():
            if kind in page:
                values += _field_size(page[kind], 1)
                if _field_size(page[kind], encoding) == _DELTA_BYTE_ARRAY:
                    raise InvalidMessageError(
                        f"column {column.path!r} has the encoding DELTA_BYTE_ARRAY, which is not read"
                    )
        reader.place += packed
    each = max(_ROW, column.length or 0)
    if "." in column.path:
        each = max(each, dictionary)
    allowance.take(values * each)


def _list(fields: Any, number: int) -> list[Any]:
    found = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise IndexError("the footer is damaged")
    return found


def _field_size(fields: Any, number: int) -> int:
    value = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(value, int) or value < 0:
        raise IndexError("the footer or a page's header is damaged")
    return value


class _Compact:
    """A reader of structs in Thrift's compact protocol, for the types that footers and page headers use."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self.place = place

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of a struct by id: structs, lists, integers and booleans; None for other types.

        Raises `IndexError` for invalid data, and for duplicate fields, of which readers may use different ones.
        """
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            if number in fields:
                raise IndexError("the footer or a page's header is damaged")
            kind = head & 15
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (1, 2, 3, 7, 8):
            width = self._unsigned() if kind == 8 else _WIDTHS[kind]
            self.place += width
            return None
        if kind in (9, 12) and depth < _DEEPEST:
            return self.struct(depth + 1) if kind == 12 else self._list(depth + 1)
        raise IndexError("the footer or a page's header is damaged")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        length = head >> 4 if head >> 4 < 15 else self._unsigned()
        if length > len(self._data) - self.place:  # each element has at least one byte
            raise IndexError("the footer or a page's header is damaged")
        return [self._value(head & 15, depth) for _ in range(length)]

    def _byte(self) -> int:
        if not 0 <= self.place < len(self._data):
            raise IndexError("the footer or a page's header is damaged")
        self.place += 1
        return self._data[self.place - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 63:
                return value

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
