"""The contract between a backend and a layout: ordered keys, atomic batches.

A **backend** opens the engine of one shard. An **engine** keeps a fixed set of keyspaces,
each an ordered map from keys of one shape to bytes. Layouts, and the logical layer for its
state, are the only callers.

What must hold, for every engine:

* Keys are ordered as bytes, or as tuples of unsigned numbers; a keyspace keeps one value a key.
* `Engine.write` is atomic over all keyspaces, for readers and across crashes. After it returns
  every later read sees all of it. With ``sync`` it is on disk; without, it is in the engine's
  log, which a killed process leaves intact. Engines that can't tell the two apart sync always
  and don't declare the capability ``sync``.
* A scan, once its first chunk was asked for, sees the engine as it was then, whatever is
  written while it runs. So does a snapshot from its making.
* Keys of bytes of up to 65,550 bytes (a topic and a few more) and values of up to 300 MB work.
* All methods may be called from any thread; writes are serialised by the caller.
* Errors are `EngineError`, its kind `CorruptionError`, `StorageFullError`, and `TooManyOpenFilesError`; nothing
  is swallowed. After a failed write the caller writes no more until the engine is opened again.
* A key that doesn't fit its keyspace raises `InvalidArgumentError` before anything is applied. A
  range whose end isn't behind its start is empty.
* `close` ends open scans and snapshots, which then raise `DatabaseClosedError`, gives back every
  lock and handle, and may be called twice.
* A forked child uses shards of its own as any process does, or raises `ForkedProcessError` at once. It neither uses nor
  closes what its parent has open; see `topicstore.contract.forking`.

Capabilities a backend may declare (see `topicstore.contract.plugin_specs.BackendSpec`):

========================  =======================================================================
``persistent``            what was written is there after close and open
``sync``                  tells ``commit`` from ``sync``
``checkpoint``            `Engine.checkpoint`
``concurrent_readers``    another process may open the shard to read while this one writes
``fast_seek``             a scan's first chunk costs microseconds, so leaping beats walking
``checksums``             what is damaged on disk raises `CorruptionError`, and is never handed out as data
``reclaims_disk``         deleted bytes go back to the disk, as later writes come or by `Engine.reclaim`
``sql``                   `WriteBatch.put_rows` and `Engine.sql`
========================  =======================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs

from .errors import InvalidArgumentError, UnsupportedError
from .options import NoOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CAPABILITIES",
    "DATA",
    "GENERATION_END",
    "INDEX",
    "KEYS",
    "KEYSPACES",
    "META",
    "STATE",
    "Backend",
    "Engine",
    "EngineStats",
    "Key",
    "Keyspace",
    "Reader",
    "Snapshot",
    "WriteBatch",
    "encode_generation",
]

CAPABILITIES = frozenset(
    ("persistent", "sync", "checkpoint", "concurrent_readers", "fast_seek", "checksums", "reclaims_disk", "sql")
)

Key = Any
"""bytes, or a tuple of unsigned ints, by the keyspace's shape."""


@attrs.frozen
class Keyspace:
    """One ordered map of an engine.

    ``shape`` is None for keys of bytes, else the widths in bytes (4 or 8) of the unsigned
    numbers in its tuples. Engines whose keys are bytes store them as `topicstore.contract.key_encoding` does.
    """

    name: str
    shape: tuple[int, ...] | None = None


STATE = Keyspace("state")
"""The logical layer's own: positions, generations, and what `topicstore.shard.state` keeps."""
META = Keyspace("meta")
"""A layout's dictionaries and learned structure. Keys begin with the generation."""
DATA = Keyspace("data", (4, 8, 8))
"""Messages by (generation, stream, position)."""
INDEX = Keyspace("index", (4, 8, 8))
"""What helps to find messages, by (generation, layout's choice, position)."""
KEYS = Keyspace("keys")
"""Messages of layouts whose keys don't fit ``data``. Keys begin with the generation."""

KEYSPACES = (STATE, META, DATA, INDEX, KEYS)
"""Every shard has these and no others, so that readers in other processes know them beforehand."""

GENERATION_END = 2**32 - 1
"""Generations are numbered from 1 to below this."""


