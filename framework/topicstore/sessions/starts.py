"""The start of a subscription: now, at a time, or after a place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.places import Place
from topicstore.contract.times import Time
from topicstore.pubsub.hub import Hub
from topicstore.runtime.warning import warn_caller

__all__ = ["START_PROPERTY", "Start", "places_of", "reached"]

START_PROPERTY = "topicstore-start"
"""The MQTT 5 user property of a SUBSCRIBE that asks for a replay. Its value can be passed on as a `Start`."""

Start = Time | Mapping[int, int] | None
"""The start of a subscription. None: only messages published from now on. A time, inclusive, in a form that
`Database.replay` accepts; 0: the beginning; a time after the newest message, also in the future, means from now on. A
`topicstore.Place`, or by shard the position after which to begin; shards that are left out begin at 0. Or text:
``now``, ``beginning``, a time that `Database.replay` accepts, or a place as text, with the database's id, or without it
as in ``0:3481600000000,1:3481600002048``."""

_PLACE = re.compile(r"[0-9a-f]{32}(-[0-9a-f]+)+")
_POSITIONS = re.compile(r"[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*")


def places_of(start: Start, marks: list[int], hub: Hub, instant: Callable[[Time], int]) -> list[int]:
    """Return, by shard, the position after which a subscription with this start begins.

    Raises `InvalidArgumentError`, `WrongDatabaseError` for a place of another database, and `PlaceAheadError` for a
    place after the end of a shard, whose messages this database has lost.

    marks:   the shards' watermarks.
    instant: converts a time to microseconds since the epoch.
    """
    if isinstance(start, str):
        start = _parsed(start.strip())
    if start is None:
        return marks
    if isinstance(start, Mapping):
        return hub.after(start)
    try:
        time = instant(start)
    except InvalidArgumentError as bad:
        raise InvalidArgumentError(f"start: {bad}") from bad
    return hub.before(time)


def reached(places: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return stored places, by shard, limited to the ends of the shards; warn if a place lies after a shard's end.

    Then the shard has lost messages. No error is raised, because no caller could choose another place. The warning
    names no session, so that Python shows it once.
    """
    ahead = [shard for shard, (place, end) in enumerate(zip(places, ends, strict=True)) if place > end]
    if ahead:
        with suppress(UserWarning):  # where warnings are errors, sessions are opened nevertheless
            warn_caller(
                f"sessions stood after the end of shards {', '.join(map(str, ahead))}: the database has lost messages "
                "that they had been sent, as in a power failure. They go on at the end, and may miss what was stored "
                "since",
                UserWarning,
            )
    return list(map(min, places, ends))


def _parsed(text: str) -> Start:
    """Parse ``now``, ``beginning`` or a place; return other text unchanged."""
    if text == "now":
        return None
    if text == "beginning":
        return 0
    if _PLACE.fullmatch(text):
        return Place.parse(text)
    if _POSITIONS.fullmatch(text):
        return {int(shard): int(position) for shard, _, position in (pair.partition(":") for pair in text.split(","))}
    return text
