"""`ClusterInfo`: the sites of a cluster and the replicas of its shards, as `Site.info` reports them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from . import duties
from .duties import Known
from .objects import ClusterDocument

__all__ = ["ClusterInfo", "ShardInfo", "SiteInfo", "cluster_info"]


@attrs.frozen(kw_only=True)
class SiteInfo:
    """A site of a cluster."""

    name: str
    address: str
    """The site's `Cluster.address`; empty if it has none."""
    beats: bool
    """Whether the site has created a heartbeat within `Cluster.takeover_after`, as seen from the site that reports.

    Immediately False for a site that was closed.
    """
    leaving: bool
    """Whether the site is to keep no shards (`Site.leave`)."""
    back_off: float
    """Remaining back-off in seconds, counted from the site's last heartbeat; 0 without one.

    A site backs off after a write of one of its copies has failed: the other sites take shards over first. Its first
    back-off lasts `Cluster.takeover_after`, each following one twice as long, up to 256 times that. The length starts
    anew once a site has had no failure for the longest one. Shards that no other site can write are not affected.
    """
    incarnation: str
    """Hexadecimal digits that identify the site's last process."""


@attrs.frozen(kw_only=True)
class ShardInfo:
    """A shard of a cluster, and the sites that keep it. Names of sites are in no particular order."""

    shard: int
    owner: str
    """The site that writes the shard; empty while the shard has no owner."""
    epoch: int
    """The number of the cluster document that named the owner; 0 while the shard has no owner."""
    replicas: tuple[str, ...]
    """The sites that have a copy of the shard, including the owner and the sites in `leaving`."""
    joining: tuple[str, ...]
    """The sites that receive a copy at the moment, and are not among the replicas yet."""
    leaving: tuple[str, ...]
    """The replicas that will release their copy, once the joining sites have caught up."""
    failed: tuple[str, ...]
    """The replicas that take no writes since one failed, until `Database.recover` succeeds there.

    If the owner is among them, another site takes over; without such a site, the shard takes no writes.
    """
    applied: Mapping[str, int]
    """For each site that has reported it in its last heartbeat, the number of log entries that it has applied."""


@attrs.frozen(kw_only=True)
class ClusterInfo:
    """A cluster as one of its sites sees it: the current document and the last heartbeats."""

    site: str
    """The name of the site that reports."""
    database: str
    """The database's id as hexadecimal digits, the same on all sites."""
    document: int
    """The number of the cluster document; later documents have higher numbers."""
    sites: tuple[SiteInfo, ...]
    """All sites, by name."""
    shards: tuple[ShardInfo, ...]
    """All shards, by number."""


def cluster_info(
    number: int, document: ClusterDocument, known: Known, takeover_after: float, factor: int | None
) -> ClusterInfo:
    """Return the description of a cluster from a document, its number, and the heartbeats that a site knows."""
    wanted = duties.wanted_replicas(document, factor)
    return ClusterInfo(
        site=known.site,
        database=document.database.hex(),
        document=number,
        sites=tuple(
            SiteInfo(
                name=name,
                address=site.address,
                beats=duties.seems_alive(document, name, known, takeover_after),
                leaving=site.leaving,
                back_off=known.back_offs.get(name, 0.0),
                incarnation=site.incarnation.hex(),
            )
            for name, site in sorted(document.sites.items())
        ),
        shards=tuple(
            ShardInfo(
                shard=shard,
                owner=place.owner,
                epoch=place.epoch,
                replicas=place.replicas,
                joining=place.joining,
                leaving=tuple(site for site in place.replicas if site not in wanted[shard]),
                failed=tuple(site for site in place.replicas if known.has_failed(site, shard)),
                applied={
                    site: applied[shard]
                    for site, applied in sorted(known.applied.items())
                    if shard in applied and site in (*place.replicas, *place.joining)
                },
            )
            for shard, place in enumerate(document.shards)
        ),
    )
