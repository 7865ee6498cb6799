"""The data source ``topicstore``.

Reading, ``spark.read.format("topicstore")``
    ``path``       the database's directory (also as the argument of ``load``).
    ``of``         ``messages`` (default); ``topics`` or ``clients``: what `Database.topics` and `Database.clients`
                   return, with the columns ``topic`` or ``client_id``, ``messages``, ``bytes``, ``first`` and ``last``.
                   One task sums up the counts that were made at storing. Goes with ``path`` and ``filter`` only.
    ``filter``     MQTT topic filter; default ``#``, which, as everywhere, leaves out topics that begin with ``$``.
    ``start``, ``until``
                   time range of positions, or of the messages' own times where positions go by those
                   (``timestamps="message"``); inclusive and exclusive: ISO 8601 (UTC unless it has a zone),
                   ``now``, ``-2h``, ``@`` seconds or microseconds since the epoch. Spark may keep a plan, so a
                   relative time counts from the first query of a frame.
    ``by``         ``timestamp``: ``start`` and ``until`` are compared with the messages' own times, in whatever
                   order those came; by default ``position``.
    ``ids``        ``true``: with the columns ``shard`` and ``position``.
    ``minPartitions``
                   large generations are divided by time until there are about so many partitions; by
                   default as many as this machine has cores.

    A query has at least the messages that were committed when it began, each once. Tasks also read what is committed
    until they begin, unless ``until`` bounds them. Each task reads one generation of one shard, or a part of it.
    Spark 4.3.0 plans a frame once: its next queries see later messages, but if one of its generations was dropped
    meanwhile, they fail with `GenerationDroppedError`, and the table must be loaded again.
    Reading works beside a live writer if the backend supports that (``rocksdb``); otherwise one task reads
    everything, and a writer, or another reader, makes the query fail with `DatabaseLockedError`.
    ``filter``, ``start`` and ``until`` narrow the read. Conditions on topic, client id, shard, position and time do so
    too (`topicstore.spark.options`) where Spark keeps a condition with its query, which `topicstore.spark.session`
    and ``register`` test. Spark 4.3.0 doesn't: there, Spark applies conditions to all rows of the table. A schema
    given with ``.schema(…)`` chooses columns; fewer of them are read faster.

Streaming, ``spark.readStream.format("topicstore")``
    The same options but ``until``, and
    ``maxMessagesPerTrigger``
                   most messages of a micro-batch, taken in order of positions over all shards.

    Offsets are positions, one for each shard: a restart from the checkpoint continues exactly where the last
    batch ended, whatever was compacted or begun since. They have the database's id: if another database lies at the
    path by then, the query fails with `WrongDatabaseError`, and with `PlaceAheadError` if the database has lost what
    was read, as when it was restored from an older copy. If retention dropped unread messages, the query fails
    with `GenerationDroppedError`. Within a batch a shard's messages come in the order of `Database.replay`.

Writing, ``df.write.format("topicstore").mode("append")``
    ``backend``, ``layout``, ``shards``, ``durability``, ``late``, ``max_skew``
                   as for `topicstore.open`, if the database is created.
    ``staging``    directory for rows that tasks have written and no commit has stored; it must be the same for
                   driver and workers. By default beside the database.
    ``writer``, ``batch``
                   a name, and a whole number that grows with each write under this name. A batch that the
                   database has already is not stored again.

    Columns are those of `topicstore.SCHEMA`; all but ``topic`` and ``payload`` may be missing. Tasks stage their
    rows; rows of an attempt that failed or was overtaken are never read. The commit stores the rows of each
    shard in order of timestamp, partition and row, rows without a timestamp last, and notes its progress in the
    same engine writes. Bad rows fail their task, and late ones the commit, before anything is stored. The lock is
    held during the commit only, and Spark's commits wait for each other: `DatabaseLockedError` if another program
    holds it, also at the beginning.
    A commit that dies half way is finished when the batch of its ``writer`` comes again, or the next one; without a
    name, by the next write of the database. If that has no name either, and the very same rows, it is the interrupted
    one, run again, and not stored a second time, also if other writes came in between (the latest 100 such are
    known). This doesn't cover a driver that died just after its commit had ended:
    a write that may come again then needs a ``writer``, as does one whose rows are different each time.
    Rows of an interrupted commit may be late when another write finishes it, because newer ones were stored since. They
    go to the directory ``refused-…`` in ``staging``, as Parquet, and a `RuntimeWarning` in the log of the driver says
    so, or an `InvalidMessageError` if they are the write's own: import them into another database, append them here
    without the column ``timestamp``, or remove them. A batch that comes again is finished whole or fails.
    Batches of one ``writer`` are written one after the other: a number below the latest counts as stored.
    Files that a dead driver has left in ``staging`` may be removed while nobody writes; rows that were not stored yet
    are lost with them.
    A new database has ``timestamps="message"``: positions go by the column ``timestamp``.

Streaming, ``df.writeStream.format("topicstore")``
    The options of writing except ``batch``. Each micro-batch is stored exactly once, also if the query dies in
    the middle of a commit and is restarted from its checkpoint. ``writer`` is by default the query's id, from the
    checkpoint at the option ``checkpointLocation``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType
from pyspark_topicstore.daemon import be_quiet

from .options import ReadSettings, WriteSettings
from .reading import PushingReader, TopicstoreReader
from .schema import MESSAGES, MESSAGES_WITH_IDS
from .sink import TopicstoreStreamWriter, TopicstoreWriter
from .stream import TopicstoreStreamReader
from .tallies import CLIENTS, TOPICS, TallyReader

be_quiet()  # in a worker in which Spark plans a query

__all__ = ["PushingSource", "TopicstoreSource"]


class TopicstoreSource(DataSource):
    """The data source: messages as rows. The module's docstring describes its options."""

    _messages: ClassVar[type[TopicstoreReader]] = TopicstoreReader

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "topicstore"

    def schema(self) -> StructType:
        """Return the columns of a message, or of the counts."""
        settings = ReadSettings.of(self.options)
        if settings.counted is not None:
            return TOPICS if settings.counted == "topics" else CLIENTS
        return MESSAGES_WITH_IDS if settings.ids else MESSAGES

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the messages, or of the counts."""
        settings = ReadSettings.of(self.options)
        return self._messages(settings, schema) if settings.counted is None else TallyReader(settings, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of the messages as they come."""
        return TopicstoreStreamReader(ReadSettings.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer that appends."""
        return TopicstoreWriter(WriteSettings.of(self.options, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return a writer that appends each micro-batch once."""
        return TopicstoreStreamWriter(WriteSettings.of(self.options, overwrite=overwrite))


class PushingSource(TopicstoreSource):
    """The same for a Spark that keeps a condition with its query: conditions narrow what is read."""

    _messages = PushingReader
