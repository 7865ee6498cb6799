"""`Session`: one client's durable session, while it is connected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import attrs

from topicstore.contract.errors import (
    InvalidArgumentError,
    SessionEndedError,
    SessionTakenOverError,
    StateConflictError,
    TopicstoreError,
)
from topicstore.contract.model import Message
from topicstore.contract.positions import time_of
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.publishing import PublishResult
from topicstore.shard.state import FrameworkWrite

from .dispatch import Dispatcher
from .inflight import Flight, InflightWindow, Staged
from .model import (
    KEEP,
    Delivery,
    Ended,
    Keep,
    Release,
    SessionStatus,
    Start,
    SubscribeOptions,
    SubscriptionStatus,
    places_of,
)
from .portions import Portion, expiry_of
from .records import VERSION, Era, Keys, put
from .session_state import Found
from .shared.filters import is_shared, read_filter
from .shared.source import SharedSource
from .sources import FeedSource, RetainedSource, Source

if TYPE_CHECKING:
    from .manager import Sessions

__all__ = ["Draft", "Session"]

Item = Delivery | Release
_READS = 256
"""Reads after which a session lets others have their turn, though it found nothing to deliver."""
_NOTHING = SubscribeOptions()
_RESENT = 1_000
"""Messages read at a time to be sent again."""


@attrs.define
class Draft:
    """What a session is about to hand out, once ``writes`` are committed."""

    session: Session
    portions: list[Portion]
    ids: Sequence[int]
    sources: list[Source]
    staged: Staged
    writes: list[StateWrite]


class Session:
    """A connected client's session. Made by `Sessions.open`; all methods may be called from any thread.

    When its client connects anew, or it is kicked, or the database is closed, every method raises
    `SessionEndedError` (`SessionTakenOverError`), and ``on_end`` was called.

    Acknowledgements of unknown packet ids are harmless: False is returned. Behind a resumption a
    client may well send some.
    """

    __slots__ = (
        "__weakref__",
        "_behind",
        "_blocked",
        "_dirty",
        "_dispatcher",
        "_found",
        "_guard",
        "_incoming",
        "_numbers",
        "_outbox",
        "_retained",
        "_sessions",
        "_sources",
        "_stalled",
        "_window",
        "client_id",
        "ended",
        "failure",
        "keep_alive",
        "keys",
        "on_end",
        "present",
        "receive_maximum",
        "seen",
        "stuck_since",
    )

    def __init__(
        self,
        sessions: Sessions,
        found: Found,
        *,
        window: InflightWindow,
        incoming: set[int],
        present: bool,
        receive_maximum: int,
        keep_alive: float,
        on_end: Callable[[Session, Ended], None] | None,
    ) -> None:
        self.client_id = found.client_id
        self.present = present
        """The session was there before: `CONNACK`'s flag."""
        self.receive_maximum = receive_maximum
        self.keep_alive = keep_alive
        self.ended: Ended | None = None
        self.failure: TopicstoreError | None = None
        """Why something can't be read or committed at the moment; it is tried again."""
        self.on_end = on_end
        self.keys = Keys(found.client_id)
        self.seen = sessions.dispatcher.clock()
        """When the client was last heard of, if it has a keep-alive."""
        self.stuck_since: int | None = None
        self._sessions = sessions
        self._dispatcher: Dispatcher[Session] = sessions.dispatcher
        self._found = found
        self._guard = found.guard
        self._window = window
        self._incoming = incoming
        self._sources: dict[str, FeedSource | SharedSource] = {}
        self._retained: dict[int, RetainedSource] = {}
        self._numbers = 0
        self._behind: dict[Source, None] = {}
        self._outbox: list[Item] = []
        self._blocked = False
        self._dirty = False
        self._stalled = False

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
        with self._dispatcher.lock:
            self._heard()
            self._dispatcher.listen()  # what came before is for those who were there, by the options there were
            known = self._sources.get(topic_filter)
            if is_shared(topic_filter):
                self._share(topic_filter, options, start)
            elif isinstance(known, FeedSource):
                self._change(known, options, start)
            else:
                self._add(parsed, options, start)
            return known is not None

    def unsubscribe(self, topic_filter: str) -> bool:
        """End a subscription; return whether there was one. What is in flight is brought to its end."""
        with self._dispatcher.lock:
            self._heard()
            source = self._sources.get(topic_filter)
            if source is None:
                return False
            number, keys = source.number, self.keys
            kinds = (keys.subscription, keys.place, keys.retained, keys.leases)
            if isinstance(source, SharedSource):
                source.group.save()  # its places, before they are removed here
            self._commit([FrameworkWrite(key(number), None) for key in kinds])
            self._sources.pop(topic_filter)
            for gone in (source, self._retained.pop(number, None)):
                if gone is not None:
                    self._behind.pop(gone, None)
                    gone.close()
            if isinstance(source, SharedSource):
                self._sessions.shared.leave(source.group, self.client_id)
            if source.limited or isinstance(source, SharedSource):
                self._sessions.wanted.remove(topic_filter)
            return True

    def _add(self, topic_filter: TopicFilter, options: SubscribeOptions, start: Start) -> None:
        source = self._source(self._numbers, topic_filter, (Era(options),))
        try:
            source.start(places_of(start, self._dispatcher.hub.watermarks()))
            self._store(source, retained=options.retain_handling < 2)
        except BaseException:
            self._behind.pop(source, None)
            source.close()
            raise
        self._numbers += 1
        self._sources[topic_filter.text] = source
        if source.limited:
            self._sessions.wanted.add(topic_filter.text)

    def _change(self, source: FeedSource, options: SubscribeOptions, start: Start) -> None:
        eras, was_limited = source.eras, source.limited
        marks = self._dispatcher.hub.watermarks()
        if start is not None:
            source.restart(options, places_of(start, marks))
        elif options != source.options:
            source.change(options, marks)
        try:
            self._store(source, retained=options.retain_handling == 0)
        except BaseException:
            source.undo(eras)
            raise
        if source.limited and not was_limited:
            self._sessions.wanted.add(source.topic_filter.text)
        elif was_limited and not source.limited:
            self._sessions.wanted.remove(source.topic_filter.text)

    def _share(self, text: str, options: SubscribeOptions, start: Start) -> None:
        """Join a shared subscription, or change this member's options."""
        if options.no_local:
            raise InvalidArgumentError("a shared subscription can't have no_local [MQTT-3.8.3-4]")
        known = self._sources.get(text)
        if isinstance(known, SharedSource):
            before = known.options
            known.change(options)
            try:
                self._commit(known.everything())
            except BaseException:
                known.change(before)
                raise
            return
        groups = self._sessions.shared
        source = groups.join(
            self.keys, self._numbers, text, options, places_of(start, self._dispatcher.hub.watermarks()), self.wake
        )
        try:
            self._commit(source.everything())
        except BaseException:
            groups.leave(source.group, self.client_id)
            raise
        self._numbers += 1
        self._sources[text] = source
        self._sessions.wanted.add(text)
        source.group.attach(source)

    def _store(self, source: FeedSource, *, retained: bool) -> None:
        """Commit a subscription, and that its retained messages are to be sent."""
        found = self._sessions.storage.db.retained(source.topic_filter.text) if retained else []
        now = self._dispatcher.clock()
        kept = RetainedSource(self.keys, source.number, source.topic_filter, source.options, found, now)
        self._commit([*source.everything(), *kept.everything()])
        source.settled()
        if found:
            replaced = self._retained.get(source.number, kept)
            self._behind.pop(replaced, None)
            self._retained[source.number] = kept
            self.wake(kept)

    def _source(self, number: int, topic_filter: TopicFilter, eras: tuple[Era, ...]) -> FeedSource:
        return FeedSource(self._dispatcher, self.keys, number, topic_filter, self.client_id, eras, self.wake)

    def resume(self) -> None:
        """Take up the stored subscriptions. Called once, by `Sessions.open`, with the lock."""
        storage, marks = self._sessions.storage, self._dispatcher.hub.watermarks()
        places, sent = storage.places(self.client_id), storage.retained(self.client_id)
        for number, record in storage.subscriptions(self.client_id):
            self._numbers = number + 1
            if is_shared(record.topic_filter):
                options = record.eras[-1].options
                shared = self._sessions.shared.join(self.keys, number, record.topic_filter, options, marks, self.wake)
                self._sources[record.topic_filter] = shared
                shared.group.attach(shared)
                continue
            source = self._source(number, TopicFilter(record.topic_filter), record.eras)
            source.start(places.get(number, marks) if source.limited else marks)
            source.settled()
            self._sources[record.topic_filter] = source
            if number in sent:
                messages, now = storage.db.retained(record.topic_filter), self._dispatcher.clock()
                topic_filter, options = source.topic_filter, source.options
                self._retained[number] = RetainedSource(
                    self.keys, number, topic_filter, options, messages, now, sent[number]
                )
                self.wake(self._retained[number])
                self._touched()  # perhaps nothing is left to send, which is to be stored
        self._ask()

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
        with self._dispatcher.lock:
            self._check()
            self._dispatcher.listen()
            self._stalled = False
            try:
                draft = self.draft(limit)
                if draft is not None:
                    self._sessions.commit_one(draft)
                return self.take(limit)
            except BaseException:
                self.rewind()
                raise

    def draft(self, limit: int) -> Draft | None:
        """Read what to hand out, as far as there is room; None if there is nothing to commit. With the lock."""
        window = self._window
        portions: list[Portion] = []
        sources: list[Source] = []
        if not (self._outbox or (window.resend and self._room())):  # what needs no room goes on without any
            self._read(max(limit - window.received, 0), portions, sources)  # so that all of it is handed out
        if not (portions or window.received):
            if sources:  # places moved, with nothing to hand out
                self._touched()
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
        return Draft(self, portions, ids, sources, staged, [self._guard, *writes] if writes else [])

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
            self._behind[source] = None  # behind the others
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
            self.failed(failure, source)  # in a part of it: all else goes on
            return Portion(source.topic_filter.text, 0, _NOTHING, (), 0, None)

    def settle(self, draft: Draft) -> None:
        """What was drafted is committed: it may be handed out. With the lock."""
        released = self._window.settle(draft.staged)
        start = 0
        out: list[Item] = [Release(packet_id) for packet_id in released]
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
            self._sessions.wanted.remove(source.topic_filter.text)
        if isinstance(source, RetainedSource) and source.done and self._retained.get(source.number) is source:
            del self._retained[source.number]

    def fail(self, draft: Draft, failure: TopicstoreError) -> None:
        """What was drafted could not be committed: it is read again. With the lock."""
        for source in draft.sources:
            source.rewind()
            self._behind[source] = None
        self.stall(failure)

    def stall(self, failure: TopicstoreError) -> None:
        """It can't go on: let it wait for the next tick. With the lock."""
        self._stalled = True
        self._dispatcher.idle(self)
        self.failed(failure)

    def failed(self, failure: TopicstoreError, *sources: Source) -> None:
        """Something could not be read or committed: it is tried again at the next tick."""
        self.failure = failure
        self._sessions.retry(self, sources)

    def rewind(self) -> None:
        """Read again what was not handed out: something came in between. With the lock."""
        for source in (*self._sources.values(), *self._retained.values()):
            source.rewind()
        self._behind.update(dict.fromkeys(self._retained.values()))

    def try_again(self, sources: Iterable[Source]) -> None:
        """Try what failed again. With the lock."""
        self.failure = None
        self._stalled = False
        for source in sources:
            source.try_again()
            self.wake(source)
        self._dispatcher.ready(self)

    def take(self, limit: int) -> list[Item]:
        """Return what may be handed out, and see whether there will be more. With the lock."""
        if self._window.resend and len(self._outbox) < limit:
            self._resend(min(limit - len(self._outbox), self._room()))
        taken, self._outbox = self._outbox[:limit], self._outbox[limit:]
        self._ask()
        return taken

    def _room(self) -> int:
        """Return how many messages may be sent before the client's receive maximum is reached."""
        window = self._window
        return max(0, self.receive_maximum - len(window) + window.unsent())

    def _ask(self) -> None:
        """Be ready if there is something to do that there is room for; else wait for what changes that."""
        if self._stalled:
            return
        window = self._window
        waiting, room = bool(window.resend or self._behind), self._room()
        self._blocked = waiting and not room
        at_once = self._outbox or window.received or any(not source.limited for source in self._behind)
        if at_once or (waiting and room):
            self._dispatcher.again(self)
        else:
            self._dispatcher.idle(self)
        if self._blocked:
            self.stuck_since = self.stuck_since or self._dispatcher.clock()

    def wake(self, source: Source) -> None:
        """A source has something to read. With the lock."""
        self._behind[source] = None
        if not (self._stalled or (self._blocked and source.limited)):
            self._dispatcher.ready(self)

    # --- sending again ---

    def _resend(self, room: int) -> None:
        """Hand out messages of earlier connections again."""
        window = self._window
        while room > 0 and window.resend:
            flight = window.resend[0]
            rows = list(islice((flight.unsent or {}).items(), min(room, _RESENT)))
            found = self._read_again(flight, [row for _, row in rows])
            for packet_id, row in rows:
                self._outbox_again(flight, packet_id, row, found[row])
            room -= len(rows)
            if not flight.unsent:
                del window.resend[0]

    def _read_again(self, flight: Flight, rows: list[int]) -> dict[int, Message | None]:
        """Return the messages of these rows of a flight, None for those that have vanished or expired."""
        db, now = self._sessions.storage.db, self._dispatcher.clock()
        if flight.topics:
            current = [db.retained(flight.topics[row]) for row in rows]
            return {row: next(iter(messages), None) for row, messages in zip(rows, current, strict=True)}
        positions = [int(flight.positions[row]) for row in rows]
        feed = self._dispatcher.hub.feed(read_filter(flight.topic_filter))
        found = feed.fetch(flight.shard, positions)
        return {
            row: message if message is None or expiry_of(message, time_of(position), now) != 0 else None
            for row, position in zip(rows, positions, strict=True)
            for message in (found.get(position),)
        }

    def _outbox_again(self, flight: Flight, packet_id: int, row: int, message: Message | None) -> None:
        if message is None:
            self._window.vanished(packet_id)
            self._touched()
            return
        flight.sent(packet_id)
        options, kept = flight.options, bool(flight.topics)
        since = self._dispatcher.clock() if kept else time_of(int(flight.positions[row]))
        self._outbox.append(
            Delivery(
                packet_id,
                message,
                flight.qos_of(row),
                dup=True,
                retain=kept or (options.retain_as_published and message.retain),
                subscription_identifiers=(options.identifier,) if options.identifier else (),
                expiry=expiry_of(message, since, self._dispatcher.clock()),
            )
        )

    # --- acknowledgements ---

    def puback(self, packet_id: int) -> bool:
        """A message of QoS 1 was received; return whether its PUBACK was due.

        Committed at the next checkpoint, or with the next delivery that follows the flight's last.
        """
        with self._dispatcher.lock:
            self._heard()
            return self._window.puback(packet_id) and self._acknowledged()

    def puback_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once; return of how many the PUBACK was due."""
        with self._dispatcher.lock:
            self._heard()
            count = self._window.puback_many(packet_ids)
            if count:
                self._acknowledged()
            return count

    def pubrec(self, packet_id: int, *, accepted: bool = True) -> bool:
        """A message of QoS 2 was received; return whether the packet id is in an exchange of QoS 2.

        The next `deliver` commits it and returns its `Release`. With ``accepted`` False (a reason code of
        0x80 or above) the exchange is over.
        """
        with self._dispatcher.lock:
            self._heard()
            return self._window.pubrec(packet_id, accepted=accepted) and self._acknowledged()

    def pubrec_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once that were accepted; return how many are in an exchange of QoS 2."""
        with self._dispatcher.lock:
            self._heard()
            count = sum(map(self._window.pubrec, packet_ids))
            if count:
                self._acknowledged()
            return count

    def pubcomp(self, packet_id: int) -> bool:
        """An exchange of QoS 2 is over; return whether its PUBCOMP was due. Committed as `puback` is."""
        with self._dispatcher.lock:
            self._heard()
            return self._window.pubcomp(packet_id) and self._acknowledged()

    def pubcomp_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once; return of how many the PUBCOMP was due."""
        with self._dispatcher.lock:
            self._heard()
            count = sum(map(self._window.pubcomp, packet_ids))
            if count:
                self._acknowledged()
            return count

    def _acknowledged(self) -> bool:
        """Something was: there may be room, and there is something to commit."""
        self._touched()
        if self._blocked or self._window.received:
            self._blocked = False
            self.stuck_since = None
            self._dispatcher.ready(self)
        return True

    def _touched(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._dispatcher.dirty[self] = None

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
        ids = self._exactly_once(batch, packet_ids)
        with self._dispatcher.lock:
            self._heard()
            if any(ids):
                return self._publish_once(batch, ids)
        return self._sessions.storage.db.publish(batch)

    def _publish_once(self, messages: list[Message], ids: list[int]) -> PublishResult:
        """Publish messages but those whose packet id is in use, and commit the ids that are new."""
        new: dict[int, Message] = {}
        for message, packet_id in zip(messages, ids, strict=True):
            if packet_id not in self._incoming:
                new.setdefault(packet_id or -1 - len(new), message)  # any other key for those that have no id
        fresh = [packet_id for packet_id in new if packet_id > 0]
        writes = [self._guard, *(put(self.keys.incoming(packet_id), (VERSION,)) for packet_id in fresh)]
        shard = self._dispatcher.shard_of(self.client_id)
        try:
            result = self._sessions.storage.db.publish(new.values(), state={shard: writes})
        except StateConflictError as conflict:
            raise self._sessions.overtaken(self) from conflict
        self._incoming.update(fresh)
        return result

    @staticmethod
    def _exactly_once(messages: list[Message], packet_ids: Sequence[int] | None) -> list[int]:
        """Return, by message, the packet id if it is of QoS 2, else 0."""
        if packet_ids is None:
            packet_ids = [0] * len(messages)
        if len(packet_ids) != len(messages):
            raise InvalidArgumentError(f"{len(messages)} messages, but {len(packet_ids)} packet ids")
        ids = [packet_id if message.qos == 2 else 0 for message, packet_id in zip(messages, packet_ids, strict=True)]
        if any(type(packet_id) is not int or not 0 <= packet_id <= 65_535 for packet_id in ids):
            raise InvalidArgumentError("a packet id is a number from 1 to 65,535")
        return ids

    def release(self, packet_id: int) -> bool:
        """An incoming PUBREL: free its packet id; return whether it was in use. Committed when it returns.

        Either way a PUBCOMP may be sent.
        """
        return self.release_many([packet_id]) == 1

    def release_many(self, packet_ids: Iterable[int]) -> int:
        """Do the same for several at once, in one commit; return how many were in use."""
        with self._dispatcher.lock:
            self._heard()
            known = self._incoming.intersection(packet_ids)
            if known:
                self._commit([FrameworkWrite(self.keys.incoming(packet_id), None) for packet_id in known])
                self._incoming -= known
            return len(known)

    # --- its end ---

    def alive(self) -> None:
        """The client was heard of: a PINGREQ, or anything that reaches no other method."""
        with self._dispatcher.lock:
            self._heard()

    def checkpoint(self) -> None:
        """Commit what was acknowledged."""
        with self._dispatcher.lock:
            self._check()
            for failure in self._sessions.checkpoint_of([self]):
                raise failure

    def disconnect(self, *, send_will: bool = False, expiry_interval: float | Keep | None = KEEP) -> None:
        """The client disconnected: commit everything; the will is dropped, or published if ``send_will``.

        expiry_interval: seconds, or None for never, in place of what it was opened with.
        """
        with self._dispatcher.lock:
            self._check()
            self._sessions.end(self, Ended.DISCONNECTED, send_will=send_will, expiry_interval=expiry_interval)

    def lost(self) -> None:
        """The connection is gone without a DISCONNECT: the will is published after its delay."""
        with self._dispatcher.lock:
            self._check()
            self._sessions.end(self, Ended.LOST, send_will=True)

    # --- looking ---

    def status(self) -> SessionStatus:
        """Return what it has in flight, what it waits for, and how far each subscription has come."""
        with self._dispatcher.lock:
            self._dispatcher.listen()
            marks = self._dispatcher.hub.watermarks()
            return SessionStatus(
                client_id=self.client_id,
                in_flight=len(self._window),
                receive_maximum=self.receive_maximum,
                to_resend=self._window.unsent(),
                waits_for=self._waits_for(),
                stuck_since=self.stuck_since,
                missed=sum(source.missed for source in self._sources.values()),
                subscriptions=tuple(_status_of(source, marks) for source in self._sources.values()),
            )

    def _waits_for(self) -> str:
        if self.failure is not None:
            return str(self.failure)
        if self._blocked:
            return "acknowledgements"
        return "delivery" if self._behind or self._outbox or self._window.resend else "nothing"

    # --- for `Sessions` ---

    @property
    def found(self) -> Found:
        """The session as it is stored."""
        return self._found

    @property
    def guard(self) -> StateWrite:
        """The condition of its writes."""
        return self._guard

    def sources(self) -> list[FeedSource | SharedSource]:
        """Return its subscriptions."""
        return list(self._sources.values())

    def last_draft(self) -> Draft | None:
        """Return what there is to commit without handing out anything; None if there is nothing. With the lock."""
        staged = self._window.stage([], whole=True)
        sources: list[Source] = [*self._sources.values(), *self._retained.values()]
        writes = [write for source in sources for write in source.writes()] + staged.writes
        return Draft(self, [], range(0), sources, staged, [self._guard, *writes]) if writes else None

    def clean(self) -> None:
        """Everything acknowledged is committed. With the lock."""
        self._dirty = False
        self._dispatcher.dirty.pop(self, None)

    def end(self, why: Ended) -> None:
        """Be of no more use. With the lock."""
        self.ended = why
        self._dispatcher.forget(self)
        for source in (*self._sources.values(), *self._retained.values()):
            source.close()
        self._sources.clear()
        self._retained.clear()
        self._behind.clear()
        self._outbox.clear()

    def _commit(self, writes: list[StateWrite]) -> None:
        self._sessions.commit_for(self, [self._guard, *writes])

    def _heard(self) -> None:
        if self.keep_alive:
            self.seen = self._dispatcher.clock()
        self._check()

    def _check(self) -> None:
        if self.ended is not None:
            kind = SessionTakenOverError if self.ended is Ended.TAKEN_OVER else SessionEndedError
            raise kind(f"session {self.client_id!r} is over: {self.ended.value}")

    def __repr__(self) -> str:
        return f"<Session {self.client_id!r}{'' if self.ended is None else ' ended'}>"


def _status_of(source: FeedSource | SharedSource, marks: list[int]) -> SubscriptionStatus:
    unread = source.unread()
    behind = max((time_of(marks[shard]) - time_of(source.places[shard]) for shard in unread), default=0)
    return SubscriptionStatus(
        topic_filter=source.topic_filter.text,
        options=source.options,
        places=tuple(source.places),
        behind=max(behind, 0) / 1e6,
        dropped=source.dropped,
    )
