"""The manifest: the settings that a database was created with, in one file of its directory.

The file ``topicstore.json`` is JSON that people can read, and is replaced atomically::

    {"format": 1, "checksum": "<xxh64 of the rest>", "id": …, "complete": true, "backend": …, …}

``complete`` is false from the first write until every shard was made, so that the next open continues
an interrupted creation instead of taking it for a database with losses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
import xxhash

from topicstore.contract.errors import CorruptionError, DatabaseNotFoundError, NewerFormatError, NotADatabaseError

from .disk_errors import failure_told
from .durable_files import is_foreign, read_own, replace_file

__all__ = ["FORMAT", "MANIFEST", "Manifest", "existing_manifest", "read_manifest", "write_manifest"]

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
