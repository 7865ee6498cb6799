"""The data source ``topicstore``.

Reading, ``spark.read.format("topicstore")``
    ``path``       the database's directory (also as the argument of ``load``).
    ``filter``     MQTT topic filter; default ``#``, which, as everywhere, leaves out topics that begin with ``$``.
    ``start``, ``until``
                   time range of positions, inclusive and exclusive: ISO 8601 (UTC unless it has a zone),
                   ``now``, ``-2h``, ``@`` seconds or microseconds since the epoch.
    ``ids``        ``true``: with the columns ``shard`` and ``position``.
    ``minPartitions``
                   large generations are divided by time until there are about so many partitions; by
                   default as many as this machine has cores.

    The table is what was committed when the query was planned. Each task reads one generation of one shard, or
    a part of it.
    Beside a live writer it works where the backend can do that (``rocksdb``); where it can't, one task reads
    everything, and a writer, or another reader, makes it fail with `DatabaseLockedError`. Conditions on topic,
    client id, shard, position and time narrow what is read, see `topicstore.spark.selection`; this needs
    ``spark.sql.python.filterPushdown.enabled``, which `topicstore.spark.session` sets. A schema given
    with ``.schema(…)`` chooses columns; fewer of them are read faster.

Streaming, ``spark.readStream.format("topicstore")``
    The same options but ``until``, and
    ``maxMessagesPerTrigger``
                   most messages of a micro-batch, taken in order of positions over all shards.

    Offsets are positions, one a shard: a restart from the checkpoint goes on exactly where the last
    batch ended, whatever was compacted or begun since. If retention dropped what was not read yet, the query fails
    with `GenerationDroppedError`. Within a batch a shard's messages come in the order of `Database.replay`.

Writing, ``df.write.format("topicstore").mode("append")``
    ``backend``, ``layout``, ``shards``, ``durability``, ``late``, ``max_skew``
                   as for `topicstore.open`, where the database is made.
    ``staging``    directory for what tasks have written and nobody has committed; it must be the same for
                   driver and workers. By default beside the database.
    ``writer``, ``batch``
                   a name, and a whole number that grows with each write under this name. A batch that the
                   database has already is not stored again.

    Columns are those of `topicstore.SCHEMA`; all but ``topic`` and ``payload`` may be missing. Tasks
    stage their rows; what failed or was overtaken stays there, unread. The commit stores the rows of each
    shard in order of timestamp, partition and row, rows without a timestamp last, and notes how far it
    came in the same engine writes. Bad rows fail their task, and late ones the commit, before anything is stored. The
    lock is held during the commit only: `DatabaseLockedError` if somebody else has it, at the beginning too.
    A commit that dies half way is finished when the batch of its ``writer`` comes again; without a name, by the next
    write, whosever it is. If that has the very same rows, it is the interrupted one, run again, and not stored a second
    time. Who died when the commit had just ended can't know: a write that may come again then needs a ``writer``, as
    does one whose rows are made anew each time. What a driver that died has left in ``staging`` may be removed when
    nobody writes; rows that were not stored yet are given up with it.
    A database that is made has ``timestamps="message"``: positions go by the column ``timestamp``.

Streaming, ``df.writeStream.format("topicstore")``
    The options of writing but ``batch``. Each micro-batch is stored exactly once, also if the query dies in
    the middle of a commit and is restarted from its checkpoint. ``writer`` is by default the query's id, from the
    checkpoint at the option ``checkpointLocation``.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from .scan import TopicstoreReader
from .schema import MESSAGES, MESSAGES_WITH_IDS
from .settings import ReadSettings, WriteSettings
from .sink import TopicstoreStreamWriter, TopicstoreWriter
from .stream import TopicstoreStreamReader

__all__ = ["TopicstoreSource"]


class TopicstoreSource(DataSource):
    """Messages as rows. See the head of the module."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "topicstore"

    def schema(self) -> StructType:
        """Return the columns of a message."""
        return MESSAGES_WITH_IDS if ReadSettings.of(self.options).ids else MESSAGES

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the messages that are there now."""
        return TopicstoreReader(ReadSettings.of(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of the messages as they come."""
        return TopicstoreStreamReader(ReadSettings.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer that appends."""
        return TopicstoreWriter(WriteSettings.of(self.options, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return a writer that appends each micro-batch once."""
        return TopicstoreStreamWriter(WriteSettings.of(self.options, overwrite=overwrite))
