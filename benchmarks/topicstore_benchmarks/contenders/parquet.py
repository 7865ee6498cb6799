"""A limit of files: Parquet, written in large pieces and read back into Arrow.

Nothing can be read before the file is closed, a crash takes all of it, and there is no order by topic and no
index: a store that is slower than this does these things.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import topicstore
from topicstore import Message
from topicstore.contract.batch import MessageBatch

from .limit import Limit

__all__ = ["ParquetLimit"]

_ROW_GROUP = 100_000


class ParquetLimit(Limit):
    """One file, compressed with zstd, a row group for 100,000 messages."""

    def open(self) -> None:
        """Begin a file, unless one exists to be read."""
        self.path.mkdir(exist_ok=True)
        self._file = self.path / "messages.parquet"
        self._held: list[pa.RecordBatch] = []
        self._writer = None
        if not self._file.exists():
            self._writer = pq.ParquetWriter(self._file, topicstore.SCHEMA, compression="zstd")

    def encode(self, batch: list[Message]) -> pa.RecordBatch:
        """Return columns."""
        return MessageBatch.from_messages(batch).to_arrow()

    def store(self, batch: Any) -> None:
        """Hold a prepared batch, and write a row group when there are enough messages for one."""
        self._held.append(batch)
        if sum(held.num_rows for held in self._held) >= _ROW_GROUP:
            self.finish()

    def finish(self) -> None:
        """Write the messages that are held back."""
        if self._held and self._writer is not None:
            self._writer.write_table(pa.Table.from_batches(self._held))
            self._held = []

    def scan(self) -> int:
        """Read all columns into Arrow."""
        rows: int = pq.read_table(self._file).num_rows
        return rows

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return all messages."""
        for batch in pq.ParquetFile(self._file).iter_batches():
            yield from MessageBatch.from_arrow(batch).to_messages()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()

    def versions(self) -> Mapping[str, str]:
        """Return the version of Arrow."""
        return {"pyarrow": version("pyarrow")}

    def settings(self) -> Mapping[str, object]:
        """Return the settings that differ from Arrow's defaults."""
        return {"compression": "zstd", "row group": _ROW_GROUP}
