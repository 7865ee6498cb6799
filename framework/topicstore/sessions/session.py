"""`Session`: one client's durable session, while it is connected: its calls, and the packets to send to the client.

A pending delivery has messages that were read from the cursors (the subscriptions) and got packet ids. Those of several
sessions are committed together (`topicstore.sessions.commits`). After the commit, `Session.apply` puts the
packets into the outbox, where they wait until they are taken. If the commit fails, the messages are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Protocol, cast

import attrs

from topicstore.contract.arguments import KEEP, Keep, Length
from topicstore.contract.errors import (
    InvalidArgumentError,
    SessionEndedError,
    SessionTakenOverError,
    ShardMovedError,
    TopicstoreError,
)
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.pubsub.publish import PublishResult
from topicstore.pubsub.retained_lookup import RetainedMessages
from topicstore.storage.counting.lag import Lag

from .cursors import FilterCursor, SessionCursor, closing
from .delivery_batch import ASKED, Allow, DeliveryBatch, Packet, Permit, SelectedMessages, count_of, likely
from .dispatcher import Dispatcher
from .in_flight import InFlight, StagedChanges
from .model import (
    Acknowledged,
    Ended,
    Publish,
    PublishedRows,
    PubRel,
    SessionStatus,
    SessionSubscription,
    Start,
    SubscribeOptions,
    SubscribeResult,
)
from .outbox import Outbox, delivery_again, read_again
from .overlapping_cursor import OverlappingCursors
from .retained_cursor import RetainedCursor
from .session_store import StoredSession
from .shared.cursor import SharedCursor

__all__ = ["PendingDelivery", "Session", "SessionCalls"]

_READS = 256
"""Number of reads after which a session's turn ends, even if it found nothing to deliver."""
_EFFORT = 20
"""Number of messages that take as long as one read."""
_NOTHING = SubscribeOptions()
_RESENT = 1_000
"""Number of messages read at a time to be sent again."""


_PUBLIC = frozenset(
    (
        "alive",
        "ask_again",
        "checkpoint",
        "client_id",
        "deliver",
        "disconnect",
        "ended",
        "failure",
        "filters",
        "keep_alive",
        "lag",
        "lost",
        "on_end",
        "pause",
        "present",
        "puback",
        "pubcomp",
        "publish",
        "pubrec",
        "pubrel",
        "receive_maximum",
        "restrict",
        "resume",
        "status",
        "subscribe",
        "unsubscribe",
    )
)
"""The attributes and methods of `Session` for programs."""


_OVER: dict[Ended | None, type[TopicstoreError]] = {
    Ended.TAKEN_OVER: SessionTakenOverError,
    Ended.MOVED: ShardMovedError,
}
"""The errors of objects that have ended, where it isn't `SessionEndedError`."""


class SessionCalls(Protocol):
    """The calls of a session that may wait for a lock or for the engine; `Sessions` makes them for many sessions."""

    def subscribe(
        self, rows: Iterable[tuple[Session, str, SubscribeOptions]], *, start: Start = None
    ) -> list[SubscribeResult | TopicstoreError]:
        """Make or change subscriptions."""

    def unsubscribe(self, rows: Iterable[tuple[Session, str]]) -> list[bool | TopicstoreError]:
        """End subscriptions."""

    def deliver_one(self, session: Session, limit: int, max_bytes: int | None) -> list[Publish | PubRel]:
        """Return the packets of one session to send now."""

    def restrict(self, session: Session, allow: Allow | None) -> None:
        """Replace the ``allow`` of one session."""

    def publish(self, rows: Iterable[tuple[Session, Message, int]]) -> PublishedRows:
        """Publish messages of clients."""

    def pubrel(self, rows: Iterable[tuple[Session, int]]) -> Acknowledged:
        """Free the packet ids of incoming PUBRELs."""

    def checkpoint_one(self, session: Session) -> None:
        """Commit the acknowledgements of one session."""

    def disconnect(
        self,
        sessions: Iterable[Session],
        *,
        send_will: bool = False,
        expiry_interval: Length | Keep | None = KEEP,
    ) -> list[TopicstoreError | None]:
        """End connections after their DISCONNECTs."""

    def lost(self, sessions: Iterable[Session]) -> list[TopicstoreError | None]:
        """End connections that broke without a DISCONNECT."""

    def lag(self, *client_ids: str) -> dict[str, dict[str, Lag]]:
        """Return the lag of sessions by client id and filter; without arguments, of all sessions."""


