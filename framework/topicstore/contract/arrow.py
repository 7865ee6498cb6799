"""The published Arrow schema of messages, for Spark, DuckDB, pandas and Polars, and the conversion of batches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import ArrowColumn, Coded, Column, Constant, LazyColumn, Texts, to_list
from .errors import InvalidArgumentError, InvalidMessageError
from .model import MAX_PAYLOAD, Properties
from .validation import CHECKS

__all__ = [
    "SCHEMA",
    "SCHEMA_WITH_IDS",
    "binary_size",
    "columns_of",
    "fields_of",
    "record_batch",
    "selected",
    "whole",
]

_USER_PROPERTY = pa.struct(
    [pa.field("name", pa.string(), nullable=False), pa.field("value", pa.string(), nullable=False)]
)
_PROPERTIES = pa.struct(
    [
        ("payload_format_indicator", pa.uint8()),
        ("message_expiry_interval", pa.uint32()),
        ("content_type", pa.string()),
        ("response_topic", pa.string()),
        ("correlation_data", pa.binary()),
        ("user_properties", pa.list_(_USER_PROPERTY)),
    ]
)

SCHEMA = pa.schema(
    [
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("client_id", pa.string(), nullable=False),
        pa.field("qos", pa.int8(), nullable=False),
        pa.field("retain", pa.bool_(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("properties", _PROPERTIES),
    ]
)
"""The schema of messages. ``user_properties`` is a list of pairs, because MQTT 5 keeps their order and lets names
repeat (section 3.3.2.3.7), which an Arrow map would lose."""

SCHEMA_WITH_IDS = SCHEMA.append(pa.field("shard", pa.uint16(), nullable=False)).append(
    pa.field("position", pa.uint64(), nullable=False)
)
"""The schema of stored messages: that of messages, and the shard and position that identify each in its database."""

_COLUMNS = {
    "timestamp": "timestamps",
    "topic": "topics",
    "client_id": "client_ids",
    "qos": "qos",
    "retain": "retain",
    "payload": "payloads",
    "properties": "properties",
}
_WORTH_IT = 4
"""The maximum ratio of a shared list's texts to a column's rows for which the whole list is converted to Arrow."""
_KEPT_BYTES = 1 << 20
"""The maximum size, in bytes, of a constant column that is cached for the next batch."""
_DEFAULTS: dict[str, Any] = {"timestamp": None, "client_id": "", "qos": 0, "retain": False, "properties": None}


def selected(columns: Sequence[str] | None, *, ids: bool = False) -> pa.Schema:
    """Return the schema of some columns; of all columns if ``columns`` is None, with ``ids`` also shard and position.

    Raises `InvalidArgumentError` unless ``columns`` are one or more distinct column names.
    """
    if columns is None:
        return SCHEMA_WITH_IDS if ids else SCHEMA
    names = [columns] if isinstance(columns, str) else list(columns)
    unknown = [name for name in names if name not in SCHEMA_WITH_IDS.names]
    if isinstance(columns, str) or not names or unknown or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"columns is a list of different names out of {', '.join(SCHEMA_WITH_IDS.names)}, not {columns!r}"
        )
    return pa.schema([SCHEMA_WITH_IDS.field(name) for name in names])


def fields_of(schema: pa.Schema) -> frozenset[str]:
    """Return the columns of a `MessageBatch` from which a record batch of a schema is made."""
    return frozenset(_COLUMNS[name] for name in schema.names if name in _COLUMNS)


def record_batch(columns: Mapping[str, Column | None], rows: int, schema: pa.Schema) -> pa.RecordBatch:
    """Return a record batch of the columns of a `MessageBatch`, by column name, with a schema from `selected`."""
    fields = [_FIELDS[name] for name in schema.names]
    if rows and any(columns[column] is None for column, _, _ in fields):
        raise InvalidMessageError("messages have ids once they are stored")
    arrays = [_array(columns[column], kind, convert, rows) for column, kind, convert in fields]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_Convert = Callable[[Any, pa.DataType, int], pa.Array]


def _array(column: Column | None, kind: pa.DataType, convert: _Convert, rows: int) -> pa.Array:
    if column is None or rows == 0:
        return pa.nulls(rows, kind)
    if isinstance(column, LazyColumn):
        column = column.toarrow()
    if isinstance(column, pa.Array):
        return column if column.type == kind else column.cast(kind)
    if isinstance(column, Constant) and convert is not _times:
        return _constant(column.value, kind, rows)
    return convert(column, kind, rows)


def _constant(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    """Return a constant array; small ones are cached, because the same constants recur in most batches."""
    if isinstance(value, Properties):
        return pa.repeat(pa.scalar(_plain(value), kind), rows)
    if isinstance(value, (str, bytes)) and len(value) * rows > _KEPT_BYTES:
        return pa.repeat(pa.scalar(value, kind), rows)
    return _kept_constant(value, type(value).__name__, kind, rows)


@functools.lru_cache(maxsize=64)
def _kept_constant(value: Any, _: str, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)


def _times(column: Column, kind: pa.DataType, rows: int) -> pa.Array:
    if isinstance(column, Constant):
        if column.value is None:
            return pa.nulls(rows, kind)
        column = np.full(rows, column.value, dtype=np.int64)
    if isinstance(column, np.ndarray) and column.dtype != object:
        buffer = pa.py_buffer(np.ascontiguousarray(column, dtype=np.int64))
        return pa.Array.from_buffers(kind, rows, [None, buffer])
    return pa.array(to_list(column), pa.int64()).cast(kind)


def _flags(column: Column, kind: pa.DataType, _: int) -> pa.Array:
    return pa.array(np.array(to_list(column), dtype=bool), kind)


def _numbers(column: Column, kind: pa.DataType, _: int) -> pa.Array:
    return pa.array(column, kind)


def _bytes(column: Column, kind: pa.DataType, _: int) -> pa.Array:
    return pa.array(to_list(column), kind)


def _structs(column: Column, kind: pa.DataType, _: int) -> pa.Array:
    return pa.array([None if value is None else _plain(value) for value in to_list(column)], kind)


_arrow_texts: weakref.WeakKeyDictionary[Texts, tuple[int, pa.Array]] = weakref.WeakKeyDictionary()


def _texts(column: Column, kind: pa.DataType, rows: int) -> pa.Array:
    """Return a column of texts, taken from a cached Arrow array of the shared list that is renewed when it grows."""
    if not isinstance(column, Coded):
        return pa.array(to_list(column), kind)
    if column.array is not None:
        return column.array
    texts = column.texts
    count, array = _arrow_texts.get(texts, (-1, None))
    if count != texts.count:
        if len(texts.values) > _WORTH_IT * rows:
            return pa.array(column.tolist(), kind)
        count = texts.count
        array = pa.array(texts.values.tolist(), kind)
        _arrow_texts[texts] = count, array
    return pc.take(array, pa.array(column.codes), boundscheck=False)


_CONVERTERS: dict[str, _Convert] = {
    "timestamp": _times,
    "topic": _texts,
    "client_id": _texts,
    "qos": _numbers,
    "retain": _flags,
    "payload": _bytes,
    "properties": _structs,
    "shard": _numbers,
    "position": _numbers,
}
_FIELDS = {
    field.name: (
        {**_COLUMNS, "shard": "shards", "position": "positions"}[field.name],
        field.type,
        _CONVERTERS[field.name],
    )
    for field in SCHEMA_WITH_IDS
}


def binary_size(array: pa.Array) -> int:
    """Return the total size of all values of a binary array, in bytes."""
    return int(pc.sum(pc.binary_length(array)).as_py() or 0)


def _plain(properties: Properties) -> dict[str, Any]:
    plain = {name: getattr(properties, name) for name in Properties.__struct_fields__}
    plain["user_properties"] = [{"name": name, "value": value} for name, value in properties.user_properties]
    return plain


def whole(messages: Any) -> list[pa.RecordBatch]:
    """Return the rows of an Arrow table, batch or stream in as few batches as possible, usually one.

    Errors about a message can then name the row in the whole input. Raises `InvalidMessageError` for Arrow data without
    columns.
    """
    if isinstance(messages, pa.RecordBatch):
        return [messages]
    if isinstance(messages, pa.RecordBatchReader):
        table = messages.read_all()  # the C interface would replace the reader's errors with its own
    else:
        try:
            table = pa.table(messages)
        except (TypeError, ValueError) as bad:
            raise InvalidMessageError(f"a {type(messages).__name__} has no columns of messages: {bad}") from bad
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    return batches


def columns_of(batch: pa.RecordBatch) -> dict[str, Column]:
    """Return the checked columns of a RecordBatch, by their names in a `MessageBatch`.

    ``topic`` and ``payload`` are required, the others default as in `Message`. ``shard`` and
    ``position`` are ignored, so that messages read from one database can be stored in another. Any other
    column, a null in a column that isn't nullable, or a type that can't be cast raises `InvalidMessageError`.
    """
    names = batch.schema.names
    _check_names("column", names, SCHEMA_WITH_IDS.names)
    columns: dict[str, Column] = {}
    for field in SCHEMA:
        if field.name not in names:
            if field.name not in _DEFAULTS:
                raise InvalidMessageError(f"the column {field.name!r} is missing")
            columns[_COLUMNS[field.name]] = Constant(_DEFAULTS[field.name], batch.num_rows)
            continue
        array = batch.column(field.name)
        if array.type != field.type:
            array = _cast(array, field)
        if array.null_count and not field.nullable:
            first = pc.index(array.is_null(), True).as_py()
            raise InvalidMessageError(f"{field.name} is null", first)
        try:
            columns[_COLUMNS[field.name]] = _checked(array, field)
        except UnicodeDecodeError as bad:
            raise InvalidMessageError(f"column {field.name!r} is not valid UTF-8: {bad.reason}") from bad
    return columns


def _cast(array: pa.Array, field: pa.Field) -> pa.Array:
    """Cast an array without losing anything: Arrow's own cast drops struct fields that the schema lacks."""
    if pa.types.is_struct(array.type) and pa.types.is_struct(field.type):
        array = _ordered(array, field)
    try:
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as bad:
        raise InvalidMessageError(f"column {field.name!r} is {array.type}, not {field.type}: {bad}") from bad


