"""Columns of a message batch, in whichever form costs least.

A column is a `Constant` (one value for all rows), a list, a NumPy array or a pyarrow
array. Whoever makes a batch keeps the form it has; whoever needs another converts the
whole column at once with the functions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Column", "Constant", "Indices", "concat", "fold", "take", "to_iterable", "to_list", "window"]

T = TypeVar("T")
Indices = npt.NDArray[np.intp]


class Constant(Sequence[T], Generic[T]):
    """``length`` rows of one and the same ``value``."""

    __slots__ = ("length", "value")

    def __init__(self, value: T, length: int) -> None:
        self.value = value
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        return repeat(self.value, self.length)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Constant(self.value, len(range(*index.indices(self.length))))
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return self.value

    def __repr__(self) -> str:
        return f"Constant({self.value!r}, {self.length})"


Column = Any
"""`Constant`, list, numpy.ndarray or pyarrow.Array; all of one length in a batch."""


def fold(values: list[T]) -> list[T] | Constant[T]:
    """Return a `Constant` if all values of a non-empty list are equal, else the list itself."""
    # list.count compares by identity first, so this costs next to nothing where it matters.
    return Constant(values[0], len(values)) if values.count(values[0]) == len(values) else values


def to_iterable(column: Column) -> Iterable[Any]:
    """Return Python objects to iterate once, without a copy where the form allows it."""
    return column if isinstance(column, (list, Constant)) else to_list(column)


def to_list(column: Column) -> list[Any]:
    """Return a list of Python objects."""
    if isinstance(column, list):
        return column
    if isinstance(column, Constant):
        return [column.value] * column.length
    if isinstance(column, np.ndarray):
        return column.tolist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def take(column: Column, rows: Indices) -> Column:
    """Return the rows with these indices, in the order of the indices."""
    if isinstance(column, Constant):
        return Constant(column.value, len(rows))
    if isinstance(column, list):
        return list(map(column.__getitem__, rows.tolist()))
    if isinstance(column, np.ndarray):
        return column[rows]
    return column.take(rows)


def window(column: Column, start: int, stop: int) -> Column:
    """Return the rows from ``start`` to before ``stop``."""
    if isinstance(column, (Constant, list, np.ndarray)):
        return column[start:stop]
    return column.slice(start, max(stop - start, 0))


def concat(columns: Sequence[Column]) -> Column:
    """Return the columns one behind the other."""
    first = columns[0]
    if len(columns) == 1:
        return first
    if all(isinstance(column, Constant) and _same(column.value, first.value) for column in columns):
        return Constant(first.value, sum(map(len, columns)))
    if all(isinstance(column, np.ndarray) and column.dtype == first.dtype for column in columns):
        return np.concatenate(columns)  # of one type: int64 behind uint64 would become float64
    joined: list[Any] = []
    for column in columns:
        joined.extend(to_iterable(column))
    return joined


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)  # True is not 1
