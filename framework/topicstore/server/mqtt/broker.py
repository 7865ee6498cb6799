"""The event loop's side of a server: connections, batches of requests to the store's thread, and draining.

A batch begins as soon as there are requests and the previous batch has ended; requests that arrive meanwhile form the
next batch. So the event loop never waits for the store, and batches grow with the load.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import topicstore as ts
from topicstore.server.access.access import Access
from topicstore.server.access.bans import BanIndex, Bans
from topicstore.server.codec.reason import ReasonCode
from topicstore.server.config.model import ServerSettings
from topicstore.server.listeners.peer import Via
from topicstore.sessions import Ended, Session

from .connection import MqttConnection
from .connections import Serving
from .deliver import Shared
from .store_thread import Client, RequestBatch, Responses, StoreThread

if TYPE_CHECKING:
    from topicstore.server.cluster import SiteTls

    from .upstream import Relays

__all__ = ["Broker"]

_SWEEP = 1.0
"""Seconds between two checks of connections from which nothing is read."""
_RENEWED = 50
"""Number of connections whose rights are updated in one round of the event loop."""
_TICK = 0.02
"""Seconds that one batch spends on the sessions' timers; timers that are left are served with the next batch."""
_FAREWELL = 1.0
"""Seconds that clients have to read the DISCONNECT and close their sockets, once all bytes were sent to them."""
_PIECE = 200
"""Number of connections that one round of the event loop ends."""

_log = logging.getLogger("topicstore.server")


