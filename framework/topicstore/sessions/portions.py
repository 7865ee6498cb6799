"""`Portion`: a batch of messages in the form in which one subscription delivers them.

A read batch is a range of messages that was read once for all followers of a filter (`topicstore.pubsub.read_cache`).
The traits of its messages that decide on delivery (QoS, expiry, publisher) are computed once for all sessions.

Messages expire by the wall clock (`topicstore.pubsub.message_expiry`), because their expiry continues across a restart.
While the clock is ahead, messages are left out too early; while it is behind, expired messages are delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.columns import Constant, fold, to_list
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.pubsub.message_expiry import Expiry
from topicstore.pubsub.read_cache import ReadBatch, ReadSlice

from .inflight import Flight
from .model import SubscribeOptions
from .records import PackedPositions, pack_positions

__all__ = ["Portion", "Traits", "portion_at", "portion_of", "rows_in", "rows_until"]

_FEW = 64
"""Number of messages up to which traits are read from the message objects, and not from columns."""
_SHARED = 256
"""Number of portions of a read batch that are cached for other sessions."""

Rows = npt.NDArray[np.intp]


@attrs.define
class Portion:
    """Messages in order of their positions, to be delivered by the options of one subscription. May be empty.

    Not changed after its creation, because sessions share it.
    """

    topic_filter: str
    shard: int
    options: SubscribeOptions
    messages: Sequence[Message]
    qos: int | list[int]
    """The QoS of delivery, one value for all messages or one for each."""
    positions: Positions | None
    """The positions; None if all messages are of QoS 0, which is not acknowledged, or if they are retained messages."""
    packed: PackedPositions | None = None
    """The positions in stored form, if they are packed already."""
    retain: bool | list[bool] = False
    """The RETAIN flag of delivery, one value for all messages or one for each."""
    expiry: list[int | None] | None = None
    """Each message's remaining expiry interval in seconds; None if no message has one."""
    since: int = 0
    """The time at which the remaining expiry intervals of retained messages were computed."""

    def __len__(self) -> int:
        return len(self.messages)

    def acknowledged(self) -> int:
        """Return the number of messages that need a packet id."""
        if isinstance(self.qos, int):
            return len(self.messages) if self.qos else 0
        return len(self.qos) - self.qos.count(0)

    def identifiers(self) -> tuple[int, ...] | list[tuple[int, ...]]:
        """Return the subscription identifiers to send: one tuple for all messages, or a list with a tuple for each."""
        return (self.options.identifier,) if self.options.identifier else ()

    def packet_ids(self, ids: Sequence[int]) -> Sequence[int]:
        """Return a packet id for each message: the next of ``ids`` if the message needs one, otherwise 0."""
        if isinstance(self.qos, int):
            return ids if self.qos else [0] * len(self.messages)
        following = iter(ids)
        return [next(following) if qos else 0 for qos in self.qos]

    def flight(self, ids: Sequence[int]) -> Flight:
        """Return the messages that need a packet id as a flight with these ids, which has no number yet."""
        qos, positions, packed = self.qos, self.positions, self.packed
        retained = self.messages if positions is None else ()
        if not isinstance(qos, int):
            rows = [row for row, needed in enumerate(qos) if needed]
            qos = _value(fold([qos[row] for row in rows]))
            retained = [retained[row] for row in rows] if retained else ()
            positions, packed = None if positions is None else positions[rows], None
        places = np.empty(0, np.uint64) if positions is None else positions
        topics = [message.topic for message in retained]
        return Flight(
            0,
            self.topic_filter,
            self.shard,
            self.options,
            ids,
            qos,
            places,
            topics,
            packed,
            copies=retained,
            since=self.since,
        )


class Traits:
    """The traits of a read batch's messages on which their delivery depends, computed once."""

    __slots__ = ("_clients", "_packed", "expiry", "portions", "positions", "qos", "retain", "slices")

    def __init__(self, whole: ReadBatch) -> None:
        self.positions: Positions = whole.positions
        self.qos: int | list[int]
        self.retain: bool | list[bool]
        properties: Any
        if len(self.positions) == 1:
            (message,) = whole.messages
            self.qos, self.retain, properties = message.qos, message.retain, Constant(message.properties, 1)
        elif len(self.positions) <= _FEW:
            messages = whole.messages
            self.qos = _value(fold([message.qos for message in messages])) if messages else 0
            self.retain = _value(fold([message.retain for message in messages])) if messages else False
            properties = [message.properties for message in messages]
            if properties.count(None) == len(properties):
                properties = Constant(None, len(properties))
        else:
            self.qos, self.retain = _folded(whole.batch.qos), _folded(whole.batch.retain)
            properties = whole.batch.properties
        self.expiry = Expiry.of(properties, self.positions)
        """The times at which the messages expire; None if no message expires."""
        self._clients: npt.NDArray[np.object_] | None = None
        self.portions: dict[tuple[int, int, str, SubscribeOptions], Portion] = {}
        """The portions that are the same for all sessions, by rows, filter and options."""
        self._packed: dict[tuple[int, int], PackedPositions] = {}
        self.slices: npt.NDArray[np.uint8] | None = None
        """By row, the slice of its topic (`topicstore.sessions.shared.slices`), once a group has needed it."""

    @classmethod
    def of(cls, whole: ReadBatch) -> Traits:
        """Return the traits of a read batch."""
        traits = whole.traits
        if not isinstance(traits, cls):
            traits = whole.traits = cls(whole)
        return traits

    def packed(self, start: int, stop: int) -> PackedPositions:
        """Return the positions of these rows, packed."""
        found = self._packed.get((start, stop))
        if found is None:
            found = pack_positions(self.positions[start:stop])
            if len(self._packed) < _SHARED:
                self._packed[start, stop] = found
        return found

    def of_others(self, whole: ReadBatch, client_id: str) -> npt.NDArray[np.bool_]:
        """Return, for each row of the read batch, whether a client other than ``client_id`` published it."""
        if self._clients is None:
            self._clients = np.array(to_list(whole.batch.client_ids), dtype=object)
        others: npt.NDArray[np.bool_] = self._clients != client_id
        return others


