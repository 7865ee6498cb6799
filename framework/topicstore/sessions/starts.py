"""Where a subscription begins: from now on, at a time, or after a place."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.places import Place
from topicstore.contract.positions import first_position
from topicstore.contract.times import Time
from topicstore.pubsub.hub import Hub

__all__ = ["START_PROPERTY", "Start", "places_of"]

START_PROPERTY = "topicstore-start"
"""The MQTT 5 user property of a SUBSCRIBE that asks for a replay. Its value can be passed on as a `Start`."""

Start = Time | Mapping[int, int] | None
"""Where a subscription begins. None: from now on. A time, inclusive, as `Database.replay` takes it; 0: the beginning;
one after the newest message, also in the future, is from now on. A `topicstore.Place`, or by shard the position after
which to begin; shards that are left out begin at 0. Or text: ``now``, which is from now on, ``beginning``, a time as
`Database.replay` takes it, or a place as text, with the database's id, or without it as in
``0:3481600000000,1:3481600002048``."""

_PLACE = re.compile(r"[0-9a-f]{32}(-[0-9a-f]+)+")
_POSITIONS = re.compile(r"[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*")


def places_of(start: Start, marks: list[int], hub: Hub, instant: Callable[[Time], int]) -> list[int]:
    """Return, by shard, the position up to which a subscription with this start has nothing to deliver.

    Raises `InvalidArgumentError`, and `WrongDatabaseError` for a place of another database.

    marks:   the shards' watermarks.
    instant: returns a time as microseconds since the epoch.
    """
    if isinstance(start, str):
        start = _parsed(start.strip())
    if start is None:
        return marks
    if isinstance(start, Mapping):
        return hub.after(start)
    try:
        before = max(first_position(instant(start)) - 1, 0)
    except InvalidArgumentError as bad:
        raise InvalidArgumentError(f"start: {bad}") from bad
    # What a shard stores from now on may have an earlier time: the clock is set back at times.
    return [min(before, last) for last in hub.last_positions()]


def _parsed(text: str) -> Start:
    """Return the start that a word or the text of a place stands for; return other text unchanged."""
    if text == "now":
        return None
    if text == "beginning":
        return 0
    if _PLACE.fullmatch(text):
        return Place.parse(text)
    if _POSITIONS.fullmatch(text):
        return {int(shard): int(position) for shard, _, position in (pair.partition(":") for pair in text.split(","))}
    return text
