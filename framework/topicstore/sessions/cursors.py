"""The cursors of a subscription's messages.

A `SessionCursor` reads messages after its place, and returns the writes that store the place. Reading moves the place.
The caller calls `SessionCursor.committed` after the place was stored, or `SessionCursor.rewind` if storing it failed;
then the messages are read again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import attrs

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.nonpersistent import NonPersistentMessages
from topicstore.pubsub.read_cache import ReadSlice
from topicstore.runtime.empty import EMPTY_DICT

from .delivery_batch import SelectedMessages, only, rows_until, selected_of
from .dispatcher import FilterListener, FilterListeners
from .model import SubscribeOptions
from .records import VERSION, Keys, OptionsPeriod, SubscriptionRecord, put

__all__ = ["FilterCursor", "NonPersistent", "SessionCursor", "Union", "closing"]

NonPersistent = tuple[int, list[int], int, Message, SubscribeOptions]
"""A message that is not stored: its publisher's shard; the watermarks, by shard, when it was published; its time; the
message; the options at that time. Stored messages of its publisher's shard up to the watermark are delivered first."""


class SessionCursor(ABC):
    """The messages of one subscription of a session. Used under the sessions' mutex.

    A cursor calls ``ready``, an argument of its constructor, when it may have messages to read after it had none.
    """

    __slots__ = ()

    topic_filter: TopicFilter
    needs_packet_id: bool
    """Whether some of its messages need a packet id, so that it is read only while the window has room."""
    cost = 1
    """The number of reads for which one `read` counts in a session's turn."""

    @abstractmethod
    def read(self, limit: int, now: int) -> SelectedMessages | None:
        """Return at most ``limit`` of the next messages; None if there are none now.

        The result may be empty though more messages follow. ``now`` is in microseconds since the epoch. After
        an error, the shard that failed is not read until `try_again`, so that its session doesn't retry in a loop.
        """

    def permitted(self, selected: SelectedMessages, answers: Sequence[bool]) -> SelectedMessages:
        """Return ``selected``, the result of the last `read`, without the messages that ``answers`` refuses.

        Refused messages count as delivered.
        """
        return only(selected, answers)

    @abstractmethod
    def writes(self) -> list[StateWrite]:
        """Return the writes that store the place, if it has moved since it was stored."""

    @abstractmethod
    def committed(self) -> None:
        """Make the place final: the messages read since are handed out, and `writes` are committed."""

    @abstractmethod
    def rewind(self) -> None:
        """Return to the place of the last `committed`, so that the messages read since are read again."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading. The cursor must not be used afterwards."""

    @property
    def exhausted(self) -> bool:
        """Whether `read` is known to return None now; the cursor calls ``ready`` when that changes."""
        return False

    @property
    def urgent(self) -> bool:
        """Whether `writes` must be committed at once, even if no message is handed out with them."""
        return False

    @abstractmethod
    def try_again(self) -> None:
        """Read again the shards whose `read` raised an error."""

    def parts(self) -> list[SessionCursor]:
        """Return the cursors whose places `read` moves, including this one."""
        return [self]


