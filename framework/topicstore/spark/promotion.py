"""One commit in an open database: stores staged rows exactly once, however often the commit is interrupted.

A write's directory holds its tasks' attempts and a record of the commit, which is fsynced before the first row is
stored::

    <staging>/<write>/commit.json    {"shards": 4, "attempts": ["<attempt>", …]}    in order of partitions

Stored form (state keyspace of every shard)::

    "spark/" writer      -> record (see `topicstore.shard.record_codec`) of version 1,
                            batch, write, rows, complete, staging
    "spark-write/" write -> the same, of a write whose writer has no name, until it has ended

and of shard 0::

    "spark-finished/" write -> record of version 1 of a write without a name whose interrupted commit another write has
                               finished: time, rows and digest of each shard, and the reason if rows were put aside.
                               Removed when the same rows come again; at most the latest 100 are kept.

``rows`` is the number of the batch's rows that are done in the shard, updated in the engine write that stores them.
``complete``, in shard 0, says that all rows of all shards are done. So an interrupted commit continues from there, with
the rows that it had staged, even if a repetition of the query returns its rows in another order.

A commit has ended when the directory of its rows was renamed; then the state of a write without a name is removed.

When another write finishes an interrupted commit, the database may refuse rows as late, because newer messages were
stored in the meantime. Before they count as done, they are written to files that are never removed automatically::

    <staging>/refused-<write>/shard-0000-from-000000131072.parquet    rows of `topicstore.SCHEMA`, from that one on

Rows that can't be read stay unchanged, in ``<staging>/unreadable-<write>``.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from topicstore.contract.descriptors import naming
from topicstore.contract.errors import (
    EngineError,
    InvalidMessageError,
    LateMessageError,
    ManifestMismatchError,
    TimestampAheadError,
)
from topicstore.contract.positions import span_text
from topicstore.contract.state import StateWrite
from topicstore.database import Database
from topicstore.shard.record_codec import RecordCodec
from topicstore.storage.directory.files import permissions_of, replace_file, sync_directory

from .staging import in_order, make_write_directory, newest_of, row_counts, row_digests, runs_of, timestamps_of

__all__ = [
    "Batch",
    "CommitJob",
    "UnreadableRowsError",
    "discard",
    "finished_before",
    "has_commit",
    "interrupted_before",
    "write_commit",
]

_VERSION = 1
_PREFIX = b"spark/"
_NAMELESS = b"spark-write/"
_FINISHED = b"spark-finished/"
_MOST_FINISHED = 100
_ENDED = ".ended-"
_REFUSED = "refused-"
_UNREADABLE = "unreadable-"
_COMMIT = "commit.json"
_ROWS = 131_072
"""The maximum number of rows in memory, divided among the shards in the first call of `Database.store`."""
_LEAST_ROWS = 1_024
"""The minimum number of rows per shard in one call; with fewer, the call costs more than its rows."""


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
    """The staging directory, which contains the directory of ``write``."""


class _Finished(msgspec.Struct, frozen=True, array_like=True):
    version: int
    time: int
    rows: list[int]
    digests: list[bytes]
    refused: str = ""


_CODEC = RecordCodec(_Progress, _VERSION)
_FINISHED_CODEC = RecordCodec(_Finished, _VERSION)


@attrs.frozen(kw_only=True)
class Batch:
    """One write: the result of a batch query, or a micro-batch of a streaming query."""

    writer: str | None
    """The writer's name. None: only its rows identify the write, and only until it has ended."""
    number: int
    write: str
    """The name of the write's directory."""
    shards: int
    """The number of shards into which the rows are divided."""
    attempts: Sequence[str] = ()
    """The names of the committed attempts, in order of partitions."""


class UnreadableRowsError(EngineError):
    """Staged rows that are not stored yet are missing or damaged. Rows of their write that were stored stay stored."""


# --- staged rows ------------------------------------------------------------------------


def write_commit(staging: Path, batch: Batch, mode: int) -> None:
    """Write the record of a batch's commit, which names the attempts to store, and fsync it."""
    directory = staging / batch.write
    make_write_directory(directory, mode)  # no task has made it if there were no rows
    path = directory / _COMMIT
    with naming(path), path.open("wb") as file:
        file.write(msgspec.json.encode(_Commit(batch.shards, list(batch.attempts))))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def has_commit(directory: Path) -> bool:
    """Return whether the commit of a write has begun."""
    return (directory / _COMMIT).exists()


