"""The values of a statement's result in a form that JSON can represent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["rows"]


def rows(found: pa.Table) -> Iterator[list[Any]]:
    """Yield the rows of a result as lists of values that JSON can represent.

    Bytes become text, or hexadecimal digits after ``0x`` if they aren't UTF-8. Times become ISO 8601 in UTC, including
    those that Python can't represent: infinity, nanoseconds, years before our era (``(BC)``) and after 9999.
    Non-finite numbers become the texts ``inf``, ``-inf`` and ``nan``.
    """
    for batch in found.to_batches():
        for row in zip(*map(_values, batch.columns), strict=True):
            yield list(map(_plain, row))


def _values(column: pa.Array) -> list[Any]:
    kind = str(column.type)
    # Python has no time 24:00. Nanoseconds become pandas' types if pandas is installed, and pandas wraps infinity.
    if not any(name in kind for name in ("time32", "time64", "timestamp[ns")):
        with contextlib.suppress(ValueError, OverflowError):  # times that Python can't represent
            return column.to_pylist()  # type: ignore[no-any-return]
    return list(map(_value, column))


def _value(scalar: pa.Scalar) -> Any:
    import pyarrow as pa

    if scalar.is_valid:
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(inner) for name, inner in scalar.items()}
        if isinstance(scalar, pa.MapScalar):
            return [(_value(entry["key"]), _value(entry["value"])) for entry in scalar.values]
        if isinstance(scalar, pa.ListScalar):
            return list(map(_value, scalar.values))
        if isinstance(scalar, pa.UnionScalar):
            return _value(scalar.value)
        if isinstance(scalar, (pa.Date32Scalar, pa.TimestampScalar)):
            return _time(scalar.value, getattr(scalar.type, "unit", "D"), largest=2 ** (scalar.type.bit_width - 1) - 1)
        if isinstance(scalar, (pa.Time32Scalar, pa.Time64Scalar)):
            return _time_of_day(scalar.value, scalar.type.unit)
    return scalar.as_py()


def _time(value: int, unit: str, *, largest: int) -> str:
    """Return a time since the epoch, in days or another unit, as text."""
    if abs(value) >= largest:
        return "infinity" if value > 0 else "-infinity"
    text = str(
        np.asarray(value, np.int64).astype(f"datetime64[{unit}]")
    )  # NumPy uses astronomical years: year 0 is 1 BC
    sign, (year, rest) = text[:1] == "-", text.removeprefix("-").split("-", 1)
    zone = "" if unit == "D" else "Z"
    rest, _, fraction = rest.partition(".")
    rest = f"{rest}{_fraction(fraction)}{zone}"
    return f"{int(year) + 1:04}-{rest} (BC)" if sign or int(year) == 0 else f"{year}-{rest}"


def _time_of_day(value: int, unit: str) -> str:
    """Return a time of the day, which may also be 24:00:00, as text."""
    second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    seconds, fraction = divmod(value, second)
    digits = _fraction(f"{fraction:0{len(str(second)) - 1}}")
    return f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{digits}"


def _fraction(digits: str) -> str:
    """Return a fraction of a second like `datetime.isoformat`: empty if it is zero, else six or nine digits."""
    return f".{digits:0<6}" if digits.strip("0") else ""


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
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, datetime):  # a time without a zone is in UTC, as all times of messages are
        return (value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)).isoformat() + "Z"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