class Union(Protocol):
    """Subscriptions of one session that overlap and are read together (`topicstore.sessions.overlapping_cursor`)."""

    def wake(self, cursor: FilterCursor) -> None:
        """Record that one of the subscriptions has messages to read."""

    def take_nonpersistent(self, cursor: FilterCursor, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored and match one of the subscriptions."""

    def counts_for(self, cursor: FilterCursor, message: Message) -> bool:
        """Return whether a dropped message counts as missed by this one of the subscriptions. Needs no lock."""

    def forget_nonpersistent(self, cursor: FilterCursor) -> None:
        """Don't deliver the queued messages, which are not stored, for this subscription."""

    def leave(self, cursor: FilterCursor) -> None:
        """Remove a subscription."""


class FilterCursor(SessionCursor):
    """The stored messages of a filter, shard by shard in the order of positions, and matching messages not stored.

    An options period is the range of positions for which the same options hold: after a change of options, messages up
    to the watermarks at that time are delivered by the earlier options. Messages that are not stored are delivered only
    if they, or the options, are of QoS 0, and after the messages that were stored before their publication.
    """

    __slots__ = (
        "_behind",
        "_ended",
        "_failing",
        "_keys",
        "_listener",
        "_listeners",
        "_moved",
        "_nonpersistent",
        "_periods",
        "_places",
        "_ready",
        "_settled",
        "_union",
        "dropped",
        "held",
        "missed",
        "needs_packet_id",
        "number",
        "topic_filter",
    )

    def __init__(
        self,
        listeners: FilterListeners,
        keys: Keys,
        number: int,
        topic_filter: TopicFilter,
        periods: tuple[OptionsPeriod, ...],
        ready: Callable[[FilterCursor], None],
    ) -> None:
        self.number = number
        self.topic_filter = topic_filter
        self.dropped: tuple[int, ...] = ()
        self.missed = 0
        self._listeners = listeners
        self._keys = keys
        self._ready = ready
        self._union: Union | None = None
        """The overlapping subscriptions with which it is read, each message once; None if it is read alone."""
        self._listener: FilterListener = listeners.follow(topic_filter)
        self._places: list[int] = []
        self._settled: list[int] = []
        self._moved = False
        self._ended = False
        """Whether the place in a shard has reached the end of an options period."""
        self._behind: dict[int, None] = EMPTY_DICT
        """The shards that may have messages to read."""
        self._failing: dict[int, None] = EMPTY_DICT
        """The shards that could not be read."""
        self._nonpersistent: NonPersistentMessages[NonPersistent] | None = None
        """The queued messages that are not stored; None if there were none yet."""
        self.held = False
        """Whether reading waits until the subscription's retained messages are handed out."""
        self.periods = periods

    # --- its place ---

    @property
    def places(self) -> list[int]:
        """By shard, the position up to which all messages were read."""
        return self._places

    def settled_places(self) -> list[int]:
        """Return, by shard, the position up to which all messages were handed out."""
        return list(map(min, self._settled, self._places))

    def start(self, places: list[int]) -> None:
        """Move the place to these positions, by shard, forwards or backwards."""
        self._places = list(places)
        self._settled = self._settled or list(places)
        self._moved = True
        self._nonpersistent = None
        if self._union is not None:
            self._union.forget_nonpersistent(self)
        self._wake_all()

    @property
    def client_id(self) -> str:
        """The client id of the cursor's session."""
        return self._keys.client_id

    @property
    def options(self) -> SubscribeOptions:
        """The current options."""
        return self.periods[-1].options

    @property
    def periods(self) -> tuple[OptionsPeriod, ...]:
        """The options that still apply to unread messages, oldest first; the last are the current ones."""
        return self._periods

    @periods.setter
    def periods(self, periods: tuple[OptionsPeriod, ...]) -> None:
        self._periods = periods
        self.needs_packet_id = any(period.options.qos for period in periods)
        self._listener.nonpersistent[self] = None

    def change(self, options: SubscribeOptions, marks: list[int]) -> None:
        """Change the options for messages after these positions, by shard."""
        self._periods = (*self.periods[:-1], OptionsPeriod(self.options, tuple(marks)), OptionsPeriod(options))
        self.periods = self._held()

    def restart(self, options: SubscribeOptions, places: list[int]) -> None:
        """Read on after these positions, by shard, and replace all options."""
        self.periods = (OptionsPeriod(options),)
        self.start(places)

    def skip(self, shard: int, position: int) -> None:
        """Move the place in a shard forward: messages up to the position are not delivered."""
        self._places = [max(place, position) if one == shard else place for one, place in enumerate(self._places)]
        self._moved = True
        self._ended = len(self._periods) > 1
        self._wake_all()

    def undo(self, periods: tuple[OptionsPeriod, ...]) -> None:
        """Restore these options periods, and return to the stored place."""
        self.periods = periods
        self.rewind()

    def record(self, periods: tuple[OptionsPeriod, ...] | None = None) -> SubscriptionRecord:
        """Return the record of the subscription, without its place. ``periods``: by default the current ones."""
        return SubscriptionRecord(VERSION, self.topic_filter.text, self.periods if periods is None else periods)

    def unread(self) -> list[int]:
        """Return the shards that may have messages to read, including those whose read failed."""
        return [*self._behind, *self._failing]

    # --- overlapping subscriptions ---

    def join(self, union: Union) -> list[NonPersistent]:
        """Let the union read this subscription's messages; return the queued messages that are not stored."""
        self._union, self._ready = union, union.wake
        nonpersistent, self._nonpersistent = list(self._nonpersistent or ()), None
        return nonpersistent

    @property
    def moved(self) -> bool:
        """Whether the place has moved since it was stored."""
        return self._moved

    def behind(self, shard: int) -> bool:
        """Return whether a shard may have messages to read, according to the events so far."""
        return shard in self._behind

    def will_read(self, shard: int, positions: Sequence[int]) -> dict[int, Message]:
        """Return, by position, those messages at ``positions`` of a shard that the subscription has yet to deliver."""
        after = self._places[shard]
        found = self._listener.feed.fetch(shard, [position for position in positions if position > after])
        return {position: message for position, message in found.items() if not self._is_own(message)}

    @property
    def exhausted(self) -> bool:
        """Whether no shard may have messages to read, and no message that is not stored waits."""
        return not (self._behind or self._nonpersistent)

    def quiet(self, shard: int) -> bool:
        """Return whether no matching message after the place was announced, so that none is visible either."""
        return shard not in self._behind and self._listener.feed.quiet_after(shard, self._places[shard])

    # --- as `WaitingCursor` ---

    def wake(self, shard: int) -> None:
        """Record that a shard may have messages to read."""
        self._behind = self._behind or {}
        self._behind[shard] = None
        self._ready(self)

    def take_nonpersistent(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored and were published at ``now``."""
        if self._union is not None:
            self._union.take_nonpersistent(self, messages, marks, now)
            return
        if self._nonpersistent is None:
            self._nonpersistent = NonPersistentMessages(_payload_size)
        shard_of, options = self._listeners.shard_of, self.options
        every, own = options.qos == 0, self._keys.client_id if options.no_local else None
        for message in messages:  # `gets` decides the same; the call is inlined for speed
            if (every or message.qos == 0) and message.client_id != own:
                self._nonpersistent.append((shard_of(message.client_id), marks, now, message, options))
        self.count_missed(sum(1 for _ in self._nonpersistent.drop()))
        self._ready(self)

    def miss_nonpersistent(self, messages: list[Message]) -> None:
        """Count the messages, not stored and dropped, that `take_nonpersistent` would have queued. Needs no lock.

        A message that overlapping subscriptions would have delivered once counts for one of them.
        """
        gets = self.gets if self._union is None else partial(self._union.counts_for, self)
        self.count_missed(sum(map(gets, messages)))

    def count_missed(self, count: int) -> None:
        """Count dropped messages. Needs no lock."""
        with self._listeners.counting:
            self.missed += count
            self._listeners.missed += count

    def takes(self, message: Message) -> bool:
        """Return whether a message that is not stored is delivered at QoS 0, leaving ``no_local`` aside."""
        return message.qos == 0 or self.options.qos == 0

    def gets(self, message: Message) -> bool:
        """Return whether a message that is not stored is delivered."""
        return self.takes(message) and not self._is_own(message)

    def _is_own(self, message: Message) -> bool:
        """Return whether ``no_local`` excludes a message because the client itself published it."""
        return self.options.no_local and message.client_id == self._keys.client_id

    def _wake_all(self) -> None:
        """Read the shards that have announced messages after the place; wait for messages of the others."""
        feed, behind = self._listener.feed, dict[int, None]()
        for shard, place in enumerate(self._places):
            if feed.quiet_after(shard, place):
                self._listener.wait_locked(self, shard)
            else:
                behind[shard] = None
        self._behind = behind or EMPTY_DICT
        if behind:
            self._ready(self)

    # --- reading ---

    def hold(self) -> None:
        """Stop reading until `release`, because retained messages come first."""
        self.held = True

    def release(self) -> None:
        """Let reads return messages again, after `hold`."""
        self.held = False
        self._ready(self)

    def read(self, limit: int, now: int) -> SelectedMessages | None:
        """Return at most ``limit`` of the next messages; None if there are none now, or from `hold` to `release`."""
        if self.held:
            return None
        if self._nonpersistent:
            shard, marks = self._nonpersistent.first[:2]
            if self._places[shard] < marks[shard] and shard in self._behind:
                return self._read(shard, limit, now, marks[shard])
            return self._read_nonpersistent(self._nonpersistent, limit, now)
        if not self._behind:
            return None
        return self._read(next(iter(self._behind)), limit, now, None)

    def _read(self, shard: int, limit: int, now: int, bound: int | None) -> SelectedMessages:
        """Read a shard's next messages, to the end of the options period or ``bound``. Scans without the mutex."""
        period = self.period(shard)
        if self._listener.feed.in_memory(shard, self._places[shard]):
            read_slice = self.run(shard, limit)
        else:
            passed = self._listener.passed
            read_slice = self._listeners.mutex.released(lambda: self.run(shard, limit))
            if passed != self._listener.passed:  # waiting cursors were woken meanwhile, but this cursor didn't wait
                read_slice = attrs.evolve(read_slice, caught_up=False)
        end, stop = read_slice.position, read_slice.rows.stop
        if bound is not None or period.until is not None:
            end = min(end for end in (bound, None if period.until is None else period.until[shard]) if end is not None)
            stop = rows_until(read_slice, end)
        self.advance(shard, read_slice, period, end)
        return selected_of(read_slice, stop, self.topic_filter.text, shard, period.options, self._keys.client_id, now)

    def period(self, shard: int) -> OptionsPeriod:
        """Return the options period to which the next messages of a shard belong."""
        if len(self._periods) == 1:
            return self._periods[0]
        after = self._places[shard]
        return next(period for period in self._periods if period.until is None or after < period.until[shard])

    def run(self, shard: int, limit: int) -> ReadSlice:
        """Return at most ``limit`` of a shard's next messages, for `advance`. Raises the errors of reading."""
        try:
            return self._listener.feed.read(shard, self._places[shard], limit)
        except TopicstoreError:
            self._behind.pop(shard, None)
            self._failing = self._failing or {}
            self._failing[shard] = None  # other shards are still read
            raise

    def advance(self, shard: int, read_slice: ReadSlice, period: OptionsPeriod, end: int) -> None:
        """Move the place past the messages that `run` returned, at most to ``end``, within the options period."""
        end = max(end, self._places[shard])
        if read_slice.dropped:  # a slice that is read again names generations that were reported already
            self.dropped += tuple(number for number in read_slice.dropped if number not in self.dropped)
        self._places[shard] = min(read_slice.position, end)
        self._moved = True
        self._ended |= period.until is not None and self._places[shard] >= period.until[shard]
        self._behind.pop(shard, None)
        if read_slice.caught_up and read_slice.position <= end:
            self._listener.wait_locked(self, shard)
            if not self._behind:  # a dictionary doesn't shrink when items are removed
                self._behind = EMPTY_DICT
        else:
            self._behind = self._behind or {}
            self._behind[shard] = None  # the shard's turn comes last

    def _read_nonpersistent(
        self, nonpersistent: NonPersistentMessages[NonPersistent], limit: int, now: int
    ) -> SelectedMessages:
        """Take queued messages with the same options, as far as all messages stored before them were read."""
        messages: list[Message] = []
        expiry: list[int | None] = []
        options = nonpersistent.first[4]
        while nonpersistent and len(messages) < limit:
            shard, marks, came, message, then = nonpersistent.first
            if then is not options or (self._places[shard] < marks[shard] and shard in self._behind):
                break
            left = left_of(message, came, now)
            if left == 0:
                nonpersistent.take()
                continue
            nonpersistent.draw()
            messages.append(message)
            expiry.append(left)
        retain = [message.retain for message in messages] if options.retain_as_published else False
        some = expiry if any(left is not None for left in expiry) else None
        return SelectedMessages(self.topic_filter.text, 0, options, messages, 0, None, None, retain, some)

    def try_again(self) -> None:
        """Read again the shards that failed."""
        if self._failing:
            self._behind, self._failing = self._behind | self._failing, EMPTY_DICT

    # --- storing ---

    def everything(self) -> list[StateWrite]:
        """Return the writes that store the subscription and its place."""
        record = put(self._keys.subscription(self.number), self.record())
        place = put(self._keys.place(self.number), (VERSION, self._places))
        return [record, place] if self.needs_packet_id else [record]

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the place, if it has moved; none at QoS 0, whose place is not stored."""
        if not (self._moved and self.needs_packet_id):
            return []
        writes = [put(self._keys.place(self.number), (VERSION, self._places))]
        if self._ended and self._held() != self._periods:
            writes.append(put(self._keys.subscription(self.number), self.record(self._held())))
        return writes

    def _held(self) -> tuple[OptionsPeriod, ...]:
        """Return the options periods whose end the place has not reached in every shard."""
        return tuple(
            period
            for period in self.periods
            if period.until is None or any(place < end for place, end in zip(self._places, period.until, strict=True))
        )

    def committed(self) -> None:
        """Make the place final, and drop the options periods that ended before it."""
        if self._nonpersistent is not None:
            self._nonpersistent.committed()
        if self._moved:
            self._settled[:] = self._places
            self._moved = False
            if self._ended:
                self.periods = self._held()
                self._ended = False

    def rewind(self) -> None:
        """Return to the place of the last `committed`, so that the messages read since are read again."""
        if self._nonpersistent is not None and self._nonpersistent.rewind():
            self._ready(self)
        if self._moved:
            self._places[:] = self._settled
            self._moved = self._ended = False
            self._wake_all()

    def close(self) -> None:
        """Leave the filter's listener."""
        if self._union is not None:
            self._union.leave(self)
        self._listeners.leave_locked(self._listener, self)


def _payload_size(nonpersistent: NonPersistent) -> int:
    return len(nonpersistent[3].payload)


def closing(cursors: Sequence[SessionCursor], uncount: Callable[[TopicFilter], object] | None) -> Iterator[None]:
    """Close cursors of an ended session, and yield after each.

    ``uncount``: called with the filter of each subscription of QoS 1 or 2.
    """
    for cursor in cursors:
        if uncount is not None and cursor.needs_packet_id and isinstance(cursor, FilterCursor):
            uncount(cursor.topic_filter)
        cursor.close()
        yield
