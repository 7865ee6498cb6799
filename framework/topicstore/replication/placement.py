"""The assignment of shards to sites, and of an owner among them: rendezvous hashing with bounded load.

Each pair of a shard and a site has a hash (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
1998), and a shard is assigned to the sites with the highest hashes. To bound the load, sites that are full are skipped
(Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", 2018). A replica moves only if it must:
its site has left, the shard has too many replicas, or the site holds more than its bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import xxhash

__all__ = ["choose_owners", "choose_replicas", "most"]

SLACK = 1.25
"""The bound on a site's load, relative to an equal share. A lower bound moves more shards when sites come or go."""


def most(things: int, sites: int) -> int:
    """Return how many of ``things`` shards, or replicas, each of ``sites`` sites may hold at most."""
    return max(1, math.ceil(SLACK * things / sites))


def rank(shard: int, site: str) -> int:
    """Return the 64-bit hash of a shard and a site; a shard prefers the sites with the highest hashes."""
    return xxhash.xxh3_64_intdigest(b"%d/%b" % (shard, site.encode()))


def choose_replicas(current: Sequence[Sequence[str]], sites: Iterable[str], count: int) -> tuple[tuple[str, ...], ...]:
    """Return the sites that are to hold each shard: ``count`` sites, or all if there are fewer.

    ``current`` lists, for each shard, the sites that hold it now. The result is deterministic, so every site computes
    the same. Moves are minimal: adding a site moves only replicas above other sites' bounds; removing a site moves
    only the replicas that it held.
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
    """Return shards in the order in which an overloaded site hands them over: lowest hash first."""
    return sorted(shards, key=lambda shard: rank(shard, site))


def _move(shard: int, site: str, roomy: Sequence[str], load: Counter[str]) -> str:
    """Move a shard from ``site`` to the least loaded of the ``roomy`` sites in ``load``; return that site."""
    other = min(roomy, key=lambda one: (load[one], -rank(shard, one)))
    load[site] -= 1
    load[other] += 1
    return other


def _best(shard: int, able: list[str], load: Mapping[str, int], bound: int) -> str:
    """Return the site with the highest hash among those below ``bound``; if none is, among the least loaded."""
    roomy = [site for site in able if load[site] < bound]
    if not roomy:
        least = min(load[site] for site in able)
        roomy = [site for site in able if load[site] == least]
    return max(roomy, key=lambda site: rank(shard, site))


def choose_owners(current: Sequence[str], replicas: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the owner of each shard, one of its replicas; "" for a shard without replicas.

    An owner stays unless it is not among the replicas, or owns more shards than the bound while another replica owns
    fewer.
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