@attrs.define
class PendingDelivery:
    """The deliveries that a session hands out once ``writes`` are committed."""

    session: Session
    selections: list[SelectedMessages]
    ids: Sequence[int]
    cursors: list[SessionCursor]
    staged: StagedChanges
    writes: list[StateWrite]

    def __len__(self) -> int:
        """Return the number of packets that the delivery hands out."""
        released = 0 if self.staged.released is None else len(self.staged.released.ids)
        return sum(map(len, self.selections)) + released + self.staged.again


class Session:
    """A connected client's session, created by `Sessions.open`. All methods are thread-safe.

    The methods that a server calls in its event loop never block on a lock or on the engine: `alive`, `puback`,
    `pubrec`, `pubcomp`, `pause`, `resume`, `ask_again`, `status` and the attributes. The other methods read or commit,
    and may block.

    After its client has connected again, or the session was kicked, or the database was closed, every method raises
    `SessionEndedError` (in the first case its subclass `SessionTakenOverError`), and ``on_end`` has been called. On a
    site of a cluster, a session ends when its shard moves to another site: then every method raises `ShardMovedError`,
    and the client continues there. It also ends, with `Ended.UNCERTAIN`, when the log store doesn't answer a commit,
    which may still be stored.
    Acknowledgements of unknown packet ids are ignored, and not counted: a client may send some after a resumption.

    The attributes and methods that `dir` leaves out are for `topicstore.sessions` alone. Their caller holds the
    sessions' mutex, unless the docstring says that they need no lock.
    """

    __slots__ = (
        "__weakref__",
        "_behind",
        "_blocked",
        "_calls",
        "_dirty",
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
        "cursors",
        "dispatcher",
        "effort",
        "ended",
        "epoch",
        "failure",
        "guard",
        "in_flight",
        "incoming",
        "keep_alive",
        "keys",
        "numbers",
        "on_end",
        "once",
        "overlapping",
        "paused_since",
        "permit",
        "present",
        "receive_maximum",
        "resuming",
        "retained",
        "seen",
        "stored_session",
        "stuck_since",
    )

    def __init__(
        self,
        calls: SessionCalls,
        found: StoredSession,
        in_flight: InFlight,
        incoming: Iterable[int],
        dispatcher: Dispatcher[Session],
        filters: DurableFilters,
        read_retained: RetainedMessages,
        *,
        present: bool,
        on_end: Callable[[Session, Ended], None] | None,
        receive_maximum: int,
        keep_alive: float,
        allow: Allow | None = None,
        batch_size: int | None = None,
        epoch: int | None = 0,
        once: bool = False,
    ) -> None:
        self.client_id = found.client_id
        self.epoch = epoch
        """The fencing token under which this site owned the session's shard when the session was opened."""
        self.present = present
        """Whether the session existed before: the Session Present flag of CONNACK (MQTT 5, section 3.2.2.1.1)."""
        self.on_end = on_end
        self.keys = in_flight.keys
        self.stored_session = found
        """The session as it is stored."""
        self.guard = found.guard
        """The guard on which its writes are conditional."""
        self.in_flight = in_flight
        self.incoming = dict.fromkeys(incoming)  # an empty set takes more than three times the memory
        """Packet ids of incoming messages of QoS 2 whose PUBREL has not come."""
        self.receive_maximum = receive_maximum
        """The largest number of messages of QoS 1 and 2 that may be in flight (MQTT 5, section 4.9)."""
        self.keep_alive = keep_alive
        """The keep alive in seconds: a connection silent for 1.5 times as long counts as lost. 0: no limit."""
        self.permit = Permit(allow, found.client_id, dispatcher.steady)
        self.batch_size = batch_size
        """The most packets that are taken in one turn; None: any number."""
        self.effort = 0
        """The cost of the last `prepare`, in messages; a read counts as `_EFFORT` messages."""
        self.paused_since: int | None = None
        """The time since which the session has been paused; None if it isn't. Set in any thread, without the lock."""
        self.seen = dispatcher.steady()
        """The time of the client's last packet, if it has a keep alive. Set in any thread, without the lock."""
        self.stuck_since: int | None = None
        """The time since which the window has been full without an acknowledgement; None if it isn't."""
        self.ended: Ended | None = None
        """The reason why this object can't be used any more; None while the session is connected."""
        self.failure: TopicstoreError | None = None
        """The last error of reading or committing, until the next tick retries; None if nothing failed."""
        self.cursors: dict[str, FilterCursor | SharedCursor] = {}
        """The subscriptions by filter. Changed by `topicstore.sessions.subscribe`, as are the next two."""
        self.retained: dict[int, RetainedCursor] = {}
        """The retained messages that are being sent, by number of subscription."""
        self.once = once
        """Whether a message that matches several subscriptions is delivered once."""
        self.overlapping: OverlappingCursors | None = None
        """The subscriptions that overlap, if a message is delivered once; None before the second subscription."""
        self.numbers = 0
        """The number of the next subscription."""
        self.resuming: Iterator[int] | None = None
        """Loads the stored subscriptions, one a step; None once all are loaded. Until then nothing is delivered."""
        self._calls = calls
        self.dispatcher = dispatcher
        self._filters = filters
        self._read_retained = read_retained
        self._behind: dict[SessionCursor, None] = {}
        """The cursors that may have messages to read, in the order of their turns."""
        self._outbox = Outbox(in_flight, self.permit, dispatcher.clock)
        self._unread: tuple[SessionCursor, ...] = ()
        """The cursors that could not be read and will be tried again."""
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
    def filters(self) -> int:
        """The number of subscriptions, by which a server bounds the sessions that it ends in one call."""
        return len(self.cursors)

    # --- subscriptions ---

    def subscribe(
        self,
        topic_filter: str,
        qos: int = 1,
        *,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        subscription_identifier: int = 0,
        start: Start = None,
    ) -> SubscribeResult:
        """Subscribe, or change the options of a subscription; the result says which. The change is committed on return.

        start: where to begin. By default a new subscription begins at the end of the stored messages, and an existing
               one with this filter keeps its place; messages stored before the change are delivered by the earlier
               options. A time, a place or ``"beginning"`` replays stored messages from there, whether or not the
               session existed then (`topicstore.sessions.Start`).

        At QoS 1 and 2 all matching messages are stored from now on, and delivered however long the client is away. At
        QoS 0 only messages published while the client is connected are delivered. A message that matches several
        subscriptions is delivered once for each, with its subscription identifier, or once for all of them: see
        ``overlapping`` of `Sessions.open` (MQTT 5, section 3.3.4).

        Retained messages come before the other messages of the subscription (`topicstore.sessions.retained_cursor`).
        A retained message that the replay from ``start`` delivers anyway is left out. They are read in pages during
        delivery, so a client receives each retained message as it is when its page is read.

        A filter ``$share/<name>/<filter>`` makes a shared subscription (`topicstore.sessions.shared`, MQTT 5, section
        4.8.2): each message is delivered to one of the sessions that share it, from the stored messages also at QoS 0.
        ``start`` applies only if the session is the first to join. Options hold from now on. Retained messages are not
        sent, and ``no_local`` is refused [MQTT-3.8.3-4]. In a cluster, the sessions may be on all sites, and a member
        gets its share after the next calls of `Sessions.tick` on its site and on the subscription's.

        Raises `InvalidFilterError`, `InvalidArgumentError`, and `ShardElsewhereError` on a site of a cluster that can't
        read all shards.
        """
        options = SubscribeOptions(qos, no_local, retain_as_published, retain_handling, subscription_identifier)
        (result,) = self._calls.subscribe([(self, topic_filter, options)], start=start)
        return cast("SubscribeResult", result)  # without ``partial``, errors are raised

    def unsubscribe(self, topic_filter: str) -> bool:
        """End a subscription; return whether there was one. The exchanges of messages in flight are completed."""
        (there_was,) = self._calls.unsubscribe([(self, topic_filter)])
        return bool(there_was)

    # --- delivering ---

    def deliver(self, limit: int = 1_000, *, max_bytes: int | None = None) -> list[Publish | PubRel]:
        """Return the packets to send now: at most about ``limit`` messages; none if none waits or the window is full.

        A call reads a bounded number of times. So in a session with hundreds of subscriptions it may return no packets
        although messages wait; then `Sessions.wait` returns True at once.

        max_bytes: the most bytes that the payloads have together, though at least one message is returned; None: no
                   limit. See `Sessions.deliver`.

        The packet ids, and the PUBRECs of the `PubRel`s, are committed on return. After a resumption the
        unacknowledged packets come first (MQTT 5, sections 4.4 and 4.6): the PUBRELs in the order of their PUBRECs,
        then the messages in the order they were sent, with ``dup``. Messages that were deleted or dropped, or have
        expired, in the meantime are left out: at QoS 1 their packet ids are free; at QoS 2, where the client may still
        hold the id, the exchange continues with a `PubRel`.

        Raises the errors of reading and committing; then no packet was handed out, and the call may be repeated.
        """
        return self._calls.deliver_one(self, limit, max_bytes)

    def pause(self) -> None:
        """Stop deliveries of every QoS until `resume`, for example because the client's socket is full. Never blocks.

        A `deliver` that is under way still returns the packets that it has taken. Stored messages stay stored. Of
        messages that are not stored, the last 10,000 of each subscription wait, and older ones count as
        `SessionStatus.missed`. In shared subscriptions the session counts as slow, so that other members get its share.
        Idempotent.
        """
        self._check()
        if self.paused_since is None:
            self.paused_since = self.dispatcher.steady()

    def resume(self) -> None:
        """End `pause`. Never blocks. Does nothing if the session isn't paused."""
        self._check()
        if self.paused_since is not None:
            self.paused_since = None
            self._note()

    def restrict(self, allow: Allow | None) -> None:
        """Replace ``allow`` (`Sessions.open`), because the client's rights have changed. None allows every message.

        The new ``allow`` is asked about every message that is not handed out yet, including messages with packet ids.
        """
        self._calls.restrict(self, allow)

    def ask_again(self) -> None:
        """Ask ``allow`` (`Sessions.open`) again about the messages for which it answered None.

        Never blocks. Does nothing if no message waits for an answer.
        """
        self._check()
        self.permission_changed()

    # --- acknowledgements ---

    def puback(self, *packet_ids: int) -> int:
        """Record the PUBACKs of messages of QoS 1; return the number of packet ids that waited for one.

        They are committed at the next checkpoint, or with the first delivery after the last PUBACK of their in-flight
        batch. Never blocks.
        """
        return self._acknowledge(self.in_flight.puback_many, packet_ids)

    def pubrec(self, *packet_ids: int, accepted: bool = True) -> int:
        """Record the PUBRECs of messages of QoS 2; return how many of the packet ids are in an exchange of QoS 2.

        The next `deliver` commits them and returns a `PubRel` for each. With ``accepted`` False (a reason code of 0x80
        or above) the exchanges end (MQTT 5, section 4.3.3). Never blocks.
        """
        return self._acknowledge(partial(self.in_flight.pubrec_many, accepted=accepted), packet_ids)

    def pubcomp(self, *packet_ids: int) -> int:
        """Record the PUBCOMPs of messages of QoS 2; return the number of packet ids that waited for one.

        They are committed as PUBACKs are (`puback`). Never blocks.
        """
        return self._acknowledge(self.in_flight.pubcomp_many, packet_ids)

    def _acknowledge(self, acknowledge: Callable[[Sequence[int]], int], packet_ids: tuple[int, ...]) -> int:
        for packet_id in packet_ids:
            if type(packet_id) is not int:
                raise _no_id(packet_id)
        self.alive()
        count = acknowledge(packet_ids)
        if count:
            self.acknowledged()
        return count

    # --- publishing ---

    def publish(self, messages: Iterable[Message], packet_ids: Sequence[int] | None = None) -> PublishResult:
        """Publish messages of this client through `Database.publish`; return the result for the new messages.

        packet_ids: the packet id of each message. At QoS 2 it is committed in one engine write with the message, and
                    until its `pubrel` a message with the same id is a repetition, and left out (MQTT 5, section 4.3.3).

        On return, a PUBREC or PUBACK may be sent for all messages, whether or not they were new. Raises the errors of
        `Database.publish`; then no message was stored. The index of an `InvalidMessageError` counts all messages of the
        call, including repetitions.
        """
        batch = list(messages)
        ids = [0] * len(batch) if packet_ids is None else list(packet_ids)
        if len(ids) != len(batch):
            raise InvalidArgumentError(f"{len(batch)} messages, but {len(ids)} packet ids")
        return self._calls.publish(zip(repeat(self), batch, ids)).result

    def pubrel(self, *packet_ids: int) -> int:
        """Free the packet ids of incoming PUBRELs; return the number that were in use. Durable on return.

        A PUBCOMP may then be sent for all of them, whether or not they were in use. `Sessions.pubrel` returns which
        were in use.
        """
        for packet_id in packet_ids:
            if type(packet_id) is not int:
                raise _no_id(packet_id)
        self.alive()
        return sum(self._calls.pubrel(zip(repeat(self), packet_ids)).known)

    # --- ending ---

    def alive(self) -> None:
        """Record that the client sent a PINGREQ or another packet that is passed to no other method. Never blocks."""
        if self.keep_alive:
            self.seen = self.dispatcher.steady()
        if self.ended is not None or self.dispatcher.closed:
            self._check()

    def checkpoint(self) -> None:
        """Commit the acknowledgements received so far."""
        self._calls.checkpoint_one(self)

    def disconnect(self, *, send_will: bool = False, expiry_interval: Length | Keep | None = KEEP) -> None:
        """End the connection after a DISCONNECT. All changes are committed.

        send_will:       publish the will after its delay; by default the will is discarded.
        expiry_interval: a timedelta or seconds, or None for never, in place of the value that the session was
                         opened with.
        """
        self.check()
        self._calls.disconnect([self], send_will=send_will, expiry_interval=expiry_interval)

    def lost(self) -> None:
        """End the connection without a DISCONNECT: the will is published after its delay."""
        self.check()
        self._calls.lost([self])

    # --- inspecting ---

    def status(self) -> SessionStatus:
        """Return the counts of messages in flight, and why further messages wait. Never blocks.

        For the unread messages, see `lag`.
        """
        self.dispatcher.check_process()
        cursors, since = list(self.cursors.values()), self.stuck_since
        return SessionStatus(
            client_id=self.client_id,
            in_flight=len(self.in_flight),
            receive_maximum=self.receive_maximum,
            to_resend=self.in_flight.unsent(),
            waits_for=self.waits_for(),
            stuck_since=None if since is None else self.dispatcher.steady.wall(since),
            missed=sum(cursor.missed for cursor in cursors),
            refused=self.permit.refused,
            subscriptions=tuple(map(status_of, cursors)),
        )

    def lag(self) -> dict[str, Lag]:
        """Return, by filter, the lag of the deliveries behind the stored messages; see `Sessions.lag`."""
        self.dispatcher.mutex.hold(self.check)
        return self._calls.lag(self.client_id)[self.client_id]

    def _check(self) -> None:
        """Raise if the object can't be used any more."""
        self.check()
        self.dispatcher.check_open()

    def __dir__(self) -> list[str]:
        """Return the public attributes, for completion."""
        return sorted({name for name in super().__dir__() if name.startswith("_")} | _PUBLIC)

    def __repr__(self) -> str:
        return f"<Session {self.client_id!r}{'' if self.ended is None else ' ended'}>"

    # --- its state; see the class for the rules ---

    @property
    def stored(self) -> bool:
        """Whether the session is stored; otherwise it is kept in memory, and has nothing to commit."""
        return self.in_flight.stored

    # --- pending deliveries ---

    def prepare(self, limit: int, max_bytes: int | None = None) -> PendingDelivery | None:
        """Read the next deliveries that fit into the window; return None if there is nothing to commit.

        Deliveries of a session that is kept in memory can be taken without a commit. ``max_bytes``: about the most
        bytes of payload. Raises `InvalidArgumentError` if ``allow`` fails; the caller then calls `rewind`.
        """
        in_flight = self.in_flight
        selections: list[SelectedMessages] = []
        cursors: list[SessionCursor] = []
        self.effort, refused = 0, self.permit.refused
        if self.held_since is not None or self.resuming is not None:
            self._become_ready()
            return None
        # A full window does not hold up messages of QoS 0.
        waiting = self._outbox.packets or (in_flight.resend and in_flight.room(self.receive_maximum))
        if not waiting:
            left = max(limit - in_flight.received, 0)  # each PUBREC in the delivery makes a packet, too
            self._read(left, max_bytes, selections, cursors)
        some = selections or in_flight.received or self.permit.refused > refused
        if not (some or any(cursor.urgent for cursor in cursors)):
            if cursors:  # only places have moved: the next checkpoint commits them
                self.touched()
            return None
        if not (in_flight.stored or in_flight.received):
            self._hand_over(selections, cursors)
            return None
        counts = [selected.acknowledged() for selected in selections]
        ids = in_flight.free_ids(sum(counts))
        batches, start = [], 0
        for selected, count in zip(selections, counts, strict=True):
            if count:
                batches.append(selected.batch(ids[start : start + count]))
                start += count
        staged = in_flight.stage(batches, whole=False)
        moved = dict.fromkeys(cursors)  # each cursor once, even if it was read several times
        writes = [write for cursor in moved for write in cursor.writes()] + staged.writes if in_flight.stored else []
        return PendingDelivery(self, selections, ids, cursors, staged, [self.guard, *writes] if writes else [])

    def _hand_over(self, selections: list[SelectedMessages], cursors: list[SessionCursor]) -> None:
        """Assign packet ids to the messages read, and put them into the outbox without a commit."""
        for selected in filter(len, selections):
            count = selected.acknowledged()
            ids = self.in_flight.send(count, selected.batch) if count else ()
            self._outbox.add([DeliveryBatch(selected.packet_ids(ids), selected)])
        for cursor in cursors:
            self._commit_cursor(cursor)

    def prepare_last(self) -> PendingDelivery | None:
        """Return a delivery without messages that commits the session's pending changes; None if there are none."""
        staged = self.in_flight.stage([], whole=True)
        cursors: list[SessionCursor] = [*self.cursors.values(), *self.retained.values()]
        if not self.stored:
            return PendingDelivery(self, [], range(0), cursors, staged, [])
        writes = [write for cursor in cursors for write in cursor.writes()] + staged.writes
        return PendingDelivery(self, [], range(0), cursors, staged, [self.guard, *writes]) if writes else None

    def _read(
        self, limit: int, max_bytes: int | None, selections: list[SelectedMessages], cursors: list[SessionCursor]
    ) -> None:
        """Read messages from the cursors in turn, up to the room in the window."""
        room = self.in_flight.room(self.receive_maximum)
        left, now = limit, self.dispatcher.clock()
        self._outbox.read_at = now
        waiting: list[SessionCursor] = []
        later: list[SessionCursor] = []
        turn, asks = _READS, self.permit.asks
        try:
            while self._behind and left and turn > 0 and (max_bytes is None or max_bytes > 0):
                cursor = next(iter(self._behind))
                del self._behind[cursor]
                if cursor.needs_packet_id and not room:
                    waiting.append(cursor)
                    continue
                turn -= cursor.cost
                most = left if max_bytes is None else min(left, likely(self._size, max_bytes))
                most = min(most, ASKED) if asks else most
                selected = self._read_from(cursor, min(most, room) if cursor.needs_packet_id else most, now)
                if selected is None:
                    continue
                permitted = selected if self.permit.allow is None else self._permitted(cursor, selected)
                if permitted is None:
                    self._go_back(cursor, selections, () if asks else cursors)
                    break
                if asks and selected:
                    later.append(cursor)  # one read a delivery: only this one is repeated if `allow` is undecided
                elif not cursor.exhausted:
                    self._behind[cursor] = None  # the cursor's turn comes last
                selected = permitted
                cursors.append(cursor)
                count = len(selected.messages)
                if count:
                    self.effort += count
                    if max_bytes is not None:
                        size = sum([len(message.payload) for message in selected.messages])
                        self._size, max_bytes = size / count, max_bytes - size
                    selections.append(selected)
                    left -= count
                    room -= selected.acknowledged()
        finally:
            self.effort += (_READS - turn) * _EFFORT
            self._behind = dict.fromkeys(waiting) | self._behind | dict.fromkeys(later)

    def _read_from(self, cursor: SessionCursor, limit: int, now: int) -> SelectedMessages | None:
        try:
            return cursor.read(limit, now)
        except TopicstoreError as failure:
            self._unread = (*self._unread, cursor)
            self.failed(failure)  # other cursors are still read
            return SelectedMessages(cursor.topic_filter.text, 0, _NOTHING, (), 0, None)

    def _permitted(self, cursor: SessionCursor, selected: SelectedMessages) -> SelectedMessages | None:
        """Return the messages that may be sent to the client; None if ``allow`` can't answer yet."""
        if not selected:
            return selected
        try:
            answers = self.permit.answers(selected.messages)
        except BaseException:
            self._behind[cursor] = None
            raise
        if answers is None:
            return None
        self.permit.refused += answers.count(False)
        return cursor.permitted(selected, answers)

    def _go_back(
        self, cursor: SessionCursor, selections: list[SelectedMessages], cursors: Sequence[SessionCursor]
    ) -> None:
        """Rewind a cursor to before its last read; if ``cursors`` contains it, discard the delivery and rewind all."""
        if cursor in cursors:
            selections.clear()
        for one in dict.fromkeys(cursors) if cursor in cursors else [cursor]:
            one.rewind()
            self._behind[one] = None

    def apply(self, delivery: PendingDelivery) -> None:
        """Put the packets of a committed delivery into the outbox."""
        released = self.in_flight.apply(delivery.staged)
        start = 0
        out: list[Packet] = [PubRel(packet_id) for packet_id in released]
        for selected in filter(len, delivery.selections):
            count = selected.acknowledged()
            out.append(DeliveryBatch(selected.packet_ids(delivery.ids[start : start + count]), selected))
            start += count
        for cursor in delivery.cursors:
            self._commit_cursor(cursor)
        self._outbox.add(out)

    def _commit_cursor(self, cursor: SessionCursor) -> None:
        for part in cursor.parts():
            needed_packet_id = part.needs_packet_id
            part.committed()
            if needed_packet_id and not part.needs_packet_id:
                self._filters.remove(part.topic_filter)
            if not self.retained:
                continue  # avoids `isinstance`, which is slow for an abstract class
            if isinstance(part, RetainedCursor) and part.done and self.retained.get(part.number) is part:
                del self.retained[part.number]

    def fail(self, delivery: PendingDelivery, failure: TopicstoreError) -> None:
        """Discard a delivery that could not be committed, so that its messages are read again."""
        for cursor in delivery.cursors:
            cursor.rewind()
            self._behind[cursor] = None
        self.stall(failure)

    def stall(self, failure: TopicstoreError) -> None:
        """Make the session wait for the next tick after an error."""
        self._stalled = True
        self.dispatcher.idle_locked(self)
        self.failed(failure)

    def failed(self, failure: TopicstoreError) -> None:
        """Record an error of reading or committing. Unless the session has ended, the next tick tries again."""
        self.failure = failure
        if self.ended is None:
            self.dispatcher.failed[self] = None

    def retry_now(self) -> None:
        """Allow a retry before the next tick, because a caller requests this session's deliveries."""
        self._stalled = False

    def try_again(self) -> None:
        """Read again the cursors that failed."""
        self.failure = None
        self._stalled = False
        unread, self._unread = self._unread, ()
        for cursor in unread:
            cursor.try_again()
            self.wake(cursor)
        self._become_ready()

    def rewind(self) -> None:
        """Read again the messages that were not handed out, because an error came in between."""
        for cursor in (*self.cursors.values(), *self.retained.values()):
            cursor.rewind()
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
        if self.in_flight.resend and not (outbox.waited and outbox.packets):
            left = limit - count_of(outbox.packets)
            if left > 0:
                self._resend(min(left, self.in_flight.room(self.receive_maximum)))
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
        """Return an upper bound of the number of packets that can be taken without a delivery."""
        return count_of(self._outbox.packets) + self.in_flight.unsent()

    def unsent(self) -> int:
        """Return the number of messages of earlier connections that have not been sent again or found deleted."""
        return self.in_flight.unsent() if self.in_flight.resend else 0

    def _resend(self, room: int) -> None:
        """Put messages of earlier connections into the outbox, to be sent again (MQTT 5, section 4.4)."""
        in_flight = self.in_flight
        self._outbox.read_at = now = self.dispatcher.clock()
        while room > 0 and in_flight.resend:
            batch = in_flight.resend[0]
            with in_flight.lock:
                most = min(room, ASKED if self.permit.asks else _RESENT)
                rows = list(islice((batch.unsent or {}).items(), most))
            found = read_again(batch, [row for _, row in rows], self.dispatcher.hub, self._read_retained)
            if self.permit.allow is not None and not self.permit.remove_refused(found):
                return
            with in_flight.lock:
                for packet_id, row in rows:
                    message = found[row]
                    if packet_id not in (batch.unsent or ()):  # the client has acknowledged it
                        continue
                    if message is None:
                        in_flight.vanished(packet_id)
                        self.touched()
                    else:
                        batch.sent(packet_id)
                        self._outbox.packets.append(delivery_again(batch, packet_id, row, message, now))
            room -= len(rows)
            if not batch.unsent:
                del in_flight.resend[0]

    def replace_allow(self, allow: Allow | None) -> None:
        """Replace ``allow``, even for messages that have packet ids but are not handed out."""
        self.permit.allow, self.permit.asks, self._outbox.revised = allow, False, True
        self.permission_changed()
        for cursor in self.cursors.values():
            if isinstance(cursor, SharedCursor):
                cursor.group.reconsider(cursor)

    # --- scheduling ---

    def ask(self) -> None:
        """Enter the ready queue if there are packets to send and room for them; otherwise leave it until an event."""
        if self._stalled:
            return
        if self.held_since is not None or self.resuming is not None:
            self._become_ready()
            return
        in_flight = self.in_flight
        waiting = bool(in_flight.resend or self._behind)
        room = waiting and in_flight.room(self.receive_maximum)
        self._blocked = waiting and not room
        at_once = (
            self._outbox.packets
            or in_flight.received
            or (self._behind and not all(cursor.needs_packet_id for cursor in self._behind))
        )
        if at_once or (waiting and room):
            self.dispatcher.again_locked(self)
        else:
            self.dispatcher.idle_locked(self)
        if self._blocked:
            self.stuck_since = self.stuck_since or self.dispatcher.steady()
            if self._noted:  # the noting thread may have read `_blocked` too early, and woken no waiter
                self.dispatcher.notifier.notify()

    def wake(self, cursor: SessionCursor) -> None:
        """Record that a cursor has messages to read, and enter the ready queue unless the session is blocked."""
        if self.ended is not None:  # cursors of an ended session are closed later
            return
        self._behind[cursor] = None
        if not (self._stalled or (self._blocked and cursor.needs_packet_id)):
            self._become_ready()

    def _become_ready(self) -> None:
        """Enter the ready queue, or do so later if the session is being resumed or is held back."""
        if self.resuming is not None:
            self.dispatcher.idle_locked(self)  # when all subscriptions are loaded, `ask` is called
        elif self.held_since is None:
            self.dispatcher.ready_locked(self)
        else:
            self._held = True
            self.dispatcher.idle_locked(self)
            if self._noted:  # the thread that ended the hold may have read `_held` too early, and woken no waiter
                self.dispatcher.notifier.notify()

    def forget(self, cursor: SessionCursor) -> None:
        """Stop reading a cursor."""
        self._behind.pop(cursor, None)
        self._unread = tuple(unread for unread in self._unread if unread is not cursor)
        if self.overlapping is not None:
            self.overlapping.forget(cursor)

    def merge_overlapping(self, cursor: FilterCursor) -> None:
        """Read a new one of `cursors` together with overlapping ones, if the session delivers each message once."""
        if not self.once or len(self.cursors) < 2:
            return
        new = [cursor]
        if self.overlapping is None:
            self.overlapping = OverlappingCursors(self.dispatcher, self.wake)
            new = [one for one in self.cursors.values() if isinstance(one, FilterCursor)]
        for one in new:
            for joined in self.overlapping.consider(one):
                self.forget(joined)

    def waits_for(self) -> str:
        """Return the value of `SessionStatus.waits_for`: the awaited event, or an error. Needs no lock."""
        if self.failure is not None:
            return str(self.failure)
        if self.held_since is not None:
            return "resume" if self.paused_since is not None else "permission"
        if self._blocked:
            return "acknowledgements"
        return "delivery" if self._behind or self._outbox.packets or self.in_flight.resend else "nothing"

    # --- events ---

    def acknowledged(self) -> None:
        """Record that an acknowledgement came, which may make room and must be committed. Needs no lock."""
        self.stuck_since = None
        self._note()

    @property
    def held_since(self) -> int | None:
        """The time since which the session is held back: paused, or waiting for an answer of ``allow``; else None."""
        return self.permit.undecided_since if self.paused_since is None else self.paused_since

    def permission_changed(self) -> None:
        """Ask ``allow`` again about the messages for which it answered None. Needs no lock."""
        if self.permit.undecided_since is not None:
            self.permit.undecided_since = None
            self._note()

    def _note(self) -> None:
        """Have the dispatcher call `noticed`. Needs no lock."""
        if not self._noted:
            self._noted = True  # set before `hear`: the dispatcher may call `noticed` immediately
            self.dispatcher.hear(self)
        if self._blocked or self._held or self.in_flight.received:  # read after `_noted` is set; see `ask`
            self.dispatcher.notifier.notify()

    def noticed(self) -> None:
        """Handle the events since the last call: acknowledgements, the end of a pause, a new answer of ``allow``."""
        self._noted = False  # reset first, so that a later event is recorded again
        if self.ended is not None:
            return
        self.touched()
        if self._held and self.held_since is None:
            self._held = False
            self.ask()
        if self._blocked or self.in_flight.received:
            self._blocked = False
            self.stuck_since = None
            self._become_ready()

    def touched(self) -> None:
        """Mark the session as having changes to commit at the next checkpoint."""
        if not self._dirty:
            self._dirty = True
            self.dispatcher.dirty[self] = None

    def clean(self) -> None:
        """Clear the mark of `touched`, because all acknowledgements are committed."""
        self._dirty = False
        self.dispatcher.dirty.pop(self, None)

    # --- ending ---

    def end(self, why: Ended) -> None:
        """End this object, which can't be used after that."""
        self.ended = why
        self.dispatcher.forget_locked(self)
        self.resuming = None
        uncount = None if self.stored else self._filters.remove  # a stored session stays counted
        cursors = [*self.cursors.values(), *self.retained.values()]
        self.dispatcher.close_locked(closing(cursors, uncount), len(cursors))
        self.cursors.clear()
        self.retained.clear()
        self.overlapping = None
        self._behind.clear()
        self._outbox.packets.clear()

    def check(self) -> None:
        """Raise the error of `over` if the object has ended. Needs no lock."""
        if (over := self.over()) is not None:
            raise over

    def over(self) -> TopicstoreError | None:
        """Return the error that `check` raises; None if the object has not ended. Needs no lock.

        `SessionEndedError`, `SessionTakenOverError`, or `ShardMovedError` if the session's shard has left this site.
        """
        kind = _OVER.get(self.ended, SessionEndedError)
        return None if self.ended is None else kind(f"session {self.client_id!r} is over: {self.ended.value}")


def status_of(cursor: FilterCursor | SharedCursor) -> SessionSubscription:
    """Return a subscription's filter, options and places, and the generations dropped before it read them."""
    return SessionSubscription(
        topic_filter=cursor.topic_filter.text,
        options=cursor.options,
        places=tuple(cursor.places),
        dropped=cursor.dropped,
    )


def _no_id(packet_id: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"packet ids are numbers, as in puback(1, 2) or puback(*ids), not {packet_id!r}")
