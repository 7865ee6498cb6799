"""Which sites hold a shard, and which of them owns it: rendezvous hashing with bounded load.

Each pair of a shard and a site has a number (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
1998), and a shard goes to the sites with the highest. So that none gets more than its part, a site that is full is left
out (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018). What lies somewhere stays there
unless it must go: its site left, the shard has too many replicas, or the site holds more than it may.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import xxhash

__all__ = ["choose_owners", "choose_replicas", "most"]

SLACK = 1.25
"""How much more than its equal part a site may hold. With less, more moves when a site comes or goes."""


def most(things: int, sites: int) -> int:
    """Return how many of a number of things one of the sites may hold."""
    return max(1, math.ceil(SLACK * things / sites))


def rank(shard: int, site: str) -> int:
    """Return the number of a pair; a shard prefers the sites with the highest."""
    return xxhash.xxh3_64_intdigest(b"%d/%b" % (shard, site.encode()))


def choose_replicas(current: Sequence[Sequence[str]], sites: Iterable[str], count: int) -> tuple[tuple[str, ...], ...]:
    """Return the sites that are to hold each shard: ``count`` of them, or all where there are fewer.

    ``current`` says for each shard which hold it now. The result is the same wherever it is computed. Nothing moves if
    nothing has to: if a site is added, only what others hold beyond their part; if one is removed, only what it held.
    """
    known = sorted(set(sites))
    if not known:
        return tuple(() for _ in current)
    count = min(count, len(known))
    held = [[site for site in dict.fromkeys(sites_of) if site in known] for sites_of in current]
    for shard, kept in enumerate(held):
        kept.sort(key=lambda site, shard=shard: rank(shard, site), reverse=True)  # type: ignore[misc]
        del kept[count:]
    bound = most(len(held) * count, len(known))
    load = Counter(site for kept in held for site in kept)
    for shard, kept in enumerate(held):
        while len(kept) < count:
            site = _best(shard, [site for site in known if site not in kept], load, bound)
            kept.append(site)
            load[site] += 1
    for site in known:
        for shard in _least_first(site, (shard for shard, kept in enumerate(held) if site in kept)):
            roomy = [other for other in known if other not in held[shard] and load[other] < bound]
            if load[site] > bound and roomy:
                held[shard][held[shard].index(site)] = _move(shard, site, roomy, load)
    return tuple(tuple(kept) for kept in held)


def _least_first(site: str, shards: Iterable[int]) -> list[int]:
    """Return shards in the order in which a site gives them away."""
    return sorted(shards, key=lambda shard: rank(shard, site))


def _move(shard: int, site: str, roomy: Sequence[str], load: Counter[str]) -> str:
    """Move a shard from a site to the one of those with room that holds least; return that."""
    other = min(roomy, key=lambda one: (load[one], -rank(shard, one)))
    load[site] -= 1
    load[other] += 1
    return other


def _best(shard: int, able: list[str], load: Mapping[str, int], bound: int) -> str:
    """Return the site that a shard prefers of those with room; where none has room, of those that hold least."""
    roomy = [site for site in able if load[site] < bound]
    if not roomy:
        least = min(load[site] for site in able)
        roomy = [site for site in able if load[site] == least]
    return max(roomy, key=lambda site: rank(shard, site))


def choose_owners(current: Sequence[str], replicas: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return which of its replicas is to own each shard; "" for a shard without any.

    An owner stays unless it is no replica any more, or owns more than its part while another replica owns less.
    """
    sites = {site for some in replicas for site in some}
    if not sites:
        return tuple("" for _ in replicas)
    bound = most(len(replicas), len(sites))
    owners = [owner if owner in some else "" for owner, some in zip(current, replicas, strict=True)]
    load = Counter(owner for owner in owners if owner)
    for shard, some in enumerate(replicas):
        if some and not owners[shard]:
            owners[shard] = _best(shard, list(some), load, bound)
            load[owners[shard]] += 1
    for site in sorted(sites):
        for shard in _least_first(site, (shard for shard, owner in enumerate(owners) if owner == site)):
            roomy = [other for other in replicas[shard] if load[other] < bound]
            if load[site] > bound and roomy:
                owners[shard] = _move(shard, site, roomy, load)
    return tuple(owners)
