"""The transition from one placement to another, one document at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.replication.objects import ClusterDocument, ShardPlace
from topicstore.replication.owning import Answer
from topicstore.replication.transitions import Named, advanced, after_create, named

SITES = ["a", "b", "c", "d", "e"]
SOME = st.lists(st.sampled_from(SITES), min_size=1, max_size=4, unique=True).map(tuple)


def document(*places: ShardPlace) -> ClusterDocument:
    return ClusterDocument(id=b"", database=b"", sites={}, shards=places)


@given(SOME, SOME, st.lists(st.sets(st.sampled_from(SITES)), max_size=6))
def test_a_shard_gets_where_it_is_to_be_and_is_never_short_of_replicas(
    now: tuple[str, ...], wanted: tuple[str, ...], reports: list[set[str]]
) -> None:
    """A shard reaches its new placement whatever sites report, and never has too few replicas meanwhile."""
    at = document(ShardPlace(now[0], 1, b"", now))
    fewest = min(len(now), len(wanted))
    number = 1
    for report in [*reports, *[set(SITES)] * 8]:
        following = advanced(at, [wanted], [wanted[0]], {0: frozenset(report)})
        place = (following or at).shards[0]
        assert len(place.replicas) >= fewest
        assert place.owner in place.replicas
        assert place.heir in ("", *place.replicas)
        assert set(place.replicas) - set(at.shards[0].replicas) <= report
        at, number = following or at, number + 1
        if place.heir:
            at, number = named(at, number, 0, place.heir, b"x"), number + 1
            assert number - 1 == at.shards[0].epoch
    assert (set(wanted), wanted[0]) == (set(at.shards[0].replicas), at.shards[0].owner)
    assert () == at.shards[0].joining
    assert "" == at.shards[0].heir
    assert None is advanced(at, [wanted], [wanted[0]], {0: frozenset(SITES)})


def test_whoever_takes_over_owns_with_the_number_of_the_document_as_its_epoch() -> None:
    """A site that takes over becomes the owner, with the document's number as the shard's epoch.

    Other shards are unchanged.
    """
    other = ShardPlace("c", 2, b"c", ("c",))
    at = document(ShardPlace("a", 3, b"a", ("a", "b"), ("d",), "b"), other)
    assert (ShardPlace("b", 9, b"b", ("a", "b"), ("d",)), other) == named(at, 9, 0, "b", b"b").shards


@pytest.mark.parametrize(
    ("answer", "found", "highest", "expected"),
    [
        (Answer.CREATED, None, 5, Named.COUNTS),
        (Answer.CREATED, None, 6, Named.LOST),  # a deleted document had this number before
        (Answer.CREATED, None, None, Named.LOST),
        (Answer.EXISTS, b"mine", 5, Named.COUNTS),
        (Answer.EXISTS, b"mine", 7, Named.LOST),
        (Answer.EXISTS, b"other", 5, Named.LOST),
        (Answer.EXISTS, None, 5, Named.AGAIN),
        (Answer.NONE, None, 5, Named.AGAIN),
    ],
)
def test_a_document_counts_if_none_is_above_it(
    answer: Answer, found: bytes | None, highest: int | None, expected: Named
) -> None:
    assert expected is after_create(5, b"mine", answer, found, highest)
