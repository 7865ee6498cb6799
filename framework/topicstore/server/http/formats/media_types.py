"""The media types of messages, and content negotiation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from litestar import Request
from litestar.exceptions import HTTPException

__all__ = ["ARROW", "CSV", "JSON", "JSON_LINES", "PARQUET", "NotAcceptableException", "chosen"]

JSON = "application/json"
JSON_LINES = "application/x-ndjson"
CSV = "text/csv"
ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"

_WEIGHT = re.compile(r"q=([01](?:\.[0-9]{0,3})?)")


class NotAcceptableException(HTTPException):
    """The client accepts none of the formats that are provided."""

    status_code = 406


def chosen(request: Request[Any, Any, Any], provided: Sequence[str]) -> str:
    """Return the media type that a client prefers by its ``Accept`` headers; the first one without such a header.

    Among equal weights, a named type precedes a type that only a wildcard matches; then the order in the header decides
    (RFC 9110, section 12.5.1). Raises `NotAcceptableException`.
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
