"""`AsyncSite`: a site of a cluster in asyncio."""

from __future__ import annotations

from topicstore.replication.site import ShardOwner, Site

from .face import Face, threaded

__all__ = ["AsyncSite"]


class AsyncSite(Face[Site]):
    """The site of this process in a cluster, as `AsyncDatabase.cluster` returns it."""

    @property
    def name(self) -> str:
        """The site's name in the cluster."""
        return self._find().name

    @property
    def failure(self) -> str | None:
        """The error of the background thread's last round of heartbeats and takeovers; None if the round succeeded."""
        return self._find().failure

    @property
    def ended(self) -> str | None:
        """The reason why this process has stopped taking part in the cluster; None while it does."""
        return self._find().ended

    forget = threaded(Site.forget)

    def owns(self, shard: int) -> bool:
        """Return whether this site owns a shard, that is, orders the shard's writes."""
        return self._find().owns(shard)

    def owner(self, shard: int) -> ShardOwner | None:
        """Return the other site that owns a shard; None if no other site does."""
        return self._find().owner(shard)

    info = threaded(Site.info)
    join = threaded(Site.join)
    lag = threaded(Site.lag)
    leave = threaded(Site.leave)
    set_replicas = threaded(Site.set_replicas)
