"""`AsyncSessions` and `AsyncSession`: durable sessions in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence

from topicstore.contract.arguments import KEEP, Keep, Length
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.sessions import (
    Acknowledged,
    Connect,
    Ended,
    Overlapping,
    Publish,
    PublishedRows,
    PubRel,
    Session,
    SessionCounts,
    Sessions,
    Start,
    SubscribeOptions,
    SubscribeResult,
    Will,
)
from topicstore.sessions.delivery_batch import Allow, Packet, single
from topicstore.sessions.in_flight import MAX_PACKET_ID
from topicstore.sessions.session_expiry import Pace
from topicstore.sessions.session_store import StoredBounds
from topicstore.sessions.shared.groups import SharedSubscriptions

from .face import Collection, Face, direct, iterated, threaded
from .handover import Handover
from .threads import Threads

__all__ = ["AsyncSession", "AsyncSessions", "AsyncSharedSubscriptions"]

_Packets = list[Publish | PubRel]


class AsyncSession(Face[Session]):
    """A connected client's session, as returned by `AsyncSessions.open`; see `Session`.

    Methods that never block in `Session` run without a thread, although they are awaited.
    """

    def __init__(self, threads: Threads, session: Session) -> None:
        super().__init__(threads, lambda: session, session)
        self._session = session
        self._delivered: Handover[_Packets] = Handover(threads)

    @property
    def client_id(self) -> str:
        """The client id of the session."""
        return self._session.client_id

    @property
    def present(self) -> bool:
        """Whether the session existed already: the Session Present flag of CONNACK (MQTT 5, section 3.2.2.1.1)."""
        return self._session.present

    @property
    def receive_maximum(self) -> int:
        """The maximum number of messages of QoS 1 and 2 in flight: sent to the client but not acknowledged."""
        return self._session.receive_maximum

    @property
    def keep_alive(self) -> float:
        """The keep alive in seconds: a client that is silent for 1.5 times as long counts as lost; 0 for no limit."""
        return self._session.keep_alive

    @property
    def filters(self) -> int:
        """The number of the session's subscriptions."""
        return self._session.filters

    @property
    def ended(self) -> Ended | None:
        """The reason why the object can't be used any more; None while it can."""
        return self._session.ended

    @property
    def failure(self) -> TopicstoreError | None:
        """The error of the last read or commit that failed and will be retried; None if nothing failed."""
        return self._session.failure

    @property
    def synchronous(self) -> Session:
        """The wrapped `Session`."""
        return self._session

    async def deliver(self, limit: int = 1_000, *, max_bytes: int | None = None) -> _Packets:
        """Return the packets to send now, with at most about ``limit`` messages; see `Session.deliver`.

        Packets taken for a cancelled call are returned by the next call of this object, so that they are sent.
        """
        return await self._delivered.take(lambda: self._session.deliver(limit, max_bytes=max_bytes))

    subscribe = threaded(Session.subscribe)
    unsubscribe = threaded(Session.unsubscribe)
    pause = direct(Session.pause)
    resume = direct(Session.resume)
    restrict = threaded(Session.restrict)
    ask_again = direct(Session.ask_again)
    puback = direct(Session.puback)
    pubrec = direct(Session.pubrec)
    pubcomp = direct(Session.pubcomp)
    publish = threaded(Session.publish)
    pubrel = threaded(Session.pubrel)
    lag = threaded(Session.lag)
    alive = direct(Session.alive)
    checkpoint = threaded(Session.checkpoint)
    disconnect = threaded(Session.disconnect)
    lost = threaded(Session.lost)
    status = direct(Session.status)

    def __repr__(self) -> str:
        return f"<Async{repr(self._session).removeprefix('<')}"


class AsyncSharedSubscriptions(Collection[SharedSubscriptions]):
    """The shared subscriptions of one database, as returned by `AsyncSessions.groups`; see `SharedSubscriptions`.

    Their settings are available only in the synchronous interface (`AsyncDatabase.synchronous`).
    """

    __aiter__ = iterated(SharedSubscriptions.__iter__)
    count = threaded(SharedSubscriptions.__len__)
    contains = threaded(SharedSubscriptions.__contains__)


