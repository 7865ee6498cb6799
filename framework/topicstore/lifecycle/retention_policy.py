"""The settings of retention, and the decisions that follow from them for generations of given ages. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import attrs

from topicstore.contract.arguments import Length, byte_count, check_count, check_path, seconds
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.positions import time_of
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord

__all__ = [
    "FOREVER",
    "OTHER",
    "GenerationAge",
    "RetentionSettings",
    "Rule",
    "WhenFull",
    "ages",
    "due",
    "going",
    "is_emptied",
    "micros",
    "must_rotate",
    "outdated",
    "rules",
]

WhenFull = Literal["refuse", "drop"]

FOREVER = 1 << 64
"""A time, or a number of bytes, that is never reached."""
OTHER = ""
"""The name for messages that no filter matches. It is not a filter."""
_PARTS = 4
"""Number of generations into which an age is divided by default."""
_PARTS_OF_BYTES = 8
"""Number of generations into which a number of bytes is divided."""


def _lengths(filters: Mapping[str, Length | None] | None) -> dict[str, float | None]:
    if filters is not None and not isinstance(filters, Mapping):
        raise InvalidArgumentError(f"filters is a mapping of filters to lengths of time, not {filters!r}")
    return {name: seconds(length) for name, length in (filters or {}).items()}


@attrs.frozen(kw_only=True)
class RetentionSettings:
    """The settings of retention. None: no limit.

    Durations are in seconds, and may be given as `datetime.timedelta` or as text, ``"30d"`` or ``"1d12h"``; bytes may
    be given as text, ``"10GB"``. The text ``"infinity"`` is None.
    """

    max_age: float | None = attrs.field(default=None, converter=seconds)
    """Age after which messages are removed if no filter matches them."""
    rotate_every: float | None = attrs.field(default=None, converter=seconds)
    """Age at which the current generation is sealed, and the next begins; by default a quarter of ``max_age``."""
    max_bytes: int | None = attrs.field(default=None, converter=byte_count)
    """Largest number of bytes of values in all generations together."""
    when_full: WhenFull = "refuse"
    """At ``max_bytes``: ``"refuse"`` to store (`QuotaExceededError`), or ``"drop"`` the oldest generations."""
    archive_to: str | None = None
    """Directory of an export to which generations are archived instead of dropped; a relative path starts at the
    database's directory."""
    filters: Mapping[str, float | None] = attrs.field(factory=dict, converter=_lengths)
    """By topic filter, the age after which matching messages are removed, instead of ``max_age``; None: never. If
    several filters match a message, the longest time applies."""
    delivered: float | None = attrs.field(default=None, converter=seconds)
    """Age after which messages that are stored only for sessions are removed, once no session needs them, in a cluster
    no session on any site (`topicstore.sessions.delivered_removal`). None: they stay like all others.
    `topicstore.server` sets ten minutes."""

    def __attrs_post_init__(self) -> None:
        lengths = {"max_age": self.max_age, "rotate_every": self.rotate_every, "delivered": self.delivered}
        lengths |= {f"filters[{TopicFilter(name).text!r}]": length for name, length in self.filters.items()}
        for name, length in lengths.items():
            if length is not None and (type(length) not in (int, float) or not 0 < length < 1e9):
                raise InvalidArgumentError(f"{name} is a duration above 0, such as '30d' or seconds, not {length!r}")
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
        """Whether the settings require work in the background."""
        return self.rotation is not None or self.drops_bytes is not None or bool(rules(self))

    @property
    def ages(self) -> list[float | None]:
        """The ages of removal in seconds: first of messages that no filter matches, then of the filters."""
        return [self.max_age, *self.filters.values()]

    @property
    def whole_age(self) -> int | None:
        """Microseconds after which all messages of a generation are too old, whatever their topics; None: never.

        An archived generation stays readable as a whole, so with ``archive_to`` only ``max_age`` counts.
        """
        lengths = [self.max_age] if self.archive_to is not None else self.ages
        if any(length is None for length in lengths):
            return None
        return max(micros(length) for length in lengths if length is not None)

    @property
    def longest_age(self) -> int:
        """The longest age of removal in microseconds; `FOREVER` if there is none."""
        return max((micros(length) for length in self.ages if length is not None), default=FOREVER)

    @property
    def drops_bytes(self) -> int | None:
        """Bytes above which the oldest generations are dropped."""
        return self.max_bytes if self.when_full == "drop" else None


@attrs.frozen
class Rule:
    """A rule by which messages are deleted before their generation is dropped."""

    matches: str | None
    """The filter of the rule; None: it applies to messages that no filter matches."""
    age: int
    """Age in microseconds after which the messages are deleted."""
    spare: tuple[str, ...]
    """The filters whose messages stay longer."""

    @property
    def name(self) -> str:
        """The filter, or `OTHER`."""
        return OTHER if self.matches is None else self.matches


