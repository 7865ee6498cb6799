"""Opening a database: its directory's lock, its shards and its hooks, combined into a `Storage`.

`ShardOpener` opens one shard, checks its identity, and detects the loss of writes that were on disk. `WrittenShards`
holds the shards of a database that is open for writing, the record of their last fsynced writes, and the lock. They are
closed in this order, even if a step fails or is interrupted: the record after all shards, the lock after all writes to
the directory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from topicstore.contract.descriptors import take_closed_streams
from topicstore.contract.engine import KEYSPACES, STATE, Backend, Engine
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseLockedError,
    DatabaseNotFoundError,
    DataLossError,
    InvalidArgumentError,
    LogDamagedError,
    StorageFullError,
)
from topicstore.contract.options import make_options
from topicstore.plugins import check_pair, data_path, load_target, registry
from topicstore.runtime.clocks import Clocks
from topicstore.runtime.closing import Closer, close_all
from topicstore.runtime.warning import warn_caller
from topicstore.shard.generations import MakeLayout, OpenArchive
from topicstore.shard.lasting_engine import LastingEngine
from topicstore.shard.records import PROGRESS, Tail, check_identity, load_tail
from topicstore.shard.shard import Shard
from topicstore.shard.writer import WritePolicy

from . import hooks as core
from .directory.ballast import Ballast, give_up_ballast
from .directory.closed_files import ClosedFiles
from .directory.directory_lock import DirectoryLock
from .directory.files import OWNER_ONLY, check_no_links, convert_os_errors, make_directory, sync_directory
from .directory.manifest import Manifest, read_manifest, write_manifest
from .directory.recovery_points import RecoveryPoint, RecoveryPoints, check_recovered
from .generations import complete_generations
from .read_only import ReadOnlyShards
from .shard_map import ShardMap
from .storage import Storage

if TYPE_CHECKING:
    from topicstore.replication.site import Site
    from topicstore.shard.salvage import Salvaged

__all__ = [
    "RECOVERIES",
    "OpenSettings",
    "Recovery",
    "ShardOpener",
    "WrittenShards",
    "open_storage",
]

Recovery = Literal["strict", "point_in_time", "salvage"]
_DESCRIPTORS, _ROOM = 32, 1 << 20
"""The number of file descriptors, and of bytes on disk, that must be free before a failed shard is reopened."""
RECOVERIES: tuple[Recovery, ...] = ("strict", "point_in_time", "salvage")


@attrs.frozen(kw_only=True)
class OpenSettings:
    """The settings of one opening, in addition to the database's manifest. See `topicstore.open`."""

    open_archive: Callable[[Path, Manifest], OpenArchive]
    """A function that returns the opener of archived generations' slabs."""
    options: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    """The options by plugin: the backend's, and the layout's for the first generation."""
    plugins: Sequence[str] = ()
    """The names of the plugins that wrap the data path, outermost first."""
    clocks: Clocks = attrs.field(factory=Clocks)
    recovery: Recovery = "strict"
    """The treatment of a shard with missing or damaged writes; see `topicstore.open`."""
    read_only: bool = False
    lazily: bool = False
    """Whether each shard is opened on first use; only with ``read_only``."""
    permissions: int = OWNER_ONLY
    """The mode bits of the directory, if it is created."""
    ballast: bool = True
    """Whether to reserve disk space (`topicstore.storage.directory.ballast`)."""
    allow_ancient: bool = False
    """Whether to accept times that are probably not in microseconds."""
    site: Site | None = None
    """This process as a site of the cluster that shares the database; None if the database is this process's own."""


