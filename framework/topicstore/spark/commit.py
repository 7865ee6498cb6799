"""The commit of a write: what tasks have staged goes into the database, each row once.

Beside the attempts of a write lies what its commit takes of them, on disk before the first row is stored::

    <staging>/<write>/commit.json    {"shards": 4, "attempts": ["<attempt>", …]}    in order of partitions

Stored form (state keyspace of every shard)::

    "spark/" writer      -> record (see `topicstore.shard.record_codec`) of version 1,
                            batch, write, rows, complete, staging
    "spark-write/" write -> the same, of a write whose writer has no name, until it has ended

``rows`` says how many of the shard's rows of the batch are stored; it changes in the engine write that stores them.
``complete``, of shard 0, says that all rows of all shards are. So a commit that was interrupted
goes on from there when its batch comes again, with the rows that were staged then, whatever their order is now.

What has no name is finished by whoever writes next, from ``staging``, which is where its rows lie. It has ended when
their directory has another name; if it was interrupted before, and the next write without a name has the very same
rows, then it is the same write, run again, and not stored a second time.
"""

from __future__ import annotations

import os
import shutil
import warnings
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
from .staging import in_order, newest_of, runs_of, same_rows

__all__ = ["Batch", "abort", "check_unlocked", "promote"]

_VERSION = 1
_PREFIX = b"spark/"
_NAMELESS = b"spark-write/"
_ENDED = ".ended-"
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
    staging: str = ""
    """Above the directory of ``write``, if the writer has no name."""


_CODEC = RecordCodec(_Progress, _VERSION)


