"""Decides which shards a site takes over, owns, releases and follows, and which cluster document it proposes next.

The inputs are the current `ClusterDocument` (sites, and owner and replicas of each shard) and `Known`: the heartbeats
of all sites and this site's own progress. The functions do no I/O. A wrong decision costs time only, because a shard's
log has at most one owner.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import attrs
import msgspec

from topicstore.contract.errors import ReplicasRefusedError, UnknownSiteError

from .objects import ClusterDocument, GenerationPlan, ShardPlace, Site
from .placement import choose_owners, choose_replicas
from .transitions import advanced, named
from .watching import most_advanced, patience

__all__ = [
    "Duty",
    "Known",
    "abdicated",
    "assigned",
    "duty",
    "entered",
    "forgotten",
    "leaving",
    "next_document",
    "seems_alive",
    "wanted_replicas",
    "with_generations",
]

_FEW_SITES = 3
"""The number of sites up to which every site keeps every shard."""
_NEAR = 64
"""The most entries by which a replica may be behind the owner, as of their last heartbeats, to count as caught up.

A replica also counts as caught up if it has every entry that the owner had some seconds before (`Known.earlier`).
"""


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
    """The seconds since the last new heartbeat of each site of the document, by this site's monotonic clock."""
    lost: Mapping[int, int]
    """The shards that this process does not own, though it has begun an epoch of theirs: the last such epoch."""
    released: Mapping[int, int]
    """The shards whose last entry here releases them, with the epoch that this entry ends."""
    applied: Mapping[str, Mapping[int, int]]
    """For each site, the index of the next entry by shard, as of its last heartbeat."""
    earlier: Mapping[int, int] = attrs.field(factory=dict)
    """By shard, the index of the owner's next entry some seconds ago (`OwnersProgress`); empty where it is unknown."""
    failed: Mapping[str, Collection[int]] = attrs.field(factory=dict)
    """By site, the shards whose copy there takes no writes since a write failed, as of the site's last heartbeat."""
    back_offs: Mapping[str, float] = attrs.field(factory=dict)
    """By site, the remaining seconds of its back-off after failures (`BackOff`), as of the site's last heartbeat."""

    def has_failed(self, site: str, shard: int) -> bool:
        """Return whether a site can neither write a shard nor apply its entries."""
        return shard in self.failed.get(site, ())

    def ready(self, sites: Iterable[str]) -> list[str]:
        """Return the sites that aren't in back-off, or all sites if each of them is, so that a shard gets an owner."""
        sites = list(sites)
        return [site for site in sites if not self.back_offs.get(site)] or sites

    def ends(self, document: ClusterDocument) -> dict[int, int]:
        """Return the index of the next entry of each shard as of its owner's last heartbeat, where that is known."""
        owners = ((shard, self.applied.get(place.owner, {})) for shard, place in enumerate(document.shards))
        return {shard: applied[shard] for shard, applied in owners if shard in applied}


def duty(document: ClusterDocument, shard: int, known: Known, epoch: int, *, owned: bool) -> Duty:
    """Return a site's next action for a shard. ``epoch``: the process's last fencing token; 0 for none."""
    place = document.shards[shard]
    mine = place.owner == known.site and place.incarnation == known.incarnation
    if mine and place.epoch > epoch:
        return Duty.TAKE_OVER
    if owned:
        return Duty.OWN if mine and place.heir in ("", known.site) else Duty.RELEASE
    return Duty.FOLLOW if known.site in _sites_of(place) else Duty.NOTHING


def entered(
    document: ClusterDocument, number: int, site: str, incarnation: bytes, address: str, factor: int | None
) -> ClusterDocument:
    """Return the next cluster document, with this number, after a new process of a site has started.

    The document assigns to the process the shards that its site owned before, and replicas of shards that have too few.
    """
    leaving = site in document.sites and document.sites[site].leaving
    sites = {**document.sites, site: Site(address, incarnation, leaving)}
    most = max(document.most_sites, len(document.sites), len(sites))
    document = msgspec.structs.replace(document, sites=sites, most_sites=most)
    wanted = wanted_replicas(document, factor)
    for shard, place in enumerate(document.shards):
        if place.owner in ("", site):
            document = named(document, number, shard, site, incarnation)
        elif site in wanted[shard] and site not in _sites_of(place):
            joining = (*place.joining, site)
            document = _placed(document, shard, msgspec.structs.replace(place, joining=joining))
    return document


