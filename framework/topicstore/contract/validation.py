"""Checks of messages before they are stored, one column at a time.

Each function takes the values of one field for all rows of a batch and returns the column, as a `Constant` if all rows
are equal. Topics and client ids of many rows become `Coded`: the lookup that checks them also finds their indices. A
function raises `InvalidMessageError` for the first invalid row, with the row's index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from operator import itemgetter
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from .columns import Coded, Column, Constant, Texts, fold, to_iterable
from .errors import InvalidMessageError, InvalidTopicError, MessageTooLargeError
from .model import MAX_PAYLOAD, Message, Properties
from .positions import MAX_TIME
from .times import MOST_SUSPECTED, hardly_microseconds, suspected_unit
from .topics import check_topic, check_utf8

__all__ = [
    "CHECKS",
    "check_client_ids",
    "check_flags",
    "check_payloads",
    "check_properties",
    "check_qos",
    "check_recent",
    "check_timestamps",
    "check_topics",
    "is_plain",
    "sized_payloads",
]

_KNOWN_BYTES = 64 << 20
"""The approximate bytes of memory that the checked texts of one kind may take."""
_TEXT_BYTES = 130
"""The approximate bytes of memory that a checked text takes besides itself."""
_WORTH_CODES = 32
"""The least number of rows for which a column of codes is cheaper than a list of texts."""
_LEAST_USED, _PASSED_OVER = 8, 8
"""If fewer than one in `_LEAST_USED` checked texts was used again, the texts of `_PASSED_OVER` times as many rows are
not cached."""
_SHORT = 0xFFFF // 4
"""The maximum number of characters that fit into 65,535 bytes of UTF-8 whatever the characters are."""
_TWO_BYTES, _FOUR_BYTES = 0xFFFF, 0xFFFF_FFFF
_ENCODER = msgspec.msgpack.Encoder()


class _Checked:
    """Texts that have passed their check, each with a number. Threads read it without a lock; one at a time adds."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = Texts(np.full(1_024, None, dtype=object))
        self.codes: dict[str, bytes] = {}
        """The number of each text, 4 bytes: joined, those of a batch are an array."""
        self.used = np.zeros(1_024, dtype=np.bool_)
        """Whether a text was found since it was added, by number."""
        self.bytes = 0
        self.add(texts, _size_of(texts))

    def add(self, texts: list[str], size: int) -> None:
        """Add texts that were not added before; ``size`` is the sum of their `_size_of`."""
        first, stop = len(self.codes), len(self.codes) + len(texts)
        packed = np.arange(first, stop, dtype=np.uint32).tobytes()
        self.texts.extend(first, texts)  # set before the codes, which make the texts visible to other threads
        if stop > len(self.used):
            self.used = np.concatenate([self.used, np.zeros(stop, dtype=np.bool_)])
        self.codes.update(zip(texts, (packed[at : at + 4] for at in range(0, len(packed), 4)), strict=True))
        self.bytes += size

    def coded(self, values: list[str]) -> Column:
        """Return two or more texts as a column. Raises `KeyError` if a text was not added."""
        codes = np.frombuffer(b"".join(itemgetter(*values)(self.codes)), np.uint32)
        if codes[0] == codes[-1] and (codes == codes[0]).all():
            return Constant(values[0], len(values))
        self.used[codes] = True
        return Coded(codes, self.texts)


