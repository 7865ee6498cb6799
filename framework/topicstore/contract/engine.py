"""The contract between a backend and a layout: ordered keys, atomic batches.

A **backend** opens the engine of one shard. An **engine** keeps a fixed set of keyspaces,
each an ordered map from keys of one shape to bytes. Only layouts call an engine, and topicstore's shards and storage
(the logical layer), which keep state in it.

Every engine must guarantee:

* Keys are ordered as bytes, or as tuples of unsigned numbers; a keyspace keeps one value for each key.
* `Engine.write` is atomic over all keyspaces, for readers and across crashes. After it returns,
  every read sees all of it. With ``sync`` it is on disk; without, it is in the engine's
  log, which survives if the process is killed. Engines that don't distinguish the two always sync,
  and don't declare the capability ``sync``.
* A scan sees the engine as of the request of its first chunk, whatever is written while it
  runs. A snapshot sees the engine as of the snapshot's creation. Neither view changes, however long it is open, however
  many others are open, and whatever is written, reclaimed or closed meanwhile.
* Every reading method shows every change: `Reader.get`, `Reader.get_many` and scans in both directions. This also holds
  for keys that were read before the change, after `Engine.reclaim`, after reopening, and in other processes.
* Keys of bytes of up to 65,550 bytes (a topic and a few more) and values of up to 300 MB work. So do batches,
  calls of `Reader.get_many` and scans of any number of keys. Keys and values are any bytes, and stay as they are.
* All methods are thread-safe; the caller serialises writes. `Engine.flush_log` covers every write that returned before
  its call, in whichever thread, also while another flush is under way.
* A read, a scan, a snapshot or an engine that has ended occupies no memory. A running scan holds about one chunk.
* Every failure is raised, as `EngineError`, its subclass `CorruptionError`, `StorageFullError` or
  `TooManyOpenFilesError`. After a failed write the caller doesn't write until the shard is opened again, or until
  `Engine.recover` returns True.
* A key that doesn't fit its keyspace raises `InvalidArgumentError` before anything is applied. A
  range whose end isn't after its start is empty.
* `close` invalidates open scans and snapshots, which then raise `DatabaseClosedError`. It releases every lock and
  handle, even if other objects still refer to them or an error was raised, and is idempotent. Closing an engine again
  doesn't affect an engine that opened the shard afterwards. Closing one engine doesn't affect its siblings.
* A forked child can open other shards like any process, or raises `ForkedProcessError` immediately. It neither uses nor
  closes shards that its parent has open; see `topicstore.contract.forking`.

Capabilities a backend may declare (see `topicstore.contract.plugin_specs.BackendSpec`):

========================  =======================================================================
``persistent``            writes survive closing the engine and opening the shard again
``sync``                  a write without ``sync`` is cheaper, and less durable, than one with it
``checkpoint``            `Engine.checkpoint`
``concurrent_readers``    another process may open the shard to read while this one writes
``fast_seek``             a scan's first chunk costs microseconds, so seeking is cheaper than reading on
``checksums``             reading damaged data raises `CorruptionError`; it is never returned
``reclaims_disk``         the disk space of deleted data is freed, by later writes or by `Engine.reclaim`
``sql``                   `WriteBatch.put_rows` and `Engine.sql`
========================  =======================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import attrs

from .errors import CorruptionError, InvalidArgumentError, UnsupportedError
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
    "EngineInfo",
    "K",
    "Key",
    "Keyspace",
    "Reader",
    "Snapshot",
    "WriteBatch",
    "encode_generation",
    "is_empty",
]

CAPABILITIES = frozenset(
    ("persistent", "sync", "checkpoint", "concurrent_readers", "fast_seek", "checksums", "reclaims_disk", "sql")
)

Key: TypeAlias = bytes | tuple[int, ...]
"""Any key: bytes, or a tuple of unsigned integers, as the keyspace's shape says."""

K = TypeVar("K", bound=Key)
"""The type of the keys of one keyspace."""


@attrs.frozen
class Keyspace(Generic[K]):
    """One ordered map of an engine.

    ``shape`` is None for keys of bytes, else the widths in bytes (4 or 8) of the unsigned
    numbers in its tuples. The type parameter says the same to a type checker: ``Keyspace[bytes]`` or
    ``Keyspace[tuple[int, int, int]]``; a keyspace of either kind is a ``Keyspace[Any]``.
    Engines whose keys are bytes store them as `topicstore.contract.key_encoding` does.
    """

    name: str
    shape: tuple[int, ...] | None = None


