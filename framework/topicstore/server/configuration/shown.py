"""The settings in force, as plain values and as TOML, with their origins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomlkit

from topicstore.server.addresses import Address, Addresses
from topicstore.server.quantities import Duration, Size
from topicstore.server.settings import ServerSettings
from topicstore.server.settings_file import Configuration

__all__ = ["leaves", "plain", "shown", "shown_as_toml", "written"]

_SECRET = re.compile(r"passw|passphrase|secret|credential|api_?key|(^|_)token$", re.IGNORECASE)
_HIDDEN = "***"


def shown(settings: ServerSettings) -> dict[str, Any]:
    """Return settings as nested dicts of TOML values; secrets are ``***``."""
    found: dict[str, Any] = plain(settings)
    return found


def plain(settings: Any) -> Any:
    """Return a setting, or a table of settings, as TOML values; secrets are ``***``."""
    if isinstance(settings, msgspec.Struct):
        settings = msgspec.structs.asdict(settings)
    if isinstance(settings, Mapping):
        return {key: _HIDDEN if _is_secret(key, one) else plain(one) for key, one in settings.items()}
    if isinstance(settings, Addresses) and not isinstance(settings, Address):
        settings = settings.all
    if isinstance(settings, (tuple, list)):
        return [plain(one) for one in settings]
    return str(settings) if isinstance(settings, (Duration, Size, Path, str)) else settings


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and _SECRET.search(key) is not None


def leaves(table: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the value of each setting of a document; an empty table counts as a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*place, key))
        else:
            yield (*place, key), value


def shown_as_toml(configuration: Configuration) -> str:
    """Return the settings in force as TOML, with their origins as comments; unset ones are only comments."""
    document = tomlkit.document()
    _fill(document, shown(configuration.settings), (), configuration)
    return tomlkit.dumps(document)


def _fill(table: Any, found: Mapping[str, Any], place: tuple[str, ...], configuration: Configuration) -> None:
    tables = {key: value for key, value in found.items() if isinstance(value, Mapping) and value}
    for key, value in found.items():
        if key in tables:
            continue
        if value is None:
            table.add(tomlkit.comment(f"{key} is not set"))
        else:
            item = tomlkit.item(_inline(value))
            item.comment(configuration.origin((*place, key)))
            table.add(key, item)
    for key, value in tables.items():
        inner = tomlkit.table()
        _fill(inner, value, (*place, key), configuration)
        table.add(key, inner)


def _inline(value: Any) -> Any:
    """Return a TOML value in which tables are inline, and None values are omitted."""
    if isinstance(value, list):
        array = tomlkit.array()
        for one in value:
            array.append(_inline(one))
        return array
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for key, one in value.items():
            if one is not None:
                table.add(key, _inline(one))
        return table
    return value


def written(value: Any) -> str:
    """Return a value as TOML in one line."""
    text: str = tomlkit.item(_inline(value)).as_string()
    return text
