"""Checks of messages before they are stored, one column at a time.

Each function takes the values of one field for all rows of a batch and returns the column, as a `Constant` if all rows
are equal. It raises `InvalidMessageError` for the first invalid row, with the row's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from .columns import Column, Constant, fold
from .errors import InvalidMessageError, InvalidTopicError, MessageTooLargeError
from .model import MAX_PAYLOAD, Message, Properties
from .positions import MAX_TIME
from .topics import check_topic, check_utf8

__all__ = [
    "CHECKS",
    "check_client_ids",
    "check_flags",
    "check_payloads",
    "check_properties",
    "check_qos",
    "check_timestamps",
    "check_topics",
    "is_plain",
    "sized_payloads",
]

_KNOWN_TEXTS, _KNOWN_CHARACTERS = 65_536, 1 << 24
_SHORT = 0xFFFF // 4
"""The maximum number of characters that fit into 65,535 bytes of UTF-8 whatever the characters are."""
_TWO_BYTES, _FOUR_BYTES = 0xFFFF, 0xFFFF_FFFF
_ENCODER = msgspec.msgpack.Encoder()


class _Known:
    """A cache of texts that have passed their check. It is bounded in number and size, and cleared at the limit."""

    def __init__(self, check: Callable[[Any], None], forbidden: str) -> None:
        self._check = check
        self._forbidden = forbidden
        """The characters that a text must not have. A text without them that is neither empty nor long is valid."""
        self._texts: set[str] = set()
        self._characters = 0

    def has(self, text: Any) -> bool:
        """Return True only if a text has passed its check before."""
        return type(text) is str and text in self._texts

    def check(self, values: list[Any]) -> Column:
        column = fold(values)
        texts = [column.value] if isinstance(column, Constant) else values
        # The type must be exactly str: a value of another type that equals a known text would fail later.
        if list(map(type, texts)).count(str) == len(texts):
            if self._texts.issuperset(texts):
                return column
            new = set(texts) - self._texts  # may be empty, if another thread has checked them in the meantime
            if self._all_good(new):
                self._remember(new)
                return column
        for index, text in enumerate(texts):
            try:
                self._check(text)
            except ValueError as bad:
                raise InvalidMessageError(str(bad), index) from bad
        self._remember(set(texts) - self._texts)
        return column

    def _all_good(self, texts: set[str]) -> bool:
        """Return whether all texts are certainly valid. One check of all costs a fraction of checking each."""
        joined = "".join(texts)
        if "" in texts or max(map(len, texts), default=0) > _SHORT or any(map(joined.__contains__, self._forbidden)):
            return False
        try:
            joined.encode()
        except UnicodeEncodeError:  # an unpaired surrogate
            return False
        return True

    def _remember(self, new: set[str]) -> None:
        characters = sum(map(len, new))
        if len(self._texts) + len(new) > _KNOWN_TEXTS or self._characters + characters > _KNOWN_CHARACTERS:
            self._texts, self._characters = set(), 0
        if len(new) <= _KNOWN_TEXTS and characters <= _KNOWN_CHARACTERS:
            self._texts.update(new)
            self._characters += characters


def _check_topic(value: Any) -> None:
    check_topic(value)


def _check_client_id(value: Any) -> None:
    _check_utf8(value, "client id")


def _check_utf8(value: Any, what: str) -> None:
    check_utf8(value, what, InvalidMessageError)


_TOPICS = _Known(_check_topic, "\0+#")
_CLIENT_IDS = _Known(_check_client_id, "\0")
check_topics = _TOPICS.check
check_client_ids = _CLIENT_IDS.check


def is_plain(message: Message) -> bool:
    """Return True only if a message is valid, has known names, and neither a timestamp nor properties.

    A few checks of one message's values are much cheaper than the checks of its columns, which decide all other cases.
    """
    qos, payload = message.qos, message.payload
    return (
        message.timestamp is None
        and message.properties is None
        and type(qos) is int
        and 0 <= qos <= 2
        and type(message.retain) is bool
        and type(payload) is bytes
        and len(payload) <= MAX_PAYLOAD
        and _TOPICS.has(message.topic)
        and _CLIENT_IDS.has(message.client_id)
    )


def check_payloads(values: list[Any]) -> Column:
    """Check that payloads are bytes, at most `MAX_PAYLOAD` of them."""
    return sized_payloads(values)[0]


def sized_payloads(values: list[Any]) -> tuple[Column, int]:
    """Check payloads as `check_payloads` does; return them and their total size in bytes."""
    if list(map(type, values)).count(bytes) != len(values):
        for index, value in enumerate(values):
            if type(value) is not bytes:
                raise InvalidMessageError(f"a payload is bytes, not {type(value).__name__}", index)
    size = sum(map(len, values))
    if size > MAX_PAYLOAD:  # otherwise no single payload can exceed it
        for index, value in enumerate(values):
            if len(value) > MAX_PAYLOAD:
                raise MessageTooLargeError(f"the payload has {len(value):,} bytes, more than {MAX_PAYLOAD:,}", index)
    return values, size


def _shown(value: object) -> str:
    """Return a short representation of a value for an error message, even of a very large value."""
    try:
        text = repr(value)
    except ValueError:  # Python converts no integer of more than 4,300 digits to text
        return f"so large a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _check_members(values: list[Any], allowed: tuple[Any, ...], what: str) -> Column:
    """Check that all values are allowed and have the right type: neither 1.0 nor "1" nor True is a QoS.

    Msgpack encodes each allowed value as one distinct byte. Comparing the encoded bytes of the whole list therefore
    checks values and types, in a third of the time that Python's sets need.
    """
    good = {_ENCODER.encode(value): value for value in allowed}
    rows = len(values)
    head = 1 if rows < 1 << 4 else 3 if rows < 1 << 16 else 5
    try:
        encoded = _ENCODER.encode(values)
    except (TypeError, ValueError, OverflowError, RecursionError):
        encoded = b""
    if len(encoded) == head + rows and not encoded[head:].translate(None, b"".join(good)):
        first = encoded[head : head + 1]
        return Constant(good[first], rows) if encoded.count(first, head) == rows else values
    wanted = {type(value) for value in allowed}
    for index, value in enumerate(values):
        if type(value) not in wanted or value not in allowed:
            raise InvalidMessageError(f"{what}, not {_shown(value)}", index)
    return fold(values)


def check_qos(values: list[Any]) -> Column:
    """Check that every QoS is 0, 1 or 2."""
    return _check_members(values, (0, 1, 2), "a QoS is 0, 1 or 2")


def check_flags(values: list[Any]) -> Column:
    """Check that every RETAIN flag is True or False."""
    return _check_members(values, (False, True), "retain is True or False")


def check_timestamps(values: list[Any]) -> Column:
    """Check that timestamps are None or microseconds since the epoch, from 0 to `MAX_TIME`."""
    column = fold(values)
    if isinstance(column, Constant) and column.value is None:
        return column
    if set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_TIME:
        for index, value in enumerate(values):
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_TIME):
                raise InvalidMessageError(
                    f"a timestamp is None or microseconds since the epoch up to {MAX_TIME}, not {_shown(value)}",
                    index,
                )
    return column


def check_properties(values: list[Any]) -> Column:
    """Check that properties are None, or a `Properties` that an MQTT 5 PUBLISH can carry (section 3.3.2.3)."""
    if values[0] is None and values.count(None) == len(values):
        return Constant(None, len(values))
    for index, value in enumerate(values):
        if value is not None:
            try:
                _check_one(value)
            except ValueError as bad:
                raise InvalidMessageError(str(bad), index) from bad
    return values


def _check_one(value: Any) -> None:
    if not isinstance(value, Properties):
        raise InvalidMessageError(f"properties are None or Properties, not {type(value).__name__}")
    _check_number(value.payload_format_indicator, 1, "payload_format_indicator")
    _check_number(value.message_expiry_interval, _FOUR_BYTES, "message_expiry_interval")
    if value.content_type is not None:
        _check_utf8(value.content_type, "content type")
    if value.response_topic is not None:
        try:
            check_topic(value.response_topic)
        except InvalidTopicError as bad:
            raise InvalidMessageError(f"response topic: {bad}") from bad
    data = value.correlation_data
    if data is not None and (type(data) is not bytes or len(data) > _TWO_BYTES):
        raise InvalidMessageError("correlation data are at most 65,535 bytes")
    _check_user_properties(value.user_properties)


def _check_number(value: Any, most: int, what: str) -> None:
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise InvalidMessageError(f"{what} is a whole number from 0 to {most}, not {_shown(value)}")


def _check_user_properties(pairs: Any) -> None:
    if type(pairs) is not tuple:
        raise InvalidMessageError(f"user properties are a tuple of pairs, not {type(pairs).__name__}")
    for pair in pairs:
        if type(pair) is not tuple or len(pair) != 2:
            raise InvalidMessageError(f"a user property is a pair (name, value), not {_shown(pair)}")
        for text in pair:
            _check_utf8(text, "user property")


def check_equal_lengths(lengths: Iterable[int]) -> None:
    """Check that all columns of a batch have the same number of rows."""
    if len(set(lengths)) > 1:
        raise InvalidMessageError("the columns of a batch have different lengths")


CHECKS: dict[str, Callable[[list[Any]], Column]] = {
    "topics": check_topics,
    "payloads": check_payloads,
    "client_ids": check_client_ids,
    "qos": check_qos,
    "retain": check_flags,
    "timestamps": check_timestamps,
    "properties": check_properties,
}
"""The check of each column of a non-empty `topicstore.MessageBatch`, by the name of the column."""