def encode_generation(generation: int) -> bytes:
    """Return the four bytes with which a generation's keys of bytes begin."""
    return generation.to_bytes(4, "big")


class WriteBatch:
    """Changes that `Engine.write` applies together.

    First ``ranges``: (keyspace, start, end) deletes the keys from ``start`` to before ``end``. Then
    ``runs`` in their order: (keyspace, keys, values) sets each key to its value, or removes it where
    that is None. `operations` has the same one by one. Last ``rows``: (keyspace, table, rows) appends,
    of engines with ``sql``.
    """

    __slots__ = ("ranges", "rows", "runs", "size")

    def __init__(self) -> None:
        self.runs: list[tuple[Keyspace, list[Key], list[bytes | None]]] = []
        self.ranges: list[tuple[Keyspace, Key, Key]] = []
        self.rows: list[tuple[Keyspace, str, pa.Table]] = []
        self.size = 0
        """Bytes of the values put."""

    def put(self, keyspace: Keyspace, key: Key, value: bytes) -> None:
        """Set ``key`` to ``value``, which may be empty."""
        self._add(keyspace, key, value)
        self.size += len(value)

    def put_many(self, keyspace: Keyspace, keys: Sequence[Key], values: Sequence[bytes]) -> None:
        """Set each of ``keys`` to its value. They are put fastest in their order."""
        if len(keys) != len(values):
            raise InvalidArgumentError(f"{len(keys)} keys and {len(values)} values")
        if keys:
            self.runs.append((keyspace, list(keys), list(values)))
            self.size += sum(map(len, values))

    def delete(self, keyspace: Keyspace, key: Key) -> None:
        """Remove ``key`` if it is there."""
        self._add(keyspace, key, None)

    def delete_range(self, keyspace: Keyspace, start: Key, end: Key) -> None:
        """Remove the keys from ``start`` (inclusive) to ``end`` (exclusive)."""
        self.ranges.append((keyspace, start, end))

    def put_rows(self, keyspace: Keyspace, table: str, rows: pa.Table, size: int) -> None:
        """Append typed rows to a table of a keyspace, for `Engine.sql` to read (``sql``).

        The first columns are the numbers of the keyspace's tuples, under names of the caller's
        choice: what deletes a key or a range of the keyspace deletes the rows with such keys too.
        Rows stay in the order of their puts, and none replaces another. The first put, which may be
        of no rows, makes the table; all have the same schema. ``size``: bytes to count for them.
        """
        self.rows.append((keyspace, table, rows))
        self.size += size

    def without_rows(self) -> Self:
        """Return the batch. Raises `UnsupportedError` if it has rows: for engines without ``sql``."""
        if self.rows:
            raise UnsupportedError("the engine keeps no rows (capability 'sql')")
        return self

    @property
    def operations(self) -> list[tuple[Keyspace, Key, bytes | None]]:
        """(keyspace, key, value) of each key set, and (keyspace, key, None) of each removed, in order."""
        return [(run[0], key, value) for run in self.runs for key, value in zip(run[1], run[2], strict=True)]

    def _add(self, keyspace: Keyspace, key: Key, value: bytes | None) -> None:
        if not self.runs or self.runs[-1][0] is not keyspace:
            self.runs.append((keyspace, [], []))
        _, keys, values = self.runs[-1]
        keys.append(key)
        values.append(value)

    def __bool__(self) -> bool:
        return bool(self.runs or self.ranges or self.rows)


@attrs.frozen(kw_only=True)
class EngineStats:
    """What an engine says of itself."""

    disk_bytes: int
    """Bytes of the shard's files, 0 for an engine without files."""
    memory_bytes: int
    """Bytes of write buffers and caches, as far as the engine tells."""
    details: Mapping[str, str | int] = attrs.field(factory=dict)
    """Anything else worth showing to a person."""


class Reader(ABC):
    """What can be read: an engine as it is, or a snapshot as it was."""

    @abstractmethod
    def get(self, keyspace: Keyspace, key: Key) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""

    @abstractmethod
    def get_many(self, keyspace: Keyspace, keys: Sequence[Key]) -> list[bytes | None]:
        """Return the value of each key, None where there is none, in the order asked."""

    @abstractmethod
    def scan(
        self,
        keyspace: Keyspace,
        start: Key | None = None,
        end: Key | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[Key, bytes]]]:
        """Yield (key, value) pairs with ``start`` <= key < ``end`` in key order, in non-empty lists.

        ``reverse`` goes down from the highest key below ``end``. ``limit`` bounds the pairs in all.
        None is an open end. Lists hold about a megabyte at most, or one pair. The iterator may be
        dropped, or closed with its ``close`` method, at any moment.
        """


