"""`LiveSession`: the packets to send in a session while its client is connected, and how they are committed.

Deliveries are drafted: messages are read from the sources and get packet ids. A draft is committed with those of other
sessions (`topicstore.sessions.commits`). If that succeeds it is settled, and stays in the outbox until it is taken; if
it fails, everything is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import attrs

from topicstore.contract.errors import SessionEndedError, SessionTakenOverError, TopicstoreError
from topicstore.contract.state import StateWrite

from .credit import ASKED, Allow, Permit, likely
from .database_parts import RetainedMessages
from .delivery_batch import DeliveryBatch, Packet, count_of
from .dispatch import Dispatcher
from .durable_filters import DurableFilters
from .inflight import InflightWindow, Staged
from .model import Ended, PubRel, SubscribeOptions
from .outbox import Outbox
from .overlapping import OverlappingSources
from .portions import Portion
from .resending import delivery_again, read_again
from .retained_source import RetainedSource
from .session_state import Found
from .shared.source import SharedSource
from .sources import FeedSource, Source, closing

__all__ = ["Draft", "LiveSession"]

_READS = 256
"""Number of reads after which a session leaves the turn to others, even if it found nothing to deliver."""
_EFFORT = 20
"""Number of messages that take as long as one read."""
_NOTHING = SubscribeOptions()
_RESENT = 1_000
"""Number of messages read at a time to be sent again."""


@attrs.define
class Draft:
    """The deliveries that a session hands out once ``writes`` are committed."""

    session: LiveSession
    portions: list[Portion]
    ids: Sequence[int]
    sources: list[Source]
    staged: Staged
    writes: list[StateWrite]

    def __len__(self) -> int:
        """Return how many packets it hands out."""
        released = 0 if self.staged.released is None else len(self.staged.released.ids)
        return sum(map(len, self.portions)) + released + self.staged.again


class LiveSession:
    """The internals of a session whose client is connected; programs hold its `Session`.

    All of it is used under the dispatcher's lock, except what needs none, which a server calls in its event loop.
    """

    __slots__ = (
        "_behind",
        "_blocked",
        "_dirty",
        "_dispatcher",
        "_filters",
        "_held",
        "_noted",
        "_outbox",
        "_read_retained",
        "_size",
        "_stalled",
        "_unread",
        "batch_size",
        "client_id",
        "effort",
        "ended",
        "failure",
        "found",
        "guard",
        "incoming",
        "keep_alive",
        "keys",
        "numbers",
        "overlapping",
        "paused_since",
        "permit",
        "receive_maximum",
        "resuming",
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
        read_retained: RetainedMessages,
        *,
        receive_maximum: int,
        keep_alive: float,
        allow: Allow | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.client_id = found.client_id
        self.keys = window.keys
        self.found = found
        """The session as it is stored."""
        self.guard = found.guard
        """The guard on which its writes are conditional."""
        self.window = window
        self.incoming = dict.fromkeys(incoming)  # an empty set takes more than three times the memory
        """Packet ids of incoming messages of QoS 2 whose PUBREL has not come."""
        self.receive_maximum = receive_maximum
        self.keep_alive = keep_alive
        self.permit = Permit(allow, found.client_id, dispatcher.steady)
        self.batch_size = batch_size
        """The most packets that are taken in one turn; None: any number."""
        self.effort = 0
        """What the last `draft` cost, in messages: every read counts as some."""
        self.paused_since: int | None = None
        """Since when the session has been held back; None if it isn't. Set in any thread, without the lock."""
        self.seen = dispatcher.steady()
        """When the client was last heard of, if it has a keep-alive. Set in any thread, without the lock."""
        self.stuck_since: int | None = None
        """The time since which the window has been full without an acknowledgement; None if it isn't."""
        self.ended: Ended | None = None
        self.failure: TopicstoreError | None = None
        """Why something can't be read or committed, which will be tried again; None if nothing failed."""
        self.sources: dict[str, FeedSource | SharedSource] = {}
        """The subscriptions by filter. Changed by `topicstore.sessions.subscribing`, as are the next two."""
        self.retained: dict[int, RetainedSource] = {}
        """The retained messages that are being sent, by number of subscription."""
        self.overlapping: OverlappingSources | None = None
        """The subscriptions that overlap, if a message that matches several of them is delivered once."""
        self.numbers = 0
        """The number of the next subscription."""
        self.resuming: Iterator[int] | None = None
        """Follows the stored subscriptions, one a step; None once all are followed. Until then nothing is delivered."""
        self._dispatcher = dispatcher
        self._filters = filters
        self._read_retained = read_retained
        self._behind: dict[Source, None] = {}
        """The sources that may have something to read, in the order of their turns."""
        self._outbox = Outbox(window, self.permit, dispatcher.clock)
        self._unread: tuple[Source, ...] = ()
        """The sources that could not be read and will be tried again."""
        self._blocked = False
        """Whether it has something to send, and no room for it."""
        self._dirty = False
        """Whether it has acknowledgements that are not committed."""
        self._stalled = False
        """Whether it can't go on before the next tick."""
        self._noted = False
        """Whether the dispatcher will call `noticed`. Set in any thread, without the lock."""
        self._held = False
        """Whether it lost its turn because it is held back."""
        self._size: float | None = None
        """The average size of the payloads that were read last, if bytes are limited; None: unknown."""

    @property
    def stored(self) -> bool:
        """Whether it is stored; otherwise it is kept in memory, and has nothing to commit."""
        return self.window.stored

    # --- drafts ---

    def draft(self, limit: int, max_bytes: int | None = None) -> Draft | None:
        """Read the next deliveries, as far as there is room; return None if there is nothing to commit.

        Those of a session that is kept in memory may be taken then. ``max_bytes``: about how many bytes the payloads
        may have. Raises `InvalidArgumentError` if it can't be said what is allowed; then call `rewind`.
        """
        window = self.window
        portions: list[Portion] = []
        sources: list[Source] = []
        self.effort, refused = 0, self.permit.refused
        if self.held_since is not None or self.resuming is not None:
            self._become_ready()
            return None
        waiting = self._outbox.packets or (window.resend and self._room())  # what needs no room is sent without any
        if not waiting:
            left = max(limit - window.received, 0)  # so that all of the draft is handed out
            self._read(left, max_bytes, portions, sources)
        some = portions or window.received or self.permit.refused > refused
        if not (some or any(source.urgent for source in sources)):
            if sources:  # places moved, with nothing to hand out
                self.touched()
            return None
        if not (self.stored or window.received):
            self._hand_over(portions, sources)
            return None
        counts = [portion.acknowledged() for portion in portions]
        ids = window.free_ids(sum(counts))
        flights, start = [], 0
        for portion, count in zip(portions, counts, strict=True):
            if count:
                flights.append(portion.flight(ids[start : start + count]))
                start += count
        staged = window.stage(flights, whole=False)
        writes = [write for source in sources for write in source.writes()] + staged.writes if self.stored else []
        return Draft(self, portions, ids, sources, staged, [self.guard, *writes] if writes else [])

    def _hand_over(self, portions: list[Portion], sources: list[Source]) -> None:
        """Give packet ids to what was read, and put it into the outbox: nothing of it has to be committed."""
        for portion in filter(len, portions):
            count = portion.acknowledged()
            ids = self.window.send(count, portion.flight) if count else ()
            self._outbox.add([DeliveryBatch(portion.packet_ids(ids), portion)])
        for source in sources:
            self._settle_source(source)

    def last_draft(self) -> Draft | None:
        """Return a draft of uncommitted changes that hands out nothing; None if there are no changes."""
        staged = self.window.stage([], whole=True)
        sources: list[Source] = [*self.sources.values(), *self.retained.values()]
        if not self.stored:
            return Draft(self, [], range(0), sources, staged, [])
        writes = [write for source in sources for write in source.writes()] + staged.writes
        return Draft(self, [], range(0), sources, staged, [self.guard, *writes]) if writes else None

    def _read(self, limit: int, max_bytes: int | None, portions: list[Portion], sources: list[Source]) -> None:
        """Take messages from the sources in turn, as far as there is room."""
        room = self._room()
        left, now = limit, self._dispatcher.clock()
        self._outbox.read_at = now
        waiting: list[Source] = []
        later: list[Source] = []
        turn, asks = _READS, self.permit.asks
        try:
            while self._behind and left and turn > 0 and (max_bytes is None or max_bytes > 0):
                source = next(iter(self._behind))
                del self._behind[source]
                if source.limited and not room:
                    waiting.append(source)
                    continue
                turn -= source.cost
                most = left if max_bytes is None else min(left, likely(self._size, max_bytes))
                most = min(most, ASKED) if asks else most
                portion = self._read_from(source, min(most, room) if source.limited else most, now)
                if portion is None:
                    continue
                permitted = self._permitted(source, portion)
                if permitted is None:
                    self._go_back(source, portions, () if asks else sources)
                    break
                if asks and portion:
                    later.append(source)  # so that what is undecided goes back alone
                else:
                    self._behind[source] = None  # after the others
                portion = permitted
                sources.append(source)
                if len(portion):
                    self.effort += len(portion)
                    if max_bytes is not None:
                        size = sum(len(message.payload) for message in portion.messages)
                        self._size, max_bytes = size / len(portion), max_bytes - size
                    portions.append(portion)
                    left -= len(portion)
                    room -= portion.acknowledged()
        finally:
            self.effort += (_READS - turn) * _EFFORT
            self._behind = dict.fromkeys(waiting) | self._behind | dict.fromkeys(later)

    def _read_from(self, source: Source, limit: int, now: int) -> Portion | None:
        try:
            return source.read(limit, now)
        except TopicstoreError as failure:
            self._unread = (*self._unread, source)
            self.failed(failure)  # in one source: the others go on
            return Portion(source.topic_filter.text, 0, _NOTHING, (), 0, None)

    def _permitted(self, source: Source, portion: Portion) -> Portion | None:
        """Return what the client may be sent of a portion; None if that is not known yet."""
        if self.permit.allow is None or not portion:
            return portion
        try:
            answers = self.permit.answers(portion.messages)
        except BaseException:
            self._behind[source] = None
            raise
        if answers is None:
            return None
        self.permit.refused += answers.count(False)
        return source.permitted(portion, answers)

    def _go_back(self, source: Source, portions: list[Portion], sources: Sequence[Source]) -> None:
        """Read again what was read last, of a source, and all else if ``sources`` has more of the same one."""
        if source in sources:
            portions.clear()
        for one in dict.fromkeys(sources) if source in sources else [source]:
            one.rewind()
            self._behind[one] = None

    def settle(self, draft: Draft) -> None:
        """Note that a draft is committed: its deliveries may be handed out."""
        released = self.window.settle(draft.staged)
        start = 0
        out: list[Packet] = [PubRel(packet_id) for packet_id in released]
        for portion in filter(len, draft.portions):
            count = portion.acknowledged()
            out.append(DeliveryBatch(portion.packet_ids(draft.ids[start : start + count]), portion))
            start += count
        for source in draft.sources:
            self._settle_source(source)
        self._outbox.add(out)

    def _settle_source(self, source: Source) -> None:
        for part in source.parts():
            was_limited = part.limited
            part.settled()
            if was_limited and not part.limited:
                self._filters.remove_locked(part.topic_filter.text)
            if isinstance(part, RetainedSource) and part.done and self.retained.get(part.number) is part:
                del self.retained[part.number]

    def fail(self, draft: Draft, failure: TopicstoreError) -> None:
        """Note that a draft could not be committed: its messages are read again."""
        for source in draft.sources:
            source.rewind()
            self._behind[source] = None
        self.stall(failure)

    def stall(self, failure: TopicstoreError) -> None:
        """Let the session wait for the next tick, because it can't go on."""
        self._stalled = True
        self._dispatcher.idle_locked(self)
        self.failed(failure)

    def failed(self, failure: TopicstoreError) -> None:
        """Note an error of reading or committing. Unless the session has ended, the next tick tries again."""
        self.failure = failure
        if self.ended is None:
            self._dispatcher.failed[self] = None

    def go_on(self) -> None:
        """Go on without waiting for a tick, because the client's own thread asks for more."""
        self._stalled = False

    def try_again(self) -> None:
        """Read again the sources that failed."""
        self.failure = None
        self._stalled = False
        unread, self._unread = self._unread, ()
        for source in unread:
            source.try_again()
            self.wake(source)
        self._become_ready()

    def rewind(self) -> None:
        """Read again the messages that were not handed out, because an error came in between."""
        for source in (*self.sources.values(), *self.retained.values()):
            source.rewind()
        self._behind.update(dict.fromkeys(self.retained.values()))

    # --- the outbox ---

    def take(self, limit: int, max_bytes: int | None = None) -> list[Packet]:
        """Return the packets that may be handed out, and become ready if there are more."""
        outbox = self._outbox
        if outbox.revised and self.held_since is None and outbox.revise():
            self.touched()
        if self.held_since is not None or self.resuming is not None:
            outbox.waited = True
            self._become_ready()
            return []
        if self.window.resend and not (outbox.waited and outbox.packets):
            left = limit - count_of(outbox.packets)
            if left > 0:
                self._resend(min(left, self._room()))
        taken, freed = outbox.take(limit, max_bytes)
        if freed:
            self.touched()
        self.ask()
        return taken

    def put_back(self, packets: Sequence[Packet]) -> None:
        """Take back packets that were taken and not handed out, because an error came in between."""
        if self.ended is None:
            if self._outbox.put_back(packets):
                self.touched()
            self.ask()

    def waiting(self) -> int:
        """Return how many packets can be taken without a draft, at most."""
        return count_of(self._outbox.packets) + self.window.unsent()

    def unsent(self) -> int:
        """Return how many messages of earlier connections are to be sent again, or found to have vanished."""
        return self.window.unsent() if self.window.resend else 0

    def _resend(self, room: int) -> None:
        """Put messages of earlier connections into the outbox, to be sent again (MQTT 5, section 4.4)."""
        window = self.window
        self._outbox.read_at = now = self._dispatcher.clock()
        while room > 0 and window.resend:
            flight = window.resend[0]
            with window.lock:
                most = min(room, ASKED if self.permit.asks else _RESENT)
                rows = list(islice((flight.unsent or {}).items(), most))
            found = read_again(flight, [row for _, row in rows], self._dispatcher.hub, self._read_retained)
            if self.permit.allow is not None and not self.permit.remove_refused(found):
                return
            with window.lock:
                for packet_id, row in rows:
                    message = found[row]
                    if packet_id not in (flight.unsent or ()):  # it was acknowledged meanwhile
                        continue
                    if message is None:
                        window.vanished(packet_id)
                        self.touched()
                    else:
                        flight.sent(packet_id)
                        self._outbox.packets.append(delivery_again(flight, packet_id, row, message, now))
            room -= len(rows)
            if not flight.unsent:
                del window.resend[0]

    def restrict(self, allow: Allow | None) -> None:
        """Have another `allow` hold from now on, also for what is drafted and was not handed out."""
        self.permit.allow, self.permit.asks, self._outbox.revised = allow, False, True
        self.ask_again()
        for source in self.sources.values():
            if isinstance(source, SharedSource):
                source.group.reconsider(source)

    # --- its turn ---

    def _room(self) -> int:
        """Return how many messages may be sent until the client's receive maximum is reached (MQTT 5, section 4.9)."""
        return self.window.room(self.receive_maximum)

    def ask(self) -> None:
        """Become ready if there is something to do and room for it; otherwise wait for an event that changes this."""
        if self._stalled:
            return
        if self.held_since is not None or self.resuming is not None:
            self._become_ready()
            return
        window = self.window
        waiting = bool(window.resend or self._behind)
        room = waiting and self._room()
        self._blocked = waiting and not room
        at_once = self._outbox.packets or window.received or any(not source.limited for source in self._behind)
        if at_once or (waiting and room):
            self._dispatcher.again_locked(self)
        else:
            self._dispatcher.idle_locked(self)
        if self._blocked:
            self.stuck_since = self.stuck_since or self._dispatcher.steady()
            if self._noted:  # perhaps by somebody who didn't know that it is blocked
                self._dispatcher.bell.ring()

    def wake(self, source: Source) -> None:
        """Note that a source has something to read."""
        if self.ended is not None:  # and the source is not closed yet
            return
        self._behind[source] = None
        if not (self._stalled or (self._blocked and source.limited)):
            self._become_ready()

    def _become_ready(self) -> None:
        """Become ready, or once it is resumed and no longer held back."""
        if self.resuming is not None:
            self._dispatcher.idle_locked(self)  # its last step asks again
        elif self.held_since is None:
            self._dispatcher.ready_locked(self)
        else:
            self._held = True
            self._dispatcher.idle_locked(self)
            if self._noted:  # perhaps because that ended at this moment, by somebody who didn't know of this
                self._dispatcher.bell.ring()

    def forget(self, source: Source) -> None:
        """Stop reading a source."""
        self._behind.pop(source, None)
        self._unread = tuple(unread for unread in self._unread if unread is not source)
        if self.overlapping is not None:
            self.overlapping.forget(source)

    def merge_overlapping(self, source: FeedSource) -> None:
        """Read a new subscription together with those that it overlaps with, if each message is delivered once."""
        if self.overlapping is not None:
            for joined in self.overlapping.consider(source):
                self.forget(joined)

    def deliver_once(self) -> None:
        """Deliver a message that matches several subscriptions once. To be called before there are subscriptions."""
        self.overlapping = OverlappingSources(self._dispatcher, self.wake)

    def waits_for(self) -> str:
        """Return what the session waits for, as in `SessionStatus.waits_for`."""
        if self.failure is not None:
            return str(self.failure)
        if self.held_since is not None:
            return "resume" if self.paused_since is not None else "permission"
        if self._blocked:
            return "acknowledgements"
        return "delivery" if self._behind or self._outbox.packets or self.window.resend else "nothing"

    # --- what is to be committed some time ---

    def acknowledged(self) -> None:
        """Note an acknowledgement: there may be room, and there is something to commit. Needs no lock."""
        self.stuck_since = None
        self._note()

    def pause(self) -> None:
        """Hold the session back. Needs no lock."""
        if self.paused_since is None:
            self.paused_since = self._dispatcher.steady()

    def resume(self) -> None:
        """Hold the session back no longer. Needs no lock."""
        if self.paused_since is not None:
            self.paused_since = None
            self._note()

    @property
    def held_since(self) -> int | None:
        """Since when it is held back, because it is paused or waits for what may be sent; None if it isn't."""
        return self.permit.undecided_since if self.paused_since is None else self.paused_since

    def ask_again(self) -> None:
        """Ask again what may be sent that was not known. Needs no lock."""
        if self.permit.undecided_since is not None:
            self.permit.undecided_since = None
            self._note()

    def _note(self) -> None:
        """Have the dispatcher call `noticed`. Needs no lock."""
        if not self._noted:
            self._noted = True  # before the dispatcher is told, which may call it at once
            self._dispatcher.hear(self)
        if self._blocked or self._held or self.window.received:  # after it is noted: see `ask`
            self._dispatcher.bell.ring()

    def noticed(self) -> None:
        """Handle what was noted."""
        self._noted = False  # before it looks: what comes from here on is noted again
        if self.ended is not None:
            return
        self.touched()
        if self._held and self.held_since is None:
            self._held = False
            self.ask()
        if self._blocked or self.window.received:
            self._blocked = False
            self.stuck_since = None
            self._become_ready()

    def touched(self) -> None:
        """Note that there is something to commit at the next checkpoint."""
        if not self._dirty:
            self._dirty = True
            self._dispatcher.dirty[self] = None

    def clean(self) -> None:
        """Note that all acknowledgements are committed."""
        self._dirty = False
        self._dispatcher.dirty.pop(self, None)

    # --- its end ---

    def end(self, why: Ended) -> None:
        """End this object, which can't be used after that."""
        self.ended = why
        self._dispatcher.forget_locked(self)
        self.resuming = None
        uncount = None if self.stored else self._filters.remove_locked  # stored sessions are counted until they end
        sources = [*self.sources.values(), *self.retained.values()]
        self._dispatcher.close_locked(closing(sources, uncount), len(sources))
        self.sources.clear()
        self.retained.clear()
        self.overlapping = None
        self._behind.clear()
        self._outbox.packets.clear()

    def check(self) -> None:
        """Raise `SessionEndedError`, or `SessionTakenOverError`, if the object has ended."""
        if (over := self.over()) is not None:
            raise over

    def over(self) -> SessionEndedError | None:
        """Return the error that `check` raises; None if the object has not ended."""
        kind = SessionTakenOverError if self.ended is Ended.TAKEN_OVER else SessionEndedError
        return None if self.ended is None else kind(f"session {self.client_id!r} is over: {self.ended.value}")