def _check_names(what: str, names: list[str], known: list[str]) -> None:
    """Raise `InvalidMessageError` unless all names are known and distinct."""
    unknown, twice = sorted(set(names) - set(known)), sorted({name for name in names if names.count(name) > 1})
    if unknown:
        raise InvalidMessageError(
            f"messages have no {what} {', '.join(map(repr, unknown))}; there are {', '.join(known)}"
        )
    if twice:
        raise InvalidMessageError(f"messages have one {what} {', '.join(map(repr, twice))}, and not two")


def _ordered(array: pa.StructArray, field: pa.Field) -> pa.StructArray:
    """Reorder the fields of a struct as in the schema, because casts in older versions of Arrow require that."""
    for inner in array.type:
        if (pa.types.is_list(inner.type) or pa.types.is_large_list(inner.type)) and pa.types.is_struct(
            inner.type.value_type
        ):
            extra = {pair.name for pair in inner.type.value_type} - {"name", "value"}
            if extra:
                raise InvalidMessageError(f"user properties that messages don't have: {sorted(extra)}")
    names = [inner.name for inner in array.type]
    _check_names(f"field in {field.name}", names, [inner.name for inner in field.type])
    known = [inner.name for inner in field.type if inner.name in names]
    if known == names:
        return array
    children = dict(zip(names, array.flatten(), strict=True))
    return pa.StructArray.from_arrays([children[name] for name in known], known, mask=array.is_null())


