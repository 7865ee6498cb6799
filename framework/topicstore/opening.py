"""`open`: a database, assembled from its storage and its features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import attrs

from .contract.arguments import check_path
from .contract.errors import InvalidArgumentError, NotADatabaseError, StorageFullError
from .database import Database
from .lifecycle.archives import open_archive
from .plugins import registry
from .queues.queues import DIRECTORY, Queues
from .runtime.clocks import Clocks, now
from .runtime.closing import Taken
from .storage.directory.ballast import give_up_ballast
from .storage.directory.files import OWNER_ONLY, permissions_of
from .storage.directory.manifest import (
    Durability,
    Late,
    Manifest,
    Timestamps,
    check_same,
    existing_manifest,
    finished_manifest,
    merged_options,
    new_manifest,
    read_manifest,
    wanted_fields,
)
from .storage.opening import RECOVERIES, OpenSettings, Recovery, open_storage
from .storage.storage import Storage

__all__ = ["open", "open_lazily"]

Mode: TypeAlias = Literal["a", "x", "r+", "r"]


def open(  # noqa: A001 - the name people know from every other store
    path: str | Path,
    mode: Mode = "a",
    *,
    backend: str | None = None,
    layout: str | None = None,
    shards: int | None = None,
    durability: Durability | None = None,
    timestamps: Timestamps | None = None,
    late: Late | None = None,
    max_skew: timedelta | float | None = None,
    plugins: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    auto_compact: bool = True,
    recovery: Recovery = "strict",
    permissions: int = OWNER_ONLY,
    allow_ancient: bool = False,
    clock: Callable[[], int] = now,
    monotonic: Callable[[], int] | None = None,
) -> Database:
    """Open the database in the directory ``path``, by default creating it where there is none.

    At creation the arguments count; later everything comes from the manifest, and an argument
    that contradicts it raises `ManifestMismatchError`.

    mode:       ``"a"`` (default): write it, and create it where there is none. ``"x"``: create it; one that is there
                raises `NotADatabaseError`. ``"r+"``: write one that is there; none raises `DatabaseNotFoundError`.
                ``"r"``: only read one that is there, as it is at this moment or at the last `Database.refresh`, and
                change nothing of it. Backends with ``concurrent_readers`` (``rocksdb``) do so while another process
                writes it, without a lock; with the others no process may have it open to write.
    backend:    name of an installed backend; default ``"rocksdb"``.
    layout:     name of an installed layout; default ``"block"``.
    shards:     1 to 4,096; messages go to a shard by their client id; default 1.
    durability: ``"commit"`` (default): stored messages survive the process's death.
                ``"sync"``: they are on disk, and survive power loss.
    timestamps: ``"commit"`` (default): positions, and so time ranges, go by the time of storing.
                ``"message"``: by the messages' own times.
    late:       with ``timestamps="message"``, what a message older than its shard's last does:
                ``"raise"`` (default) `LateMessageError`, or ``"lift"`` it to the next position.
    max_skew:   with ``timestamps="message"``, how far a message's own time may lie ahead of the clock: a timedelta, or
                seconds; default 60.
    plugins:    names of plugins that wrap the data path, outermost first. Recorded at creation;
                later ones named here join for this opening only.
    options:    ``{"rocksdb": {...}, "block": {...}}``. The backend's may differ at every opening,
                the layout's are kept with each generation.
    auto_compact: merge what was stored in the background, when it is quiet, and count it (`Database.compact`);
                may differ at every opening.
    recovery:   what happens if a shard can't be read as it was stored. ``"strict"`` (default): truncate the log of the
                engine at the first write that a power failure left missing or damaged, with a `RuntimeWarning` if a
                later write is readable; if a write is missing that was known to be on disk, raise `DataLossError` or
                `CorruptionError` and change nothing. ``"point_in_time"``: open the shard as it was before the first
                write that is missing or damaged. ``"salvage"``: the same, and then store again, at their positions,
                the later messages that are completely readable; a warning counts those and the others. State,
                sessions, retained messages, deletes and generations stay as they were before the damage, so a session
                may deliver again what was salvaged. What the last two leave out is lost for good, even if they are
                interrupted: copy the directory before.
    permissions: those of the directory where it is made, less the umask; by default others than its owner can't
                enter it, and read nothing. Directories that are there keep theirs; queues and checkpoints get the same.
    allow_ancient: accept times, of messages and to read from, in the first two months of 1970. They are refused by
                default, because they are probably seconds or milliseconds. May differ at every opening.
    clock:      returns the present as microseconds since the epoch.
    monotonic:  returns microseconds that have passed since some moment; all durations go by it, so that the
                clock may jump. By default the machine's, or with a ``clock`` of your own that one.

    A database belongs to the process that opened it. A forked child can't use it, and with ``rocksdb`` or ``leveldb``
    it can't open one of its own either, once its parent has (`ForkedProcessError`): begin it with ``spawn`` or
    ``forkserver``. Where the C library is not glibc, end a child of a process that uses ``rocksdb`` by `os._exit`.

    Raises `InvalidArgumentError`, also for a path that isn't UTF-8, `FileSystemError` where the directory can't be
    used, `DatabaseLockedError`, `NotADatabaseError`, `NewerFormatError`, `UnknownPluginError`,
    `BackendUnavailableError`, `IncompatibleError`, `InvalidOptionError`, `StorageFullError`, `TooManyOpenFilesError`,
    `CorruptionError`.
    """
    if mode not in get_args(Mode):
        raise InvalidArgumentError(f"mode is one of {', '.join(get_args(Mode))}, not {mode!r}")
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
    settings = OpenSettings(
        open_archive=open_archive,
        options=options or {},
        plugins=plugins,
        clocks=Clocks.given(clock, monotonic),
        recovery=recovery,
        read_only=mode == "r",
        permissions=permissions,
        allow_ancient=allow_ancient,
    )
    storage = _open_or_create(check_path(path), wanted, settings, mode)
    settings = attrs.evolve(settings, plugins=storage.plugins)
    open_queue = functools.partial(_open_queue, storage.manifest, settings)
    queues = Queues(storage.path / DIRECTORY, open_queue, read_only=settings.read_only)
    with Taken() as taken:
        taken.add(storage.close)
        return Database(storage, queues, auto_compact=auto_compact and not settings.read_only)


def open_lazily(path: Path) -> Storage:
    """Open the shards of a database read-only, each when it is first used. Raises the errors of `open`."""
    manifest = existing_manifest(check_path(path))
    settings = OpenSettings(
        open_archive=open_archive, options=manifest.options, plugins=manifest.plugins, read_only=True, lazily=True
    )
    return open_storage(path, manifest, settings)


def _open_or_create(path: Path, wanted: dict[str, Any], settings: OpenSettings, mode: Mode = "a") -> Storage:
    # The manifest is read once: another process may create the database at any moment.
    manifest = {"r": finished_manifest, "r+": existing_manifest}.get(mode, read_manifest)(path)
    if mode == "x" and manifest is not None and manifest.complete:
        raise NotADatabaseError(f"there is a database at {path} already")
    if manifest is None:
        manifest = new_manifest(wanted, settings.plugins, settings.options)
        return open_storage(path, manifest, attrs.evolve(settings, options=manifest.options, plugins=manifest.plugins))
    check_same(path, manifest, wanted, settings.options)
    more = tuple(name for name in settings.plugins if name not in manifest.plugins)
    settings = attrs.evolve(
        settings, options=merged_options(manifest, settings.options), plugins=manifest.plugins + more
    )
    try:
        return open_storage(path, manifest, settings)
    except StorageFullError:
        if settings.read_only or not give_up_ballast(path):
            raise
    return open_storage(path, manifest, settings)


def _open_queue(of: Manifest, settings: OpenSettings, path: Path, *, read_only: bool = False) -> Storage:
    """Open or create the database of a queue, with the owner's layout if that shows messages at once and in order."""
    layout = of.layout if "position_order" in registry().layout(of.layout).capabilities else None
    wanted = wanted_fields(backend=of.backend, layout=layout, shards=1, durability=of.durability)
    settings = attrs.evolve(
        settings,
        options={name: values for name, values in of.options.items() if name in (of.backend, layout)},
        permissions=permissions_of(path.parents[1]),  # the database's
        read_only=read_only,
        ballast=False,
    )
    return _open_or_create(path, wanted, settings, "r" if read_only else "a")
