"""Exporting sealed generations to Parquet, and archiving them: exporting and then removing the local messages.

The export of a slab (the part of a generation in one shard) is atomic. Its files are written under a temporary name,
read back, compared with a second replay row by row, fsynced, and renamed. So an interrupted export continues with the
missing slabs, and several processes may export to one target.

The slabs of a generation that is archived are renamed when all of them are written, and removed if that fails.
Otherwise, messages could later be deleted from the local generation. The exported slabs, which still hold these
messages, would then make the next attempt fail.

Rows are exported in stored form, without the plugins of the database; replays of the export pass through the plugins.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TypeVar

import attrs
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from topicstore.contract.batch import MessageBatch
from topicstore.contract.descriptors import naming
from topicstore.contract.errors import (
    CorruptionError,
    GenerationArchivedError,
    GenerationError,
    ManifestMismatchError,
    NotADatabaseError,
    UnsupportedError,
)
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.locks import holding
from topicstore.shard.records import GenerationRecord
from topicstore.shard.rewriter import filters_of_all
from topicstore.shard.shard import Shard
from topicstore.storage import replays
from topicstore.storage.directory.files import convert_os_errors, sync_directory
from topicstore.storage.directory.staging import staging_directory, staging_name, sweep_staging
from topicstore.storage.generations import archive_directory, check_apart, live_records
from topicstore.storage.reading.direct_reads import plan_generation, run_as_stored
from topicstore.storage.storage import Storage

from .archive_slab import ArchiveSlab, digest_of, digests_of, rows_of
from .export_format import (
    COLUMNS,
    Contents,
    Group,
    Part,
    begin_export,
    is_complete,
    read_contents,
    slab_directory,
    write_contents,
)

__all__ = ["ExportReport", "ExportedSlab", "archive", "begin", "export", "export_slab", "report_of"]

T = TypeVar("T")

_GROUP_ROWS = 65_536
_GROUP_BYTES = 16 << 20
"""Bytes after which a row group ends, at a batch boundary. Readers hold one row group in memory at a time."""
_PART_BYTES = 256 << 20
"""Bytes after which a file ends, at a row group boundary."""
_BATCH = 16_384
_MOST_TOPICS = 1_000
"""Number of topics above which a contents file doesn't list them, because matching all of them would not save time."""
_OPTIONS = {
    "compression": "zstd",
    "use_dictionary": ["topic", "client_id", "qos"],
    "column_encoding": {"timestamp": "DELTA_BINARY_PACKED", "position": "DELTA_BINARY_PACKED"},
    "write_statistics": ["timestamp", "topic", "client_id", "qos", "retain", "position"],
    "sorting_columns": [pq.SortingColumn(COLUMNS.get_field_index("position"))],
}


@attrs.frozen
class ExportedSlab:
    """One slab of an export: the part of a generation in one shard."""

    messages: int
    file_bytes: int
    new: bool
    """Whether the slab was written by this call."""


@attrs.frozen(kw_only=True)
class ExportReport:
    """The result of an export."""

    target: str
    generations: tuple[int, ...]
    """The requested generations, all of which the target holds."""
    messages: int
    """Number of messages written by this call."""
    file_bytes: int
    """Bytes of the files written by this call."""
    slabs: int
    """Number of slabs written by this call."""
    slabs_before: int
    """Number of slabs that the target already held."""
    seconds: float


# --- whole generations ------------------------------------------------------------------


def export(
    storage: Storage,
    target: Path,
    generations: Sequence[int] | None,
    progress: Callable[[int, int], object] | None = None,
) -> ExportReport:
    """Export generations, by default all that are sealed; see `Archives.export`."""
    began = time.perf_counter()
    numbers = begin(storage, target, generations)
    parts = _reporting(list(product(numbers, storage.shards)), progress)
    slabs = [export_slab(storage, shard, number, target) for number, shard in parts]
    return report_of(target, numbers, slabs, began)


