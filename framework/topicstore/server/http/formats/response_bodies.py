"""Messages in response bodies: the media type that the client accepts, and encoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from litestar import Request
from litestar.exceptions import HTTPException

from topicstore.contract.batch import MessageBatch
from topicstore.files.encoding import arrow_problem, arrow_stream, csv_text, json_lines, parquet
from topicstore.server.http.problems import document_of
from topicstore.storage.replays import slices

__all__ = ["ARROW", "CSV", "JSON", "JSON_LINES", "PARQUET", "WRITTEN", "NotAcceptableException", "chosen", "written"]

JSON = "application/json"
JSON_LINES = "application/x-ndjson"
CSV = "text/csv"
ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"

_WEIGHT = re.compile(r"q=([01](?:\.[0-9]{0,3})?)")
WRITTEN = (JSON_LINES, CSV, ARROW, PARQUET)
"""The media types of encoded messages; the first is the default."""
_ROWS, _BYTES = 16_384, 1 << 20
"""Most messages that are encoded at once, and about the most bytes of their payloads, unless a single one has more."""
_GROUP_ROWS, _GROUP_BYTES = 65_536, 16 << 20
"""Most rows and bytes of a Parquet row group, which is held in memory for each client."""


class NotAcceptableException(HTTPException):
    """The client accepts none of the formats that are provided."""

    status_code = 406


def chosen(request: Request[Any, Any, Any], provided: Sequence[str]) -> str:
    """Return the provided media type that the ``Accept`` headers prefer; the first provided one without such a header.

    Among equal weights, a named type precedes a type that only a wildcard matches; then the order in the header decides
    (RFC 9110, section 12.5.1). Raises `NotAcceptableException` if the client accepts none of them.
    """
    ranges = [one for header in request.headers.getall("accept", []) for one in header.split(",") if one.strip()]
    if not ranges:
        return provided[0]
    accepted = _accepted(ranges, {name for kind in provided for name in _ranges_of(kind)})
    found = max(provided, key=lambda kind: _liking(kind, accepted))
    if _liking(found, accepted)[0] == 0:
        raise NotAcceptableException(f"there are {', '.join(provided)}")
    return found


def _ranges_of(kind: str) -> tuple[str, str, str]:
    """Return the media ranges that match a media type, the most specific one last."""
    return "*/*", f"{kind.partition('/')[0]}/*", kind


def _accepted(ranges: Sequence[str], names: AbstractSet[str]) -> dict[str, tuple[int, float]]:
    """Return the position and the weight of the first occurrence of each name that a client accepts.

    Other names are ignored, because a header may have tens of thousands.
    """
    found: dict[str, tuple[int, float]] = {}
    for number, one in enumerate(ranges):
        name, _, parameters = one.partition(";")
        name = name.strip().lower()
        if name in names and name not in found:
            matches = (_WEIGHT.fullmatch(part.strip().lower()) for part in parameters.split(";"))
            found[name] = number, next((float(match[1]) for match in matches if match), 1.0)
    return found


def _liking(kind: str, accepted: Mapping[str, tuple[int, float]]) -> tuple[float, int, int]:
    """Return a sort key of a media type's preference, by its most specific range; its weight is 0 if not accepted."""
    for closeness, name in reversed(tuple(enumerate(_ranges_of(kind)))):
        if name in accepted:
            number, weight = accepted[name]
            return weight, closeness, -number
    return 0.0, -1, 0


def written(batches: Iterable[MessageBatch], media_type: str) -> Iterator[bytes | memoryview]:
    """Yield encoded messages in pieces.

    If reading fails before the end, a stream in Arrow's IPC format includes the error before the error is raised.
    """
    parts = _parts(batches)
    if media_type == ARROW:
        return _telling(arrow_stream(part.to_arrow() for part in parts))
    if media_type == PARQUET:
        return parquet((part.to_arrow() for part in parts), rows=_GROUP_ROWS, size=_GROUP_BYTES)
    encode = csv_text if media_type == CSV else json_lines
    return encode(part.to_messages() for part in parts)


def _parts(batches: Iterable[MessageBatch]) -> Iterator[MessageBatch]:
    """Split batches, so that a slow client occupies little memory; JSON may be six times as large as its data."""
    for batch in batches:
        rows = len(batch) * _BYTES // max(batch.payload_bytes(), 1)
        yield from slices([batch], min(max(rows, 1), _ROWS))


def _telling(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    try:
        yield from pieces
    except Exception as bad:
        yield arrow_problem(document_of(bad))
        raise
