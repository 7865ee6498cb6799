"""Tests of the decisions that a site makes from cluster documents and heartbeats."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from topicstore.replication.duties import (
    Duty,
    Known,
    abdicated,
    duty,
    entered,
    forgotten,
    next_document,
    wanted_replicas,
)
from topicstore.replication.objects import ClusterDocument, ShardPlace, Site

AFTER = 2.0


def document(*places: ShardPlace, sites: str = "abc") -> ClusterDocument:
    return ClusterDocument(id=b"", database=b"", sites={site: Site("", site.encode()) for site in sites}, shards=places)


def place(owner: str = "a", epoch: int = 5, replicas: str = "abc", **more: Any) -> ShardPlace:
    return ShardPlace(owner, epoch, owner.encode(), tuple(replicas), **more)


def known(site: str = "b", **more: Any) -> Known:
    values: dict[str, Any] = {
        "incarnation": site.encode(),
        "silent": dict.fromkeys("abc", 0.0),
        "lost": {},
        "released": {},
        "applied": {one: {0: 9, 1: 9} for one in "abc"},
    }
    return Known(site=site, **values | more)


def test_an_owner_that_cannot_write_names_another_site() -> None:
    """An owner that can't write names the most advanced live replica that can, or else keeps the shard.

    A replica whose last heartbeat was not found, so that its state is unknown, is not named.
    """
    first = document(place("a"))
    applied = {"a": {0: 9}, "b": {0: 9}, "c": {0: 8}}

    def owner(silent: str = "", unread: str = "", **failed: tuple[int, ...]) -> str | None:
        silences = {site: 2 * AFTER if site in silent else 0.0 for site in "abc"}
        read = {site: progress for site, progress in applied.items() if site not in unread}
        found = next_document(first, 8, known("a", applied=read, failed=failed, silent=silences), AFTER, None)
        return None if found is None else found.shards[0].owner

    assert "b" == owner(a=(0,))
    assert "c" == owner(a=(0,), b=(0,)) == owner("b", a=(0,))
    assert owner("bc", a=(0,)) is None
    assert "c" == owner(unread="b", a=(0,))
    assert owner(a=(0,), b=(0,), c=(0,)) is None is owner(unread="bc", a=(0,))
    assert owner(a=(1,)) is None


def test_a_site_that_cannot_write_tries_and_inherits_nothing() -> None:
    """A site that can't write a shard neither takes it over again nor inherits it from another or a closing site."""
    lost = known("a", lost={0: 5}, failed={"a": (0,)})
    assert next_document(document(place("a"), sites="a"), 8, lost, AFTER, None) is None
    assert next_document(document(place("a"), sites="a"), 8, known("a", lost={0: 5}), AFTER, None) is not None
    closed = abdicated(document(place("a")), 8, known("a", failed={"b": (0,)}), AFTER)
    assert closed is not None
    assert "c" == closed.shards[0].owner


def test_a_site_in_back_off_gets_no_shard_that_another_can_write() -> None:
    """An owner that fails or closes names no site in back-off as the next owner, and the plan moves no shard there.

    If no other site can write a shard, the site in back-off gets the shard.
    """
    back_offs = {"b": 7.0}
    first, lone = document(place("a")), document(place("a", replicas="ab"), sites="ab")

    def heir(of: ClusterDocument, **more: Any) -> str | None:
        found = next_document(of, 8, known("a", failed={"a": (0,)}, back_offs=back_offs, **more), AFTER, None)
        return None if found is None else found.shards[0].owner

    applied = {"a": {0: 9}, "b": {0: 9}, "c": {0: 8}}
    assert ("c", "b") == (heir(first, applied=applied), heir(lone))
    for of, expected in ((first, "c"), (lone, "b")):
        closed = abdicated(of, 8, known("a", back_offs=back_offs), AFTER)
        assert closed is not None
        assert expected == closed.shards[0].owner
    both = document(*[place("a", replicas="ab")] * 4, sites="ab")
    progress = {site: dict.fromkeys(range(4), 9) for site in "ab"}
    moved, unchanged = (
        next_document(both, 8, known("a", back_offs=some, applied=progress), AFTER, None) for some in ({}, back_offs)
    )
    assert moved is not None is unchanged
    assert {"", "b"} == {one.heir for one in moved.shards}
    leaving = lone
    leaving = msgspec.structs.replace(leaving, sites={**leaving.sites, "a": Site("", b"a", True)})
    left = next_document(leaving, 8, known("a", back_offs=back_offs), AFTER, None)
    assert left is not None
    assert "b" == left.shards[0].heir


