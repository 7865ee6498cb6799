"""The generator of the commented default settings file."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from topicstore.server.quantities import Duration, Period, Quota, Size
from topicstore.server.settings import ServerSettings
from topicstore.server.settings_file import read_settings

from .docstrings import about_settings, about_table
from .shown import plain, written

__all__ = ["default_file"]

_WIDTH = 100
_EXAMPLES: dict[type, str] = {Path: "FILE", Duration: "1h", Period: "30d", Size: "8MB", Quota: "100GB"}
"""Example values, by type, for settings without a default."""
_OWN_EXAMPLES: dict[str, Any] = {
    "backend": "rocksdb",
    "batch_size": 500,
    "client_id": "ID",
    "idle_poll_interval": "1s",
    "publish_rate": 1_000,
    "renew_streams_interval": "1s",
    "response_information": "answers/%c",
    "topics": ["sensors/%u/#"],
    "zone": "NAME",
}
"""Example values for single settings, which take precedence."""


def default_file() -> str:
    """Return a settings file with the settings of a server without a file, and with comments.

    Comments begin with ``# ``. Settings without a default are commented out by ``#`` without a space, with an example
    value. The file stays valid if each such ``#`` is removed.
    """
    settings = read_settings(None, {})
    lines = [
        *_comment(
            "The settings of 'topicstore serve --config FILE', all with their defaults. After a '#' without a space "
            "stands what by default is not set, with an example: take the '#' away to set it. Each may also be set by "
            "the environment, as TOPICSTORE__LIMITS__CONNECTIONS=500. Durations and sizes have a unit: '100ms', '8MB'. "
            "Paths are relative to this file."
        ),
        *_table(ServerSettings, settings, (), active=True),
    ]
    return "\n".join(lines).strip() + "\n"


def _table(cls: type, value: Any, place: tuple[str, ...], *, active: bool, header: str = "[{}]") -> Iterator[str]:
    """Yield the lines of a table; unless ``active``, they are commented out."""
    mark, docs = "" if active else "#", about_settings(cls)
    if place:
        yield ""
        yield from _comment(about_table(cls))
        yield mark + header.format(".".join(place))
    tables = []
    for field in msgspec.structs.fields(cls):
        found = getattr(value, field.name, None)
        usual = None if field.default is msgspec.NODEFAULT else field.default
        within = _tables_of(field, found, place)
        if within is not None:
            tables += within
            continue
        yield from _comment(docs.get(field.name, ""))
        if found is None:
            yield f"#{field.name} = {written(_example(field) if usual is None else plain(usual))}"
        else:
            yield f"{mark}{field.name} = {written(plain(found))}"
    for one, inner, at, form in tables:
        yield from _table(one, inner, at, active=active and inner is not None, header=form)


def _tables_of(
    field: msgspec.structs.FieldInfo, found: Any, place: tuple[str, ...]
) -> list[tuple[type, Any, tuple[str, ...], str]] | None:
    """Return the tables of a field, each with class, value, keys and header format; None if it has none."""
    at = (*place, field.name)
    for kind in _kinds(field.type):
        if isinstance(kind, inspect.StructType):
            return [(kind.cls, found, at, "[{}]")]
        if isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
            named = dict(found) if found else {"NAME": None}
            return [(kind.value_type.cls, one, (*at, name), "[{}]") for name, one in named.items()]
        if isinstance(kind, inspect.VarTupleType) and isinstance(kind.item_type, inspect.StructType):
            return [(kind.item_type.cls, one, at, "[[{}]]") for one in found or [None]]
    return None


def _kinds(kind: Any) -> tuple[inspect.Type, ...]:
    found = inspect.type_info(kind)
    return found.types if isinstance(found, inspect.UnionType) else (found,)


def _example(field: msgspec.structs.FieldInfo) -> Any:
    if field.name in _OWN_EXAMPLES:
        return _OWN_EXAMPLES[field.name]
    for one in _kinds(field.type):
        if isinstance(one, inspect.LiteralType):
            return one.values[0]
        if isinstance(one, inspect.IntType):
            return one.ge or 1
        if isinstance(one, inspect.BoolType):
            return True
        if isinstance(one, inspect.VarTupleType):
            return ["TEXT"]
        if isinstance(one, inspect.CustomType):
            return _EXAMPLES.get(one.cls, "127.0.0.1:1883")
    return "TEXT"


def _comment(text: str) -> list[str]:
    plain = re.sub(r"\s+", " ", text.replace("``", "")).strip()
    return [f"# {line}" for line in textwrap.wrap(plain, _WIDTH)]
