"""The contract between a backend and a layout: ordered keys, atomic batches.

A **backend** opens the engine of one shard. An **engine** keeps a fixed set of keyspaces,
each an ordered map from keys of one shape to bytes. Layouts, and the logical layer for its
state, are the only callers.

What must hold, for every engine:

* Keys are ordered as bytes, or as tuples of unsigned numbers; a keyspace keeps one value for each key.
* `Engine.write` is atomic over all keyspaces, for readers and across crashes. After it returns,
  every read sees all of it. With ``sync`` it is on disk; without, it is in the engine's
  log, which survives if the process is killed. Engines that don't distinguish the two always sync,
  and don't declare the capability ``sync``.
* A scan sees the engine as it was when its first chunk was requested, whatever is written while it
  runs. A snapshot sees it as it was when the snapshot was made.
* Keys of bytes of up to 65,550 bytes (a topic and a few more) and values of up to 300 MB work.
* All methods may be called from any thread; writes are serialised by the caller.
* Errors are `EngineError`, its subclass `CorruptionError`, `StorageFullError` and `TooManyOpenFilesError`; none
  is ignored. After a failed write the caller writes no more until the shard is opened again, or until
  `Engine.recover` returns True.
* A key that doesn't fit its keyspace raises `InvalidArgumentError` before anything is applied. A
  range whose end isn't after its start is empty.
* `close` ends open scans and snapshots, which then raise `DatabaseClosedError`. It releases every lock and
  handle, even if other objects still refer to them or an error was raised, and may be called twice.
* A forked child uses shards of its own as any process does, or raises `ForkedProcessError` at once. It neither uses nor
  closes those that its parent has open; see `topicstore.contract.forking`.

Capabilities a backend may declare (see `topicstore.contract.plugin_specs.BackendSpec`):

========================  =======================================================================
``persistent``            writes outlive the engine: they are there when the shard is opened again
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
"""The logical layer's own records: positions, generations, and the values of `topicstore.shard.state`."""
META: Keyspace[bytes] = Keyspace("meta")
"""A layout's dictionaries and learned structure. Keys begin with the generation."""
DATA: Keyspace[tuple[int, int, int]] = Keyspace("data", (4, 8, 8))
"""Messages by (generation, stream, position)."""
INDEX: Keyspace[tuple[int, int, int]] = Keyspace("index", (4, 8, 8))
"""A layout's indexes of messages, by (generation, a number of the layout's choice, position)."""
KEYS: Keyspace[bytes] = Keyspace("keys")
"""Messages of layouts whose keys don't fit ``data``. Keys begin with the generation."""

KEYSPACES: tuple[Keyspace[Any], ...] = (STATE, META, DATA, INDEX, KEYS)
"""The keyspaces of every shard. There are no others, so readers in other processes know them beforehand."""

GENERATION_END = 2**32 - 1
"""The number that generations stay below; they are numbered from 1."""


def encode_generation(generation: int) -> bytes:
    """Return the four bytes that begin a generation's keys in keyspaces without a shape."""
    return generation.to_bytes(4, "big")


def is_empty(start: Key | None, end: Key | None) -> bool:
    """Return whether a range holds no key because its end isn't after its start. None is an open end."""
    if isinstance(start, bytes) and isinstance(end, bytes):
        return end <= start
    return isinstance(start, tuple) and isinstance(end, tuple) and end <= start


