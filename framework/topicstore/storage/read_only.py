"""Opening a database read-only, concurrently with a writing process if the backend supports that.

A read-only opening creates, migrates and changes nothing on disk. Each shard is a snapshot
as of the opening or the last `Database.refresh`, which opens new snapshots. A replaced snapshot is closed after the
last read that began in it has ended.

If the backend can open shards that another process writes (`topicstore.contract.engine.Backend.open_reader`), no lock
is acquired. Otherwise the reader holds the lock of the database like a writer, which excludes
writers; a refresh then has no effect, because nothing can change. Readers that can't write the lock file,
for example on a read-only file system, share the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, overload

from topicstore.contract.engine import KEYSPACES, Backend, Engine
from topicstore.contract.errors import DatabaseClosedError, DatabaseLockedError, UnsupportedError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import Closer, close_all
from topicstore.shard.shard import Shard

from .directory.directory_lock import DirectoryLock
from .directory.files import convert_os_errors

__all__ = ["Mode", "ReadOnlyShards"]

Mode = Literal["read-only", "owner"]
"""With ``"read-only"``, another process may be writing. With ``"owner"``, the lock excludes writing processes."""


class _Views(Sequence[Shard]):
    """Snapshots of the shards, each opened on first use."""

    def __init__(self, count: int, open_shard: Callable[[int], Shard]) -> None:
        self._shards: list[Shard | None] = [None] * count
        self._open = open_shard
        self._lock = ProcessLock()
        """Guards `_closed`, and the opening of shards."""
        self._closed = False

    @overload
    def __getitem__(self, index: int) -> Shard: ...

    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...

    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        shard = self._shards[index]
        return self._opened(range(len(self))[index]) if shard is None else shard

    def __len__(self) -> int:
        return len(self._shards)

    def _opened(self, number: int) -> Shard:
        with self._lock:
            shard = self._shards[number]
            if shard is None:
                if self._closed:
                    raise DatabaseClosedError("the database is closed")
                shard = self._shards[number] = self._open(number)
            return shard

    def close(self) -> None:
        """Close the opened shards."""
        with self._lock:
            self._closed = True
            close_all(shard.close for shard in self._shards if shard is not None)


class ReadOnlyShards(Sequence[Shard]):
    """The shards of a database that is open read-only: snapshots, which `refresh` replaces with new ones."""

    def __init__(
        self,
        path: Path,
        shards: int,
        backend: Backend,
        open_view: Callable[[int, Callable[[], Engine]], Shard],
        *,
        lazily: bool,
    ) -> None:
        """Open the shards or, with ``lazily``, open each on first use.

        ``open_view`` opens a shard, given its number and a function that opens its engine.
        """
        self.mode: Mode = "read-only"
        """The mode, which is determined when the first shard is opened. Guarded by the lock of `_Views`, which is held
        while shards are opened."""
        self._path = path
        self._count = shards
        self._backend = backend
        self._open_view = open_view
        self._lazily = lazily
        self._locked = Closer()
        """The lock of the directory, if it was acquired. Guarded like `mode`."""
        self._views = _Views(shards, self._open_shard)
        with Closer() as closer:
            closer.add(self.close)
            self._views = self._view()

    @overload
    def __getitem__(self, index: int) -> Shard: ...

    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...

    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        return self._views[index]

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._views)  # snapshots of one refresh, even if another follows meanwhile

    def __len__(self) -> int:
        return self._count

    def refresh(self) -> None:
        """Replace the snapshots with current ones. The previous snapshots stay open while they are being read."""
        if self.mode == "read-only":
            self._views = self._view()

    def close(self) -> None:
        """Close the shards and release the lock. This is idempotent."""
        close_all((self._views.close, self._locked.release))

    def _view(self) -> _Views:
        views = _Views(self._count, self._open_shard)
        with Closer() as closer:
            closer.add(views.close)
            if not self._lazily:
                list(views)
        return views

    @convert_os_errors()
    def _open_shard(self, number: int) -> Shard:
        return self._open_view(number, lambda: self._open_engine(self._path / f"shard-{number:04}"))

    def _open_engine(self, path: Path) -> Engine:
        if self.mode == "read-only":
            try:
                return self._backend.open_reader(path, KEYSPACES, alone=False)
            except UnsupportedError as alone:
                self._take_lock(alone)
        return self._backend.open_reader(path, KEYSPACES, alone=True)

    def _take_lock(self, reason: UnsupportedError) -> None:
        try:
            self._locked.add(DirectoryLock(self._path, reading=True).release)
        except DatabaseLockedError as held:
            raise DatabaseLockedError(f"{held}; {reason}") from held
        self.mode = "owner"
