r"""Messages as JSON lines and as CSV: the formats that `replay` writes and `import` reads.

JSON lines::

    {"timestamp": 1425708022000000, "topic": "a/b", "client_id": "c", "qos": 1, "retain": false,
     "payload": "text", "properties": {"content_type": "text/plain", "user_properties": [["k", "v"]]}}

``topic`` and one of ``payload`` and ``payload_base64`` (any bytes) are required. A ``payload`` is text or any other
JSON value, which is stored as compact JSON with its numbers unchanged. ``timestamp`` is microseconds since the epoch or
ISO 8601 text. A time may also be named ``ts`` or ``time``; the unit of a number is then inferred from its size
(`topicstore.files.time_units`). ``properties`` has the names of `topicstore.Properties`; ``correlation_data`` is
base64. Any other name is an error, because its value would be lost, unless a `ColumnMap` uses or ignores it.

The header record of CSV has the same names; ``properties`` is a JSON object. An empty field counts as absent, except
for ``payload``.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from topicstore import Message, Properties
from topicstore.contract.times import format_time, parse_timestamp

from .column_values import JsonProperties, binary_of, flag_of, properties_of, qos_of
from .mapping import COLUMNS, ColumnMap, check_once

__all__ = [
    "CSV_COLUMNS",
    "PLAIN",
    "JsonMessage",
    "csv_parser",
    "csv_record",
    "decode_line",
    "decode_lines",
    "decode_list",
    "encode_lines",
    "format_of_name",
    "json_message",
]

CSV_COLUMNS = COLUMNS
PLAIN = ColumnMap()
"""The mapping that takes each column under its own name."""

_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def format_of_name(path: Path) -> str | None:
    """Return the format that the ending of a file's name implies, ignoring ``.gz``; None if it is unknown."""
    endings = [ending.lower() for ending in path.suffixes if ending.lower() != ".gz"]
    return _ENDINGS.get(endings[-1]) if endings else None


class _In(msgspec.Struct, forbid_unknown_fields=True, gc=False, kw_only=True):
    """A message with the fields of `JsonMessage`, in the same order; fields that are absent stay UNSET."""

    timestamp: int | str | UnsetType | None = UNSET
    topic: str
    client_id: str | UnsetType = UNSET
    qos: int | UnsetType = UNSET
    retain: bool | UnsetType = UNSET
    payload: str | UnsetType | None = UNSET
    payload_base64: bytes | UnsetType | None = UNSET
    properties: JsonProperties | UnsetType | None = UNSET


class JsonMessage(msgspec.Struct, gc=False):
    """A message as a JSON object: it has a ``payload`` that is text, or else a ``payload_base64``."""

    timestamp: int | None
    topic: str
    client_id: str
    qos: int
    retain: bool
    payload: str | UnsetType = UNSET
    payload_base64: bytes | UnsetType = UNSET
    properties: JsonProperties | UnsetType = UNSET


_decoder = msgspec.json.Decoder(_In)
_list_decoder = msgspec.json.Decoder(list[_In])
_row_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_fields = msgspec.structs.astuple


def decode_lines(lines: bytes, mapping: ColumnMap = PLAIN) -> list[Message]:
    """Return the messages of JSON lines, skipping blank lines. Raises `ValueError` unless each line is one message."""
    if mapping.plain:
        with contextlib.suppress(ValueError):  # forms other than that of `encode_lines` take the slower path below
            return list(map(_message, _decode_plain(lines)))
    return [_mapped(row, mapping) for row in _decode_rows(lines)]


def _decode_plain(lines: bytes) -> list[_In]:
    rows = _decoder.decode_lines(lines)
    again = _encoder.encode_lines(rows)
    if lines != again:
        _check_lines(lines, len(rows))
        if not _is_all(lines, again):
            _decode_rows(lines)
    return rows


def _decode_rows(lines: bytes) -> list[dict[str, msgspec.Raw]]:
    rows = _row_decoder.decode_lines(lines)
    _check_lines(lines, len(rows))
    for line, row in zip(filter(bytes.strip, lines.split(b"\n")), rows, strict=True):
        _check_names(line, row)
    return rows


_SPACE = b" \t\r\n"


def _is_all(text: bytes, again: bytes) -> bool:
    """Return whether decoding has certainly lost nothing, such as a duplicate name; ``again`` is the result reencoded.

    The result may be False although nothing was lost: if strings have needless escapes, or values are the defaults.
    """
    return text == again or len(text.translate(None, _SPACE)) == len(again.translate(None, _SPACE))


def _check_names(text: bytes, row: dict[str, msgspec.Raw]) -> None:
    """Raise `ValueError` if a JSON object or its properties contain a name twice, because only one value is decoded."""
    parts = b"".join((*map(str.encode, row), *row.values())).translate(None, _SPACE)
    if "properties" in row or len(text.translate(None, _SPACE)) != len(parts) + 4 * len(row) + 1:
        fields: list[tuple[str, object]] = json.loads(text, object_pairs_hook=_Pairs)
        inner = [value for name, value in fields if name == "properties" and isinstance(value, _Pairs)]
        for pairs in (fields, *inner):
            names = [name for name, _ in pairs]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"it has {twice[:80]!r} twice")


