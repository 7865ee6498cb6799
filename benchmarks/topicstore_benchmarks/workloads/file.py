"""Workloads of a Parquet file: a user's own messages, or one of the real sets."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from topicstore.contract.batch import MessageBatch
from topicstore_conformance.subjects import datasets

from topicstore_benchmarks.results import DEVICE, WILDCARD

from .workload import Workload, WorkloadError, WorkloadOptions

__all__ = ["FileOptions", "FileWorkload"]

_PART = 50_000
_ASKED = 5


class FileOptions(WorkloadOptions, frozen=True, kw_only=True):
    """The file of a workload, and its requests."""

    path: str
    """With the columns of `topicstore.SCHEMA`, of which ``client_id``, ``qos``, ``retain`` and ``properties`` may
    be absent, in order of ``timestamp``. A relative path starts where the TOML file lies, or else in the folder
    of the real sets (`topicstore_conformance.subjects.datasets`)."""


class FileWorkload(Workload):
    """The first messages of a file."""

    Options = FileOptions
    replaceable = (WILDCARD, DEVICE)
    options: FileOptions

    @cached_property
    def _path(self) -> Path:
        beside = self.beside / self.options.path
        return beside if datasets.is_there(beside) else datasets.folder() / self.options.path

    def why_missing(self) -> str | None:
        """Return why the file can't be read, if so."""
        if datasets.is_there(self._path):
            return None
        folder = datasets.folder()
        return f"there is no {self.options.path} in {self.beside} or {folder}; {datasets.VARIABLE} names the latter"

    def identity(self) -> str:
        """Return the size of the file, and a hash of all its bytes."""
        with self._path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            return f"{file.tell()}-{digest}"

    @cached_property
    def _file(self) -> pq.ParquetFile:
        try:
            file = pq.ParquetFile(self._path)
            MessageBatch.from_arrow(pa.RecordBatch.from_pylist([], file.schema_arrow))
        except (OSError, ValueError, pa.ArrowException) as bad:
            raise WorkloadError(f"{self._path}: {bad}") from bad
        if "timestamp" not in file.schema_arrow.names:
            raise WorkloadError(f"{self._path}: the column 'timestamp' is missing")
        return file

    @property
    def parts(self) -> int:
        """The number of parts."""
        return max(1, -(-self._rows // _PART))

    @cached_property
    def _rows(self) -> int:
        rows: int = self._file.metadata.num_rows
        if rows == 0:
            raise WorkloadError(f"{self._path}: there are no messages in it")
        return min(rows, self.options.messages or rows)

    def part(self, number: int) -> pa.RecordBatch:
        """Return the messages of a part, checked."""
        first = number * _PART
        table = self._slice(first, min(_PART, self._rows - first))
        try:
            batch = MessageBatch.from_arrow(table.combine_chunks().to_batches()[0]).to_arrow()
        except ValueError as bad:
            raise WorkloadError(f"{self._path}, after row {first:,}: {bad}") from bad
        times = batch.column("timestamp")
        if times.null_count:
            raise WorkloadError(f"{self._path}, after row {first:,}: a timestamp is null")
        return batch

    def _slice(self, first: int, rows: int) -> pa.Table:
        """Read only the row groups that are needed."""
        metadata, groups, skipped, end = self._file.metadata, [], 0, 0
        for group in range(metadata.num_row_groups):
            start, end = end, end + metadata.row_group(group).num_rows
            if end <= first:
                skipped = end
            elif start < first + rows:
                groups.append(group)
        return self._file.read_row_groups(groups).slice(first - skipped, rows)

    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return the filters of the options, and such as fit the messages for requests that every workload has."""
        counts = Counter(self._file.read(columns=["topic"]).column("topic")[: self._rows].to_pylist())
        chosen = {WILDCARD: (busiest_wildcard(counts),), DEVICE: _around_the_median(counts)}
        return {**chosen, **self.options.requests}


def busiest_wildcard(counts: Counter[str]) -> str:
    """Return the filter, of a topic with one of its levels open, that matches most messages, but not most of all.

    At most half of them, if there is such a filter: another one reads about everything, as ``#`` does. ``#``,
    if there is but one topic.
    """
    found: Counter[str] = Counter()
    for topic, count in counts.items():
        levels = topic.split("/")
        for depth in range(topic.startswith("$"), len(levels)):  # wildcards in front don't match those with a dollar
            found["/".join([*levels[:depth], "+", *levels[depth + 1 :]])] += count
    half = counts.total() // 2
    narrow = {text: count for text, count in found.items() if count <= half}
    chosen = narrow or found
    return max(chosen, key=lambda text: (chosen[text], text)) if len(counts) > 1 else "#"


def _around_the_median(counts: Counter[str]) -> tuple[str, ...]:
    ranked = sorted(counts, key=lambda topic: (counts[topic], topic))
    middle = max(0, len(ranked) // 2 - _ASKED // 2)
    return tuple(ranked[middle : middle + _ASKED])