def test_a_site_in_back_off_waits_for_the_others_when_an_owner_is_unresponsive() -> None:
    """A replica in back-off takes an unresponsive owner's shard over later than the other replicas would.

    If all other replicas are unresponsive too, it waits no longer than without a back-off.
    """
    silent, far = {"a": AFTER, "b": 0.0, "c": 0.0}, {"b": {0: 9}, "c": {0: 8}}

    def takes(seconds: float, sites: str = "abc", **more: Any) -> bool:
        some = known("b", silent={**silent, "a": seconds}, applied=far, **more)
        return next_document(document(place("a", replicas=sites), sites=sites), 8, some, AFTER, None) is not None

    assert takes(AFTER)
    assert (False, True) == (takes(AFTER, back_offs={"b": 7.0}), takes(1.25 * AFTER, back_offs={"b": 7.0}))
    assert takes(AFTER, "ab", back_offs={"b": 7.0})


@pytest.mark.parametrize(
    ("one", "epoch", "owned", "expected"),
    [
        (place("b"), 4, False, Duty.TAKE_OVER),
        (place("b"), 5, True, Duty.OWN),
        (place("b"), 5, False, Duty.FOLLOW),
        (place("b", heir="b"), 5, True, Duty.OWN),
        (place("b", heir="c"), 5, True, Duty.RELEASE),
        (place("a"), 4, True, Duty.RELEASE),
        (place("a"), 0, False, Duty.FOLLOW),
        (place("a", replicas="ac", joining=("b",)), 0, False, Duty.FOLLOW),
        (place("a", replicas="ac"), 0, False, Duty.NOTHING),
        (ShardPlace("b", 5, b"an earlier process", ("a", "b")), 0, False, Duty.FOLLOW),
    ],
)
def test_what_a_site_does_with_a_shard(one: ShardPlace, epoch: int, owned: bool, expected: Duty) -> None:
    """A site takes over a shard that the document assigns to it, and releases one that another site is to own.

    It owns a shard that it has taken over, follows one that it only replicates, and ignores the others.
    """
    assert expected is duty(document(one), 0, known(), epoch, owned=owned)


@pytest.mark.parametrize(
    ("one", "more", "takes"),
    [
        (place(), {}, False),
        (place(), {"silent": {"a": 2 * AFTER, "b": 0, "c": 0}}, True),
        (place(), {"silent": {"a": AFTER, "b": 0, "c": 0}, "applied": {"b": {0: 3}, "c": {0: 4}}}, False),
        (place(), {"silent": {"a": 1.25 * AFTER, "b": 0, "c": 0}, "applied": {"b": {0: 3}, "c": {0: 4}}}, True),
        (place(), {"silent": {"a": AFTER, "b": 0, "c": AFTER}, "applied": {"b": {0: 3}, "c": {0: 4}}}, True),
        (place(replicas="ac"), {"silent": {"a": AFTER, "b": 0, "c": 0}}, False),
        (place(), {"released": {0: 5}}, True),
        (place(), {"released": {0: 4}}, False),
        (place(heir="c"), {"released": {0: 5}}, False),
        (place(heir="b"), {"released": {0: 5}}, True),
        (place("gone"), {}, True),
        (place("b"), {}, False),
        (place("b"), {"lost": {0: 5}}, True),
        (place("b"), {"lost": {0: 4}}, False),
        (ShardPlace("b", 5, b"an earlier process", ("a", "b")), {}, True),
    ],
)
def test_when_a_site_takes_a_shard(one: ShardPlace, more: dict[str, Any], takes: bool) -> None:
    """A replica takes over a released shard, or one whose owner is unresponsive, gone or replaced by a new process."""
    following = next_document(document(one), 8, known(**more), AFTER, None)
    named = following is not None and following.shards[0].owner == "b" and following.shards[0].epoch == 8
    assert takes == named
    if following is not None and takes:
        assert following.shards[0].incarnation == b"b"


