"""Reading the rows of an export, and verifying that a database has all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import CorruptionError, NotADatabaseError
from topicstore.contract.topics import TopicFilter
from topicstore.storage.storage import Storage

from .archive_slab import ArchiveSlab, rows_of
from .export_format import Head, read_contents, read_head

if TYPE_CHECKING:
    from topicstore.contract.model import Message

__all__ = ["ExportedGeneration", "check_stored", "exported_generations", "is_export"]

_SLAB = re.compile(r"shard=([0-9]+)/generation=([0-9]+)")
_BATCH = 16_384


@attrs.frozen
class ExportedGeneration:
    """One generation of an export, with the parts of all shards."""

    head: Head
    number: int
    slabs: list[ArchiveSlab]

    @property
    def messages(self) -> int:
        """The number of rows."""
        return sum(slab.contents.messages for slab in self.slabs)

    @property
    def digests(self) -> list[str]:
        """The digests of the files, in order of shards and parts."""
        return [part.digest for slab in self.slabs for part in slab.contents.parts]

    def rows(self) -> Iterator[MessageBatch]:
        """Yield the rows in order of positions, then of shards. Raises `CorruptionError`."""
        return rows_of(self.slabs)


def is_export(path: Path) -> bool:
    """Return whether a directory is an export."""
    return path.is_dir() and read_head(path) is not None


def exported_generations(target: Path) -> list[ExportedGeneration]:
    """Return the generations of an export, oldest first.

    Raises `NotADatabaseError` if the directory is no export, `CorruptionError` if a shard's part of a generation is
    missing.
    """
    head = read_head(target)
    if head is None:
        raise NotADatabaseError(f"{target} is no export")
    found: dict[int, dict[int, ArchiveSlab]] = {}
    for directory in target.glob("shard=*/generation=*"):
        named = _SLAB.fullmatch(str(directory.relative_to(target)))
        if named is not None:
            shard, generation = int(named[1]), int(named[2])
            found.setdefault(generation, {})[shard] = _slab(directory, head, shard, generation)
    for generation, slabs in found.items():
        missing = sorted(set(range(head.shards)) - slabs.keys())
        if missing:
            where = f"{target}, shard {missing[0]}, generation {generation}"
            raise CorruptionError("it is missing: the export was not finished; the same export goes on", where)
    return [
        ExportedGeneration(head, generation, [slab for _, slab in sorted(slabs.items())])
        for generation, slabs in sorted(found.items())
    ]


def _slab(directory: Path, head: Head, shard: int, generation: int) -> ArchiveSlab:
    contents = read_contents(directory)
    if contents is None:
        raise CorruptionError("there is no complete export", str(directory))
    return ArchiveSlab(directory, head.database, shard, generation, contents.messages)


def check_stored(storage: Storage, exported: ExportedGeneration, first: int) -> None:
    """Verify that a database has every row of an exported generation, in the same order and with all columns.

    ``first``: the lowest position that a restored row can have. Each shard of the database is read once, beginning at
    this position; other messages between the rows are skipped. Positions are not compared, because restoring assigns
    new ones. Raises `CorruptionError`, which names the first row, in order of positions, that is missing or different.
    """
    filters = sorted({text for slab in exported.slabs for text in slab.contents.filters})
    stored = [_messages(storage, shard, filters, first) for shard in range(len(storage.shards))]
    row = 0
    for batch in exported.rows():
        for message in batch.to_messages():
            row += 1
            # ``in`` consumes the iterator up to the message, so the test also verifies the order.
            if message not in stored[storage.shard_of(message.client_id)]:
                raise CorruptionError("is not in the database as it was exported", f"row {row:,}, {message.topic}")


def _messages(storage: Storage, shard: int, filters: Sequence[str], first: int) -> Iterator[Message]:
    """Return an iterator over the messages of a shard in order of positions, through the plugins."""
    plans = [storage.plan_shard(shard, TopicFilter(text), first, None, since=0.0) for text in filters]
    batches = storage.run_shards([plan for plan in plans if plan.generations], _BATCH)
    return chain.from_iterable(map(MessageBatch.to_messages, batches))
