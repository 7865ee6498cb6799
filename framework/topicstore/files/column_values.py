"""Conversion of a row's values to the columns of a message; values are text, undecoded JSON, or values from Arrow."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable
from datetime import tzinfo
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from topicstore import Properties

from .time_units import to_microseconds

__all__ = [
    "JsonProperties",
    "binary_of",
    "flag_of",
    "payload_of",
    "properties_of",
    "qos_of",
    "text_of",
    "time_of",
]

T = TypeVar("T")


class JsonProperties(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The fields of `Properties` as a JSON object; `Properties` itself is encoded as an array."""

    payload_format_indicator: int | None = None
    message_expiry_interval: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: tuple[tuple[str, str], ...] = ()


_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}
_FRACTION = re.compile(r"-?[0-9]+(\.[0-9]+|(\.[0-9]+)?[eE][+-]?[0-9]{1,3})")
"""A JSON number that is no integer and that a float may not hold exactly."""
_decode = msgspec.json.decode


def _decoded(column: str, value: Any, kind: type[T]) -> T | None:
    """Return a value converted to a type, and decoded if it is JSON; None if it is absent. Raises `ValueError`."""
    if value is None:
        return None
    try:
        if isinstance(value, Raw):
            return _decode(value, type=kind)
        return msgspec.convert(value, kind)
    except msgspec.MsgspecError as bad:
        raise ValueError(f"{column}: {bad}") from None


def text_of(value: Any, *, only: bool = False) -> str | None:
    """Return a value as text; None if it is absent.

    A number or a flag becomes its JSON text, and bytes are decoded as UTF-8. With ``only``, numbers and flags are
    errors. Raises `ValueError`, also for a JSON object or array.
    """
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Raw):
        first = bytes(value)[:1]
        if first == b'"' or only:
            return _decoded("text", value, str)
        if first == b"n":
            return None
        if first not in (b"{", b"["):
            return bytes(value).decode()
    elif isinstance(value, bytes):
        return value.decode()
    elif isinstance(value, (bool, int, float)) and not only:
        return msgspec.json.encode(value).decode()
    raise ValueError(f"{_short(value)} is no text")


def payload_of(value: Any) -> bytes | None:
    """Return a value as a payload: text in UTF-8, bytes unchanged, others as compact JSON; None if it is absent."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes) or value is None:
        return value
    if not isinstance(value, Raw):
        return msgspec.json.encode(value)
    data = bytes(value)
    if data == b"null":
        return None
    if data.startswith(b'"'):
        return (_decoded("payload", value, str) or "").encode()
    data.decode()  # `msgspec.json.format` doesn't check that strings are valid UTF-8
    return msgspec.json.format(data, indent=-1)


def binary_of(value: Any) -> bytes | None:
    """Decode a value from base64; return bytes from Arrow unchanged, and None for an absent value."""
    if isinstance(value, Raw):
        return _decoded("payload_base64", value, bytes)
    if value is None or isinstance(value, bytes):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as bad:
        raise ValueError(f"payload_base64: {bad}") from None


def qos_of(value: Any) -> int:
    """Return a value as a QoS, 0 if it is absent. Its range is checked when the message is stored."""
    if not isinstance(value, str):
        return _decoded("qos", value, int) or 0
    if value and not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError(f"a QoS is 0, 1 or 2, not {value[:80]!r}")
    return int(value or 0)


def flag_of(value: Any) -> bool:
    """Return a value as a bool; False if it is absent."""
    if not isinstance(value, str):
        value = str(_decoded("retain", value, bool | int) or False)  # type: ignore[arg-type]
    flag = _FLAGS.get(value.lower())
    if flag is None:
        raise ValueError(f"retain is true or false, not {value[:80]!r}")
    return flag


def time_of(value: Any, unit: str | None, finer: Callable[[object], None], zone: tzinfo) -> int | None:
    """Return a value as microseconds since the epoch; None if it is absent.

    The other parameters are those of `to_microseconds`.
    """
    if isinstance(value, Raw):
        number = bytes(value).decode()
        value = Decimal(number) if _FRACTION.fullmatch(number) else _decode(value)
    return None if value is None else to_microseconds(value, unit, finer, zone)


def properties_of(value: Any) -> Properties | None:
    """Return a JSON object as properties; None if it is absent.

    Raises `ValueError`. In a text, a duplicate name is an error; for `Raw` JSON, the caller has checked the names.
    """
    text = value if isinstance(value, str) else ""
    if isinstance(value, str):
        value = Raw(value.encode()) if value else None
    if isinstance(value, Raw) and _WITH_DASHES.search(bytes(value)):
        value = _without_dashes(bytes(value))
    found = _decoded("properties", value, JsonProperties)
    names = Counter(name for name, _ in json.loads(text, object_pairs_hook=list)) if text.strip() else {}
    for name, count in names.items():
        if count > 1:
            raise ValueError(f"it has {name[:80]!r} twice")
    return None if found is None else Properties(*msgspec.structs.astuple(found))


_WITH_DASHES = re.compile(rb'"[a-z]+-[a-z-]+"\s*:')
_OF_A_CONNECTION = {"subscription-identifier", "topic-alias"}


def _without_dashes(text: bytes) -> dict[str, Any]:
    """Return the properties of a JSON object that mosquitto's clients wrote, under the names of `Properties`.

    In mosquitto's JSON, correlation data is text, and user properties are an object that may repeat names.
    """
    found: dict[str, Any] = {}
    for name, value in json.loads(text, object_pairs_hook=list):
        if name == "correlation-data":
            value = str(value).encode()
        elif name == "user-properties":
            value = [pair for one in value for pair in ([one] if isinstance(one, tuple) else one)]
        if name not in _OF_A_CONNECTION:
            found[name.replace("-", "_")] = value
    return found


def _short(value: Any) -> str:
    return (bytes(value).decode(errors="replace") if isinstance(value, Raw) else repr(value))[:80]
