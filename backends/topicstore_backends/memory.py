"""An engine in memory, for tests and for data that need not last. The other engines are tested against it.

Each keyspace is a sorted map from a key to the versions of its value, oldest first, each with the
number of the write that made it. A view is the number of a write: readers of the view see each key's last version up to
that write. Scans and snapshots are isolated by their views alone. Versions that no living view sees are dropped when
their key is written again, and in sweeps.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import attrs
from sortedcontainers import SortedDict
from topicstore.contract.engine import Backend, Engine, EngineInfo, K, Key, Keyspace, Snapshot, WriteBatch, is_empty
from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError
from topicstore.contract.forking import ProcessLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["MemoryBackend", "MemoryEngine", "MemoryOptions"]

CHUNK_PAIRS = 128
CHUNK_BYTES = 1 << 20
SWEEP_KEYS = 1024

_Versions = list[tuple[int, bytes | None]]
"""A key's versions, oldest first: the number of the write, and the value or None where the write deleted it."""


@attrs.frozen(kw_only=True)
class MemoryOptions:
    """The memory backend has no options."""


class MemoryBackend(Backend):
    """A backend whose engines keep all data in memory and drop it when they are closed."""

    Options: ClassVar[type] = MemoryOptions

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> MemoryEngine:
        """Return an empty engine; ``path`` is not touched, and ``create`` has no effect."""
        return MemoryEngine(keyspaces)


