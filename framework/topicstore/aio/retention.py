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
        """Load the settings. Call this in a thread, because it may read from the database."""
        super().__init__(threads, lambda: retention, of)
        self._retention = retention
        self._retention.settings  # noqa: B018 - loads the settings, which stay in memory

    @property
    def failure(self) -> str | None:
        """The error message of the last run in the background; None if the run succeeded."""
        return self._retention.failure

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the clock has jumped ahead, as found by the last run; they don't count as elapsed time."""
        return self._retention.clock_ahead

    @property
    def settings(self) -> RetentionSettings:
        """The current retention settings; by default all messages are kept."""
        return self._retention.settings

    was_set = threaded(Retention.was_set)
    set = threaded(Retention.set)
    run = threaded(Retention.run)
    outlook = threaded(Retention.outlook)
    start = threaded(Retention.start)
    stop = threaded(Retention.stop)
