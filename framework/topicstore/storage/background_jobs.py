"""Background jobs that become due as messages are stored, such as compaction, retention and counting.

Each job has a number of messages, a number of bytes and a time at which it is due. Each store updates the counters and
calls the jobs that are due, which wake their own threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from topicstore.shard.shard import Shard

from .quota import written_bytes

__all__ = ["NEVER", "BackgroundJob", "BackgroundJobs"]

NEVER = sys.maxsize
"""A number of messages or bytes, or a time, that is never reached."""


class BackgroundJob:
    """One job. Any thread may change its thresholds without a lock: a stale value only delays the job by one store."""

    __slots__ = ("bytes", "call", "messages", "time")

    def __init__(self, call: Callable[[], object], messages: int, size: int, time: int) -> None:
        self.call = call
        """A function that is called after each store while the job is due. It must be quick, and set new thresholds."""
        self.messages = messages
        """The value of `BackgroundJobs.messages` from which the job is due."""
        self.bytes = size
        """The number of bytes written since the opening (`written_bytes`) from which the job is due."""
        self.time = time
        """The monotonic time, in microseconds, from which the job is due."""


class BackgroundJobs:
    """The jobs of one open database. They are added while it is opened, which needs no lock."""

    def __init__(self, shards: Sequence[Shard], monotonic: Callable[[], int]) -> None:
        self.messages = 0
        """The approximate number of messages stored. No lock is needed, because a lost count only delays a job."""
        self._shards = shards
        self._monotonic = monotonic
        self._jobs: list[BackgroundJob] = []

    def add(
        self, call: Callable[[], object], *, messages: int = NEVER, size: int = NEVER, time: int = NEVER
    ) -> BackgroundJob:
        """Add a job that is due at a number of messages, at a number of bytes (``size``) or at a time."""
        job = BackgroundJob(call, messages, size, time)
        self._jobs.append(job)
        return job

    def stored(self, messages: int) -> None:
        """Count stored messages, and call the jobs that are due."""
        stored = self.messages = self.messages + messages
        written, now = written_bytes(self._shards), self._monotonic()
        for job in self._jobs:
            if stored >= job.messages or written >= job.bytes or now >= job.time:
                job.call()
