"""Message expiry: the remaining seconds in which messages may be delivered (MQTT 5, section 3.3.2.3.3).

The interval is measured by the wall clock from the time of receipt, which is the time of the message's position. In a
database of ``timestamps="message"`` that is the message's own time, because the time of receipt isn't stored. Even with
wrong clocks, the remaining interval is never above the published one [MQTT-3.3.2-6], and never below 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.model import Message, Properties
from topicstore.contract.positions import COUNTER_BITS, Positions

__all__ = ["Expiry", "left_of", "seconds_left"]

_SECOND = 1_000_000
"""Microseconds."""
_NEVER = (1 << 63) - 1


def seconds_left(interval: int, since: int, now: int) -> int:
    """Return the seconds until an interval that began at ``since`` is over, rounded up, from 0 to ``interval``."""
    return min(max(interval - (now - since) // _SECOND, 0), interval)


def left_of(message: Message, since: int, now: int) -> int | None:
    """Return the remaining seconds of a message received at ``since``; None if the message never expires."""
    interval = None if message.properties is None else message.properties.message_expiry_interval
    return None if interval is None else seconds_left(interval, since, now)


@attrs.frozen
class Expiry:
    """The expiry of the messages of a batch, by row."""

    ends: npt.NDArray[np.int64]
    """The times in microseconds since the epoch after which the messages aren't delivered."""
    _intervals: npt.NDArray[np.int64]

    @classmethod
    def of(cls, properties: Any, positions: Positions) -> Expiry | None:
        """Return the expiry of messages, given as columns; None if no message expires."""
        if isinstance(properties, Constant) and _interval_of(properties.value) is None:
            return None
        found: Iterable[Properties | None] = to_iterable(properties)
        intervals = [-1 if interval is None else interval for interval in map(_interval_of, found)]
        if max(intervals, default=-1) < 0:
            return None
        column = np.array(intervals, np.int64)
        times = (positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
        return cls(np.where(column < 0, _NEVER, times + column * _SECOND), column)

    def left(self, rows: slice | npt.NDArray[np.intp], now: int) -> list[int | None]:
        """Return the remaining expiry intervals of these rows in seconds; None for messages that never expire."""
        intervals = self._intervals[rows]
        left = np.clip(-((now - self.ends[rows]) // _SECOND), 0, intervals)
        return [
            None if interval < 0 else some for interval, some in zip(intervals.tolist(), left.tolist(), strict=True)
        ]


def _interval_of(properties: Properties | None) -> int | None:
    return None if properties is None else properties.message_expiry_interval