def portion_of(
    read_slice: ReadSlice, stop: int, topic_filter: str, shard: int, options: SubscribeOptions, client_id: str, now: int
) -> Portion:
    """Return the portion of a slice, up to row ``stop`` of its read batch, for a subscription of a client."""
    start = read_slice.rows.start
    if start >= stop:
        return Portion(topic_filter, shard, options, (), 0, None)
    traits = Traits.of(read_slice.whole)
    shared = None if options.no_local or traits.expiry is not None else (start, stop, topic_filter, options)
    if shared is not None and shared in traits.portions:
        return traits.portions[shared]
    rows = _wanted(read_slice.whole, traits, start, stop, options, client_id, now)
    if rows is not None:
        return portion_at(read_slice.whole, rows, topic_filter, shard, options, now)
    messages = read_slice.messages if stop == read_slice.rows.stop else read_slice.messages[: stop - start]
    qos = _at_most(_rows_of(traits.qos, start, stop), options.qos)
    positions, packed = None, None
    if qos:
        positions, packed = traits.positions[start:stop], traits.packed(start, stop)
    retain = _rows_of(traits.retain, start, stop) if options.retain_as_published else False
    expiry = None if traits.expiry is None else traits.expiry.left(slice(start, stop), now)
    portion = Portion(topic_filter, shard, options, messages, qos, positions, packed, retain, expiry)
    if shared is not None and len(traits.portions) < _SHARED:
        traits.portions[shared] = portion
    return portion


def rows_in(read_slice: ReadSlice, stop: int, options: SubscribeOptions, client_id: str, now: int) -> Rows:
    """Return the rows of a slice, up to row ``stop`` of its read batch, that a client's subscription gets."""
    start = int(read_slice.rows.start)
    if start >= stop:
        return np.empty(0, np.intp)
    rows = _wanted(read_slice.whole, Traits.of(read_slice.whole), start, stop, options, client_id, now)
    return np.arange(start, stop) if rows is None else rows


def portion_at(
    whole: ReadBatch, rows: Rows, topic_filter: str, shard: int, options: SubscribeOptions, now: int
) -> Portion:
    """Return the portion of these rows of a read batch, without expired messages."""
    if not len(rows):
        return Portion(topic_filter, shard, options, (), 0, None)
    traits = Traits.of(whole)
    expiry = None
    if traits.expiry is not None:
        rows = rows[traits.expiry.ends[rows] > now]
        expiry = traits.expiry.left(rows, now)
    messages = list(map(whole.messages.__getitem__, rows.tolist()))
    qos = _at_most(_rows_at(traits.qos, rows), options.qos)
    retain = _rows_at(traits.retain, rows) if options.retain_as_published else False
    return Portion(topic_filter, shard, options, messages, qos, traits.positions[rows], None, retain, expiry)


def _wanted(
    whole: ReadBatch, traits: Traits, start: int, stop: int, options: SubscribeOptions, client_id: str, now: int
) -> Rows | None:
    """Return the rows to deliver in the half-open range from ``start`` to ``stop``; None means all of them."""
    wanted = None
    if traits.expiry is not None:
        wanted = traits.expiry.ends[start:stop] > now
    if options.no_local:
        others = traits.of_others(whole, client_id)[start:stop]
        wanted = others if wanted is None else wanted & others
    if wanted is None or wanted.all():
        return None
    return np.flatnonzero(wanted) + start


def _folded(column: Any) -> Any:
    """Return a column as one value if it is the same for all rows, otherwise as a list."""
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


def rows_until(read_slice: ReadSlice, position: int) -> int:
    """Return the end, exclusive, of a slice's rows at or before a position, as a row of its read batch."""
    start, stop = int(read_slice.rows.start), int(read_slice.rows.stop)
    if read_slice.position <= position or start == stop:
        return stop
    behind = int(np.searchsorted(read_slice.whole.positions, np.uint64(position), side="right"))
    return min(max(behind, start), stop)
