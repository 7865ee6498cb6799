"""The engine on LevelDB: batches, deleted ranges, the log, and maintenance."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, cast

import plyvel
from topicstore.contract import forking
from topicstore.contract.engine import Engine, EngineInfo, K, Key, Keyspace, Snapshot, WriteBatch
from topicstore.contract.errors import DatabaseClosedError, EngineError

from topicstore_backends.files import ReaderDirectory, disk_bytes, sync
from topicstore_backends.keyspaces import ByKeyspace

from .errors import lost, text_of
from .instance import Instance
from .keys import HIDDEN, KEYSPACE, LAST, HiddenRanges, Space
from .scans import LeveldbSnapshot, Past, Present, Scan, values_of

__all__ = ["LeveldbEngine"]

# A range with more keys, or more bytes in table files, is hidden first and removed later.
MOST_DELETES = 10_000
MOST_DELETED_BYTES = 64 << 20
# The number of hidden keys that a batch removes, besides two for each of its own changes, so that removal outruns new
# writes; and the number that `reclaim` removes at a time.
REMOVED_A_WRITE = 64
REMOVED_AT_ONCE = 4096
# Keys that `LeveldbEngine.verify` reads before it lets a waiting `close` proceed.
VERIFY_STEPS = 1000

_LISTED = re.compile(rb"^ (\d+):", re.MULTILINE)
"""The number of a table in LevelDB's own list of them: `` 25:114914['first key' @ 1 : 1 .. 'last key' @ 9 : 1]``."""

_Run = tuple[Keyspace[Any], list[Key], list[bytes | None]]


def _records(database: Any) -> Iterator[tuple[bytes, bytes]]:
    """Yield the hidden ranges; raise if one can't be read, because its keys would otherwise be visible again."""
    for start, end in database.iterator(start=HIDDEN, stop=bytes([KEYSPACE]), verify_checksums=True):
        yield start[1:], end
    with database.raw_iterator(verify_checksums=True) as behind:
        behind.seek(bytes([KEYSPACE]))
        if not behind.valid():
            raise lost()


