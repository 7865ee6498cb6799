"""Columns of every form have the same rows as a list."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.columns import (
    Coded,
    CodedNumbers,
    Constant,
    Texts,
    concat,
    fold,
    take,
    to_iterable,
    to_list,
    window,
)

FORMS = ["list", "numpy", "object", "arrow"]
values = st.lists(st.integers(0, 2**53), max_size=12)


def formed(form: str, rows: list[int]) -> Any:
    match form:
        case "list":
            return list(rows)
        case "numpy":
            return np.array(rows, dtype=np.int64)
        case "object":
            return np.array(rows, dtype=object)
        case "arrow":
            return pa.array(rows, pa.int64())
        case _:
            return Constant(rows[0], len(rows))


@st.composite
def columns(draw: st.DrawFn, **limits: Any) -> tuple[Any, list[int]]:
    """Draw a column of any form, and its rows as a list."""
    form = draw(st.sampled_from([*FORMS, "constant"]))
    if form == "constant":
        rows = [draw(st.integers(0, 3))] * draw(st.integers(limits.get("min_size", 0) or 1, 12))
    else:
        rows = draw(st.lists(st.integers(0, 2**53), max_size=12, **limits))
    return formed(form, rows), rows


def exactly(column: Any) -> list[tuple[type, Any]]:
    """Return the rows with their types, so that True and 1 differ."""
    return [(type(value), value) for value in to_list(column)]


@given(columns())
def test_a_column_lists_its_rows(both: tuple[Any, list[int]]) -> None:
    """`to_list` and `to_iterable` return Python objects for every form."""
    column, rows = both
    assert exactly(rows) == exactly(column)
    assert rows == list(to_iterable(column))
    assert {int} >= set(map(type, to_iterable(column)))
    assert len(rows) == len(column)


@given(columns(), st.slices(12))
def test_a_window_is_a_slice(both: tuple[Any, list[int]], rows: slice) -> None:
    """`window` returns the same rows as a slice of the list, even if it ends before its start."""
    column, expected = both
    start, stop, _ = slice(rows.start, rows.stop).indices(len(expected))
    actual = window(column, start, stop)
    assert exactly(expected[start:stop]) == exactly(actual)
    assert len(expected[start:stop]) == len(actual)


@given(columns(min_size=1), st.data())
def test_take_takes_rows_in_any_order(both: tuple[Any, list[int]], data: st.DataObject) -> None:
    """`take` returns the rows at the given indices, even if indices are repeated or there are none."""
    column, expected = both
    indices = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20))
    actual = take(column, np.array(indices, dtype=np.intp))
    assert exactly([expected[index] for index in indices]) == exactly(actual)
    assert len(indices) == len(actual)


@given(st.lists(columns(), min_size=1, max_size=4))
def test_concat_joins_rows(parts: list[tuple[Any, list[int]]]) -> None:
    """`concat` returns the rows of all columns, even of different forms."""
    expected = [row for _, rows in parts for row in rows]
    actual = concat([column for column, _ in parts])
    assert exactly(expected) == exactly(actual)
    assert len(expected) == len(actual)


@pytest.mark.parametrize(
    ("one", "other"),
    [(0, 1), (1, True), (0, False), (1, 1.0), (None, 0), ("", None), ("", b""), (None, False)],
    ids=repr,
)
def test_constants_join_only_if_they_are_the_same(one: Any, other: Any) -> None:
    """Constants that are equal but of different types stay distinct when they are concatenated."""
    for first, second in ((one, other), (other, one)):
        actual = concat([Constant(first, 2), Constant(second, 1)])
        assert exactly([first, first, second]) == exactly(actual)


def test_equal_constants_join_to_a_constant() -> None:
    """Equal constants concatenate to a constant, without a row for each value."""
    actual = concat([Constant("a", 2), Constant("a", 3)])
    assert isinstance(actual, Constant)
    assert list(actual) == ["a"] * 5


def test_constants_of_different_texts_join_to_codes() -> None:
    """Constants of texts concatenate to a `Coded` column that has each text once."""
    actual = concat([Constant("a", 2), Constant("b", 1), Constant("a", 1)])
    assert isinstance(actual, Coded)
    assert ["a", "b"] == actual.texts.values.tolist()
    assert ["a", "a", "b", "a"] == actual.tolist()


def test_large_integers_keep_every_bit_where_types_meet() -> None:
    """Concatenation of uint64 and int64 doesn't convert to float64."""
    large = [2**63 + 1, 2**64 - 1]
    actual = concat([np.array(large, dtype=np.uint64), np.array([2**53 + 1], dtype=np.int64)])
    assert [*large, 2**53 + 1] == to_list(actual)


