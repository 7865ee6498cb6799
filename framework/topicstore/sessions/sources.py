"""Where a subscription gets its messages.

A `Source` reads on from its place, and says what to store so that the place is found again. The place
moves as messages are taken; `Source.settled` is called when it was stored, `Source.rewind` when it
could not be: then they are read again.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Callable

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.shard.state import FrameworkWrite

from .dispatch import Channel, Channels
from .model import SubscribeOptions
from .portions import Portion, expiry_of, portion_of, rows_until
from .records import VERSION, Era, Keys, SubscriptionRecord, put

__all__ = ["FeedSource", "RetainedSource", "Source"]

_LIVE = 10_000
"""Messages stored nowhere that wait for a subscription of QoS 0 at most."""
_Live = tuple[int, int, int, Message, SubscribeOptions]
"""One of them: its publisher's shard, what is delivered there before, its time, itself, and the options then."""


class Source(ABC):
    """The messages of one subscription of a session. Used under the dispatcher's lock.

    It calls ``ready``, which it was made with, when there may be something to read and there was not.
    """

    __slots__ = ()

    topic_filter: TopicFilter
    limited: bool
    """Some of its messages need a packet id, so that it is read only while the session has room."""
    cost = 1
    """How much of its session's turn a `read` takes."""

    @abstractmethod
    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` messages that follow; None: nothing does now.

        A portion may be empty though more follows. ``now`` is in microseconds since the epoch.
        """

    @abstractmethod
    def writes(self) -> list[StateWrite]:
        """Return what stores the place, if it moved since it was stored."""

    @abstractmethod
    def settled(self) -> None:
        """What was read since is handed out, and `writes` was committed."""

    @abstractmethod
    def rewind(self) -> None:
        """What was read since the last `settled` was not handed out: read it again."""

    @abstractmethod
    def close(self) -> None:
        """It is not read any more."""

    def try_again(self) -> None:
        """`read` may try again what it raised an error for; by default it does anyway."""
        return


class FeedSource(Source):
    """The messages of a filter, straight from the streams, shard by shard in the order of positions.

    A change of options begins an era: messages up to the positions of that moment are delivered by
    the options before. Messages stored nowhere come by only if the options allow QoS 0 at most; they
    keep their place behind what was stored when they came by.
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
        "dropped",
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
        ready: Callable[[Source], None],
    ) -> None:
        self.number = number
        self.topic_filter = topic_filter
        self.dropped: tuple[int, ...] = ()
        self.missed = 0
        self._channels = channels
        self._keys = keys
        self._ready = ready
        self._channel: Channel = channels.channel_locked(topic_filter)
        self._places: list[int] = []
        self._settled: list[int] = []
        self._moved = False
        self._ended = False
        """A shard came to the end of an era."""
        self._behind: dict[int, None] = {}
        """Shards in which there may be something to read."""
        self._failing: dict[int, None] = {}
        """Shards that could not be read."""
        self._live: collections.deque[_Live] | None = None
        """Messages stored nowhere."""
        self.eras = eras

    # --- its place ---

    @property
    def places(self) -> list[int]:
        """By shard, the position up to which everything was read."""
        return self._places

    def start(self, places: list[int]) -> None:
        """Begin behind these positions, by shard, wherever it is."""
        self._places = list(places)
        self._settled = self._settled or list(places)
        self._moved = True
        self._live = None
        self._wake_all()

    @property
    def options(self) -> SubscribeOptions:
        """The options that hold."""
        return self.eras[-1].options

    @property
    def eras(self) -> tuple[Era, ...]:
        """The options that held, the last of which hold."""
        return self._eras

    @eras.setter
    def eras(self, eras: tuple[Era, ...]) -> None:
        self._eras = eras
        self.limited = any(era.options.qos for era in eras)
        if self.options.qos == 0:
            self._channel.live[self] = None
        else:
            self._channel.live.pop(self, None)

    def change(self, options: SubscribeOptions, marks: list[int]) -> None:
        """Let other options hold for messages behind these positions, by shard."""
        self._eras = (*self.eras[:-1], Era(self.options, tuple(marks)), Era(options))
        self.eras = self._held()

    def restart(self, options: SubscribeOptions, places: list[int]) -> None:
        """Begin behind these positions, by shard, with these options alone."""
        self.eras = (Era(options),)
        self.start(places)

    def undo(self, eras: tuple[Era, ...]) -> None:
        """Go back to these eras, and the place that is stored."""
        self.eras = eras
        self.rewind()

    def record(self, eras: tuple[Era, ...] | None = None) -> SubscriptionRecord:
        """Return what is stored of the subscription besides its place; with these eras, if not with its own."""
        return SubscriptionRecord(VERSION, self.topic_filter.text, self.eras if eras is None else eras)

    def unread(self) -> list[int]:
        """Return the shards in which there may be something to read."""
        return [*self._behind, *self._failing]

    # --- as `Follower` ---

    def wake(self, shard: int) -> None:
        """There may be something to read in a shard."""
        self._behind[shard] = None
        self._ready(self)

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Messages came by that are stored nowhere, at ``now``."""
        if self._live is None:
            self._live = collections.deque()
        shard_of, options = self._channels.shard_of, self.options
        for message in messages:
            if not (options.no_local and message.client_id == self._keys.client_id):
                shard = shard_of(message.client_id)
                self._live.append((shard, marks[shard], now, message, options))
        while len(self._live) > _LIVE:
            self._live.popleft()
            self.missed += 1
        self._ready(self)

    def _wake_all(self) -> None:
        self._behind = dict.fromkeys(range(len(self._places)))
        self._ready(self)

    # --- reading ---

    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` messages that follow; None: nothing does now."""
        if self._live:
            shard, mark = self._live[0][:2]
            if self._places[shard] < mark and shard in self._behind:
                return self._read(shard, limit, now, mark)
            return self._read_live(self._live, limit, now)
        if not self._behind:
            return None
        return self._read(next(iter(self._behind)), limit, now, None)

    def _read(self, shard: int, limit: int, now: int, bound: int | None) -> Portion:
        """Read on in a shard, to the end of the era it is in, or to ``bound``."""
        after = self._places[shard]
        era = next(era for era in self.eras if era.until is None or after < era.until[shard])
        try:
            run = self._channel.feed.read(shard, after, limit)
        except TopicstoreError:
            del self._behind[shard]
            self._failing[shard] = None  # the other shards go on
            raise
        ends = [end for end in (bound, None if era.until is None else era.until[shard]) if end is not None]
        end = min(ends, default=run.position)
        stop = rows_until(run, end)
        self.dropped += run.dropped
        self._places[shard] = min(run.position, end)
        self._moved = True
        self._ended |= era.until is not None and self._places[shard] >= era.until[shard]
        del self._behind[shard]
        if run.caught_up and run.position <= end:
            self._channel.wait_locked(self, shard)
        else:
            self._behind[shard] = None  # behind the other shards
        return portion_of(run, stop, self.topic_filter.text, shard, era.options, self._keys.client_id, now)

    def _read_live(self, live: collections.deque[_Live], limit: int, now: int) -> Portion:
        """Take messages stored nowhere that came under the same options, as far as what was stored before is read."""
        messages: list[Message] = []
        expiry: list[int | None] = []
        options = live[0][4]
        while live and len(messages) < limit:
            shard, mark, came, message, then = live[0]
            if then is not options or (self._places[shard] < mark and shard in self._behind):
                break
            live.popleft()
            left = expiry_of(message, came, now)
            if left != 0:
                messages.append(message)
                expiry.append(left)
        retain = [message.retain for message in messages] if options.retain_as_published else False
        some = expiry if any(left is not None for left in expiry) else None
        return Portion(self.topic_filter.text, 0, options, messages, 0, None, None, retain, some)

    def try_again(self) -> None:
        """Read on where that failed."""
        self._behind.update(self._failing)
        self._failing.clear()

    # --- storing ---

    def everything(self) -> list[StateWrite]:
        """Return what stores the subscription and its place."""
        record = put(self._keys.subscription(self.number), self.record())
        place = put(self._keys.place(self.number), (VERSION, self._places))
        return [record, place] if self.limited else [record]

    def writes(self) -> list[StateWrite]:
        """Return what stores the place, if it moved since and is stored at all."""
        if not (self._moved and self.limited):
            return []
        writes = [put(self._keys.place(self.number), (VERSION, self._places))]
        if self._ended and self._held() != self.eras:
            writes.append(put(self._keys.subscription(self.number), self.record(self._held())))
        return writes

    def _held(self) -> tuple[Era, ...]:
        """Return the eras that some shard has not left."""
        return tuple(
            era
            for era in self.eras
            if era.until is None or any(place < end for place, end in zip(self._places, era.until, strict=True))
        )

    def settled(self) -> None:
        """What was read since is handed out, and the place is stored."""
        if self._moved:
            self._settled[:] = self._places
            self._moved = False
            if self._ended:
                self.eras = self._held()
                self._ended = False

    def rewind(self) -> None:
        """Read again what was read since the last `settled`."""
        if self._moved:
            self._places[:] = self._settled
            self._moved = self._ended = False
            self._wake_all()

    def close(self) -> None:
        """Leave the filter's channel."""
        self._channels.leave_locked(self._channel, self)