class LeveldbEngine(Engine):
    """An engine on one LevelDB database.

    Without ``sync`` a batch is in LevelDB's log, handed to the operating system, when `write`
    returns; with ``sync`` the logs are fsynced as well, in a second step during which other threads can write.
    """

    def __init__(
        self,
        path: Path,
        instance: Instance,
        keyspaces: Sequence[Keyspace[Any]],
        made: ReaderDirectory | None = None,
    ) -> None:
        self._path = path
        self._instance = instance
        self._database = instance.database
        self._calls = instance.calls
        self._present = Present(instance)
        self._spaces = ByKeyspace({keyspace.name: Space(keyspace, number) for number, keyspace in enumerate(keyspaces)})
        self._writing = Lock()
        self._compacting = Lock()
        """Held while a range is compacted."""
        self._failed = False
        self._damaged: set[bytes] = set()
        """The starts of hidden ranges that can't be removed because of damage inside them."""
        self._synced: set[str] = set()
        """The names of logs whose directory entries are fsynced."""
        self._finished: frozenset[str] = frozenset()
        """The names of tables that LevelDB has synced. Noted when the engine is closed."""
        self._removing: Callable[[], object] | None = None if made is None else made.removal(self)
        """A function that removes the temporary directory of a database that is only read."""
        self._present.hidden = HiddenRanges(_records(self._database))
        forking.remember(self)

    def leave_to_parent(self) -> None:
        """Drop the references to the database in a forked child, where the engine counts as closed from now on."""
        self._instance.leave_to_parent()

    # --- writing ----------------------------------------------------------------------

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch: first range deletes, then puts and deletes in their order.

        While there are hidden ranges, each batch also removes some of their keys. Raises `StorageFullError`
        when the disk is full, `EngineError` for other failures; from then on the engine
        refuses writes until the shard is opened again.
        """
        runs = batch.without_rows().runs
        with self._calls.lock(), self._calls, self._writing:
            self._check_writable()
            changes = self._database.write_batch()
            hidden = self._present.hidden
            if hidden:
                hidden = self._remove(hidden, changes, REMOVED_A_WRITE + 2 * sum(len(keys) for _, keys, _ in runs))
            if batch.ranges:
                hidden = self._delete_ranges(batch.ranges, changes, hidden)
            self._add(runs, changes)
            if hidden:
                hidden = hidden.without(
                    self._spaces[keyspace.name].encode(key) for keyspace, key, _ in batch.operations
                )
            self._commit(changes, hidden)
        if sync:
            self.flush_log()

    def _check_writable(self) -> None:
        if self._failed:
            raise EngineError(f"{self._path}: an earlier write failed; open the shard again")

    def _commit(self, changes: Any, hidden: HiddenRanges) -> None:
        """Write a batch, together with the ranges that are hidden after it."""
        present = self._present
        try:
            if hidden is present.hidden:
                changes.write()
                return
            before, after = set(present.hidden), set(hidden)
            for start, _ in before - after:
                changes.delete(HIDDEN + start)
            for start, end in after - before:
                changes.put(HIDDEN + start, end)
            with present.changing:
                changes.write()
                present.hidden = hidden
        except BaseException:
            self._failed = True
            raise

    def _add(self, runs: Sequence[_Run], changes: Any) -> None:
        """Add puts and deletes to a batch."""
        put, delete = changes.put, changes.delete
        for keyspace, keys, values in runs:
            for key, value in zip(self._spaces[keyspace.name].encode_all(keys), values, strict=True):
                if value is None:
                    delete(key)
                else:
                    put(key, value)

    # --- deleting ranges ----------------------------------------------------------------

    def _delete_ranges(
        self, ranges: list[tuple[Keyspace[Any], Key, Key]], changes: Any, hidden: HiddenRanges
    ) -> HiddenRanges:
        """Delete the keys of small ranges; return all hidden ranges, including the large ones."""
        large = []
        for keyspace, start, end in ranges:
            space = self._spaces[keyspace.name]
            first, last = space.encode(start), space.encode(end)
            keys = self._few_keys(first, last) if first < last else []
            if keys is None:
                large.append((first, last))
            else:
                deque(map(changes.delete, keys), maxlen=0)
        return HiddenRanges([*hidden, *large]) if large else hidden

    def _few_keys(self, first: bytes, last: bytes) -> list[bytes] | None:
        """Return the keys of a range; None if there are too many or they can't be read."""
        if self._database.approximate_size(first, last) > MOST_DELETED_BYTES:
            return None
        with suppress(plyvel.CorruptionError):
            keys = self._keys(first, last, MOST_DELETES + 1)
            return keys if len(keys) <= MOST_DELETES else None
        return None

    def _remove(self, hidden: HiddenRanges, changes: Any, most: int) -> HiddenRanges:
        """Delete up to about ``most`` hidden keys; return the ranges that remain hidden."""
        left: list[tuple[bytes, bytes]] = []
        for start, end in hidden:
            keys = None if most <= 0 or start in self._damaged else self._readable_keys(start, end, most)
            if keys is None:
                left.append((start, end))
                continue
            deque(map(changes.delete, keys), maxlen=0)
            if len(keys) == most:
                left.append((keys[-1] + b"\0", end))
            most -= len(keys) + 1
        return HiddenRanges(left)

    def _readable_keys(self, start: bytes, end: bytes, most: int) -> list[bytes] | None:
        """Return the first keys of a hidden range; if one is unreadable, return None and mark the range as damaged."""
        try:
            return self._keys(start, end, most)
        except plyvel.CorruptionError:
            self._damaged.add(start)
            return None

    def _keys(self, start: bytes, end: bytes, most: int) -> list[bytes]:
        with self._database.iterator(
            start=start, stop=end, include_value=False, verify_checksums=True, fill_cache=False
        ) as keys:
            return list(islice(keys, most))

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Remove all hidden keys, then compact the range. Releases the GIL; other threads may write meanwhile.

        LevelDB compacts a level into the next, but never the last level that holds keys of the range. A flush may have
        written puts and their deletes to that level without merging them. So a second compaction carries deletes of two
        absent keys, one at each end of the range, down to that level.
        """
        space = self._spaces[keyspace.name]
        first, last = space.encode(start), space.encode(end)
        if first >= last:
            return
        while self._remove_some():
            pass
        self._compact(first, last)
        self._delete_around(first, last)
        self._compact(first, last)

    def _compact(self, first: bytes, last: bytes) -> None:
        """Compact a range, for which LevelDB begins a new log.

        A write first keeps the previous log from being empty: `topicstore_backends.write_ahead_logs` regards an
        empty log that is followed by another as one that lost its writes.
        """
        with self._compacting:
            with self._calls.lock(), self._calls, self._writing:
                self._check_writable()
                changes = self._database.write_batch()
                changes.put(LAST, b"")
                self._commit(changes, self._present.hidden)
            with self._calls.lock(), self._calls:
                self._database.compact_range(start=first, stop=last)

    def _delete_around(self, first: bytes, last: bytes) -> None:
        """Delete two absent keys, one at each end of a range."""
        below = (int.from_bytes(last, "big") - 1).to_bytes(len(last), "big") + b"\xff" * 8
        with self._calls.lock(), self._calls, self._writing:
            self._check_writable()
            changes = self._database.write_batch()
            for key in (first + b"\0", below):
                if self._database.get(key, verify_checksums=True) is None:
                    changes.delete(key)
            self._commit(changes, self._present.hidden)

    def _remove_some(self) -> bool:
        """Remove hidden keys in a batch of their own; return whether there were any."""
        with self._calls.lock(), self._calls, self._writing:
            hidden = self._present.hidden
            if all(start in self._damaged for start, _ in hidden):
                return False
            self._check_writable()
            changes = self._database.write_batch()
            self._commit(changes, self._remove(hidden, changes, REMOVED_AT_ONCE))
            return True

    # --- reading ----------------------------------------------------------------------

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        stored = self._spaces[keyspace.name].encode(key)
        with self._calls.lock(), self._calls:
            with self._present.changing:
                hidden = self._present.hidden
            return values_of(self._database, hidden, [stored])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, None where there is none; all values are from one snapshot."""
        stored = self._spaces[keyspace.name].encode_all(keys)
        with self._calls.lock(), self._calls:
            return self._present.get_many(stored)

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield lists of the key-value pairs of a range, in the state at the time when the first list is requested.

        That list is small (16 pairs or 64 KB) and the next ones grow to 256 pairs or 256 KB. At a damaged block, the
        pairs before the block are yielded, then `CorruptionError` is raised. In a reverse scan, the pair next to the
        block may be missing.
        """
        space = self._spaces[keyspace.name]
        return Scan(self._present, space, space.encode_span(start, end), reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state. While it is open, LevelDB keeps the versions that it sees."""
        with self._calls.lock(), self._calls:
            with self._present.changing:
                snapshot, hidden = self._instance.give(self._database.snapshot()), self._present.hidden
            return LeveldbSnapshot(Past(self._instance, snapshot, hidden), self._spaces)

    # --- the rest ---------------------------------------------------------------------

    def flush_log(self) -> None:
        """Fsync the logs, so that every completed write is durable. Releases the GIL.

        An older log has the only copy of its writes until their table is on disk and LevelDB deletes the log, so all
        logs are synced (https://github.com/google/leveldb/issues/193).
        """
        with self._calls.lock(), self._calls:
            try:
                with os.scandir(self._path) as entries:
                    names = {entry.name for entry in entries if entry.name.endswith(".log")}
                for name in names:
                    with suppress(FileNotFoundError):
                        sync(self._path / name)
                if not names <= self._synced:
                    sync(self._path)
                    self._synced = names
            except BaseException:
                self._failed = True
                raise

    def info(self) -> EngineInfo:
        """Return the bytes of all files in the directory, and of buffers and cache."""
        with self._calls.lock(), self._calls:
            memory = self._property("approximate-memory-usage")
            details: dict[str, str | int] = {
                "table_files": sum(self._property(f"num-files-at-level{level}") for level in range(7)),
                "hidden_ranges": len(self._present.hidden),
            }
            return EngineInfo(disk_bytes=disk_bytes(self._path), memory_bytes=memory, details=details)

    def _property(self, name: str) -> int:
        return int(self._database.get_property(b"leveldb." + name.encode()) or 0)

    def verify(self) -> Iterator[str]:
        """Read every table block that holds a pair, and check its checksum; yield a sentence for each damaged region.

        LevelDB doesn't say which file is damaged, so a sentence names the keys around the damage. Deleted pairs
        that are still on disk are read, too.
        """
        at: bytes | None = b""
        told = False
        while at is not None:
            last, error = self._walk(at)
            told = told and last is None
            at = at if last is None else last
            if error is None:
                return
            if not told:
                told = True
                yield f"{self._named(at)}: {error}"
            at = self._behind(at)

    def _walk(self, start: bytes) -> tuple[bytes | None, EngineError | None]:
        """Read from a stored key to the end or to the next damage; return the last key read, and the damage."""
        last: bytes | None = None
        iterator = None
        try:
            with self._calls.lock(), self._calls:
                iterator = self._instance.give(
                    self._database.iterator(start=start, include_value=False, verify_checksums=True, fill_cache=False)
                )
            while True:
                keys: list[bytes] = []
                try:
                    with self._calls.lock(), self._calls:
                        keys.extend(islice(iterator, VERIFY_STEPS))
                finally:
                    last = keys[-1] if keys else last
                if len(keys) < VERIFY_STEPS:
                    return last, None if last == LAST else EngineError(text_of(lost()))
        except EngineError as error:
            return last, error
        finally:
            if iterator is not None:
                self._instance.take_back(iterator)

    def _behind(self, key: bytes) -> bytes | None:
        """Return the first readable stored key after ``key``, past the damage that follows it."""
        with self._calls.lock(), self._calls:  # noqa: SIM117 - it would be too long on one line
            with self._database.raw_iterator(verify_checksums=True, fill_cache=False) as iterator:
                with suppress(plyvel.Error):
                    iterator.seek(key + b"\0")
                return cast("bytes", iterator.key()) if iterator.valid() else None

    def _named(self, stored: bytes) -> str:
        """Return a description of a stored key's place, for error messages."""
        for space in self._spaces.values():
            if stored.startswith(space.start):
                return f"keyspace {space.keyspace.name!r}, behind {space.decode(stored)!r}"
        return "keyspace 'state', at its beginning"

    def close(self) -> None:
        """Release files and lock, even if scans and snapshots are still referenced.

        Waits for calls of other threads that are inside LevelDB. Buffered writes are in the log.

        A compaction that the close interrupts leaves its unfinished table, unsynced, and the next opening removes that
        table. It is synced here, because the framework compares the files with the list that it makes after the close.
        """
        with ExitStack() as closing:  # each callback runs even if another raises, the last one first
            closing.callback(self._tidy_up)
            closing.callback(self._instance.close)
            with suppress(DatabaseClosedError), self._calls.lock(), self._calls:
                listed = _LISTED.findall(self._database.get_property(b"leveldb.sstables"))
                self._finished = frozenset(f"{int(number):06}.ldb" for number in listed)

    def _tidy_up(self) -> None:
        if self._instance.left_to_parent:
            return
        with self._instance.translated:
            if self._removing is not None:
                self._removing()
                return
            unfinished = [table for table in self._path.glob("*.ldb") if table.name not in self._finished]
            for table in unfinished:
                sync(table)
            if unfinished:
                sync(self._path)
