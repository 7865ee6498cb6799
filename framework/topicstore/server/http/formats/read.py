"""Messages out of the body of a request: JSON, JSON lines, a stream of Arrow's IPC format, or Parquet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from litestar.exceptions import HTTPException

from topicstore import Message
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import InvalidMessageError
from topicstore.files.formats import decode_line, decode_lines, decode_list

from .media_types import ARROW, JSON, JSON_LINES, PARQUET

__all__ = ["READ", "UNPACKED", "UnsupportedMediaTypeException", "read"]

UNPACKED = 4
"""How many times as large as the largest body the messages of one may be once they are unpacked."""


class UnsupportedMediaTypeException(HTTPException):
    """The body is in a format that isn't read."""

    status_code = 415


def read(body: bytes, media_type: str, most: int) -> MessageBatch:
    """Return the messages of a body, checked; ``most`` is how many bytes they may have once they are unpacked.

    Raises `UnsupportedMediaTypeException`, and `InvalidMessageError`, which names the first wrong row.
    """
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in READ:
        raise UnsupportedMediaTypeException(f"a body of {kind or 'no type'} isn't read; there are {', '.join(READ)}")
    try:
        return READ[kind](body, most)
    except UnicodeDecodeError as bad:  # such as a column's name
        raise InvalidMessageError(f"a text of the body is not UTF-8: {bad}") from bad


class _Row(msgspec.Struct):
    """What each row has at least, so that many that have nothing aren't decoded."""

    topic: msgspec.Raw


_rows = msgspec.json.Decoder(list[_Row])
_PLACE = re.compile(r"\$\[([0-9]+)\]")
"""Where the message of an error of msgspec names the row."""


def _of_json(body: bytes, _: int) -> MessageBatch:
    listed = body.lstrip()[:1] == b"["
    if listed:
        try:
            return MessageBatch.from_messages(decode_list(body))
        except (ValueError, RecursionError):  # in another form, or wrong
            _check_rows(body)
    try:
        rows = msgspec.json.decode(body, type=list[msgspec.Raw]) if listed else [body]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise InvalidMessageError(f"the body is not JSON: {bad}") from bad
    return MessageBatch.from_messages(_decoded(map(bytes, rows)))


def _check_rows(body: bytes) -> None:
    try:
        _rows.decode(body)
    except msgspec.ValidationError as bad:
        place = _PLACE.search(str(bad))
        raise InvalidMessageError(str(bad), None if place is None else int(place[1])) from bad
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise InvalidMessageError(f"the body is not JSON: {bad}") from bad


def _of_json_lines(body: bytes, _: int) -> MessageBatch:
    try:
        return MessageBatch.from_messages(decode_lines(body))
    except (ValueError, RecursionError):  # say which one it is
        return MessageBatch.from_messages(_decoded(line for line in body.split(b"\n") if line.strip()))


def _decoded(rows: Iterable[bytes]) -> list[Message]:
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(decode_line(row))
        except (ValueError, RecursionError) as bad:
            raise InvalidMessageError(str(bad), number) from bad
    return found


def _of_arrow(body: bytes, most: int) -> MessageBatch:
    from .arrow_bodies import arrow_batches

    return _of_batches(arrow_batches(body, most))


def _of_parquet(body: bytes, most: int) -> MessageBatch:
    from .parquet_bodies import parquet_batches

    return _of_batches(parquet_batches(body, most))


def _of_batches(batches: Iterable[Any]) -> MessageBatch:
    """Return the messages of record batches. The error of a wrong one names its row in the whole body."""
    found, rows = [], 0
    for batch in batches:
        try:
            found.append(MessageBatch.from_arrow(batch))
        except InvalidMessageError as bad:
            if bad.index is None:
                raise
            raise type(bad)(bad.reason, rows + bad.index) from bad
        rows += batch.num_rows
    return MessageBatch.concat(found)


READ: dict[str, Callable[[bytes, int], MessageBatch]] = {
    JSON: _of_json,
    JSON_LINES: _of_json_lines,
    ARROW: _of_arrow,
    PARQUET: _of_parquet,
}
"""How bodies of each media type are read."""
