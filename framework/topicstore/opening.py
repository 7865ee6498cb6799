"""`open`, `create` and `open_existing`: a database, put together of its storage and its features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .clocks import Clocks, now
from .contract.arguments import check_path
from .contract.errors import InvalidArgumentError, NotADatabaseError, StorageFullError
from .database import Database
from .lifecycle.archives import open_archive
from .plugins import registry
from .queues.queues import DIRECTORY, Queues
from .releasing import Taken
from .storage.ballast import give_up_ballast
from .storage.creation import check_same, finished_manifest, merged_options, new_manifest, wanted_fields
from .storage.durable_files import OWNER_ONLY
from .storage.manifest import Manifest, existing_manifest, read_manifest
from .storage.opening import open_storage
from .storage.shard_opener import RECOVERIES, Recovery
from .storage.storage import Storage

__all__ = ["create", "open", "open_existing", "open_lazily"]


def open(  # noqa: A001 - the name people know from every other store
    path: str | Path,
    *,
    backend: str | None = None,
    layout: str | None = None,
    shards: int | None = None,
    durability: str | None = None,
    timestamps: str | None = None,
    late: str | None = None,
    max_skew: float | None = None,
    plugins: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    auto_compact: bool = True,
    recovery: Recovery = "strict",
    read_only: bool = False,
    mode: int = OWNER_ONLY,
    clock: Callable[[], int] = now,
    monotonic: Callable[[], int] | None = None,
) -> Database:
    """Open the database in the directory ``path``, creating it where there is none.

    At creation the arguments count; later everything comes from the manifest, and an argument
    that contradicts it raises `ManifestMismatchError`.

    backend:    name of an installed backend; default ``"rocksdb"``.
    layout:     name of an installed layout; default ``"block"``.
    shards:     1 to 4,096; messages go to a shard by their client id; default 1.
    durability: ``"commit"`` (default): stored messages survive the process's death.
                ``"sync"``: they are on disk, and survive power loss.
    timestamps: ``"commit"`` (default): positions, and so time ranges, go by the time of storing.
                ``"message"``: by the messages' own times.
    late:       with ``timestamps="message"``, what a message older than its shard's last does:
                ``"raise"`` (default) `LateMessageError`, or ``"lift"`` it to the next position.
    max_skew:   seconds that a message's own time may lie ahead of the clock; default 60.
    plugins:    names of plugins that wrap the data path, outermost first. Recorded at creation;
                later ones named here join for this opening only.
    options:    ``{"rocksdb": {...}, "block": {...}}``. The backend's may differ at every opening,
                the layout's are kept with each generation.
    auto_compact: merge what was stored in the background, when it is quiet (`Database.compact`);
                may differ at every opening.
    recovery:   what is done where a shard can't be read as it was stored. ``"strict"`` (default): cut what a power
                failure left at the end of a log, if nothing is missing then that was on disk before; else raise
                `DataLossError` or `CorruptionError`, and leave it as it is. ``"point_in_time"``: go on with what there
                was before the first write that is missing or damaged. ``"salvage"``: go on with every write that can
                be read, with gaps. What the last two leave out is gone for good; copy the directory before.
    read_only:  only read the database, as it is at this moment or at the last `Database.refresh`, and change
                nothing of it; `Database.reading` says how. With backends that can do it (``rocksdb``) beside
                whoever writes it, without a lock; with the others, where nobody has it open.
    mode:       permissions of the directory where it is made, less the umask; by default others than its owner can't
                enter it, and read nothing. Directories that are there keep theirs.
    clock:      returns the present as microseconds since the epoch.
    monotonic:  returns microseconds that have passed since some moment; all durations go by it, so that the
                clock may jump. By default the machine's, or with a ``clock`` of your own that one.

    A database belongs to the process that opened it. A forked child can't use it, and with ``rocksdb`` or ``leveldb``
    it can't open one of its own either, once its parent has (`ForkedProcessError`): begin it with ``spawn`` or
    ``forkserver``.

    Raises `InvalidArgumentError`, also for a path that isn't UTF-8, `OSError` where the directory can't be used,
    `DatabaseLockedError`, `NotADatabaseError`, `NewerFormatError`, `UnknownPluginError`, `BackendUnavailableError`,
    `IncompatibleError`, `InvalidOptionError`, `StorageFullError`, `TooManyOpenFilesError`, `CorruptionError`; to be
    read, `DatabaseNotFoundError`.
    """
    wanted = wanted_fields(
        backend=backend,
        layout=layout,
        shards=shards,
        durability=durability,
        timestamps=timestamps,
        late=late,
        max_skew=max_skew,
    )
    if recovery not in RECOVERIES:
        raise InvalidArgumentError(f"recovery is one of {', '.join(RECOVERIES)}, not {recovery!r}")
    clocks = Clocks.given(clock, monotonic)
    storage = _open_or_create(
        check_path(path), wanted, plugins, options or {}, clocks, recovery, read_only=read_only, mode=mode
    )
    open_queue = functools.partial(_open_queue, storage.manifest, storage.plugins, clocks, recovery)
    queues = Queues(storage.path / DIRECTORY, open_queue, read_only=read_only)
    with Taken() as taken:
        taken.add(storage.close)
        return Database(storage, queues, auto_compact=auto_compact and not read_only)


def create(path: str | Path, **arguments: Any) -> Database:
    """Like `open`, but raise `NotADatabaseError` if there is a database, or anything else, already."""
    directory = check_path(path)
    manifest = read_manifest(directory)
    if manifest is not None and manifest.complete:
        raise NotADatabaseError(f"there is a database at {directory} already")
    return open(path, **arguments)


def open_existing(path: str | Path, **arguments: Any) -> Database:
    """Like `open`, but raise `DatabaseNotFoundError` if there is no database."""
    existing_manifest(check_path(path))
    return open(path, **arguments)


def open_lazily(path: Path) -> Storage:
    """Open the shards of a database to read them only, each when it is asked for. Errors are those of `open`."""
    manifest = existing_manifest(check_path(path))
    return open_storage(
        path, manifest, manifest.options, manifest.plugins, Clocks(), open_archive, read_only=True, lazily=True
    )


def _open_or_create(
    path: Path,
    wanted: dict[str, Any],
    plugins: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    clocks: Clocks,
    recovery: Recovery,
    *,
    read_only: bool = False,
    mode: int = OWNER_ONLY,
    ballast: bool = True,
) -> Storage:
    manifest = finished_manifest(path) if read_only else read_manifest(path)
    if manifest is None:
        manifest = new_manifest(wanted, plugins, options)
        options, plugins = manifest.options, manifest.plugins
        return open_storage(path, manifest, options, plugins, clocks, open_archive, mode=mode, ballast=ballast)
    check_same(path, manifest, wanted, options)
    opened = functools.partial(
        open_storage,
        path,
        manifest,
        merged_options(manifest, options),
        manifest.plugins + tuple(name for name in plugins if name not in manifest.plugins),
        clocks,
        open_archive,
        recovery=recovery,
        read_only=read_only,
        ballast=ballast,
    )
    try:
        return opened()
    except StorageFullError:
        if read_only or not give_up_ballast(path):
            raise
    return opened()


def _open_queue(
    of: Manifest, plugins: Sequence[str], clocks: Clocks, recovery: Recovery, path: Path, *, read_only: bool = False
) -> Storage:
    """Open or make the database of a queue: as the one it belongs to, if messages can be read at once and in order."""
    layout = of.layout if "position_order" in registry().layout(of.layout).capabilities else None
    wanted = wanted_fields(backend=of.backend, layout=layout, shards=1, durability=of.durability)
    options = {name: values for name, values in of.options.items() if name in (of.backend, layout)}
    return _open_or_create(path, wanted, plugins, options, clocks, recovery, read_only=read_only, ballast=False)
