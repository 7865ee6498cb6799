"""The messages for one session's client: as read, as the subscription delivers them, and as packets to send.

A read batch is a range of messages that was read once for all followers of a filter (`topicstore.pubsub.read_cache`).
The columns of its messages that decide on delivery (QoS, expiry, publisher) are computed once for all sessions. A
`SelectedMessages` is the part of it that one subscription delivers. A `DeliveryBatch` has messages as columns, which
sessions with the same messages share. The packets of a session wait in sending order, as batches and as single packets.

Messages expire by the wall clock (`topicstore.pubsub.message_expiry`), because their expiry continues across a restart.
While the clock is ahead, messages are left out too early; while it is behind, expired messages are delivered.

The server that holds the connection limits the deliveries of a session: it may refuse messages (`Allow`), limit the
bytes of a delivery, and pause a session while its socket is full (`topicstore.sessions.Session.pause`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.arguments import check_within
from topicstore.contract.columns import Constant, fold, to_list
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.pubsub.message_expiry import Expiry
from topicstore.pubsub.read_cache import ReadBatch, ReadSlice

from .in_flight import InFlightBatch
from .model import Publish, PubRel, SubscribeOptions
from .records import PackedPositions, pack_positions

__all__ = [
    "ASKED",
    "Allow",
    "DeliveryBatch",
    "MessageColumns",
    "Packet",
    "Permit",
    "SelectedMessages",
    "check_max_bytes",
    "count_of",
    "cut",
    "fitting",
    "likely",
    "only",
    "rows_in",
    "rows_until",
    "selected_at",
    "selected_of",
    "single",
]

_FEW = 64
"""Number of messages up to which the columns are made from message objects, and not from those of the read batch."""
_SHARED = 256
"""Number of selected messages of a read batch that are cached for other sessions."""

Rows = npt.NDArray[np.intp]


@attrs.define
class SelectedMessages:
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

    def batch(self, ids: Sequence[int]) -> InFlightBatch:
        """Return the messages that need a packet id as an in-flight batch with these ids, which has no number yet."""
        qos, positions, packed = self.qos, self.positions, self.packed
        retained = self.messages if positions is None else ()
        if not isinstance(qos, int):
            rows = [row for row, needed in enumerate(qos) if needed]
            qos = _value(fold([qos[row] for row in rows]))
            retained = [retained[row] for row in rows] if retained else ()
            positions, packed = None if positions is None else positions[rows], None
        places = np.empty(0, np.uint64) if positions is None else positions
        topics = [message.topic for message in retained]
        return InFlightBatch(
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


class MessageColumns:
    """The columns of a read batch's messages on which their delivery depends, computed once."""

    __slots__ = ("_clients", "_packed", "expiry", "partitions", "positions", "qos", "retain", "selections")

    def __init__(self, whole: ReadBatch) -> None:
        self.positions: Positions = whole.positions
        self.qos: int | list[int]
        self.retain: bool | list[bool]
        properties: Any
        if len(self.positions) == 1:
            (message,) = whole.messages
            self.qos, self.retain, properties = message.qos, message.retain, None
            if message.properties is not None:
                properties = [message.properties]
        elif len(self.positions) <= _FEW:
            messages = whole.messages
            self.qos = _value(fold([message.qos for message in messages])) if messages else 0
            self.retain = _value(fold([message.retain for message in messages])) if messages else False
            properties = [message.properties for message in messages]
            if properties.count(None) == len(properties):
                properties = None
        else:
            self.qos, self.retain = _folded(whole.batch.qos), _folded(whole.batch.retain)
            properties = whole.batch.properties
        self.expiry = None if properties is None else Expiry.of(properties, self.positions)
        """The times at which the messages expire; None if no message expires."""
        self._clients: npt.NDArray[np.object_] | None = None
        self.selections: dict[tuple[int, int, str, SubscribeOptions], SelectedMessages] = {}
        """The selected messages that are the same for all sessions, by rows, filter and options."""
        self._packed: dict[tuple[int, int], PackedPositions] = {}
        self.partitions: npt.NDArray[np.uint8] | None = None
        """By row, the partition of its topic (`topicstore.sessions.shared.reader`), once a group has needed it."""

    @classmethod
    def of(cls, whole: ReadBatch) -> MessageColumns:
        """Return the columns of a read batch, which are created once for all readers."""
        columns = whole.columns
        if not isinstance(columns, cls):
            columns = whole.columns = cls(whole)
        return columns

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