@attrs.frozen(kw_only=True)
class Batch:
    """One write."""

    writer: str | None
    """None: it is known by its rows, and only as long as it has not ended."""
    number: int
    write: str
    """The name of its directory."""
    shards: int
    """By which its rows are divided."""
    attempts: Sequence[str] = ()
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

    If storing fails when some of it may be stored, what was staged stays: the rest is stored when the writer's batch
    comes again, or without a writer's name by whoever writes next.
    """
    staging = Path(settings.staging)
    _write_commit(staging / batch.write, _Commit(batch.shards, list(batch.attempts)))
    promotion: _Promotion | None = None
    try:
        with _opened(settings) as db:
            if not _finish_interrupted(db, staging, batch):
                promotion = _Promotion(db, staging, batch)
                promotion.run()
                promotion.end()
    except BaseException:
        if promotion is None or not promotion.stored:
            _discard(staging, {batch.write})
        raise
    _discard(staging, {batch.write} if promotion is None else {batch.write, promotion.write})


def _finish_interrupted(db: Database, staging: Path, batch: Batch) -> bool:
    """Finish writes without a name whose commit was interrupted; say whether the batch is one of them, run again."""
    again = False
    for interrupted in _interrupted(db):
        directory = interrupted.directory
        if directory.exists():
            try:
                interrupted.run()
            except InvalidMessageError as bad:
                bad.add_note(
                    f"It is of an earlier write, whose commit was interrupted. To leave away the rest of its rows, "
                    f"remove {directory}"
                )
                raise
            again = again or (batch.writer is None and interrupted.same_as(staging / batch.write))
        elif not interrupted.complete:
            warnings.warn(
                f"an earlier write was interrupted, and is stored in part: the rest of its rows, staged in "
                f"{directory}, is gone",
                RuntimeWarning,
                stacklevel=3,
            )
        interrupted.end()
    return again


def _interrupted(db: Database) -> list[_Promotion]:
    """Return the writes without a name that have not ended."""
    found = {
        key: _decode(shard.number, key, stored)
        for shard in db.storage.shards
        for key, stored in db.state(shard.number).scan(_NAMELESS)
    }
    shards = db.manifest.shards
    return [
        _Promotion(db, Path(one.staging), Batch(writer=None, number=one.batch, write=one.write, shards=shards))
        for one in found.values()
    ]


def abort(settings: WriteSettings, writes: Iterable[str]) -> None:
    """Remove what was staged for writes, but for one whose commit has begun: `promote` has seen to that."""
    staging = Path(settings.staging)
    _discard(staging, {write for write in writes if not (staging / write / _COMMIT).exists()})


def _discard(staging: Path, writes: Iterable[str]) -> None:
    """Remove the directories of writes, those that have ended, and the one above if nothing is left in it."""
    for directory in (*(staging / write for write in writes), *staging.glob(f"{_ENDED}*")):
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        staging.rmdir()


def _write_commit(directory: Path, commit: _Commit) -> None:
    directory.mkdir(parents=True, exist_ok=True)  # where there were no rows
    with (directory / _COMMIT).open("wb") as file:
        file.write(msgspec.json.encode(commit))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def _read_commit(directory: Path) -> _Commit:
    return msgspec.json.decode((directory / _COMMIT).read_bytes(), type=_Commit)


def _attempts_in(directory: Path) -> list[Path]:
    """Return what a commit takes of a write, in order of partitions."""
    return [directory / name for name in _read_commit(directory).attempts]


def _decode(shard: int, key: bytes, stored: bytes) -> _Progress:
    return _CODEC.decode(key, stored, f"shard {shard}, state {key!r}")


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
        self._key = _NAMELESS + batch.write.encode() if batch.writer is None else _PREFIX + batch.writer.encode()
        found = {shard.number: self._load(shard.number) for shard in db.storage.shards}
        self._latest = found[0]
        self._begun = {shard: p for shard, p in found.items() if p is not None and p.batch == batch.number}
        """What an earlier commit of the batch noted."""
        self.write = next((progress.write for progress in self._begun.values()), batch.write)
        """The write whose rows are stored: the one with which the batch was begun."""
        self.stored = bool(self._begun)
        """Whether rows of the batch may be in the database."""

    @property
    def directory(self) -> Path:
        """Where the rows were staged."""
        return self._staging / self.write

    def run(self) -> None:
        """Store what is missing."""
        if self.complete:
            return
        runs = self._runs()
        self._check_times(runs)
        self._store(runs)
        self._db.state(0).write([self._noted(0, complete=True)])

    def end(self) -> None:
        """Note nothing more of a write without a name: what was staged stands for it no more."""
        if self._batch.writer is None:
            with suppress(FileNotFoundError):
                self.directory.rename(self.directory.with_name(f"{_ENDED}{self.write}"))
                sync_directory(self._staging)
            for shard in reversed(range(self._db.manifest.shards)):  # shard 0, which says that it is complete, last
                self._db.state(shard).write([StateWrite(self._key, None)])
            _discard(self._staging, ())

    def same_as(self, other: Path) -> bool:
        """Say whether another write has staged the very same rows, in whatever order."""
        one, two = _attempts_in(self.directory), _attempts_in(other)
        return all(same_rows(one, two, shard) for shard in range(self._db.manifest.shards))

    @property
    def complete(self) -> bool:
        """Say whether the database has the batch: the next of a writer begins only when one is complete."""
        latest, number = self._latest, self._batch.number
        return latest is not None and (latest.batch > number or (latest.batch == number and latest.complete))

    def _load(self, shard: int) -> _Progress | None:
        stored = self._db.state(shard).get(self._key)
        return None if stored is None else _decode(shard, self._key, stored)

    def _runs(self) -> dict[int, list[pa.RecordBatch]]:
        """Return the runs of each shard."""
        try:
            commit = _read_commit(self.directory)
        except FileNotFoundError as gone:
            raise EngineError(
                f"batch {self._batch.number} of writer {self._batch.writer!r} is stored in part, and the rest of its "
                f"rows, staged in {self.directory}, is gone"
            ) from gone
        if commit.shards != self._db.manifest.shards:
            raise ManifestMismatchError(
                f"rows were staged for {commit.shards} shards, and the database that somebody made meanwhile "
                f"has {self._db.manifest.shards}; write again"
            )
        attempts = _attempts_in(self.directory)
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
        staging = str(self._staging) if self._batch.writer is None else ""
        progress = _Progress(_VERSION, self._batch.number, self.write, rows, complete, staging)
        return StateWrite(self._key, _CODEC.encode(self._key, progress))


def _behind(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Leave out the first rows."""
    for batch in batches:
        if rows < batch.num_rows:
            yield batch[rows:]
        rows = max(0, rows - batch.num_rows)
