"""Definitions of workloads: built-in TOML files, and those of users.

::

    [workload]
    kind = "made"                 # or "file", or a kind that a plugin provides
    summary = "one line for people"
    messages = 1_000_000          # of a full run
    …                             # the other options of the kind

The name of a workload is its file's name without the extension.
"""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash
from msgspec import inspect
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.plugin_specs import WorkloadSpec
from topicstore.plugins import missing_modules, registry

from .workload import Workload, WorkloadError, WorkloadOptions

__all__ = ["Definition", "built_in", "from_parquet", "read"]

_HERE = Path(__file__).parent


class _Kind(msgspec.Struct):
    kind: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    workload: dict[str, Any]


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """The name and the options of a workload, from which any process can create it. It is part of a run's plan."""

    name: str
    source: str
    """Path of the file that contains the definition."""
    values: dict[str, Any]
    """The table ``[workload]``."""
    messages: int | None = None
    """The maximum number of messages, or None for all."""
    summary: str = ""
    """One line of description, set by `limited` for the limited number of messages."""

    def limited(self, messages: int | None) -> Definition:
        """Return the definition limited to at most ``messages`` messages."""
        limited = msgspec.structs.replace(self, messages=messages)
        return msgspec.structs.replace(limited, summary=limited.make().summary)

    def make(self) -> Workload:
        """Create the workload. Raises `WorkloadError`, which names the file and the key."""
        kind = self._decoded(self.values, _Kind).kind
        target = _load(self._spec(kind))
        options: WorkloadOptions = self._decoded(self.values, target.Options)
        try:
            return target(options.limited(self.messages), Path(self.source).parent)
        except InvalidArgumentError as bad:
            raise WorkloadError(f"{self.source}: {bad}") from bad

    def digest(self, workload: Workload) -> str:
        """Return a hash that identifies the messages of this definition."""
        known = (msgspec.to_builtins(workload.options), workload.identity())
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode(known, order="deterministic"))

    def _spec(self, kind: str) -> WorkloadSpec:
        kinds = registry().workloads()
        if kind not in kinds:
            raise WorkloadError(f"{self.source}: there is no kind of workload {kind!r}; there are: {', '.join(kinds)}")
        return kinds[kind]

    def _decoded(self, values: dict[str, Any], into: type[Any]) -> Any:
        try:
            return msgspec.convert(values, into)
        except msgspec.ValidationError as bad:
            text = str(bad).replace("`$", "`workload").replace("Object contains unknown field", "there is no key")
            allowed = _allowed(text, into)
            known = f"; there are: {', '.join(allowed)}" if allowed else ""
            raise WorkloadError(f"{self.source}: {text}{known}") from bad


def _load(spec: WorkloadSpec) -> type[Workload]:
    missing = missing_modules(spec)
    if missing:
        raise WorkloadError(f'the workload {spec.name!r} needs {", ".join(missing)}: pip install "{spec.install}"')
    module, _, name = spec.target.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise WorkloadError(f"the workload {spec.name!r} can't be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(target, type) and issubclass(target, Workload)):
        raise WorkloadError(f"the workload {spec.name!r}: {spec.target} is not a Workload")
    return target


def _allowed(text: str, into: type[Any]) -> list[str]:
    """Return the allowed keys or values at the place that a validation error names, or none for other errors."""
    place: Any = inspect.type_info(into)
    path = re.search(r"`workload([^`]*)`", text)
    for name in re.findall(r"[a-z_]+|\[", path[1] if path else ""):
        if isinstance(place, inspect.StructType):
            place = {field.encode_name: field.type for field in place.fields}.get(name)
        elif isinstance(place, inspect.ListType):
            place = place.item_type
    if isinstance(place, inspect.StructType):
        return [field.encode_name for field in place.fields] if "there is no key" in text else []
    return list(map(str, place.values)) if isinstance(place, inspect.LiteralType) else []


def built_in() -> dict[str, Path]:
    """Return the files of the built-in workloads, by name."""
    return {path.stem: path for path in sorted(_HERE.glob("*.toml"))}


def read(name: str) -> Definition:
    """Return the definition of a built-in workload by its name, or of any by the path of its TOML file.

    Raises `WorkloadError` for an unknown name and for an invalid file.
    """
    path = built_in().get(name) or Path(name)
    if not path.is_file():
        raise WorkloadError(f"{name!r} is neither a workload nor a TOML file; workloads are: {', '.join(built_in())}")
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as bad:
        raise WorkloadError(f"{path}: {bad}") from bad
    except msgspec.ValidationError as bad:
        raise WorkloadError(f"{path}: {bad}; a definition is the table [workload]") from bad
    return Definition(name=path.stem, source=str(path.resolve()), values=found.workload)


def from_parquet(path: Path, requests: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Definition:
    """Return the definition of a workload with a Parquet file's messages and these requests, without a TOML file."""
    values = {"kind": "file", "path": path.name, "summary": f"the messages of {path.name}", "requests": dict(requests)}
    return Definition(name=path.stem, source=str(path.resolve()), values=values)
