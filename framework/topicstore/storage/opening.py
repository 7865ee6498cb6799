"""Opening a database: its files, its lock, its shards and the hooks around them, as one `Storage`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from topicstore.contract.engine import KEYSPACES, Backend, Engine
from topicstore.contract.errors import (
    DatabaseLockedError,
    DatabaseNotFoundError,
    InvalidArgumentError,
)
from topicstore.contract.options import make_options
from topicstore.plugins import check_pair, data_path, load_target, registry
from topicstore.shard.generations import MakeLayout, OpenArchive
from topicstore.shard.identity import check_identity
from topicstore.shard.shard import Shard
from topicstore.shard.write_settings import WriteSettings

from .directory_lock import DirectoryLock
from .disk_errors import shortage_told
from .durable_files import OWNER_ONLY, check_no_links, sync_directory
from .generations import complete_generations
from .hook_implementation import DataPath
from .manifest import Manifest, read_manifest, write_manifest
from .read_only import ReadOnlyShards
from .shard_map import ShardMap
from .storage import Storage

__all__ = ["open_storage"]


def open_storage(
    path: Path,
    manifest: Manifest,
    options: Mapping[str, Mapping[str, Any]],
    plugins: Sequence[str],
    clock: Callable[[], int],
    open_archive: Callable[[Path, Manifest], OpenArchive],
    *,
    read_only: bool = False,
    lazily: bool = False,
    mode: int = OWNER_ONLY,
) -> Storage:
    """Open the shards of the database that a manifest describes, or make them if it is not complete.

    options:      by plugin: the backend's, and the layout's for a first generation.
    plugins:      names of those that stand around the data path, outermost first.
    open_archive: tells how generations are read that were archived.
    lazily:       open each shard only when it is asked for; only with ``read_only``.
    mode:         permissions of the directory, if it is made.

    Errors are those of `topicstore.open`; nothing is left open then.
    """
    path = path.absolute()  # the working directory may change
    spec = registry().backend(manifest.backend)
    make_layout = functools.partial(registry().make_layout, spec)
    check_pair(spec, registry().layout(manifest.layout))
    wrappers = [(name, registry().wrapper(name)) for name in plugins]
    _check_option_names(manifest, options)
    target: type[Backend] = load_target(spec)
    backend = target(make_options(manifest.backend, target.Options, options.get(manifest.backend, {})))
    make_layout(manifest.layout, options.get(manifest.layout, {}))  # refuse bad options before any file
    shard_map = ShardMap(manifest.shards)
    implementation = DataPath(bytes.fromhex(manifest.id), shard_map, clock)
    hooks = data_path(wrappers, implementation).hook  # refuses plugins that don't fit
    make_shard = _Shards(manifest, clock, make_layout, open_archive(path, manifest))
    with contextlib.ExitStack() as locked, contextlib.ExitStack() as opened:
        shards: Sequence[Shard]
        with shortage_told():
            if read_only:
                shards = _open_to_read(path, manifest, backend, make_shard, lazily=lazily)
                opened.callback(shards.close)
            else:
                persistent = "persistent" in spec.capabilities
                manifest, shards = _open_to_write(
                    path, manifest, options, backend, make_shard, persistent, mode, locked, opened
                )
        implementation.shards = shards
        storage = Storage(
            path,
            manifest,
            shards,
            hooks,
            plugins=plugins,
            capabilities=spec.capabilities,
            make_layout=make_layout,
            shard_map=shard_map,
            clock=clock,
            close_shards=opened.pop_all().close,
            unlock=locked.pop_all().close,
        )
    try:
        storage.hooks.topicstore_opened(db=storage)
    except BaseException:
        storage.abandon()
        raise
    return storage


@attrs.frozen
class _Shards:
    """Makes the shards of one database."""

    manifest: Manifest
    clock: Callable[[], int]
    make_layout: MakeLayout
    open_archive: OpenArchive

    def make(self, number: int, engine: Engine, *, read_only: bool = False) -> Shard:
        """Return a shard; it is checked that its files are those of the database."""
        manifest = self.manifest
        check_identity(engine, bytes.fromhex(manifest.id), number)
        if read_only and manifest.durability == "sync":
            engine.flush_log()  # nothing may be seen that power loss could take
        policy = WriteSettings(
            durability=manifest.durability,
            timestamps=manifest.timestamps,
            late=manifest.late,
            max_skew=manifest.max_skew,
            clock=self.clock,
        )
        return Shard(number, engine, policy, self.make_layout, self.open_archive, read_only=read_only)


def _check_option_names(manifest: Manifest, options: Mapping[str, Mapping[str, Any]]) -> None:
    known = {manifest.backend, manifest.layout}
    for name in () if manifest.complete else options:  # else they were compared with those it was created with
        if name not in known:
            raise InvalidArgumentError(
                f"options are by plugin: {{'{manifest.backend}': {{...}}, "
                f"'{manifest.layout}': {{...}}}}; {name!r} is neither. Other layouts get theirs "
                "with add_generation"
            )


def _open_to_read(
    path: Path, manifest: Manifest, backend: Backend, make_shard: _Shards, *, lazily: bool
) -> ReadOnlyShards:
    if not manifest.complete:
        raise DatabaseNotFoundError(f"the database at {path} has not been made to its end; open it to write")
    make = functools.partial(make_shard.make, read_only=True)
    return ReadOnlyShards(path, manifest.shards, backend, make, lazily=lazily)


def _open_to_write(
    path: Path,
    manifest: Manifest,
    options: Mapping[str, Mapping[str, Any]],
    backend: Backend,
    make_shard: _Shards,
    persistent: bool,
    mode: int,
    locked: contextlib.ExitStack,
    opened: contextlib.ExitStack,
) -> tuple[Manifest, list[Shard]]:
    """Return the manifest as it is now and the shards, which ``opened`` closes; ``locked`` gives back the lock."""
    creating = not manifest.complete
    if persistent:
        path.mkdir(mode, parents=True, exist_ok=True)
        locked.callback(DirectoryLock(path).release)
        check_no_links(path)
        if creating:
            _check_not_overtaken(path, manifest)
            write_manifest(path, manifest)
    shards: list[Shard] = []
    for number in range(manifest.shards):
        engine = backend.open_shard(path / f"shard-{number:04}", KEYSPACES, create=creating)
        try:
            shards.append(make_shard.make(number, engine))
        except BaseException:
            engine.close()
            raise
        opened.callback(shards[-1].close)
    complete_generations(shards, manifest.layout, options.get(manifest.layout, {}))
    if creating:
        manifest = attrs.evolve(manifest, complete=True)
        if persistent:
            for shard in shards:
                shard.flush()
            sync_directory(path)
            write_manifest(path, manifest)
    return manifest, shards


def _check_not_overtaken(path: Path, manifest: Manifest) -> None:
    """The manifest was looked for before the lock was held; somebody may have created one since."""
    there = read_manifest(path)
    if there is not None and there != manifest:
        raise DatabaseLockedError(f"{path} was created by somebody else at this moment; open it again")
