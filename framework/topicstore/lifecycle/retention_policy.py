"""What retention does, and when: settings, and what follows from them for generations of an age. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import attrs

from topicstore.contract.arguments import check_count, check_path
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import time_of
from topicstore.shard.records import GenerationRecord

__all__ = [
    "FOREVER",
    "GenerationAge",
    "RetentionSettings",
    "WhenFull",
    "ages",
    "due",
    "micros",
    "must_rotate",
    "outdated",
]

WhenFull = Literal["refuse", "drop"]

FOREVER = 1 << 64
"""Later, and more bytes, than there will ever be."""
_PARTS = 4
"""Into how many generations an age is divided, unless told otherwise."""
_PARTS_OF_BYTES = 8
"""Into how many generations a number of bytes is divided."""


@attrs.frozen(kw_only=True)
class RetentionSettings:
    """What is kept. Lengths of time are seconds; None: no limit."""

    max_age: float | None = None
    """Messages older than this go."""
    rotate_every: float | None = None
    """A generation is written for so long; by default a quarter of ``max_age``."""
    max_bytes: int | None = None
    """Bytes of values in all generations together."""
    when_full: WhenFull = "refuse"
    """At ``max_bytes``: ``"refuse"`` to store (`QuotaExceededError`), or ``"drop"`` the oldest generations."""
    archive_to: str | None = None
    """Directory of an export to which generations are archived instead of dropped; a relative one lies from the
    database's own."""

    def __attrs_post_init__(self) -> None:
        for name in ("max_age", "rotate_every"):
            seconds = getattr(self, name)
            if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < 1e9):
                raise InvalidArgumentError(f"{name} is a number of seconds above 0, not {seconds!r}")
        if self.max_bytes is not None:
            check_count("max_bytes", self.max_bytes)
        if self.when_full not in get_args(WhenFull):
            raise InvalidArgumentError(f"when_full is one of {', '.join(get_args(WhenFull))}, not {self.when_full!r}")
        if self.archive_to is not None and not isinstance(self.archive_to, str):
            raise InvalidArgumentError(f"archive_to is a path as text, not {self.archive_to!r}")
        if self.archive_to is not None:
            check_path(self.archive_to)

    @property
    def rotation(self) -> int | None:
        """Microseconds after which a generation that has messages is sealed."""
        if self.rotate_every is None:
            return None if self.max_age is None else micros(self.max_age / _PARTS)
        return micros(self.rotate_every)

    @property
    def limited(self) -> bool:
        """Whether there is anything that retention does by itself."""
        return self.rotation is not None or self.drops_bytes is not None

    @property
    def drops_bytes(self) -> int | None:
        """Bytes above which the oldest generations are dropped."""
        return self.max_bytes if self.when_full == "drop" else None


@attrs.frozen(kw_only=True)
class GenerationAge:
    """A generation over all shards. Times are microseconds since the epoch."""

    number: int
    created: int
    ended: int
    """From when on all its messages are older than that; of the current one the present."""
    messages: int
    live_bytes: int
    archived: bool
    """Nothing of it is local, so it counts for no limit on bytes."""


def micros(seconds: float) -> int:
    """Return seconds as whole microseconds, at least one."""
    return max(1, round(seconds * 1e6))


def ages(live: Mapping[int, Sequence[GenerationRecord]], now: int) -> list[GenerationAge]:
    """Return how old the generations are, oldest first, from their records in every shard."""
    found: list[GenerationAge] = []
    latest = now
    for number, records in sorted(live.items(), reverse=True):
        found.append(
            GenerationAge(
                number=number,
                created=max(record.created for record in records),
                ended=max(_ended(record, latest, now) for record in records),
                messages=sum(record.messages for record in records),
                live_bytes=sum(record.live_bytes for record in records),
                archived=all(record.archive is not None for record in records),
            )
        )
        latest = min(latest, found[-1].created)
    return found[::-1]


def _ended(record: GenerationRecord, latest: int, now: int) -> int:
    """Return the time of the newest message of a shard's part of a generation.

    If that lies in the future, the time of its sealing; if that does too, ``latest``, by when another had followed.
    """
    if record.sealed is None or record.last_position is None:
        return now
    return next((time for time in (time_of(record.last_position), record.sealed) if time <= now), latest)


def must_rotate(settings: RetentionSettings, current: GenerationAge, now: int) -> bool:
    """Say whether the current generation is old or large enough. An empty one goes on being used."""
    if not current.messages:
        return False
    every, most = settings.rotation, settings.drops_bytes
    # The distance, because a clock that was wrong may have noted a time in the future.
    old = every is not None and abs(now - current.created) >= every
    return old or (most is not None and current.live_bytes >= most // _PARTS_OF_BYTES)


def outdated(settings: RetentionSettings, generations: Sequence[GenerationAge], now: int) -> list[GenerationAge]:
    """Return the sealed generations that must go: of those that are local, a run of the oldest."""
    oldest = 0 if settings.max_age is None else now - micros(settings.max_age)
    most = settings.drops_bytes
    live = sum(generation.live_bytes for generation in generations)
    gone = []
    for generation in generations[:-1]:
        if generation.ended < oldest or (most is not None and live > most and not generation.archived):
            gone.append(generation)
            live -= generation.live_bytes
        elif not generation.archived:
            break
    return gone


def due(
    settings: RetentionSettings, generations: Sequence[GenerationAge], now: int, held_back: int, written: int
) -> tuple[int, int]:
    """Return in how many microseconds, or with how many bytes written, something may have to be done about these."""
    waits = [FOREVER]
    current, oldest = generations[-1], generations[0]
    if settings.rotation is not None:
        waits.append((min(current.created - now, 0) if current.messages else 0) + settings.rotation)
    if settings.max_age is not None and oldest is not current:
        waits.append(oldest.ended + micros(settings.max_age) + 1 - (now - held_back))
    most = settings.drops_bytes
    if most is None:
        return min(waits), FOREVER
    live = sum(generation.live_bytes for generation in generations)
    return min(waits), written + max(0, min(most - live, most // _PARTS_OF_BYTES - current.live_bytes))