@attrs.define
class ShardOpener:
    """An object that opens the shards of one database."""

    path: Path
    manifest: Manifest
    backend: Backend
    capabilities: Collection[str]
    settings: OpenSettings
    make_layout: MakeLayout
    open_archive: OpenArchive
    recovery_points: RecoveryPoints | None = None
    """The record of each shard's last fsynced write; None if the backend isn't persistent."""

    @classmethod
    def of(cls, path: Path, manifest: Manifest, settings: OpenSettings) -> ShardOpener:
        """Return the opener of the database that a manifest describes.

        Raises `UnknownPluginError`, `BackendUnavailableError`, `IncompatibleError`, `InvalidOptionError` and
        `InvalidArgumentError`, before a file is created.
        """
        spec, options = registry().backend(manifest.backend), settings.options
        make_layout = functools.partial(registry().make_layout, spec)
        check_pair(spec, registry().layout(manifest.layout))
        for name in () if manifest.complete else options:  # the options of a complete database were checked
            if name not in (manifest.backend, manifest.layout):
                raise InvalidArgumentError(
                    f"options are by plugin: {{'{manifest.backend}': {{...}}, "
                    f"'{manifest.layout}': {{...}}}}; {name!r} is neither. Other layouts get theirs "
                    "with add_generation"
                )
        target: type[Backend] = load_target(spec)
        backend = target(make_options(manifest.backend, target.Options, options.get(manifest.backend, {})))
        backend.check_path(path)
        make_layout(manifest.layout, options.get(manifest.layout, {}))  # raises for invalid options
        open_archive = settings.open_archive(path, manifest)
        return cls(path, manifest, backend, spec.capabilities, settings, make_layout, open_archive)

    @property
    def files(self) -> ClosedFiles:
        """The list of the database's files and their sizes, which is stored while the database is closed."""
        return ClosedFiles(self.path, self._id, self.manifest.shards, self.backend.unneeded)

    def check_files(self) -> None:
        """Raise `DataLossError` if files are missing or have another size since the close. Changes nothing.

        If a cluster shares the database, the copy of the shard is removed instead.
        """
        for number in range(self.manifest.shards):
            try:
                self.files.check(number)
            except DataLossError as lost:
                if self.settings.site is None:
                    self._raise_or_warn(lost)
                else:
                    self._discard(number, lost)

    def open(self, number: int, *, create: bool) -> Shard:
        """Open a shard for writing. Raises `DataLossError` if writes that were on disk are missing."""
        # A copy of a shared shard may end anywhere, because the rest is read from the log again.
        reached = self.recovery_points.read(number) if self.recovery_points and not self.settings.site else None
        engine, salvaged = self._open_engine(number, reached, create=create)
        with Closer() as closer:
            closer.add(engine.close)
            try:
                check_recovered(self.path, number, reached, _tail(number, engine))
            except DataLossError as lost:
                self._raise_or_warn(lost)
                if self.recovery_points is not None:
                    self.recovery_points.forget(number)
            persistent = "persistent" in self.capabilities
            shard = self._make(number, LastingEngine(engine) if persistent else engine, read_only=False)
            closer.add(shard.close)
            if salvaged is not None:
                salvaged.store_in(shard)
                told = f"shard {number} was damaged, and behind the damage {salvaged}"
                warn_caller(told)
            return shard

    def open_copy(self, number: int, *, create: bool) -> Shard:
        """Open this site's copy of a shard for writing; replace a damaged one by an empty one, with a warning."""
        try:
            return self.open(number, create=create or not self._directory(number).exists())
        except CorruptionError as damaged:
            self._discard(number, damaged)
        return self.open(number, create=True)

    def _discard(self, number: int, damaged: CorruptionError) -> None:
        """Remove this site's copy of a shard, with a warning."""
        warn_caller(f"shard {number} is copied again from the cluster, because its copy is damaged: {damaged}")
        with convert_os_errors():
            shutil.rmtree(self._directory(number))
        if self.recovery_points is not None:
            self.recovery_points.forget(number)

    def recover(self, shard: Shard) -> bool:
        """Reopen a shard that takes no writes after a failed write; return whether that was necessary.

        The engine is closed only if enough disk space and file descriptors are free to reopen it. Raises
        `StorageFullError`, `TooManyOpenFilesError`, and the errors of `open`; the shard then still takes no writes.
        A warning reports if acknowledged writes were lost, or if the failed write was stored after all.
        """
        salvaged: Salvaged | None = None
        number, engine, before = shard.number, shard.writer.engine, shard.writer.tail.writes
        directory = self._directory(number)

        def open_engine() -> Engine:
            nonlocal salvaged
            reached = self.recovery_points.read(number) if self.recovery_points and not self.settings.site else None
            opened, salvaged = self._open_engine(number, reached, create=False)
            with Closer() as closer:
                closer.add(opened.close)
                check_recovered(self.path, number, reached, _tail(number, opened))
                check_identity(opened, self._id, number)
                return opened

        def open_again(resume: Callable[[], object]) -> None:
            if not isinstance(engine, LastingEngine):
                shard.writer.check_writable()
                return
            self._check_resources(directory)
            engine.open_again(open_engine, lambda: self.backend.open_reader(directory, KEYSPACES, alone=True), resume)

        if not shard.recover(open_again):
            return False
        if salvaged is not None:
            salvaged.store_in(shard)
        stored = shard.writer.tail.writes
        with contextlib.suppress(RuntimeWarning):  # even if warnings are errors, the recovery has succeeded
            if stored < before:
                warn_caller(f"shard {number} lacks its last {before - stored:,} writes, which were not on disk yet")
            elif stored > before:
                warn_caller(f"shard {number} has the write that failed: it was stored nevertheless")
        return True

    def _check_resources(self, directory: Path) -> None:
        """Raise an error if disk space or file descriptors don't suffice for reopening an engine."""
        with convert_os_errors(), contextlib.ExitStack() as opened:
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

    def _raise_or_warn(self, lost: DataLossError) -> None:
        """Raise ``lost`` with ``recovery="strict"``; with other values, emit it as a warning."""
        if self.settings.recovery == "strict":
            raise lost
        warn_caller(f"opened all the same: {lost}")

    def open_view(self, number: int, open_engine: Callable[[], Engine]) -> Shard:
        """Open a shard read-only, without changing its files. Losses raise errors whatever ``recovery`` is."""
        self.files.check(number)
        # Read before the engine is opened: a concurrent writer may advance it afterwards.
        reached = RecoveryPoints(self.path, self._id, self.manifest.shards).read(number)
        engine = open_engine()
        with Closer() as closer:
            closer.add(engine.close)
            if self.manifest.cluster is None:  # a copy of a shared shard may end anywhere
                check_recovered(self.path, number, reached, _tail(number, engine))
            if self.manifest.durability == "sync":
                engine.flush_log()  # readers must not see messages that a power failure could undo
            shard = self._make(number, engine, read_only=True)
            if self.manifest.cluster is not None and engine.get(STATE, PROGRESS) is None:
                shard.read_copy(False)
            return shard

    def _open_engine(
        self, number: int, reached: RecoveryPoint | None, *, create: bool
    ) -> tuple[Engine, Salvaged | None]:
        """Open the engine. Truncate a damaged log, and keep the truncated part in a separate file.

        With ``recovery="strict"``, the log is truncated only if no write is lost that was known to be on disk. A
        warning reports discarded readable writes, unless they are salvaged. Returns the engine and, with
        ``recovery="salvage"``, the messages salvaged from the truncated part.
        """
        directory = self._directory(number)
        try:
            return self.backend.open_shard(directory, KEYSPACES, create=create), None
        except CorruptionError as damaged:
            if self.settings.recovery == "strict":
                if not isinstance(damaged, LogDamagedError):
                    raise
                left = self.backend.open_damaged(directory, KEYSPACES, damaged, salvage=False)
                with contextlib.closing(left):
                    check_recovered(self.path, number, reached, _tail(number, left))
            salvaged = self._salvage(number, directory, damaged) if self.settings.recovery == "salvage" else None
            self.backend.repair_log(directory, damaged)
            if isinstance(damaged, LogDamagedError) and damaged.discarded and salvaged is None:
                warn_caller(self._cut(number, damaged))
        return self.backend.open_shard(directory, KEYSPACES, create=False), salvaged

    def _cut(self, number: int, damaged: LogDamagedError) -> str:
        lost = "" if self.settings.recovery == "point_in_time" else "; nothing is missing that was known to be on disk"
        return (
            f"shard {number} of {self.path} was cut where its log has a gap, as after a power failure, and "
            f"{damaged.discarded} went into files named *.cut-at-*{lost}"
        )

    def _salvage(self, number: int, directory: Path, damaged: CorruptionError) -> Salvaged | None:
        """Read the messages after damage, without changing files. Returns None if there are none."""
        from topicstore.shard.salvage import salvage

        def opened(*, behind: bool) -> Shard:
            engine = self.backend.open_damaged(directory, KEYSPACES, damaged, salvage=behind)
            with Closer() as closer:
                closer.add(engine.close)
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
        policy = WritePolicy(
            # The log of a shared database is durable: a shard that has lost writes reads them from the log again.
            durability=manifest.durability if manifest.cluster is None else "commit",
            timestamps=manifest.timestamps,
            late=manifest.late,
            max_skew=manifest.max_skew,
            synced_at_once="sync" not in self.capabilities,
            clock=self.settings.clocks.wall,
            monotonic=self.settings.clocks.monotonic,
        )
        record = self.recovery_points.record if self.recovery_points else lambda *_: True
        return Shard(number, engine, policy, self.make_layout, self.open_archive, record, read_only=read_only)


