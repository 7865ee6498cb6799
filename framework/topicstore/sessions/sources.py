"""The sources of a subscription's messages.

A `Source` reads on from its place, and returns the writes that store the place. The place moves as messages are taken;
`Source.settled` is called when it was stored, `Source.rewind` when that failed: then the messages are read again.
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
from topicstore.pubsub.live_messages import LiveMessages
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.read_cache import Run

from .credit import only
from .dispatch import Channel, Channels
from .model import SubscribeOptions
from .portions import Portion, portion_of, rows_until
from .records import VERSION, Era, Keys, SubscriptionRecord, put

__all__ = ["FeedSource", "Live", "Source", "Union", "closing"]

Live = tuple[int, list[int], int, Message, SubscribeOptions]
"""A message stored nowhere: its publisher's shard, by shard the highest position that was visible when it was published
(what is up to there in its publisher's shard is delivered before it), its time, the message, and the options at that
time."""


class Source(ABC):
    """The messages of one subscription of a session. Used under the dispatcher's lock.

    It calls ``ready``, an argument of its constructor, when there may be something to read after there was nothing.
    """

    __slots__ = ()

    topic_filter: TopicFilter
    limited: bool
    """Whether some of its messages need a packet id, so that it is read only while the session has room."""
    cost = 1
    """The part of its session's turn that a `read` takes."""

    @abstractmethod
    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` of the next messages; None if there are none now.

        A portion may be empty though more follows. ``now`` is in microseconds since the epoch. After an error, what
        could not be read counts as nothing until `try_again`: otherwise its session would never come to rest.
        """

    def permitted(self, portion: Portion, answers: Sequence[bool]) -> Portion:
        """Return the portion that was read last with those messages only that the client may be sent.

        The others count as delivered.
        """
        return only(portion, answers)

    @abstractmethod
    def writes(self) -> list[StateWrite]:
        """Return the writes that store the place, if it has moved since it was stored."""

    @abstractmethod
    def settled(self) -> None:
        """Note that the messages read since are handed out, and `writes` committed."""

    @abstractmethod
    def rewind(self) -> None:
        """Go back to the last `settled`: the messages read since were not handed out, and are read again."""

    @abstractmethod
    def close(self) -> None:
        """End reading: the source is not used any more."""

    @property
    def urgent(self) -> bool:
        """Whether `writes` are to be committed at once, even if there is nothing to hand out with them."""
        return False

    @abstractmethod
    def try_again(self) -> None:
        """Let `read` try again after an error that it raised."""

    def parts(self) -> list[Source]:
        """Return the sources that `read` reads for: itself, and those whose places it moves, if these are others."""
        return [self]


class Union(Protocol):
    """Subscriptions of one session that overlap and are read together (`topicstore.sessions.overlapping`)."""

    def wake(self, source: FeedSource) -> None:
        """Note that one of them has something to read."""

    def take_live(self, source: FeedSource, messages: list[Message], marks: list[int], now: int) -> None:
        """Take messages stored nowhere that one of them matches."""

    def counts_for(self, source: FeedSource, message: Message) -> bool:
        """Say whether a dropped message stored nowhere counts as one that this one of them missed. Needs no lock."""

    def forget_live(self, source: FeedSource) -> None:
        """Forget that waiting messages stored nowhere match this one."""

    def leave(self, source: FeedSource) -> None:
        """Go on without this one."""


class FeedSource(Source):
    """The messages of a filter, straight from the streams, shard by shard in the order of positions.

    A change of options begins an era: messages up to the positions at that moment are delivered by the earlier options.
    Messages stored nowhere are taken only if they, or the options, are of QoS 0; they are delivered after the messages
    that were stored when they were published.
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
        """The overlapping subscriptions that it is read with, each message once; None if it is read alone."""
        self._channel: Channel = channels.channel_locked(topic_filter)
        self._places: list[int] = []
        self._settled: list[int] = []
        self._moved = False
        self._ended = False
        """Whether a shard came to the end of an era."""
        self._behind: dict[int, None] = {}
        """The shards in which there may be something to read."""
        self._failing: dict[int, None] = {}
        """The shards that could not be read."""
        self._live: LiveMessages[Live] | None = None
        """The waiting messages that are stored nowhere; None if the subscription takes none."""
        self.held = False
        """Whether it waits until the subscription's retained messages are handed out."""
        self.eras = eras

    # --- its place ---

    @property
    def places(self) -> list[int]:
        """Return by shard the position up to which everything was read."""
        return self._places

    def start(self, places: list[int]) -> None:
        """Move the place to these positions, by shard, wherever it is."""
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
        """Begin after these positions, by shard, with only these options."""
        self.eras = (Era(options),)
        self.start(places)

    def undo(self, eras: tuple[Era, ...]) -> None:
        """Go back to these eras and the stored place."""
        self.eras = eras
        self.rewind()

    def record(self, eras: tuple[Era, ...] | None = None) -> SubscriptionRecord:
        """Return the record of the subscription, without its place, with these eras or by default its own."""
        return SubscriptionRecord(VERSION, self.topic_filter.text, self.eras if eras is None else eras)

    def unread(self) -> list[int]:
        """Return the shards in which there may be something to read."""
        return [*self._behind, *self._failing]

    # --- with others that overlap ---

    def join(self, union: Union) -> list[Live]:
        """Let the union read from now on; return the waiting messages that are stored nowhere."""
        self._union, self._ready = union, union.wake
        live, self._live = list(self._live or ()), None
        return live

    @property
    def moved(self) -> bool:
        """Whether the place has moved since it was stored."""
        return self._moved

    def behind(self, shard: int) -> bool:
        """Say whether there may be something to read in a shard, as far as it was noted."""
        return shard in self._behind

    def will_read(self, shard: int, positions: Sequence[int]) -> dict[int, Message]:
        """Return those messages at some positions of a shard that the subscription gets after its place."""
        after = self._places[shard]
        found = self._channel.feed.fetch(shard, [position for position in positions if position > after])
        return {position: message for position, message in found.items() if not self._is_own(message)}

    def quiet(self, shard: int) -> bool:
        """Say whether no matching message after its place was announced, and so none that is visible by now."""
        return shard not in self._behind and self._channel.feed.quiet_after(shard, self._places[shard])

    # --- as `Follower` ---

    def wake(self, shard: int) -> None:
        """Note that there may be something to read in a shard."""
        self._behind[shard] = None
        self._ready(self)

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Take messages stored nowhere that were published at ``now``."""
        if self._union is not None:
            self._union.take_live(self, messages, marks, now)
            return
        if self._live is None:
            self._live = LiveMessages(_payload_size)
        shard_of, options = self._channels.shard_of, self.options
        every, own = options.qos == 0, self._keys.client_id if options.no_local else None
        for message in messages:  # as `gets` says
            if (every or message.qos == 0) and message.client_id != own:
                self._live.append((shard_of(message.client_id), marks, now, message, options))
        self.count_missed(sum(1 for _ in self._live.drop()))
        self._ready(self)

    def miss_live(self, messages: list[Message]) -> None:
        """Count those of messages stored nowhere that it would have taken. Needs no lock.

        A message that overlapping subscriptions would have taken once counts for one of them.
        """
        gets = self.gets if self._union is None else partial(self._union.counts_for, self)
        self.count_missed(sum(map(gets, messages)))

    def count_missed(self, count: int) -> None:
        """Count dropped messages. Needs no lock."""
        with self._channels.counting:
            self.missed += count
            self._channels.missed += count

    def takes(self, message: Message) -> bool:
        """Say whether a message that is stored nowhere is delivered here, as one of QoS 0, if its client may get it."""
        return message.qos == 0 or self.options.qos == 0

    def gets(self, message: Message) -> bool:
        """Say whether a message that is stored nowhere is delivered here."""
        return self.takes(message) and not self._is_own(message)

    def _is_own(self, message: Message) -> bool:
        """Say whether a message is kept from the client because it has published it itself."""
        return self.options.no_local and message.client_id == self._keys.client_id

    def _wake_all(self) -> None:
        self._behind = dict.fromkeys(range(len(self._places)))
        self._ready(self)

    # --- reading ---

    def hold(self) -> None:
        """Read nothing until `release`: retained messages come first."""
        self.held = True

    def release(self) -> None:
        """Go on reading."""
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
        """Read on in a shard, to the end of its current era or to ``bound``; a scan holds no lock of sessions."""
        era = self.era(shard)
        if self._channel.feed.in_memory(shard, self._places[shard]):
            run = self.run(shard, limit)
        else:
            passed = self._channel.passed
            run = self._channels.entrance.released(lambda: self.run(shard, limit))
            if passed != self._channel.passed:  # it was not among those that were woken, for it did not wait yet
                run = attrs.evolve(run, caught_up=False)
        end, stop = run.position, run.rows.stop
        if bound is not None or era.until is not None:
            end = min(end for end in (bound, None if era.until is None else era.until[shard]) if end is not None)
            stop = rows_until(run, end)
        self.advance(shard, run, era, end)
        return portion_of(run, stop, self.topic_filter.text, shard, era.options, self._keys.client_id, now)

    def era(self, shard: int) -> Era:
        """Return the era in which the next messages of a shard are."""
        if len(self._eras) == 1:
            return self._eras[0]
        after = self._places[shard]
        return next(era for era in self._eras if era.until is None or after < era.until[shard])

    def run(self, shard: int, limit: int) -> Run:
        """Return at most ``limit`` of a shard's next messages, from which `advance` moves on. Raises errors."""
        try:
            return self._channel.feed.read(shard, self._places[shard], limit)
        except TopicstoreError:
            self._behind.pop(shard, None)
            self._failing[shard] = None  # the other shards go on
            raise

    def advance(self, shard: int, run: Run, era: Era, end: int) -> None:
        """Move on over what `run` returned, at most up to ``end``, which is not after the end of the era."""
        end = max(end, self._places[shard])
        if run.dropped:  # perhaps told before: a run may be read again from the same place
            self.dropped += tuple(number for number in run.dropped if number not in self.dropped)
        self._places[shard] = min(run.position, end)
        self._moved = True
        self._ended |= era.until is not None and self._places[shard] >= era.until[shard]
        self._behind.pop(shard, None)
        if run.caught_up and run.position <= end:
            self._channel.wait_locked(self, shard)
        else:
            self._behind[shard] = None  # after the other shards

    def _read_live(self, live: LiveMessages[Live], limit: int, now: int) -> Portion:
        """Take messages stored nowhere that came under the same options, once all stored before them are read."""
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
        """Return the writes that store the place, if it has moved and is stored at all."""
        if not (self._moved and self.limited):
            return []
        writes = [put(self._keys.place(self.number), (VERSION, self._places))]
        if self._ended and self._held() != self._eras:
            writes.append(put(self._keys.subscription(self.number), self.record(self._held())))
        return writes

    def _held(self) -> tuple[Era, ...]:
        """Return the eras that at least one shard has not left."""
        return tuple(
            era
            for era in self.eras
            if era.until is None or any(place < end for place, end in zip(self._places, era.until, strict=True))
        )

    def settled(self) -> None:
        """Note that the messages read since are handed out, and the place stored."""
        if self._live is not None:
            self._live.settled()
        if self._moved:
            self._settled[:] = self._places
            self._moved = False
            if self._ended:
                self.eras = self._held()
                self._ended = False

    def rewind(self) -> None:
        """Go back to the last `settled`: the messages read since are read again."""
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


def closing(sources: Sequence[Source], uncount: Callable[[str], object] | None) -> Iterator[None]:
    """Close sources of an ended session, and yield after each; ``uncount``: called with the filters of packet ids."""
    for source in sources:
        if uncount is not None and source.limited and isinstance(source, FeedSource):
            uncount(source.topic_filter.text)
        source.close()
        yield
