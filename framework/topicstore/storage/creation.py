"""The arguments that a database is created with, and the check that later openings don't contradict them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from topicstore._version import __version__
from topicstore.contract.arguments import check_length, check_within
from topicstore.contract.errors import DatabaseNotFoundError, InvalidArgumentError, ManifestMismatchError
from topicstore.contract.times import format_time
from topicstore.plugins import registry

from .manifest import Manifest, existing_manifest

__all__ = ["MAX_SHARDS", "check_same", "finished_manifest", "merged_options", "new_manifest", "wanted_fields"]

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