def selected_of(
    read_slice: ReadSlice, stop: int, topic_filter: str, shard: int, options: SubscribeOptions, client_id: str, now: int
) -> SelectedMessages:
    """Return the selected messages of a slice, up to row ``stop`` of its read batch, for a subscription of a client."""
    start = read_slice.rows.start
    if start >= stop:
        return SelectedMessages(topic_filter, shard, options, (), 0, None)
    columns = MessageColumns.of(read_slice.whole)
    shared = None if options.no_local or columns.expiry is not None else (start, stop, topic_filter, options)
    if shared is not None and shared in columns.selections:
        return columns.selections[shared]
    rows = None
    if shared is None:
        rows = _wanted(read_slice.whole, columns, start, stop, options, client_id, now)
    if rows is not None:
        return selected_at(read_slice.whole, rows, topic_filter, shard, options, now)
    messages = read_slice.messages if stop == read_slice.rows.stop else read_slice.messages[: stop - start]
    qos = _at_most(_rows_of(columns.qos, start, stop), options.qos)
    positions, packed = None, None
    if qos:
        positions, packed = columns.positions[start:stop], columns.packed(start, stop)
    retain = _rows_of(columns.retain, start, stop) if options.retain_as_published else False
    expiry = None if columns.expiry is None else columns.expiry.left(slice(start, stop), now)
    selected = SelectedMessages(topic_filter, shard, options, messages, qos, positions, packed, retain, expiry)
    if shared is not None and len(columns.selections) < _SHARED:
        columns.selections[shared] = selected
    return selected


def rows_in(read_slice: ReadSlice, stop: int, options: SubscribeOptions, client_id: str, now: int) -> Rows:
    """Return the rows of a slice, before row ``stop`` of its read batch, that a client's subscription delivers."""
    start = int(read_slice.rows.start)
    if start >= stop:
        return np.empty(0, np.intp)
    rows = _wanted(read_slice.whole, MessageColumns.of(read_slice.whole), start, stop, options, client_id, now)
    return np.arange(start, stop) if rows is None else rows


def selected_at(
    whole: ReadBatch, rows: Rows, topic_filter: str, shard: int, options: SubscribeOptions, now: int
) -> SelectedMessages:
    """Return the selected messages of these rows of a read batch, without expired messages."""
    if not len(rows):
        return SelectedMessages(topic_filter, shard, options, (), 0, None)
    columns = MessageColumns.of(whole)
    expiry = None
    if columns.expiry is not None:
        rows = rows[columns.expiry.ends[rows] > now]
        expiry = columns.expiry.left(rows, now)
    messages = list(map(whole.messages.__getitem__, rows.tolist()))
    qos = _at_most(_rows_at(columns.qos, rows), options.qos)
    retain = _rows_at(columns.retain, rows) if options.retain_as_published else False
    return SelectedMessages(topic_filter, shard, options, messages, qos, columns.positions[rows], None, retain, expiry)


def _wanted(
    whole: ReadBatch,
    columns: MessageColumns,
    start: int,
    stop: int,
    options: SubscribeOptions,
    client_id: str,
    now: int,
) -> Rows | None:
    """Return the rows to deliver in the half-open range from ``start`` to ``stop``; None means all of them."""
    wanted = None
    if columns.expiry is not None:
        wanted = columns.expiry.ends[start:stop] > now
    if options.no_local:
        others = columns.of_others(whole, client_id)[start:stop]
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


