"""`Portion`: messages of one source as one subscription is to get them.

What must be known of messages to decide that (their QoS, when they expire, who published them) is
looked at once for all sessions that read the same stretch.

Messages expire by the wall clock, as their positions have it: their time outlives a restart. One that is due while the
clock is ahead is left out, and one that is too old while it is behind is delivered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import repeat
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.columns import Constant, fold, to_iterable, to_list
from topicstore.contract.model import Message
from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore.pubsub.read_cache import Run, Stretch

from .inflight import Flight
from .model import Delivery, SubscribeOptions
from .records import PackedPositions, pack_positions

__all__ = ["Portion", "Traits", "expiry_of", "portion_at", "portion_of", "rows_until"]

_SECOND = 1_000_000
_NEVER = (1 << 63) - 1

Rows = npt.NDArray[np.intp]


@attrs.define
class Portion:
    """Messages in order of their positions, to be delivered by one subscription's options. May be empty."""

    topic_filter: str
    shard: int
    options: SubscribeOptions
    messages: Sequence[Message]
    qos: int | list[int]
    """As delivered: that of all, or of each."""
    positions: Positions | None
    """None if none of them is to be acknowledged, because they are of QoS 0, or if they are retained messages."""
    packed: PackedPositions | None = None
    """The positions, packed."""
    retain: bool | list[bool] = False
    """The flag as delivered."""
    expiry: list[int | None] | None = None
    """What is left of each message's expiry interval; None: they have none."""

    def __len__(self) -> int:
        return len(self.messages)

    def acknowledged(self) -> int:
        """Return how many need a packet id."""
        if isinstance(self.qos, int):
            return len(self.messages) if self.qos else 0
        return len(self.qos) - self.qos.count(0)

    def deliveries(self, ids: Sequence[int]) -> list[Delivery]:
        """Return what to send, with these packet ids for those that need one."""
        options = self.options
        all_ids = self._ids(ids)
        qos = repeat(self.qos) if isinstance(self.qos, int) else self.qos
        if not (options.identifier or self.retain or self.expiry):
            return list(map(Delivery, all_ids, self.messages, qos))
        retain = repeat(self.retain) if isinstance(self.retain, bool) else self.retain
        identifiers = (options.identifier,) if options.identifier else ()
        expiry = self.expiry or repeat(None)
        return list(map(Delivery, all_ids, self.messages, qos, repeat(False), retain, repeat(identifiers), expiry))

    def _ids(self, ids: Sequence[int]) -> Any:
        if isinstance(self.qos, int):
            return ids if self.qos else repeat(0)
        following = iter(ids)
        return [next(following) if qos else 0 for qos in self.qos]

    def flight(self, ids: Sequence[int]) -> Flight:
        """Return those that need a packet id, with these; its number is not given out yet."""
        qos, positions, topics, packed = self.qos, self.positions, self.topics(), self.packed
        if not isinstance(qos, int):
            rows = [row for row, needed in enumerate(qos) if needed]
            qos = _value(fold([qos[row] for row in rows]))
            topics = [topics[row] for row in rows] if topics else topics
            positions, packed = None if positions is None else positions[rows], None
        places = np.empty(0, np.uint64) if positions is None else positions
        return Flight(0, self.topic_filter, self.shard, self.options, ids, qos, places, topics, packed)

    def topics(self) -> list[str]:
        """Return the topics of retained messages, which name them; nothing of others."""
        return [] if self.positions is not None else [message.topic for message in self.messages]


class Traits:
    """What is asked of the messages of a stretch, found out once."""

    __slots__ = ("_batch", "_clients", "_packed", "expires", "positions", "qos", "retain")

    _known: ClassVar[weakref.WeakKeyDictionary[Stretch, Traits]] = weakref.WeakKeyDictionary()

    def __init__(self, stretch: Stretch) -> None:
        batch = stretch.batch
        self.positions: Positions = batch.positions
        self.qos: int | list[int] = _folded(batch.qos)
        self.retain: bool | list[bool] = _folded(batch.retain)
        self.expires = _expiries(batch.properties, batch.positions)
        """By row, the time in microseconds from which on it is not delivered; None: there is none of them."""
        self._batch = batch
        self._clients: npt.NDArray[np.object_] | None = None
        self._packed: dict[tuple[int, int], PackedPositions] = {}

    @classmethod
    def of(cls, stretch: Stretch) -> Traits:
        """Return those of a stretch."""
        traits = cls._known.get(stretch)
        if traits is None:
            traits = cls._known[stretch] = cls(stretch)
        return traits

    def packed(self, start: int, stop: int) -> PackedPositions:
        """Return the positions of these rows, packed."""
        found = self._packed.get((start, stop))
        if found is None:
            found = self._packed[start, stop] = pack_positions(self.positions[start:stop])
        return found

    def of_others(self, client_id: str) -> npt.NDArray[np.bool_]:
        """Say of each row whether another client than this published it."""
        if self._clients is None:
            self._clients = np.array(to_list(self._batch.client_ids), dtype=object)
        others: npt.NDArray[np.bool_] = self._clients != client_id
        return others


