"""The counts by topic and by client id as tables: the results of `Database.topics` and `Database.clients`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.topics import TopicFilter
from topicstore.storage.counting import contents

from .options import ReadSettings
from .reading import open_to_read

__all__ = ["CLIENTS", "TOPICS", "TallyReader"]

_COUNTS = [
    StructField("messages", LongType(), False),
    StructField("bytes", LongType(), False),
    StructField("first", TimestampType(), False),
    StructField("last", TimestampType(), False),
]
TOPICS = StructType([StructField("topic", StringType(), False), *_COUNTS])
CLIENTS = StructType([StructField("client_id", StringType(), False), *_COUNTS])


class TallyReader(DataSourceReader):
    """A reader of counts. It has one partition, because most messages are already counted in the database."""

    def __init__(self, settings: ReadSettings, schema: StructType) -> None:
        there = {field.name: field for field in (TOPICS if settings.counted == "topics" else CLIENTS)}
        for field in schema:
            if field.name not in there or field.dataType != there[field.name].dataType:
                raise InvalidArgumentError(f"{settings.counted} have the columns {', '.join(there)}, not {field}")
        self._path = settings.path
        (self._filter,) = settings.selection.filters
        self._counted = settings.counted
        self._schema = to_arrow_schema(schema, timezone="UTC")

    def partitions(self) -> Sequence[InputPartition]:
        """Return the only partition."""
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield all rows; called in a task."""
        count = contents.topics if self._counted == "topics" else contents.clients
        with open_to_read(self._path) as storage:
            found = count(storage, TopicFilter(self._filter))
        columns = [pa.array([getattr(one, field.name) for one in found]).cast(field.type) for field in self._schema]
        yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
