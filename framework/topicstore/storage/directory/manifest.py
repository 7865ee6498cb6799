"""The manifest, a file with the settings with which a database was created, and the check of later openings' arguments.

The file ``topicstore.json`` is human-readable JSON, and is replaced atomically::

    {"format": 1, "checksum": "<xxh64 of the rest>", "id": …, "complete": true, "backend": …, …}

A database that a cluster shares has format 2 and the field ``cluster``, so that no older program writes to it.

``complete`` is false from the first write until every shard was created, so that the next opening continues
an interrupted creation instead of reporting data loss.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
import xxhash

from topicstore._version import __version__
from topicstore.contract.arguments import check_length, check_within
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseNotFoundError,
    InvalidArgumentError,
    ManifestMismatchError,
    NewerFormatError,
    NotADatabaseError,
)
from topicstore.contract.times import format_time
from topicstore.plugins import registry

from .files import convert_os_errors, is_foreign, read_own, replace_file

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MAX_SHARDS",
    "SHARED",
    "Manifest",
    "check_same",
    "existing_manifest",
    "finished_manifest",
    "merged_options",
    "new_manifest",
    "read_manifest",
    "shared_fields",
    "wanted_fields",
    "write_manifest",
]

FORMAT = 2
"""The highest format that is read."""
MANIFEST = "topicstore.json"
_TEMPORARY = f"{MANIFEST}.new"
_TOLD = 3
"""The maximum number of files that an error names."""

Durability = Literal["commit", "sync"]
Timestamps = Literal["commit", "message"]
Late = Literal["raise", "lift"]


@attrs.frozen(kw_only=True)
class Manifest:
    """The settings of a database that are fixed when it is created."""

    id: str
    """The database's id, of 32 random hexadecimal digits."""
    backend: str
    layout: str
    shards: int
    durability: Durability
    timestamps: Timestamps
    late: Late
    max_skew: float
    """The maximum number of seconds by which a message's own time may be ahead of the clock."""
    plugins: tuple[str, ...]
    """The names of the plugins that always wrap the data path, outermost first."""
    options: dict[str, dict[str, Any]]
    """The options by plugin name, as given at creation."""
    created: str
    """The time of the creation, in ISO 8601 in UTC."""
    created_by: str
    """The name and version of the program that created the database."""
    complete: bool = False
    """Whether the creation has finished."""
    cluster: str | None = None
    """The log store that the database is shared through, without credentials; None if it is not shared."""


def _checksum(fields: dict[str, Any]) -> str:
    return xxhash.xxh64_hexdigest(msgspec.json.encode(fields, order="deterministic"))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of ``directory`` atomically, and fsync it."""
    fields = msgspec.to_builtins(manifest)
    if manifest.cluster is None:
        del fields["cluster"]
    data = {"format": FORMAT if manifest.cluster else 1, "checksum": _checksum(fields), **fields}
    text = msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"
    replace_file(directory / MANIFEST, text, temporary=directory / _TEMPORARY)


@convert_os_errors()
def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of ``directory``; None if the directory is missing or empty.

    Raises `NotADatabaseError`, `NewerFormatError` or `CorruptionError`.
    """
    path = directory / MANIFEST
    try:
        text = read_own(path, links=True)  # a link may be read but not written
    except FileNotFoundError:
        if path.exists():  # another process has just created it
            return read_manifest(directory)
        # A process killed while it created the database leaves at most a lock and a temporary file.
        names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set[str]()
        others = sorted(name for name in names - {"LOCK", _TEMPORARY} if not is_foreign(name))
        if others:
            told = ", ".join(others[:_TOLD]) + (f" and {len(others) - _TOLD:,} more" if len(others) > _TOLD else "")
            raise NotADatabaseError(
                f"{directory} holds files but no {MANIFEST}; it was left as it is. In the way: {told}"
            ) from None
        return None
    except NotADirectoryError:
        raise NotADatabaseError(f"{directory} is not a directory") from None
    try:
        data = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise CorruptionError(f"not JSON: {bad}", place=str(path)) from bad
    version = data.pop("format", None)
    if not isinstance(version, int):
        raise NotADatabaseError(f"{path} is not a topicstore manifest")
    if version > FORMAT:
        raise NewerFormatError(f"{directory} has format {version}; this topicstore reads up to {FORMAT}")
    if data.pop("checksum", None) != _checksum(data):
        raise CorruptionError("the checksum is wrong", place=str(path))
    try:
        return msgspec.convert(data, Manifest)
    except msgspec.ValidationError as bad:
        raise CorruptionError(str(bad), place=str(path)) from bad


def existing_manifest(directory: Path) -> Manifest:
    """Return the manifest of a database. Raises `DatabaseNotFoundError` if there is none."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise DatabaseNotFoundError(f"there is no database at {directory}")
    return manifest


MAX_SHARDS = 4_096


def finished_manifest(directory: Path) -> Manifest:
    """Return the manifest of a completely created database. Raises `DatabaseNotFoundError` if there is none."""
    manifest = existing_manifest(directory)
    if not manifest.complete:
        raise DatabaseNotFoundError(f"the database at {directory} has not been made to its end; open it to write")
    return manifest


_CHOICES = {"durability": ("commit", "sync"), "timestamps": ("commit", "message"), "late": ("raise", "lift")}
DEFAULT_BACKEND = "rocksdb"
DEFAULT_LAYOUT = "block"
_DEFAULTS = {
    "backend": DEFAULT_BACKEND,
    "layout": DEFAULT_LAYOUT,
    "shards": 1,
    "durability": "commit",
    "timestamps": "commit",
    "late": "raise",
    "max_skew": 60.0,
}


def wanted_fields(**arguments: Any) -> dict[str, Any]:
    """Check the arguments of an opening, and return those that aren't None."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise InvalidArgumentError(f"{name} is one of {', '.join(choices)}, not {given[name]!r}")
    for name in ("backend", "layout"):
        if not isinstance(given.get(name, ""), str):
            raise InvalidArgumentError(f"{name} is the name of a plugin")
    check_within("shards", given.get("shards", 1), 1, MAX_SHARDS)
    if "max_skew" in given:
        given["max_skew"] = check_length("max_skew", given["max_skew"])
    return given


SHARED = ("layout", "timestamps", "late", "max_skew", "plugins", "created", "created_by")
"""The fields that are the same on all sites of a cluster, besides the id, the number of shards and some options."""


def shared_fields(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of a manifest, and the options of its layout, that are the same on all sites of a cluster."""
    options = {manifest.layout: manifest.options[manifest.layout]} if manifest.layout in manifest.options else {}
    return {name: getattr(manifest, name) for name in SHARED} | {"options": options}


def new_manifest(wanted: dict[str, Any], plugins: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """Return the manifest of a database that is about to be created."""
    fields = {**_DEFAULTS, **wanted}
    return Manifest(
        id=uuid.uuid4().hex,
        **{**fields, "max_skew": float(fields["max_skew"])},
        plugins=tuple(plugins),
        options={name: dict(values) for name, values in options.items()},
        created=format_time(int(time.time()) * 1_000_000),
        created_by=f"topicstore {__version__}",
    )


def check_same(
    directory: Path, manifest: Manifest, wanted: dict[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise `ManifestMismatchError` if arguments or options contradict those with which the database was created."""
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


def merged_options(manifest: Manifest, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the manifest's options, in which the given options of the backend replace the stored ones."""
    merged: dict[str, Mapping[str, Any]] = {**manifest.options}
    if manifest.backend in options:
        merged[manifest.backend] = {**merged.get(manifest.backend, {}), **options[manifest.backend]}
    return merged