class AsyncSessions(Collection[Sessions]):
    """The durable sessions of one database, as returned by `AsyncDatabase.sessions`; see `Sessions`."""

    def __init__(self, threads: Threads, find: Callable[[], Sessions], of: object) -> None:
        super().__init__(threads, find, of)
        self._faces: weakref.WeakValueDictionary[Session, AsyncSession] = weakref.WeakValueDictionary()
        """The wrappers of sessions that callers still reference. Used only in the event loop."""
        self._delivered: Handover[list[tuple[Session, list[Packet]]]] = Handover(threads)
        self._made: Sessions | None = None
        """The synchronous sessions, once loaded, which reads the database. Used only in the event loop."""
        self.groups = AsyncSharedSubscriptions(threads, lambda: self._find().groups, of)
        """The shared subscriptions."""

    def _face(self, session: Session) -> AsyncSession:
        face = self._faces.get(session)
        if face is None:
            face = self._faces[session] = AsyncSession(self._threads, session)
        return face

    async def _sessions(self) -> Sessions:
        """Return the synchronous sessions; only the first call, which loads them, uses a thread."""
        self._threads.check_loop()
        if self._made is None:
            self._made = await self._threads.run(self._find)
        return self._made

    async def open(
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
        on_end: Callable[[AsyncSession, Ended], None] | None = None,
    ) -> AsyncSession:
        """Open the session of a client, or create one; see `Sessions.open`.

        ``on_end`` is called in the event loop, ``allow`` in a thread.

        If the task is cancelled, the new session is disconnected again. The client's earlier connection may then have
        been taken over.
        """
        ended = self._in_loop(on_end)

        def opened() -> Session:
            return self._find().open(
                client_id,
                clean_start=clean_start,
                expiry_interval=expiry_interval,
                receive_maximum=receive_maximum,
                keep_alive=keep_alive,
                will=will,
                allow=allow,
                overlapping=overlapping,
                in_memory=in_memory,
                user=user,
                batch_size=batch_size,
                on_end=ended,
            )

        return self._face(await self._threads.make(opened, Session.disconnect))

    async def connected(self, client_id: str) -> AsyncSession | None:
        """Return the session of a connected client, or None. Waits only while the sessions are first loaded."""
        session = (await self._sessions()).connected(client_id)
        return None if session is None else self._face(session)

    async def counts(self) -> SessionCounts:
        """Return counts of the connected sessions; see `Sessions.counts`. Waits only for their first loading."""
        return (await self._sessions()).counts()

    async def deliver(
        self, limit_each: int = 1_000, *, limit: int = 20_000, max_bytes: int | None = None
    ) -> list[tuple[AsyncSession, _Packets]]:
        """Return the packets to send now, by session; see `Sessions.deliver`.

        Packets taken for a cancelled call are returned by the next call, so that they are sent.
        """
        delivered = await self.deliver_batches(limit_each, limit=limit, max_bytes=max_bytes)
        return [(session, single(packets)) for session, packets in delivered]

    async def deliver_batches(
        self, limit_each: int = 1_000, *, limit: int = 20_000, max_bytes: int | None = None
    ) -> list[tuple[AsyncSession, list[Packet]]]:
        """Return the same as `deliver`, with several messages as columns; see `Sessions.deliver_batches`."""
        delivered = await self._delivered.take(
            lambda: self._find().deliver_batches(limit_each, limit=limit, max_bytes=max_bytes)
        )
        return [(self._face(session), packets) for session, packets in delivered]

    async def wait(self, timeout: Length | None = None) -> bool:
        """Return True once there is something to deliver, or False if there is nothing after ``timeout`` seconds.

        The wait occupies no thread. Raises `DatabaseClosedError` if the database is closed before or during the wait.
        """
        sessions = await self._sessions()
        return await sessions.wait_async(timeout, executor=self._threads)

    @property
    def store_qos0(self) -> bool:
        """Whether messages of QoS 0 are stored for durable subscriptions; may be set. See `Sessions.store_qos0`.

        The first access to the sessions reads them from the database, and blocks the event loop if it is this property.
        After any awaited call of the sessions, such as `counts`, the property never blocks.
        """
        return self._find().store_qos0

    @store_qos0.setter
    def store_qos0(self, stored: bool) -> None:
        self._find().store_qos0 = stored

    wants = threaded(Sessions.wants)

    @property
    def removal_failure(self) -> str | None:
        """The error of the last removal of delivered messages in the background; None if it succeeded."""
        return self._find().removal_failure

    @property
    def pace(self) -> Pace:
        """The intervals of the sessions' periodic work; see `Sessions.pace`."""
        return self._find().pace

    @property
    def bounds(self) -> StoredBounds:
        """The limits on the number of stored sessions; see `Sessions.bounds`."""
        return self._find().bounds

    checkpoint = threaded(Sessions.checkpoint)
    kick = threaded(Sessions.kick)
    expire = threaded(Sessions.expire)
    close = threaded(Sessions.close)
    lag = threaded(Sessions.lag)
    bound_backlogs = threaded(Sessions.bound_backlogs)
    longest_behind = threaded(Sessions.longest_behind)
    remove_delivered = threaded(Sessions.remove_delivered)
    clients = threaded(Sessions.clients)
    __aiter__ = iterated(Sessions.__iter__)
    __getitem__ = threaded(Sessions.__getitem__)
    count = threaded(Sessions.__len__)
    contains = threaded(Sessions.__contains__)
    tick = threaded(Sessions.tick)

    # --- many at once ---

    async def open_many(
        self,
        connects: Iterable[Connect],
        *,
        on_end: Callable[[AsyncSession, Ended], None] | None = None,
        partial: bool = False,
        resume: bool = True,
    ) -> list[AsyncSession | TopicstoreError]:
        """Open sessions of many clients; see `Sessions.open_many`. ``on_end`` is called in the event loop.

        If the task is cancelled, sessions that were opened are disconnected again.
        """
        ended = self._in_loop(on_end)

        def opened() -> list[Session | TopicstoreError]:
            return self._find().open_many(connects, on_end=ended, partial=partial, resume=resume)

        def dropped(results: list[Session | TopicstoreError]) -> object:
            return self._find().disconnect([one for one in results if isinstance(one, Session)], partial=True)

        found = await self._threads.make(opened, dropped)
        return [self._face(one) if isinstance(one, Session) else one for one in found]

    async def resume(self, sessions: Iterable[AsyncSession], limit: int) -> list[bool | TopicstoreError]:
        """Resume about ``limit`` stored subscriptions of sessions opened with ``resume=False``.

        See `Sessions.resume`.
        """
        inner = [session.synchronous for session in sessions]
        return await self._threads.run(lambda: self._find().resume(inner, limit))

    def _in_loop(self, on_end: Callable[[AsyncSession, Ended], None] | None) -> Callable[[Session, Ended], None]:
        """Return a thread-safe callback that schedules ``on_end`` in the running event loop."""
        loop = asyncio.get_running_loop()

        def ended(session: Session, why: Ended) -> None:
            if on_end is not None:
                with contextlib.suppress(RuntimeError):  # the event loop was closed
                    loop.call_soon_threadsafe(lambda: on_end(self._face(session), why))

        return ended

    async def disconnect(
        self,
        sessions: Iterable[AsyncSession],
        *,
        send_will: bool = False,
        expiry_interval: Length | Keep | None = KEEP,
        partial: bool = False,
    ) -> list[TopicstoreError | None]:
        """End connections whose clients have sent DISCONNECT; see `Sessions.disconnect`."""
        inner = [session.synchronous for session in sessions]
        return await self._threads.run(
            lambda: self._find().disconnect(
                inner, send_will=send_will, expiry_interval=expiry_interval, partial=partial
            )
        )

    async def lost(self, sessions: Iterable[AsyncSession], *, partial: bool = False) -> list[TopicstoreError | None]:
        """End connections that broke without a DISCONNECT; see `Sessions.lost`."""
        inner = [session.synchronous for session in sessions]
        return await self._threads.run(lambda: self._find().lost(inner, partial=partial))

    async def subscribe(
        self,
        rows: Iterable[tuple[AsyncSession, str, SubscribeOptions]],
        *,
        start: Start = None,
        partial: bool = False,
    ) -> list[SubscribeResult | TopicstoreError]:
        """Make or change subscriptions, of one session or of many; see `Sessions.subscribe`."""
        inner = [(session.synchronous, text, options) for session, text, options in rows]
        return await self._threads.run(lambda: self._find().subscribe(inner, start=start, partial=partial))

    async def unsubscribe(
        self, rows: Iterable[tuple[AsyncSession, str]], *, partial: bool = False
    ) -> list[bool | TopicstoreError]:
        """End subscriptions, of one session or of many; see `Sessions.unsubscribe`."""
        inner = [(session.synchronous, text) for session, text in rows]
        return await self._threads.run(lambda: self._find().unsubscribe(inner, partial=partial))

    async def publish(
        self, rows: Iterable[tuple[AsyncSession, Message, int]], *, partial: bool = False
    ) -> PublishedRows:
        """Publish messages of many clients; see `Sessions.publish`."""
        inner = [(session.synchronous, message, packet_id) for session, message, packet_id in rows]
        return await self._threads.run(lambda: self._find().publish(inner, partial=partial))

    async def publish_batch(
        self, sessions: Sequence[AsyncSession], batch: MessageBatch, packet_ids: Sequence[int], *, partial: bool = False
    ) -> PublishedRows:
        """Publish messages of many clients that are given as columns; see `Sessions.publish_batch`."""
        inner = [session.synchronous for session in sessions]
        return await self._threads.run(lambda: self._find().publish_batch(inner, batch, packet_ids, partial=partial))

    async def pubrel(self, rows: Iterable[tuple[AsyncSession, int]], *, partial: bool = False) -> Acknowledged:
        """Free the packet ids of incoming PUBRELs; see `Sessions.pubrel`."""
        inner = [(session.synchronous, packet_id) for session, packet_id in rows]
        return await self._threads.run(lambda: self._find().pubrel(inner, partial=partial))

    async def pubrec(
        self, rows: Iterable[tuple[AsyncSession, int]], *, accepted: bool = True, partial: bool = False
    ) -> Acknowledged:
        """Record PUBRECs of messages of QoS 2 from many clients; see `Sessions.pubrec`."""
        inner = [(session.synchronous, packet_id) for session, packet_id in rows]
        return await self._threads.run(lambda: self._find().pubrec(inner, accepted=accepted, partial=partial))
