"""The media types of messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    """No format that the client accepts is one that there is."""

    status_code = 406


def chosen(request: Request[Any, Any, Any], provided: Sequence[str]) -> str:
    """Return the media type that a client likes best, by its headers ``Accept``; the first one if it says nothing.

    Of those that it likes equally, one that it names counts before one that a wildcard stands for, and then what it
    names first (RFC 9110, section 12.5.1). Raises `NotAcceptableException`.
    """
    accepted = [one for header in request.headers.getall("accept", []) for one in header.split(",") if one.strip()]
    if not accepted:
        return provided[0]
    found = max(provided, key=lambda kind: _liking(kind, accepted))
    if _liking(found, accepted)[0] == 0:
        raise NotAcceptableException(f"there are {', '.join(provided)}")
    return found


def _liking(kind: str, accepted: Sequence[str]) -> tuple[float, int, int]:
    """Return how much a media type is liked, by what matches it most closely: 0 if it isn't accepted."""
    ranges = ("*/*", f"{kind.partition('/')[0]}/*", kind)
    closest = (-1, 0, 0.0)
    for number, one in enumerate(accepted):
        name, *parameters = (part.strip().lower() for part in one.split(";"))
        if name in ranges:
            weights = [found[1] for found in map(_WEIGHT.fullmatch, parameters) if found]
            closest = max(closest, (ranges.index(name), -number, float(weights[0]) if weights else 1.0))
    return closest[2], closest[0], closest[1]
