"""`Sessions`: the durable sessions of one database."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from topicstore.contract.arguments import KEEP, Keep, Length, check_count, seconds
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import InvalidArgumentError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.lifecycle.retention import Retention
from topicstore.pubsub.notifier import CallWaiter
from topicstore.pubsub.publish import Publisher
from topicstore.runtime.closing import close_all
from topicstore.storage.counting.lag import Lag

from .connect import Connect, Opening, checked
from .deliver import Deliveries
from .delivered_removal import DeliveredRemoval
from .delivery_batch import Allow, Packet, single
from .disconnect import Leaving
from .in_flight import MAX_PACKET_ID
from .lag import Lagging
from .model import (
    Acknowledged,
    Ended,
    Overlapping,
    Publish,
    PublishedRows,
    PubRel,
    SessionCounts,
    SessionInfo,
    Skipped,
    Start,
    SubscribeOptions,
    SubscribeResult,
    Will,
)
from .publish import Incoming, publish
from .qos2 import Refused, free_all, receive_all
from .registry import SessionRegistry
from .session import Session
from .session_expiry import Pace, Timers
from .shared.groups import SharedSubscriptions
from .subscribe import resume_rows, subscribe_rows, unsubscribe_rows
from .wills import Wills

__all__ = ["Sessions"]

T = TypeVar("T")

_INTERNAL = frozenset(("checkpoint_one", "deliver_one", "entered", "load_filters", "restrict"))
"""Public attributes that only other parts of the framework use."""


class Sessions:
    """The durable sessions of one open database, as returned by `Database.sessions`.

    A session belongs to a client id. While its client is connected there is a `Session` object; otherwise the session
    is only stored. Deliveries are pulled: `wait` returns when any are possible, and `deliver` returns those of all
    sessions, committed together. Call `tick` again after the seconds that it returns: it does all work that depends on
    time.

    All methods are thread-safe. The methods that a server calls in its event loop block neither on a lock nor on the
    engine: `connected`, `counts`, `notify`, `wait_async`, and those that `Session` names. All others may block on the
    engine and on calls for the same sessions. Calls that open or end sessions, `tick` and `checkpoint` exclude all
    other calls. No call waits for a whole `deliver`, which lets other calls run between its commits.

    ``on_end`` is called without any lock: by the thread whose call ended the session, at the end of that call. An error
    that ``on_end`` raises is not raised by that call. The error is reported as a `RuntimeWarning` or, where warnings
    are errors, passed to `threading.excepthook`.
    """

    def __init__(self, publisher: Publisher, retention: Retention) -> None:
        self._registry = registry = SessionRegistry(publisher)
        self._dispatcher = registry.dispatcher
        self._locks = registry.locks
        self.entered = self._locks.entered
        """Returns whether the calling thread is within a call that must return before the sessions can be closed."""
        self.bounds = registry.states.counts.bounds
        """The limits on the number of stored sessions; its attributes may be set."""
        self.pace = Pace()
        """The intervals of the periodic work of sessions; its attributes may be set."""
        self.groups = SharedSubscriptions(registry.groups, self._entered)
        """The shared subscriptions, and the time for which a member may be slow or away before others take over."""
        self._lagging = Lagging(registry, self._entered)
        self._delivered = self._removal(retention)
        retention.settings  # noqa: B018 - loads them, by which `Storage.interest` tracks what is published
        publisher.storage().on_close(self._delivered.stop)
        wills = Wills(registry)
        self._timers = Timers(registry, wills, self.pace)
        self._leaving = Leaving(registry, self._timers)
        self._opening = Opening(registry, self._timers, wills, self._leaving, self)
        self._deliveries = Deliveries(registry)

    def _removal(self, retention: Retention) -> DeliveredRemoval:
        registry, site = self._registry, self._registry.publisher.storage().site
        if site is None or registry.notes is None:
            return DeliveredRemoval(registry, retention, self._entered)
        from .site_delivered_removal import SiteDeliveredRemoval  # imported only on a site of a cluster

        return SiteDeliveredRemoval(registry, retention, self._entered, registry.notes, site)

    # --- opening ---

    def __dir__(self) -> list[str]:
        """Return the public attributes, for completion."""
        return sorted(set(super().__dir__()) - _INTERNAL)

    def __repr__(self) -> str:
        return f"<Sessions: {len(self._registry.connected)} connected>"

    def open(
        self,
        client_id: str,
        *,
        clean_start: bool = False,
        expiry_interval: Length | None = 0.0,
        receive_maximum: int = MAX_PACKET_ID,
        keep_alive: Length = 0,
        will: Will | None = None,
        allow: Allow | None = None,
        overlapping: Overlapping = "each",
        in_memory: bool = False,
        batch_size: int | None = None,
        user: str = "",
        on_end: Callable[[Session, Ended], None] | None = None,
    ) -> Session:
        """Open the session of a client, or create one; `Session.present` says which. The session is durable on return.

        clean_start:     end an existing session, and begin a new one (section 3.1.2.4).
        expiry_interval: how long the session lasts after this connection, as a timedelta or in seconds; 0: it ends with
                         the connection; None or 0xFFFFFFFF: it never expires (section 3.1.2.11.2).
        receive_maximum: the most messages of QoS 1 and 2 that may be in flight (section 3.1.2.11.3).
        keep_alive:      a timedelta or seconds; the connection of a client that is silent for 1.5 times as long counts
                         as lost; 0: there is no limit (section 3.1.2.10).
        will:            the message that is published when the connection is lost (section 3.1.2.5).
        allow:           a function that authorizes deliveries. It is called with the messages to deliver next, before
                         they get packet ids, and returns for each message whether it may be sent to the client. It may
                         also return None: then nothing is delivered until `Session.ask_again`, which calls it again. A
                         refused message counts as delivered and is not sent later; in a shared subscription it goes to
                         another member, or waits for one (sections 3.1.2.11.4 and 4.8.2). `SessionStatus.refused`
                         counts these messages. In a resumed session the function is also called for messages in flight.
                         It must return quickly and must not call the database. If it raises, nothing is delivered to
                         this session, whose `failure` is set, and the next tick tries again.
        overlapping:     how often a message that matches several subscriptions is delivered. With ``"each"``, once for
                         each of them. With ``"once"``, one time, with the highest QoS and all subscription identifiers
                         of these subscriptions (section 3.3.4), and with the RETAIN flag as published if one of them
                         asks for it. The value holds for this connection only. Messages of a shared subscription, and
                         retained messages sent when a subscription is made, are always delivered separately.
                         With ``"once"``, messages of QoS 0 of subscriptions that overlap with one of QoS 1 or 2 wait
                         while the window is full.
        in_memory:       keep the session state in memory only, so that the client causes no writes; the session is lost
                         if the process dies. The messages for it are stored as for any other session. Requires an
                         ``expiry_interval`` of 0, ``clean_start``, and no ``will``. With its first shared subscription
                         the session becomes a stored one, which still ends with the connection.
        batch_size:      the most packets that the session is handed in one turn; None: no limit of its own.
        user:            the user that a new session counts for; see `bounds`.
        on_end:          called once if the session ends other than by a method of its object; should return quickly.

        Section numbers are those of MQTT 5. An older `Session` object of the client is taken over and can't be used any
        more [MQTT-3.1.4-3]. Raises `InvalidArgumentError`, `QuotaExceededError` if `bounds` permits no more stored
        sessions, on a site of a cluster `ShardElsewhereError` if another site owns the client id's shard, and the
        errors of reading and writing state.
        """
        how = Connect(
            client_id=client_id, clean_start=clean_start, expiry_interval=expiry_interval, will=will, allow=allow,
            receive_maximum=receive_maximum, keep_alive=keep_alive, overlapping=overlapping, in_memory=in_memory,
            batch_size=batch_size, user=user
        )  # fmt: skip
        good, _ = checked([how], partial=False)
        return self._writing(lambda: self._opening.open_all(good, on_end))[0]

    def open_many(
        self,
        connects: Iterable[Connect],
        *,
        on_end: Callable[[Session, Ended], None] | None = None,
        partial: bool = False,
        resume: bool = True,
    ) -> list[Session | TopicstoreError]:
        """Open sessions of many clients, as `open` does, with one commit for each shard; return them by row.

        partial: open the sessions that can be opened; the result of any other row is its error. Without ``partial``,
                 the first error is raised: an invalid argument before any session is opened, any other error after the
                 connections of the opened sessions have ended as if they were lost.
        resume:  whether to load the stored subscriptions at once. With False, which needs ``partial``, the caller
                 loads them in steps by calling `resume`.

        In each shard all openings are one engine write; if the process dies in between, only those of some shards are
        committed. If a client id occurs in several rows, the session of the later row takes over that of the earlier. A
        session that is ended first, because of ``clean_start`` or its expiry, is removed by separate commits.
        """
        good, refused = checked(connects, partial=partial)
        if not partial:
            return list(self._writing(lambda: self._opening.open_all(good, on_end)))
        outcome = refused | self._writing(lambda: self._opening.open(good, on_end, resume=resume))
        return [outcome[row] for row in sorted(outcome)]

    def resume(self, sessions: Iterable[Session], limit: int) -> list[bool | TopicstoreError]:
        """Load about ``limit`` more stored subscriptions of sessions that `open_many` opened without ``resume``.

        Return by row True if no subscription is left to load, else False, or the error because of which the session
        must be ended. A session delivers nothing until all its subscriptions are loaded.
        """
        return resume_rows(self._registry, self._registry.own(sessions), limit)

    def connected(self, client_id: str) -> Session | None:
        """Return the `Session` of a client that is connected, or None. Never blocks."""
        self._dispatcher.check_open()
        return self._registry.connected.get(client_id)

    @property
    def store_qos0(self) -> bool:
        """Whether messages of QoS 0 are stored for durable subscriptions. May be set; the setting is not stored.

        True: they are delivered to clients that were away, too. False: they are delivered at QoS 0 to the clients that
        are connected, in order with the stored messages of the same topic and QoS, and cost no write. Both are allowed
        (MQTT 5, section 4.1: messages of QoS 0 that wait may be part of a session's state). Shared subscriptions with a
        connected session receive the stored messages, and all do if a message is stored for another reason.
        """
        return self._registry.filters.store_qos0

    @store_qos0.setter
    def store_qos0(self, stored: bool) -> None:
        self._registry.filters.store_qos0 = bool(stored)

    def wants(self, topic: str, qos: int = 1) -> bool:
        """Return whether a message of this topic and QoS is stored for a durable subscription, connected or not.

        On a site of a cluster, every message is stored.
        """
        self.load_filters()
        return self._registry.shared or self._registry.filters.match(topic, qos)

    def load_filters(self) -> None:
        """Load the filters of all durable subscriptions, unless they are loaded. `Database.publish` needs them."""
        self._registry.load_filters()

    # --- delivering ---

    def deliver(
        self, limit_each: int = 1_000, *, limit: int = 20_000, max_bytes: int | None = None
    ) -> list[tuple[Session, list[Publish | PubRel]]]:
        """Return the packets to send now, by session. Sessions take turns in order; the next call continues after them.

        limit_each: the most packets of one session.
        limit:      the most packets of all sessions together.
        max_bytes:  the most bytes of payload for one session, though a session gets at least one message; None: no
                    limit. A few more messages may be read, which wait in memory for the next call and may expire there.
                    Such messages are handed out even if they are deleted meanwhile. Those of QoS 0 are lost with the
                    connection.

        The rules of `Session.deliver` hold for each session. About 10,000 packets, of up to 1,000 sessions, are
        committed together, with one engine write for each shard. The lock is released between these commits. A session
        whose commit fails is left out; its `Session.failure` shows the error, and the next tick tries again.
        """
        delivered = self._deliveries.deliver(limit_each, limit, max_bytes)
        return [(session, single(packets)) for session, packets in delivered]

    def deliver_batches(
        self, limit_each: int = 1_000, *, limit: int = 20_000, max_bytes: int | None = None
    ) -> list[tuple[Session, list[Packet]]]:
        """Return the same as `deliver`, with messages as columns, so that a server can encode each message only once.

        See `DeliveryBatch`. A message left over from an earlier call, or sent again, is a `Publish`.
        """
        return self._deliveries.deliver(limit_each, limit, max_bytes)

    def wait(self, timeout: Length | None = None) -> bool:
        """Block until a session has packets to deliver, then return True; return False after ``timeout``.

        ``timeout`` is a timedelta or seconds; None: no limit. Raises `DatabaseClosedError` if the database is closed
        meanwhile. True is no promise: another thread may take the packets first, or their session may be paused.
        """
        return self._dispatcher.wait(seconds(timeout))

    async def wait_async(self, timeout: Length | None = None, *, executor: Executor | None = None) -> bool:
        """Wait like `wait`, without blocking the event loop. Events are examined in a thread of ``executor``."""
        return await self._dispatcher.wait_async(seconds(timeout), executor)

    def notify(self, call: Callable[[], object]) -> contextlib.AbstractContextManager[object]:
        """Return a context manager; while it is entered, ``call`` is called when there may be packets to deliver.

        For a server with its own event loop, as an alternative to `wait_async`. ``call`` is called in any thread, also
        by the methods that never block, often under a lock, and when the database is closed. So it must return at once
        and not raise, like ``loop.call_soon_threadsafe``. Afterwards `wait(0)` returns whether there are packets.
        """
        self._dispatcher.check_open()
        return CallWaiter(self._dispatcher.notifier, call)

    # --- committing ---

    def checkpoint(self) -> None:
        """Commit the acknowledgements of all sessions. `tick` calls this every 15 seconds, unless `pace` is changed.

        Raises the first error, after committing all that could be committed.
        """

        def commit() -> list[TopicstoreError]:
            self._dispatcher.hear_locked()
            return self._registry.commits.checkpoint(list(self._dispatcher.dirty))

        for failure in self._writing(commit):
            raise failure

    # --- ending connections ---

    def disconnect(
        self,
        sessions: Iterable[Session],
        *,
        send_will: bool = False,
        expiry_interval: Length | Keep | None = KEEP,
        partial: bool = False,
    ) -> list[TopicstoreError | None]:
        """End connections after their DISCONNECTs, as `Session.disconnect` does, with one commit for each shard.

        partial: return, by row, the error of a connection that could not be ended, or None. Without ``partial``, the
                 first error is raised after all other connections have ended.

        In each shard all ends are one engine write; if the process dies in between, only those of some shards are
        committed. A connection that has ended already is an error, `SessionEndedError`, unless an earlier row ended it.
        """
        ending = self._registry.own(sessions)
        return self._locks.hold_all(
            lambda: self._leaving.end_rows(
                ending, Ended.DISCONNECTED, send_will=send_will, expiry_interval=expiry_interval, partial=partial
            )
        )

    def lost(self, sessions: Iterable[Session], *, partial: bool = False) -> list[TopicstoreError | None]:
        """End connections that broke without a DISCONNECT, as `Session.lost` does.

        Commits, errors and ``partial``: as in `disconnect`.
        """
        ending = self._registry.own(sessions)
        return self._locks.hold_all(lambda: self._leaving.end_rows(ending, Ended.LOST, send_will=True, partial=partial))

    def kick(self, client_id: str) -> bool:
        """End the connection of a client's session as if it were lost, even if a crash left it open.

        Return False if it has none. Raises `SessionNotFoundError`.
        """
        return self._writing(lambda: self._leaving.kick(client_id))

    def expire(self, client_id: str) -> None:
        """End a client's session now, and its connection if it has one. Raises `SessionNotFoundError`."""
        self._writing(lambda: self._opening.expire(self._registry.found(client_id)))

    def close(self) -> None:
        """Commit all changes and end all connections as if they were lost. `Database.close` calls this."""
        self._delivered.stop()
        self._locks.hold_all(lambda: close_all((self._note_clocks_locked, self._close_locked, self._dispatcher.close)))

    def _close_locked(self) -> None:
        sessions = list(self._registry.connected.values())
        end = functools.partial(self._leaving.end, sessions, Ended.CLOSED, send_will=True)
        over = self._registry.over  # an end that could not be committed is recovered by the next opening
        close_all((end, *(functools.partial(over, session, Ended.CLOSED, notify=True) for session in sessions)))

    # --- calls of one session ---

    def deliver_one(self, session: Session, limit: int, max_bytes: int | None) -> list[Publish | PubRel]:
        """Return the packets of one session to send now; see `Session.deliver`."""
        return self._deliveries.deliver_one(session, limit, max_bytes)

    def restrict(self, session: Session, allow: Allow | None) -> None:
        """Replace the ``allow`` of one session; see `Session.restrict`."""

        def restrict() -> None:
            session.check()
            session.replace_allow(allow)

        self._locks.hold([session], restrict)

    def checkpoint_one(self, session: Session) -> None:
        """Commit the acknowledgements of one session, as `Session.checkpoint` does."""

        def checkpoint() -> None:
            session.check()
            for failure in self._registry.commits.checkpoint([session]):
                raise failure

        self._locks.hold([session], checkpoint)

    # --- packets of many sessions ---

    def subscribe(
        self,
        rows: Iterable[tuple[Session, str, SubscribeOptions]],
        *,
        start: Start = None,
        partial: bool = False,
    ) -> list[SubscribeResult | TopicstoreError]:
        """Make or change subscriptions, of one session or of many, as `Session.subscribe` does; return results by row.

        rows:    a session, a filter and its options.
        start:   where all of the subscriptions begin; see `Session.subscribe`.
        partial: the result of a row that is refused is its error. Without ``partial``, the first error is raised; if it
                 is an invalid filter or option, or a session that has ended, then nothing is changed.

        In each shard all subscriptions are one engine write; if the process dies in between, only those of some shards
        are committed. A filter that occurs again for a session is changed after those before it, by a separate commit.
        """
        given = list(rows)
        sessions = self._registry.own([session for session, _, _ in given])
        wanted = [(text, options) for _, text, options in given]
        return subscribe_rows(self._registry, sessions, wanted, start, partial=partial)

    def unsubscribe(
        self, rows: Iterable[tuple[Session, str]], *, partial: bool = False
    ) -> list[bool | TopicstoreError]:
        """End subscriptions as `Session.unsubscribe` does; return by row whether there was one.

        Commits, errors and ``partial``: as in `subscribe`.
        """
        given = list(rows)
        sessions = self._registry.own([session for session, _ in given])
        return unsubscribe_rows(self._registry, sessions, [text for _, text in given], partial=partial)

    def publish(self, rows: Iterable[tuple[Session, Message, int]], *, partial: bool = False) -> PublishedRows:
        """Publish messages of many clients, as `Session.publish` does, with one commit for each shard.

        rows:    a session, a message of its client, and the packet id at QoS 2; 0 for a message without one.
        partial: refuse the rows that can't be published, such as those of sessions that have ended, and publish the
                 others. Without it, the first of these errors is raised, and no message was stored; the index of an
                 `InvalidMessageError` is the row.

        Messages of one client keep their order. In each shard, the messages and packet ids of all sessions are one
        engine write. If the process dies between these writes, only some shards have their messages, and nothing was
        acknowledged. Clients then send their messages again, and those of QoS 2 are stored once.

        On return, a PUBREC or PUBACK may be sent for every row that was not refused. Raises the errors that
        concern the whole batch, such as `QuotaExceededError`; then no message was stored, unless the commit of only
        some shards failed.
        """
        given = list(rows)
        sessions = self._registry.own([session for session, _, _ in given])
        refused: Refused = {}
        messages = Incoming.of_objects([message for _, message, _ in given], refused, partial=partial)
        ids = [packet_id for _, _, packet_id in given]
        return publish(self._registry, sessions, messages, ids, refused, partial=partial)

    def publish_batch(
        self, sessions: Sequence[Session], batch: MessageBatch, packet_ids: Sequence[int], *, partial: bool = False
    ) -> PublishedRows:
        """Publish messages of many clients that are given as columns, as `publish` does, without an object for each.

        sessions:   the session of each row, which may occur often.
        batch:      the messages, which this call validates; the client id of each is that of its row's session.
        packet_ids: the packet id of each row at QoS 2; 0 for a message without one.

        Commits, errors and ``partial``: as in `publish`. Also raises `InvalidArgumentError` if there are not as many
        sessions and packet ids as messages, and `InvalidMessageError` if the columns of the batch have different
        lengths.
        """
        messages, ids = Incoming.of_batch(batch), list(packet_ids)
        given = self._registry.own(sessions)
        if not len(given) == len(messages) == len(ids):
            raise InvalidArgumentError(f"{len(messages)} messages, {len(given)} sessions, {len(ids)} packet ids")
        return publish(self._registry, given, messages, ids, {}, partial=partial)

    def pubrel(self, rows: Iterable[tuple[Session, int]], *, partial: bool = False) -> Acknowledged:
        """Free the packet ids of incoming PUBRELs, as `Session.pubrel` does, with one commit for each shard.

        rows:    a session and a packet id.
        partial: refuse the rows of sessions that have ended or can't be committed, and free the others. Without
                 ``partial``, the first error is raised; if a session has already ended, no packet id is freed.

        The packet ids are committed on return, and a PUBCOMP may be sent for every row that was not refused.
        """
        given = list(rows)
        sessions = self._registry.own([session for session, _ in given])
        return free_all(self._registry, sessions, [packet_id for _, packet_id in given], partial=partial)

    def pubrec(
        self, rows: Iterable[tuple[Session, int]], *, accepted: bool = True, partial: bool = False
    ) -> Acknowledged:
        """Record PUBRECs of messages of QoS 2 from many clients, as `Session.pubrec` does.

        rows:    a session and a packet id.
        partial: refuse the rows of sessions that have ended. Without it, the error is raised, and nothing was recorded.

        The next `deliver` commits the PUBRECs, with one commit for each shard, and returns the `PubRel`s.
        """
        given = list(rows)
        sessions = self._registry.own([session for session, _ in given])
        ids = [packet_id for _, packet_id in given]
        return receive_all(self._registry, sessions, ids, accepted=accepted, partial=partial)

    # --- inspecting ---

    def counts(self) -> SessionCounts:
        """Return counts of the connected sessions, for statistics such as ``$SYS`` topics.

        Never blocks, and takes about a microsecond for each session.
        """
        self._dispatcher.check_open()
        return self._registry.counts()

    def __iter__(self) -> Iterator[SessionInfo]:
        """Iterate over all sessions, as they are stored or kept in memory, sorted by client id.

        Each session is read when the iterator reaches it. No lock is held in between, so sessions may change meanwhile.
        """
        self._check_open()
        return filter(None, map(self._info_of, self._registry.clients()))

    def clients(self, *, connected: bool | None = None) -> list[str]:
        """Return the client ids of all sessions, sorted; ``connected``: only of those that are (not) connected here."""
        self._check_open()
        return self._registry.clients(connected)

    def __len__(self) -> int:
        """Return the number of sessions."""
        self._check_open()
        return self._registry.count()

    def __contains__(self, client_id: str) -> bool:
        """Return whether a client has a session, connected or not."""
        self._check_open()
        return self._registry.find(client_id) is not None

    def __getitem__(self, client_id: str) -> SessionInfo:
        """Return a client's session, as it is stored or kept in memory. Raises `SessionNotFoundError`."""
        self._check_open()
        return self._registry.info(self._registry.found(client_id))

    def lag(self, *client_ids: str) -> dict[str, dict[str, Lag]]:
        """Return, by client id and filter, the lag of the deliveries behind the stored messages.

        Without arguments it covers all sessions. For a session that isn't connected here, the committed deliveries
        count. Messages in flight count as delivered. Waiting retained messages and messages that are not stored don't
        count; expired messages do. The lag of a shared subscription is that of the whole group, not of one member.

        Up to 10,000 messages of each filter and shard are read and counted; the number of further ones is estimated.
        Raises `SessionNotFoundError`, and the errors of reading.
        """
        self._check_open()
        return self._lagging.lag(client_ids)

    def longest_behind(self, client_ids: Iterable[str], limit: int) -> list[str]:
        """Return at most ``limit`` of these client ids whose sessions lag, sorted by `Lag.seconds`, the longest first.

        Only the next unread message of each candidate is read. Raises the errors of reading.
        """
        self._check_open()
        return self._lagging.longest(list(client_ids), limit)

    def bound_backlogs(
        self,
        client_ids: Iterable[str],
        *,
        max_messages: int | None = None,
        max_bytes: int | None = None,
    ) -> dict[str, Skipped]:
        """Skip the oldest messages that wait for sessions above a limit; return their numbers, by client id.

        client_ids:   the sessions; those that don't exist are left out.
        max_messages: the most messages that wait for a session; None: no limit.
        max_bytes:    the most bytes of their payloads; None: no limit.

        All subscriptions of a session count together, without shared ones. Messages in flight don't count. The places
        of the session are moved forward, and are committed on return: skipped messages are not delivered to the
        session, but stay stored for others. A session with a very long backlog is bounded by several calls. A session
        that is opened at the same time is left to the next call. Messages that are stored meanwhile may exceed the
        limits. Raises the errors of reading and writing.
        """
        self._check_open()
        limits = [one for one in (max_messages, max_bytes) if one is not None]
        for one in limits:
            check_count("a limit of max_messages or max_bytes", one)
        if not limits:
            return {}
        from .backlog import Backlogs  # imported late: few programs call this

        return Backlogs(self._registry, self._entered).bound(list(client_ids), max_messages, max_bytes)

    def _entered(self, work: Callable[[], T]) -> T:
        """Call ``work`` under the lock, after handling the pending events, and return its result."""

        def entered() -> T:
            self._check_open()
            self._dispatcher.listen_locked()
            return work()

        return self._registry.mutex.hold(entered)

    def _writing(self, work: Callable[[], T]) -> T:
        """Call ``work`` with the lock of all sessions held; return its result. Raises if the database is read-only."""

        def locked() -> T:
            self._registry.check_may_write()
            return work()

        return self._locks.hold_all(locked)

    def _info_of(self, client_id: str) -> SessionInfo | None:
        self._check_open()
        found = self._registry.find(client_id)
        return None if found is None else self._registry.info(found)

    # --- time ---

    def tick(self) -> float:
        """Do all work that is due; return the number of seconds after which to call again.

        Wills are published, sessions end, the connections of silent clients are ended, acknowledgements are committed,
        and failed work is tried again. Nothing happens before it is due. A failure doesn't hold up the rest; it is
        raised at the end, several failures as an `ExceptionGroup`, and a call a second later tries again. `pace` bounds
        the work of one call.

        While the database is open, a monotonic clock measures elapsed time, so setting the wall clock has no effect.
        After a restart it has none either, provided that `tick` or the closing has recorded the change. While no
        process has the database open, the expiry of sessions and the delays of wills follow the wall clock.
        """

        def tick() -> float:
            self._timers.follow_shards()
            self._note_clocks_locked()
            return self._timers.tick(self._leaving.end_silent)

        self._delivered.look()
        return self._writing(tick)

    def remove_delivered(self) -> int:
        """Remove messages that are stored only because sessions wait for them, and that no session needs any more.

        Removes only messages that are older than `RetentionSettings.delivered`, and nothing without that setting;
        returns the number of removed messages. `tick` starts such a removal in the background, four times in that
        period. A shard's messages are removed in order, so a message that a session has yet to deliver keeps all
        younger ones. Raises the errors of `Database.delete`.
        """
        self._check_open()
        return self._delivered.remove()

    @property
    def removal_failure(self) -> str | None:
        """The error of the last removal of delivered messages in the background; None if it succeeded."""
        return self._delivered.failure

    def _note_clocks_locked(self) -> None:
        with contextlib.suppress(TopicstoreError):  # the shard reports the error; the next tick tries again
            self._registry.clocks.note(self._timers.owned(), self._registry.states.commit)

    def _check_open(self) -> None:
        self._dispatcher.check_open()
        self._registry.publisher.storage().check_open()
