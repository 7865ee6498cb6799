"""Error messages for a settings file: the key, its line, and the allowed values."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from .settings import ServerSettings

__all__ = ["expected", "line_of", "named_place", "unknown_keys"]

_NAMELESS = "[...]"
"""The placeholder in msgspec's messages for a key of a dict."""


def unknown_keys(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each unknown key, with a sentence about it."""
    return _unknown(document, inspect.type_info(ServerSettings), "")


def _unknown(value: Any, kind: inspect.Type, place: str) -> Iterator[tuple[str, str]]:
    for one in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(one, inspect.StructType) and isinstance(value, dict):
            known = {field.encode_name: field.type for field in one.fields}
            for key, inner in value.items():
                if key not in known:
                    yield _join(place, key), f"{place or 'the file'} has no key {key!r}{_nearest(key, known)}"
                else:
                    yield from _unknown(inner, known[key], _join(place, key))
        elif isinstance(one, inspect.DictType) and isinstance(value, dict):
            for key, inner in value.items():
                yield from _unknown(inner, one.value_type, _join(place, key))
        elif isinstance(one, inspect.VarTupleType) and isinstance(value, list):
            for number, inner in enumerate(value):
                yield from _unknown(inner, one.item_type, f"{place}[{number}]")


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
    """Return an addition to msgspec's message: the allowed values, or the notation in TOML."""
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
    """Return the number of the line that sets a key in a TOML text, or else of its table's header; None: neither."""
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
