"""The oracle counts as the framework does, where that can be said in one line."""

from __future__ import annotations

from topicstore.contract.positions import MAX_TIME, first_position
from topicstore_conformance.oracle.model import first_of


def test_position_range() -> None:
    """The model counts positions as the framework does, at the ends of the range too."""
    assert [first_position(time) for time in (-1, 0, 1, MAX_TIME, MAX_TIME + 1)] == [
        first_of(time) for time in (-1, 0, 1, MAX_TIME, MAX_TIME + 1)
    ]
    assert first_of(MAX_TIME) < 2**64 - 1
