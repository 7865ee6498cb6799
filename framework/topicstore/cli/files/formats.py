r"""Messages as JSON objects, one a line, and as CSV records: what `replay` writes and `import` reads.

JSON lines::

    {"timestamp": 1425708022000000, "topic": "a/b", "client_id": "c", "qos": 1, "retain": false,
     "payload": "text", "properties": {"content_type": "text/plain", "user_properties": [["k", "v"]]}}

``topic`` and one of ``payload`` (text) and ``payload_base64`` (any bytes) are needed. ``timestamp``
is microseconds since the epoch or ISO 8601 text. ``properties`` has the names of
`topicstore.Properties`; ``correlation_data`` is base64. A name that is none of these is an error,
because to pass over it would lose it.

CSV has the same names in its first record; ``properties`` is a JSON object, and an empty field is
an absent one, but for ``payload``.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from topicstore import Message, Properties
from topicstore.times import format_time, parse_timestamp

__all__ = [
    "CSV_COLUMNS",
    "csv_parser",
    "csv_record",
    "decode_line",
    "decode_lines",
    "encode_lines",
    "format_of_name",
]

CSV_COLUMNS = ("timestamp", "topic", "client_id", "qos", "retain", "payload", "payload_base64", "properties")

_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}


def format_of_name(path: Path) -> str | None:
    """Return the format that the ending of a file's name tells, packed by gzip or not."""
    endings = [ending.lower() for ending in path.suffixes if ending.lower() != ".gz"]
    return _ENDINGS.get(endings[-1]) if endings else None


class _Properties(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """`Properties` as a JSON object; theirs is an array, as layouts store it."""

    payload_format_indicator: int | None = None
    message_expiry_interval: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: tuple[tuple[str, str], ...] = ()


class _In(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    topic: str
    payload: str | None = None
    timestamp: int | str | None = None
    client_id: str = ""
    qos: int = 0
    retain: bool = False
    payload_base64: bytes | None = None
    properties: _Properties | None = None


class _Out(msgspec.Struct, gc=False):
    timestamp: int | None
    topic: str
    client_id: str
    qos: int
    retain: bool
    payload: str | UnsetType = UNSET
    payload_base64: bytes | UnsetType = UNSET
    properties: _Properties | UnsetType = UNSET


_decoder = msgspec.json.Decoder(_In)
_properties_decoder = msgspec.json.Decoder(_Properties)
_encoder = msgspec.json.Encoder()
_fields = msgspec.structs.astuple


def decode_lines(lines: bytes) -> list[Message]:
    """Return the messages of JSON lines; blank lines are none. Raises `ValueError` if one is bad."""
    return list(map(_message, _decoder.decode_lines(lines)))


def decode_line(line: bytes) -> Message:
    """Return the message of one JSON line. Raises `ValueError`."""
    return _message(_decoder.decode(line))


def _message(row: _In) -> Message:
    text, timestamp, properties = row.payload, row.timestamp, row.properties
    payload = _binary(row) if text is None or row.payload_base64 is not None else text.encode()
    return Message(
        row.topic,
        payload,
        row.client_id,
        row.qos,
        row.retain,
        parse_timestamp(timestamp) if isinstance(timestamp, str) else timestamp,
        None if properties is None else Properties(*_fields(properties)),
    )


def _binary(row: _In) -> bytes:
    if row.payload_base64 is None:
        raise ValueError("it has neither payload nor payload_base64")
    if row.payload is not None:
        raise ValueError("it has both payload and payload_base64")
    return row.payload_base64


def encode_lines(messages: Iterable[Message]) -> bytes:
    """Return messages as JSON lines that `decode_lines` turns into the same messages."""
    return _encoder.encode_lines(list(map(_row, messages)))


def _row(message: Message) -> _Out:
    text: str | UnsetType
    binary: bytes | UnsetType
    try:
        text, binary = message.payload.decode(), UNSET
    except UnicodeDecodeError:
        text, binary = UNSET, message.payload
    properties = message.properties
    return _Out(
        message.timestamp,
        message.topic,
        message.client_id,
        message.qos,
        message.retain,
        text,
        binary,
        UNSET if properties is None else _Properties(*_fields(properties)),
    )


# --- CSV ---


def csv_record(message: Message) -> tuple[str | int | None, ...]:
    """Return a message as the fields of `CSV_COLUMNS`."""
    try:
        payload, binary = message.payload.decode(), ""
    except UnicodeDecodeError:
        payload, binary = "", base64.b64encode(message.payload).decode()
    properties = message.properties
    return (
        None if message.timestamp is None else format_time(message.timestamp),
        message.topic,
        message.client_id,
        message.qos,
        "true" if message.retain else "false",
        payload,
        binary,
        None if properties is None else _encoder.encode(_Properties(*_fields(properties))).decode(),
    )


def csv_parser(header: Sequence[str]) -> Callable[[Sequence[str]], Message]:
    """Return the function that makes messages of records under this header. Both raise `ValueError`."""
    unknown = sorted(set(header) - set(CSV_COLUMNS))
    if unknown or len(set(header)) != len(header):
        raise ValueError(f"columns that messages don't have, or twice: {', '.join(unknown or header)}")
    if "topic" not in header or not {"payload", "payload_base64"}.intersection(header):
        raise ValueError("the first record names the columns, among them topic and payload or payload_base64")
    width = len(header)
    places = [header.index(name) if name in header else width for name in CSV_COLUMNS]

    def parse(record: Sequence[str]) -> Message:
        if len(record) != width:
            raise ValueError(f"it has {len(record)} fields, not {width}")
        padded = (*record, "")
        timestamp, topic, client_id, qos, retain, payload, binary, properties = (padded[place] for place in places)
        if payload and binary:
            raise ValueError("it has both payload and payload_base64")
        return Message(
            topic,
            _base64(binary) if binary else payload.encode(),
            client_id,
            _whole(qos),
            _flag(retain),
            parse_timestamp(timestamp) if timestamp else None,
            Properties(*_fields(_properties_decoder.decode(properties))) if properties else None,
        )

    return parse


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as bad:
        raise ValueError(f"payload_base64: {bad}") from None


def _whole(text: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"a QoS is 0, 1 or 2, not {text[:80]!r}")
    return int(text or 0)


_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}


def _flag(text: str) -> bool:
    flag = _FLAGS.get(text.lower())
    if flag is None:
        raise ValueError(f"retain is true or false, not {text[:80]!r}")
    return flag
