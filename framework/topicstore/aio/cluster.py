"""`AsyncSite`: a site of a cluster in asyncio."""

from __future__ import annotations

from topicstore.replication.site import Site

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

    info = threaded(Site.info)
    lag = threaded(Site.lag)