def test_arrays_of_one_type_join_to_an_array() -> None:
    """Concatenation of uint64 arrays, such as positions, returns a uint64 array."""
    actual = concat([np.array([2**64 - 2], dtype=np.uint64), np.array([2**64 - 1], dtype=np.uint64)])
    assert np.uint64 == actual.dtype
    assert actual.tolist() == [2**64 - 2, 2**64 - 1]


def test_one_column_is_joined_as_it_is() -> None:
    """A single column is returned without a copy."""
    column = [1, 2]
    assert column is concat([column])


@given(st.lists(st.text("ab", max_size=1) | st.none(), min_size=1, max_size=8))
def test_fold_keeps_rows(rows: list[str | None]) -> None:
    """`fold` keeps the rows, and returns a `Constant` exactly if all are equal."""
    folded = fold(rows)
    assert exactly(rows) == exactly(folded)
    assert (len(set(rows)) == 1) == isinstance(folded, Constant)


@given(st.integers(0, 9), st.slices(9))
def test_a_constant_is_a_sequence(length: int, rows: slice) -> None:
    """A `Constant` behaves like the list that it represents."""
    expected = ["a"] * length
    column = Constant("a", length)
    assert expected == list(column)
    assert expected == list(reversed(column))
    assert expected[rows] == list(column[rows])
    assert expected.count("a") == column.count("a")
    assert ("a" in expected) == ("a" in column)
    assert "b" not in column
    for index in range(-length, length):
        assert expected[index] == column[index]


@pytest.mark.parametrize("index", [2, -3, 100])
def test_a_constant_ends(index: int) -> None:
    """An index out of range raises an `IndexError`, as for a list."""
    with pytest.raises(IndexError):
        Constant("a", 2)[index]


def test_a_constant_shows_itself() -> None:
    """The `repr` of a `Constant` is an expression that makes an equal one."""
    expected = "Constant('a', 3)"
    assert expected == repr(Constant("a", 3))


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=20)), st.sampled_from([0, 1, 100]))
def test_each_text_of_a_list_is_numbered_once(columns: list[list[str]], more: int) -> None:
    """`CodedNumbers` requests the number of each text in use once, however many columns share the list as it grows.

    The number of a text that had none is requested again. `compact` returns the same rows with only the texts in use.
    """
    texts, shown, asked = Texts.of([f"other {number}" for number in range(more)]), CodedNumbers(), []
    known: list[str] = [*(f"other {number}" for number in range(more))]

    def numbers(new: list[str]) -> list[int | None]:
        asked.extend(new)
        return [None if text == "f" else ord(text) for text in new]

    for rows in columns:
        for text in dict.fromkeys(rows):
            if text not in known:
                texts.extend(len(known), [text])
                known.append(text)
        column = Coded(np.array([known.index(text) for text in rows], np.uint32), texts)
        assert [-1 if text == "f" else ord(text) for text in rows] == shown.of(column, numbers).tolist()
        assert rows == column.compact().tolist()
        assert list(dict.fromkeys(rows)) == column.compact().texts.values.tolist()
    assert sorted(set("".join(map("".join, columns))) - {"f"}) == sorted(set(asked) - {"f"})
    assert len(set(asked) - {"f"}) == len([text for text in asked if text != "f"])
