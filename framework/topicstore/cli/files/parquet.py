"""Parquet files as sources."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from topicstore import ImportSourceError, MessageBatch

from .rows import BadRowError, Rows
from .source import Source

__all__ = ["ParquetSource"]


class ParquetSource(Source):
    """A message a row."""

    format = "parquet"

    def __init__(self, path: Path, name: str, source_id: str | None, *, named: bool) -> None:
        super().__init__(name, source_id, named=named)
        self._read = 0
        try:
            self._file = pq.ParquetFile(path)
            # Columns that can't be messages are refused before the first row.
            MessageBatch.from_arrow(pa.RecordBatch.from_pylist([], self._file.schema_arrow))
        except (OSError, ValueError, pa.ArrowException) as bad:
            raise ImportSourceError(f"{name}: {bad}") from bad

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
                    yield Rows(batch.slice(start - first), start, end)
                first = end
        except (OSError, pa.ArrowException) as bad:
            raise BadRowError(first, str(bad)) from bad

    def progress(self) -> tuple[float, float | None]:
        """Return the rows that were read, of all."""
        return float(self._read), float(self._file.metadata.num_rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