class WriteBatch:
    """Changes that `Engine.write` applies together.

    First come ``ranges``: (keyspace, start, end) deletes the keys from ``start``, inclusive, to ``end``, exclusive.
    Then ``runs``, in their order: (keyspace, keys, values) sets each key to its value, or removes the key if the
    value is None. `operations` gives the runs as single changes. Last come ``rows``: (keyspace, table, rows) appends
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

        Requires the capability ``sql``. The first columns are the numbers of the keyspace's tuples, under names of
        the caller's choice: deleting a key or a range of the keyspace also deletes the rows with these keys. Rows
        stay in the order in which they were put, and none replaces another. The first put makes the table, and may
        have no rows; all puts have the same schema. ``size`` is the number of bytes to count for the rows.
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
        if not self.runs or self.runs[-1][0] is not keyspace:
            self.runs.append((keyspace, [], []))
        _, keys, values = self.runs[-1]
        keys.append(key)
        values.append(value)

    def __bool__(self) -> bool:
        return bool(self.runs or self.ranges or self.rows)


@attrs.frozen(kw_only=True)
class EngineInfo:
    """An engine's size, and details for people."""

    disk_bytes: int
    """The size of the shard's files in bytes; 0 for an engine without files."""
    memory_bytes: int
    """The size of write buffers and caches in bytes, as far as the engine reports it."""
    details: Mapping[str, str | int] = attrs.field(factory=dict)
    """Other values worth showing to a person, by name."""


class Reader(ABC):
    """Something that keys can be read from: an engine as it is now, or a snapshot as it was when it was made."""

    @abstractmethod
    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""

    @abstractmethod
    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, or None where there is none, in the order of ``keys``."""

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

        With ``reverse`` the keys descend from the highest below ``end``. ``limit`` is the most pairs to yield in all.
        A ``start`` or ``end`` of None is no bound. A list holds about a megabyte at most, or one pair. The iterator
        may be dropped, or closed with its ``close`` method, at any time.
        """


class Snapshot(Reader):
    """A view that later writes don't change. It is a context manager. Close it soon: engines keep old data for it."""

    @abstractmethod
    def close(self) -> None:
        """Release the view. May be called twice."""

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
        """Apply the batch atomically; with ``sync``, return when it is on disk."""

    @abstractmethod
    def flush_log(self) -> None:
        """Return when everything written so far is on disk."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return a view of all keyspaces as they are now."""

    @abstractmethod
    def info(self) -> EngineInfo:
        """Return sizes. This is cheap: nothing but the sizes of files is read from disk."""

    @abstractmethod
    def close(self) -> None:
        """Release every lock and handle, even if something fails. May be called twice.

        A close that was interrupted, for example by Ctrl-C, is finished by the next call. If `flush_log` has returned
        before, the files that are left survive a power failure.

        It waits for calls of other threads. The calls that it waits for must hold a
        `topicstore.contract.forking.ProcessLock`. By it the framework knows that a signal handler which closes the
        database has interrupted such a call, and has another thread close the engine.
        """

    def recover(self) -> bool:
        """Take writes again after one failed, without being opened again; return whether the engine can do that.

        After True the engine has all that was acknowledged, and the failed write wholly or not at all. It was on disk
        before or is so now. After False the caller closes the engine and opens the shard again. The default returns
        False.
        """
        return False

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Free the disk space of a range that was deleted. May take long. The default does nothing."""
        return

    def verify(self) -> Iterator[str]:
        """Read everything, check the engine's own checksums, and yield a sentence for each damaged place.

        The default yields nothing.
        """
        return iter(())

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard, as it is now, into the new directory ``path``.

        Requires the capability ``checkpoint``.
        """
        raise UnsupportedError(f"{type(self).__name__} can't make checkpoints (capability 'checkpoint')")

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        """Do the work of `checkpoint` in three steps, after each of the first two of which the generator yields.

        The first step is what may take long before the snapshot, such as flushing memtables. The second is the
        snapshot; the framework admits no writer meanwhile, so it must be short. The third is copying. Closing the
        generator earlier releases what it holds. The default makes the whole checkpoint in the second step.
        """
        yield
        self.checkpoint(path)
        yield

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        """Run a read-only SQL statement over the tables of `WriteBatch.put_rows`, and return its result.

        Requires the capability ``sql``. ``beside`` are other engines of the same backend object; their tables are
        read as one with those of the same name in this engine. The statement sees one moment of each engine. Raises
        `InvalidArgumentError` for a statement that is wrong or that writes, and for a text that isn't exactly one
        statement.
        """
        raise UnsupportedError(f"{type(self).__name__} does not speak SQL (capability 'sql')")


