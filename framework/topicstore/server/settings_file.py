"""Reading the settings of a server from a TOML file and the environment, strictly.

An unknown key, a value of another type or out of its range is an error that names the place. Variables of the
environment count before the file (`topicstore.server.settings_environment`). Paths of the file are relative to its
folder.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import msgspec

from topicstore.files.text import read_text

from .addresses import Address, Addresses
from .quantities import Duration, Size
from .settings import ServerSettings, SettingsError
from .settings_environment import Variable, overlay, variables
from .settings_problems import expected, line_of, named_place, unknown_keys

__all__ = ["Configuration", "read_configuration", "read_settings"]

_WITHOUT_A_FILE: dict[str, Any] = {"http": {}}
"""What a server that was given no file has beside the defaults: its HTTP interface, on this machine."""


@attrs.frozen
class Configuration:
    """Settings, and where each of them comes from."""

    settings: ServerSettings
    path: Path | None
    """The file; None if there is none."""
    given: Mapping[str, Any]
    """What the file says."""
    variables: tuple[Variable, ...]
    """What the environment says."""

    def origin(self, place: tuple[str, ...]) -> str:
        """Return where the setting at a place comes from: ``default``, ``file``, or the name of a variable."""
        for one in self.variables:
            if place[: len(one.place)] == one.place:
                return one.name
        return "file" if self.path is not None and _has(self.given, place) else "default"


def _has(given: Any, place: Sequence[str]) -> bool:
    """Return whether a document says something at a place."""
    for part in place:
        if not isinstance(given, dict) or part not in given:
            return False
        given = given[part]
    return True


def read_settings(
    path: Path | None, environ: Mapping[str, str] = os.environ, *, empty_ok: bool = True
) -> ServerSettings:
    """Return the settings of a file and the environment; of None, those without a file. Raises `SettingsError`.

    ``empty_ok``: an empty file means all defaults. A server that reads its file again refuses one, as an editor leaves
    it that was interrupted, or a full disk.
    """
    return read_configuration(path, environ, empty_ok=empty_ok).settings


def read_configuration(
    path: Path | None, environ: Mapping[str, str] = os.environ, *, empty_ok: bool = True
) -> Configuration:
    """Return `read_settings` together with where each setting comes from. Raises `SettingsError`."""
    text = "" if path is None else _text(path)
    if path is not None and not empty_ok and not text.strip():
        raise SettingsError(f"{path} is empty, as if it could not be written; a comment in it means all defaults")
    try:
        given = deepcopy(_WITHOUT_A_FILE) if path is None else tomllib.loads(text)
    except tomllib.TOMLDecodeError as bad:
        raise SettingsError(f"{path}: {bad}") from bad
    for place, problem in unknown_keys(given):
        raise SettingsError(f"{_where(path, text, place)}: {problem}")
    found = variables(environ, given)
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
    """Return whether a place is that of a variable, or within it, or a table that only the variable made."""
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
    """Make what TOML doesn't know: paths, addresses, durations and sizes."""
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