class RetainedSource(Source):
    """The retained messages that a subscription is sent when it is made, in order of topics.

    Those there were when it was made or, after a resumption, those there are then.
    """

    __slots__ = (
        "_done",
        "_keys",
        "_messages",
        "_moved",
        "_options",
        "_settled",
        "_since",
        "limited",
        "number",
        "topic_filter",
    )

    def __init__(
        self,
        keys: Keys,
        number: int,
        topic_filter: TopicFilter,
        options: SubscribeOptions,
        messages: list[Message],
        since: int,
        behind: str | None = None,
    ) -> None:
        """Send these messages, found at ``since``; ``behind`` is the last topic that was sent, if that is stored."""
        self.topic_filter = topic_filter
        self.limited = options.qos > 0 or behind is not None  # what was stored stays so, whatever the options are now
        self._keys = keys
        self._options = options
        self._messages = [message for message in messages if message.topic > (behind or "")]
        self._since = since
        """What is left of their intervals was counted then."""
        self.number = number
        self._done = 0
        self._settled = 0
        self._moved = behind is not None and self.done  # nothing is left to send: that is to be stored

    @property
    def done(self) -> bool:
        """Everything was handed out."""
        return self._settled == len(self._messages)

    def everything(self) -> list[StateWrite]:
        """Return what stores that these messages are to be sent, or that those before are not any more."""
        key = self._keys.retained(self.number)
        if not self._messages:
            return []
        return [put(key, (VERSION, "")) if self.limited else FrameworkWrite(key, None)]

    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` messages that follow; None: that was all."""
        options = self._options
        following = self._messages[self._done : self._done + limit]
        if not following:
            return None
        self._done += len(following)
        self._moved = True
        left = [expiry_of(message, self._since, now) for message in following]  # intervals were lowered when found
        messages = [message for message, seconds in zip(following, left, strict=True) if seconds != 0]
        qos = [min(message.qos, options.qos) for message in messages]
        expiry = [seconds for seconds in left if seconds != 0]
        return Portion(self.topic_filter.text, 0, options, messages, qos, None, None, True, expiry)

    def writes(self) -> list[StateWrite]:
        """Return what stores the last topic that was delivered, or removes it at the end."""
        if not (self._moved and self.limited):
            return []
        key = self._keys.retained(self.number)
        if self._done == len(self._messages):
            return [FrameworkWrite(key, None)]
        return [put(key, (VERSION, self._messages[self._done - 1].topic))]

    def settled(self) -> None:
        """What was read since is handed out, and the place is stored."""
        self._settled, self._moved = self._done, False

    def rewind(self) -> None:
        """Read again what was read since the last `settled`."""
        self._done, self._moved = self._settled, False

    def close(self) -> None:
        """There is nothing to give back."""