class Snapshot(Reader):
    """A view that later writes don't change. A context manager; close it soon."""

    @abstractmethod
    def close(self) -> None:
        """Give the view back. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine(Reader):
    """One shard's storage. See the head of the module for what must hold."""

    @abstractmethod
    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch: all of it or nothing."""

    @abstractmethod
    def flush_log(self) -> None:
        """Return when everything written so far is on disk."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return a view of all keyspaces as they are now."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return sizes. Cheap: nothing is read from disk but file sizes."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. May be called twice."""

    def reclaim(self, keyspace: Keyspace, start: Key, end: Key) -> None:
        """Give the disk space of a range that was deleted back; by default nothing. May take long."""
        return

    def verify(self) -> Iterator[str]:
        """Read everything with the engine's own checksums and yield a sentence a damage; by default nothing."""
        return iter(())

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard, as it is now, into the new directory ``path`` (``checkpoint``)."""
        raise UnsupportedError(f"{type(self).__name__} can't make checkpoints (capability 'checkpoint')")

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        """Run a statement that only reads over the tables of `WriteBatch.put_rows`; return what it gives (``sql``).

        ``beside``: other engines of the same backend object, whose tables are read as one with those
        of the same name here. Sees one moment of each engine. Raises `InvalidArgumentError` for a
        statement that is wrong, that writes, or that is not one.
        """
        raise UnsupportedError(f"{type(self).__name__} does not speak SQL (capability 'sql')")


class Backend(ABC):
    """Opens engines. Made once per database, with the options of its ``Options`` class."""

    Options: ClassVar[type] = NoOptions
    """A frozen attrs class; its fields, defaults and docstring are the backend's options.

    They tune and may differ from one opening to the next; nothing stored may depend on them.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    def room(self) -> int:
        """Bytes of disk that opening a shard and reclaiming a part of it need at most for a while; by default none.

        As many are held ready, so that what is stored can be dropped when the disk is full.
        """
        return 0

    @abstractmethod
    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace], *, create: bool) -> Engine:
        """Open the shard kept in the directory ``path``; with ``create`` make it if it isn't there.

        Without ``create`` a shard that isn't there raises `EngineError`.

        The directory may be missing, its parent not. A backend that is not ``persistent`` leaves
        ``path`` alone.

        The names of files that were made by the first opening are synced by its caller, those of later ones by the
        engine. Whatever a power failure left, the shard has all writes up to one moment, which is that of the last
        `Engine.flush_log` or later, and each of them wholly. A backend may cut behind that moment by itself. One that
        can't tell what was cut off from what was synced and is damaged raises `LogDamagedError`, and has changed
        nothing: then `open_reader` shows what is left, and `repair_log` cuts.
        """

    def repair_log(self, path: Path, *, salvage: bool) -> None:
        """Drop what keeps a shard's log from being read, so that `open_shard` can open it; nobody has it open.

        With ``salvage`` only the writes that can't be read go, else also all behind the first of them.
        """
        raise UnsupportedError(f"{type(self).__name__} repairs no log")

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace], *, alone: bool) -> Engine:
        """Open the shard kept in ``path`` to see what is committed now, and change nothing of it.

        ``alone``: nobody else has the shard open while this engine is; where `open_shard` raises `LogDamagedError`
        this shows what is before the damage. Otherwise somebody may be writing
        it, and the engine goes on seeing this one moment: every batch that was committed before the call,
        none only in part. Raises `UnsupportedError`, saying why, if the backend can't do that.

        What the engine hands out is as durable as what it was read from, once `Engine.flush_log` has
        returned. By default a shard is opened as for writing, alone.
        """
        if not alone:
            raise UnsupportedError(f"{type(self).__name__} reads no shard that somebody else may write")
        return self.open_shard(path, keyspaces, create=False)
