"""Results of SQL as rows of values that JSON has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["rows"]


def rows(found: pa.Table) -> Iterator[list[Any]]:
    """Yield the rows: bytes as text, or in hexadecimal after 0x; times as ISO 8601, in UTC."""
    for batch in found.to_batches():
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield list(map(_plain, row))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"0x{value.hex()}"
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 and abs(value) < 1 << 63 else str(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, datetime):  # a time without a zone is in UTC, as all times of messages are
        return (value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)).isoformat() + "Z"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
