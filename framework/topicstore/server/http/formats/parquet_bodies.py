"""Decoding of bodies that are Parquet files, protected from decompression bombs.

The sizes in the footer may be wrong, and a page is decompressed to the size in its own header. So the headers of all
pages are read first. They and the footer use Thrift's compact protocol (https://parquet.apache.org/docs/file-format/,
https://github.com/apache/parquet-format). The offsets of columns are also read here, because a damaged footer makes
pyarrow's `RowGroupMetaData.column` end the process.

Dictionary-encoded strings stay encoded until their expanded size is known. Within ``properties`` this isn't possible;
each value there counts as large as the whole dictionary. Each value of a fixed-length column counts with that length,
also nulls and repeated values. With DELTA_BYTE_ARRAY, where values share prefixes, a few bytes of a page can expand to
any size, so such pages are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from topicstore.contract.errors import InvalidMessageError

from .unpacked_size import ROW, Allowance, check_types, expanded_size

__all__ = ["parquet_batches"]

_UNPACKED, _PACKED, _DATA, _DICTIONARY, _DATA_V2 = 2, 3, 5, 7, 8
"""Field ids of a page header: its sizes, and the kind-specific headers, whose first field is the number of values."""
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
        _check_pages(body, columns, Allowance(most))
        texts = [one.path for one in columns if one.physical_type == "BYTE_ARRAY" and "." not in one.path]
        expanded, left = Allowance(most), metadata.num_rows
        with pq.ParquetFile(source, read_dictionary=texts) as file:
            check_types(file.schema_arrow)
            for batch in file.iter_batches(_ROWS, use_threads=False):
                expanded.take(expanded_size(batch))
                left -= batch.num_rows
                yield batch
        if left:
            raise InvalidMessageError(
                f"the Parquet file is damaged: {left:,} of its rows are in not all of its columns"
            )
    except (pa.ArrowException, OSError, IndexError) as bad:
        raise InvalidMessageError(f"the body is not a Parquet file: {bad}") from bad


def _check_pages(body: bytes, columns: Sequence[pq.ColumnSchema], allowance: Allowance) -> None:
    """Take the uncompressed size of all pages from the allowance. Raises `IndexError` for damaged metadata."""
    footer = _Compact(body, len(body) - 8 - int.from_bytes(body[-8:-4], "little")).struct()
    allowance.take(_size(footer, _FOOTER_ROWS) * ROW)
    for group in _list(footer, _FOOTER_GROUPS):
        parts = _list(group, _GROUP_COLUMNS)
        if len(parts) != len(columns):
            raise IndexError("a row group has other columns than the file")
        for part, column in zip(parts, columns, strict=True):
            _check_column(body, part.get(_COLUMN_PLACES), column, allowance)


def _check_column(body: bytes, places: Any, column: pq.ColumnSchema, allowance: Allowance) -> None:
    start = _size(places, _DATA_START)
    if _DICTIONARY_START in places:
        start = min(start, _size(places, _DICTIONARY_START))
    end = start + _size(places, _PACKED_SIZE)
    values = dictionary = 0
    reader = _Compact(body, start)
    while reader.place < end:
        page = reader.struct()
        unpacked, packed = _size(page, _UNPACKED), _size(page, _PACKED)
        allowance.take(ROW + unpacked)
        if _DICTIONARY in page:
            dictionary += unpacked
        for kind, encoding in _ENCODING.items():
            if kind in page:
                values += _size(page[kind], 1)
                if _size(page[kind], encoding) == _DELTA_BYTE_ARRAY:
                    raise InvalidMessageError(
                        f"column {column.path!r} has the encoding DELTA_BYTE_ARRAY, which is not read"
                    )
        reader.place += packed
    each = max(ROW, column.length or 0)
    if "." in column.path:
        each = max(each, dictionary)
    allowance.take(values * each)


def _list(fields: Any, number: int) -> list[Any]:
    found = fields.get(number) if isinstance(fields, dict) else None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise IndexError("the footer is damaged")
    return found


def _size(fields: Any, number: int) -> int:
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

        Raises `IndexError` for invalid data, and for duplicate fields, of which other readers might use the other one.
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