class _Pairs(list[tuple[str, object]]):
    """The names and values of a JSON object in order, including duplicate names."""


def _check_lines(text: bytes, objects: int) -> None:
    """Raise `ValueError` unless every line is blank or holds exactly one of the decoded JSON objects."""
    # The common case: every line break separates two objects.
    if text.count(b"}\n{") == text.count(b"\n") - text.endswith(b"\n") == objects - 1:
        return
    lines = [line for line in map(bytes.strip, text.split(b"\n")) if line]
    # If an object continues on the next line, one of the two lines lacks its brace.
    if len(lines) != objects or not all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        raise ValueError("a line is not one JSON object")


def decode_list(rows: bytes) -> list[Message]:
    """Return the messages of a JSON array, each in the form that `encode_lines` writes. Raises `ValueError`."""
    found = _list_decoder.decode(rows)
    if not _is_all(rows, _encoder.encode(found)):
        raise ValueError("it may have a name twice")
    return list(map(_message, found))


def decode_line(line: bytes, mapping: ColumnMap = PLAIN) -> Message:
    """Return the message of one JSON line. Raises `ValueError`."""
    row = _row_decoder.decode(line)
    _check_names(line, row)
    return _mapped(row, mapping)


def _mapped(row: dict[str, msgspec.Raw], mapping: ColumnMap) -> Message:
    mapping.check(row)
    taken = mapping.taken
    return mapping.message({name: value for name, value in row.items() if name in taken and bytes(value) != b"null"})


def _message(row: _In) -> Message:
    text, timestamp, properties = row.payload, row.timestamp, row.properties
    # UNSET is falsy.
    return Message(
        row.topic,
        text.encode() if text and not row.payload_base64 else _binary(row),
        row.client_id or "",
        row.qos or 0,
        row.retain or False,
        parse_timestamp(timestamp) if isinstance(timestamp, str) else None if timestamp is UNSET else timestamp,
        Properties(*_fields(properties)) if isinstance(properties, JsonProperties) else None,
    )


def _binary(row: _In) -> bytes:
    text, binary = row.payload, row.payload_base64
    if isinstance(text, str):
        if isinstance(binary, bytes):
            raise ValueError("it has both payload and payload_base64")
        return text.encode()
    if not isinstance(binary, bytes):
        raise ValueError("it has neither payload nor payload_base64")
    return binary


def encode_lines(messages: Iterable[Message]) -> bytes:
    """Return messages as JSON lines, from which `decode_lines` restores the same messages."""
    return _encoder.encode_lines(list(map(json_message, messages)))


def json_message(message: Message) -> JsonMessage:
    """Return a message as a JSON object."""
    text: str | UnsetType
    binary: bytes | UnsetType
    try:
        text, binary = message.payload.decode(), UNSET
    except UnicodeDecodeError:
        text, binary = UNSET, message.payload
    properties = message.properties
    return JsonMessage(
        message.timestamp,
        message.topic,
        message.client_id,
        message.qos,
        message.retain,
        text,
        binary,
        UNSET if properties is None else JsonProperties(*_fields(properties)),
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
        None if properties is None else _encoder.encode(JsonProperties(*_fields(properties))).decode(),
    )


def csv_parser(header: Sequence[str], mapping: ColumnMap = PLAIN) -> Callable[[Sequence[str]], Message]:
    """Return a function that converts records under this header to messages. Both functions raise `ValueError`."""
    check_once(header)
    mapping.check_header(header)
    if not mapping.plain or not set(COLUMNS).issuperset(header):
        return _mapping_parser(header, mapping)
    width = len(header)

    def time_in(text: str) -> int | None:
        try:
            return parse_timestamp(text)
        except ValueError:
            return mapping.timestamp({"timestamp": text}, "")

    places = [header.index(name) if name in header else width for name in COLUMNS]

    def parse(record: Sequence[str]) -> Message:
        _check_width(record, width)
        padded = (*record, "")
        timestamp, topic, client_id, qos, retain, payload, binary, properties = (padded[place] for place in places)
        if payload and binary:
            raise ValueError("it has both payload and payload_base64")
        return Message(
            topic,
            (binary_of(binary) or b"") if binary else payload.encode(),
            client_id,
            qos_of(qos),
            flag_of(retain),
            time_in(timestamp) if timestamp else None,
            properties_of(properties),
        )

    return parse


def _mapping_parser(header: Sequence[str], mapping: ColumnMap) -> Callable[[Sequence[str]], Message]:
    width = len(header)

    def parse(record: Sequence[str]) -> Message:
        _check_width(record, width)
        row: dict[str, str | None] = {
            name: field or None for name, field in zip(header, record, strict=True) if name in mapping.taken
        }
        text, binary = mapping.column_of("payload"), mapping.column_of("payload_base64")
        if text in row and row.get(binary) is None:  # an empty field is an empty payload, not an absent one
            row[text] = row[text] or ""
        return mapping.message(row)

    return parse


def _check_width(record: Sequence[str], width: int) -> None:
    if len(record) != width:
        raise ValueError(f"it has {len(record)} fields, not {width}")