class _Known:
    """A cache of texts that have passed their check, by which a column of texts becomes a column of codes.

    The cache is bounded in bytes. When it is full, it keeps the texts that were found again, at most half of them. If
    those are few, most texts are unique, and the cache stays empty for a time. Thread-safe.
    """

    def __init__(self, check: Callable[[Any], None], forbidden: str) -> None:
        self._check = check
        self._forbidden = forbidden
        """The characters that a text must not have. A text without them that is neither empty nor long is valid."""
        self._checked = _Checked([])
        self._passing = 0
        """The number of texts that are still to be passed over."""
        self._lock = Lock()
        """Guards adding, and `_passing`."""

    @property
    def memory(self) -> int:
        """The approximate bytes of memory that the texts take."""
        return self._checked.bytes

    def has(self, text: Any) -> bool:
        """Return True only if a text has passed its check before."""
        return type(text) is str and text in self._checked.codes

    def check(self, values: list[Any]) -> Column:
        """Return the texts as a column: `Constant`, `Coded` or the list itself."""
        rows = len(values)
        column = fold(values) if values[0] == values[-1] else values
        texts = [column.value] if isinstance(column, Constant) else values
        # The type must be exactly str: a value of another type that equals a known text would fail later.
        if list(map(type, texts)).count(str) == len(texts):
            checked = self._checked
            if len(texts) < _WORTH_CODES:
                if None not in map(checked.codes.get, texts):
                    return column
            else:
                try:
                    return checked.coded(values)
                except KeyError:
                    pass
            new = [text for text in dict.fromkeys(texts) if text not in checked.codes]
            if self._all_good(new):
                return self._remembered(new, column, rows)
        for index, text in enumerate(texts):
            try:
                self._check(text)
            except ValueError as bad:
                raise InvalidMessageError(str(bad), index) from bad
        return self._remembered([text for text in dict.fromkeys(texts) if type(text) is str], column, rows)

    def _all_good(self, texts: list[str]) -> bool:
        """Return whether all texts are certainly valid. One check of all costs a fraction of checking each."""
        joined = "".join(texts)
        if "" in texts or max(map(len, texts), default=0) > _SHORT or any(map(joined.__contains__, self._forbidden)):
            return False
        try:
            joined.encode()
        except UnicodeEncodeError:  # a text has an unpaired surrogate
            return False
        return True

    def _remembered(self, new: list[str], column: Column, rows: int) -> Column:
        """Return a column whose new texts have passed their check, after adding these to the cache."""
        # Never waits: the call that a signal handler interrupted may hold the lock, or a thread that a fork didn't
        # copy.
        if not self._lock.acquire(blocking=False):
            return column
        try:
            if self._passing:
                self._passing = max(self._passing - rows, 0)
                return column
            checked = self._checked
            if not checked.codes.keys().isdisjoint(new):  # another thread has added some of the texts
                new = [text for text in new if text not in checked.codes]
            size = _size_of(new)
            if checked.bytes + size > _KNOWN_BYTES:
                self._checked = checked = self._thinned(checked)
                if self._passing or checked.bytes + size > _KNOWN_BYTES:
                    return column
            first = len(checked.codes)
            checked.add(new, size)
        finally:
            self._lock.release()
        if isinstance(column, list) and rows >= _WORTH_CODES:
            try:
                column = checked.coded(column)
                checked.used[first : first + len(new)] = False  # `coded` found texts that were only just added
            except KeyError:  # the cache no longer has one of the texts
                return column
        return column

    def _thinned(self, checked: _Checked) -> _Checked:
        """Return a cache with those texts of a full one that were found again, at most half of them."""
        count = len(checked.codes)
        kept = checked.texts.values[np.flatnonzero(checked.used[:count])].tolist()
        if len(kept) * _LEAST_USED < count:
            self._passing = _PASSED_OVER * count
        room = np.cumsum([_TEXT_BYTES + size for size in map(sys.getsizeof, reversed(kept))])
        fits = int(np.searchsorted(room, _KNOWN_BYTES // 2, side="right"))
        return _Checked(kept[len(kept) - fits :])


def _size_of(texts: list[str]) -> int:
    return _TEXT_BYTES * len(texts) + sum(map(sys.getsizeof, texts))


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
    """Return True only if a message is valid, with names that were checked before and no timestamp or properties.

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
    """Check that each payload is a bytes object of at most `MAX_PAYLOAD` bytes."""
    return sized_payloads(values)[0]


def sized_payloads(values: list[Any]) -> tuple[Column, int]:
    """Check payloads as `check_payloads` does; return them and their total size in bytes."""
    if list(map(type, values)).count(bytes) != len(values):
        for index, value in enumerate(values):
            if type(value) is not bytes:
                raise InvalidMessageError(f"a payload is bytes, not {type(value).__name__}", index)
    size = sum(map(len, values))
    if size > MAX_PAYLOAD:  # otherwise no single payload can be too large
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
                hint = "; write round(when.timestamp() * 1e6) for a datetime" if isinstance(value, datetime) else ""
                raise InvalidMessageError(
                    f"a timestamp is None or microseconds since the epoch up to {MAX_TIME}, not {_shown(value)}{hint}",
                    index,
                )
    return column


def check_recent(timestamps: Column) -> None:
    """Raise `InvalidMessageError` for the first message whose timestamp is probably not in microseconds."""
    if isinstance(timestamps, Constant):
        if timestamps.value is None:
            return
        timestamps = [timestamps.value]
    if isinstance(timestamps, np.ndarray):
        if timestamps.min() >= MOST_SUSPECTED:
            return
    elif None not in (held := list(to_iterable(timestamps))) and min(held) >= MOST_SUSPECTED:
        return
    for index, timestamp in enumerate(to_iterable(timestamps)):
        if timestamp is not None and (unit := suspected_unit(int(timestamp))) is not None:
            raise InvalidMessageError(f"its time {timestamp} {hardly_microseconds(int(timestamp), unit)}", index)


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