class _View:
    """A reader's view: everything up to the write numbered ``sequence``."""

    __slots__ = ("__weakref__", "closed", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.closed = False


class MemoryEngine(Engine):
    """An engine of sorted maps from keys to versions, guarded by one lock."""

    def __init__(self, keyspaces: Sequence[Keyspace[Any]]) -> None:
        self._lock = ProcessLock()
        self._maps: dict[str, Any] = {keyspace.name: SortedDict() for keyspace in keyspaces}
        self._sequence = 0
        # Weak, so that a scan that is dropped halfway keeps no versions alive.
        self._views: WeakSet[_View] = WeakSet()
        self._held: set[tuple[str, Key]] = set()
        """The keys that keep more than their last version, for views that may be open."""
        self._sweep_at = SWEEP_KEYS
        self._closed = False

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch under the lock, so that no reader sees half of it."""
        with self._lock:
            self._check_open()
            self._check_batch(batch.without_rows())
            self._sequence += 1
            views = self._living()
            for keyspace, start, end in batch.ranges:
                if not is_empty(start, end):
                    for key in list(self._maps[keyspace.name].irange(start, end, inclusive=(True, False))):
                        self._set(keyspace.name, key, None, views)
            for keyspace, key, value in batch.operations:
                self._set(keyspace.name, key, value, views)
            if self._held and (len(views) == 1 or len(self._held) >= self._sweep_at):
                self._sweep(views)

    def flush_log(self) -> None:
        """Do nothing: there is no log, and nothing outlives the engine."""
        with self._lock:
            self._check_open()

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, None where there is none; all values are from one snapshot."""
        with self._lock:
            self._check_open()
            return self._read(keyspace, keys, self._sequence)

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield lists of the key-value pairs of a range, in the state at the time when the first list is requested."""
        self._check_range(keyspace, start, end)
        return self._chunks(None, keyspace, start, end, reverse, limit)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current state."""
        with self._lock:
            self._check_open()
            return _MemorySnapshot(self, self._open_view())

    def info(self) -> EngineInfo:
        """Return the bytes of all values in memory, and the numbers of keys and of writes."""
        with self._lock:
            self._check_open()
            maps = self._maps.values()
            size = sum(len(value or b"") for each in maps for versions in each.values() for _, value in versions)
            details = {"keys": sum(map(len, maps)), "writes": self._sequence}
            return EngineInfo(disk_bytes=0, memory_bytes=size, details=details)

    def close(self) -> None:
        """Drop all data. Open scans and snapshots raise `DatabaseClosedError` from now on."""
        with self._lock:
            self._closed = True
            for each in self._maps.values():
                each.clear()

    # --- checks ---------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError("the engine is closed")

    def _check_batch(self, batch: WriteBatch) -> None:
        """Raise for the whole batch, before any of it is applied, if one of its operations is invalid."""
        for keyspace, start, end in batch.ranges:
            self._check_range(keyspace, start, end)
        for keyspace, key, _ in batch.operations:
            self._check_key(keyspace, key)

    def _check_range(self, keyspace: Keyspace[Any], start: Key | None, end: Key | None) -> None:
        for key in (start, end):
            self._check_key(keyspace, key, optional=True)

    def _check_key(self, keyspace: Keyspace[Any], key: Key | None, *, optional: bool = False) -> None:
        if keyspace.name not in self._maps:
            raise InvalidArgumentError(f"the engine was opened without keyspace {keyspace.name!r}")
        if not (optional and key is None) and not _fits(keyspace, key):
            raise InvalidArgumentError(f"{key!r} is not a key of keyspace {keyspace.name!r} (shape {keyspace.shape})")

    # --- versions; these methods need the lock held ----------------------------------

    def _set(self, name: str, key: Key, value: bytes | None, views: list[int]) -> None:
        """Add a version made by the current write; a later version of the same write replaces it."""
        versions: _Versions = self._maps[name].setdefault(key, [])
        if versions and versions[-1][0] == self._sequence:
            versions.pop()
        versions.append((self._sequence, value))
        self._prune(name, key, views)

    def _prune(self, name: str, key: Key, views: list[int]) -> None:
        """Keep only the versions of a key that one of ``views`` sees; the last of them is the current state."""
        versions: _Versions = self._maps[name][key]
        seen = {bisect_right(versions, view, key=itemgetter(0)) - 1 for view in views}
        versions[:] = [version for place, version in enumerate(versions) if place in seen]
        while versions and versions[0][1] is None:  # a deletion as the oldest version is the same as no version
            del versions[0]
        if len(versions) > 1:
            self._held.add((name, key))
        else:
            self._held.discard((name, key))
        if not versions:
            del self._maps[name][key]

    def _sweep(self, views: list[int]) -> None:
        """Prune every key that keeps versions for views that may be closed."""
        for name, key in list(self._held):
            self._prune(name, key, views)
        self._sweep_at = SWEEP_KEYS + 2 * len(self._held)

    def _living(self) -> list[int]:
        return [*sorted({view.sequence for view in self._views if not view.closed}), self._sequence]

    def _open_view(self) -> _View:
        view = _View(self._sequence)
        self._views.add(view)
        return view

    def _read(self, keyspace: Keyspace[Any], keys: Sequence[Key], sequence: int) -> list[bytes | None]:
        for key in keys:
            self._check_key(keyspace, key)
        versions = self._maps[keyspace.name]
        return [_visible(versions.get(key, ()), sequence) for key in keys]

    # --- views ------------------------------------------------------------------------

    def _chunks(
        self,
        view: _View | None,
        keyspace: Keyspace[K],
        start: K | None,
        end: K | None,
        reverse: bool,
        limit: int | None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the pairs of a range in ``view``, or in a new view; the lock is held for a few keys at a time."""
        inclusive = (True, False)
        while limit is None or limit > 0:
            with self._lock:
                view = self._check_view(view)
                room = CHUNK_PAIRS if limit is None else min(limit, CHUNK_PAIRS)
                empty = inclusive[0] and is_empty(start, end)
                inside = () if empty else self._maps[keyspace.name].irange(start, end, inclusive, reverse)
                chunk, last = self._collect(keyspace.name, inside, view.sequence, room)
            if chunk:
                yield chunk
            if last is None:
                return
            if limit is not None:
                limit -= len(chunk)
            if reverse:
                end = last
            else:
                start, inclusive = last, (False, False)

    def _collect(
        self, name: str, keys: Iterator[K] | tuple[()], sequence: int, room: int
    ) -> tuple[list[tuple[K, bytes]], K | None]:
        """Return the visible pairs of the first few keys and the last of these keys, None past the end."""
        versions = self._maps[name]
        chunk: list[tuple[K, bytes]] = []
        size = 0
        last = None
        for key in islice(keys, room):
            value = _visible(versions[key], sequence)
            if value is not None:
                size += len(value)
                if size > CHUNK_BYTES and chunk:
                    break
                chunk.append((key, value))
            last = key
        return chunk, last

    def _check_view(self, view: _View | None) -> _View:
        self._check_open()
        if view is None:
            return self._open_view()
        if view.closed:
            raise DatabaseClosedError("the snapshot is closed")
        return view


class _MemorySnapshot(Snapshot):
    """The engine as one view sees it."""

    def __init__(self, engine: MemoryEngine, view: _View) -> None:
        self._engine = engine
        self._view = view

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        with self._engine._lock:  # noqa: SLF001 - a snapshot is a part of its engine
            view = self._engine._check_view(self._view)  # noqa: SLF001
            return self._engine._read(keyspace, keys, view.sequence)  # noqa: SLF001

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        self._engine._check_range(keyspace, start, end)  # noqa: SLF001
        return self._engine._chunks(self._view, keyspace, start, end, reverse, limit)  # noqa: SLF001

    def close(self) -> None:
        self._view.closed = True


def _visible(versions: Sequence[tuple[int, bytes | None]], sequence: int) -> bytes | None:
    """Return the value of the last version that is not newer than ``sequence``."""
    for made, value in reversed(versions):
        if made <= sequence:
            return value
    return None


def _fits(keyspace: Keyspace[Any], key: Key | None) -> bool:
    """Return whether a key has its keyspace's shape."""
    if keyspace.shape is None:
        return isinstance(key, bytes)
    return (
        isinstance(key, tuple)
        and len(key) == len(keyspace.shape)
        and all(
            isinstance(part, int) and 0 <= part >> 8 * width < 1
            for part, width in zip(key, keyspace.shape, strict=True)
        )
    )
