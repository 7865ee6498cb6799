"""Parquet files as sources."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from topicstore import ImportSourceError, MessageBatch
from topicstore.storage.directory.files import convert_os_errors

from .arrow_mapping import ArrowMapping
from .rows import NO_PREFIX, BadRowError, Prefix, Rows
from .source import Origin, Source, whole_file

__all__ = ["ParquetSource"]


class ParquetSource(Source):
    """A Parquet file in which each row is a message."""

    format = "parquet"

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin)
        self._read = 0
        try:
            with convert_os_errors():
                self._file = pq.ParquetFile(origin.path)
            # Columns that can't be messages are refused before the first row is read.
            self._mapped = ArrowMapping(self._file.schema_arrow, self.mapping)
            MessageBatch.from_arrow(self._mapped(pa.RecordBatch.from_pylist([], self._file.schema_arrow)))
        except (OSError, ValueError, pa.ArrowException) as bad:
            raise ImportSourceError(f"{self.name}: {bad}") from bad

    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from ``skip`` on; row groups before that aren't read."""
        first, groups = 0, list(range(self._file.num_row_groups))
        while groups and first + (rows := self._file.metadata.row_group(groups[0]).num_rows) <= skip:
            first += rows
            del groups[0]
        try:
            for batch in self._file.iter_batches(size, row_groups=groups) if groups else ():
                end = first + batch.num_rows
                self._read = end
                if end > skip:
                    start = max(first, skip)
                    yield from self._rows(batch.slice(start - first), start)
                first = end
        except (OSError, pa.ArrowException) as bad:
            raise BadRowError(first, str(bad)) from bad

    def _rows(self, batch: pa.RecordBatch, first: int) -> Generator[Rows]:
        good = batch.num_rows
        try:
            yield Rows(self._mapped(batch), first, first + good, text=self._prefix)
        except BadRowError as bad:
            yield Rows(self._mapped(batch.slice(0, bad.row)), first, first + bad.row, text=self._prefix)
            raise BadRowError(first + bad.row, bad.reason) from bad

    @cached_property
    def _prefix(self) -> Prefix:
        """The prefix of the whole file if the source is identified by a name, which another file may get later."""
        return whole_file(self._origin.path, self.name) if self.named else NO_PREFIX

    def begins_with(self, prefix: Prefix) -> bool:
        """Return whether the prefix is that of the whole file."""
        return prefix == self._prefix

    def progress(self) -> tuple[float, float | None]:
        """Return the number of rows read, and the number of rows in the file."""
        return float(self._read), float(self._file.metadata.num_rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
