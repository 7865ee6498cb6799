"""Settings from the environment: ``TOPICSTORE__DURABLE_SESSIONS__BATCH_SIZE=500``.

Two underscores separate the keys of nested tables, and names are in capitals. A value is parsed as TOML, such as
``500``, ``true`` or ``["a", "b"]``; a value that isn't TOML is a string, such as ``100ms`` or ``a/path``. Paths are
relative to the current directory.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
from msgspec import inspect

from .settings import ServerSettings, SettingsError

__all__ = ["PREFIX", "Variable", "overlay", "variables"]

PREFIX = "TOPICSTORE__"


@attrs.frozen
class Variable:
    """An environment variable that sets a setting."""

    name: str
    place: tuple[str, ...]
    """The keys that lead to the setting."""
    value: Any


def variables(environ: Mapping[str, str], given: Mapping[str, Any]) -> tuple[Variable, ...]:
    """Return the settings in the environment. Raises `SettingsError` for a variable that names no setting.

    ``given`` is the file's document; the names of its listeners and zones are matched without regard to case.
    """
    found = []
    for name in sorted(environ):
        if name.startswith(PREFIX):
            place, kinds = _place(name, given)
            value = _value(environ[name])
            if isinstance(value, str) and value and any(_is_path(kind) for kind in kinds):
                value = str(Path.cwd() / value)
            found.append(Variable(name, place, value))
    return tuple(found)


def overlay(given: Mapping[str, Any], found: Iterable[Variable]) -> dict[str, Any]:
    """Return a copy of the file's document in which variables of the environment override settings."""
    document = deepcopy(dict(given))
    for one in found:
        table = document
        for part in one.place[:-1]:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"{one.name}: the file has no table {part!r} but {inner!r}")
            table = inner
        table[one.place[-1]] = one.value
    return document


def _place(name: str, given: Any) -> tuple[tuple[str, ...], list[inspect.Type]]:
    """Return the keys that a variable names, and the types that its value may have."""
    kinds: list[inspect.Type] = [inspect.type_info(ServerSettings)]
    place: list[str] = []
    for part in name.removeprefix(PREFIX).split("__"):
        key = part.lower()
        if isinstance(given, dict):
            key = next((one for one in given if one.lower() == key), key)
        following, known = _within(kinds, key)
        if not key or not following:
            raise SettingsError(f"{name}: {_unknown(place, key, known)}")
        place.append(key)
        kinds = following
        given = given.get(key) if isinstance(given, dict) else None
    return tuple(place), kinds


def _within(kinds: Iterable[inspect.Type], key: str) -> tuple[list[inspect.Type], list[str]]:
    """Return the types of the value under a key, and all known keys."""
    following: list[inspect.Type] = []
    known: list[str] = []
    for kind in kinds:
        if isinstance(kind, inspect.StructType):
            known += [field.encode_name for field in kind.fields]
            following += [field.type for field in kind.fields if field.encode_name == key]
        elif isinstance(kind, inspect.DictType):
            following.append(kind.value_type)
        elif isinstance(kind, inspect.AnyType):
            following.append(kind)
    return [one for kind in following for one in _each(kind)], known


def _each(kind: inspect.Type) -> Iterable[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _unknown(place: list[str], key: str, known: list[str]) -> str:
    named = ".".join(place) or "the settings"
    if not known:
        return f"{named} is set as a whole, as a value of TOML"
    likely = difflib.get_close_matches(key, known, n=1)
    if likely:
        return f"{named} has no key {key!r}; is {PREFIX}{'__'.join([*place, likely[0]]).upper()} meant?"
    return f"{named} has no key {key!r}; it may have: {', '.join(known)}"


def _is_path(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.CustomType) and kind.cls is Path


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text
