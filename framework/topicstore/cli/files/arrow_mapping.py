"""Conversion of a file's Arrow columns to columns of messages; columns that already have the right type are kept."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any

import pyarrow as pa

from topicstore import SCHEMA
from topicstore.files.mapping import TIME_NAMES, ColumnMap, Row, check_once

from .rows import BadRowError

__all__ = ["ArrowMapping"]

_IDS = ("shard", "position")
"""The columns of message ids, which a file may contain. They are not imported, because storing assigns new ids."""
_BYTES = {pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.null()}
_Make = Callable[[Row, str], Any]


class ArrowMapping:
    """A converter of record batches with one schema into batches of messages."""

    def __init__(self, schema: pa.Schema, mapping: ColumnMap) -> None:
        """Check the schema. Raises `ValueError` if its columns can't be converted to messages."""
        self._mapping = mapping
        check_once(schema.names)
        mapping.check_header([name for name in schema.names if name not in _IDS])
        self._made = {column: make for column, make in self._makers().items() if self._is_made(column, schema)}
        self._same = mapping.plain and not self._made

    def _makers(self) -> dict[str, _Make]:
        mapping = self._mapping
        return {
            "timestamp": mapping.timestamp,
            "topic": lambda _row, topic: topic,
            "client_id": mapping.client_id,
            "payload": mapping.payload,
        }

    def _is_made(self, column: str, schema: pa.Schema) -> bool:
        """Return whether a message's column is computed row by row, because it is mapped or has another type."""
        if column in self._mapping.sources:
            return True
        names = self._mapping.taken.intersection(schema.names)
        if column == "timestamp":
            if self._mapping.time_unit is None and self._mapping.zone is UTC and "timestamp" in names:
                kind = schema.field("timestamp").type
                as_it_is = not (pa.types.is_uint64(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
                return not as_it_is or not names.isdisjoint(TIME_NAMES[1:])
            return not names.isdisjoint(TIME_NAMES)
        if column == "payload":
            return "payload_base64" in names or ("payload" in names and not _is_bytes(schema.field("payload").type))
        return False

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert a batch to columns of messages. Raises `BadRowError`, whose row counts from the batch's first row."""
        if self._same:
            return batch
        made: dict[str, list[Any]] = {column: [] for column in self._made}
        if made:
            for number, row in enumerate(self._rows(batch)):
                try:
                    topic = self._mapping.topic(row)
                    for column, make in self._made.items():
                        made[column].append(make(row, topic))
                except ValueError as bad:
                    raise BadRowError(number, str(bad)) from bad
        arrays = {}
        for field in SCHEMA:
            source = self._mapping.column_of(field.name)
            if field.name in made:
                kind = pa.int64() if field.name == "timestamp" else field.type
                arrays[field.name] = pa.array(made[field.name], kind)
            elif field.name in self._mapping.sources and not source:
                value = self._mapping.sources[field.name].text({}, None)  # a constant: it depends on no column
                arrays[field.name] = pa.array([value] * batch.num_rows, pa.string())
            elif source in batch.schema.names and source in self._mapping.taken:
                arrays[field.name] = batch.column(source)
        return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))

    def _rows(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return the rows of a batch as dictionaries, with the columns that computed columns may need."""
        wanted = [
            name for name in batch.schema.names if name in self._mapping.taken and name not in ("properties", "qos")
        ]
        arrays = [self._plain(batch.column(name)) for name in wanted]
        return pa.RecordBatch.from_arrays(arrays, wanted).to_pylist()  # type: ignore[no-any-return]

    def _plain(self, array: pa.Array) -> pa.Array:
        """Convert a timestamp column to microseconds; return other columns unchanged.

        Raises `BadRowError` for the first time that is not exact in microseconds, unless ``--time-unit ns`` is given.
        """
        if not pa.types.is_timestamp(array.type):
            return array
        kind = pa.timestamp("us", tz="UTC" if array.type.tz is not None or self._mapping.zone is UTC else None)
        try:
            return array.cast(kind, safe=self._mapping.time_unit != "ns")
        except pa.ArrowInvalid:
            for row in range(len(array)):
                try:
                    array.slice(row, 1).cast(kind)
                except pa.ArrowInvalid as bad:
                    raise BadRowError(row, f"{bad}; --time-unit ns rounds it down") from bad
            raise


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in _BYTES or pa.types.is_fixed_size_binary(kind) or pa.types.is_dictionary(kind)
