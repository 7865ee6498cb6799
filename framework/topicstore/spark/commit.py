"""The commit of a write: what tasks have staged goes into the database, each row once.

Beside the attempts of a write lies what its commit takes of them, on disk before the first row is stored::

    <staging>/<write>/commit.json    {"shards": 4, "attempts": ["<attempt>", …]}    in order of partitions

Stored form (state keyspace of every shard)::

    "spark/" writer -> record (see `topicstore.shard.record_codec`) of version 1,
                       batch, write, rows, complete

``rows`` says how many of the shard's rows of the batch are stored; it changes in the engine write that stores them.
``complete``, of shard 0, says that all rows of all shards are. So a commit that was interrupted
goes on from there when its batch comes again, with the rows that were staged then, whatever their order is now.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pyarrow as pa

from topicstore.contract.errors import (
    EngineError,
    InvalidMessageError,
    ManifestMismatchError,
    TimestampAheadError,
)
from topicstore.contract.positions import span_text
from topicstore.contract.state import StateWrite
from topicstore.database import Database
from topicstore.opening import open  # noqa: A004 - the name people know
from topicstore.shard.record_codec import RecordCodec
from topicstore.storage.directory_lock import DirectoryLock
from topicstore.storage.durable_files import sync_directory
from topicstore.storage.manifest import read_manifest

from .settings import WriteSettings
from .staging import in_order, newest_of, runs_of

__all__ = ["Batch", "abort", "check_unlocked", "promote"]

_VERSION = 1
_PREFIX = b"spark/"
_COMMIT = "commit.json"
_ROWS = 131_072
"""Most rows in memory: those of the first call to store, which has some of each shard."""
_LEAST_ROWS = 1_024
"""Of a shard, that one call takes: with fewer a call costs more than its rows."""


class _Commit(msgspec.Struct, frozen=True):
    shards: int
    attempts: list[str]


class _Progress(msgspec.Struct, frozen=True, array_like=True):
    version: int
    batch: int
    write: str
    rows: int
    complete: bool = False


_CODEC = RecordCodec(_Progress, _VERSION)


@attrs.frozen(kw_only=True)
class Batch:
    """One write."""

    writer: str | None
    """None: nobody will ask for it again, and nothing is noted for good."""
    number: int
    write: str
    """The name of its directory."""
    shards: int
    """By which its rows are divided."""
    attempts: Sequence[str]
    """Of all partitions, in their order."""


def check_unlocked(settings: WriteSettings) -> int:
    """Return how many shards the database has, or will have. Raises `DatabaseLockedError` if it is open elsewhere."""
    directory = Path(settings.path)
    manifest = read_manifest(directory)
    if manifest is None:
        return int(settings.making.get("shards", 1))
    DirectoryLock(directory).release()
    return manifest.shards


def promote(settings: WriteSettings, batch: Batch) -> None:
    """Store a batch unless the database has it, and remove what was staged.

    If storing fails when some of it may be stored, what was staged stays, for when a writer's batch comes again.
    """
    staging = Path(settings.staging)
    _write_commit(staging / batch.write, _Commit(batch.shards, list(batch.attempts)))
    promotion: _Promotion | None = None
    try:
        with _opened(settings) as db:
            promotion = _Promotion(db, staging, batch)
            promotion.run()
    except BaseException:
        if promotion is None or not promotion.stored or batch.writer is None:
            _discard(staging, {batch.write})
        raise
    _discard(staging, {batch.write, promotion.write})


def abort(settings: WriteSettings, writes: Iterable[str]) -> None:
    """Remove what was staged for writes, but for one whose commit has begun: `promote` has seen to that."""
    staging = Path(settings.staging)
    _discard(staging, {write for write in writes if not (staging / write / _COMMIT).exists()})


def _discard(staging: Path, writes: Iterable[str]) -> None:
    """Remove the directories of writes, and the one above if nothing is left in it."""
    for write in writes:
        shutil.rmtree(staging / write, ignore_errors=True)
    with suppress(OSError):
        staging.rmdir()


def _write_commit(directory: Path, commit: _Commit) -> None:
    directory.mkdir(parents=True, exist_ok=True)  # where there were no rows
    with (directory / _COMMIT).open("wb") as file:
        file.write(msgspec.json.encode(commit))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def _opened(settings: WriteSettings) -> Database:
    manifest = read_manifest(Path(settings.path))
    making: dict[str, Any] = {"timestamps": "message"} if manifest is None or not manifest.complete else {}
    return open(settings.path, auto_compact=False, **making, **settings.making)


class _Promotion:
    """One commit, in an open database."""

    def __init__(self, db: Database, staging: Path, batch: Batch) -> None:
        self._db = db
        self._staging = staging
        self._batch = batch
        self._key = _PREFIX + (batch.writer or f"write {batch.write}").encode()
        found = {shard.number: self._load(shard.number) for shard in db.storage.shards}
        self._latest = found[0]
        self._begun = {shard: p for shard, p in found.items() if p is not None and p.batch == batch.number}
        """What an earlier commit of the batch noted."""
        self.write = next((progress.write for progress in self._begun.values()), batch.write)
        """The write whose rows are stored: the one with which the batch was begun."""
        self.stored = bool(self._begun)
        """Whether rows of the batch may be in the database."""

    def run(self) -> None:
        """Store what is missing."""
        if self._complete():
            return
        runs = self._runs()
        self._check_times(runs)
        self._store(runs)
        self._finish()

    def _complete(self) -> bool:
        """Say whether the database has the batch: the next of a writer begins only when one is complete."""
        latest, number = self._latest, self._batch.number
        return latest is not None and (latest.batch > number or (latest.batch == number and latest.complete))

    def _load(self, shard: int) -> _Progress | None:
        stored = self._db.state(shard).get(self._key)
        if stored is None:
            return None
        return _CODEC.decode(self._key, stored, f"shard {shard}, state {self._key!r}")

    def _runs(self) -> dict[int, list[pa.RecordBatch]]:
        """Return the runs of each shard."""
        directory = self._staging / self.write
        try:
            commit = msgspec.json.decode((directory / _COMMIT).read_bytes(), type=_Commit)
        except FileNotFoundError as gone:
            raise EngineError(
                f"batch {self._batch.number} of writer {self._batch.writer!r} is stored in part, and the rest of its "
                f"rows, staged in {directory}, is gone"
            ) from gone
        if commit.shards != self._db.manifest.shards:
            raise ManifestMismatchError(
                f"rows were staged for {commit.shards} shards, and the database that somebody made meanwhile "
                f"has {self._db.manifest.shards}; write again"
            )
        attempts = [directory / name for name in commit.attempts]
        return {shard: runs_of(attempts, shard) for shard in range(commit.shards)}

    def _check_times(self, runs: Mapping[int, list[pa.RecordBatch]]) -> None:
        """Refuse the whole write for a bad clock. Of late rows the first come first, and the store refuses them."""
        manifest = self._db.manifest
        if manifest.timestamps == "message":
            newest = max((newest_of(run) for of_shard in runs.values() for run in of_shard), default=0)
            ahead = newest - self._db.clock()
            if ahead > manifest.max_skew * 1e6:
                raise TimestampAheadError(
                    f"a row's time lies {span_text(ahead)} ahead of the clock; {manifest.max_skew:g} s are allowed"
                )

    def _store(self, runs: Mapping[int, list[pa.RecordBatch]]) -> None:
        """Store the first rows of all shards together, so that what is refused is refused whole, then the others."""
        rows = max(_ROWS // len(runs), _LEAST_ROWS)
        done = dict.fromkeys(runs, 0) | {shard: progress.rows for shard, progress in self._begun.items()}
        rest = {shard: _behind(in_order(of_shard, rows), done[shard]) for shard, of_shard in runs.items()}
        first = {shard: part for shard, batches in rest.items() for part in islice(batches, 1)}
        if first:
            self._store_parts(first, done)
        for shard, batches in rest.items():
            for part in batches:
                self._store_parts({shard: part}, done)

    def _store_parts(self, parts: Mapping[int, pa.RecordBatch], done: dict[int, int]) -> None:
        """Store rows, and with them how many of each shard are stored then."""
        for shard, part in parts.items():
            done[shard] += part.num_rows
        before, self.stored = self.stored, True
        try:
            self._db.store(
                pa.concat_batches(list(parts.values())), state={shard: [self._noted(done[shard])] for shard in parts}
            )
        except InvalidMessageError:  # nothing of the call was stored
            self.stored = before
            raise

    def _noted(self, rows: int, *, complete: bool = False) -> StateWrite:
        progress = _Progress(_VERSION, self._batch.number, self.write, rows, complete)
        return StateWrite(self._key, _CODEC.encode(self._key, progress))

    def _finish(self) -> None:
        if self._batch.writer is not None:
            self._db.state(0).write([self._noted(0, complete=True)])
            return
        for shard in range(self._db.manifest.shards):
            self._db.state(shard).write([StateWrite(self._key, None)])


def _behind(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Leave out the first rows."""
    for batch in batches:
        if rows < batch.num_rows:
            yield batch[rows:]
        rows = max(0, rows - batch.num_rows)
