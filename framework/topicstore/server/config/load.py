"""Reads the settings of a server from a TOML file and the environment.

An unknown key, a value of a wrong type, or a value out of range is an error that names the key, its line, and the
allowed values. Paths in the file are relative to its directory.

Variables of the environment override the file: ``TOPICSTORE__DURABLE_SESSIONS__BATCH_SIZE=500``. Two underscores
separate the keys of nested tables, and names are in capitals. A value is parsed as TOML, such as ``500``, ``true`` or
``["a", "b"]``; a value that isn't TOML is a string, such as ``100ms`` or ``a/path``. Paths are relative to the current
directory.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import msgspec
from msgspec import inspect

from topicstore.files.text import read_text

from .model import ServerSettings, SettingsError
from .units import Address, Addresses, Duration, Size

__all__ = [
    "PREFIX",
    "Configuration",
    "Variable",
    "expected",
    "line_of",
    "named_place",
    "overlay",
    "read_configuration",
    "read_settings",
    "unknown_keys",
    "variables",
]

PREFIX = "TOPICSTORE__"


@attrs.frozen
class Variable:
    """An environment variable, or an option of a command, that sets a setting."""

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
        following, known = _types_within(kinds, key)
        if not key or not following:
            raise SettingsError(f"{name}: {_unknown_key(place, key, known)}")
        place.append(key)
        kinds = following
        given = given.get(key) if isinstance(given, dict) else None
    return tuple(place), kinds


def _types_within(kinds: Iterable[inspect.Type], key: str) -> tuple[list[inspect.Type], list[str]]:
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


def _unknown_key(place: list[str], key: str, known: list[str]) -> str:
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


_NAMELESS = "[...]"
"""The placeholder in msgspec's messages for a key of a dict."""


