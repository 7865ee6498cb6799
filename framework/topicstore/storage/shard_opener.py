"""Opening one shard, and checking that it is the right one and that it has everything that was on disk once."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import attrs

from topicstore.contract.engine import KEYSPACES, Backend, Engine
from topicstore.contract.errors import CorruptionError, DataLossError, LogDamagedError, StorageFullError
from topicstore.releasing import Taken
from topicstore.shard.generations import MakeLayout, OpenArchive
from topicstore.shard.identity import check_identity
from topicstore.shard.lasting_engine import LastingEngine
from topicstore.shard.records import Tail, load_tail
from topicstore.shard.salvage import Salvaged, salvage
from topicstore.shard.shard import Shard
from topicstore.shard.write_settings import WriteSettings
from topicstore.warning import warn_caller

from .closed_files import ClosedFiles
from .disk_errors import failure_told
from .manifest import Manifest
from .synced_writes import Synced, SyncedWrites, check_reached

__all__ = ["RECOVERIES", "Recovery", "ShardOpener"]

Recovery = Literal["strict", "point_in_time", "salvage"]
_DESCRIPTORS, _ROOM = 32, 1 << 20
"""The file descriptors, and the bytes of the disk, that must be there before a failed shard is closed and opened."""
RECOVERIES: tuple[Recovery, ...] = ("strict", "point_in_time", "salvage")


@attrs.define
class ShardOpener:
    """An object that opens the shards of one database."""

    path: Path
    manifest: Manifest
    backend: Backend
    capabilities: Collection[str]
    recovery: Recovery
    clock: Callable[[], int]
    make_layout: MakeLayout
    open_archive: OpenArchive
    synced: SyncedWrites | None = None
    """The notes of the last writes on disk; None if the backend isn't persistent."""

    @property
    def files(self) -> ClosedFiles:
        """The list of files, which exists while the database is closed."""
        return ClosedFiles(self.path, self._id, self.manifest.shards, self.backend.unneeded)

    def check_files(self) -> None:
        """Raise `DataLossError` if files were lost or cut short since the database was closed. Changes nothing."""
        for number in range(self.manifest.shards):
            try:
                self.files.check(number)
            except DataLossError as lost:
                self._tell(lost)

    def open(self, number: int, *, create: bool) -> Shard:
        """Open a shard for writing. Raises `DataLossError` if writes that were on disk are missing."""
        reached = self.synced.read(number) if self.synced else None
        engine, salvaged = self._open_engine(number, reached, create=create)
        with Taken() as taken:
            taken.add(engine.close)
            try:
                check_reached(self.path, number, reached, _tail(number, engine))
            except DataLossError as lost:
                self._tell(lost)
                if self.synced is not None:
                    self.synced.forget(number)
            persistent = "persistent" in self.capabilities
            shard = self._make(number, LastingEngine(engine) if persistent else engine, read_only=False)
            taken.add(shard.close)
            if salvaged is not None:
                salvaged.store_in(shard)
                told = f"shard {number} was damaged, and behind the damage {salvaged}"
                warn_caller(told)
            return shard

    def recover(self, shard: Shard) -> bool:
        """Open a shard again that takes no writes since one failed; return whether that was needed.

        Its engine isn't closed before room and file descriptors are there. Raises `StorageFullError`,
        `TooManyOpenFilesError`, and the errors of `open`; then the shard still takes no writes. There is a warning if
        acknowledged writes have vanished, or if the write that failed is stored nevertheless.
        """
        salvaged: Salvaged | None = None
        number, engine, before = shard.number, shard.log.engine, shard.log.tail.writes
        directory = self._directory(number)

        def open_engine() -> Engine:
            nonlocal salvaged
            reached = self.synced.read(number) if self.synced else None
            opened, salvaged = self._open_engine(number, reached, create=False)
            with Taken() as taken:
                taken.add(opened.close)
                check_reached(self.path, number, reached, _tail(number, opened))
                check_identity(opened, self._id, number)
                return opened

        def open_again(adopt: Callable[[], object]) -> None:
            if not isinstance(engine, LastingEngine):
                shard.check_writable()
                return
            self._check_resources(directory)
            engine.open_again(open_engine, lambda: self.backend.open_reader(directory, KEYSPACES, alone=True), adopt)

        if not shard.recover(open_again):
            return False
        if salvaged is not None:
            salvaged.store_in(shard)
        stored = shard.log.tail.writes
        with contextlib.suppress(RuntimeWarning):  # where warnings are errors, the shard takes writes nevertheless
            if stored < before:
                warn_caller(f"shard {number} lacks its last {before - stored:,} writes, which were not on disk yet")
            elif stored > before:
                warn_caller(f"shard {number} has the write that failed: it was stored nevertheless")
        return True

    def _check_resources(self, directory: Path) -> None:
        """Raise the error of what an engine needs to be opened again, and what isn't there yet: room, descriptors."""
        with failure_told(), contextlib.ExitStack() as opened:
            for _ in range(_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            size = sum(file.lstat().st_size for file in directory.iterdir())
            needed = max(min(self.backend.room_at_once, size), _ROOM)
            if (free := shutil.disk_usage(directory).free) < needed:
                raise StorageFullError(
                    f"{directory}: {free:,} bytes are free, and {needed:,} are needed to open it again"
                )
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(bytes(_ROOM))
                probe.flush()
                os.fsync(probe.fileno())

    def _directory(self, number: int) -> Path:
        return self.path / f"shard-{number:04}"

    def _tell(self, lost: DataLossError) -> None:
        """Raise the error of a loss, or warn of it if ``recovery`` allows losses."""
        if self.recovery == "strict":
            raise lost
        warn_caller(f"opened all the same: {lost}")

    def open_view(self, number: int, open_engine: Callable[[], Engine]) -> Shard:
        """Open a shard for reading, and change nothing. Raises the errors of `open`, whatever ``recovery`` is."""
        self.files.check(number)
        # Read before the engine is opened, because its writer continues.
        reached = SyncedWrites(self.path, self._id, self.manifest.shards).read(number)
        engine = open_engine()
        with Taken() as taken:
            taken.add(engine.close)
            check_reached(self.path, number, reached, _tail(number, engine))
            if self.manifest.durability == "sync":
                engine.flush_log()  # readers must not see messages that a power failure could undo
            return self._make(number, engine, read_only=True)

    def _open_engine(self, number: int, reached: Synced | None, *, create: bool) -> tuple[Engine, Salvaged | None]:
        """Open the engine. Cut its log if it is damaged, as after a power failure, and set aside what is cut off.

        With ``recovery="strict"`` this is done only if no write is lost that was known to be on disk. There is a
        warning if readable writes are cut off too, unless they are salvaged. Returns the engine and, with
        ``recovery="salvage"``, the messages that were salvaged from the part after the cut.
        """
        directory = self._directory(number)
        try:
            return self.backend.open_shard(directory, KEYSPACES, create=create), None
        except CorruptionError as damaged:
            if self.recovery == "strict":
                if not isinstance(damaged, LogDamagedError):
                    raise
                left = self.backend.open_damaged(directory, KEYSPACES, damaged, salvage=False)
                with contextlib.closing(left):
                    check_reached(self.path, number, reached, _tail(number, left))
            salvaged = self._salvage(number, directory, damaged) if self.recovery == "salvage" else None
            self.backend.repair_log(directory, damaged)
            if isinstance(damaged, LogDamagedError) and damaged.discarded and salvaged is None:
                warn_caller(self._cut(number, damaged))
        return self.backend.open_shard(directory, KEYSPACES, create=False), salvaged

    def _cut(self, number: int, damaged: LogDamagedError) -> str:
        lost = "" if self.recovery == "point_in_time" else "; nothing is missing that was known to be on disk"
        return (
            f"shard {number} of {self.path} was cut where its log has a gap, as after a power failure, and "
            f"{damaged.discarded} went into files named *.cut-at-*{lost}"
        )

    def _salvage(self, number: int, directory: Path, damaged: CorruptionError) -> Salvaged | None:
        """Read the messages after damage, and change nothing. Returns None if there are none."""

        def opened(*, behind: bool) -> Shard:
            engine = self.backend.open_damaged(directory, KEYSPACES, damaged, salvage=behind)
            with Taken() as taken:
                taken.add(engine.close)
                return self._shard(number, engine, read_only=True)

        return salvage(functools.partial(opened, behind=False), functools.partial(opened, behind=True))

    @property
    def _id(self) -> bytes:
        return bytes.fromhex(self.manifest.id)

    def _make(self, number: int, engine: Engine, *, read_only: bool) -> Shard:
        check_identity(engine, self._id, number)
        return self._shard(number, engine, read_only=read_only)

    def _shard(self, number: int, engine: Engine, *, read_only: bool) -> Shard:
        manifest = self.manifest
        policy = WriteSettings(
            durability=manifest.durability,
            timestamps=manifest.timestamps,
            late=manifest.late,
            max_skew=manifest.max_skew,
            synced_at_once="sync" not in self.capabilities,
            clock=self.clock,
        )
        note = self.synced.note if self.synced else lambda *_: True
        return Shard(number, engine, policy, self.make_layout, self.open_archive, note, read_only=read_only)


def _tail(number: int, engine: Engine) -> Tail:
    try:
        return load_tail(engine)
    except CorruptionError as bad:
        raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad
