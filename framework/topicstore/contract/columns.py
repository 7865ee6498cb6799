"""The forms of a message batch's columns, and conversions between them.

A column is a `Constant` (one value for all rows), a list, a NumPy array, a pyarrow array,
`Coded` (dictionary encoding: indices into a shared list of texts) or a `LazyColumn`. The code that creates a batch
chooses the cheapest form; code that needs another form converts the whole column with a function of this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeGuard, TypeVar, overload
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

__all__ = [
    "ArrowArray",
    "ArrowColumn",
    "Coded",
    "CodedNumbers",
    "Column",
    "Constant",
    "Indices",
    "LazyColumn",
    "Texts",
    "concat",
    "fold",
    "only",
    "take",
    "to_integers",
    "to_iterable",
    "to_list",
    "window",
]

T = TypeVar("T")
S = TypeVar("S", bound=np.generic)
Indices = npt.NDArray[np.intp]


class Constant(Sequence[T], Generic[T]):
    """A column whose ``length`` rows all have the same ``value``."""

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


class Texts:
    """A list of texts that `Coded` columns share. Entries that are set never change; unset entries are None."""

    __slots__ = ("__weakref__", "count", "values")

    def __init__(self, values: npt.NDArray[np.object_]) -> None:
        self.values = values
        self.count = 0
        """The number of entries set so far. Code that caches a form of the list detects by it that the list grew."""

    @classmethod
    def of(cls, values: list[str]) -> Texts:
        """Return the `Texts` of a list without unset entries."""
        texts = cls(np.array(values, dtype=object))
        texts.count = len(values)
        return texts

    def set(self, number: int, text: str) -> None:
        """Set an unset entry; the list grows if necessary."""
        if number >= len(self.values):
            room = np.full(max(number + 1, 2 * len(self.values)), None, dtype=object)
            room[: len(self.values)] = self.values
            self.values = room
        self.values[number] = text
        self.count += 1

    def extend(self, first: int, texts: list[str]) -> None:
        """Set the unset entries from number ``first`` on; the list grows if necessary."""
        stop = first + len(texts)
        if stop > len(self.values):
            room = np.full(max(stop, 2 * len(self.values)), None, dtype=object)
            room[: len(self.values)] = self.values
            self.values = room
        self.values[first:stop] = texts
        self.count += len(texts)


class Coded:
    """A dictionary-encoded column of texts: each row is an index into ``texts``.

    ``array`` is the Arrow array from which the column was created, or None.
    """

    __slots__ = ("array", "codes", "texts")

    def __init__(self, codes: npt.NDArray[Any], texts: Texts, array: Any = None) -> None:
        self.codes = codes
        self.texts = texts
        self.array = array

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Coded(self.codes[index], self.texts, None if self.array is None else self.array[index])
        return self.texts.values[self.codes[index]]

    def tolist(self) -> list[str]:
        """Return the string of each row."""
        texts: list[str] = self.texts.values[self.codes].tolist()
        return texts

    def compact(self) -> Coded:
        """Return the same rows with a list of their own: the texts in use, each once, in order of first use."""
        used = np.array(list(dict.fromkeys(self.codes.tolist())), dtype=np.intp)
        ranks = np.empty(len(self.texts.values), dtype=np.intp)
        ranks[used] = np.arange(len(used))
        return Coded(ranks[self.codes], Texts.of(self.texts.values[used].tolist()))


class CodedNumbers:
    """A number for each text of lists that `Coded` columns share, so that each text of a list is looked up only once.

    The numbers are from 0 to 2 ** 31 - 1. They are released together with the lists. Threads may use the object at the
    same time, if the number of a text never changes.
    """

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Texts, npt.NDArray[np.int32]] = WeakKeyDictionary()
        self._last: tuple[Callable[[], Texts | None], npt.NDArray[np.int32]] = lambda: None, np.empty(0, np.int32)
        """The list used last, weakly, and its numbers: a lookup in the dictionary costs ten times as much."""

    def of(self, column: Coded, numbers_of: Callable[[list[str]], Sequence[int | None]]) -> npt.NDArray[np.int32]:
        """Return the number of each row's text, or -1 for a text without one.

        ``numbers_of`` returns the numbers of texts that had none so far, in order of first use; it is called once, or
        not at all.
        """
        texts, (last, numbers) = column.texts.values, self._last
        if last() is not column.texts or len(numbers) < len(texts):
            numbers = self._numbers.get(column.texts, numbers[:0])
            if len(numbers) < len(texts):
                numbers = np.concatenate([numbers, np.full(len(texts) - len(numbers), -1, dtype=np.int32)])
                self._numbers[column.texts] = numbers
            self._last = ref(column.texts), numbers
        found: npt.NDArray[np.int32] = numbers[column.codes]
        if -1 in found:
            new, first = np.unique(column.codes[found < 0], return_index=True)
            new = new[np.argsort(first)]
            numbers[new] = [-1 if number is None else number for number in numbers_of(texts[new].tolist())]
            found = numbers[column.codes]
        return found


class LazyColumn(ABC):
    """The base class of columns that are converted to Python objects or Arrow on demand."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def tolist(self) -> list[Any]:
        """Return the values as Python objects, the same list each time."""

    @abstractmethod
    def toarrow(self) -> Any:
        """Return a pyarrow array of the column's type in `topicstore.SCHEMA`."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]


class ArrowColumn(LazyColumn):
    """A pyarrow array of the published schema's type that is converted to Python objects on demand."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._list: list[Any] | None = None

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return ArrowColumn(self._array[index]) if isinstance(index, slice) else self.tolist()[index]

    def tolist(self) -> list[Any]:
        """Return the values as Python objects."""
        if self._list is None:
            self._list = self._array.to_pylist()
        return self._list

    def toarrow(self) -> Any:
        """Return the column as the pyarrow array that it wraps."""
        return self._array


