"""`AsyncSite`: a site of a cluster in asyncio."""

from __future__ import annotations

from topicstore.replication.site import ShardOwner, Site

from .face import Face, threaded

__all__ = ["AsyncSite"]


class AsyncSite(Face[Site]):
    """The process as a site of a cluster, as `AsyncDatabase.cluster` returns it."""

    @property
    def name(self) -> str:
        """The site's name in the cluster."""
        return self._find().name

    @property
    def failure(self) -> str | None:
        """The error of the last round of the site's thread; None if it succeeded."""
        return self._find().failure

    @property
    def ended(self) -> str | None:
        """The reason why this process has stopped taking part in the cluster; None while it does."""
        return self._find().ended

    forget = threaded(Site.forget)

    def owns(self, shard: int) -> bool:
        """Return whether this site owns a shard."""
        return self._find().owns(shard)

    def owner(self, shard: int) -> ShardOwner | None:
        """Return the other site that owns a shard; None if there is none."""
        return self._find().owner(shard)

    info = threaded(Site.info)
    join = threaded(Site.join)
    lag = threaded(Site.lag)
    leave = threaded(Site.leave)
    set_replicas = threaded(Site.set_replicas)
