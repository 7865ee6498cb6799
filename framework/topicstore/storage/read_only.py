"""Opening a database read-only, beside a writer if the backend can do that.

Nothing of the database is created, migrated or changed. Each shard is seen as it was at one moment:
that of the opening, or of the last `Database.refresh`, which opens the shards again. A view that was
replaced is closed when the last read that began in it has ended.

If the backend can open shards beside a writer (`topicstore.contract.engine.Backend.open_reader`), no lock is
taken. If it can't, the reader holds the lock of the database as a writer does, and so keeps
writers out; nothing can change then, and a refresh has nothing to do. Readers that can't write the lock file,
for example on a read-only file system, share the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, overload

from topicstore.contract.engine import KEYSPACES, Backend, Engine
from topicstore.contract.errors import DatabaseClosedError, DatabaseLockedError, UnsupportedError
from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import Taken, release_all
from topicstore.shard.shard import Shard

from .directory.directory_lock import DirectoryLock
from .directory.files import failure_told

__all__ = ["Mode", "ReadOnlyShards"]

Mode = Literal["read-only", "owner"]
"""``"read-only"`` is beside a possible writer; with ``"owner"`` no process has the database open for writing, or can
open it so."""


class _Views(Sequence[Shard]):
    """The shards, each as it was at the moment of its first use."""

    def __init__(self, count: int, open_shard: Callable[[int], Shard]) -> None:
        self._shards: list[Shard | None] = [None] * count
        self._open = open_shard
        self._lock = ProcessLock()
        """Guards the attributes below, and the opening of shards."""
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
        """Close the shards that were opened."""
        with self._lock:
            self._closed = True
            release_all(shard.close for shard in self._shards if shard is not None)


class ReadOnlyShards(Sequence[Shard]):
    """The shards of a database that is open read-only, at one moment, which `refresh` moves. Open until `close`."""

    def __init__(
        self,
        path: Path,
        shards: int,
        backend: Backend,
        open_view: Callable[[int, Callable[[], Engine]], Shard],
        *,
        lazily: bool,
    ) -> None:
        """Open no shard yet. ``open_view`` opens the shard of a number with a function that opens its engine."""
        self.mode: Mode = "read-only"
        """The mode, which is known when a shard was opened. Guarded by the lock of the views, under which shards are
        opened."""
        self._path = path
        self._count = shards
        self._backend = backend
        self._open_view = open_view
        self._lazily = lazily
        self._locked = Taken()
        """The lock of the directory, if it was taken. Guarded like `mode`."""
        self._views = _Views(shards, self._open_shard)
        with Taken() as taken:
            taken.add(self.close)
            self._views = self._view()

    @overload
    def __getitem__(self, index: int) -> Shard: ...

    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...

    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        return self._views[index]

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._views)  # all at one moment, even if there is a refresh meanwhile

    def __len__(self) -> int:
        return self._count

    def refresh(self) -> None:
        """Show the shards as they are now. The previous views stay open as long as they are being read."""
        if self.mode == "read-only":
            self._views = self._view()

    def close(self) -> None:
        """Close the shards and release the lock. May be called twice."""
        release_all((self._views.close, self._locked.release))

    def _view(self) -> _Views:
        views = _Views(self._count, self._open_shard)
        with Taken() as taken:
            taken.add(views.close)
            if not self._lazily:
                list(views)
        return views

    @failure_told()
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