Allow = Callable[[Sequence[Message]], Sequence[bool | None]]
"""Returns, for each message, whether it may be sent to the client; None: not known yet, so that the session is held
back until `topicstore.sessions.Session.ask_again`."""

ASKED = 128
"""Number of messages read at a time after an `Allow` has returned None once, which bounds repeated calls."""

_FIRST = 16
"""Number of messages in the first read with a limit of bytes, before the average payload size is known."""


def check_max_bytes(max_bytes: int | None) -> None:
    """Raise `InvalidArgumentError` unless ``max_bytes`` is None or a positive 64-bit integer."""
    if max_bytes is not None:
        check_within("max_bytes", max_bytes, 1, (1 << 63) - 1)


class Permit:
    """The `Allow` of one session: applies its answers, and records whether the session waits for an answer."""

    __slots__ = ("_client_id", "_clock", "allow", "asks", "refused", "undecided_since")

    def __init__(self, allow: Allow | None, client_id: str, clock: Callable[[], int]) -> None:
        self._client_id, self._clock = client_id, clock
        self.allow = allow
        """Returns which messages may be sent to the client; None: all."""
        self.asks = False
        """Whether `allow` has ever answered None."""
        self.refused = 0
        """The number of messages that `allow` refused."""
        self.undecided_since: int | None = None
        """The time since which the session waits for answers, or None. Cleared by any thread, without the lock."""

    def answers(self, messages: Sequence[Message]) -> list[bool] | None:
        """Return for each message whether it may be sent; if an answer is missing, hold the session back: return None.

        Raises `InvalidArgumentError` if `allow` raises, or returns a wrong number of answers.
        """
        answers = self._ask(messages)
        if None in answers:
            self.asks = True
            self.undecided_since = self._clock()  # set first: `ask_again` may come during the next call
            answers = self._ask(messages)
            if None in answers:
                return None
            self.undecided_since = None
        return [answer is True for answer in answers]

    def remove_refused(self, found: dict[int, Message | None]) -> bool:
        """Replace the messages that may not be sent with None; return False, unchanged, if an answer is missing."""
        there = {row: message for row, message in found.items() if message is not None}
        answers = self.answers(list(there.values()))
        if answers is None:
            return False
        found.update((row, None) for row, answer in zip(there, answers, strict=True) if not answer)
        self.refused += answers.count(False)
        return True

    def _ask(self, messages: Sequence[Message]) -> list[bool | None]:
        if self.allow is None:
            return [True] * len(messages)
        try:
            answers = [answer if answer is None else bool(answer) for answer in self.allow(messages)]
        except Exception as failure:
            raise InvalidArgumentError(f"allow of session {self._client_id!r} raised {failure!r}") from failure
        if len(answers) != len(messages):
            raise InvalidArgumentError(
                f"allow of session {self._client_id!r} gave {len(answers)} answers for {len(messages)} messages"
            )
        return answers


def only(selected: SelectedMessages, answers: Sequence[bool]) -> SelectedMessages:
    """Return the selected messages without those whose answer is False, which may not be sent."""
    if all(answers):
        return selected
    rows = [row for row, answer in enumerate(answers) if answer]

    def at(values: Any) -> Any:
        return [values[row] for row in rows] if isinstance(values, list) else values

    return attrs.evolve(
        selected,
        messages=[selected.messages[row] for row in rows],
        qos=at(selected.qos),
        positions=None if selected.positions is None else selected.positions[np.array(rows, np.intp)],
        packed=None,
        retain=at(selected.retain),
        expiry=at(selected.expiry),
    )


def likely(size: float | None, max_bytes: int) -> int:
    """Return the number of messages of about ``max_bytes`` together; ``size``: the average so far, None if unknown."""
    return _FIRST if size is None else max(int(max_bytes / max(size, 1.0)), 1)


def fitting(packets: Sequence[Publish | PubRel], max_bytes: int, *, least: int) -> int:
    """Return the number of first packets whose payloads fit into ``max_bytes``, but at least ``least``."""
    left = max_bytes
    for count, packet in enumerate(packets):
        if isinstance(packet, Publish):
            left -= len(packet.message.payload)
            if left < 0:
                return max(count, least)
    return len(packets)


