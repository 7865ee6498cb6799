"""The writers of the data source: tasks stage rows, and the commit stores them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from topicstore.contract.errors import InvalidArgumentError
from topicstore.storage.directory.files import permissions_of

from .commit import abort, check_unlocked, promote
from .options import WriteSettings
from .promotion import Batch
from .staging import stage

__all__ = ["TopicstoreStreamWriter", "TopicstoreWriter"]


class _Staged(WriterCommitMessage):
    """A task's report of its staged rows. Spark passes only the reports of accepted attempts to ``commit``."""

    def __init__(self, write: str, shards: int, partition: int, attempt: str) -> None:
        self.write = write
        self.shards = shards
        self.partition = partition
        self.attempt = attempt


class _Staging:
    """The common base of both writers. One object is made for each write, and is sent to all of its tasks."""

    def __init__(self, settings: WriteSettings) -> None:
        self._settings = settings
        self._shards = check_unlocked(settings)
        self._permissions = permissions_of(Path(settings.path))
        self._write = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a partition."""
        context = TaskContext.get()
        assert context is not None  # noqa: S101 - Spark calls this in tasks
        attempt = stage(iterator, Path(self._settings.staging, self._write), self._shards, self._permissions)
        return _Staged(self._write, self._shards, context.partitionId(), attempt)

    def _promote(self, messages: Sequence[WriterCommitMessage | None], writer: str | None, number: int) -> None:
        staged = sorted((m for m in messages if isinstance(m, _Staged)), key=lambda message: message.partition)
        if staged:
            batch = Batch(
                writer=writer,
                number=number,
                write=staged[0].write,
                shards=staged[0].shards,
                attempts=[message.attempt for message in staged],
            )
            promote(self._settings, batch)

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        abort(self._settings, {self._write, *(message.write for message in messages if isinstance(message, _Staged))})


class TopicstoreWriter(_Staging, DataSourceArrowWriter):
    """A writer that appends the rows of one query."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Store the staged rows."""
        self._promote(messages, self._settings.writer, self._settings.batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the staged rows."""
        self._discard(messages)


class TopicstoreStreamWriter(_Staging, DataSourceStreamArrowWriter):
    """A writer that appends each micro-batch once."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Store the staged rows, unless the database has the batch."""
        self._promote(messages, self._writer(), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Remove the staged rows."""
        self._discard(messages)

    def _writer(self) -> str:
        """Return the writer's name: the option, or the query's id from its checkpoint.

        The id makes batch numbers unique, because a query with a new checkpoint counts from 0 again.
        """
        if self._settings.writer is not None:
            return self._settings.writer
        if self._settings.checkpoint is None:
            raise InvalidArgumentError("a streaming query needs the option checkpointLocation, or writer")
        metadata = Path(self._settings.checkpoint.removeprefix("file://").removeprefix("file:"), "metadata")
        return f"query {json.loads(metadata.read_bytes())['id']}"
