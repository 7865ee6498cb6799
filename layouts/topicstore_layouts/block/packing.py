"""Columns of numbers and times as bytes: the parts of stored forms that blocks and frames of all versions share.

In stored forms, ``numbers`` are either one number, which all rows have, or bytes: an unsigned little-endian integer per
row, each of the same number of bytes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from topicstore.contract.columns import Coded, Column, Constant
from topicstore.contract.errors import CorruptionError
from topicstore.contract.positions import COUNTER_BITS, Positions

__all__ = [
    "Array",
    "Names",
    "Number",
    "Numbers",
    "own_times",
    "pack_array",
    "pack_names",
    "pack_numbers",
    "pack_texts",
    "pack_times",
    "unpack_array",
    "unpack_numbers",
]

_WIDTHS = (
    (1 << 8, np.dtype("<u1")),
    (1 << 16, np.dtype("<u2")),
    (1 << 32, np.dtype("<u4")),
    (1 << 64, np.dtype("<u8")),
)
_DTYPES = {dtype.itemsize: dtype for _, dtype in _WIDTHS}

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Numbers = Number | bytes
# Without bounds: a bounded number in a union with a tuple makes msgspec 0.22's decoder crash in a garbage collection.
Names = int | bytes | tuple[list[str], int | bytes]
Array = npt.NDArray[Any]


def own_times(positions: Positions) -> Array:
    """Return the time of each position, in microseconds."""
    times: Array = (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    return times


def pack_numbers(values: Column) -> Numbers:
    """Return a column of unsigned integers in its stored form."""
    if isinstance(values, Constant):
        return int(values.value)
    if isinstance(values, list):
        if values.count(values[0]) == len(values):
            return int(values[0])
        return pack_array(np.array(values, dtype=np.uint64))
    array = np.asarray(values)
    return int(array[0]) if (array == array[0]).all() else pack_array(array)


def pack_array(values: Array) -> bytes:
    """Return unsigned integers as bytes, in the fewest bytes per integer in which the highest fits."""
    highest = int(values.max())
    dtype = next(dtype for limit, dtype in _WIDTHS if highest < limit)
    return values.astype(dtype).tobytes()


def pack_names(names: Column) -> Names:
    """Return names in their stored form: numbers of a dictionary, or texts as `pack_texts` returns them."""
    if isinstance(names, Coded) or (isinstance(names, Constant) and isinstance(names.value, str)):
        return pack_texts(names)
    return pack_numbers(names)


def pack_texts(names: Coded | Constant[str]) -> tuple[list[str], Numbers]:
    """Return the texts in use, and the place of each row's text among them."""
    if isinstance(names, Constant):
        return [names.value], 0
    used = np.unique(names.codes)
    texts = names.texts.values[used].tolist()
    return texts, pack_array(np.searchsorted(used, names.codes)) if len(texts) > 1 else 0


def pack_times(values: Column, positions: Positions) -> tuple[int, Numbers] | None:
    """Return timestamps as their minimum and numbers to add to it; None if each is the time of its position."""
    if isinstance(values, Constant):
        return values.value, 0
    times = np.asarray(values, dtype=np.int64)
    if np.array_equal(times, own_times(positions)):
        return None
    lowest = int(times.min())
    return lowest, pack_numbers(times - lowest)


def unpack_numbers(packed: Numbers, rows: int) -> Constant[int] | Array:
    """Return the numbers of all rows. Raises `CorruptionError`."""
    return Constant(packed, rows) if isinstance(packed, int) else unpack_array(packed, rows)


def unpack_array(packed: Numbers, rows: int) -> Array:
    """Return the numbers of all rows as an array. Raises `CorruptionError`."""
    if isinstance(packed, int):
        return np.full(rows, packed, dtype=np.uint64)
    dtype = _DTYPES.get(len(packed) // rows)
    if dtype is None or len(packed) != rows * dtype.itemsize:
        raise CorruptionError(f"a column of {len(packed)} bytes in a block of {rows} rows")
    return np.frombuffer(packed, dtype=dtype)
