"""Parquet files as sources."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from topicstore import ImportSourceError, MessageBatch

from .rows import BadRowError, Rows
from .source import Source

__all__ = ["ParquetSource"]

_ENDS = 1 << 20
"""Bytes at both ends by which earlier versions knew a file."""


class ParquetSource(Source):
    """A message a row."""

    format = "parquet"

    def __init__(self, path: Path, name: str, identify: Callable[[], str] | None, *, named: bool) -> None:
        super().__init__(name, identify, named=named)
        self._path = path
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

    def former_id(self) -> str | None:
        """Return its size and the XXH3 of its ends: it has no prefixes by which it could be known else."""
        if self.named:
            return None
        with self._path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            hasher = xxhash.xxh3_128(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            hasher.update(file.read(_ENDS))
        return f"content:{size}:{hasher.hexdigest()}"

    def progress(self) -> tuple[float, float | None]:
        """Return the rows that were read, of all."""
        return float(self._read), float(self._file.metadata.num_rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
