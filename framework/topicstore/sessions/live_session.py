"""`LiveSession`: the packets to send in a session while its client is connected, and how they are committed.

A delivery begins as a draft: messages that were read from the sources (the subscriptions) and got packet ids. Drafts of
several sessions are committed together (`topicstore.sessions.commits`). After the commit, `settle` puts the packets
into the outbox, where they wait until they are taken. If the commit fails, the messages are read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import attrs

from topicstore.contract.errors import SessionEndedError, SessionTakenOverError, TopicstoreError
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.pubsub.retained_lookup import RetainedMessages

from .cursors import FeedSource, Source, closing
from .delivery_batch import ASKED, Allow, DeliveryBatch, Packet, Permit, Portion, count_of, likely
from .dispatcher import Dispatcher
from .in_flight import InflightWindow, Staged
from .model import Ended, PubRel, SubscribeOptions
from .outbox import Outbox
from .overlapping_cursor import OverlappingSources
from .resending import delivery_again, read_again
from .retained_cursor import RetainedSource
from .session_store import Found
from .shared.cursor import SharedSource

__all__ = ["Draft", "LiveSession"]

_READS = 256
"""Number of reads after which a session's turn ends, even if it found nothing to deliver."""
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
        """Return the number of packets that the draft hands out."""
        released = 0 if self.staged.released is None else len(self.staged.released.ids)
        return sum(map(len, self.portions)) + released + self.staged.again


