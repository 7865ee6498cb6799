"""Failure detection by the numbers of the sites' heartbeats and the local monotonic clock; back-off after failures.

A site numbers its heartbeats, so one listing shows the latest heartbeat of every site without reading objects. A new
process of a site is watched from the document in which it enters, before its first heartbeat.
The result only decides when a site tries to take over. Clocks of different sites are never compared, and a wrong
suspicion costs time only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from threading import Lock

from .placement import rank

__all__ = ["BackOff", "OwnersProgress", "Silences", "most_advanced", "patience"]

_LONGEST_BACK_OFF = 256
"""The longest back-off, in multiples of the first one."""


class Silences:
    """Measures the time since each site's last new heartbeat, or since its process entered the cluster."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[tuple[bytes, int], float]] = {}

    def look(self, beats: Mapping[str, tuple[bytes, int]], now: float) -> dict[str, float]:
        """Record the incarnation and last heartbeat's number of each site; return the seconds since either changed.

        ``now`` is the time of the local monotonic clock, in seconds. A site that is seen for the first time gets 0.
        """
        self._seen = {
            site: self._seen[site] if site in self._seen and self._seen[site][0] == beat else (beat, now)
            for site, beat in beats.items()
        }
        return {site: now - since for site, (_, since) in self._seen.items()}


class OwnersProgress:
    """Remembers the progress that the owners of the shards have reported, until it is some seconds old.

    A follower asks for new entries once in a poll interval, and other sites read its progress a heartbeat later. So a
    follower that keeps up with a fast owner is thousands of entries behind the owner's last heartbeat, but not behind
    the owner's heartbeat of some seconds ago.
    """

    def __init__(self, age: float) -> None:
        self._age = age
        self._reported: deque[tuple[float, Mapping[int, int]]] = deque()

    def look(self, reported: Mapping[int, int], now: float) -> Mapping[int, int]:
        """Record the index that each shard's owner has reported; return those recorded ``age`` seconds ago.

        ``now`` is the time of the local monotonic clock, in seconds. The latest report of at least this age is
        returned. The result is empty if there is none, or if it is more than twice as old.
        """
        self._reported.append((now, reported))
        while len(self._reported) > 1 and now - self._reported[1][0] >= self._age:
            self._reported.popleft()
        when, earlier = self._reported[0]
        return earlier if self._age <= now - when <= 2 * self._age else {}


class BackOff:
    """Exponential back-off of this site after failed writes, during which the other sites take shards over first.

    An engine that fails, recovers and fails again would otherwise move its shards each time. The first back-off lasts
    ``first`` seconds, and each following one twice as long, up to 256 times ``first``. A back-off begins when the last
    failed copy has recovered. After a back-off and 256 times ``first`` seconds more without a failure, the length
    starts from ``first`` again. Thread-safe.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._lock = Lock()
        self._failed = False
        self._length = 0.0
        """The length of the current or last back-off in seconds; 0 before the first failure."""
        self._began = 0.0
        """The time at which the last failure was over."""

    def look(self, failed: bool, now: float) -> float:
        """Record whether a copy is failed; return the remaining seconds of the back-off.

        While a copy is failed, the whole length remains. ``now`` is the time of the local monotonic clock, in seconds.
        """
        with self._lock:
            longest = self._first * _LONGEST_BACK_OFF
            if failed and not self._failed:
                quiet = now - self._began - self._length >= longest
                self._length = self._first if quiet or not self._length else min(2 * self._length, longest)
            if failed:
                self._began = now
            self._failed = failed
            return max(self._began + self._length - now, 0.0)


def patience(takeover_after: float, shard: int, site: str, applied: Mapping[str, int]) -> float:
    """Return the seconds without a heartbeat of the owner after which a replica takes over.

    ``applied`` is the log index that each replica reported in its last heartbeat. The most advanced replica waits
    ``takeover_after`` seconds; each following one waits a quarter more, so that two rarely try at the same time.
    """
    order = _order(shard, applied)
    turn = order.index(site) if site in order else len(order)
    return takeover_after * (1 + turn / 4)


def most_advanced(shard: int, applied: Mapping[str, int]) -> str:
    """Return the replica that takes over from an owner whose copy takes no writes. ``applied``: see `patience`."""
    return _order(shard, applied)[0]


def _order(shard: int, applied: Mapping[str, int]) -> list[str]:
    return sorted(applied, key=lambda one: (-applied[one], -rank(shard, one)))