def next_document(
    document: ClusterDocument, number: int, known: Known, takeover_after: float, factor: int | None
) -> ClusterDocument | None:
    """Return the cluster's next document, with this number, as a site would create it; None if it needs no change.

    The site names itself the owner of a shard of which it has a replica if the shard's owner seems dead, has released
    the shard, or was an earlier process of the same site. For its own shards whose copy takes no writes, the site names
    another owner. Without such changes, the document takes the next step of the placement plan for all shards.
    """
    changed = document
    for shard, place in enumerate(document.shards):
        if _may_take(document, shard, place, known, takeover_after):
            changed = named(changed, number, shard, known.site, known.incarnation)
        elif (heir := _heir_of_failed(document, shard, place, known, takeover_after)) is not None:
            changed = named(changed, number, shard, heir, document.sites[heir].incarnation)
    if changed is not document:
        return changed
    replicas = wanted_replicas(document, factor)
    alive = {site for site in document.sites if seems_alive(document, site, known, takeover_after)}
    able = [
        _able(shard, some, place.owner, alive, known)
        for shard, (some, place) in enumerate(zip(replicas, document.shards, strict=True))
    ]
    owners = choose_owners([place.owner for place in document.shards], able)
    caught_up = {shard: _caught_up(shard, end, known) & alive for shard, end in known.ends(document).items()}
    return advanced(document, replicas, owners, caught_up)


def _able(shard: int, sites: Sequence[str], owner: str, alive: Collection[str], known: Known) -> list[str]:
    """Return the sites of a shard that may own it. Its current owner may, even with a failed copy or in back-off."""
    may = [site for site in sites if site in alive and (site == owner or not known.has_failed(site, shard))]
    ready = known.ready(may)
    return [site for site in may if site == owner or site in ready] or list(sites)


def abdicated(document: ClusterDocument, number: int, known: Known, takeover_after: float) -> ClusterDocument | None:
    """Return the document in which a site is closed, and other replicas that seem alive own its shards.

    A site that was to leave, and keeps no shard, is removed. Returns None if a later process of the same site has
    entered.
    """
    me = document.sites.get(known.site)
    if me is None or me.incarnation != known.incarnation:
        return None
    if me.leaving and not any(known.site in _sites_of(place) for place in document.shards):
        return _without(document, known.site)
    changed = _with_site(document, known.site, msgspec.structs.replace(me, closed=True))
    for shard, place in enumerate(document.shards):
        others = [
            site
            for site in place.replicas
            if site != known.site
            and _silence(document, site, known, unseen=takeover_after) < takeover_after
            and not known.has_failed(site, shard)
        ]
        others = known.ready([site for site in others if not document.sites[site].leaving] or others)
        if place.owner == known.site and place.incarnation == known.incarnation and others:
            (heir,) = choose_owners([place.heir], [others])
            changed = named(changed, number, shard, heir, document.sites[heir].incarnation)
    return changed


def assigned(document: ClusterDocument, shards: Sequence[int], sites: Sequence[str]) -> ClusterDocument | None:
    """Return the document in which an administrator assigns shards to sites; with no sites, placement chooses them.

    Returns None if the document already says so. Raises `UnknownSiteError`, and `ReplicasRefusedError` for a site that
    is leaving.
    """
    for site in sites:
        _check_known(document, site)
        if document.sites[site].leaving:
            raise ReplicasRefusedError(f"site {site} is leaving the cluster: let it join again before it gets a shard")
    changed = document
    for shard in shards:
        place = msgspec.structs.replace(document.shards[shard], assigned=tuple(dict.fromkeys(sites)))
        changed = _placed(changed, shard, place)
    return None if changed.shards == document.shards else changed


def leaving(document: ClusterDocument, site: str, *, leaves: bool = True) -> ClusterDocument | None:
    """Return the document in which a site ``leaves``, that is, is to keep no shards; with False, the site joins again.

    Returns None if the document already says so. Raises `UnknownSiteError`, and `ReplicasRefusedError` if a shard would
    be left without a site that may keep it.
    """
    _check_known(document, site)
    found = document.sites[site]
    if found.leaving == leaves:
        return None
    changed = _with_site(document, site, msgspec.structs.replace(found, leaving=leaves))
    staying = _staying(changed)
    for shard, place in enumerate(document.shards):
        if leaves and not staying.intersection(place.assigned or document.sites):
            raise ReplicasRefusedError(
                f"site {site} would leave with the last replica of shard {shard}: let another site join, or assign one "
                "to the shard, first"
            )
    return changed


def forgotten(
    document: ClusterDocument, number: int, site: str, known: Known, takeover_after: float
) -> ClusterDocument | None:
    """Return the document, to be created with this number, without a site that is gone for ever.

    Shards that only that site kept go to the site that decides, which copies them from the log store. Raises
    `UnknownSiteError`, and `ReplicasRefusedError` for a site that sends heartbeats.
    """
    _check_known(document, site)
    if seems_alive(document, site, known, takeover_after):
        raise ReplicasRefusedError(
            f"site {site} is running: its last heartbeat is less than {takeover_after:g} s old. Close it first, or let "
            "it leave"
        )
    changed = _without(document, site)
    for shard, place in enumerate(changed.shards):
        if not place.replicas:
            changed = named(changed, number, shard, known.site, known.incarnation)
    return changed


def _check_known(document: ClusterDocument, site: str) -> None:
    if site not in document.sites:
        raise UnknownSiteError(f"there is no site {site!r}; there are {', '.join(sorted(document.sites))}")