def portion_of(
    run: Run, stop: int, topic_filter: str, shard: int, options: SubscribeOptions, client_id: str, now: int
) -> Portion:
    """Return what of the rows of a run before ``stop`` (a row of its stretch) a subscription of this client gets."""
    start = run.rows.start
    if start >= stop:
        return Portion(topic_filter, shard, options, (), 0, None)
    traits = Traits.of(run.stretch)
    rows = _wanted(traits, start, stop, options, client_id, now)
    if rows is not None:
        return portion_at(run.stretch, rows, topic_filter, shard, options, now)
    messages = run.messages if stop == run.rows.stop else run.messages[: stop - start]
    qos = _at_most(_rows_of(traits.qos, start, stop), options.qos)
    positions, packed = None, None
    if qos:
        positions, packed = traits.positions[start:stop], traits.packed(start, stop)
    retain = _rows_of(traits.retain, start, stop) if options.retain_as_published else False
    expiry = None if traits.expires is None else _left(traits.expires[start:stop], now)
    return Portion(topic_filter, shard, options, messages, qos, positions, packed, retain, expiry)


def portion_at(
    stretch: Stretch, rows: Rows, topic_filter: str, shard: int, options: SubscribeOptions, now: int
) -> Portion:
    """Return what a subscription gets of these rows of a stretch: those that have not expired."""
    if not len(rows):
        return Portion(topic_filter, shard, options, (), 0, None)
    traits = Traits.of(stretch)
    expiry = None
    if traits.expires is not None:
        rows = rows[traits.expires[rows] > now]
        expiry = _left(traits.expires[rows], now)
    messages = list(map(stretch.messages.__getitem__, rows.tolist()))
    qos = _at_most(_rows_at(traits.qos, rows), options.qos)
    retain = _rows_at(traits.retain, rows) if options.retain_as_published else False
    return Portion(topic_filter, shard, options, messages, qos, traits.positions[rows], None, retain, expiry)


def expiry_of(message: Message, since: int, now: int) -> int | None:
    """Return the seconds that are left to a message of this time, rounded up; 0: it expired; None: it never does."""
    interval = None if message.properties is None else message.properties.message_expiry_interval
    return None if interval is None else max(0, -((now - since) // _SECOND - interval))


def _wanted(traits: Traits, start: int, stop: int, options: SubscribeOptions, client_id: str, now: int) -> Rows | None:
    """Return the rows from ``start`` to before ``stop`` that are to be delivered; None: all of them."""
    wanted = None
    if traits.expires is not None:
        wanted = traits.expires[start:stop] > now
    if options.no_local:
        others = traits.of_others(client_id)[start:stop]
        wanted = others if wanted is None else wanted & others
    if wanted is None or wanted.all():
        return None
    return np.flatnonzero(wanted) + start


def _expiries(properties: Any, positions: Positions) -> npt.NDArray[np.int64] | None:
    if isinstance(properties, Constant) and (
        properties.value is None or properties.value.message_expiry_interval is None
    ):
        return None
    intervals = [None if p is None else p.message_expiry_interval for p in to_iterable(properties)]
    if all(interval is None for interval in intervals):
        return None
    times = (positions >> np.uint64(COUNTER_BITS)).tolist()
    ends = (_NEVER if i is None else time + i * _SECOND for time, i in zip(times, intervals, strict=True))
    return np.fromiter(ends, np.int64, len(intervals))


def _left(expires: npt.NDArray[np.int64], now: int) -> list[int | None]:
    return [None if end == _NEVER else -((now - end) // _SECOND) for end in expires.tolist()]


def _folded(column: Any) -> Any:
    """Return a column as one value, if it is the same for all rows, else as a list."""
    values = column if isinstance(column, Constant) else fold(to_list(column)) if len(column) else [0]
    return _value(values)


def _value(values: Any) -> Any:
    return values.value if isinstance(values, Constant) else values


def _rows_of(values: Any, start: int, stop: int) -> Any:
    return values[start:stop] if isinstance(values, list) else values


def _rows_at(values: Any, rows: Rows) -> Any:
    return [values[row] for row in rows.tolist()] if isinstance(values, list) else values


def _at_most(qos: int | list[int], limit: int) -> int | list[int]:
    if isinstance(qos, int):
        return min(qos, limit)
    if limit == 0:
        return 0
    capped: int | list[int] = _value(fold([min(q, limit) for q in qos] if limit == 1 else qos)) if qos else 0
    return capped


def rows_until(run: Run, position: int) -> int:
    """Return the row of a run's stretch behind its last that lies at or before a position."""
    start, stop = int(run.rows.start), int(run.rows.stop)
    if run.position <= position or start == stop:
        return stop
    behind = int(np.searchsorted(run.stretch.batch.positions, np.uint64(position), side="right"))
    return min(max(behind, start), stop)
