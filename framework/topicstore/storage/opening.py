"""Opening a database: its files, its lock, its shards and the hooks around them, as one `Storage`."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from topicstore.clocks import Clocks
from topicstore.contract.descriptors import take_closed_streams
from topicstore.contract.engine import Backend
from topicstore.contract.errors import (
    DatabaseLockedError,
    DatabaseNotFoundError,
    InvalidArgumentError,
)
from topicstore.contract.options import make_options
from topicstore.plugins import check_pair, data_path, load_target, registry
from topicstore.releasing import Taken
from topicstore.shard.generations import OpenArchive
from topicstore.shard.shard import Shard

from .ballast import Ballast, give_up_ballast
from .disk_errors import failure_told
from .durable_files import OWNER_ONLY, check_no_links, make_directory, sync_directory
from .generations import complete_generations
from .hook_implementation import DataPath
from .manifest import Manifest, read_manifest, write_manifest
from .read_only import ReadOnlyShards
from .shard_map import ShardMap
from .shard_opener import Recovery, ShardOpener
from .storage import Storage
from .synced_writes import SyncedWrites
from .written_shards import WrittenShards

__all__ = ["open_storage"]


def open_storage(
    path: Path,
    manifest: Manifest,
    options: Mapping[str, Mapping[str, Any]],
    plugins: Sequence[str],
    clocks: Clocks,
    open_archive: Callable[[Path, Manifest], OpenArchive],
    *,
    recovery: Recovery = "strict",
    read_only: bool = False,
    lazily: bool = False,
    permissions: int = OWNER_ONLY,
    ballast: bool = True,
    allow_ancient: bool = False,
) -> Storage:
    """Open the shards of the database that a manifest describes, or make them if it is not complete.

    options:      the options by plugin: the backend's, and the layout's for a first generation.
    plugins:      the names of the plugins that wrap the data path, outermost first.
    open_archive: opens the slabs of archived generations.
    recovery:     how to handle stored data that can't be read; see `topicstore.open`.
    lazily:       open each shard only when it is first used; only with ``read_only``.
    permissions:  the permissions of the directory, if it is made.
    allow_ancient: accept times that are probably not in microseconds.
    ballast:      reserve disk space (`topicstore.storage.ballast`).

    Raises the errors of `topicstore.open`, and leaves nothing open then.
    """
    path = path.absolute()  # the working directory may change
    spec = registry().backend(manifest.backend)
    make_layout = functools.partial(registry().make_layout, spec)
    check_pair(spec, registry().layout(manifest.layout))
    wrappers = [(name, registry().wrapper(name)) for name in plugins]
    _check_option_names(manifest, options)
    target: type[Backend] = load_target(spec)
    backend = target(make_options(manifest.backend, target.Options, options.get(manifest.backend, {})))
    backend.check_path(path)
    make_layout(manifest.layout, options.get(manifest.layout, {}))  # refuse bad options before a file is made
    shard_map = ShardMap(manifest.shards)
    implementation = DataPath(bytes.fromhex(manifest.id), shard_map, clocks.wall)
    hooks = data_path(wrappers, implementation).hook  # refuses unsuitable plugins
    opener = ShardOpener(
        path, manifest, backend, spec.capabilities, recovery, clocks.wall, make_layout, open_archive(path, manifest)
    )
    persistent = "persistent" in spec.capabilities
    with Taken() as locked, Taken() as opened:
        shards: Sequence[Shard]
        with failure_told():
            take_closed_streams()
            if read_only:
                shards = _open_to_read(path, manifest, backend, opener, lazily=lazily)
                opened.add(shards.close)
            else:
                manifest, shards = _open_to_write(
                    path, manifest, options, opener, persistent, permissions, locked, opened
                )
        implementation.shards = shards
        storage = Storage(
            path,
            manifest,
            shards,
            hooks,
            plugins=plugins,
            capabilities=spec.capabilities,
            unneeded=backend.unneeded,
            make_layout=make_layout,
            shard_map=shard_map,
            clocks=clocks,
            ballast=Ballast(
                path,
                _room(backend, manifest.shards) if ballast and persistent and not read_only else 0,
                backend.room,
            ),
            notes=opener.synced,
            close_shards=opened.release,
            unlock=locked.release,
            recover_shard=opener.recover,
            allow_ancient=allow_ancient,
        )
        with Taken() as whole:
            whole.add(storage.abandon)
            storage.ballast.keep(shards)
            if not read_only:
                storage.after_store.append(functools.partial(storage.ballast.stored, shards))
            storage.hooks.topicstore_opened(db=storage)
    return storage


def _room(backend: Backend, shards: int) -> int:
    """Return the bytes that opening all shards, and reclaiming a part of them, need temporarily.

    Shards are opened in turn, but what `Backend.room_at_once` is needed for goes on in all of them at the same time.
    """
    return backend.room + (shards - 1) * backend.room_at_once


def _check_option_names(manifest: Manifest, options: Mapping[str, Mapping[str, Any]]) -> None:
    known = {manifest.backend, manifest.layout}
    for name in () if manifest.complete else options:  # otherwise they were compared with the stored ones
        if name not in known:
            raise InvalidArgumentError(
                f"options are by plugin: {{'{manifest.backend}': {{...}}, "
                f"'{manifest.layout}': {{...}}}}; {name!r} is neither. Other layouts get theirs "
                "with add_generation"
            )


def _open_to_read(
    path: Path, manifest: Manifest, backend: Backend, opener: ShardOpener, *, lazily: bool
) -> ReadOnlyShards:
    if not manifest.complete:
        raise DatabaseNotFoundError(f"the database at {path} has not been made to its end; open it to write")
    return ReadOnlyShards(path, manifest.shards, backend, opener.open_view, lazily=lazily)


def _open_to_write(
    path: Path,
    manifest: Manifest,
    options: Mapping[str, Mapping[str, Any]],
    opener: ShardOpener,
    persistent: bool,
    permissions: int,
    locked: Taken,
    opened: Taken,
) -> tuple[Manifest, list[Shard]]:
    """Return the present manifest and the shards. ``opened`` closes them, and then ``locked`` releases the lock."""
    creating = not manifest.complete
    written = WrittenShards()
    locked.add(written.unlock)
    opened.add(written.close)
    if persistent:
        _take_directory(path, written, opener.backend.room_at_once * manifest.shards, permissions)
        if creating:
            _check_not_overtaken(path, manifest)
            write_manifest(path, manifest)
            _remove_shards(path)
        written.synced = opener.synced = SyncedWrites(path, bytes.fromhex(manifest.id), manifest.shards)
        if not creating:
            opener.check_files()
        opener.files.remove()
    for number in range(manifest.shards):
        written.shards.append(opener.open(number, create=creating))
    complete_generations(written.shards, manifest.layout, options.get(manifest.layout, {}))
    if creating:
        manifest = attrs.evolve(manifest, complete=True)
        if persistent:
            for shard in written.shards:
                shard.flush()
            for directory in path.glob("shard-*/"):
                sync_directory(directory)
            sync_directory(path)
            write_manifest(path, manifest)
    if persistent:
        written.files = opener.files
    return manifest, written.shards


def _take_directory(path: Path, written: WrittenShards, room: int, permissions: int) -> None:
    """Make the directory if it is missing, lock it, and give up its ballast if less than ``room`` is free."""
    make_directory(path, permissions)
    written.lock(path)
    check_no_links(path)
    if shutil.disk_usage(path).free < room:
        give_up_ballast(path)


def _remove_shards(path: Path) -> None:
    """Remove the shards of an interrupted creation: they are empty, and a power failure may have damaged them."""
    SyncedWrites.remove(path)
    for shard in path.glob("shard-*"):
        shutil.rmtree(shard)


def _check_not_overtaken(path: Path, manifest: Manifest) -> None:
    """Raise `DatabaseLockedError` if another process wrote a manifest before the lock was taken."""
    there = read_manifest(path)
    if there is not None and there != manifest:
        raise DatabaseLockedError(f"{path} was created by somebody else at this moment; open it again")
