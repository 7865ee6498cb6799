"""`AsyncRetention`: limits on the age and the bytes of messages, in asyncio."""

from __future__ import annotations

from topicstore.lifecycle.retention import Retention
from topicstore.lifecycle.retention_policy import RetentionSettings

from .face import Face, threaded
from .threads import Threads

__all__ = ["AsyncRetention"]


class AsyncRetention(Face[Retention]):
    """The retention of one database, as returned by `AsyncDatabase.retention`; see `Retention`."""

    def __init__(self, threads: Threads, retention: Retention, of: object) -> None:
        """Create it in a thread, because this may read the settings."""
        super().__init__(threads, lambda: retention, of)
        self._retention = retention
        self._retention.settings  # noqa: B018 - from here on it is in memory

    @property
    def failure(self) -> str | None:
        """Why the last run in the background failed; None if it did not."""
        return self._retention.failure

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the clock has jumped ahead according to the last run; they don't count as passed."""
        return self._retention.clock_ahead

    @property
    def settings(self) -> RetentionSettings:
        """The current settings; by default everything is kept."""
        return self._retention.settings

    set = threaded(Retention.set)
    run = threaded(Retention.run)
    outlook = threaded(Retention.outlook)
    start = threaded(Retention.start)
    stop = threaded(Retention.stop)