@convert_os_errors()
def archive(
    storage: Storage,
    location: str,
    generations: Sequence[int] | None,
    progress: Callable[[int, int], object] | None = None,
) -> ExportReport:
    """Export generations, by default all that are sealed and local, and remove them locally; see `Archives.archive`."""
    if storage.site is not None:
        raise UnsupportedError("a database that is shared through a cluster can be exported, and not archived")
    storage.check_writable()
    began, target = time.perf_counter(), archive_directory(storage.path, location)
    if generations is None:
        live = live_records(storage.shards)
        generations = [n for n in _sealed(storage) if any(record.archive is None for record in live[n])]
    slabs = []
    numbers = begin(storage, target, generations)

    def archive_one(number: int) -> list[ExportedSlab]:
        _check_holds_archived(storage, target)  # the volume may have been unmounted since the last generation
        with ExitStack() as staged:
            written = [_write_slab(storage, shard, number, target, staged, anew=True) for shard in storage.shards]
            directories = [slab_directory(target, shard.number, number) for shard in storage.shards]
            new = [directory for directory in directories if not is_complete(directory)]
            try:
                exported = [publish() for publish in written]
            except BaseException:
                for directory in filter(is_complete, new):
                    _remove(directory, target)
                raise
        for shard, slab in zip(storage.shards, exported, strict=True):
            shard.generations.archive(number, location, slab.messages)
        return exported

    def archive_all() -> None:
        # In sequence, so that the disk space of a generation is free before the next needs space.
        for number in _reporting(numbers, progress):
            # Deletes wait for the locks; otherwise the export would still hold messages that are deleted meanwhile.
            locks = [shard.generations.rewrite_lock for shard in storage.shards]
            slabs.extend(holding(locks, partial(archive_one, number)))
            if storage.listener is not None:
                storage.listener.forget()  # ends running scans of the local slabs

    storage.ballast.given_up(storage.shards, archive_all)
    return report_of(target, numbers, slabs, began)


def _reporting(parts: Sequence[T], progress: Callable[[int, int], object] | None) -> Iterator[T]:
    """Yield parts of the work; call ``progress`` before each part and at the end."""
    for done, part in enumerate(parts):
        if progress is not None:
            progress(done, len(parts))
        yield part
    if progress is not None:
        progress(len(parts), len(parts))


@convert_os_errors()
def begin(storage: Storage, target: Path, generations: Sequence[int] | None) -> list[int]:
    """Prepare a directory for an export; return the generations to write, by default all that are sealed."""
    check_apart(storage.path, target)
    _check_holds_archived(storage, target)
    numbers = _sealed(storage) if generations is None else _checked(storage, generations)
    begin_export(target, storage.manifest)
    sweep_staging(target)
    return numbers


def _check_holds_archived(storage: Storage, target: Path) -> None:
    """Raise `ManifestMismatchError` if a directory lacks a generation that was archived there.

    Then the directory is not the archive; it may be the empty mount point of a volume that isn't mounted.
    """
    lacking = {
        record.number
        for shard in storage.shards
        for record in shard.generations.listed()
        if record.archive is not None
        and archive_directory(storage.path, record.archive) == target.resolve()
        and not is_complete(slab_directory(target, shard.number, record.number))
    }
    if lacking:
        numbers = ", ".join(map(str, sorted(lacking)))
        raise ManifestMismatchError(
            f"{target} lacks the archived generations {numbers}: nothing was written there, and nothing removed. "
            "Mount the archive's volume, bring the files back, or drop those generations"
        )


def report_of(target: Path, generations: Sequence[int], slabs: Sequence[ExportedSlab], began: float) -> ExportReport:
    """Return the report of an export; ``began``: the value of `time.perf_counter` at its start."""
    written = [slab for slab in slabs if slab.new]
    return ExportReport(
        target=str(target),
        generations=tuple(generations),
        messages=sum(slab.messages for slab in written),
        file_bytes=sum(slab.file_bytes for slab in written),
        slabs=len(written),
        slabs_before=len(slabs) - len(written),
        seconds=time.perf_counter() - began,
    )


def _sealed(storage: Storage) -> list[int]:
    """Return the numbers of the live generations that are sealed in all shards, oldest first."""
    live = live_records(storage.shards)
    return [number for number, records in live.items() if all(record.sealed is not None for record in records)]


def _checked(storage: Storage, generations: Sequence[int]) -> list[int]:
    there = _sealed(storage)
    for number in generations:
        if number == storage.shards[0].generations.current:
            raise GenerationError(
                f"generation {number} is open: messages are still added to it. Seal it first, by "
                "`topicstore generations add` or `db.add_generation()`; or write its messages as they are now to "
                "one file, by `topicstore replay PATH '#' --output messages.parquet`"
            )
        if number not in there:
            raise GenerationError(f"there is no generation {number}")
    return sorted(set(generations))


# --- one slab ---------------------------------------------------------------------------


@convert_os_errors()
def export_slab(storage: Storage, shard: Shard, generation: int, target: Path) -> ExportedSlab:
    """Export a shard's part of a sealed generation, unless the target already holds it.

    Raises `ManifestMismatchError` if an existing export has another number of messages, or other positions.
    """
    with ExitStack() as staged:
        return _write_slab(storage, shard, generation, target, staged)()


