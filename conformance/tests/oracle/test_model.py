"""The model's positions equal those of the framework."""

from __future__ import annotations

from topicstore.contract.positions import MAX_TIME, first_position
from topicstore_conformance.oracle.model import first_of


def test_position_range() -> None:
    """The model and the framework compute the same first position of a time, including at the ends of the range."""
    assert [first_position(time) for time in (-1, 0, 1, MAX_TIME, MAX_TIME + 1)] == [
        first_of(time) for time in (-1, 0, 1, MAX_TIME, MAX_TIME + 1)
    ]
    assert first_of(MAX_TIME) < 2**64 - 1
