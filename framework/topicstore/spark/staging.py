"""Staged rows, which tasks have written and no commit has stored yet: a directory of files for each attempt.

::

    <staging>/<write>/<attempt>/shard-0000.arrow     Arrow IPC file of `topicstore.SCHEMA`

Each record batch of a file is a sorted run: rows in order of timestamps, rows without one last, and rows with equal
timestamps in the order in which the task received them. A later run holds rows that the task received later. Files are
fsynced before the attempt ends, and never changed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from topicstore.contract.arrow import SCHEMA
from topicstore.contract.batch import MessageBatch
from topicstore.contract.descriptors import naming
from topicstore.storage.directory.files import sync_directory
from topicstore.storage.shard_map import ShardMap

__all__ = [
    "in_order",
    "make_write_directory",
    "newest_of",
    "row_counts",
    "row_digests",
    "runs_of",
    "stage",
    "timestamps_of",
]

Timestamps = npt.NDArray[np.int64]

_RUN = 131_072
"""The number of rows in a run. Longer runs are fewer to merge, but a task holds one run in memory."""
_DIGESTS = 1 << 128
_NEVER = (1 << 62) - 1
"""The sort key of a row without a timestamp, higher than any timestamp."""


def stage(batches: Iterable[pa.RecordBatch], directory: Path, shards: int, mode: int) -> str:
    """Write rows into a new directory within ``directory``, by shard, fsync them, and return its name.

    Raises `InvalidMessageError` for rows that can't be stored.
    """
    make_write_directory(directory, mode)
    target = directory / uuid.uuid4().hex
    target.mkdir(mode)
    shard_map = ShardMap(shards)
    with ExitStack() as closing:
        files: dict[int, pa.RecordBatchFileWriter] = {}
        for batch in _gathered(batches):
            for shard, run in _runs(batch, shard_map):
                if shard not in files:
                    file = closing.enter_context(pa.OSFile(str(target / f"shard-{shard:04}.arrow"), "wb"))
                    files[shard] = closing.enter_context(pa.ipc.new_file(file, SCHEMA))
                files[shard].write_batch(run)
    _sync(target)
    return target.name


def make_write_directory(directory: Path, mode: int) -> None:
    """Create the directory of a write, and its parent for all writes, with ``mode``, unless they exist.

    Another write that ends may remove the parent at any moment, so the creation is repeated.
    """
    while True:
        directory.parent.mkdir(mode, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            directory.mkdir(mode, exist_ok=True)
            return


def _sync(directory: Path) -> None:
    for path in directory.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            with naming(path):
                os.fsync(handle)
        finally:
            os.close(handle)
    sync_directory(directory)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Check the rows, and yield them in record batches of `topicstore.SCHEMA` with about `_RUN` rows each."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(_checked(batch))
        if sum(part.num_rows for part in held) >= _RUN:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(batches) if len(batches) > 1 else batches[0]


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    return MessageBatch.from_arrow(batch).to_arrow()


def _runs(batch: pa.RecordBatch, shard_map: ShardMap) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each shard that has rows in the batch, with these rows sorted by timestamp."""
    batch = _sorted(batch)
    clients = batch.column("client_id").dictionary_encode()
    shards = np.array([shard_map.of(client) for client in clients.dictionary.to_pylist()], dtype=np.intp)
    shard_of_row = shards[clients.indices.to_numpy()]
    touched = np.unique(shards).tolist()
    if len(touched) == 1:
        yield touched[0], batch
        return
    for shard in touched:
        yield shard, batch.take(pa.array(np.flatnonzero(shard_of_row == shard)))


def _sorted(batch: pa.RecordBatch) -> pa.RecordBatch:
    timestamps = timestamps_of(batch)
    if (timestamps[1:] >= timestamps[:-1]).all():
        return batch
    return batch.take(pa.array(np.argsort(timestamps, kind="stable")))


def timestamps_of(batch: pa.RecordBatch) -> Timestamps:
    """Return the timestamps in microseconds; rows without one get `_NEVER`, which is higher than any timestamp."""
    column = batch.column("timestamp").cast(pa.int64())
    filled: Timestamps = pc.fill_null(column, _NEVER).to_numpy(zero_copy_only=False)
    return filled


def runs_of(attempts: Iterable[Path], shard: int) -> list[pa.RecordBatch]:
    """Return the runs of a shard, attempt by attempt, as memory-mapped record batches."""
    runs = []
    for attempt in attempts:
        path = attempt / f"shard-{shard:04}.arrow"
        if path.exists():
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            runs += [file.get_batch(number) for number in range(file.num_record_batches)]
    return runs


def row_counts(attempts: Iterable[Path], shards: int) -> list[int]:
    """Return the number of rows that the attempts have staged, by shard."""
    found = list(attempts)
    return [sum(run.num_rows for run in runs_of(found, shard)) for shard in range(shards)]


def row_digests(attempts: Iterable[Path], shards: int) -> list[bytes]:
    """Return a digest of each shard's rows, which doesn't depend on the order of rows or attempts."""
    found = list(attempts)
    sums = [sum(map(_digest, runs_of(found, shard))) % _DIGESTS for shard in range(shards)]
    return [digest.to_bytes(16, "big") for digest in sums]


def _digest(run: pa.RecordBatch) -> int:
    """Return the sum of the 128-bit digests of a run's rows."""
    columns = (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in run.columns)
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    return sum(map(xxhash.xxh3_128_intdigest, map(msgspec.msgpack.encode, rows)))


def in_order(runs: list[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Merge sorted runs by timestamp, stably, and yield batches of at most ``rows`` rows.

    Memory holds the rows of one batch, and the timestamps of all rows.
    """
    timestamps = [timestamps_of(run) for run in runs]
    ends = np.sort(np.concatenate([*timestamps, np.empty(0, dtype=np.int64)]))[rows::rows]
    # The ends of time windows, each of which has at most ``rows`` rows, or a single timestamp.
    starts = [0] * len(runs)
    for end in [*np.unique([ends, ends + 1]).tolist(), _NEVER + 1]:
        stops = [int(np.searchsorted(times, end)) for times in timestamps]
        parts = [run[start:stop] for run, start, stop in zip(runs, starts, stops, strict=True) if start < stop]
        starts = stops
        if sum(part.num_rows for part in parts) <= rows:
            parts = [_sorted(pa.concat_batches(parts))] if parts else []
        for part in parts:
            yield from (part[start : start + rows] for start in range(0, part.num_rows, rows))


def newest_of(run: pa.RecordBatch) -> int:
    """Return the highest timestamp of a run in microseconds; 0 if no row has one."""
    return pc.max(run.column("timestamp").cast(pa.int64())).as_py() or 0
