"""Jobs that become due as messages are stored, such as compaction, retention and counting.

Each says at which number of messages or bytes, or at which time, it is due. A store adds to the numbers, compares them,
and calls the jobs that are due, which wake a thread of their own.
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
    """One job. It may change when it is due at any time, from any thread: a stale number only delays it by a store."""

    __slots__ = ("bytes", "call", "messages", "time")

    def __init__(self, call: Callable[[], object], messages: int, size: int, time: int) -> None:
        self.call = call
        """A function that is called after each store while the job is due. It is quick, and sets the next time."""
        self.messages = messages
        """The value of `BackgroundJobs.messages` from which on it is due."""
        self.bytes = size
        """The bytes of values written since the opening from which on it is due."""
        self.time = time
        """The monotonic time, in microseconds, from which on it is due."""


class BackgroundJobs:
    """The jobs of one open database. They are added while it is opened, which needs no lock."""

    def __init__(self, shards: Sequence[Shard], monotonic: Callable[[], int]) -> None:
        self.messages = 0
        """The approximate number of messages stored. It needs no lock, because a lost count only delays a job."""
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
        """Call the jobs that are due, after so many messages were stored."""
        self.messages += messages
        written, now = written_bytes(self._shards), self._monotonic()
        for job in self._jobs:
            if self.messages >= job.messages or written >= job.bytes or now >= job.time:
                job.call()