class DeliveryBatch(msgspec.Struct, frozen=True, eq=False):
    """Messages to send to a session's client for the first time, one PUBLISH each, as columns of equal length.

    A column whose values are all equal may be that one value.
    """

    packet_ids: Sequence[int]
    """The packet ids, 1 to 65,535; 0 for messages of QoS 0."""
    body: SelectedMessages
    """The columns other than the packet ids. Sessions that receive the same messages with the same options at the same
    time share one object, unless the messages can expire. A server can cache encoded packets by this object, as long as
    it holds the batch. The attributes of the object are not public."""

    def __len__(self) -> int:
        return len(self.body.messages)

    @property
    def messages(self) -> Sequence[Message]:
        """The published messages, one for each PUBLISH to send."""
        return self.body.messages

    @property
    def qos(self) -> int | Sequence[int]:
        """The QoS of delivery; see `Publish.qos`."""
        return self.body.qos

    @property
    def retain(self) -> bool | Sequence[bool]:
        """The RETAIN flags to send; see `Publish.retain`."""
        return self.body.retain

    @property
    def subscription_identifiers(self) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        """The subscription identifiers: one tuple if they are equal for all messages, otherwise a list of tuples."""
        return self.body.identifiers()

    @property
    def expiry(self) -> Sequence[int | None] | None:
        """The messages' remaining expiry intervals in seconds; None if no message has one."""
        return self.body.expiry

    def packets(self) -> list[Publish]:
        """Return the messages as `Publish` objects."""
        body = self.body
        qos = repeat(body.qos) if isinstance(body.qos, int) else body.qos
        retain = repeat(body.retain) if isinstance(body.retain, bool) else body.retain
        found = body.identifiers()
        identifiers = repeat(found) if isinstance(found, tuple) else found
        if not (found or body.retain or body.expiry):
            return list(map(Publish, self.packet_ids, body.messages, qos))
        expiry = body.expiry or repeat(None)
        return list(map(Publish, self.packet_ids, body.messages, qos, repeat(False), retain, identifiers, expiry))


Packet = Publish | PubRel | DeliveryBatch
"""One packet, or several of them as a batch."""


def count_of(packets: Iterable[Packet]) -> int:
    """Return the number of packets, including those in batches."""
    return sum([len(one.packet_ids) if isinstance(one, DeliveryBatch) else 1 for one in packets])


def single(packets: Sequence[Packet]) -> list[Publish | PubRel]:
    """Return packets with batches converted to `Publish` objects."""
    found: list[Publish | PubRel] = []
    for one in packets:
        if isinstance(one, DeliveryBatch):
            found += one.packets()
        else:
            found.append(one)
    return found


def cut(packets: list[Packet], limit: int, max_bytes: int | None) -> tuple[list[Packet], list[Publish | PubRel]]:
    """Split packets into at most ``limit`` first packets, and the remaining ones, with batches taken apart.

    max_bytes: the most bytes of payload of the first packets, of which there is at least one; None: no limit.
    """
    taken: list[Packet] = []
    for at, one in enumerate(packets):
        size = 0
        if max_bytes is not None:
            size = 0 if isinstance(one, PubRel) else _size(one)
        count = len(one.packet_ids) if isinstance(one, DeliveryBatch) else 1
        if count <= limit and (max_bytes is None or size <= max_bytes):
            taken.append(one)
            limit -= count
            max_bytes = None if max_bytes is None else max_bytes - size
            continue
        others = single(packets[at:])
        if max_bytes is not None:
            limit = min(limit, fitting(others, max_bytes, least=0 if taken else 1))
        return taken + others[:limit], others[limit:]
    return taken, []


def _size(one: Publish | DeliveryBatch) -> int:
    if isinstance(one, Publish):
        return len(one.message.payload)
    return sum([len(message.payload) for message in one.body.messages])
