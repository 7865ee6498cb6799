"""Which sites seem to be alive, told from the numbers of their beats and one's own monotonic clock.

A site creates one beat after the other, so one listing tells the numbers of all sites, without reading any. Nothing but
the choice of the moment to take over rests on this: no clock of two sites is compared, and a wrong suspicion costs time
only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from .owning import Answer
from .placement import rank

__all__ = ["BeatCame", "Silences", "after_beat", "patience"]


class BeatCame(enum.Enum):
    """What the creation of a beat came to."""

    NEXT = enum.auto()
    """It is there; the next has the number after it."""
    AGAIN = enum.auto()
    """Nobody knows."""
    REPLACED = enum.auto()
    """Another process runs with the site's id, and began later: this one must end."""


def after_beat(incarnation: bytes, answer: Answer, found: bytes | None) -> BeatCame:
    """Say what to do after the creation of a beat; ``found`` is the incarnation in one that has its number already.

    A process begins behind the highest beat of its site. So of two with one id the older meets the newer's beat.
    """
    if answer is Answer.CREATED or found == incarnation:
        return BeatCame.NEXT
    return BeatCame.AGAIN if answer is Answer.NONE or found is None else BeatCame.REPLACED


class Silences:
    """For how long each site's beats have stood still."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, beats: Mapping[str, int], now: float) -> dict[str, float]:
        """Take note of the highest beat of each site; return the seconds since each was first seen to have it.

        ``now`` is the time of one's own monotonic clock, in seconds. A site seen for the first time has just moved.
        """
        self._seen = {
            site: self._seen[site] if site in self._seen and self._seen[site][0] == number else (number, now)
            for site, number in beats.items()
        }
        return {site: now - since for site, (_, since) in self._seen.items()}


def patience(takeover_after: float, shard: int, site: str, applied: Mapping[str, int]) -> float:
    """Return the seconds of silence after which a replica takes over from an owner.

    ``applied`` says how far each replica was by its last beat. The one that is furthest waits ``takeover_after``; each
    of the others a quarter more than the one before it, so that seldom two try at once.
    """
    order = sorted(applied, key=lambda one: (-applied[one], -rank(shard, one)))
    turn = order.index(site) if site in order else len(order)
    return takeover_after * (1 + turn / 4)