def discard(staging: Path, writes: Iterable[str]) -> None:
    """Remove the directories of writes that have ended, and then the staging directory if it is empty."""
    for directory in (*(staging / write for write in writes), *staging.glob(f"{_ENDED}*")):
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        staging.rmdir()


def _read_commit(directory: Path) -> _Commit:
    return msgspec.json.decode((directory / _COMMIT).read_bytes(), type=_Commit)


def _attempts_in(directory: Path) -> list[Path]:
    """Return the directories of the attempts that a write's commit stores, in order of partitions."""
    return [directory / name for name in _read_commit(directory).attempts]


# --- the commit -------------------------------------------------------------------------


def interrupted_before(db: Database, staging: Path, batch: Batch) -> list[CommitJob]:
    """Return the commits to finish before a batch: unfinished unnamed ones, and the previous one of its own writer."""
    found = {
        key: _decode(shard.number, key, stored)
        for shard in db.storage.shards
        for key, stored in db.state(shard.number).scan(_NAMELESS)
    }
    earlier = [attrs.evolve(batch, writer=None, number=one.batch, write=one.write) for one in found.values()]
    if batch.writer is not None:
        notes = _notes(db, _key_of(batch)).values()
        latest = max(notes, key=lambda progress: progress.batch, default=None)
        if latest is not None and latest.batch < batch.number:
            earlier.append(attrs.evolve(batch, number=latest.batch, write=latest.write))
    return [CommitJob(db, staging, one) for one in earlier]


def finished_before(db: Database, staging: Path, batch: Batch) -> bool:
    """Return whether a batch has the same rows as an interrupted write that another write has finished.

    If so, the record of that write is removed. Raises `InvalidMessageError` if some of its rows were refused.
    """
    attempts = [staging / batch.write / name for name in batch.attempts]
    records = [(key, _decode_finished(key, stored)) for key, stored in db.state(0).scan(_FINISHED)]
    alike = [(key, one) for key, one in records if one.rows == row_counts(attempts, db.manifest.shards)]
    digests = row_digests(attempts, db.manifest.shards) if alike else []
    for key, finished in alike:
        if finished.digests == digests:
            db.state(0).write([StateWrite(key, None)])
            if finished.refused:
                raise InvalidMessageError(finished.refused)
            return True
    return False


def _decode_finished(key: bytes, stored: bytes) -> _Finished:
    return _FINISHED_CODEC.decode(key, stored, f"shard 0, state {key!r}")


def _key_of(batch: Batch) -> bytes:
    return _NAMELESS + batch.write.encode() if batch.writer is None else _PREFIX + batch.writer.encode()


def _notes(db: Database, key: bytes) -> dict[int, _Progress]:
    """Return the progress records under a key, by shard."""
    stored = {shard.number: db.state(shard.number).get(key) for shard in db.storage.shards}
    return {shard: _decode(shard, key, found) for shard, found in stored.items() if found is not None}


def _decode(shard: int, key: bytes, stored: bytes) -> _Progress:
    return _CODEC.decode(key, stored, f"shard {shard}, state {key!r}")