def _write_slab(
    storage: Storage, shard: Shard, generation: int, target: Path, staged: ExitStack, *, anew: bool = False
) -> Callable[[], ExportedSlab]:
    """Write a slab under a temporary name, unless its export exists; return a function that renames it.

    The function must be called while ``staged`` is open. ``anew``: also compare an existing export with the stored
    rows; a new export is always compared.
    """
    directory = slab_directory(target, shard.number, generation)
    existing = partial(_existing_slab, storage, shard, generation, directory, anew)
    while (there := read_contents(directory)) is None:
        record = _record(shard, generation)
        with ExitStack() as attempt:
            unfinished = attempt.enter_context(staging_directory(target))
            try:
                contents = _write(storage, shard, record, unfinished)
                _compare(unfinished, contents, _stored(storage, shard, record))
            except (CorruptionError, UnsupportedError):
                if _record(shard, generation).messages == record.messages:
                    raise
                continue  # messages of the slab were deleted meanwhile
            except GenerationArchivedError:
                continue  # another call has archived the generation; replays read the archive
            staged.push(attempt.pop_all())
        return partial(_new_slab, unfinished, contents, directory, existing)
    return partial(existing, there)


def _new_slab(
    unfinished: Path, contents: Contents, directory: Path, existing: Callable[[Contents], ExportedSlab]
) -> ExportedSlab:
    quicker = _publish(unfinished, directory)
    return ExportedSlab(contents.messages, contents.size, new=True) if quicker is None else existing(quicker)


def _existing_slab(
    storage: Storage, shard: Shard, generation: int, directory: Path, anew: bool, there: Contents
) -> ExportedSlab:
    record = _record(shard, generation)
    _check_same(storage, record, directory, there)
    if anew:
        _compare(directory, there, _stored(storage, shard, record))
    return ExportedSlab(there.messages, there.size, new=False)


def _check_same(storage: Storage, record: GenerationRecord, directory: Path, there: Contents) -> None:
    """Raise `ManifestMismatchError` if an export's database, positions or number of messages differ. Reads no rows."""
    bounds = (record.first_position, record.last_position)
    if (there.database, there.first_position, there.last_position) != (storage.manifest.id, *bounds):
        raise ManifestMismatchError(
            f"{directory} is the export of another generation {record.number}, of a copy of the database, say; "
            "export to another directory"
        )
    if there.messages != record.messages:
        raise ManifestMismatchError(
            f"{directory} holds {there.messages:,} messages where the generation has {record.messages:,}: some were "
            "deleted since; export to another directory, or remove that one"
        )


def _record(shard: Shard, generation: int) -> GenerationRecord:
    shard.generations.slab(generation)  # raises if the generation was dropped
    return next(record for record in shard.generations.listed() if record.number == generation)


def _publish(unfinished: Path, directory: Path) -> Contents | None:
    """Rename a complete slab to its final name; if another process did so first, return the contents of its export."""
    directory.parent.mkdir(exist_ok=True)
    if directory.parent.is_symlink():
        raise NotADatabaseError(f"{directory.parent} is a symbolic link; an export is written in its own directory")
    while True:
        try:
            unfinished.rename(directory)
        except OSError as there:
            if there.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if (quicker := read_contents(directory)) is not None:
                return quicker
            _remove(directory, unfinished.parent)  # a directory without contents file, not written by an export
        else:
            sync_directory(directory.parent)
            sync_directory(directory.parent.parent)
            return None


def _remove(directory: Path, target: Path) -> None:
    """Remove a slab's directory. It is renamed first, so that a directory under a final name is always complete."""
    aside = target / staging_name()
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------


def _stored(storage: Storage, shard: Shard, record: GenerationRecord) -> Iterator[MessageBatch]:
    """Yield all messages of a slab in order of positions, in stored form, without plugins."""
    slab, last = shard.generations.slab(record.number), record.last_position or 0
    filters = slab.contents.filters if isinstance(slab, ArchiveSlab) else filters_of_all(slab)
    plans = [
        plan_generation(storage, shard, record.number, TopicFilter(text), record.first_position, last, since=None)
        for text in filters
    ]
    return run_as_stored(storage, shard, plans, "time")


# --- writing ----------------------------------------------------------------------------