def rules(settings: RetentionSettings) -> list[Rule]:
    """Return the rules that delete messages before their generation is dropped, because other messages stay longer."""
    whole, filters = settings.whole_age, settings.filters
    found = []
    for name, length in filters.items():
        if length is not None and (whole is None or micros(length) < whole):
            longer = [one for one, other in filters.items() if other is None or other > length]
            found.append(Rule(name, micros(length), tuple(sorted(longer))))
    if filters and settings.max_age is not None and (whole is None or micros(settings.max_age) < whole):
        found.append(Rule(None, micros(settings.max_age), tuple(sorted(filters))))
    return found


@attrs.frozen(kw_only=True)
class GenerationAge:
    """The age of a generation over all shards. Times are microseconds since the epoch."""

    number: int
    created: int
    ended: int
    """The time of its newest message; for the current generation, the current time."""
    messages: int
    live_bytes: int
    archived: bool
    """Whether the parts of all shards are archived, so that the limit on bytes doesn't count it."""


def micros(seconds: float) -> int:
    """Convert seconds to whole microseconds, at least one."""
    return max(1, round(seconds * 1e6))


def ages(live: Mapping[int, Sequence[GenerationRecord]], now: int) -> list[GenerationAge]:
    """Return the ages of the generations, oldest first, from their records in all shards."""
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

    If that is in the future, return the time of its sealing; if that is in the future too, ``latest``, by which the
    next generation had begun.
    """
    if record.sealed is None or record.last_position is None:
        return now
    return next((time for time in (time_of(record.last_position), record.sealed) if time <= now), latest)


def must_rotate(settings: RetentionSettings, current: GenerationAge, now: int) -> bool:
    """Return whether the current generation is old or large enough to be sealed. An empty generation isn't sealed."""
    if not current.messages:
        return False
    every, most = settings.rotation, settings.drops_bytes
    # The absolute difference, because a wrong clock may have recorded a time in the future.
    old = every is not None and abs(now - current.created) >= every
    return old or (most is not None and current.live_bytes >= most // _PARTS_OF_BYTES)


def outdated(settings: RetentionSettings, generations: Sequence[GenerationAge], now: int) -> list[GenerationAge]:
    """Return the sealed generations to remove: the oldest ones beyond a limit, and emptied generations."""
    age = settings.whole_age
    oldest = 0 if age is None else now - age
    most = settings.drops_bytes
    live = sum(generation.live_bytes for generation in generations)
    gone, in_turn = [], True
    for generation in generations[:-1]:
        too_much = most is not None and live > most and not generation.archived
        if (in_turn and (generation.ended < oldest or too_much)) or is_emptied(settings, generation):
            gone.append(generation)
            live -= generation.live_bytes
        elif not generation.archived:
            in_turn = False
    return gone


def going(
    settings: RetentionSettings, generations: Sequence[GenerationAge], now: int, newest: int
) -> list[GenerationAge]:
    """Return the generations that a run would drop or archive, among them the current one if the run would seal it.

    newest: the time of the newest message.
    """
    there = [one for one in generations if not (one.archived and settings.archive_to is not None)]
    current = generations[-1]
    if must_rotate(settings, current, now):
        sealed = attrs.evolve(current, ended=min(newest, now))
        there = [*there[:-1], sealed, attrs.evolve(current, created=now, ended=now, messages=0, live_bytes=0)]
    return outdated(settings, there, now)


def is_emptied(settings: RetentionSettings, generation: GenerationAge) -> bool:
    """Return whether retention by filters has deleted all messages of a sealed generation."""
    return bool(settings.filters) and not generation.messages and not generation.archived


def due(
    settings: RetentionSettings, generations: Sequence[GenerationAge], now: int, held_back: int, written: int
) -> tuple[int, int]:
    """Return the microseconds from now, and the number of bytes written, after which the next run may be due."""
    if not generations:
        return FOREVER, FOREVER
    waits = [FOREVER]
    current, oldest = generations[-1], generations[0]
    if settings.rotation is not None:
        waits.append((min(current.created - now, 0) if current.messages else 0) + settings.rotation)
    if settings.whole_age is not None and oldest is not current:
        waits.append(oldest.ended + settings.whole_age + 1 - (now - held_back))
    most = settings.drops_bytes
    if most is None:
        return min(waits), FOREVER
    live = sum(generation.live_bytes for generation in generations)
    return min(waits), written + max(0, min(most - live, most // _PARTS_OF_BYTES - current.live_bytes))