class CommitJob:
    """The commit of one batch's staged rows to an open database."""

    def __init__(self, db: Database, staging: Path, batch: Batch) -> None:
        self._db = db
        self._batch = batch
        self._key = _key_of(batch)
        notes = _notes(db, self._key)
        self._latest = notes.get(0)
        begun = {shard: progress for shard, progress in notes.items() if progress.batch == batch.number}
        first = next(iter(begun.values()), None)
        self._write = batch.write if first is None else first.write
        """The write whose rows are stored: the first write of the batch, if an earlier one was interrupted."""
        self._staging = Path(first.staging) if first is not None and first.staging else staging
        self._done = {shard: progress.rows for shard, progress in begun.items()}
        """The number of rows that are stored or put aside, by shard."""
        self._refusal: InvalidMessageError | None = None
        """The last error because of which rows were put aside."""
        self.stored = bool(begun)
        """Whether rows of the batch may be in the database."""

    @property
    def nameless(self) -> bool:
        """Whether the write has no writer's name, so that only its rows identify it."""
        return self._batch.writer is None

    @property
    def directory(self) -> Path:
        """The directory in which the rows were staged."""
        return self._staging / self._write

    @property
    def complete(self) -> bool:
        """Whether the database has the whole batch, because its record says so or the writer's next batch has begun."""
        latest, number = self._latest, self._batch.number
        return latest is not None and (latest.batch > number or (latest.batch == number and latest.complete))

    def run(self) -> None:
        """Store the remaining rows. Raises `InvalidMessageError` if the database refuses some of them."""
        if not self.complete:
            runs = self._runs()
            self._check_times(runs)
            self._store(runs)
            self._note_complete()

    def finish(self) -> None:
        """Store the remaining rows, and write those that the database refuses to files; see `put_aside`."""
        if not self.complete:
            for shard, of_shard in self._runs().items():
                for part in self._missing(shard, of_shard, _ROWS):
                    self._store_or_put_aside(shard, part)
            self._note_complete()

    def put_aside(self) -> str | None:
        """Return a message about refused rows: their number, the reason and their directory. None without such rows."""
        files = sorted(self._refused.glob("*.parquet"))
        if not files:
            return None
        rows = sum(pq.read_metadata(file).num_rows for file in files)
        why = "" if self._refusal is None else f" ({type(self._refusal).__name__}: {self._refusal.reason})"
        return (
            f"{rows:,} rows of a write whose commit was interrupted can't be stored any more{why}; they are kept in "
            f"{self._refused}, as Parquet, and its other rows are stored"
        )

    def end(self, *, readable: bool = True, by_another: bool = False) -> None:
        """Remove the staged rows, if they are readable, and the state of a write without a name.

        With ``by_another``, another write has finished this one; the digests of its rows are then kept, so that a
        repetition of the write is recognized.
        """
        if by_another and self.nameless and self.directory.exists():
            self._remember()
        with suppress(FileNotFoundError):
            self.directory.rename(self._staging / f"{_ENDED if readable else _UNREADABLE}{self._write}")
            sync_directory(self._staging)
        if self.nameless:
            for shard in reversed(range(self._db.manifest.shards)):  # shard 0, which has ``complete``, is the last
                self._db.state(shard).write([StateWrite(self._key, None)])
        discard(self._staging, ())

    def _remember(self) -> None:
        state, shards, attempts = self._db.state(0), self._db.manifest.shards, _attempts_in(self.directory)
        rows, digests = row_counts(attempts, shards), row_digests(attempts, shards)
        finished = _Finished(_VERSION, self._db.clock(), rows, digests, self.put_aside() or "")
        key = _FINISHED + self._write.encode()
        times = sorted((_decode_finished(key, stored).time, key) for key, stored in state.scan(_FINISHED))
        old = [StateWrite(key, None) for _, key in times[: max(0, len(times) + 1 - _MOST_FINISHED)]]
        state.write([*old, StateWrite(key, _FINISHED_CODEC.encode(key, finished))])

    def same_as(self, other: Path) -> bool:
        """Return whether this write has not ended and ``other``'s directory holds the same rows, in any order."""
        if not self.directory.exists():
            return False
        one, two, shards = _attempts_in(self.directory), _attempts_in(other), self._db.manifest.shards
        return row_counts(one, shards) == row_counts(two, shards) and row_digests(one, shards) == row_digests(
            two, shards
        )

    # --- rows ---

    def _runs(self) -> dict[int, list[pa.RecordBatch]]:
        """Return the sorted runs of staged rows, by shard. Raises `UnreadableRowsError`."""
        try:
            commit = _read_commit(self.directory)
            attempts = _attempts_in(self.directory)
            for attempt in attempts:
                attempt.stat()
            runs = {shard: runs_of(attempts, shard) for shard in range(commit.shards)}
        except (FileNotFoundError, msgspec.DecodeError, pa.ArrowException) as bad:
            name = "a write" if self.nameless else f"batch {self._batch.number} of writer {self._batch.writer!r}"
            raise UnreadableRowsError(
                f"{name} is not stored, or in part only, and the rest of its rows, staged in {self.directory}, "
                f"is gone or damaged: {bad}"
            ) from bad
        if commit.shards != self._db.manifest.shards:
            raise ManifestMismatchError(
                f"rows were staged for {commit.shards} shards, and the database that somebody made meanwhile "
                f"has {self._db.manifest.shards}; write again"
            )
        return runs

    def _check_times(self, runs: Mapping[int, list[pa.RecordBatch]]) -> None:
        """Raise `TimestampAheadError` if any row is too far in the future, before rows are stored.

        Late rows need no such check: they come first, so the first call of `Database.store` refuses them.
        """
        manifest = self._db.manifest
        if manifest.timestamps == "message":
            newest = max((newest_of(run) for of_shard in runs.values() for run in of_shard), default=0)
            ahead = newest - self._db.clock()
            if ahead > manifest.max_skew * 1e6:
                raise TimestampAheadError(
                    f"a row's time lies {span_text(ahead)} ahead of the clock; {manifest.max_skew:g} s are allowed"
                )

    def _missing(self, shard: int, runs: list[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows of a shard, in order, at most ``rows`` at a time."""
        done = self._done.get(shard, 0)
        for part in in_order(runs, rows):
            if done < part.num_rows:
                yield part[done:]
            done = max(0, done - part.num_rows)

    def _store(self, runs: Mapping[int, list[pa.RecordBatch]]) -> None:
        """Store the first rows of all shards in one call, so that a refusal stores none of them; then the others."""
        rows = max(_ROWS // len(runs), _LEAST_ROWS)
        rest = {shard: self._missing(shard, of_shard, rows) for shard, of_shard in runs.items()}
        first = {shard: part for shard, parts in rest.items() for part in islice(parts, 1)}
        if first:
            self._store_parts(first)
        for shard, parts in rest.items():
            for part in parts:
                self._store_parts({shard: part})

    def _store_parts(self, parts: Mapping[int, pa.RecordBatch]) -> None:
        """Store rows, and in the same engine writes the number of each shard's rows that are then done."""
        done = {shard: self._done.get(shard, 0) + part.num_rows for shard, part in parts.items()}
        before, self.stored = self.stored, True
        try:
            self._db.store(
                pa.concat_batches(list(parts.values())), state={shard: [self._noted(done[shard])] for shard in parts}
            )
        except InvalidMessageError:  # no row of the call was stored
            self.stored = before
            raise
        self._done |= done

    def _store_or_put_aside(self, shard: int, part: pa.RecordBatch) -> None:
        """Store rows that are sorted by time. If some are refused, put aside the late ones, or all if none is late."""
        try:
            self._store_parts({shard: part})
        except InvalidMessageError as refused:
            self._refusal = refused
            late = 0
            if isinstance(refused, LateMessageError):
                last_time = self._db.storage.shards[shard].writer.tail.last_time
                late = int(np.searchsorted(timestamps_of(part), last_time))
            count = late or part.num_rows
            self._put_aside(shard, part[:count])
            if count < part.num_rows:
                self._store_or_put_aside(shard, part[count:])

    def _put_aside(self, shard: int, part: pa.RecordBatch) -> None:
        """Write rows to a file, fsync it, and then count the rows as done."""
        done = self._done.get(shard, 0)
        self._refused.mkdir(permissions_of(self._db.path), exist_ok=True)
        sync_directory(self._staging)
        file = self._refused / f"shard-{shard:04}-from-{done:012}.parquet"
        content = io.BytesIO()
        pq.write_table(pa.Table.from_batches([part]), content)
        replace_file(file, content.getvalue(), temporary=file.with_suffix(".unfinished"))
        self._done[shard] = done + part.num_rows
        self._db.state(shard).write([self._noted(self._done[shard])])

    @property
    def _refused(self) -> Path:
        """The directory of refused rows."""
        return self._staging / f"{_REFUSED}{self._write}"

    # --- progress records ---

    def _note_complete(self) -> None:
        self._db.state(0).write([self._noted(self._done.get(0, 0), complete=True)])

    def _noted(self, rows: int, *, complete: bool = False) -> StateWrite:
        progress = _Progress(_VERSION, self._batch.number, self._write, rows, complete, str(self._staging))
        return StateWrite(self._key, _CODEC.encode(self._key, progress))
