"""The decisions of a site about its shards, from what it has read: documents, beats, and its own progress.

A wrong decision costs time only: the log decides who owns a shard.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

import attrs
import msgspec

from .objects import ClusterDocument, GenerationPlan, ShardPlace, Site
from .placement import choose_owners, choose_replicas
from .transitions import advanced, named
from .watching import patience

__all__ = [
    "Duty",
    "Known",
    "abdicated",
    "duty",
    "entered",
    "next_document",
    "seems_alive",
    "wanted_replicas",
    "with_generations",
]

_FEW_SITES = 3
"""The number of sites up to which every site keeps every shard."""
_NEAR = 64
"""The most entries by which a replica that counts as caught up is behind the owner, as of their last beats."""


class Duty(enum.Enum):
    """A site's next action for a shard."""

    TAKE_OVER = enum.auto()
    """The document names this process the owner for an epoch that it hasn't taken yet."""
    OWN = enum.auto()
    RELEASE = enum.auto()
    """This site still owns the shard, and another site is to own it."""
    FOLLOW = enum.auto()
    NOTHING = enum.auto()
    """The shard is not kept here."""


@attrs.frozen
class Known:
    """The inputs of a site's decisions besides the document: heartbeats, and the progress of its own replicas."""

    site: str
    incarnation: bytes
    silent: Mapping[str, float]
    """The seconds since the last new beat of each site of the document, by this site's monotonic clock."""
    lost: Mapping[int, int]
    """The shards that this process does not own, though it has begun an epoch of theirs: the last such epoch."""
    released: Mapping[int, int]
    """The shards whose last entry here releases them, with the epoch that this entry ends."""
    applied: Mapping[str, Mapping[int, int]]
    """For each site, the index of the next entry by shard, as of its last beat."""


def duty(document: ClusterDocument, shard: int, known: Known, epoch: int, *, owned: bool) -> Duty:
    """Return a site's next action for a shard. ``epoch`` is the last one that this process has taken; 0 for none."""
    place = document.shards[shard]
    mine = place.owner == known.site and place.incarnation == known.incarnation
    if mine and place.epoch > epoch:
        return Duty.TAKE_OVER
    if owned:
        return Duty.OWN if mine and place.heir in ("", known.site) else Duty.RELEASE
    return Duty.FOLLOW if known.site in (place.owner, *place.replicas, *place.joining) else Duty.NOTHING


def entered(
    document: ClusterDocument, number: int, site: str, incarnation: bytes, address: str, factor: int | None
) -> ClusterDocument:
    """Return the document, to be created with this number, in which a new process of a site takes part.

    The process takes the shards that the site owned before. It joins the others, as far as they have too few replicas.
    """
    sites = {**document.sites, site: Site(address, incarnation)}
    document = msgspec.structs.replace(document, sites=sites)
    wanted = wanted_replicas(document, factor)
    for shard, place in enumerate(document.shards):
        if place.owner in ("", site):
            document = named(document, number, shard, site, incarnation)
        elif site in wanted[shard] and site not in (*place.replicas, *place.joining):
            joining = (*place.joining, site)
            document = _placed(document, shard, msgspec.structs.replace(place, joining=joining))
    return document


def next_document(
    document: ClusterDocument, number: int, known: Known, takeover_after: float, factor: int | None
) -> ClusterDocument | None:
    """Return the document that a site would create with this number; None if nothing is to be changed.

    The site names itself the owner of shards that it keeps, and whose owner seems dead, has released them, or was an
    earlier process of the same site. If there are none, it carries the plan on for all shards.
    """
    changed = document
    for shard, place in enumerate(document.shards):
        if _may_take(document, shard, place, known, takeover_after):
            changed = named(changed, number, shard, known.site, known.incarnation)
    if changed is not document:
        return changed
    replicas = wanted_replicas(document, factor)
    alive = {site for site in document.sites if seems_alive(site, known, takeover_after)}
    able = [[site for site in some if site in alive] or list(some) for some in replicas]
    owners = choose_owners([place.owner for place in document.shards], able)
    caught_up = {shard: _caught_up(shard, place, known) for shard, place in enumerate(document.shards)}
    return advanced(document, replicas, owners, caught_up)


def abdicated(document: ClusterDocument, number: int, known: Known, takeover_after: float) -> ClusterDocument | None:
    """Return the document in which a site that ends has passed its shards on to other replicas that seem alive."""
    changed = document
    for shard, place in enumerate(document.shards):
        others = [
            site
            for site in place.replicas
            if site != known.site and site in document.sites and known.silent.get(site, takeover_after) < takeover_after
        ]
        if place.owner == known.site and place.incarnation == known.incarnation and others:
            (heir,) = choose_owners([place.heir], [others])
            changed = named(changed, number, shard, heir, document.sites[heir].incarnation)
    return None if changed is document else changed


def with_generations(
    document: ClusterDocument, change: Callable[[Sequence[GenerationPlan]], Sequence[GenerationPlan]]
) -> ClusterDocument | None:
    """Return the document with other generations; None if ``change`` returns the same ones."""
    generations = tuple(change(document.generations))
    return None if generations == document.generations else msgspec.structs.replace(document, generations=generations)


def _may_take(document: ClusterDocument, shard: int, place: ShardPlace, known: Known, takeover_after: float) -> bool:
    me = known.site
    if place.owner == me:
        return place.incarnation != known.incarnation or known.lost.get(shard, -1) >= place.epoch
    if me not in place.replicas:
        return False
    if known.released.get(shard, -1) >= place.epoch and place.heir in ("", me):
        return True
    silent = known.silent.get(place.owner, float("inf") if place.owner not in document.sites else 0.0)
    applied = {
        site: known.applied.get(site, {}).get(shard, 0)
        for site in place.replicas
        if site == me or (site != place.owner and known.silent.get(site, takeover_after) < takeover_after)
    }
    return silent >= patience(takeover_after, shard, me, applied)


def seems_alive(site: str, known: Known, takeover_after: float) -> bool:
    """Return whether a site has sent a heartbeat within ``takeover_after`` seconds."""
    return site == known.site or known.silent.get(site, 0.0) < takeover_after


def _caught_up(shard: int, place: ShardPlace, known: Known) -> frozenset[str]:
    end = known.applied.get(place.owner, {}).get(shard)
    if end is None:
        return frozenset()
    return frozenset(site for site, applied in known.applied.items() if applied.get(shard, -1) >= end - _NEAR)


def wanted_replicas(document: ClusterDocument, factor: int | None) -> tuple[tuple[str, ...], ...]:
    """Return the sites that are to keep each shard. ``factor`` is `Cluster.replication_factor`."""
    count = len(document.sites) if factor is None else max(factor, min(len(document.sites), _FEW_SITES))
    return choose_replicas([(*place.replicas, *place.joining) for place in document.shards], document.sites, count)


def _placed(document: ClusterDocument, shard: int, place: ShardPlace) -> ClusterDocument:
    shards = (*document.shards[:shard], place, *document.shards[shard + 1 :])
    return msgspec.structs.replace(document, shards=shards)
