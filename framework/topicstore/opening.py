"""`open`, `create` and `open_existing`: what a database is made with, and what its manifest says already."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ._version import __version__
from .contract.errors import DatabaseNotFoundError, InvalidArgumentError, ManifestMismatchError, NotADatabaseError
from .database import Database
from .plugins import registry
from .storage.manifest import Manifest, existing_manifest, read_manifest

__all__ = ["create", "open", "open_existing"]

MAX_SHARDS = 4_096


def _clock() -> int:
    return time.time_ns() // 1_000


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
    read_only: bool = False,
    clock: Callable[[], int] = _clock,
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
    read_only:  only read the database, as it is at this moment or at the last `Database.refresh`, and change
                nothing of it; `Database.reading` says how. With backends that can do it (``rocksdb``) beside
                whoever writes it, without a lock; with the others, where nobody has it open.
    clock:      returns the present as microseconds since the epoch.

    A database belongs to the process that opened it: after a fork, the child must open its own.

    Raises `OSError` where the directory can't be used, `DatabaseLockedError`, `NotADatabaseError`,
    `NewerFormatError`, `UnknownPluginError`, `BackendUnavailableError`, `IncompatibleError`,
    `InvalidOptionError`, `StorageFullError`, `CorruptionError`; to be read, `DatabaseNotFoundError`.
    """
    directory = Path(path)
    wanted = _wanted(
        backend=backend,
        layout=layout,
        shards=shards,
        durability=durability,
        timestamps=timestamps,
        late=late,
        max_skew=max_skew,
    )
    manifest = _finished_manifest(directory) if read_only else read_manifest(directory)
    if manifest is None:
        manifest = _new_manifest(wanted, plugins, options or {})
        return Database(directory, manifest, manifest.options, manifest.plugins, clock, auto_compact=auto_compact)
    _check_same(directory, manifest, wanted, options or {})
    merged = _merged_options(manifest, options or {})
    names = manifest.plugins + tuple(name for name in plugins if name not in manifest.plugins)
    return Database(directory, manifest, merged, names, clock, auto_compact=auto_compact, read_only=read_only)


def create(path: str | Path, **arguments: Any) -> Database:
    """Like `open`, but raise `NotADatabaseError` if there is a database, or anything else, already."""
    directory = Path(path)
    manifest = read_manifest(directory)
    if manifest is not None and manifest.complete:
        raise NotADatabaseError(f"there is a database at {directory} already")
    return open(path, **arguments)


def open_existing(path: str | Path, **arguments: Any) -> Database:
    """Like `open`, but raise `DatabaseNotFoundError` if there is no database."""
    existing_manifest(Path(path))
    return open(path, **arguments)


def _finished_manifest(directory: Path) -> Manifest:
    """Return the manifest of a database that is there as a whole."""
    manifest = existing_manifest(directory)
    if not manifest.complete:
        raise DatabaseNotFoundError(f"the database at {directory} has not been made to its end; open it to write")
    return manifest


_CHOICES = {"durability": ("commit", "sync"), "timestamps": ("commit", "message"), "late": ("raise", "lift")}
_DEFAULTS = {
    "backend": "rocksdb",
    "layout": "block",
    "shards": 1,
    "durability": "commit",
    "timestamps": "commit",
    "late": "raise",
    "max_skew": 60.0,
}


def _wanted(**arguments: Any) -> dict[str, Any]:
    """Check the arguments that were given."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise InvalidArgumentError(f"{name} is one of {', '.join(choices)}, not {given[name]!r}")
    shards, skew = given.get("shards", 1), given.get("max_skew", 0.0)
    for name in ("backend", "layout"):
        if not isinstance(given.get(name, ""), str):
            raise InvalidArgumentError(f"{name} is the name of a plugin")
    if type(shards) is not int or not 1 <= shards <= MAX_SHARDS:
        raise InvalidArgumentError(f"shards is a number from 1 to {MAX_SHARDS}, not {shards!r}")
    if not isinstance(skew, (int, float)) or isinstance(skew, bool) or not 0 <= skew < 1e9:
        raise InvalidArgumentError(f"max_skew is a number of seconds, not {skew!r}")
    return given


def _new_manifest(wanted: dict[str, Any], plugins: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Manifest:
    fields = {**_DEFAULTS, **wanted}
    return Manifest(
        id=uuid.uuid4().hex,
        **{**fields, "max_skew": float(fields["max_skew"])},
        plugins=tuple(plugins),
        options={name: dict(values) for name, values in options.items()},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        created_by=f"topicstore {__version__}",
    )


def _check_same(
    directory: Path, manifest: Manifest, wanted: dict[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse arguments that contradict what the database was created with."""
    for name, value in wanted.items():
        is_ = getattr(manifest, name)
        if value != is_:
            raise ManifestMismatchError(f"{directory} was created with {name}={is_!r}, not {value!r}")
    for plugin, values in options.items():
        if plugin != manifest.backend and registry().full_options(plugin, values) != registry().full_options(
            plugin, manifest.options.get(plugin, {})
        ):
            raise ManifestMismatchError(
                f"{directory} has its own options of {plugin!r}; a new generation may have others"
            )


def _merged_options(manifest: Manifest, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the manifest's options, the backend's changed by those given."""
    merged: dict[str, Mapping[str, Any]] = {**manifest.options}
    if manifest.backend in options:
        merged[manifest.backend] = {**merged.get(manifest.backend, {}), **options[manifest.backend]}
    return merged
