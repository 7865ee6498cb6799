"""Decoding of messages in request bodies: JSON, JSON lines, Arrow's IPC stream format, or Parquet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from litestar.exceptions import HTTPException
from msgspec import UNSET, UnsetType

from topicstore import Message, Properties
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import InvalidMessageError
from topicstore.files.column_values import JsonProperties
from topicstore.files.formats import decode_line, decode_lines, decode_list

from .response_bodies import ARROW, JSON, JSON_LINES, PARQUET

__all__ = ["READ", "UNPACKED", "GivenMessage", "UnsupportedMediaTypeException", "message_of", "read"]

UNPACKED = 4
"""The limit of a body's decompressed messages, as a multiple of the largest body."""


class UnsupportedMediaTypeException(HTTPException):
    """The body's media type is not supported."""

    status_code = 415


def read(body: bytes, media_type: str, most: int) -> MessageBatch:
    """Decode and check the messages of a body; ``most`` is the limit of their decompressed size in bytes.

    Raises `UnsupportedMediaTypeException`, and `InvalidMessageError` with the index of the first invalid row.
    """
    kind = media_type.partition(";")[0].strip().lower()
    if kind not in READ:
        raise UnsupportedMediaTypeException(f"a body of {kind or 'no type'} isn't read; there are {', '.join(READ)}")
    try:
        return READ[kind](body, most)
    except UnicodeDecodeError as bad:  # of a column's name, for example
        raise InvalidMessageError(f"a text of the body is not UTF-8: {bad}") from bad


class _Row(msgspec.Struct):
    """The required fields of a row, to refuse a body of many empty objects before it is decoded."""

    topic: msgspec.Raw


_rows = msgspec.json.Decoder(list[_Row])
_PLACE = re.compile(r"\$\[([0-9]+)\]")
"""The row's index in a msgspec error message."""


def _of_json(body: bytes, _: int) -> MessageBatch:
    listed = body.lstrip()[:1] == b"["
    if listed:
        try:
            return MessageBatch.from_messages(decode_list(body))
        except (ValueError, RecursionError):  # the body is invalid, or in a notation for the slower decoder
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
    except (ValueError, RecursionError):  # decode line by line, to find the invalid one
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
    from .columnar_bodies import arrow_batches

    return _of_batches(arrow_batches(body, most))


def _of_parquet(body: bytes, most: int) -> MessageBatch:
    from .columnar_bodies import parquet_batches

    return _of_batches(parquet_batches(body, most))


def _of_batches(batches: Iterable[Any]) -> MessageBatch:
    """Return the messages of record batches. An error has the index of the row in the whole body."""
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
"""The decoders of bodies by media type."""


class GivenMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON object with the same keys as the lines of ``topicstore import``, for requests about one message.

    It has either a text ``payload``, or a ``payload_base64`` for any bytes. Responses have the same keys
    (`topicstore.files.formats.JsonMessage`).
    """

    topic: str
    payload: str | UnsetType = UNSET
    payload_base64: bytes | UnsetType = UNSET
    client_id: str = ""
    qos: int = 0
    retain: bool = False
    timestamp: int | None = None
    """Microseconds since the epoch; None for the time of the commit."""
    properties: JsonProperties | UnsetType = UNSET


def message_of(given: GivenMessage) -> Message:
    """Convert a decoded JSON object to a message. Raises `InvalidMessageError`."""
    text, payload = given.payload, given.payload_base64
    if isinstance(text, str) and payload is UNSET:
        payload = text.encode()
    elif text is not UNSET or not isinstance(payload, bytes):
        raise InvalidMessageError("a message has either a payload or a payload_base64")
    properties = given.properties
    return Message(
        given.topic,
        payload,
        given.client_id,
        given.qos,
        given.retain,
        given.timestamp,
        None if isinstance(properties, UnsetType) else Properties(*msgspec.structs.astuple(properties)),
    )