def test_a_site_that_enters_takes_its_shards_and_joins_the_others() -> None:
    """A new process takes the shards of its site and those without an owner, and joins shards with too few replicas."""
    first = document(place("a"), place("b"), ShardPlace("", 0, b"", ()), place("a", replicas="a"), sites="ab")
    found = entered(first, 9, "b", b"new", "address", 3)
    assert found.sites["b"] == Site("address", b"new")
    assert [("a", 5), ("b", 9), ("b", 9), ("a", 5)] == [(one.owner, one.epoch) for one in found.shards]
    assert ("b",) == found.shards[3].joining


def test_a_joining_site_becomes_a_replica_once_it_has_caught_up() -> None:
    """A site is listed as a replica when its progress is near the owner's, and not before."""
    first = document(place(replicas="ac", joining=("b",)))
    behind = known(applied={"a": {0: 900}, "c": {0: 900}, "b": {0: 3}})
    near = known(applied={"a": {0: 900}, "c": {0: 900}, "b": {0: 890}})
    assert next_document(first, 8, behind, AFTER, None) is None
    found = next_document(first, 8, near, AFTER, None)
    assert found is not None
    assert {"a", "b", "c"} == set(found.shards[0].replicas)


def test_a_site_that_keeps_up_with_a_fast_owner_becomes_a_replica() -> None:
    """A site is listed as a replica when its progress equals the owner's of some seconds ago.

    This suffices even if the owner has since advanced far.
    """
    first = document(place(replicas="ac", joining=("b",)))
    applied = {"a": {0: 9_000}, "c": {0: 9_000}, "b": {0: 7_000}}
    assert next_document(first, 8, known(applied=applied, earlier={0: 7_001}), AFTER, None) is None
    found = next_document(first, 8, known(applied=applied, earlier={0: 7_000}), AFTER, None)
    assert found is not None
    assert {"a", "b", "c"} == set(found.shards[0].replicas)


def test_a_site_that_ends_names_a_living_replica_the_owner() -> None:
    """The shards of a closing site go to live replicas, with a new epoch; without one they keep their owner."""
    first = document(place("a"), place("b"), place("a", replicas="a"))
    found = abdicated(first, 8, known("a", silent={"a": 0, "b": AFTER, "c": 0}), AFTER)
    assert found is not None
    assert [("c", 8, b"c"), ("b", 5, b"b"), ("a", 5, b"a")] == [
        (one.owner, one.epoch, one.incarnation) for one in found.shards
    ]
    alone = abdicated(first, 8, known("a", silent=dict.fromkeys("abc", AFTER)), AFTER)
    assert alone is not None
    assert first.shards == alone.shards
    assert [True, False, False] == [alone.sites[site].closed for site in "abc"]
    assert abdicated(first, 8, known("a", incarnation=b"an earlier process"), AFTER) is None


def test_a_site_that_was_closed_gets_no_shard_until_it_enters_again() -> None:
    """No shard is assigned to a closed site, however recent its last heartbeat; a site that enters gets its share.

    The shards of a closed site that found no heir are free at once.
    """
    open_again = document(*[place("a", replicas="ab")] * 4, sites="ab")
    assert {"a", "b"} == owners_after(open_again, "a")
    closed = abdicated(document(*[place("b", replicas="ab")] * 4, sites="ab"), 8, known("b"), AFTER)
    assert closed is not None
    assert {"a"} == {one.owner for one in closed.shards}
    assert next_document(closed, 9, known("a", applied=FAR), AFTER, None) is None
    entered_again = entered(closed, 9, "b", b"new", "", None)
    assert not entered_again.sites["b"].closed
    assert {"a", "b"} == owners_after(entered_again, "a")

    second = abdicated(closed, 9, known("a"), AFTER)
    assert second is not None
    assert {"a"} == {one.owner for one in second.shards}
    following = next_document(entered(second, 10, "b", b"new", "", None), 11, known("b", incarnation=b"new"), AFTER, 3)
    assert following is not None
    assert {("b", 11)} == {(one.owner, one.epoch) for one in following.shards}