def _tail(number: int, engine: Engine) -> Tail:
    try:
        return load_tail(engine)
    except CorruptionError as bad:
        raise CorruptionError(bad.reason, f"shard {number}, {bad.place}") from bad


class WrittenShards:
    """The open shards, files and lock of a database that is open for writing. They are added during the opening."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self.recovery_points: RecoveryPoints | None = None
        """The record of each shard's last fsynced write; None if the backend isn't persistent."""
        self.files: ClosedFiles | None = None
        """The list of files to write after the shards are closed; None before all shards are open, and after it was
        written."""
        self._locked = Closer()

    def lock(self, directory: Path) -> None:
        """Acquire the lock of the directory. Raises `DatabaseLockedError`."""
        self._locked.add(DirectoryLock(directory).release)

    def close(self) -> None:
        """Close the shards, then the record of fsynced writes. If a call is interrupted, the next call finishes it."""
        close_all((*(shard.close for shard in reversed(self.shards)), self._close_files))

    def unlock(self) -> None:
        """Release the lock, unless a shard is still open because closing it was interrupted."""
        if self._closed:
            self.files = None  # other processes may write after the release
            self._locked.release()

    @property
    def _closed(self) -> bool:
        return all(shard.writer.closed for shard in self.shards)

    def _close_files(self) -> None:
        if self._closed:
            files, self.files = self.files, None
            with convert_os_errors():
                if self.recovery_points is not None:
                    self.recovery_points.close()
                if files is not None and all(shard.writer.closed_in_order for shard in self.shards):
                    files.write()


def open_storage(path: Path, manifest: Manifest, settings: OpenSettings) -> Storage:
    """Open the shards of the database that a manifest describes, or create them if the manifest isn't complete.

    Raises the errors of `topicstore.open`; nothing stays open after an error.
    """
    path = path.absolute()  # the working directory may change
    wrappers = [(name, registry().wrapper(name)) for name in settings.plugins]
    opener, read_only = ShardOpener.of(path, manifest, settings), settings.read_only
    backend, capabilities = opener.backend, opener.capabilities
    # Shards are opened one after the other: only one of them at a time needs the whole `room`, and each of the others
    # needs the part of it that lets it take writes.
    room = backend.room + (manifest.shards - 1) * backend.room_at_once
    shard_map = ShardMap(manifest.shards)
    hooks = data_path(wrappers, core).hook  # raises for unsuitable plugins
    persistent = "persistent" in capabilities
    with Closer() as locked, Closer() as opened:
        shards: Sequence[Shard]
        with convert_os_errors():
            take_closed_streams()
            if read_only:
                shards = _open_to_read(path, manifest, backend, opener)
                opened.add(shards.close)
            else:
                manifest, shards = _open_to_write(path, manifest, opener, persistent, locked, opened)
        storage = Storage(
            path,
            manifest,
            shards,
            hooks,
            plugins=settings.plugins,
            capabilities=capabilities,
            unneeded=backend.unneeded,
            make_layout=opener.make_layout,
            shard_map=shard_map,
            clocks=settings.clocks,
            ballast=Ballast(path, room if settings.ballast and persistent and not read_only else 0, backend.room),
            recovery_points=opener.recovery_points,
            close_shards=opened.release,
            unlock=locked.release,
            recover_shard=opener.recover,
            allow_ancient=settings.allow_ancient,
            site=settings.site,
        )
        with Closer() as whole:
            whole.add(storage.abandon)
            storage.ballast.keep(shards)
            if not read_only:
                storage.ballast.grow_with(storage.jobs, shards)
            storage.hooks.topicstore_opened(db=storage)
    return storage


def _open_to_read(path: Path, manifest: Manifest, backend: Backend, opener: ShardOpener) -> ReadOnlyShards:
    if not manifest.complete:
        raise DatabaseNotFoundError(f"the database at {path} has not been made to its end; open it to write")
    return ReadOnlyShards(path, manifest.shards, backend, opener.open_view, lazily=opener.settings.lazily)


def _open_to_write(
    path: Path,
    manifest: Manifest,
    opener: ShardOpener,
    persistent: bool,
    locked: Closer,
    opened: Closer,
) -> tuple[Manifest, list[Shard]]:
    """Return the current manifest and the shards. ``opened`` closes them, and then ``locked`` releases the lock."""
    creating, settings = not manifest.complete, opener.settings
    written = WrittenShards()
    locked.add(written.unlock)
    opened.add(written.close)
    if persistent:
        room = opener.backend.room_at_once * manifest.shards
        _take_directory(path, manifest, written, room, settings.permissions)
        points = RecoveryPoints(path, bytes.fromhex(manifest.id), manifest.shards)
        written.recovery_points = opener.recovery_points = points
        if not creating:
            opener.check_files()
        opener.files.remove()
    for number in range(manifest.shards):
        written.shards.append((opener.open if settings.site is None else opener.open_copy)(number, create=creating))
    if settings.site is None:
        complete_generations(written.shards, manifest.layout, settings.options.get(manifest.layout, {}))
    else:
        opened.add(settings.site.close)
        settings.site.start(written.shards)
    if creating:
        manifest = attrs.evolve(manifest, complete=True)
        if persistent:
            for shard in written.shards:
                shard.writer.flush()
            for directory in path.glob("shard-*/"):
                sync_directory(directory)
            sync_directory(path)
            write_manifest(path, manifest)
    if persistent:
        written.files = opener.files
    return manifest, written.shards


def _take_directory(path: Path, manifest: Manifest, written: WrittenShards, room: int, permissions: int) -> None:
    """Create the directory if it is missing, and lock it; free its ballast if fewer than ``room`` bytes are free.

    If the database is not complete, write its manifest, and remove the files that an interrupted creation has left.
    """
    make_directory(path, permissions)
    written.lock(path)
    check_no_links(path)
    if shutil.disk_usage(path).free < room:
        give_up_ballast(path)
    if not manifest.complete:
        _check_not_overtaken(path, manifest)
        write_manifest(path, manifest)
        _remove_shards(path)


def _remove_shards(path: Path) -> None:
    """Remove the shards of an interrupted creation: they are empty, and a power failure may have damaged them."""
    RecoveryPoints.remove(path)
    for shard in path.glob("shard-*"):
        shutil.rmtree(shard)


def _check_not_overtaken(path: Path, manifest: Manifest) -> None:
    """Raise `DatabaseLockedError` if another process wrote a manifest before the lock was taken."""
    there = read_manifest(path)
    if there is not None and there != manifest:
        raise DatabaseLockedError(f"{path} was created by somebody else at this moment; open it again")
