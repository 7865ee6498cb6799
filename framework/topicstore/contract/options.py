"""Options of plugins: a frozen attrs class for each plugin, created from values or texts by name."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

import attrs
import msgspec

from .errors import InvalidOptionError

__all__ = ["NoOptions", "make_options", "options_dict"]


@attrs.frozen
class NoOptions:
    """The options of a plugin that has none."""


def make_options(plugin: str, options_class: type, values: Mapping[str, Any]) -> Any:
    """Return an instance of ``options_class`` with ``values``; a text is parsed as the field's type.

    Raises `InvalidOptionError`, which names the option, if an option is unknown, of the wrong type or out of range.
    """
    known = [field.name for field in attrs.fields(options_class)]
    for name in values:
        if name not in known:
            raise InvalidOptionError(f"{plugin!r} has no option {name!r}; it has: {', '.join(known) or 'none'}")
    try:
        made: Any = msgspec.convert({name: _read(value) for name, value in values.items()}, options_class, strict=False)
        msgspec.msgpack.encode(options_dict(made))  # raises for a value that could not be stored
        return made
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as bad:
        raise InvalidOptionError(f"options of {plugin!r}: {bad}{_choices(options_class, str(bad))}") from bad


def _choices(options_class: type, reason: str) -> str:
    """Return a text with the allowed values if the error is about an option that has a fixed set of values."""
    named = re.search(r"`\$\.(\w+)`", reason)
    hints = typing.get_type_hints(options_class)
    choices = typing.get_args(hints.get(named[1])) if named else ()
    return f" (one of {', '.join(choices)})" if choices and all(isinstance(one, str) for one in choices) else ""


def _read(value: Any) -> Any:
    """Parse a list that is given as text, such as ``[100,20]`` on a command line; return other values unchanged."""
    if isinstance(value, str) and value[:1] == "[":
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


def options_dict(options: Any) -> dict[str, Any]:
    """Return all options as plain values, for storing and for showing."""
    return msgspec.to_builtins(options)  # type: ignore[no-any-return]