STATE: Keyspace[bytes] = Keyspace("state")
"""The shard's own records: positions, generations, and the values of `topicstore.shard.state`."""
META: Keyspace[bytes] = Keyspace("meta")
"""A layout's dictionaries and learned structure. Keys begin with the generation."""
DATA: Keyspace[tuple[int, int, int]] = Keyspace("data", (4, 8, 8))
"""Messages by (generation, stream, position)."""
INDEX: Keyspace[tuple[int, int, int]] = Keyspace("index", (4, 8, 8))
"""A layout's indexes of messages, by (generation, a number of the layout's choice, position)."""
KEYS: Keyspace[bytes] = Keyspace("keys")
"""Messages of layouts whose keys don't fit ``data``. Keys begin with the generation."""

KEYSPACES: tuple[Keyspace[Any], ...] = (STATE, META, DATA, INDEX, KEYS)
"""All keyspaces of every shard. The set is fixed, so that readers in other processes can open all of them."""

GENERATION_END = 2**32 - 1
"""The exclusive upper bound of generation numbers, which start at 1."""


def encode_generation(generation: int) -> bytes:
    """Return the four bytes that begin a generation's keys in keyspaces without a shape."""
    return generation.to_bytes(4, "big")


def is_empty(start: Key | None, end: Key | None) -> bool:
    """Return whether a range is empty because its end isn't after its start. None means unbounded."""
    if isinstance(start, bytes) and isinstance(end, bytes):
        return end <= start
    return isinstance(start, tuple) and isinstance(end, tuple) and end <= start


