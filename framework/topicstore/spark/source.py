"""The data source ``topicstore``.

Reading, ``spark.read.format("topicstore")``
    ``path``       the database's directory (also as the argument of ``load``).
    ``of``         ``messages`` (default); ``topics`` or ``clients``: what `Database.topics` and `Database.clients`
                   return, with the columns ``topic`` or ``client_id``, ``messages``, ``bytes``, ``first`` and ``last``.
                   One task adds up the counts that storing has made. Combines only with ``path`` and ``filter``.
    ``filter``     MQTT topic filter; default ``#``, which excludes topics that begin with ``$``, as MQTT says.
    ``start``, ``until``
                   time range, inclusive and exclusive, of positions, or of the messages' own times if positions
                   follow them (``timestamps="message"``). ISO 8601 (UTC unless it has a zone), ``now``, ``-2h``,
                   ``@`` seconds, or microseconds since the epoch. Spark may reuse a plan, so a relative time counts
                   from the first query of a frame.
    ``by``         ``timestamp``: ``start`` and ``until`` are compared with the messages' own times, even if the
                   messages were not stored in that order; by default ``position``.
    ``ids``        ``true``: adds the columns ``shard`` and ``position``.
    ``minPartitions``
                   the number of tasks that read, if there are enough messages. Tasks read several small generations,
                   also of several shards, or a part of a large one. The default is the default parallelism of the
                   session in which ``session`` or ``register`` has registered the source, otherwise the number of
                   this machine's cores.

    A query returns at least the messages that were committed when it began, each exactly once. Tasks also read messages
    committed before the task begins, unless ``until`` excludes them. Spark 4.3.0 plans a frame once. Its next queries
    see later messages, but if one of its generations was dropped in the meantime, they fail with
    `GenerationDroppedError`, and the table must be loaded again.
    Reading works beside a live writer if the backend supports that (``rocksdb``). Otherwise one task reads everything,
    and the query fails with `DatabaseLockedError` if another process has the database open.
    ``filter``, ``start`` and ``until`` narrow the read. Conditions on topic, client id, shard, position and time are
    pushed down (`topicstore.spark.options`) if Spark keeps the conditions of each query separate, which
    `topicstore.spark.session` and ``register`` test. Spark 4.3.0 doesn't: it applies conditions to all rows of the
    table. A schema given with ``.schema(…)`` selects columns; fewer columns are read faster.

Reading a cluster, ``spark.read.format("topicstore").option("cluster", url).load()``
    ``cluster``    the URL of the cluster's log store, instead of ``path``.
    ``cluster.…``  options of the log store, in lower case: ``cluster.timeout``; of an option with several entries one
                   each, such as ``cluster.config.region``.
    ``filter``, ``start``, ``until``, ``by``, ``ids``
                   as above.

    No site is needed, nor disturbed, and nothing is written to the log store: reading and listing objects suffice.
    Each task copies a shard from the newest base and the log's entries after it to Spark's directory for temporary
    files, and reads the copy. A query returns at least the messages that the cluster had acknowledged when it began,
    each exactly once, without those that were deleted or dropped with their generation. Raises `DatabaseNotFoundError`
    if the log store has no cluster, `UnknownPluginError` for an unknown scheme, and `LogStoreRefusedError` without
    permission.

Streaming, ``spark.readStream.format("topicstore")``
    The same options except ``of`` and ``until``, and
    ``maxMessagesPerTrigger``
                   maximum number of messages in a micro-batch, taken in order of positions over all shards.

    Offsets are positions, one for each shard. A restart from the checkpoint continues exactly where the last batch
    ended, even after a compaction or a new generation. An offset contains the database's id: if the path holds another
    database, the query fails with `WrongDatabaseError`. If the database has lost messages that were read, as after it
    was restored from an older copy, the query fails with `PlaceAheadError`. If retention dropped unread messages, the
    query fails with `GenerationDroppedError`. Within a batch, a shard's messages have the order of `Database.replay`.

Streaming from a cluster, ``spark.readStream.format("topicstore").option("cluster", url).load()``
    The options of reading a cluster except ``until``, and ``maxMessagesPerTrigger`` as above.

    No site is needed, and nothing is written to the log store. Each message that the cluster has acknowledged comes
    once, in order of positions within a shard, whichever sites have owned the shard. A micro-batch has all that was
    acknowledged when it was planned, or as much as the limit allows. Messages that were deleted before the
    micro-batch's end don't come. A repeated micro-batch has the same rows while the log has its entries. A restart from
    the checkpoint continues exactly where the last batch ended, also if the query read a site's directory before.
    A task reads the new entries of one shard's log. If they were truncated meanwhile, the task copies the shard from
    its newest base, as in a batch query, and reads the messages behind the offset: this also applies to the first
    micro-batch of a cluster with truncated logs, and to each one until a limited query has reached the log. Unread
    messages of a generation that was dropped come while the log has them; then the query fails with
    `GenerationDroppedError`, and a new query begins after them. The query fails with `WrongDatabaseError` if the log
    store holds another database, and with `PlaceAheadError` if it has lost messages that were read, or continues in
    another way after them.
    Each trigger sends about five requests a shard, and one for each new entry and task. Without an interval Spark asks
    up to a hundred times a second, so set one where the log store charges for requests:
    ``.trigger(processingTime="10 seconds")``.

Writing, ``df.write.format("topicstore").mode("append")``
    ``backend``, ``layout``, ``shards``, ``durability``, ``late``, ``max_skew``
                   as for `topicstore.open`, if the write creates the database.
    ``staging``    directory for rows that tasks have written and no commit has stored yet. The driver and all workers
                   must share it. By default it is beside the database.
    ``writer``, ``batch``
                   a name, and an integer that grows with each write under this name. A batch that the database
                   has already is not stored again.

    Columns are those of `topicstore.SCHEMA`; all except ``topic`` and ``payload`` may be missing. Tasks stage their
    rows; rows of attempts that failed, or that Spark didn't accept, are never read. The commit stores the rows of each
    shard in order of timestamp, partition and row, rows without a timestamp last. It records its progress in the same
    engine writes. An invalid row fails its task, and a late row fails the commit, before anything is stored.
    The database is locked only during the commit, and commits of other Spark writes wait. If another program has the
    database open, the write fails with `DatabaseLockedError`, at its beginning or at the commit.

    If a commit is interrupted, the same batch of its ``writer``, or the writer's next batch, finishes it. Without a
    ``writer``, the next write of the database does. If that write has no name either, and identical rows, it counts as
    a repetition, and its rows are not stored again. This also holds if other writes came in between; the last 100 such
    writes are remembered. It doesn't cover a driver that died just after its commit had ended: a write that may be
    repeated then needs a ``writer``, as does a write whose rows differ each time.
    When another write finishes an interrupted commit, some rows may be late, because newer messages were stored in the
    meantime. Late rows are written as Parquet to the directory ``refused-…`` in ``staging``. A `RuntimeWarning` in the
    driver's log reports them, or an `InvalidMessageError` if they belong to the repeated write itself. Import them into
    another database, append them here without the column ``timestamp``, or remove them. A repeated batch is either
    completed or fails.
    Batches of one ``writer`` must be written in order: a number below the latest counts as stored.
    Files that a dead driver has left in ``staging`` may be removed while no write runs. Rows that were not stored yet
    are then lost.
    A new database has ``timestamps="message"``: positions follow the column ``timestamp``.

Streaming, ``df.writeStream.format("topicstore")``
    The options of writing except ``batch``. Each micro-batch is stored exactly once, even if the query dies during a
    commit and is restarted from its checkpoint. The default of ``writer`` is the query's id, from the checkpoint that
    the option ``checkpointLocation`` names.
"""