class Backend(ABC):
    """An object that opens engines. One is made for each database, with the options of its ``Options`` class."""

    Options: ClassVar[type] = NoOptions
    """A frozen attrs class; its fields, defaults and docstring are the backend's options.

    They tune the engine and may differ each time that a database is opened; nothing stored may depend on them.
    """

    unneeded: ClassVar[Sequence[str]] = ()
    """Patterns (`fnmatch`) of the names of files and directories that aren't needed to open a shard, such as ``LOG*``.

    All other files must stay as `Engine.close` and `Engine.checkpoint` leave them until the shard is opened for
    writing: a file that is gone by then, or that has another size, is treated as lost.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    @property
    def room(self) -> int:
        """The most disk space, in bytes, that opening a shard and reclaiming a part of it need temporarily.

        The framework reserves as much, so that stored messages can be dropped when the disk is full. The default is 0.
        """
        return 0

    @property
    def room_at_once(self) -> int:
        """The part of `room` that must be free before a shard is opened, because otherwise it would take no writes.

        The default is 0: where an opening finds too little, it raises `StorageFullError`, and is tried again with it.
        """
        return 0

    def check_path(self, path: Path) -> None:  # noqa: B027 - most engines take every path
        """Raise `InvalidArgumentError` if the engine can't keep shards below the directory ``path``.

        It is called before anything is made there. By default every path is taken.
        """

    @abstractmethod
    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> Engine:
        """Open the shard kept in the directory ``path``; with ``create``, make it if it doesn't exist.

        Without ``create``, a shard that doesn't exist, or whose main file is gone, raises `DataLossError`, because it
        existed once; nothing is made then.

        The directory may be missing, but not its parent. A backend that is not ``persistent`` doesn't touch
        ``path``.

        The caller syncs the directory entries of files that are made when a shard is first opened; the engine syncs
        those of files made later. Whatever a power failure left, the shard has all writes up to one moment, each of
        them whole, and that moment is that of the last `Engine.flush_log` or later. A backend may cut the log after
        that moment by itself. One that can't distinguish a tail that was never synced from a synced part that is
        damaged raises `LogDamagedError` and changes nothing. Then `open_damaged` shows what is left, and `repair_log`
        cuts the log. Both get the error, and a subclass of it may carry the place of the cut: so the writes that were
        shown are those that are kept, and the log isn't searched again.
        """

    def repair_log(self, path: Path, damaged: CorruptionError) -> None:
        """Cut a shard's log before the first write that can't be read, so that `open_shard` can open it.

        What is cut off is kept in a file beside the log, unless it is all zeros: an opening deletes nothing.
        ``damaged`` is the error that `open_shard` raised; if it isn't about the log, nothing need be done. The shard
        isn't open anywhere.
        """
        raise UnsupportedError(f"{type(self).__name__} repairs no log")

    def open_damaged(
        self, path: Path, keyspaces: Sequence[Keyspace[Any]], damaged: CorruptionError, *, salvage: bool
    ) -> Engine:
        """Open a shard as `repair_log` would leave it, and change nothing of it. It isn't open anywhere.

        ``damaged`` is the error that `open_shard` raised. With ``salvage`` the engine also has every write after the
        damage that can be read whole, although others before it are missing.
        """
        raise UnsupportedError(f"{type(self).__name__} repairs no log")

    def open_reader(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, alone: bool) -> Engine:
        """Open the shard kept in ``path`` to read what is committed now, and change nothing of it.

        With ``alone`` nothing else has the shard open while this engine has. Without it another process may be
        writing the shard, and the engine keeps showing one moment: every batch that was committed before the call,
        and none in part. Raises `UnsupportedError`, with the reason, if the backend can't do that.

        Where `open_shard` raises `LogDamagedError`, the engine shows what `repair_log` would leave, with or without
        ``alone``.

        Once `Engine.flush_log` has returned, everything that the engine shows is on disk. The default opens the shard
        as for writing, and only with ``alone``.
        """
        if not alone:
            raise UnsupportedError(f"{type(self).__name__} reads no shard that somebody else may write")
        return self.open_shard(path, keyspaces, create=False)
