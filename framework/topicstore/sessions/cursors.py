"""The sources of a subscription's messages.

A `Source` is a cursor: it reads messages after its place, and returns the writes that store the place. Reading moves
the place. The caller calls `Source.settled` after the place was stored, or `Source.rewind` if storing it failed; then
the messages are read again.
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
from topicstore.pubsub.nonpersistent import LiveMessages
from topicstore.pubsub.read_cache import ReadSlice

from .delivery_batch import Portion, only, portion_of, rows_until
from .dispatcher import Channel, Channels
from .model import SubscribeOptions
from .records import VERSION, Era, Keys, SubscriptionRecord, put

__all__ = ["FeedSource", "Live", "Source", "Union", "closing"]

Live = tuple[int, list[int], int, Message, SubscribeOptions]
"""A message that is not stored: its publisher's shard; the watermarks, by shard, when it was published; its time; the
message; the options at that time. Stored messages of its publisher's shard up to the watermark are delivered first."""


class Source(ABC):
    """The messages of one subscription of a session. Used under the sessions' mutex.

    A source calls ``ready``, an argument of its constructor, when it may have messages to read after it had none.
    """

    __slots__ = ()

    topic_filter: TopicFilter
    limited: bool
    """Whether some of its messages need a packet id, so that it is read only while the window has room."""
    cost = 1
    """The number of reads for which one `read` counts in a session's turn."""

    @abstractmethod
    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` of the next messages; None if there are none now.

        A portion may be empty though more messages follow. ``now`` is in microseconds since the epoch. After an error,
        the shard that failed is not read until `try_again`, so that its session doesn't retry in a loop.
        """

    def permitted(self, portion: Portion, answers: Sequence[bool]) -> Portion:
        """Return the portion that was read last, with only the messages that ``answers`` allows.

        The others count as delivered.
        """
        return only(portion, answers)

    @abstractmethod
    def writes(self) -> list[StateWrite]:
        """Return the writes that store the place, if it has moved since it was stored."""

    @abstractmethod
    def settled(self) -> None:
        """Make the place final: the messages read since are handed out, and `writes` are committed."""

    @abstractmethod
    def rewind(self) -> None:
        """Return to the place of the last `settled`, so that the messages read since are read again."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading. The source must not be used afterwards."""

    @property
    def exhausted(self) -> bool:
        """Whether `read` is known to return None now; the source calls ``ready`` when that changes."""
        return False

    @property
    def urgent(self) -> bool:
        """Whether `writes` must be committed at once, even if no message is handed out with them."""
        return False

    @abstractmethod
    def try_again(self) -> None:
        """Read again the shards whose `read` raised an error."""

    def parts(self) -> list[Source]:
        """Return the sources whose places `read` moves, including this one."""
        return [self]


class Union(Protocol):
    """Subscriptions of one session that overlap and are read together (`topicstore.sessions.overlapping_cursor`)."""

    def wake(self, source: FeedSource) -> None:
        """Record that one of the subscriptions has messages to read."""

    def take_live(self, source: FeedSource, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored and match one of the subscriptions."""

    def counts_for(self, source: FeedSource, message: Message) -> bool:
        """Return whether a dropped message counts as missed by this one of the subscriptions. Needs no lock."""

    def forget_live(self, source: FeedSource) -> None:
        """Don't deliver the queued messages, which are not stored, for this subscription."""

    def leave(self, source: FeedSource) -> None:
        """Remove a subscription."""


class FeedSource(Source):
    """The stored messages of a filter, shard by shard in the order of positions, and matching messages not stored.

    An era is the range of positions for which the same options hold: after a change of options, messages up to the
    watermarks at that time are delivered by the earlier options. Messages that are not stored are delivered only if
    they, or the options, are of QoS 0, and after the messages that were stored before their publication.
    """

    __slots__ = (
        "_behind",
        "_channel",
        "_channels",
        "_ended",
        "_eras",
        "_failing",
        "_keys",
        "_live",
        "_moved",
        "_places",
        "_ready",
        "_settled",
        "_union",
        "dropped",
        "held",
        "limited",
        "missed",
        "number",
        "topic_filter",
    )

    def __init__(
        self,
        channels: Channels,
        keys: Keys,
        number: int,
        topic_filter: TopicFilter,
        eras: tuple[Era, ...],
        ready: Callable[[FeedSource], None],
    ) -> None:
        self.number = number
        self.topic_filter = topic_filter
        self.dropped: tuple[int, ...] = ()
        self.missed = 0
        self._channels = channels
        self._keys = keys
        self._ready = ready
        self._union: Union | None = None
        """The overlapping subscriptions with which it is read, each message once; None if it is read alone."""
        self._channel: Channel = channels.follow(topic_filter)
        self._places: list[int] = []
        self._settled: list[int] = []
        self._moved = False
        self._ended = False
        """Whether the place in a shard has reached the end of an era."""
        self._behind: dict[int, None] = {}
        """The shards that may have messages to read."""
        self._failing: dict[int, None] = {}
        """The shards that could not be read."""
        self._live: LiveMessages[Live] | None = None
        """The queued messages that are not stored; None if there were none yet."""
        self.held = False
        """Whether reading waits until the subscription's retained messages are handed out."""
        self.eras = eras

    # --- its place ---

    @property
    def places(self) -> list[int]:
        """By shard, the position up to which all messages were read."""
        return self._places

    def start(self, places: list[int]) -> None:
        """Move the place to these positions, by shard, forwards or backwards."""
        self._places = list(places)
        self._settled = self._settled or list(places)
        self._moved = True
        self._live = None
        if self._union is not None:
            self._union.forget_live(self)
        self._wake_all()

    @property
    def client_id(self) -> str:
        """The client id of its session."""
        return self._keys.client_id

    @property
    def options(self) -> SubscribeOptions:
        """The current options."""
        return self.eras[-1].options

    @property
    def eras(self) -> tuple[Era, ...]:
        """The options that still apply to unread messages, oldest first; the last are the current ones."""
        return self._eras

    @eras.setter
    def eras(self, eras: tuple[Era, ...]) -> None:
        self._eras = eras
        self.limited = any(era.options.qos for era in eras)
        self._channel.live[self] = None

    def change(self, options: SubscribeOptions, marks: list[int]) -> None:
        """Change the options for messages after these positions, by shard."""
        self._eras = (*self.eras[:-1], Era(self.options, tuple(marks)), Era(options))
        self.eras = self._held()

    def restart(self, options: SubscribeOptions, places: list[int]) -> None:
        """Read on after these positions, by shard, and replace all options."""
        self.eras = (Era(options),)
        self.start(places)

    def undo(self, eras: tuple[Era, ...]) -> None:
        """Go back to these eras and the stored place."""
        self.eras = eras
        self.rewind()

    def record(self, eras: tuple[Era, ...] | None = None) -> SubscriptionRecord:
        """Return the record of the subscription, without its place. ``eras``: by default the current ones."""
        return SubscriptionRecord(VERSION, self.topic_filter.text, self.eras if eras is None else eras)

    def unread(self) -> list[int]:
        """Return the shards that may have messages to read, including those whose read failed."""
        return [*self._behind, *self._failing]

    # --- overlapping subscriptions ---

    def join(self, union: Union) -> list[Live]:
        """Leave reading to the union; return the queued messages that are not stored."""
        self._union, self._ready = union, union.wake
        live, self._live = list(self._live or ()), None
        return live

    @property
    def moved(self) -> bool:
        """Whether the place has moved since it was stored."""
        return self._moved

    def behind(self, shard: int) -> bool:
        """Return whether a shard is known to have possible messages to read."""
        return shard in self._behind

    def will_read(self, shard: int, positions: Sequence[int]) -> dict[int, Message]:
        """Return, of the messages at some positions of a shard, those that the subscription has still to deliver."""
        after = self._places[shard]
        found = self._channel.feed.fetch(shard, [position for position in positions if position > after])
        return {position: message for position, message in found.items() if not self._is_own(message)}

    @property
    def exhausted(self) -> bool:
        """Whether no shard may have messages to read, and no message that is not stored waits."""
        return not (self._behind or self._live)

    def quiet(self, shard: int) -> bool:
        """Return whether no matching message after its place was announced, so that no visible one exists either."""
        return shard not in self._behind and self._channel.feed.quiet_after(shard, self._places[shard])

    # --- as `Follower` ---

    def wake(self, shard: int) -> None:
        """Record that a shard may have messages to read."""
        self._behind[shard] = None
        self._ready(self)

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored and were published at ``now``."""
        if self._union is not None:
            self._union.take_live(self, messages, marks, now)
            return
        if self._live is None:
            self._live = LiveMessages(_payload_size)
        shard_of, options = self._channels.shard_of, self.options
        every, own = options.qos == 0, self._keys.client_id if options.no_local else None
        for message in messages:  # the condition of `gets`, inlined
            if (every or message.qos == 0) and message.client_id != own:
                self._live.append((shard_of(message.client_id), marks, now, message, options))
        self.count_missed(sum(1 for _ in self._live.drop()))
        self._ready(self)

    def miss_live(self, messages: list[Message]) -> None:
        """Count the messages, not stored and dropped, that `take_live` would have queued. Needs no lock.

        A message that overlapping subscriptions would have delivered once counts for one of them.
        """
        gets = self.gets if self._union is None else partial(self._union.counts_for, self)
        self.count_missed(sum(map(gets, messages)))

    def count_missed(self, count: int) -> None:
        """Count dropped messages. Needs no lock."""
        with self._channels.counting:
            self.missed += count
            self._channels.missed += count

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
        self._behind = dict.fromkeys(range(len(self._places)))
        self._ready(self)

    # --- reading ---

    def hold(self) -> None:
        """Stop reading until `release`, because retained messages come first."""
        self.held = True

    def release(self) -> None:
        """Read again after `hold`."""
        self.held = False
        self._ready(self)

    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` of the next messages; None if there are none now, or while it is held."""
        if self.held:
            return None
        if self._live:
            shard, marks = self._live.first[:2]
            if self._places[shard] < marks[shard] and shard in self._behind:
                return self._read(shard, limit, now, marks[shard])
            return self._read_live(self._live, limit, now)
        if not self._behind:
            return None
        return self._read(next(iter(self._behind)), limit, now, None)

    def _read(self, shard: int, limit: int, now: int, bound: int | None) -> Portion:
        """Read the next messages of a shard, to the end of its era or ``bound``. Scans without the sessions' mutex."""
        era = self.era(shard)
        if self._channel.feed.in_memory(shard, self._places[shard]):
            read_slice = self.run(shard, limit)
        else:
            passed = self._channel.passed
            read_slice = self._channels.mutex.released(lambda: self.run(shard, limit))
            if passed != self._channel.passed:  # waiting followers were woken meanwhile, and this one was not waiting
                read_slice = attrs.evolve(read_slice, caught_up=False)
        end, stop = read_slice.position, read_slice.rows.stop
        if bound is not None or era.until is not None:
            end = min(end for end in (bound, None if era.until is None else era.until[shard]) if end is not None)
            stop = rows_until(read_slice, end)
        self.advance(shard, read_slice, era, end)
        return portion_of(read_slice, stop, self.topic_filter.text, shard, era.options, self._keys.client_id, now)

    def era(self, shard: int) -> Era:
        """Return the era to which the next messages of a shard belong."""
        if len(self._eras) == 1:
            return self._eras[0]
        after = self._places[shard]
        return next(era for era in self._eras if era.until is None or after < era.until[shard])

    def run(self, shard: int, limit: int) -> ReadSlice:
        """Return at most ``limit`` of a shard's next messages, for `advance`. Raises the errors of reading."""
        try:
            return self._channel.feed.read(shard, self._places[shard], limit)
        except TopicstoreError:
            self._behind.pop(shard, None)
            self._failing[shard] = None  # other shards are not affected
            raise

    def advance(self, shard: int, read_slice: ReadSlice, era: Era, end: int) -> None:
        """Move the place past the messages that `run` returned, at most to ``end``, which is within the era."""
        end = max(end, self._places[shard])
        if read_slice.dropped:  # perhaps reported before: a slice may be read again from the same place
            self.dropped += tuple(number for number in read_slice.dropped if number not in self.dropped)
        self._places[shard] = min(read_slice.position, end)
        self._moved = True
        self._ended |= era.until is not None and self._places[shard] >= era.until[shard]
        self._behind.pop(shard, None)
        if read_slice.caught_up and read_slice.position <= end:
            self._channel.wait_locked(self, shard)
        else:
            self._behind[shard] = None  # after the other shards

    def _read_live(self, live: LiveMessages[Live], limit: int, now: int) -> Portion:
        """Take queued messages with the same options, as far as all messages stored before them were read."""
        messages: list[Message] = []
        expiry: list[int | None] = []
        options = live.first[4]
        while live and len(messages) < limit:
            shard, marks, came, message, then = live.first
            if then is not options or (self._places[shard] < marks[shard] and shard in self._behind):
                break
            left = left_of(message, came, now)
            if left == 0:
                live.take()
                continue
            live.draw()
            messages.append(message)
            expiry.append(left)
        retain = [message.retain for message in messages] if options.retain_as_published else False
        some = expiry if any(left is not None for left in expiry) else None
        return Portion(self.topic_filter.text, 0, options, messages, 0, None, None, retain, some)

    def try_again(self) -> None:
        """Read again the shards that failed."""
        self._behind.update(self._failing)
        self._failing.clear()

    # --- storing ---

    def everything(self) -> list[StateWrite]:
        """Return the writes that store the subscription and its place."""
        record = put(self._keys.subscription(self.number), self.record())
        place = put(self._keys.place(self.number), (VERSION, self._places))
        return [record, place] if self.limited else [record]

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the place, if it has moved; none at QoS 0, whose place is not stored."""
        if not (self._moved and self.limited):
            return []
        writes = [put(self._keys.place(self.number), (VERSION, self._places))]
        if self._ended and self._held() != self._eras:
            writes.append(put(self._keys.subscription(self.number), self.record(self._held())))
        return writes

    def _held(self) -> tuple[Era, ...]:
        """Return the eras whose end the place has not reached in every shard."""
        return tuple(
            era
            for era in self.eras
            if era.until is None or any(place < end for place, end in zip(self._places, era.until, strict=True))
        )

    def settled(self) -> None:
        """Make the place final, and drop the eras that ended before it."""
        if self._live is not None:
            self._live.settled()
        if self._moved:
            self._settled[:] = self._places
            self._moved = False
            if self._ended:
                self.eras = self._held()
                self._ended = False

    def rewind(self) -> None:
        """Return to the place of the last `settled`, so that the messages read since are read again."""
        if self._live is not None and self._live.rewind():
            self._ready(self)
        if self._moved:
            self._places[:] = self._settled
            self._moved = self._ended = False
            self._wake_all()

    def close(self) -> None:
        """Leave the filter's channel."""
        if self._union is not None:
            self._union.leave(self)
        self._channels.leave_locked(self._channel, self)


def _payload_size(live: Live) -> int:
    return len(live[3].payload)


def closing(sources: Sequence[Source], uncount: Callable[[TopicFilter], object] | None) -> Iterator[None]:
    """Close sources of an ended session, and yield after each.

    ``uncount``: called with the filter of each subscription of QoS 1 or 2.
    """
    for source in sources:
        if uncount is not None and source.limited and isinstance(source, FeedSource):
            uncount(source.topic_filter)
        source.close()
        yield