class ArrowArray(Protocol):
    """The methods of a pyarrow.Array that columns use; pyarrow has no type annotations."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def take(self, indices: Indices, /) -> Self:
        """Return the elements with these indices."""

    def slice(self, offset: int, length: int) -> Self:
        """Return ``length`` elements from ``offset`` on."""

    def to_pylist(self) -> list[Any]:
        """Return the values as Python objects."""


Column: TypeAlias = Constant[Any] | list[Any] | npt.NDArray[Any] | Coded | LazyColumn | ArrowArray
"""`Constant`, list, numpy.ndarray, pyarrow.Array, `Coded` or `LazyColumn`; all of one length in a batch."""


def fold(values: list[T]) -> list[T] | Constant[T]:
    """Return a `Constant` if all values of a non-empty list are equal, else the list itself."""
    # list.count compares by identity first, so this is cheap where all rows are the same object.
    return Constant(values[0], len(values)) if values.count(values[0]) == len(values) else values


def to_iterable(column: Column) -> Iterable[Any]:
    """Return an iterable of Python objects, without a copy where the form allows it."""
    return column if isinstance(column, (list, Constant)) else to_list(column)


def to_list(column: Column) -> list[Any]:
    """Return a list of Python objects."""
    if isinstance(column, list):
        return column
    if isinstance(column, Constant):
        return [column.value] * column.length
    if isinstance(column, (np.ndarray, Coded, LazyColumn)):
        return column.tolist()
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)  # a tuple has no `to_pylist`


def only(column: Column) -> Any:
    """Return the value of a column of one row, as a Python object."""
    return column.value if type(column) is Constant else to_list(column)[0]


def to_integers(column: Column) -> npt.NDArray[np.int64]:
    """Return a column of integers as a NumPy array."""
    if isinstance(column, np.ndarray):
        return column.astype(np.int64, copy=False)
    if isinstance(column, Constant):
        return np.full(len(column), column.value, dtype=np.int64)
    return np.fromiter(to_iterable(column), np.int64, len(column))


@overload
def take(column: Constant[T], rows: Indices) -> Constant[T]: ...
@overload
def take(column: npt.NDArray[S], rows: Indices) -> npt.NDArray[S]: ...
@overload
def take(column: Coded, rows: Indices) -> Coded: ...
@overload
def take(column: Column, rows: Indices) -> Column: ...
def take(column: Column, rows: Indices) -> Column:
    """Return the rows with these indices, in the order of the indices."""
    if isinstance(column, Constant):
        return Constant(column.value, len(rows))
    if isinstance(column, (list, LazyColumn)):
        return list(map(to_list(column).__getitem__, rows.tolist()))
    if isinstance(column, np.ndarray):
        return column[rows]
    if isinstance(column, Coded):
        return Coded(column.codes[rows], column.texts)
    return column.take(rows)


def window(column: Column, start: int, stop: int) -> Column:
    """Return the rows from ``start``, inclusive, to ``stop``, exclusive."""
    if isinstance(column, (Constant, list, np.ndarray, Coded, LazyColumn)):
        return column[start:stop]
    return column.slice(start, max(stop - start, 0))


def concat(columns: Sequence[Column]) -> Column:
    """Return one column with the rows of all columns, one after the other."""
    first = columns[0]
    if len(columns) == 1:
        return first
    if _all_are(columns, Constant) and _all_same(columns):
        return Constant(columns[0].value, sum(map(len, columns)))
    if _all_are(columns, Constant) and all(type(column.value) is str for column in columns):
        numbers: dict[str, int] = {}
        each = [numbers.setdefault(column.value, len(numbers)) for column in columns]
        return Coded(np.repeat(each, list(map(len, columns))), Texts.of(list(numbers)))
    if _all_are(columns, list):
        return list(chain.from_iterable(columns))
    if _all_are(columns, Coded) and all(column.texts is columns[0].texts for column in columns):
        return Coded(np.concatenate([column.codes for column in columns]), columns[0].texts)
    arrays = [array for array in map(_as_array, columns) if array is not None]
    if len(arrays) == len(columns) and len({array.dtype for array in arrays}) == 1:
        return np.concatenate(arrays)  # of one type, as int64 and uint64 would become float64
    return list(chain.from_iterable(map(to_iterable, columns)))


def _as_array(column: Column) -> npt.NDArray[Any] | None:
    """Return a column as an array where that is cheap, else None."""
    if isinstance(column, Constant) and type(column.value) is int and 0 <= column.value < 1 << 63:
        return np.full(len(column), column.value, dtype=np.int64)
    return column if isinstance(column, np.ndarray) else None


def _all_are(columns: Sequence[Column], kind: type[T]) -> TypeGuard[Sequence[T]]:
    return isinstance(columns[0], kind) and len(set(map(type, columns))) == 1


def _all_same(columns: Sequence[Constant[Any]]) -> bool:
    value = columns[0].value
    others = [column.value for column in columns if column.value is not value]
    return all(type(other) is type(value) and other == value for other in others)  # types are compared too: True == 1
