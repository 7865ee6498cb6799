"""`LiveSession`: what a session is to be sent while its client is connected, and how that is committed.

What there is to send is drafted: messages are read from the sources and get packet ids. A draft is committed with
those of other sessions (`topicstore.sessions.commits`). Then it is settled, and lies in the outbox until it is taken;
or it failed, and everything is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import attrs

from topicstore.contract.errors import SessionEndedError, SessionTakenOverError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite

from .dispatch import Dispatcher
from .durable_filters import DurableFilters
from .inflight import InflightWindow, Staged
from .model import Delivery, Ended, Release, SubscribeOptions
from .portions import Portion
from .resending import delivery_again, read_again
from .session_state import Found
from .shared.source import SharedSource
from .sources import FeedSource, RetainedSource, Source

__all__ = ["Draft", "LiveSession"]

_READS = 256
"""Reads after which a session lets others have their turn, though it found nothing to deliver."""
_NOTHING = SubscribeOptions()
_RESENT = 1_000
"""Messages read at a time to be sent again."""


@attrs.define
class Draft:
    """What a session is about to hand out, once ``writes`` are committed."""

    session: LiveSession
    portions: list[Portion]
    ids: Sequence[int]
    sources: list[Source]
    staged: Staged
    writes: list[StateWrite]


class LiveSession:
    """The inside of a session whose client is connected; programs hold its `Session`.

    All of it is used under the dispatcher's lock.
    """

    __slots__ = (
        "_behind",
        "_blocked",
        "_dirty",
        "_dispatcher",
        "_filters",
        "_outbox",
        "_read_retained",
        "_stalled",
        "_unread",
        "client_id",
        "ended",
        "failure",
        "found",
        "guard",
        "incoming",
        "keep_alive",
        "keys",
        "numbers",
        "receive_maximum",
        "retained",
        "seen",
        "sources",
        "stuck_since",
        "window",
    )

    def __init__(
        self,
        found: Found,
        window: InflightWindow,
        incoming: Iterable[int],
        dispatcher: Dispatcher[LiveSession],
        filters: DurableFilters,
        read_retained: Callable[[str], list[Message]],
        *,
        receive_maximum: int,
        keep_alive: float,
    ) -> None:
        self.client_id = found.client_id
        self.keys = window.keys
        self.found = found
        """The session as it is stored."""
        self.guard = found.guard
        """The condition of its writes."""
        self.window = window
        self.incoming = dict.fromkeys(incoming)  # an empty set takes more than three times the room
        """Packet ids of incoming messages of QoS 2 whose PUBREL has not come."""
        self.receive_maximum = receive_maximum
        self.keep_alive = keep_alive
        self.seen = dispatcher.steady()
        """When the client was last heard of, if it has a keep-alive."""
        self.stuck_since: int | None = None
        """Since when the window has been full without an acknowledgement."""
        self.ended: Ended | None = None
        self.failure: TopicstoreError | None = None
        """Why something can't be read or committed at the moment; it is tried again."""
        self.sources: dict[str, FeedSource | SharedSource] = {}
        """By filter, its subscriptions. Changed by `topicstore.sessions.subscribing`, as the next two."""
        self.retained: dict[int, RetainedSource] = {}
        """By number of subscription, the retained messages that it is being sent."""
        self.numbers = 0
        """The number that the next subscription gets."""
        self._dispatcher = dispatcher
        self._filters = filters
        self._read_retained = read_retained
        self._behind: dict[Source, None] = {}
        """Sources that may have something to read, in the order of their turns."""
        self._outbox: list[Delivery | Release] = []
        """What is committed, and was not handed out yet."""
        self._unread: tuple[Source, ...] = ()
        """Sources that could not be read, to be tried again."""
        self._blocked = False
        """It has something to send, and no room for it."""
        self._dirty = False
        """It has acknowledgements that are not committed."""
        self._stalled = False
        """It can't go on before the next tick."""

    # --- drafts ---

    def draft(self, limit: int) -> Draft | None:
        """Read what to hand out, as far as there is room; None if there is nothing to commit."""
        window = self.window
        portions: list[Portion] = []
        sources: list[Source] = []
        if not (self._outbox or (window.resend and self._room())):  # what needs no room goes on without any
            self._read(max(limit - window.received, 0), portions, sources)  # so that all of it is handed out
        if not (portions or window.received):
            if sources:  # places moved, with nothing to hand out
                self.touched()
            return None
        counts = [portion.acknowledged() for portion in portions]
        ids = window.free_ids(sum(counts))
        flights, start = [], 0
        for portion, count in zip(portions, counts, strict=True):
            if count:
                flights.append(portion.flight(ids[start : start + count]))
                start += count
        staged = window.stage(flights, whole=False)
        writes = [write for source in sources for write in source.writes()] + staged.writes
        return Draft(self, portions, ids, sources, staged, [self.guard, *writes] if writes else [])

    def last_draft(self) -> Draft | None:
        """Return what there is to commit without handing out anything; None if there is nothing."""
        staged = self.window.stage([], whole=True)
        sources: list[Source] = [*self.sources.values(), *self.retained.values()]
        writes = [write for source in sources for write in source.writes()] + staged.writes
        return Draft(self, [], range(0), sources, staged, [self.guard, *writes]) if writes else None

    def _read(self, limit: int, portions: list[Portion], sources: list[Source]) -> None:
        """Take messages from the sources in turn, as far as there is room."""
        room = self._room()
        left, now = limit, self._dispatcher.clock()
        waiting: list[Source] = []
        turn = _READS
        while self._behind and left and turn > 0:
            source = next(iter(self._behind))
            del self._behind[source]
            if source.limited and not room:
                waiting.append(source)
                continue
            turn -= source.cost
            portion = self._read_from(source, min(left, room) if source.limited else left, now)
            if portion is None:
                continue
            self._behind[source] = None  # after the others
            sources.append(source)
            if len(portion):
                portions.append(portion)
                left -= len(portion)
                room -= portion.acknowledged()
        self._behind = dict.fromkeys(waiting) | self._behind

    def _read_from(self, source: Source, limit: int, now: int) -> Portion | None:
        try:
            return source.read(limit, now)
        except TopicstoreError as failure:
            self._unread = (*self._unread, source)
            self.failed(failure)  # in a part of it: all else goes on
            return Portion(source.topic_filter.text, 0, _NOTHING, (), 0, None)

    def settle(self, draft: Draft) -> None:
        """What was drafted is committed: it may be handed out."""
        released = self.window.settle(draft.staged)
        start = 0
        out: list[Delivery | Release] = [Release(packet_id) for packet_id in released]
        for portion in draft.portions:
            count = portion.acknowledged()
            out += portion.deliveries(draft.ids[start : start + count])
            start += count
        for source in draft.sources:
            self._settle_source(source)
        self._outbox += out

    def _settle_source(self, source: Source) -> None:
        was_limited = source.limited
        source.settled()
        if was_limited and not source.limited:
            self._filters.remove_locked(source.topic_filter.text)
        if isinstance(source, RetainedSource) and source.done and self.retained.get(source.number) is source:
            del self.retained[source.number]

    def fail(self, draft: Draft, failure: TopicstoreError) -> None:
        """What was drafted could not be committed: it is read again."""
        for source in draft.sources:
            source.rewind()
            self._behind[source] = None
        self.stall(failure)

    def stall(self, failure: TopicstoreError) -> None:
        """It can't go on: let it wait for the next tick."""
        self._stalled = True
        self._dispatcher.idle_locked(self)
        self.failed(failure)

    def failed(self, failure: TopicstoreError) -> None:
        """Something could not be read or committed: it is tried again at the next tick, unless it has ended."""
        self.failure = failure
        if self.ended is None:
            self._dispatcher.failed[self] = None

    def go_on(self) -> None:
        """Wait for no tick: the client's own thread asks for more."""
        self._stalled = False

    def try_again(self) -> None:
        """Try again what failed."""
        self.failure = None
        self._stalled = False
        unread, self._unread = self._unread, ()
        for source in unread:
            source.try_again()
            self.wake(source)
        self._dispatcher.ready_locked(self)

    def rewind(self) -> None:
        """Read again what was not handed out: something came in between."""
        for source in (*self.sources.values(), *self.retained.values()):
            source.rewind()
        self._behind.update(dict.fromkeys(self.retained.values()))

    # --- the outbox ---

    def take(self, limit: int) -> list[Delivery | Release]:
        """Return what may be handed out, and see whether there will be more."""
        if self.window.resend and len(self._outbox) < limit:
            self._resend(min(limit - len(self._outbox), self._room()))
        taken, self._outbox = self._outbox[:limit], self._outbox[limit:]
        self.ask()
        return taken

    def _resend(self, room: int) -> None:
        """Put messages of earlier connections into the outbox again."""
        window = self.window
        while room > 0 and window.resend:
            flight, now = window.resend[0], self._dispatcher.clock()
            rows = list(islice((flight.unsent or {}).items(), min(room, _RESENT)))
            found = read_again(flight, [row for _, row in rows], self._dispatcher.hub, self._read_retained, now)
            for packet_id, row in rows:
                message = found[row]
                if message is None:
                    window.vanished(packet_id)
                    self.touched()
                else:
                    flight.sent(packet_id)
                    self._outbox.append(delivery_again(flight, packet_id, row, message, now))
            room -= len(rows)
            if not flight.unsent:
                del window.resend[0]

    # --- its turn ---

    def _room(self) -> int:
        """Return how many messages may be sent before the client's receive maximum is reached."""
        window = self.window
        return max(0, self.receive_maximum - len(window) + window.unsent())

    def ask(self) -> None:
        """Be ready if there is something to do that there is room for; else wait for what changes that."""
        if self._stalled:
            return
        window = self.window
        waiting, room = bool(window.resend or self._behind), self._room()
        self._blocked = waiting and not room
        at_once = self._outbox or window.received or any(not source.limited for source in self._behind)
        if at_once or (waiting and room):
            self._dispatcher.again_locked(self)
        else:
            self._dispatcher.idle_locked(self)
        if self._blocked:
            self.stuck_since = self.stuck_since or self._dispatcher.steady()

    def wake(self, source: Source) -> None:
        """A source has something to read."""
        self._behind[source] = None
        if not (self._stalled or (self._blocked and source.limited)):
            self._dispatcher.ready_locked(self)

    def forget(self, source: Source) -> None:
        """A source is not read any more."""
        self._behind.pop(source, None)

    def waits_for(self) -> str:
        """Say what it waits for, as `SessionStatus.waits_for` has it."""
        if self.failure is not None:
            return str(self.failure)
        if self._blocked:
            return "acknowledgements"
        return "delivery" if self._behind or self._outbox or self.window.resend else "nothing"

    # --- what is to be committed some time ---

    def acknowledged(self) -> bool:
        """Something was: there may be room, and there is something to commit. True."""
        self.touched()
        if self._blocked or self.window.received:
            self._blocked = False
            self.stuck_since = None
            self._dispatcher.ready_locked(self)
        return True

    def touched(self) -> None:
        """There is something to commit, at a checkpoint."""
        if not self._dirty:
            self._dirty = True
            self._dispatcher.dirty[self] = None

    def clean(self) -> None:
        """Everything acknowledged is committed."""
        self._dirty = False
        self._dispatcher.dirty.pop(self, None)

    # --- its end ---

    def end(self, why: Ended) -> None:
        """Be of no more use."""
        self.ended = why
        self._dispatcher.forget_locked(self)
        for source in (*self.sources.values(), *self.retained.values()):
            source.close()
        self.sources.clear()
        self.retained.clear()
        self._behind.clear()
        self._outbox.clear()

    def check(self) -> None:
        """Raise `SessionEndedError`, or `SessionTakenOverError`, if it is of no more use."""
        if self.ended is not None:
            kind = SessionTakenOverError if self.ended is Ended.TAKEN_OVER else SessionEndedError
            raise kind(f"session {self.client_id!r} is over: {self.ended.value}")