from __future__ import annotations

import os
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

from .cluster import ClusterReader
from .cluster_stream import ClusterStreamReader
from .options import ReadSettings, WriteSettings
from .reading import PushingReader, TopicstoreReader
from .schema import MESSAGES, MESSAGES_WITH_IDS
from .sink import TopicstoreStreamWriter, TopicstoreWriter
from .stream import TopicstoreStreamReader
from .tallies import CLIENTS, TOPICS, TallyReader

be_quiet()  # configures the logs of the worker process in which Spark plans a query

__all__ = ["PushingSource", "TopicstoreSource"]


class TopicstoreSource(DataSource):
    """The data source ``topicstore``, with messages as rows. The module's docstring describes its options."""

    _messages: ClassVar[type[TopicstoreReader]] = TopicstoreReader
    tasks: ClassVar[int] = os.cpu_count() or 1
    """The default of the option ``minPartitions``."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "topicstore"

    def schema(self) -> StructType:
        """Return the columns of messages, or of the counts."""
        settings = ReadSettings.of(self.options)
        if settings.counted is not None:
            return TOPICS if settings.counted == "topics" else CLIENTS
        return MESSAGES_WITH_IDS if settings.ids else MESSAGES

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the messages, or of the counts."""
        settings = ReadSettings.of(self.options, self.tasks)
        if settings.cluster is not None:
            return ClusterReader(settings, settings.cluster, schema)
        return self._messages(settings, schema) if settings.counted is None else TallyReader(settings, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of new messages in micro-batches."""
        settings = ReadSettings.of(self.options, self.tasks)
        if settings.cluster is not None:
            return ClusterStreamReader(settings, settings.cluster, schema)
        return TopicstoreStreamReader(settings, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer that appends the rows of a batch query."""
        return TopicstoreWriter(WriteSettings.of(self.options, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return a writer that appends each micro-batch once."""
        return TopicstoreStreamWriter(WriteSettings.of(self.options, overwrite=overwrite))


class PushingSource(TopicstoreSource):
    """The data source for versions of Spark that keep each query's conditions separate: conditions are pushed down."""

    _messages = PushingReader
