"""Reads the settings of a server from a TOML file and the environment.

An unknown key, a value of a wrong type, or a value out of range is an error that names the key and the line. Variables
of the environment override the file (`topicstore.server.settings_environment`). Paths in the file are relative to its
directory.
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
    """The settings of the environment."""

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
    path: Path | None, environ: Mapping[str, str] = os.environ, *, empty_ok: bool = True
) -> ServerSettings:
    """Return the settings of a file, or of no file, and the environment. Raises `SettingsError`.

    ``empty_ok``: whether an empty file means all defaults. A running server refuses an empty file, which an interrupted
    editor or a full disk may have left.
    """
    return read_configuration(path, environ, empty_ok=empty_ok).settings


def read_configuration(
    path: Path | None, environ: Mapping[str, str] = os.environ, *, empty_ok: bool = True
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
