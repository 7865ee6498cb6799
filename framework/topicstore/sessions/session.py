"""`Session`: one client's durable session, while it is connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from topicstore.contract.errors import InvalidArgumentError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.publishing import PublishResult

from .context import SessionContext
from .live_session import LiveSession
from .model import KEEP, Delivery, Ended, Keep, Release, SessionStatus, Start, SubscribeOptions
from .qos2_incoming import publish_once, qos2_ids, release
from .subscribing import status_of, subscribe, unsubscribe

__all__ = ["Session"]


class Session:
    """A connected client's session. Made by `Sessions.open`; all methods may be called from any thread.

    When its client connects anew, or it is kicked, or the database is closed, every method raises
    `SessionEndedError` (`SessionTakenOverError`), and ``on_end`` was called.

    Acknowledgements of unknown packet ids are harmless: False is returned. After a resumption a
    client may well send some.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_live",
        "_lock",
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
        """The session was there before: `CONNACK`'s flag."""
        self.on_end = on_end
        self._context = context
        self._lock = context.dispatcher.lock
        """Guards what follows."""
        self._live = live
        self._window = live.window

    @property
    def receive_maximum(self) -> int:
        """Messages of QoS 1 and 2 that may be sent and not acknowledged."""
        return self._live.receive_maximum

    @property
    def keep_alive(self) -> float:
        """Seconds; a client that is silent for one and a half times that is lost; 0: it may be."""
        return self._live.keep_alive

    @property
    def ended(self) -> Ended | None:
        """Why the object is of no more use; None: it is."""
        return self._live.ended

    @property
    def failure(self) -> TopicstoreError | None:
        """Why something can't be read or committed at the moment; it is tried again."""
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
    ) -> bool:
        """Subscribe, or change the options of a subscription; return whether there was one. Committed when it returns.

        start: where to begin: by default from now on, or, if there was a subscription of this filter,
               where it is; what was stored before then comes by the options of that time. With a time, a
               place or ``"beginning"`` it (re)plays what is stored, whether or not the session
               existed then (`topicstore.sessions.Start`).

        At QoS 1 and 2 everything that matches is stored from now on, and delivered however long the
        client is away. At QoS 0 only what comes while it is connected is delivered. A message that
        matches several subscriptions is delivered for each, with its identifier.

        With ``$share/<name>/<filter>`` it shares a subscription (`topicstore.sessions.shared`): each message goes
        to one of those that do, also at QoS 0 from what is stored. ``start`` counts for the first of them;
        options hold from now on; there are no retained messages, and no ``no_local`` [MQTT-3.8.3-4].

        Raises `InvalidFilterError`, `InvalidArgumentError`.
        """
        parsed = TopicFilter(topic_filter)
        options = SubscribeOptions(qos, no_local, retain_as_published, retain_handling, subscription_identifier)
        options.checked()
        with self._lock:
            self._heard_locked()
            return subscribe(self._context, self._live, parsed, options, start)

    def unsubscribe(self, topic_filter: str) -> bool:
        """End a subscription; return whether there was one. What is in flight is brought to its end."""
        with self._lock:
            self._heard_locked()
            return unsubscribe(self._context, self._live, topic_filter)

    # --- delivering ---

    def deliver(self, limit: int = 1_000) -> list[Delivery | Release]:
        """Return what to send now: at most about ``limit`` messages; nothing if there is nothing, or no room.

        Their packet ids, and the PUBRECs of the `Release`s, are committed before it returns. After a
        resumption first comes what was sent and not acknowledged: the PUBRELs in the order of their
        PUBRECs, then the messages in the order they were sent, with ``dup``. Those that were deleted or
        dropped, or expired, meanwhile are left out: at QoS 1 their packet ids are free; at QoS 2, where the
        client may hold the id, its exchange goes on with a `Release`.

        Raises what reading and committing raise; then nothing was handed out, and the call may be repeated.
        """
        live = self._live
        with self._lock:
            live.check()
            self._context.dispatcher.listen_locked()
            live.go_on()
            try:
                draft = live.draft(limit)
                if draft is not None:
                    self._context.commits.commit_one(draft)
                return live.take(limit)
            except BaseException:
                live.rewind()
                raise

    # --- acknowledgements ---

    def puback(self, packet_id: int) -> bool:
        """A message of QoS 1 was received; return whether its PUBACK was due.

        Committed at the next checkpoint, or with the next delivery that follows the flight's last.
        """
        with self._lock:
            self._heard_locked()
            return self._window.puback(packet_id) and self._live.acknowledged()

    def puback_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once; return of how many the PUBACK was due."""
        with self._lock:
            self._heard_locked()
            count = self._window.puback_many(packet_ids)
            if count:
                self._live.acknowledged()
            return count

    def pubrec(self, packet_id: int, *, accepted: bool = True) -> bool:
        """A message of QoS 2 was received; return whether the packet id is in an exchange of QoS 2.

        The next `deliver` commits it and returns its `Release`. With ``accepted`` False (a reason code of
        0x80 or above) the exchange is over.
        """
        with self._lock:
            self._heard_locked()
            return self._window.pubrec(packet_id, accepted=accepted) and self._live.acknowledged()

    def pubrec_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once that were accepted; return how many are in an exchange of QoS 2."""
        with self._lock:
            self._heard_locked()
            count = sum(map(self._window.pubrec, packet_ids))
            if count:
                self._live.acknowledged()
            return count

    def pubcomp(self, packet_id: int) -> bool:
        """An exchange of QoS 2 is over; return whether its PUBCOMP was due. Committed as `puback` is."""
        with self._lock:
            self._heard_locked()
            return self._window.pubcomp(packet_id) and self._live.acknowledged()

    def pubcomp_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once; return of how many the PUBCOMP was due."""
        with self._lock:
            self._heard_locked()
            count = sum(map(self._window.pubcomp, packet_ids))
            if count:
                self._live.acknowledged()
            return count

    # --- what the client publishes ---

    def publish(self, messages: Iterable[Message], packet_ids: Sequence[int] | None = None) -> PublishResult:
        """Publish messages of this client, by `Database.publish`; return what became of the new ones.

        packet_ids: by message; of those of QoS 2 the id is committed in one engine write with the message,
                    and until its `release` a message with the same id is a repetition, and left out.

        A PUBREC, or PUBACK, may be sent for all of them when it returns, whether or not they were new.
        Raises what `Database.publish` raises; then nothing was stored.
        """
        batch = list(messages)
        if any(message.client_id != self.client_id for message in batch):
            raise InvalidArgumentError(f"a session publishes messages of its own client, {self.client_id!r}")
        ids = qos2_ids(batch, packet_ids)
        with self._lock:
            self._heard_locked()
            if any(ids):
                return publish_once(self._context, self._live, batch, ids)
        return self._context.publish(batch)

    def release(self, packet_id: int) -> bool:
        """An incoming PUBREL: free its packet id; return whether it was in use. Committed when it returns.

        Either way a PUBCOMP may be sent.
        """
        return self.release_many([packet_id]) == 1

    def release_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once, in one commit; return how many were in use."""
        with self._lock:
            self._heard_locked()
            return release(self._context, self._live, packet_ids)

    # --- its end ---

    def alive(self) -> None:
        """The client was heard of: a PINGREQ, or anything that reaches no other method."""
        with self._lock:
            self._heard_locked()

    def checkpoint(self) -> None:
        """Commit what was acknowledged."""
        with self._lock:
            self._live.check()
            for failure in self._context.commits.checkpoint([self._live]):
                raise failure

    def disconnect(self, *, send_will: bool = False, expiry_interval: float | Keep | None = KEEP) -> None:
        """The client disconnected: commit everything; the will is dropped, or published if ``send_will``.

        expiry_interval: seconds, or None for never, in place of what it was opened with.
        """
        with self._lock:
            self._live.check()
            self._context.end(self._live, Ended.DISCONNECTED, send_will=send_will, expiry_interval=expiry_interval)

    def lost(self) -> None:
        """The connection is gone without a DISCONNECT: the will is published after its delay."""
        with self._lock:
            self._live.check()
            self._context.end(self._live, Ended.LOST, send_will=True)

    # --- looking ---

    def status(self) -> SessionStatus:
        """Return what it has in flight, what it waits for, and how far each subscription has come."""
        live = self._live
        with self._lock:
            self._context.dispatcher.listen_locked()
            marks = self._context.dispatcher.hub.watermarks()
            sources = list(live.sources.values())
            return SessionStatus(
                client_id=self.client_id,
                in_flight=len(live.window),
                receive_maximum=live.receive_maximum,
                to_resend=live.window.unsent(),
                waits_for=live.waits_for(),
                stuck_since=live.stuck_since,
                missed=sum(source.missed for source in sources),
                subscriptions=tuple(status_of(source, marks) for source in sources),
            )

    def _heard_locked(self) -> None:
        """The client was heard of; raise if the object is of no more use."""
        live = self._live
        if live.keep_alive:
            live.seen = self._context.dispatcher.steady()
        if live.ended is not None:
            live.check()

    def __repr__(self) -> str:
        return f"<Session {self.client_id!r}{'' if self.ended is None else ' ended'}>"
