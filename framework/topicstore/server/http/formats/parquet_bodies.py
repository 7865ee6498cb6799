"""Bodies that are Parquet files.

What the footer says of sizes need not be true, and a page is unpacked into as many bytes as its own header says. So
the headers of all pages are read first. They and the footer are in the compact protocol of Thrift, as
https://parquet.apache.org/docs/file-format/ and https://github.com/apache/parquet-format say. Where the columns lie is
read from the footer here as well: where that is damaged, pyarrow's `RowGroupMetaData.column` ends the process.

Texts that repeat are read as a dictionary, whose values are not repeated before their size is known. Within
``properties`` that can't be done; there each value may be as large as the whole dictionary. Values of a fixed length
take that length each, be they nulls or repeated. Where values share their beginnings (DELTA_BYTE_ARRAY), a few bytes of
a page stand for any number, so such pages are not read.
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
"""Fields of a page's header: its sizes, and the header of its kind, whose first field is the number of values."""
_ENCODING = {_DATA: 2, _DATA_V2: 4}
"""The field of the header of a kind that has the encoding of the values."""
_DELTA_BYTE_ARRAY = 7
_COUNTED = re.compile(r"parquet-mr version 1\.(?:[3-9]|[1-9][0-9]+)\.[0-9]")
"""Writers of that name which count all of a dictionary's page. Of older ones Arrow reads on beyond the size of a
column that the footer has, where pages are that were not looked at."""
_FOOTER_ROWS, _FOOTER_GROUPS, _GROUP_COLUMNS, _COLUMN_PLACES = 3, 4, 1, 3
"""Fields of the footer, of a row group in it, and of a column in that."""
_PACKED_SIZE, _DATA_START, _DICTIONARY_START = 7, 9, 11
"""Fields of the places of a column."""
_DEEPEST = 12
"""How deep structs and lists of a footer lie in each other at most."""
_WIDTHS = {1: 1, 2: 1, 3: 1, 7: 8}
"""Bytes of the kinds that are passed over: booleans in a list, a byte, a number with a point."""
_ROWS = 16_384


def parquet_batches(body: bytes, most: int) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a file, whose values have together at most ``most`` bytes.

    Raises `InvalidMessageError`, and `MessageTooLargeError` before more is unpacked.
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
    """Take what all pages unpack to. Raises `IndexError` for what is damaged."""
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
    """Reads structs of the compact protocol of Thrift, as far as footers and headers of pages use it."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self.place = place

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the fields of a struct by number: structs, lists and integers; None for all else.

        Raises `IndexError` for anything else, and for a field that is there twice: others might take the other one.
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
        if length > len(self._data) - self.place:  # each of them has a byte at least
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
