"""`KeptRows`: what tally tables count of a filter's messages, kept in memory for later calls.

Each row says how many messages lie between two times. The tables of many topics take seconds to read, and a histogram
of the same filter is asked for again whenever somebody looks at another time. A table never changes but by deletes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore.contract.topics import TopicFilter
from topicstore.shard.shard import Shard
from topicstore.shard.tallies import Tally
from topicstore.shard.tally_records import TallyRange

__all__ = ["MOST_ROWS", "KeptRows", "Rows", "times_of"]

Numbers = npt.NDArray[np.float64]
Rows: TypeAlias = tuple[Numbers, Numbers, Numbers]
"""The times of the first and the last message of each row, in microseconds since the epoch, and their number."""
MOST_ROWS = 2_000_000
"""The most rows that are kept, of 24 bytes each; those that were not asked for the longest go first."""
_Key = tuple[int, int, str]
"""A shard, a generation, and a filter."""


class KeptRows:
    """The rows of one open database. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[_Key, tuple[int, dict[TallyRange, Rows]]] = {}
        """With the number of messages that had been deleted in the shard before. It is in order of use."""
        self._firsts: dict[tuple[int, int], tuple[int, float]] = {}
        """The same number, and the time of the first message, by shard and generation."""

    def of(self, shard: Shard, generation: int, topic_filter: TopicFilter) -> tuple[tuple[TallyRange, ...], list[Rows]]:
        """Return the ranges of a generation's tables, and rows of what they count of a filter's messages."""
        key, deleted = (shard.number, generation, topic_filter.text), shard.counters.deleted
        with self._lock:
            before, known = self._kept.get(key, (deleted, {}))
        if before != deleted or shard.log.read_only:  # whoever writes may delete, which isn't told to who only reads
            known = {}
        found = {
            counted: known[counted] if parts is None else _joined([_rows_of(part) for part in parts])
            for counted, parts in shard.tallies.tallies(generation, topic_filter, known)
        }
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = deleted, found
            self._drop()
        return tuple(found), list(found.values())

    def first_time(self, shard: Shard, generation: int, find: Callable[[], float]) -> float:
        """Return the time of a generation's first message, which ``find`` returns, if it isn't known."""
        key, deleted = (shard.number, generation), shard.counters.deleted
        if self._firsts.get(key, (-1, 0.0))[0] != deleted or shard.log.read_only:
            self._firsts[key] = deleted, find()
        return self._firsts[key][1]

    def _drop(self) -> None:
        sizes = {key: sum(len(rows[0]) for rows in kept.values()) for key, (_, kept) in self._kept.items()}
        held = sum(sizes.values())
        for key, size in sizes.items():
            if held <= MOST_ROWS:
                return
            del self._kept[key]
            held -= size


def _rows_of(part: Tally) -> Rows:
    return times_of(part.first), times_of(part.last), part.messages.astype(np.float64)


def _joined(parts: list[Rows]) -> Rows:
    nothing = np.empty(0), np.empty(0), np.empty(0)
    first, last, messages = (np.concatenate(column) for column in zip(nothing, *parts, strict=True))
    return first, last, messages


def times_of(positions: Positions) -> Numbers:
    """Return the times of positions as floats, which are exact up to 2 to the power of 53."""
    return (positions >> np.uint64(COUNTER_BITS)).astype(np.float64)