FAR = {site: dict.fromkeys(range(4), 9) for site in "abc"}


def owners_after(first: ClusterDocument, site: str) -> set[str]:
    """Return the owners, or the heirs where a shard has one, after the next document of a site."""
    following = next_document(first, 10, known(site, applied=FAR), AFTER, None)
    assert following is not None
    return {one.heir or one.owner for one in following.shards}


def test_a_shard_is_not_handed_to_an_unresponsive_site() -> None:
    """A shard that is assigned to an unresponsive site keeps its owner, although the site's replica had caught up."""
    first = document(place("a", assigned=("b",)))
    assert next_document(first, 8, known("a", silent={"a": 0, "b": AFTER, "c": 0}), AFTER, None) is None
    found = next_document(first, 8, known("a"), AFTER, None)
    assert found is not None
    assert "b" == found.shards[0].heir


def test_assigned_sites_keep_a_shard_and_all_keep_the_settings() -> None:
    """A shard's replicas are the assigned sites, or else chosen ones, but never a site that is leaving.

    Every site with a replica of any shard also has one of shard 0, which has the settings.
    """
    sites = {site: Site("", b"", leaving=site == "d") for site in "abcde"}
    shards = (
        place("a", replicas="a", assigned=("a",)),
        place("d", replicas="d", assigned=("c", "d")),
        place(replicas="d"),
    )
    wanted = wanted_replicas(ClusterDocument(id=b"", database=b"", sites=sites, shards=shards), 1)
    assert ("c",) == wanted[1]
    assert 1 == len(wanted[2])
    assert "d" not in wanted[2]
    assert {"a", "c", *wanted[2]} == set(wanted[0])


def test_a_forgotten_site_keeps_nothing() -> None:
    """A forgotten site has no replicas; if it had a shard's only one, the deciding site gets the shard."""
    first = document(place("a"), place("c", replicas="c"), place("b", joining=("c",), heir="c", assigned=("b", "c")))
    found = forgotten(first, 8, "c", known("a", silent={"a": 0, "b": 0, "c": AFTER}), AFTER)
    assert found is not None
    assert {"a", "b"} == set(found.sites)
    assert ("a", 5, ("a", "b")) == (found.shards[0].owner, found.shards[0].epoch, found.shards[0].replicas)
    assert ("a", 8, b"a", ("a",)) == (
        found.shards[1].owner,
        found.shards[1].epoch,
        found.shards[1].incarnation,
        found.shards[1].replicas,
    )
    assert ((), "", ("b",)) == (found.shards[2].joining, found.shards[2].heir, found.shards[2].assigned)


def test_a_site_that_has_left_is_removed_when_it_ends() -> None:
    """A site that is leaving is removed from the document when it closes, unless it still has a replica."""
    sites = {"a": Site("", b"a", leaving=True), "b": Site("", b"b")}
    left = ClusterDocument(id=b"", database=b"", sites=sites, shards=(place("b", replicas="b"),))
    found = abdicated(left, 8, known("a"), AFTER)
    assert found is not None
    assert ["b"] == [*found.sites]
    still = ClusterDocument(id=b"", database=b"", sites=sites, shards=(place("b", replicas="ba"),))
    ended = abdicated(still, 8, known("a"), AFTER)
    assert ended is not None
    assert ["a", "b"] == [*ended.sites]


def test_what_is_in_order_stays() -> None:
    """A site creates no new document while nothing has to change."""
    places = [place("a"), place("b"), place("c")]
    for site in "abc":
        assert next_document(document(*places), 8, known(site), AFTER, None) is None
