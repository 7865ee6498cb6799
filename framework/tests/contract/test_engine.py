"""Ranges of keys."""

from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.engine import Key, is_empty

NUMBERS = st.integers(0, 3)
PAIRS = st.tuples(st.binary(max_size=2), st.binary(max_size=2)) | st.tuples(
    st.tuples(NUMBERS, NUMBERS), st.tuples(NUMBERS, NUMBERS)
)


@given(PAIRS)
def test_a_range_is_empty_unless_it_ends_after_its_start(ends: tuple[Key, Key]) -> None:
    """`is_empty` is true if a range ends at or before its start, for both kinds of keys, and false for open ranges."""
    start, end = ends
    assert is_empty(start, end) == (sorted([start, end]) != [start, end] or start == end)
    assert not any((is_empty(None, end), is_empty(start, None), is_empty(None, None)))
