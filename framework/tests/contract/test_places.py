"""Places can be converted to text and back."""

from __future__ import annotations

import copy
import pickle

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st

databases = st.binary(min_size=16, max_size=16)
positions = st.dictionaries(st.integers(0, 20), st.integers(0, (1 << 64) - 1), min_size=1)


@given(databases, positions)
def test_a_place_is_read_back_from_its_text(database: bytes, by_shard: dict[int, int]) -> None:
    """A parsed place has position 0 for shards that the text omits; copies keep the database's id."""
    place = ts.Place(database, by_shard)
    found = ts.Place.parse(str(place))
    assert (database, {shard: by_shard.get(shard, 0) for shard in range(max(by_shard) + 1)}) == (found.database, found)
    for again in (copy.copy(place), copy.deepcopy(place), pickle.loads(pickle.dumps(place))):
        assert (database, by_shard) == (again.database, again)


@pytest.mark.parametrize("text", ["", "0" * 32, "0" * 31 + "-1", "0" * 32 + "-", "0" * 32 + "-1-g", "0:1", 7])
def test_other_text_is_no_place(text: str) -> None:
    with pytest.raises(ts.InvalidCursorError, match="is not a place"):
        ts.Place.parse(text)
