"""The event loop's side of a server: connections, hops to the store, and draining.

A hop serves a batch of requests in the store's thread. It begins as soon as there are requests and the previous hop has
ended; requests that arrive during a hop form the next batch. So the event loop never waits for the store, and batches
grow with the load.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import topicstore as ts
from topicstore.server.access.access import Access
from topicstore.server.codec.reason import ReasonCode
from topicstore.server.config.model import ServerSettings
from topicstore.server.listeners.peer import Via
from topicstore.sessions import Ended, Session

from .connection import MqttConnection
from .connections import Serving
from .deliver import Shared
from .requests import Answers, Asked, Client
from .store_thread import StoreHop

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

    def __init__(self, db: ts.Database, settings: ServerSettings, access: Access, clients: int) -> None:
        """``clients``: the number of clients for which there are file descriptors."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._sessions = db.sessions
        self.serving = Serving(loop, settings, access, clients, version=ts.__version__, counts=self._sessions.counts)
        self.serving.on_kick = self._kick
        self._hop = StoreHop(db, self._on_end)
        self._thread = ThreadPoolExecutor(1, "topicstore-server")
        self._kicked = False
        """Whether the next hop was requested."""
        self._under_way = False
        """Whether a hop is in progress."""
        self._began = float("-inf")
        """The event loop's time at which the last hop began."""
        self._begun = self._ended = 0
        """Numbers of hops that have begun and that have ended."""
        self._turn: asyncio.Future[None] = loop.create_future()
        """Done when the current hop, or the next one if there is none, has ended."""
        self._stopped = False
        self._due: asyncio.TimerHandle | None = None
        self._told = False
        """Whether another thread has requested a hop, because there may be messages to deliver."""
        self._bell = self._sessions.notify(self._rung)
        self._bell.__enter__()
        self._sweeping = loop.call_later(_SWEEP, self._sweep)
        self._set(settings)
        self._renewing: asyncio.Task[None] | None = None
        """The task that applies new rights to connected clients."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Gets the exception that ends the broker, such as `DatabaseClosedError`; cancelled when the broker is
        stopped."""
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks it as retrieved
        self._kick()

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
        self._kick()

    async def renewed(self) -> None:
        """Wait until the access rules that were given to `use` apply to all connected clients."""
        if self._renewing is not None:
            await asyncio.wait((self._renewing,))  # the renewal continues if the waiting task is cancelled

    async def _renew(self) -> None:
        """Apply the current access rules to all connected clients, `_RENEWED` connections in each round of the loop."""
        for number, connection in enumerate(list(self.serving.connections)):
            if number and number % _RENEWED == 0:
                await asyncio.sleep(0)
            self._tell(connection, connection.renew_rights)

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

    # --- hops ---

    def _rung(self) -> None:
        """Request a hop, because there may be messages to deliver. Called in any thread.

        Notifications from the hop's own thread are ignored: a hop checks for further deliveries before it ends.
        """
        if not self._told and threading.get_ident() != self._hop.thread:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._kick)
            except RuntimeError:  # the loop is closed, so there are no clients to deliver to
                return

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            if not self._under_way:
                self._loop.call_soon(self._start)
        elif not self._under_way and self.serving.gathered >= self.serving.buffer.max_items:
            self._loop.call_soon(self._start)  # the batch is full: don't wait for more messages

    def _start(self) -> None:
        """Begin a hop, unless one is in progress or the flush interval has not passed."""
        if self._under_way or not self._kicked:
            return
        if self._stopped:
            self._kicked = False
            return
        buffer, now = self.serving.buffer, self._loop.time()
        wait = self._began + buffer.flush_interval - now
        if wait > 0 and self.serving.publishing and self.serving.gathered < buffer.max_items:
            self._loop.call_later(wait, self._start)
            return
        if self._due is not None:
            self._due.cancel()
        self._kicked = self._told = False
        self._under_way, self._began = True, now
        self._begun += 1
        asked = self.serving.take()
        self._hop.connected = len(self.serving.sessions)
        self._thread.submit(self._hop.serve, asked).add_done_callback(partial(self._over, asked))

    def _over(self, asked: Asked, future: Future[Answers]) -> None:
        """Hand a hop's answers to the loop. Called in the store's thread."""
        try:
            self._loop.call_soon_threadsafe(self._served, asked, future)
        except RuntimeError:  # the loop is closed, so no client waits for an answer
            return

    def _served(self, asked: Asked, future: Future[Answers]) -> None:
        self._under_way = False
        self._ended += 1
        error = future.exception()
        if error is None:
            answers = future.result()
            self._answer(answers)
            for client in asked.clients():
                self._tell(client, client.go_on)
            if answers.more:
                self._kick()
            elif not self._kicked:
                self._due = self._loop.call_later(answers.pause, self._kick)
        else:
            self._broken(asked, error)
        self._tell_turn()
        if self._kicked:
            self._start()

    def _tell_turn(self) -> None:
        turn, self._turn = self._turn, self._loop.create_future()
        turn.set_result(None)

    async def _serve_all(self, until: float) -> None:
        """Wait until all requests made before this call were served, or until ``until``, a time of the event loop."""
        last = self._begun + 1  # the next hop takes all waiting requests, or the first part of them
        self._kick()
        while (self._ended < last or self.serving.asked.changing) and not self._stopped:
            left = until - self._loop.time()
            if left <= 0:
                _log.warning("the server ends before all requests of its clients were served")
                return
            await asyncio.wait((self._turn,), timeout=left)

    def _broken(self, asked: Asked, error: BaseException) -> None:
        """End the connections of the clients whose hop failed as a whole; all connections if the database is closed."""
        for waiting, _ in asked.lookups:
            if not waiting.done():
                waiting.set_result(None)
        closed = isinstance(error, ts.DatabaseClosedError)
        if closed:
            for connection in list(self.serving.connections):
                connection.end(ReasonCode.SERVER_SHUTTING_DOWN, "the database was closed")
            self._stopped = True
            self._kicked = False
        else:
            _log.error("requests could not be served", exc_info=error)
            for client in asked.clients():
                client.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")
            self.serving.asked.lost += self._left_over(asked)
            self._due = self._loop.call_later(_SWEEP, self._kick)
        if closed and not self.ended.done():
            self.ended.set_exception(error)

    def _left_over(self, asked: Asked) -> list[Session]:
        """Return the sessions that are still connected although their connections end, because their hop failed."""
        opened = [self._sessions.connected(how.client_id) for _, how, _ in asked.connects]
        left = [*asked.lost, *(how.session for _, how in asked.disconnects), *filter(None, opened)]
        return [one for one in dict.fromkeys(left) if one.ended is None and one not in self.serving.sessions]

    def _answer(self, answers: Answers) -> None:
        for waiting, filters in answers.found:
            if not waiting.done():
                waiting.set_result(filters)
        for client, opened in answers.opened:
            self._tell(client, client.opened, opened)
        for part in answers.published:
            self._tell(part.client, part.client.published, part)
        self._answer_others(answers)
        shared = Shared() if len(answers.delivered) > 1 else None
        sessions = self.serving.sessions
        for session, packets in answers.delivered:
            connection = sessions.get(session)
            if connection is not None:
                self._tell(connection, connection.send, packets, shared)

    @staticmethod
    def _tell(client: Client, answer: Callable[..., object], *what: object) -> None:
        """Pass an answer to a client's connection. If that raises, only this connection ends."""
        try:
            answer(*what)
        except Exception as fault:  # noqa: BLE001 - it is logged, and the other clients still need their answers
            _log.error("a client could not be answered", exc_info=fault)
            client.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")

    def _answer_others(self, answers: Answers) -> None:
        for client, ids, known in answers.released:
            self._tell(client, client.released, ids, known)
        for client, ids in answers.unknown:
            self._tell(client, client.unknown, ids)
        for client, results in answers.subscribed:
            self._tell(client, client.subscribed, results)
        for client, gone in answers.unsubscribed:
            self._tell(client, client.unsubscribed, gone)
        for client, failure in answers.departed:
            self._tell(client, client.departed, failure)
        for client, failed in answers.failed:
            self._tell(client, client.failed, failed)

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
        if self._sys and self._figures_due <= now:
            self._figures_due = now + self._sys
            figures = serving.figures.changed(self._sessions.counts())
            if figures:
                serving.asked.figures += figures
                self._kick()

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
        """Close all connections at once. Requests are not served unless their hop is in progress."""
        self._stopped = True
        self._tell_turn()
        self._sweeping.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._due is not None:
            self._due.cancel()
        await self.serving.settle()
        self._break_off()
        self._bell.__exit__(None, None, None)
        left, self.serving.sessions = list(self.serving.sessions), {}
        lost = self._loop.run_in_executor(self._thread, self._hop.abandon, left + self.serving.asked.lost)
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