def _with_site(document: ClusterDocument, name: str, site: Site) -> ClusterDocument:
    return msgspec.structs.replace(document, sites={**document.sites, name: site})


def _without(document: ClusterDocument, site: str) -> ClusterDocument:
    """Return the document without a site. Of shards that it owns, it stays the owner until another site takes over."""
    sites = {name: one for name, one in document.sites.items() if name != site}
    shards = tuple(
        msgspec.structs.replace(
            place,
            replicas=tuple(one for one in place.replicas if one != site),
            joining=tuple(one for one in place.joining if one != site),
            assigned=tuple(one for one in place.assigned if one != site),
            heir="" if place.heir == site else place.heir,
        )
        for place in document.shards
    )
    return msgspec.structs.replace(document, sites=sites, shards=shards)


def _sites_of(place: ShardPlace) -> tuple[str, ...]:
    return (place.owner, *place.replicas, *place.joining)


def _staying(document: ClusterDocument) -> set[str]:
    return {name for name, site in document.sites.items() if not site.leaving}


def with_generations(
    document: ClusterDocument, change: Callable[[Sequence[GenerationPlan]], Sequence[GenerationPlan]]
) -> ClusterDocument | None:
    """Return the document with other generations; None if ``change`` returns the same ones."""
    generations = tuple(change(document.generations))
    return None if generations == document.generations else msgspec.structs.replace(document, generations=generations)


def _may_take(document: ClusterDocument, shard: int, place: ShardPlace, known: Known, takeover_after: float) -> bool:
    me = known.site
    if known.has_failed(me, shard):
        return False
    if place.owner == me:
        return place.incarnation != known.incarnation or known.lost.get(shard, -1) >= place.epoch
    if me not in place.replicas:
        return False
    if known.released.get(shard, -1) >= place.epoch and place.heir in ("", me):
        return True
    others = [
        site
        for site in place.replicas
        if site == me
        or (site != place.owner and _silence(document, site, known, unseen=takeover_after) < takeover_after)
    ]
    applied = {site: known.applied.get(site, {}).get(shard, 0) for site in known.ready(others)}
    return _silence(document, place.owner, known) >= patience(takeover_after, shard, me, applied)


def _heir_of_failed(
    document: ClusterDocument, shard: int, place: ShardPlace, known: Known, takeover_after: float
) -> str | None:
    """Return the site that is to own a shard which this site owns and can't write; None if there is none.

    A site whose last heartbeat could not be read is excluded: it may have failed too, and would name another in turn.
    """
    if place.owner != known.site or place.incarnation != known.incarnation or not known.has_failed(known.site, shard):
        return None
    others = [
        site
        for site in place.replicas
        if site in document.sites
        and site in known.applied
        and not known.has_failed(site, shard)
        and _silence(document, site, known, unseen=takeover_after) < takeover_after
    ]
    able = {site: known.applied[site].get(shard, 0) for site in known.ready(others)}
    return most_advanced(shard, able) if able else None


def seems_alive(document: ClusterDocument, site: str, known: Known, takeover_after: float) -> bool:
    """Return whether a site has sent a heartbeat within ``takeover_after`` seconds, and was not closed since."""
    return site == known.site or _silence(document, site, known) < takeover_after


def _silence(document: ClusterDocument, site: str, known: Known, *, unseen: float = 0.0) -> float:
    """Return the seconds since a site's last new heartbeat, ``unseen`` if it was not watched yet.

    The result is infinite for a site that was closed or removed.
    """
    found = document.sites.get(site)
    return float("inf") if found is None or found.closed else known.silent.get(site, unseen)


def _caught_up(shard: int, end: int, known: Known) -> frozenset[str]:
    enough = min(end - _NEAR, known.earlier.get(shard, end))
    near = (site for site, applied in known.applied.items() if applied.get(shard, -1) >= enough)
    return frozenset(site for site in near if not known.has_failed(site, shard))


def wanted_replicas(document: ClusterDocument, factor: int | None) -> tuple[tuple[str, ...], ...]:
    """Return the sites that are to keep each shard. ``factor`` is `Cluster.replication_factor`.

    Every site that keeps a shard keeps shard 0 too, because its state has the settings of the database.
    """
    staying = _staying(document) or {*document.sites}
    count = len(staying) if factor is None or len(staying) <= _FEW_SITES else factor
    chosen = choose_replicas([(*place.replicas, *place.joining) for place in document.shards], staying, count)
    wanted = [
        tuple(site for site in place.assigned if site in staying) or some
        for place, some in zip(document.shards, chosen, strict=True)
    ]
    others = sorted({site for some in wanted[1:] for site in some} - {*wanted[0]})
    return ((*wanted[0], *others), *wanted[1:])


def _placed(document: ClusterDocument, shard: int, place: ShardPlace) -> ClusterDocument:
    shards = (*document.shards[:shard], place, *document.shards[shard + 1 :])
    return msgspec.structs.replace(document, shards=shards)
