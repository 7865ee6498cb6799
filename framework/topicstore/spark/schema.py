"""The columns of messages in Spark's types, and the conversion of Arrow batches to them.

The columns are those of `topicstore.SCHEMA` and, with the option ``ids``, ``shard`` and ``position``. Spark has no
unsigned integers: each becomes the next wider signed type. Positions, which stay below 2**63 until the year 2112,
become ``bigint``.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from topicstore.contract.errors import InvalidArgumentError

__all__ = ["MESSAGES", "MESSAGES_WITH_IDS", "Shape"]

_USER_PROPERTY = StructType([StructField("name", StringType(), False), StructField("value", StringType(), False)])
_PROPERTIES = StructType(
    [
        StructField("payload_format_indicator", ShortType()),
        StructField("message_expiry_interval", LongType()),
        StructField("content_type", StringType()),
        StructField("response_topic", StringType()),
        StructField("correlation_data", BinaryType()),
        StructField("user_properties", ArrayType(_USER_PROPERTY, False)),
    ]
)

MESSAGES = StructType(
    [
        StructField("timestamp", TimestampType()),
        StructField("topic", StringType(), False),
        StructField("client_id", StringType(), False),
        StructField("qos", ByteType(), False),
        StructField("retain", BooleanType(), False),
        StructField("payload", BinaryType(), False),
        StructField("properties", _PROPERTIES),
    ]
)
MESSAGES_WITH_IDS = StructType(
    [*MESSAGES.fields, StructField("shard", IntegerType(), False), StructField("position", LongType(), False)]
)


class Shape:
    """The columns that a query selects, in the query's order. Raises `InvalidArgumentError` for an unknown column."""

    def __init__(self, wanted: StructType) -> None:
        there: dict[str, DataType] = {field.name: field.dataType for field in MESSAGES_WITH_IDS}
        for field in wanted:
            if field.name not in there:
                raise InvalidArgumentError(f"messages have no column {field.name!r}; there are {', '.join(there)}")
            if not _same(there[field.name], field.dataType):
                named = there[field.name].simpleString()
                raise InvalidArgumentError(f"column {field.name!r} is {named}, not {field.dataType.simpleString()}")
        self._schema = to_arrow_schema(wanted, timezone="UTC")
        self.names = wanted.fieldNames() or ["topic"]
        """The columns that `of` needs: those that are selected, or one, which says how many rows there are."""

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the selected columns of a batch with columns of `topicstore.SCHEMA_WITH_IDS`."""
        arrays = [_as(batch.column(field.name), field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _same(one: DataType, other: DataType) -> bool:
    """Return whether two types are the same except for nullability."""
    return one.simpleString() == other.simpleString()


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if array.null_count == len(array):
        return pa.nulls(len(array), kind)
    return array.cast(kind)