def unknown_keys(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each unknown key, with a sentence about it."""
    return _unknown_keys(document, inspect.type_info(ServerSettings), "")


def _unknown_keys(value: Any, kind: inspect.Type, place: str) -> Iterator[tuple[str, str]]:
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(one, inspect.StructType) and isinstance(value, dict):
            known = {field.encode_name: field.type for field in one.fields}
            for key, inner in value.items():
                if key not in known:
                    yield _join(place, key), f"{place or 'the file'} has no key {key!r}{_nearest(key, known)}"
                else:
                    yield from _unknown_keys(inner, known[key], _join(place, key))
        elif isinstance(one, inspect.DictType) and isinstance(value, dict):
            for key, inner in value.items():
                yield from _unknown_keys(inner, one.value_type, _join(place, key))
        elif isinstance(one, inspect.VarTupleType) and isinstance(value, list):
            for number, inner in enumerate(value):
                yield from _unknown_keys(inner, one.item_type, f"{place}[{number}]")


def _join(place: str, key: str) -> str:
    return f"{place}.{key}".lstrip(".")


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    likely = difflib.get_close_matches(key, known, n=1)
    return f"; is {likely[0]!r} meant?" if likely else f"; it may have: {', '.join(known)}"


def named_place(
    document: Mapping[str, Any], at: str, reason: str, read: Callable[[type[Any], Any], Any]
) -> tuple[str, str]:
    """Return the dotted key of a msgspec error, with the dict keys that msgspec omits, and the reason."""
    place = at.strip("`").removeprefix("$").removeprefix(".")
    reason = f"{reason[:1].lower()}{reason[1:]}"
    if not place:  # an error of `ServerSettings` itself begins with the key
        found, separator, rest = reason.partition(": ")
        return (found, rest) if separator and " " not in found else ("", reason)
    before, nameless, _ = place.partition(_NAMELESS)
    if nameless and "." not in before:
        field = next(one for one in inspect.type_info(ServerSettings).fields if one.encode_name == before)  # type: ignore[attr-defined]
        for name, inner in document[before].items():
            try:
                msgspec.convert(inner, field.type.value_type.cls, dec_hook=read)
            except msgspec.ValidationError as bad:
                reason, _, rest = str(bad).partition(" - at ")
                within = rest.strip("`").removeprefix("$")
                return f"{before}.{name}{within}", f"{reason[:1].lower()}{reason[1:]}"
    return place, reason


def expected(reason: str, place: str) -> str:
    """Return the text to append to msgspec's error message: the allowed values, or the notation in TOML."""
    if reason.startswith("invalid enum value"):
        kinds: list[inspect.Type] = [inspect.type_info(ServerSettings)]
        for part in re.findall(r"[^.\[\]]+", place):
            kinds = [inner for kind in kinds for inner in _within(kind, part)]
        values = [repr(value) for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
        return f"; it may be {', '.join(values)}"
    if reason.startswith("expected `array`, got `object`"):
        return f"; a table in a list is written [[{place}]]"
    if reason.startswith("expected `object`, got `array`"):
        return f"; a table with a name is written [{place}.NAME]"
    return ""


def _within(kind: inspect.Type, part: str) -> Iterator[inspect.Type]:
    """Yield the types of the value under a key, or at a list index, of a value of a type."""
    found: list[inspect.Type] = []
    if isinstance(kind, inspect.StructType):
        found = [field.type for field in kind.fields if field.encode_name == part]
    elif isinstance(kind, inspect.DictType):
        found = [kind.value_type]
    elif isinstance(kind, inspect.VarTupleType):
        found = [kind.item_type]
    for one in found:
        yield from one.types if isinstance(one, inspect.UnionType) else (one,)


def line_of(text: str, place: str) -> int | None:
    """Return the number of the line that sets a key in a TOML text, or else of its table's header; else None."""
    wanted = re.findall(r"[^.\[\]]+", place)
    best, found = 0, None
    table: list[str] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            table = _header(line, counts) or table
            here = table
        else:
            here = table + _keys(line)
        if len(here) > best and here == wanted[: len(here)]:
            best, found = len(here), number
    return found


def _header(line: str, counts: dict[str, int]) -> list[str] | None:
    """Return the keys of a table's header, with its index in a list; None if the line is no header."""
    keys = _keys(line)
    if not keys or not line.lstrip().startswith("[["):
        return _numbered(keys, counts) if keys else None
    name = ".".join(keys)
    counts[name] = counts.get(name, -1) + 1
    return [*keys, str(counts[name])]


def _numbered(keys: list[str], counts: dict[str, int]) -> list[str]:
    """Return the keys of a table, with the current indexes of the lists in them."""
    found: list[str] = []
    for length, key in enumerate(keys, 1):
        found.append(key)
        name = ".".join(keys[:length])
        if name in counts:
            found.append(str(counts[name]))
    return found


def _keys(line: str) -> list[str]:
    """Return the dotted key at the beginning of a line of TOML, as a list; empty if there is none."""
    text = line.strip()
    if not text.startswith("["):
        key, equals, _ = text.partition("=")
        text = f"{key} = 0" if equals else ""
    try:
        found: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return []
    keys: list[str] = []
    while isinstance(found, (dict, list)) and found:
        if isinstance(found, list):
            found = found[0]
        else:
            [(key, found)] = found.items()
            keys.append(key)
    return keys


_WITHOUT_A_FILE: dict[str, Any] = {"http": {}}
"""The document of a server without a settings file: the defaults, and the HTTP interface on this machine."""


@attrs.frozen
class Configuration:
    """Settings, with the origin of each of them."""

    settings: ServerSettings
    path: Path | None
    """The settings file; None if there is none."""
    given: Mapping[str, Any]
    """The file's document."""
    variables: tuple[Variable, ...]
    """The settings of the environment and of the command line."""

    def origin(self, place: tuple[str, ...]) -> str:
        """Return the origin of a setting: ``default``, ``file``, or the name of a variable."""
        for one in self.variables:
            if place[: len(one.place)] == one.place:
                return one.name
        return "file" if self.path is not None and _has(self.given, place) else "default"


def _has(given: Any, place: Sequence[str]) -> bool:
    """Return whether a document has a value under a sequence of keys."""
    for part in place:
        if not isinstance(given, dict) or part not in given:
            return False
        given = given[part]
    return True


def read_settings(
    path: Path | None,
    environ: Mapping[str, str] = os.environ,
    *,
    empty_ok: bool = True,
    options: Iterable[Variable] = (),
) -> ServerSettings:
    """Return the settings of a file, or of no file, and the environment. Raises `SettingsError`.

    empty_ok: whether an empty file means all defaults. A running server refuses an empty file, which an interrupted
              editor or a full disk may have left.
    options:  settings of the command line, which override those of the environment.
    """
    return read_configuration(path, environ, empty_ok=empty_ok, options=options).settings


def read_configuration(
    path: Path | None,
    environ: Mapping[str, str] = os.environ,
    *,
    empty_ok: bool = True,
    options: Iterable[Variable] = (),
) -> Configuration:
    """Return the settings as `read_settings` does, with the origin of each. Raises `SettingsError`."""
    text = "" if path is None else _text(path)
    if path is not None and not empty_ok and not text.strip():
        raise SettingsError(f"{path} is empty, as if it could not be written; a comment in it means all defaults")
    try:
        given = deepcopy(_WITHOUT_A_FILE) if path is None else tomllib.loads(text)
    except tomllib.TOMLDecodeError as bad:
        raise SettingsError(f"{path}: {bad}") from bad
    for place, problem in unknown_keys(given):
        raise SettingsError(f"{_where(path, text, place)}: {problem}")
    found = (*variables(environ, given), *options)
    document = overlay(given, found)
    folder = Path.cwd() if path is None else path.parent
    try:
        settings = convert(document, folder)
    except msgspec.ValidationError as bad:
        reason, _, at = str(bad).partition(" - at ")
        place, reason = named_place(document, at, reason, lambda kind, value: _read(kind, value, folder))
        concerned = (one.name for one in found if _concerns(one, place, given))
        where = next(concerned, None) or _where(path, text, place)
        told = f"{place}: {reason}" if place else reason
        raise SettingsError(f"{where}: {told}{expected(reason, place)}".replace("`", "")) from bad
    return Configuration(settings, path, given, found)


def convert(document: Mapping[str, Any], folder: Path) -> ServerSettings:
    """Return the settings of a document; paths are relative to ``folder``. Raises `msgspec.ValidationError`."""
    return msgspec.convert(document, ServerSettings, dec_hook=lambda kind, value: _read(kind, value, folder))


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError as bad:
        raise SettingsError(f"there is no file {path}; 'topicstore config init' prints one with all settings") from bad
    except (OSError, UnicodeError) as bad:
        raise SettingsError(f"{path}: {bad}") from bad


def _concerns(variable: Variable, place: str, given: Mapping[str, Any]) -> bool:
    """Return whether a key is a variable's key, lies within it, or is a table that only the variable creates."""
    own = ".".join(variable.place)
    if own.startswith(f"{place}."):
        return bool(place) and not _has(given, place.split("."))
    return place == own or place.startswith((f"{own}.", f"{own}["))


def _where(path: Path | None, text: str, place: str) -> str:
    if path is None:
        return "settings"
    line = line_of(text, place)
    return str(path) if line is None else f"{path}, line {line}"


def _read(kind: type[Any], value: Any, folder: Path) -> Any:
    """Convert a value to a type that TOML doesn't have: a path, an address, a duration or a size."""
    if kind is Path:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{value!r} is not a path")
        return folder / value
    if kind is Address:
        return Address(value)
    if kind is Addresses:
        return Addresses.read(value)
    if issubclass(kind, (Duration, Size)):
        return kind.read(value)
    raise NotImplementedError(f"settings hold no {kind.__name__}")