def _checked(array: pa.Array, field: pa.Field) -> Column:
    """Check a column and return it.

    Where a few values suffice for the check, the column stays in Arrow, without a Python object for each row. If one of
    these values is invalid, all rows are checked to find the row for the error.
    """
    check = CHECKS[_COLUMNS[field.name]]
    if len(array) == 0:
        return []
    if field.name == "properties":
        if array.null_count == len(array):
            return Constant(None, len(array))
        return check([None if value is None else _struct(value, row) for row, value in enumerate(array.to_pylist())])
    if field.name in ("topic", "client_id"):
        return _coded(array, check)
    if field.name == "timestamp":
        array = array.cast(pa.int64())  # numbers of microseconds, as to_pylist would make datetimes
    try:
        column = check(_telling(array, field))
    except InvalidMessageError:
        check(array.to_pylist())
        raise
    if isinstance(column, Constant):
        return Constant(column.value, len(array))
    if field.name == "payload":
        return ArrowColumn(array)
    numbers: Column = array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False)
    return numbers


def _coded(array: pa.Array, check: Callable[[list[Any]], Column]) -> Column:
    encoded = array.dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    try:
        check(texts)
    except InvalidMessageError:
        check(array.to_pylist())
        raise
    if len(texts) == 1:
        return Constant(texts[0], len(array))
    return Coded(encoded.indices.to_numpy(), Texts.of(texts), array)


def _telling(array: pa.Array, field: pa.Field) -> list[Any]:
    """Return a few values that are valid only if the whole column is, and all equal only if the column is constant."""
    if field.name == "payload":
        longest = pc.max(pc.binary_length(array)).as_py()
        return [b"", b" "] if longest <= MAX_PAYLOAD else array.to_pylist()
    ends = pc.min_max(array)
    values = [ends["min"].as_py(), ends["max"].as_py()]
    return [*values, None] if array.null_count else values


def _struct(value: dict[str, Any], row: int) -> Properties:
    pairs = value.pop("user_properties") or ()
    if None in pairs:
        raise InvalidMessageError("a user property is null", row)
    return Properties(**value, user_properties=tuple((pair["name"], pair["value"]) for pair in pairs))