def _write(storage: Storage, shard: Shard, record: GenerationRecord, directory: Path) -> Contents:
    """Write a slab's Parquet files and its contents file."""
    seen = _Topics()
    tables = _tables(_stored(storage, shard, record), seen)
    parts: list[Part] = []
    for table in tables:
        parts.append(_write_part(directory / f"part-{len(parts):05}.parquet", chain([table], tables)))
    contents = Contents(
        database=storage.manifest.id,
        shard=shard.number,
        generation=record.number,
        layout=record.layout,
        options=record.options,
        created=record.created,
        sealed=record.sealed or 0,
        first_position=record.first_position,
        last_position=record.last_position or 0,
        messages=sum(group.rows for part in parts for group in part.groups),
        filters=("#", *(f"{level}/#" for level in sorted(seen.dollar))),
        topics=None if seen.topics is None else sorted(seen.topics),
        parts=parts,
    )
    if contents.messages < record.messages:
        raise UnsupportedError(
            f"shard {shard.number}, generation {record.number}: {record.messages - contents.messages:,} messages have "
            f"topics that begin with $, other than $SYS, and layout {record.layout} can't tell with what; "
            "delete them before the export"
        )
    write_contents(directory, contents)
    return contents


@attrs.define
class _Topics:
    """Collects the topics of a slab for its contents file."""

    topics: set[str] | None = attrs.field(factory=set)
    """All topics; None if there are too many."""
    dollar: set[str] = attrs.field(factory=set)
    """The first levels of topics that begin with ``$``."""

    def add(self, topics: pa.ChunkedArray) -> None:
        different = topics.unique()
        named = different.filter(pc.starts_with(different, "$")).to_pylist()
        self.dollar.update(topic.split("/")[0] for topic in named)
        if self.topics is not None:
            self.topics.update(different.to_pylist())
            self.topics = self.topics if len(self.topics) <= _MOST_TOPICS else None


def _tables(batches: Iterator[MessageBatch], seen: _Topics) -> Iterator[pa.Table]:
    """Yield the row groups as tables, and add their topics to ``seen``."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in replays.slices(batches, _BATCH):
        held.append(batch.to_arrow(ids=True).select(COLUMNS.names))
        rows, size = rows + len(batch), size + held[-1].nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield _table(held, seen)
            held, rows, size = [], 0, 0
    if held:
        yield _table(held, seen)


def _table(held: list[pa.RecordBatch], seen: _Topics) -> pa.Table:
    table = pa.Table.from_batches(held, COLUMNS)
    seen.add(table["topic"])
    return table


def _write_part(path: Path, tables: Iterator[pa.Table]) -> Part:
    """Write row groups into a file until it has `_PART_BYTES`, and fsync it."""
    groups = []
    with naming(path), path.open("wb") as file:
        with pq.ParquetWriter(file, COLUMNS, **_OPTIONS) as writer:
            for table in tables:
                writer.write_table(table, row_group_size=table.num_rows)
                positions, any_properties = table["position"], table["properties"].null_count < table.num_rows
                groups.append((table.num_rows, positions[0].as_py(), positions[-1].as_py(), any_properties))
                if file.tell() >= _PART_BYTES:
                    break
        file.flush()
        os.fsync(file.fileno())
    footer, digests = digests_of(path, pq.read_metadata(path))
    return Part(
        name=path.name,
        size=path.stat().st_size,
        digest=digest_of(path),
        footer=footer,
        groups=[Group(*group, digest) for group, digest in zip(groups, digests, strict=True)],
    )


# --- checking ---------------------------------------------------------------------------


def _compare(directory: Path, contents: Contents, stored: Iterator[MessageBatch]) -> None:
    """Read a slab's files in the same way as replays, and compare all columns of every row with the stored messages.

    Raises `CorruptionError`, which names the first row that differs.
    """
    slab = ArchiveSlab(directory, contents.database, contents.shard, contents.generation, contents.messages)
    exported, expected = _arrow(rows_of([slab])), _arrow(stored)
    here, there = next(exported, None), next(expected, None)
    while here is not None and there is not None:
        rows = min(len(here), len(there))
        if not here[:rows].equals(there[:rows]):
            row = next(row for row in range(rows) if not here[row : row + 1].equals(there[row : row + 1]))
            raise _difference(directory, there["position"][row].as_py())
        here = here[rows:] if rows < len(here) else next(exported, None)
        there = there[rows:] if rows < len(there) else next(expected, None)
    left = here if there is None else there
    if left is not None:
        raise _difference(directory, left["position"][0].as_py())


def _arrow(batches: Iterator[MessageBatch]) -> Iterator[pa.RecordBatch]:
    return (batch.to_arrow(ids=True) for batch in replays.slices(batches, _BATCH))


def _difference(directory: Path, position: int) -> CorruptionError:
    return CorruptionError("the export differs from what is stored", f"{directory}, message at position {position}")