class LiveSession:
    """The state of a session whose client is connected; the public object is its `Session`.

    The caller of a method holds the sessions' mutex, unless the docstring says that the method needs no lock.
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
        """The cost of the last `draft`, in messages; a read counts as `_EFFORT` messages."""
        self.paused_since: int | None = None
        """The time since which the session has been paused; None if it isn't. Set in any thread, without the lock."""
        self.seen = dispatcher.steady()
        """The time of the client's last packet, if it has a keep alive. Set in any thread, without the lock."""
        self.stuck_since: int | None = None
        """The time since which the window has been full without an acknowledgement; None if it isn't."""
        self.ended: Ended | None = None
        self.failure: TopicstoreError | None = None
        """The last error of reading or committing, until the next tick retries; None if nothing failed."""
        self.sources: dict[str, FeedSource | SharedSource] = {}
        """The subscriptions by filter. Changed by `topicstore.sessions.subscribe`, as are the next two."""
        self.retained: dict[int, RetainedSource] = {}
        """The retained messages that are being sent, by number of subscription."""
        self.overlapping: OverlappingSources | None = None
        """The subscriptions that overlap, if a message that matches several of them is delivered once."""
        self.numbers = 0
        """The number of the next subscription."""
        self.resuming: Iterator[int] | None = None
        """Loads the stored subscriptions, one a step; None once all are loaded. Until then nothing is delivered."""
        self._dispatcher = dispatcher
        self._filters = filters
        self._read_retained = read_retained
        self._behind: dict[Source, None] = {}
        """The sources that may have messages to read, in the order of their turns."""
        self._outbox = Outbox(window, self.permit, dispatcher.clock)
        self._unread: tuple[Source, ...] = ()
        """The sources that could not be read and will be tried again."""
        self._blocked = False
        """Whether the session has messages to send, but its window is full."""
        self._dirty = False
        """Whether the session has acknowledgements that are not committed."""
        self._stalled = False
        """Whether the session failed and waits for the next tick."""
        self._noted = False
        """Whether the dispatcher will call `noticed`. Set in any thread, without the lock."""
        self._held = False
        """Whether the session lost its turn because it is held back (`held_since`)."""
        self._size: float | None = None
        """The average size of the payloads that were read last, if bytes are limited; None: unknown."""

    @property
    def stored(self) -> bool:
        """Whether the session is stored; otherwise it is kept in memory, and has nothing to commit."""
        return self.window.stored

    # --- drafts ---

    def draft(self, limit: int, max_bytes: int | None = None) -> Draft | None:
        """Read the next deliveries that fit into the window; return None if there is nothing to commit.

        Deliveries of a session that is kept in memory can be taken without a commit. ``max_bytes``: about the most
        bytes of payload. Raises `InvalidArgumentError` if ``allow`` fails; the caller then calls `rewind`.
        """
        window = self.window
        portions: list[Portion] = []
        sources: list[Source] = []
        self.effort, refused = 0, self.permit.refused
        if self.held_since is not None or self.resuming is not None:
            self._become_ready()
            return None
        waiting = self._outbox.packets or (window.resend and self._room())  # with a full window, QoS 0 is sent
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
        """Assign packet ids to the messages read, and put them into the outbox without a commit."""
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
        """Read messages from the sources in turn, up to the room in the window."""
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
                    later.append(source)  # not twice in a draft, so that only undecided messages are read again
                elif not source.exhausted:
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
            self.failed(failure)  # other sources are not affected
            return Portion(source.topic_filter.text, 0, _NOTHING, (), 0, None)

    def _permitted(self, source: Source, portion: Portion) -> Portion | None:
        """Return the messages of a portion that may be sent to the client; None if ``allow`` can't answer yet."""
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
        """Rewind a source to before its last read; if ``sources`` contains it, discard the draft and rewind all."""
        if source in sources:
            portions.clear()
        for one in dict.fromkeys(sources) if source in sources else [source]:
            one.rewind()
            self._behind[one] = None

    def settle(self, draft: Draft) -> None:
        """Put the packets of a committed draft into the outbox."""
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
                self._filters.remove(part.topic_filter)
            if isinstance(part, RetainedSource) and part.done and self.retained.get(part.number) is part:
                del self.retained[part.number]

    def fail(self, draft: Draft, failure: TopicstoreError) -> None:
        """Discard a draft that could not be committed, so that its messages are read again."""
        for source in draft.sources:
            source.rewind()
            self._behind[source] = None
        self.stall(failure)

    def stall(self, failure: TopicstoreError) -> None:
        """Make the session wait for the next tick after an error."""
        self._stalled = True
        self._dispatcher.idle_locked(self)
        self.failed(failure)

    def failed(self, failure: TopicstoreError) -> None:
        """Record an error of reading or committing. Unless the session has ended, the next tick tries again."""
        self.failure = failure
        if self.ended is None:
            self._dispatcher.failed[self] = None

    def go_on(self) -> None:
        """Allow a retry before the next tick, because a caller asks for this session's deliveries."""
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
        """Return the packets that may be handed out; put the session into the ready queue if more are left."""
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
        """Return an upper bound of the number of packets that can be taken without a draft."""
        return count_of(self._outbox.packets) + self.window.unsent()

    def unsent(self) -> int:
        """Return the number of messages of earlier connections that have not been sent again or found deleted."""
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
        """Replace ``allow``, also for messages that are drafted but not handed out."""
        self.permit.allow, self.permit.asks, self._outbox.revised = allow, False, True
        self.ask_again()
        for source in self.sources.values():
            if isinstance(source, SharedSource):
                source.group.reconsider(source)

    # --- scheduling ---

    def _room(self) -> int:
        """Return the number of messages that may be sent within the receive maximum (MQTT 5, section 4.9)."""
        return self.window.room(self.receive_maximum)

    def ask(self) -> None:
        """Enter the ready queue if there are packets to send and room for them; otherwise leave it until an event."""
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
            if self._noted:  # perhaps by a thread that read `_blocked` before it was set, and didn't wake the waiters
                self._dispatcher.bell.ring()

    def wake(self, source: Source) -> None:
        """Record that a source has messages to read, and enter the ready queue unless the session is blocked."""
        if self.ended is not None:  # and the source is not closed yet
            return
        self._behind[source] = None
        if not (self._stalled or (self._blocked and source.limited)):
            self._become_ready()

    def _become_ready(self) -> None:
        """Enter the ready queue, or do so later if the session is being resumed or is held back."""
        if self.resuming is not None:
            self._dispatcher.idle_locked(self)  # the last step of `resuming` calls `ask`
        elif self.held_since is None:
            self._dispatcher.ready_locked(self)
        else:
            self._held = True
            self._dispatcher.idle_locked(self)
            if self._noted:  # perhaps by a thread that ended the hold, but read `_held` before it was set
                self._dispatcher.bell.ring()

    def forget(self, source: Source) -> None:
        """Stop reading a source."""
        self._behind.pop(source, None)
        self._unread = tuple(unread for unread in self._unread if unread is not source)
        if self.overlapping is not None:
            self.overlapping.forget(source)

    def merge_overlapping(self, source: FeedSource) -> None:
        """Read a new subscription together with overlapping ones, if the session delivers each message once."""
        if self.overlapping is not None:
            for joined in self.overlapping.consider(source):
                self.forget(joined)

    def deliver_once(self) -> None:
        """Deliver a message that matches several subscriptions once. Must be called before any subscription exists."""
        self.overlapping = OverlappingSources(self._dispatcher, self.wake)

    def waits_for(self) -> str:
        """Return what the session waits for, as in `SessionStatus.waits_for`. Needs no lock."""
        if self.failure is not None:
            return str(self.failure)
        if self.held_since is not None:
            return "resume" if self.paused_since is not None else "permission"
        if self._blocked:
            return "acknowledgements"
        return "delivery" if self._behind or self._outbox.packets or self.window.resend else "nothing"

    # --- events ---

    def acknowledged(self) -> None:
        """Record that an acknowledgement came, which may make room and must be committed. Needs no lock."""
        self.stuck_since = None
        self._note()

    def pause(self) -> None:
        """Pause deliveries. Needs no lock."""
        if self.paused_since is None:
            self.paused_since = self._dispatcher.steady()

    def resume(self) -> None:
        """End the pause. Needs no lock."""
        if self.paused_since is not None:
            self.paused_since = None
            self._note()

    @property
    def held_since(self) -> int | None:
        """The time since which the session is held back: paused, or waiting for an answer of ``allow``; else None."""
        return self.permit.undecided_since if self.paused_since is None else self.paused_since

    def ask_again(self) -> None:
        """Ask ``allow`` again about the messages for which it answered None. Needs no lock."""
        if self.permit.undecided_since is not None:
            self.permit.undecided_since = None
            self._note()

    def _note(self) -> None:
        """Have the dispatcher call `noticed`. Needs no lock."""
        if not self._noted:
            self._noted = True  # before `hear`, after which the dispatcher may call `noticed` at once
            self._dispatcher.hear(self)
        if self._blocked or self._held or self.window.received:  # after `_noted` is set; see `ask`
            self._dispatcher.bell.ring()

    def noticed(self) -> None:
        """Handle the events since the last call: acknowledgements, the end of a pause, a new answer of ``allow``."""
        self._noted = False  # first: an event after this is recorded again
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
        """Mark the session as having changes to commit at the next checkpoint."""
        if not self._dirty:
            self._dirty = True
            self._dispatcher.dirty[self] = None

    def clean(self) -> None:
        """Clear the mark of `touched`, because all acknowledgements are committed."""
        self._dirty = False
        self._dispatcher.dirty.pop(self, None)

    # --- ending ---

    def end(self, why: Ended) -> None:
        """End this object, which can't be used after that."""
        self.ended = why
        self._dispatcher.forget_locked(self)
        self.resuming = None
        uncount = None if self.stored else self._filters.remove  # stored sessions are counted until they end
        sources = [*self.sources.values(), *self.retained.values()]
        self._dispatcher.close_locked(closing(sources, uncount), len(sources))
        self.sources.clear()
        self.retained.clear()
        self.overlapping = None
        self._behind.clear()
        self._outbox.packets.clear()

    def check(self) -> None:
        """Raise `SessionEndedError`, or `SessionTakenOverError`, if the object has ended. Needs no lock."""
        if (over := self.over()) is not None:
            raise over

    def over(self) -> SessionEndedError | None:
        """Return the error that `check` raises; None if the object has not ended. Needs no lock."""
        kind = SessionTakenOverError if self.ended is Ended.TAKEN_OVER else SessionEndedError
        return None if self.ended is None else kind(f"session {self.client_id!r} is over: {self.ended.value}")
