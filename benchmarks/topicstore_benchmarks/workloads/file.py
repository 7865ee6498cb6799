"""Workloads with the messages of a Parquet file: a user's own, or a data set of real messages."""

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
    """Path of a Parquet file with the columns of `topicstore.SCHEMA`, in order of ``timestamp``.

    The columns ``client_id``, ``qos``, ``retain`` and ``properties`` may be absent. A relative path is relative to the
    TOML file's directory or, if there is no such file, to the folder of `topicstore_conformance.subjects.datasets`.
    """


class FileWorkload(Workload):
    """A workload with the messages of a file, or the first of them."""

    Options = FileOptions
    replaceable = (WILDCARD, DEVICE)
    options: FileOptions

    @cached_property
    def _path(self) -> Path:
        beside = self.beside / self.options.path
        return beside if datasets.is_there(beside) else datasets.folder() / self.options.path

    def why_missing(self) -> str | None:
        """Return why the file can't be read, or None if it can."""
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
        """Return the number of parts."""
        return max(1, -(-self._rows // _PART))

    @cached_property
    def _rows(self) -> int:
        rows: int = self._file.metadata.num_rows
        if rows == 0:
            raise WorkloadError(f"{self._path}: there are no messages in it")
        return min(rows, self.options.messages or rows)

    def part(self, number: int) -> pa.RecordBatch:
        """Return the messages of a part. Raises `WorkloadError` if they are invalid or have no timestamp."""
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
        """Return rows of the file, reading only the row groups that contain them."""
        metadata, groups, skipped, end = self._file.metadata, [], 0, 0
        for group in range(metadata.num_row_groups):
            start, end = end, end + metadata.row_group(group).num_rows
            if end <= first:
                skipped = end
            elif start < first + rows:
                groups.append(group)
        return self._file.read_row_groups(groups).slice(first - skipped, rows)

    def requests(self) -> dict[str, tuple[str, ...]]:
        """Return topic filters by the request's name: those that every workload has, and those of the options.

        The filters that every workload has are chosen by the numbers of messages of the file's topics.
        """
        counts = Counter(self._file.read(columns=["topic"]).column("topic")[: self._rows].to_pylist())
        chosen = {WILDCARD: (busiest_wildcard(counts),), DEVICE: _around_the_median(counts)}
        return {**chosen, **self.options.requests}


def busiest_wildcard(counts: Counter[str]) -> str:
    """Return the filter, a topic with one level replaced with ``+``, that matches the most messages, but at most half.

    If every such filter matches more than half of the messages, returns the one that matches the most. Returns ``#`` if
    there is only one topic.
    """
    found: Counter[str] = Counter()
    for topic, count in counts.items():
        levels = topic.split("/")
        for depth in range(topic.startswith("$"), len(levels)):  # a leading wildcard doesn't match a leading dollar
            found["/".join([*levels[:depth], "+", *levels[depth + 1 :]])] += count
    half = counts.total() // 2
    narrow = {text: count for text, count in found.items() if count <= half}
    chosen = narrow or found
    return max(chosen, key=lambda text: (chosen[text], text)) if len(counts) > 1 else "#"


def _around_the_median(counts: Counter[str]) -> tuple[str, ...]:
    ranked = sorted(counts, key=lambda topic: (counts[topic], topic))
    middle = max(0, len(ranked) // 2 - _ASKED // 2)
    return tuple(ranked[middle : middle + _ASKED])