class Broker:
    """The MQTT connections of one event loop, served by one database. Created and used in the event loop only."""

    def __init__(
        self,
        db: ts.Database,
        settings: ServerSettings,
        access: Access,
        bans: Bans,
        clients: int,
        tls: SiteTls | None = None,
    ) -> None:
        """Create a broker that serves no client yet.

        clients: the number of clients for which there are file descriptors.
        tls:     TLS of connections to other sites; None without a cluster.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._sessions = db.sessions
        self.serving = Serving(
            loop, settings, access, bans, clients, version=ts.__version__, counts=self._sessions.counts
        )
        self.serving.schedule = self._schedule
        if db.cluster is not None and tls is not None:
            from .upstream import Relays  # imported only on a site of a cluster

            self.serving.relays = Relays(db, db.cluster, tls)
        self._store = StoreThread(db, self._on_end)
        self._thread = ThreadPoolExecutor(1, "topicstore-server")
        self._scheduled = False
        """Whether the next batch was scheduled."""
        self._under_way = False
        """Whether a batch is being served."""
        self._began = float("-inf")
        """The event loop's time at which the last batch began."""
        self._begun = self._ended = 0
        """Numbers of batches that have begun and that have ended."""
        self._batch_end: asyncio.Future[None] | None = None
        """Done when the current batch, or the next one if none is being served, has ended; None if nothing waits."""
        self._stopped = False
        self._due: asyncio.TimerHandle | None = None
        self._notified = False
        """Whether another thread has scheduled a batch, because there may be messages to deliver."""
        self._waiter = self._sessions.notify(self._on_ready)
        self._waiter.__enter__()
        self._sweeping = loop.call_later(_SWEEP, self._sweep)
        self._set(settings)
        self._enforced = BanIndex()
        """The bans of the file that apply to all connected clients."""
        self._enforcing: asyncio.Task[None] | None = None
        """The task that ends connections of banned clients."""
        relays = self.serving.relays
        self._known = self._followed = None if relays is None else relays.document
        """The cluster's document at the last sweep, and the last one by whose owners relays were ended."""
        self._following: asyncio.Task[None] | None = None
        """The task that ends connections which are passed on to a site that is not the owner any more."""
        self._renewing: asyncio.Task[None] | None = None
        """The task that applies new rights to connected clients."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Gets the exception that ends the broker, such as `DatabaseClosedError`; cancelled when the broker is
        stopped."""
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieves the exception
        self._schedule()

    @property
    def key(self) -> bytes | None:
        """The key with which other sites sign the headers of connections that they pass on; None without a cluster."""
        return None if self.serving.relays is None else self.serving.relays.key

    def connection(self, via: Via) -> MqttConnection:
        """Return the protocol object for a new connection of a listener."""
        return MqttConnection(self.serving, via)

    def use(self, settings: ServerSettings, access: Access | None, clients: int) -> None:
        """Apply new settings. Values negotiated with a connected client stay until it connects again.

        ``access`` are the new access rules, also for connected clients; None leaves them unchanged. ``clients`` is the
        number of clients for which there are file descriptors.
        """
        self.serving.use(settings, clients)
        if access is not None:
            self.serving.access = access
            self._renewing = self._loop.create_task(self._renew())
        self._set(settings)
        self._schedule()

    async def renewed(self) -> None:
        """Wait until the access rules that were given to `use` apply to all connected clients."""
        if self._renewing is not None:
            await asyncio.wait((self._renewing,))  # the renewal continues if the waiting task is cancelled

    async def _renew(self) -> None:
        """Apply the current access rules to all connected clients, `_RENEWED` connections in each round of the loop."""
        for number, connection in enumerate(list(self.serving.connections)):
            if number and number % _RENEWED == 0:
                await asyncio.sleep(0)
            self._call_client(connection, connection.renew_rights)

    def _set(self, settings: ServerSettings) -> None:
        sessions, pace = self._sessions, self._sessions.pace
        sessions.store_qos0 = settings.protocol.store_qos0
        sessions.bounds.in_all = settings.limits.stored_sessions
        sessions.bounds.each_user = settings.limits.stored_sessions_per_user
        pace.longest_tick = _TICK
        pace.longest_pause = float(settings.longest_pause)
        pace.checkpoint_interval = float(settings.durable_sessions.heartbeat_interval)
        self._sys = settings.protocol.sys_interval
        self._figures_due = self._loop.time() + self._sys

    # --- batches ---

    def _on_ready(self) -> None:
        """Schedule a batch, because there may be messages to deliver. Called in any thread.

        Notifications from the store's thread are ignored: each batch checks for further deliveries before it ends.
        """
        if not self._notified and threading.get_ident() != self._store.thread:
            self._notified = True
            try:
                self._loop.call_soon_threadsafe(self._schedule)
            except RuntimeError:  # the loop is closed, so there are no clients to deliver to
                return

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            if not self._under_way:
                self._loop.call_soon(self._start)
        elif not self._under_way and self.serving.gathered >= self.serving.buffer.max_items:
            self._loop.call_soon(self._start)  # the batch is full: don't wait for more messages

    def _start(self) -> None:
        """Begin a batch, unless one is being served or the flush interval has not passed."""
        if self._under_way or not self._scheduled:
            return
        if self._stopped:
            self._scheduled = False
            return
        buffer, now = self.serving.buffer, self._loop.time()
        wait = self._began + buffer.flush_interval - now
        if wait > 0 and self.serving.publishing and self.serving.gathered < buffer.max_items:
            self._loop.call_later(wait, self._start)
            return
        if self._due is not None:
            self._due.cancel()
        self._scheduled = self._notified = False
        self._under_way, self._began = True, now
        self._begun += 1
        requests = self.serving.take()
        self._store.connected = len(self.serving.sessions)
        self._thread.submit(self._store.serve, requests).add_done_callback(partial(self._over, requests))

    def _over(self, requests: RequestBatch, future: Future[Responses]) -> None:
        """Pass a batch's responses to the event loop. Called in the store's thread."""
        try:
            self._loop.call_soon_threadsafe(self._served, requests, future)
        except RuntimeError:  # the loop is closed, so no client waits for a response
            return

    def _served(self, requests: RequestBatch, future: Future[Responses]) -> None:
        self._under_way = False
        self._ended += 1
        error = future.exception()
        if error is None:
            responses = future.result()
            self._answer(responses)
            for client in requests.clients():
                self._call_client(client, client.go_on)
            if responses.more:
                self._schedule()
            elif not self._scheduled:
                self._due = self._loop.call_later(responses.pause, self._schedule)
        else:
            self._broken(requests, error)
        if self._batch_end is not None:
            self._signal_batch_end(self._batch_end)
        if self._scheduled:
            self._start()

    def _signal_batch_end(self, ended: asyncio.Future[None]) -> None:
        self._batch_end = None
        ended.set_result(None)

    async def _serve_all(self, until: float) -> None:
        """Wait until all requests made before this call were served, or until ``until``, a time of the event loop."""
        last = self._begun + 1  # the next batch has all waiting requests, or the first part of them
        self._schedule()
        while (self._ended < last or self.serving.requests.changing) and not self._stopped:
            left = until - self._loop.time()
            if left <= 0:
                _log.warning("the server ends before all requests of its clients were served")
                return
            if self._batch_end is None:
                self._batch_end = self._loop.create_future()
            await asyncio.wait((self._batch_end,), timeout=left)

    def _broken(self, requests: RequestBatch, error: BaseException) -> None:
        """End the connections of the clients of a batch that failed; all connections if the database is closed."""
        for waiting, _ in requests.lookups:
            if not waiting.done():
                waiting.set_result(None)
        closed = isinstance(error, ts.DatabaseClosedError)
        if closed:
            for connection in list(self.serving.connections):
                connection.end(ReasonCode.SERVER_SHUTTING_DOWN, "the database was closed")
            self._stopped = True
            self._scheduled = False
        else:
            _log.error("requests could not be served", exc_info=error)
            for client in requests.clients():
                client.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")
            self.serving.requests.lost += self._left_over(requests)
            self._due = self._loop.call_later(_SWEEP, self._schedule)
        if closed and not self.ended.done():
            self.ended.set_exception(error)

    def _left_over(self, requests: RequestBatch) -> list[Session]:
        """Return the sessions that are still connected although their connections end, because their batch failed."""
        opened = [self._sessions.connected(how.client_id) for _, how, _ in requests.connects]
        left = [*requests.lost, *(how.session for _, how in requests.disconnects), *filter(None, opened)]
        return [one for one in dict.fromkeys(left) if one.ended is None and one not in self.serving.sessions]

    def _answer(self, responses: Responses) -> None:
        for waiting, filters in responses.found:
            if not waiting.done():
                waiting.set_result(filters)
        for client, opened in responses.opened:
            self._call_client(client, client.opened, opened)
        for part in responses.published:
            self._call_client(part.client, part.client.published, part)
        columns: tuple[tuple[Sequence[tuple[Any, ...]], str], ...] = (
            (responses.released, "released"),
            (responses.unknown, "unknown"),
            (responses.subscribed, "subscribed"),
            (responses.unsubscribed, "unsubscribed"),
            (responses.departed, "departed"),
            (responses.failed, "failed"),
        )
        for column, method in columns:
            for client, *results in column:
                self._call_client(client, getattr(client, method), *results)
        shared = Shared() if len(responses.delivered) > 1 else None
        sessions = self.serving.sessions
        for session, packets in responses.delivered:
            connection = sessions.get(session)
            if connection is not None:
                self._call_client(connection, connection.send, packets, shared)

    @staticmethod
    def _call_client(client: Client, call: Callable[..., object], *arguments: object) -> None:
        """Call a method of a client's connection. If that raises, only this connection ends."""
        try:
            call(*arguments)
        except Exception as fault:  # noqa: BLE001 - it is logged, and the other clients still need their responses
            _log.error("a client could not be answered", exc_info=fault)
            client.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")

    def _on_end(self, session: Session, why: Ended) -> None:
        """Notify the event loop that a session has ended. Called in the thread that ended the session."""
        try:
            self._loop.call_soon_threadsafe(self._session_ended, session, why)
        except RuntimeError:  # the loop and its connections are closed
            return

    def _session_ended(self, session: Session, why: Ended) -> None:
        connection = self.serving.sessions.get(session)
        if connection is not None:
            connection.session_ended(why)

    # --- timers ---

    def _sweep(self) -> None:
        """Check connections from which nothing is read, end slow packets, and publish the ``$SYS`` messages."""
        self._sweeping = self._loop.call_later(_SWEEP, self._sweep)
        serving, now = self.serving, self._loop.time()
        for connection, unsent in list(serving.held.items()):
            serving.held[connection] = connection.still_there(unsent)
        serving.end_slow()
        if self._enforcing is None or self._enforcing.done():
            self._enforcing = self._loop.create_task(self._enforce())
        if serving.relays is not None and (self._following is None or self._following.done()):
            self._following = self._loop.create_task(self._follow_owners(serving.relays))
        if self._sys and self._figures_due <= now:
            self._figures_due = now + self._sys
            figures = serving.figures.changed(self._sessions.counts())
            if figures:
                serving.requests.figures += figures
                self._schedule()

    async def _enforce(self) -> None:
        """End the connections of banned clients if the bans have changed, `_RENEWED` in each round of the loop."""
        bans = await self.serving.bans.current()
        if bans is self._enforced:
            return
        self._enforced = bans
        for number, connection in enumerate(list(self.serving.connections)):
            if number and number % _RENEWED == 0:
                await asyncio.sleep(0)
            self._call_client(connection, connection.end_if_banned, bans)

    async def _follow_owners(self, relays: Relays) -> None:
        """End connections that are passed on to a site that has lost their shard, `_RENEWED` in each round of the loop.

        A sweep looks at the document of the sweep before, so that an owner that releases a shard can send the reason.
        """
        due, self._known = self._known, relays.document
        if due is self._followed:
            return
        self._followed = due
        for number, relay in enumerate(list(self.serving.relayed)):
            if number and number % _RENEWED == 0:
                await asyncio.sleep(0)
            self._call_client(relay, relay.end_if_moved, relays)

    # --- the end ---

    async def drain(self, until: float) -> None:
        """Serve all pending requests, send DISCONNECT to all clients, and close their connections.

        At ``until``, a time of the event loop, connections are closed without waiting for their clients.
        """
        serving = self.serving
        serving.draining = True
        if not self._stopped:
            await self._serve_all(until)
            for number, connection in enumerate(list(serving.connections)):
                connection.end(ReasonCode.SERVER_SHUTTING_DOWN, "the server is shutting down")
                if number % _PIECE == _PIECE - 1:
                    await asyncio.sleep(0)
            await self._serve_all(until)
            await self._farewell(until)
        await self.stop()

    async def _farewell(self, until: float) -> None:
        """Wait until all clients have closed their sockets, or until ``until``.

        Once `_FAREWELL` seconds have passed, only clients with unsent bytes are waited for.
        """
        grace = self._loop.time() + _FAREWELL
        while self.serving.connections and (now := self._loop.time()) < until:
            if now >= grace and not any(connection.unsent for connection in self.serving.connections):
                return
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Close all connections at once. The current batch is served to its end; later requests are dropped."""
        self._stopped = True
        if self._batch_end is not None:
            self._signal_batch_end(self._batch_end)
        self._sweeping.cancel()
        for task in (self._renewing, self._enforcing, self._following):
            if task is not None:
                task.cancel()
        if self._due is not None:
            self._due.cancel()
        await self.serving.cancel_tasks()
        self._break_off()
        self._waiter.__exit__(None, None, None)
        left, self.serving.sessions = list(self.serving.sessions), {}
        lost = self._loop.run_in_executor(self._thread, self._store.abandon, left + self.serving.requests.lost)
        self._thread.shutdown(wait=False)
        await lost
        if not self.ended.done():
            self.ended.cancel()

    def _break_off(self) -> None:
        """Close all sockets at once, and log the number of unsent bytes."""
        connections = list(self.serving.connections)
        unsent = [size for connection in connections if (size := connection.unsent)]
        if unsent:
            text = "the server ends before %d clients have read all: %d bytes were not sent"
            _log.warning(text, len(unsent), sum(unsent))
        for connection in connections:
            connection.abort()
