"""`Session`: one client's durable session, while it is connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

from topicstore.contract.arguments import KEEP, Keep
from topicstore.contract.errors import InvalidArgumentError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.pubsub.publish import PublishResult
from topicstore.storage.counting.lag import Lag

from .context import SessionContext
from .delivery_batch import Allow, check_max_bytes, single
from .live_session import LiveSession
from .model import Ended, Publish, PubRel, SessionStatus, Start, SubscribeOptions, SubscribeResult
from .publish import Incoming, publish
from .qos2 import Refused, free_all
from .subscribe import status_of, subscribe_rows, unsubscribe_rows

__all__ = ["Session", "lives_of"]


class Session:
    """A connected client's session, created by `Sessions.open`. All methods are thread-safe.

    The methods that a server calls in its event loop never block on a lock or on the engine: `alive`, `puback`,
    `pubrec`, `pubcomp`, `pause`, `resume`, `ask_again`, `status` and the attributes. The other methods read or commit,
    and may block.

    After its client has connected again, or the session was kicked, or the database was closed, every method raises
    `SessionEndedError` (in the first case its subclass `SessionTakenOverError`), and ``on_end`` has been called.
    Acknowledgements of unknown packet ids are ignored, and not counted: a client may send some after a resumption.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_live",
        "_window",
        "client_id",
        "on_end",
        "present",
    )

    def __init__(
        self,
        context: SessionContext,
        live: LiveSession,
        *,
        present: bool,
        on_end: Callable[[Session, Ended], None] | None,
    ) -> None:
        self.client_id = live.client_id
        self.present = present
        """Whether the session existed before: the Session Present flag of CONNACK (MQTT 5, section 3.2.2.1.1)."""
        self.on_end = on_end
        self._context = context
        self._live = live
        self._window = live.window

    @property
    def receive_maximum(self) -> int:
        """The largest number of messages of QoS 1 and 2 that may be in flight (MQTT 5, section 4.9)."""
        return self._live.receive_maximum

    @property
    def keep_alive(self) -> float:
        """The keep alive in seconds: a connection silent for 1.5 times as long counts as lost. 0: no limit."""
        return self._live.keep_alive

    @property
    def filters(self) -> int:
        """The number of subscriptions, by which a server bounds the sessions that it ends in one call."""
        return len(self._live.sources)

    @property
    def ended(self) -> Ended | None:
        """The reason why this object can't be used any more; None while the session is connected."""
        return self._live.ended

    @property
    def failure(self) -> TopicstoreError | None:
        """The last error of reading or committing, until the next tick retries; None if nothing failed."""
        return self._live.failure

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
        sent, and ``no_local`` is refused [MQTT-3.8.3-4].

        Raises `InvalidFilterError`, `InvalidArgumentError`.
        """
        options = SubscribeOptions(qos, no_local, retain_as_published, retain_handling, subscription_identifier)
        (result,) = subscribe_rows(self._context, [self._live], [(topic_filter, options)], start, partial=False)
        if isinstance(result, TopicstoreError):
            raise result
        return result

    def unsubscribe(self, topic_filter: str) -> bool:
        """End a subscription; return whether there was one. The exchanges of messages in flight are completed."""
        (there_was,) = unsubscribe_rows(self._context, [self._live], [topic_filter], partial=False)
        return bool(there_was)

    # --- delivering ---

    def deliver(self, limit: int = 1_000, *, max_bytes: int | None = None) -> list[Publish | PubRel]:
        """Return the packets to send now: at most about ``limit`` messages, none if none wait or the window is full.

        A call reads a bounded number of times. So in a session with hundreds of subscriptions it may return no packets
        although messages wait; then `Sessions.wait` returns True at once.

        max_bytes: the most bytes that the payloads have together, though at least one message is returned; None: no
                   limit. See `Sessions.deliver`.

        Their packet ids, and the PUBRECs of the `PubRel`s, are committed before it returns. After a resumption the
        unacknowledged packets come first (MQTT 5, sections 4.4 and 4.6): the PUBRELs in the order of their PUBRECs,
        then the messages in the order they were sent, with ``dup``. Messages that were deleted or dropped, or have
        expired, in the meantime are left out: at QoS 1 their packet ids are free; at QoS 2, where the client may still
        hold the id, the exchange continues with a `PubRel`.

        Raises the errors of reading and committing; then no packet was handed out, and the call may be repeated.
        """
        check_max_bytes(max_bytes)
        return self._context.locks.hold([self._live], partial(self._deliver_locked, limit, max_bytes))

    def _deliver_locked(self, limit: int, max_bytes: int | None) -> list[Publish | PubRel]:
        live = self._live
        live.check()
        self._context.dispatcher.listen_locked()
        live.go_on()
        while True:
            try:
                draft = live.draft(limit, max_bytes)
                if draft is not None:
                    self._context.commits.commit_one(draft)
                unsent = live.unsent()
                packets = single(live.take(limit, max_bytes))
            except BaseException:
                live.rewind()
                raise
            if packets or live.unsent() == unsent:
                return packets  # otherwise all messages to be sent again were deleted, and newer messages may wait

    def pause(self) -> None:
        """Stop deliveries of every QoS until `resume`, for example because the client's socket is full. Never blocks.

        A `deliver` that is under way still returns the packets that it has taken. Stored messages stay stored. Of
        messages that are not stored, the last 10,000 of each subscription wait, and older ones count as
        `SessionStatus.missed`. In shared subscriptions the session counts as slow, so that other members get its share.
        Idempotent.
        """
        self._check()
        self._live.pause()

    def resume(self) -> None:
        """End `pause`. Never blocks. Does nothing if the session isn't paused."""
        self._check()
        self._live.resume()

    def restrict(self, allow: Allow | None) -> None:
        """Replace ``allow`` (`Sessions.open`), because the client's rights have changed. None allows every message.

        The new ``allow`` is asked about every message that is not handed out yet, also about those with packet ids.
        """

        def restrict() -> None:
            self._live.check()
            self._live.restrict(allow)

        self._context.locks.hold([self._live], restrict)

    def ask_again(self) -> None:
        """Ask ``allow`` (`Sessions.open`) again about the messages for which it answered None.

        Never blocks. Does nothing if no message waits for an answer.
        """
        self._check()
        self._live.ask_again()

    # --- acknowledgements ---

    def puback(self, *packet_ids: int) -> int:
        """Record the PUBACKs of messages of QoS 1; return the number of packet ids that waited for one.

        They are committed at the next checkpoint, or with the first delivery after the last PUBACK of their flight.
        Never blocks.
        """
        return self._acknowledge(self._window.puback_many, packet_ids)

    def pubrec(self, *packet_ids: int, accepted: bool = True) -> int:
        """Record the PUBRECs of messages of QoS 2; return how many of the packet ids are in an exchange of QoS 2.

        The next `deliver` commits them and returns a `PubRel` for each. With ``accepted`` False (a reason code of 0x80
        or above) the exchanges end (MQTT 5, section 4.3.3). Never blocks.
        """
        return self._acknowledge(partial(self._window.pubrec_many, accepted=accepted), packet_ids)

    def pubcomp(self, *packet_ids: int) -> int:
        """Record the PUBCOMPs of messages of QoS 2; return the number of packet ids that waited for one.

        They are committed as PUBACKs are (`puback`). Never blocks.
        """
        return self._acknowledge(self._window.pubcomp_many, packet_ids)

    def _acknowledge(self, acknowledge: Callable[[Sequence[int]], int], packet_ids: tuple[int, ...]) -> int:
        for packet_id in packet_ids:
            if type(packet_id) is not int:
                raise _no_id(packet_id)
        self._heard()
        count = acknowledge(packet_ids)
        if count:
            self._live.acknowledged()
        return count

    # --- publishing ---

    def publish(self, messages: Iterable[Message], packet_ids: Sequence[int] | None = None) -> PublishResult:
        """Publish messages of this client through `Database.publish`; return the result for the new ones.

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
        refused: Refused = {}
        given = Incoming.of_objects(batch, refused, partial=False)
        return publish(self._context, [self._live] * len(batch), given, ids, refused, partial=False).result

    def pubrel(self, *packet_ids: int) -> int:
        """Free the packet ids of incoming PUBRELs; return the number that were in use. Durable on return.

        A PUBCOMP may then be sent for all of them, whether or not they were in use. `Sessions.pubrel` returns which
        were in use.
        """
        for packet_id in packet_ids:
            if type(packet_id) is not int:
                raise _no_id(packet_id)
        self._heard()
        freed = free_all(self._context, [self._live] * len(packet_ids), packet_ids, partial=False)
        return sum(freed.known)

    # --- ending ---

    def alive(self) -> None:
        """Record that the client sent a PINGREQ or another packet that is passed to no other method. Never blocks."""
        self._heard()

    def checkpoint(self) -> None:
        """Commit the acknowledgements received so far."""

        def locked() -> None:
            self._live.check()
            for failure in self._context.commits.checkpoint([self._live]):
                raise failure

        self._context.locks.hold([self._live], locked)

    def disconnect(self, *, send_will: bool = False, expiry_interval: timedelta | float | Keep | None = KEEP) -> None:
        """End the connection after a DISCONNECT. All changes are committed.

        send_will:       publish the will after its delay; by default the will is discarded.
        expiry_interval: a timedelta or seconds, or None for never, in place of the value that the session was
                         opened with.
        """
        self._end(Ended.DISCONNECTED, send_will=send_will, expiry_interval=expiry_interval)

    def lost(self) -> None:
        """End the connection without a DISCONNECT: the will is published after its delay."""
        self._end(Ended.LOST, send_will=True)

    def _end(self, why: Ended, *, send_will: bool, expiry_interval: timedelta | float | Keep | None = KEEP) -> None:
        def locked() -> None:
            self._live.check()
            self._context.end(self._live, why, send_will=send_will, expiry_interval=expiry_interval)

        self._context.locks.hold_all(locked)

    # --- inspecting ---

    def status(self) -> SessionStatus:
        """Return what the session has in flight and waits for. Never blocks. For the unread messages, see `lag`."""
        dispatcher, live = self._context.dispatcher, self._live
        dispatcher.check_process()
        sources, since = list(live.sources.values()), live.stuck_since
        return SessionStatus(
            client_id=self.client_id,
            in_flight=len(live.window),
            receive_maximum=live.receive_maximum,
            to_resend=live.window.unsent(),
            waits_for=live.waits_for(),
            stuck_since=None if since is None else dispatcher.steady.wall(since),
            missed=sum(source.missed for source in sources),
            refused=live.permit.refused,
            subscriptions=tuple(map(status_of, sources)),
        )

    def lag(self) -> dict[str, Lag]:
        """Return, by filter, the lag of the deliveries behind the stored messages; see `Sessions.lag`."""
        self._context.mutex.hold(self._live.check)
        return self._context.lag(self.client_id)[self.client_id]

    def _heard(self) -> None:
        """Record that the client sent a packet; raise if the object can't be used any more."""
        live, dispatcher = self._live, self._context.dispatcher
        if live.keep_alive:
            live.seen = dispatcher.steady()
        if live.ended is not None or dispatcher.closed:
            self._check()

    def _check(self) -> None:
        """Raise if the object can't be used any more."""
        self._live.check()
        self._context.dispatcher.check_open()

    def __repr__(self) -> str:
        return f"<Session {self.client_id!r}{'' if self.ended is None else ' ended'}>"


def lives_of(context: SessionContext, sessions: Sequence[Session]) -> list[LiveSession]:
    """Return the internals of sessions. Raises `InvalidArgumentError` if one is not of this database."""
    for session in set(sessions):
        if not isinstance(session, Session) or session._context is not context:  # noqa: SLF001 - it is of this module
            raise InvalidArgumentError(f"{session!r} is not a session of this database")
    return [session._live for session in sessions]  # noqa: SLF001


def _no_id(packet_id: object) -> InvalidArgumentError:
    return InvalidArgumentError(f"packet ids are numbers, as in puback(1, 2) or puback(*ids), not {packet_id!r}")