class WriteBatch:
    """Changes that `Engine.write` applies atomically.

    First come ``ranges``: (keyspace, start, end) deletes the keys from ``start``, inclusive, to ``end``, exclusive.
    Then ``runs``, in their order: (keyspace, keys, values) sets each key to its value, or removes the key if the
    value is None. `operations` returns the runs as single changes. Last come ``rows``: (keyspace, table, rows) appends
    rows to a table, in engines with the capability ``sql``.
    """

    __slots__ = ("ranges", "rows", "runs", "size")

    def __init__(self) -> None:
        self.runs: list[tuple[Keyspace[Any], list[Key], list[bytes | None]]] = []
        self.ranges: list[tuple[Keyspace[Any], Key, Key]] = []
        self.rows: list[tuple[Keyspace[Any], str, pa.Table]] = []
        self.size = 0
        """The size of the values put, in bytes."""

    def put(self, keyspace: Keyspace[K], key: K, value: bytes) -> None:
        """Set ``key`` to ``value``, which may be empty."""
        self._add(keyspace, key, value)
        self.size += len(value)

    def put_many(self, keyspace: Keyspace[K], keys: Sequence[K], values: Sequence[bytes]) -> None:
        """Set each of ``keys`` to its value. This is fastest if the keys are in order."""
        if len(keys) != len(values):
            raise InvalidArgumentError(f"{len(keys)} keys and {len(values)} values")
        if keys:
            self.runs.append((keyspace, list(keys), list(values)))
            self.size += sum(map(len, values))

    def change_many(self, keyspace: Keyspace[K], keys: Sequence[K], values: Sequence[bytes | None]) -> None:
        """Set each of ``keys`` to its value; None removes the key if it is there."""
        if len(keys) != len(values):
            raise InvalidArgumentError(f"{len(keys)} keys and {len(values)} values")
        if keys:
            self.runs.append((keyspace, list(keys), list(values)))
            self.size += sum([len(value) for value in values if value is not None])

    def delete(self, keyspace: Keyspace[K], key: K) -> None:
        """Remove ``key`` if it is there."""
        self._add(keyspace, key, None)

    def delete_range(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Remove the keys from ``start`` (inclusive) to ``end`` (exclusive)."""
        self.ranges.append((keyspace, start, end))

    def put_rows(self, keyspace: Keyspace[tuple[int, int, int]], table: str, rows: pa.Table, size: int) -> None:
        """Append typed rows to a table of a keyspace, for `Engine.sql` to read.

        Requires the capability ``sql``. The first columns hold the numbers of the keyspace's tuples, under names
        chosen by the caller. Deleting a key or a range of the keyspace also deletes the rows with these keys. Rows
        keep the order in which they were put, and never replace each other. The first put creates the table, and may
        have no rows; all puts have the same schema. The method adds ``size``, in bytes, to the size of the batch.
        """
        self.rows.append((keyspace, table, rows))
        self.size += size

    def without_rows(self) -> Self:
        """Return the batch; raise `UnsupportedError` if it has rows. Engines without ``sql`` call it."""
        if self.rows:
            raise UnsupportedError("the engine keeps no rows (capability 'sql')")
        return self

    @property
    def operations(self) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        """Return (keyspace, key, value) of each key set and (keyspace, key, None) of each key removed, in order."""
        return [(run[0], key, value) for run in self.runs for key, value in zip(run[1], run[2], strict=True)]

    def _add(self, keyspace: Keyspace[K], key: K, value: bytes | None) -> None:
        runs = self.runs
        if runs and runs[-1][0] is keyspace:
            _, keys, values = runs[-1]
            keys.append(key)
            values.append(value)
        else:
            runs.append((keyspace, [key], [value]))

    def __bool__(self) -> bool:
        return bool(self.runs or self.ranges or self.rows)


@attrs.frozen(kw_only=True)
class EngineInfo:
    """The size of an engine, and further statistics."""

    disk_bytes: int
    """The size of the shard's files in bytes; 0 for an engine without files."""
    memory_bytes: int
    """The size of write buffers and caches in bytes, as far as the engine reports it."""
    details: Mapping[str, str | int] = attrs.field(factory=dict)
    """Other values worth showing to a person, by name."""


class Reader(ABC):
    """The read operations of an engine, which shows its current state, and of a snapshot, which shows a past state."""

    @abstractmethod
    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None if the key is absent."""

    @abstractmethod
    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, or None if the key is absent, in the order of ``keys``."""

    @abstractmethod
    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield (key, value) pairs with ``start`` <= key < ``end`` in key order, in non-empty lists.

        With ``reverse`` the keys descend from the highest below ``end``. ``limit`` is the maximum number of pairs in
        all lists together. None as ``start`` or ``end`` means unbounded. A list holds at most about a megabyte, or one
        larger pair. The iterator may be dropped, or closed with its ``close`` method, at any time. At its end it keeps
        no data from being reclaimed.
        """


class Snapshot(Reader):
    """A view that later writes don't change, and a context manager. Close it soon: engines keep old data for it."""

    @abstractmethod
    def close(self) -> None:
        """Release the snapshot. This is idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine(Reader):
    """The storage engine of one shard. The module's docstring states its guarantees."""

    @abstractmethod
    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch atomically; with ``sync``, fsync it before returning."""

    @abstractmethod
    def flush_log(self) -> None:
        """Fsync everything written so far; return when it is on disk."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return a snapshot of all keyspaces."""

    @abstractmethod
    def info(self) -> EngineInfo:
        """Return the sizes of the engine's data. This is cheap: only the sizes of files are read from disk."""

    @abstractmethod
    def close(self) -> None:
        """Release every lock and handle, even if an error occurs. This is idempotent.

        If a call is interrupted, for example by Ctrl-C, the next call finishes it. If `flush_log` has returned after
        the last write, the closed shard survives a power failure.

        The call waits for calls of other threads, which must hold a `topicstore.contract.forking.ProcessLock`
        meanwhile. A signal handler that closes the database may have interrupted such a call of its own thread. The
        framework detects this by the lock, and lets another thread close the engine.
        """

    def recover(self) -> bool:
        """Try to take writes again after a failed write, without being opened again; return whether that succeeded.

        After True the engine has all acknowledged writes, and the failed write either as a whole or not at all; its
        contents are on disk. After False the caller closes the engine and opens the shard again. The default returns
        False.
        """
        return False

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Free the disk space of a deleted range of keys. This may take long. The default does nothing."""
        return

    def verify(self) -> Iterator[str]:
        """Read all keyspaces, check the engine's own checksums, and yield a description of each damaged place.

        The default yields nothing.
        """
        return iter(())

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy of the shard into the new directory ``path``.

        Requires the capability ``checkpoint``.
        """
        raise UnsupportedError(f"{type(self).__name__} can't make checkpoints (capability 'checkpoint')")

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        """Make a checkpoint in three steps; the generator yields after the first and after the second.

        The first step prepares the snapshot, such as by flushing memtables, and may take long. The second takes the
        snapshot; it must be short, because writers wait. The third copies the files. Closing the generator earlier
        releases its resources. The default makes the whole checkpoint in the second step.
        """
        yield
        self.checkpoint(path)
        yield

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        """Run a read-only SQL statement over the tables of `WriteBatch.put_rows`, and return its result.

        Requires the capability ``sql``. ``beside`` are other engines of the same backend object; tables of the same
        name in all engines are read as one table. The statement sees one snapshot of each engine. Raises
        `InvalidArgumentError` if the text isn't exactly one statement, or if the statement is wrong or writes.
        """
        raise UnsupportedError(f"{type(self).__name__} does not speak SQL (capability 'sql')")


class Backend(ABC):
    """An object that opens the engines of one database, with options of its ``Options`` class."""

    Options: ClassVar[type] = NoOptions
    """A frozen attrs class that defines the backend's options, their defaults and their documentation.

    Options tune the engine and may differ at every opening, so the stored form must not depend on them.
    """

    unneeded: ClassVar[Sequence[str]] = ()
    """Patterns (`fnmatch`) of the names of files and directories that aren't needed to open a shard, such as ``LOG*``.

    All other files must remain as `Engine.close` and `Engine.checkpoint` leave them until the shard is opened for
    writing. A file that is missing by then, or that has another size, is reported as data loss.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    def room(self) -> int:
        """The maximum disk space, in bytes, that opening a shard and reclaiming a part of it need temporarily.

        The framework reserves this space, so that messages can be deleted when the disk is full. The default is 0.
        """
        return 0

    @property
    def room_at_once(self) -> int:
        """The part of `room`, in bytes, that must be free before a shard is opened, so that it takes writes.

        The default is 0, for engines whose opening raises `StorageFullError` if the disk is full; the framework then
        frees the reserved space and tries again.
        """
        return 0

    def check_path(self, path: Path) -> None:  # noqa: B027 - most engines take every path
        """Raise `InvalidArgumentError` if the engine can't keep shards below the directory ``path``.

        The framework calls it before it creates any file there. The default accepts every path.
        """

    @abstractmethod
    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> Engine:
        """Open the shard in the directory ``path``; with ``create``, create the shard if it doesn't exist.

        Without ``create``, a shard that doesn't exist, or whose main file is missing, raises `DataLossError`, because
        it existed before; no file is created in that case.

        The directory may be missing, but not its parent. A backend that is not ``persistent`` doesn't touch
        ``path``.

        The caller fsyncs the directory entries of files that are created when a shard is first opened; the engine
        fsyncs those of files created later. After a power failure, recovery yields a prefix of the write history that
        includes all writes up to the last `Engine.flush_log`. The backend may truncate the log after that point.

        A backend that can't distinguish a torn tail from damage to fsynced writes raises `LogDamagedError` and changes
        nothing. `open_damaged` then shows the writes that are left, and `repair_log` truncates the log. Both get the
        error. A subclass of `LogDamagedError` may carry the offset of the truncation. Then the log isn't searched
        again, and `repair_log` keeps the writes that `open_damaged` has shown.
        """

    def repair_log(self, path: Path, damaged: CorruptionError) -> None:
        """Truncate a shard's log before the first unreadable write, so that `open_shard` can open the shard.

        Opening a database deletes nothing: the truncated part is kept in a file beside the log, unless it is all zeros.
        ``damaged`` is the error that `open_shard` raised; for an error that isn't about the log, do nothing. The shard
        isn't open anywhere.
        """
        raise UnsupportedError(f"{type(self).__name__} repairs no log")

    def open_damaged(
        self, path: Path, keyspaces: Sequence[Keyspace[Any]], damaged: CorruptionError, *, salvage: bool
    ) -> Engine:
        """Open a shard read-only in the state in which `repair_log` would leave it. The shard isn't open anywhere.

        ``damaged`` is the error that `open_shard` raised. With ``salvage`` the engine also shows every completely
        readable write after the damage, although earlier writes are missing.
        """
        raise UnsupportedError(f"{type(self).__name__} repairs no log")

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, alone: bool) -> Engine:
        """Open the shard in ``path`` read-only, as of the call, without changing its files.

        ``alone`` promises that nothing else has the shard open while this engine is open. Without it another process
        may be writing to the shard, and the engine shows a snapshot: every batch that was committed before the call,
        and no partial batch. Raises `UnsupportedError`, with the reason, if the backend can't do that. A backend with
        ``concurrent_readers`` does both even where the directory can't be written.

        If `open_shard` would raise `LogDamagedError`, the engine shows the state in which `repair_log` would leave the
        shard, with or without ``alone``.

        After `Engine.flush_log` has returned, everything that the engine shows is on disk. The default opens the shard
        as for writing, and only with ``alone``.
        """
        if not alone:
            raise UnsupportedError(f"{type(self).__name__} reads no shard that somebody else may write")
        return self.open_shard(path, keyspaces, create=False)
