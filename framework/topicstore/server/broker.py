"""The event loop's side of a server: connections, hops to the store, and draining.

A hop begins as soon as there is something to do and the last one is over; what comes meanwhile goes with the next. So
the store is never waited for in the loop, and a hop has as much in it as came while the one before was under way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import topicstore as ts
from topicstore.sessions import Ended, Session

from .access.access import Access
from .asked import Answers, Asked, Client
from .connection import MqttConnection
from .listeners.peer import Via
from .outbound import Shared
from .protocol.reason import ReasonCode
from .serving import Serving
from .settings import ServerSettings
from .store_hop import StoreHop

__all__ = ["Broker"]

_SWEEP = 1.0
"""Seconds between two looks at connections from which nothing is read."""
_RENEWED = 50
"""Connections whose rights are found anew at a time."""
_TICK = 0.02
"""Seconds that one turn of the store's thread spends on what depends on time; what is left goes on in the next."""
_FAREWELL = 1.0
"""Seconds that clients which have been sent all have to read why the server ends, and to close their sockets."""
_PIECE = 200
"""Number of connections that are ended in one round of the event loop."""

_log = logging.getLogger("topicstore.server")


class Broker:
    """The connections of one event loop, on one database. Made and used in the event loop."""

    def __init__(self, db: ts.Database, settings: ServerSettings, access: Access, clients: int) -> None:
        """``clients``: how many clients there are file descriptors for."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._sessions = db.sessions
        self.serving = Serving(loop, settings, access, clients, version=ts.__version__, counts=self._sessions.counts)
        self.serving.on_kick = self._kick
        self._hop = StoreHop(db, self._on_end)
        self._thread = ThreadPoolExecutor(1, "topicstore-server")
        self._kicked = False
        """Whether the next hop is asked for."""
        self._under_way = False
        """Whether a hop is under way."""
        self._began = float("-inf")
        """When the last hop began."""
        self._begun = self._ended = 0
        """How many hops have begun, and how many have ended."""
        self._turn: asyncio.Future[None] = loop.create_future()
        """Done when the hop that is under way, or the next one, has ended."""
        self._stopped = False
        self._due: asyncio.TimerHandle | None = None
        self._told = False
        """Whether the loop was asked, from any thread, to look whether there is something to deliver."""
        self._bell = self._sessions.notify(self._rung)
        self._bell.__enter__()
        self._sweeping = loop.call_later(_SWEEP, self._sweep)
        self._set(settings)
        self._renewing: asyncio.Task[None] | None = None
        """What applies new rights to the clients that are connected."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the broker can't go on, with the reason."""
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody has to ask for it
        self._kick()

    def connection(self, via: Via) -> MqttConnection:
        """Return what a new connection of a listener talks to."""
        return MqttConnection(self.serving, via)

    def use(self, settings: ServerSettings, access: Access | None, clients: int) -> None:
        """Have settings hold from now on; what was settled with a client stays until it connects again.

        ``access`` is who may do what from now on, also of the clients that are connected; None: as before. ``clients``
        is as at the beginning.
        """
        self.serving.use(settings, clients)
        if access is not None:
            self.serving.access = access
            self._renewing = self._loop.create_task(self._renew())
        self._set(settings)
        self._kick()

    async def renewed(self) -> None:
        """Return when the rights that `use` brought hold for all clients that are connected."""
        if self._renewing is not None:
            await asyncio.wait((self._renewing,))  # which goes on if the waiting task is cancelled

    async def _renew(self) -> None:
        """Have clients that are connected do and be sent only what they may by now, a few at a time."""
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
        """Have the loop look whether there is something to deliver. Called in any thread.

        What rings during a hop, because of what the hop does, is looked at in its end.
        """
        if not self._told and threading.get_ident() != self._hop.thread:
            self._told = True
            try:
                self._loop.call_soon_threadsafe(self._kick)
            except RuntimeError:  # the loop is closed, and nobody is served any more
                return

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            if not self._under_way:
                self._loop.call_soon(self._start)
        elif not self._under_way and self.serving.gathered >= self.serving.buffer.max_items:
            self._loop.call_soon(self._start)  # no more is to be waited for

    def _start(self) -> None:
        """Begin a hop, unless one is under way, or more is to be waited for."""
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
        except RuntimeError:  # the loop is closed, and nobody waits for an answer any more
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
        """Return when all was served that was asked for until now, though clients go on asking, or at ``until``."""
        last = self._begun + 1  # the next hop takes what waits now, or the first part of it
        self._kick()
        while (self._ended < last or self.serving.asked.changing) and not self._stopped:
            left = until - self._loop.time()
            if left <= 0:
                _log.warning("the server ends before all requests of its clients were served")
                return
            await asyncio.wait((self._turn,), timeout=left)

    def _broken(self, asked: Asked, error: BaseException) -> None:
        """End the connections of a hop that failed as a whole; if the database is closed, end everything."""
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
        """Return the sessions whose connections end though the hop that was to end, or to begin, them has failed."""
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
        """Hand a client its answer. A fault of the server in that ends the client's connection, and nobody else's."""
        try:
            answer(*what)
        except Exception as fault:  # noqa: BLE001 - it is logged, and the others wait for their answers
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
        """Pass on that a session has ended. Called in whatever thread ended it."""
        try:
            self._loop.call_soon_threadsafe(self._session_ended, session, why)
        except RuntimeError:  # the loop is closed, and so are its connections
            return

    def _session_ended(self, session: Session, why: Ended) -> None:
        connection = self.serving.sessions.get(session)
        if connection is not None:
            connection.session_ended(why)

    # --- what depends on time ---

    def _sweep(self) -> None:
        """Look at connections from which nothing is read, and at slow packets; publish the server's figures."""
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
        """Serve what was asked for, tell all clients that the server ends, and end their sessions' connections.

        At ``until``, a time of the event loop, what clients would have to do or to read is waited for no longer.
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
        """Wait until all clients have closed their sockets, or had time to; for those that have all not for long."""
        grace = self._loop.time() + _FAREWELL
        while self.serving.connections and (now := self._loop.time()) < until:
            if now >= grace and not any(connection.unsent for connection in self.serving.connections):
                return
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """End everything at once; what was asked for and is not under way isn't served."""
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
        """Close all sockets at once, and log how much was not sent."""
        connections = list(self.serving.connections)
        unsent = [size for connection in connections if (size := connection.unsent)]
        if unsent:
            text = "the server ends before %d clients have read all: %d bytes were not sent"
            _log.warning(text, len(unsent), sum(unsent))
        for connection in connections:
            connection.abort()
