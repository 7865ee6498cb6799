"""Placement of shards: balanced, with as few moves as possible, and computed equally by all sites."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.replication.placement import choose_owners, choose_replicas, most

SITES = st.lists(st.sampled_from([f"site-{number}" for number in range(12)]), min_size=1, max_size=9, unique=True)
COUNTS = st.integers(1, 5)
SHARDS = st.integers(0, 64)


def placed(shards: int, sites: list[str], count: int) -> tuple[tuple[str, ...], ...]:
    return choose_replicas([()] * shards, sites, count)


def load(replicas: tuple[tuple[str, ...], ...]) -> Counter[str]:
    return Counter(site for some in replicas for site in some)


@given(SHARDS, SITES, COUNTS)
def test_each_shard_has_as_many_sites_as_it_can(shards: int, sites: list[str], count: int) -> None:
    """Each shard has as many different sites as possible, and each site at most one replica above an even share."""
    found = placed(shards, sites, count)
    assert all(len(set(some)) == len(some) == min(count, len(sites)) for some in found)
    bound = most(shards * min(count, len(sites)), len(sites))
    assert all(number <= bound + 1 for number in load(found).values())


@given(SHARDS, SITES, COUNTS, st.randoms())
def test_nothing_moves_if_nothing_has_to(shards: int, sites: list[str], count: int, random: object) -> None:
    """Without a change of sites nothing moves, whatever the order of their names."""
    found = placed(shards, sites, count)
    shuffled = sorted(sites, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert found == placed(shards, shuffled, count)
    assert list(map(set, found)) == list(map(set, choose_replicas(found, shuffled, count)))


@given(SHARDS, SITES, COUNTS)
def test_for_a_new_site_only_what_others_hold_beyond_their_part_moves(
    shards: int, sites: list[str], count: int
) -> None:
    """A new site gets only shards that others hold above an even share, or all if there were too few sites."""
    found = placed(shards, sites, count)
    after = choose_replicas(found, [*sites, "new"], count)
    bound = most(shards * min(count, len(sites) + 1), len(sites) + 1)
    before, now = load(found), load(after)
    moved = Counter(site for old, new in zip(found, after, strict=True) for site in set(old) - set(new))
    assert all(number <= max(0, before[site] - bound) for site, number in moved.items())
    assert now["new"] <= bound + 1
    if count > len(sites):
        assert shards == now["new"]


@given(SHARDS, SITES, COUNTS, st.integers(0, 8))
def test_of_a_site_that_goes_only_what_it_held_moves(shards: int, sites: list[str], count: int, which: int) -> None:
    found = placed(shards, sites, count)
    gone = sites[which % len(sites)]
    after = choose_replicas(found, [site for site in sites if site != gone], count)
    for before, now in zip(found, after, strict=True):
        assert set(before) - {gone} <= set(now)
        assert len(now) == min(count, len(sites) - 1)


@given(SHARDS, SITES, COUNTS)
def test_owners_are_replicas_and_stay(shards: int, sites: list[str], count: int) -> None:
    replicas = placed(shards, sites, count)
    owners = choose_owners([""] * shards, replicas)
    assert all(owner in some for owner, some in zip(owners, replicas, strict=True))
    assert owners == choose_owners(owners, replicas)


@given(SHARDS, SITES, COUNTS, st.integers(0, 8))
def test_of_an_owner_that_goes_only_its_shards_get_another(
    shards: int, sites: list[str], count: int, which: int
) -> None:
    """If an owner is removed, its shards get new owners; other shards move only from a site above an even share."""
    replicas = placed(shards, sites, count)
    owners = choose_owners([""] * shards, replicas)
    gone = sites[which % len(sites)]
    left = choose_replicas(replicas, [site for site in sites if site != gone], count)
    after = choose_owners(owners, left)
    bound = most(shards, max(1, len(load(left))))
    for before, now, some in zip(owners, after, left, strict=True):
        assert now in some if some else now == ""
        assert before in (now, gone) or after.count(before) == bound


@pytest.mark.parametrize(("sites", "shards"), [(2, 8), (3, 16), (5, 64)])
def test_owners_are_spread(sites: int, shards: int) -> None:
    """Every site owns a shard, and no site owns more than one and a half times an even share."""
    replicas = placed(shards, [f"site-{number}" for number in range(sites)], 3)
    owned = Counter(choose_owners([""] * shards, replicas))
    assert sites == len(owned)
    assert max(owned.values()) <= 1.5 * shards / sites


def test_one_site_has_everything() -> None:
    assert ((("a",),) * 3, ("a",) * 3) == (placed(3, ["a"], 3), choose_owners([""] * 3, placed(3, ["a"], 3)))


def test_without_sites_nobody_has_anything() -> None:
    assert ((), ()) == choose_replicas([("gone",), ("gone",)], [], 2)
    assert ("", "") == choose_owners(["gone", "gone"], [(), ()])
