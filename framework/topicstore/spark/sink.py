"""Writing: tasks stage, the commit promotes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from topicstore.contract.errors import InvalidArgumentError

from .commit import Batch, abort, check_unlocked, promote
from .settings import WriteSettings
from .staging import stage

__all__ = ["TopicstoreStreamWriter", "TopicstoreWriter"]


class _Staged(WriterCommitMessage):
    """What an attempt has written. Only those of the attempts that Spark takes reach the commit."""

    def __init__(self, write: str, shards: int, partition: int, attempt: str) -> None:
        self.write = write
        self.shards = shards
        self.partition = partition
        self.attempt = attempt


class _Staging:
    """What both writers do in tasks. Made once a write, and sent to all of them."""

    def __init__(self, settings: WriteSettings) -> None:
        self._settings = settings
        self._shards = check_unlocked(settings)
        self._write = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of a partition."""
        context = TaskContext.get()
        assert context is not None  # noqa: S101 - Spark calls this in tasks
        attempt = stage(iterator, Path(self._settings.staging, self._write), self._shards)
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
    """Appends what one query gives."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Store what was staged."""
        self._promote(messages, self._settings.writer, self._settings.batch)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what was staged."""
        self._discard(messages)


class TopicstoreStreamWriter(_Staging, DataSourceStreamArrowWriter):
    """Appends each micro-batch once."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Store what was staged, unless the database has the batch."""
        self._promote(messages, self._writer(), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Remove what was staged."""
        self._discard(messages)

    def _writer(self) -> str:
        """Return under which name batches count: a query with a new checkpoint begins to count anew."""
        if self._settings.writer is not None:
            return self._settings.writer
        if self._settings.checkpoint is None:
            raise InvalidArgumentError("a streaming query needs the option checkpointLocation, or writer")
        metadata = Path(self._settings.checkpoint.removeprefix("file://").removeprefix("file:"), "metadata")
        return f"query {json.loads(metadata.read_bytes())['id']}"
