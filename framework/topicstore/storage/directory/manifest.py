"""The manifest: the settings that a database was created with, in one file of its directory.

The file ``topicstore.json`` is JSON that people can read, and is replaced atomically::

    {"format": 1, "checksum": "<xxh64 of the rest>", "id": …, "complete": true, "backend": …, …}

``complete`` is false from the first write until every shard was made, so that the next open continues
an interrupted creation instead of taking it for a database with losses.

The arguments that a database is created with, and the check that later openings don't contradict them.
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

from .files import failure_told, is_foreign, read_own, replace_file

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MAX_SHARDS",
    "Manifest",
    "check_same",
    "existing_manifest",
    "finished_manifest",
    "merged_options",
    "new_manifest",
    "read_manifest",
    "wanted_fields",
    "write_manifest",
]

FORMAT = 1
MANIFEST = "topicstore.json"
_DRAFT = f"{MANIFEST}.new"
_TOLD = 3
"""The most names that an error tells."""

Durability = Literal["commit", "sync"]
Timestamps = Literal["commit", "message"]
Late = Literal["raise", "lift"]


@attrs.frozen(kw_only=True)
class Manifest:
    """The settings that hold for the whole life of a database."""

    id: str
    """The database's id, of 32 random hexadecimal digits."""
    backend: str
    layout: str
    shards: int
    durability: Durability
    timestamps: Timestamps
    late: Late
    max_skew: float
    """The number of seconds by which a message's own time may be ahead of the clock."""
    plugins: tuple[str, ...]
    """The names of the wrappers without which the database is not opened, outermost first."""
    options: dict[str, dict[str, Any]]
    """The options by plugin name, as they were given at creation."""
    created: str
    """The time of the creation, as ISO 8601 in UTC."""
    created_by: str
    complete: bool = False


def _checksum(fields: dict[str, Any]) -> str:
    return xxhash.xxh64_hexdigest(msgspec.json.encode(fields, order="deterministic"))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest of ``directory``. It is on disk when the call returns."""
    fields = msgspec.to_builtins(manifest)
    data = {"format": FORMAT, "checksum": _checksum(fields), **fields}
    text = msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"
    replace_file(directory / MANIFEST, text, draft=directory / _DRAFT)


@failure_told()
def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of ``directory``, or None if there is nothing, so that a database can be created.

    Raises `NotADatabaseError`, `NewerFormatError` or `CorruptionError`.
    """
    path = directory / MANIFEST
    try:
        text = read_own(path, links=True)  # links may be read but not written
    except FileNotFoundError:
        if path.exists():  # made meanwhile
            return read_manifest(directory)
        # A process killed while it created the database leaves at most a lock and a draft.
        names = {entry.name for entry in directory.iterdir()} if directory.is_dir() else set[str]()
        others = sorted(name for name in names - {"LOCK", _DRAFT} if not is_foreign(name))
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
    """Return the manifest of a database that must exist."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise DatabaseNotFoundError(f"there is no database at {directory}")
    return manifest


MAX_SHARDS = 4_096


def finished_manifest(directory: Path) -> Manifest:
    """Return the manifest of a database whose creation was finished."""
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
    """Return the arguments that were given, checked."""
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


def new_manifest(wanted: dict[str, Any], plugins: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """Return the manifest of a database that is about to be made."""
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
    """Raise an error if arguments contradict those that the database was created with."""
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
    """Return the manifest's options, with those given for the backend in place of the stored ones."""
    merged: dict[str, Mapping[str, Any]] = {**manifest.options}
    if manifest.backend in options:
        merged[manifest.backend] = {**merged.get(manifest.backend, {}), **options[manifest.backend]}
    return merged
