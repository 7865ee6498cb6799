"""The state that all connections of a server share: settings, the next batch of requests, and back-pressure."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from topicstore.contract.access import Action
from topicstore.server.access.access import Access
from topicstore.server.access.bans import Bans
from topicstore.server.access.permissions import Permissions
from topicstore.server.codec.frames import LARGEST_CONNECT
from topicstore.server.codec.reason import ReasonCode
from topicstore.server.config.model import ServerSettings
from topicstore.server.logs import RateLimitedLog
from topicstore.server.resource_limits import MemoryBudget
from topicstore.sessions import Publish, Session, SessionCounts

from .publish import Inbound
from .store_thread import LAST_ROWS, ROWS, Client, RequestBatch, Row, Wanted, keep_turn, put_first
from .sys_topics import Figures, Traffic

if TYPE_CHECKING:
    from .upstream import Downstream, Relays

__all__ = ["Serving"]

_MOST_BYTES = 8 << 20
"""Reading from all sockets pauses while more than this number of received bytes waits for the next batch."""
_SHARE = 8
"""Clients whose CONNECT was not accepted yet share one eighth of the memory for incomplete packets."""

_SHOWN, _LONG = 5, 200
"""Most denied topics of a packet that the log shows, and most characters of each."""

_log = logging.getLogger("topicstore.server")
_connections = logging.getLogger("topicstore.server.connections")
_access = logging.getLogger("topicstore.server.access")


@types.coroutine
def _rest(work: Coroutine[Any, Any, None], waits_for: object) -> Generator[Any, Any, None]:
    """Continue, in a task, a coroutine that was begun outside of one and waits for a future."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - such as a cancellation, which is the coroutine's
                waits_for = work.throw(error)
            else:
                waits_for = work.send(sent)
    except StopIteration:
        return


class Serving:
    """The shared state of a server's connections. Used in the event loop only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: ServerSettings,
        access: Access,
        bans: Bans,
        clients: int,
        *,
        version: str,
        counts: Callable[[], SessionCounts],
    ) -> None:
        """``counts`` returns the counts of the connected sessions, without blocking."""
        self.loop, self.access, self.bans = loop, access, bans
        self.unfinished, self.unadmitted = MemoryBudget(0), MemoryBudget(0)
        """The memory of incomplete packets, of clients whose CONNECT was accepted, and of others."""
        self.use(settings, clients)
        self.refused_logins = RateLimitedLog("login refused", _connections)
        self.banned = RateLimitedLog("client banned", _connections)
        self.denied = RateLimitedLog("access denied", _access)
        """The log of publishes and subscriptions that access rules or plugins have denied."""
        self.traffic = Traffic()
        self.figures = Figures(self.traffic, version)
        self.requests = RequestBatch()
        """The next batch of requests."""
        self._following = RequestBatch()
        """Requests that must wait for the batch after the next one."""
        self.sessions: dict[Session, Client] = {}
        """The connections of all connected sessions."""
        self.relays: Relays | None = None
        """The way to the sites that own other clients' sessions; None without a cluster. Set by the broker."""
        self.relayed: dict[Downstream, None] = {}
        """The connections that are passed on to other sites."""
        self.connections: dict[Client, None] = {}
        """All connections, including those without a session."""
        self.opening: dict[Client, asyncio.Task[None] | None] = {}
        """The connections whose CONNECT is being served, with the tasks that authenticate them, if they must wait."""
        self.held: dict[Client, int] = {}
        """The connections from which reading is paused, with their numbers of unsent bytes at the last check."""
        self.crowded = False
        """Whether so many requests wait that reading from all clients is paused."""
        self.draining = False
        """Whether the server is shutting down and refuses new clients."""
        self.arrived = 0
        """Bytes received since the last batch was taken."""
        self.publishing: dict[Client, Inbound] = {}
        """The connections that have messages for the next batch, with these messages."""
        self.gathered = 0
        """Number of messages for the next batch."""
        self.schedule: Callable[[], object] = lambda: None
        """Called when a request was added to the next batch; set by the broker."""
        self.long_packets = asyncio.Lock()
        """Held by the connection whose SUBSCRIBE or UNSUBSCRIBE of many filters is checked next."""
        self._counts = counts
        self._tasks: set[asyncio.Task[Any]] = set()

    def use(self, settings: ServerSettings, clients: int) -> None:
        """Apply settings, to new connections and from the next batch on.

        ``clients`` is the number of clients for which there are file descriptors.
        """
        self.most = min(settings.limits.connections, clients)
        """Most clients that may be connected at the same time."""
        self.settings, self.limits, self.buffer = settings, settings.limits, settings.messages.local_write_buffer
        self.unfinished.most = max(settings.limits.unfinished_packets, settings.limits.packet_size)
        self.unadmitted.most = max(settings.limits.unfinished_packets // _SHARE, LARGEST_CONNECT)

    def end_slow(self) -> None:
        """End connections whose incomplete packet exceeds the packet timeout."""
        if self.limits.packet_timeout:
            for budget in (self.unfinished, self.unadmitted):
                budget.end_slow(self.limits.packet_timeout, self.loop.time())

    # --- what connections call ---

    @property
    def full(self) -> bool:
        """Whether no further client may connect, because the limit of connections is reached."""
        return (
            self.traffic.connected + len(self.opening) + 2 * len(self.relayed) >= self.most
        )  # each relay has two sockets

    def address_of(self, session: Session) -> str | None:
        """Return the address and port of a session's client; None if it isn't connected here. Thread-safe."""
        connection = self.sessions.get(session)
        return None if connection is None else connection.address

    def add(self, connection: Client) -> None:
        """Register a new connection."""
        self.connections[connection] = None
        self.traffic.connections += 1

    def remove(self, connection: Client) -> None:
        """Unregister a connection whose socket was closed."""
        self.connections.pop(connection, None)
        self._give_up(connection)
        self.held.pop(connection, None)

    def pass_on(self, connection: Client, relay: Downstream) -> None:
        """Register the relay that replaces a connection."""
        self.opening.pop(connection, None)
        self.connections.pop(connection, None)
        self.held.pop(connection, None)
        self.connections[relay] = self.relayed[relay] = None

    def begin(self, session: Session, connection: Client) -> None:
        """Register the connection of a session, when its CONNACK is sent."""
        self.opening.pop(connection, None)
        self.sessions[session] = connection
        self.traffic.connect()

    def leave(self, session: Session, connection: Client) -> None:
        """Unregister the connection of a session, if it was registered with `begin`."""
        if self.sessions.get(session) is connection:
            del self.sessions[session]
            self.traffic.connected -= 1
            flapping = self.settings.flapping_detect
            if flapping.enable and not self.draining:
                ban = self.bans.counted(session.client_id, flapping)
                if ban is not None:
                    fields = {"client_id": ban.value, "reason": ban.reason, "until": ban.until}
                    self.banned.note(ban.value, fields)

    def hold(self, connection: Client, held: bool) -> None:
        """Record whether reading from a connection is paused."""
        if held:
            self.held[connection] = -1
        else:
            self.held.pop(connection, None)

    def shut(self, connection: Client) -> None:
        """Record that the last packet was sent on a connection."""
        self._give_up(connection)
        self.hold(connection, held=False)

    def admit(self, connection: Client, work: Coroutine[Any, Any, None]) -> None:
        """Run a client's authentication: at once or, if it must wait, in a task within the connect timeout.

        The task is cancelled when the client's connection ends. ``work`` runs outside of any task until it first waits.
        """
        self.opening[connection] = None
        try:
            waits_for = work.send(None)
        except StopIteration:
            return
        except Exception as fault:  # noqa: BLE001 - it is logged, and ends only this connection
            self._failed(connection, fault)
            return
        self.opening[connection] = self.spawn(connection, self._admit_in_time(connection, work, waits_for))

    async def _admit_in_time(self, connection: Client, work: Coroutine[Any, Any, None], waits_for: object) -> None:
        try:
            async with asyncio.timeout(self.limits.connect_timeout):
                await _rest(work, waits_for)
        except TimeoutError:
            connection.end(ReasonCode.SERVER_UNAVAILABLE, "it takes too long to find out who the client is")

    def forward(self, connection: Client, work: Coroutine[Any, Any, None]) -> None:
        """Connect to another site for a client, as `spawn` does; cancelled when the client's connection ends."""
        self.opening[connection] = self.spawn(connection, work)

    def _give_up(self, connection: Client) -> None:
        task = self.opening.pop(connection, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def gather(self, connection: Client, inbound: Inbound, messages: int) -> None:
        """Record that a connection has ``messages`` more messages for the next batch, in ``inbound``."""
        self.publishing[connection] = inbound
        self.gathered += messages
        self.schedule()
        if not self.crowded and (self.gathered >= self.buffer.max_items or self.arrived > _MOST_BYTES):
            self.crowded = True
            for other in self.sessions.values():
                other.flow()

    def subscribe(self, connection: Client, session: Session, wanted: list[Wanted]) -> None:
        """Request subscriptions; the connection receives the results in parts, one with each batch.

        The subscriptions apply to all clients' messages that arrive later, unless they must wait for a later turn.
        """
        self._change_of(connection).subscribes.append((connection, session, wanted))
        self.schedule()

    def unsubscribe(self, connection: Client, session: Session, filters: list[str]) -> None:
        """Request the removal of subscriptions, as `subscribe` does."""
        self._change_of(connection).unsubscribes.append((connection, session, filters))
        self.schedule()

    def _change_of(self, connection: Client) -> RequestBatch:
        """Return the batch in which a connection's subscriptions are to be changed.

        Messages that arrived before a batch's first change are published before the changes, later messages after them.
        Changes that exceed a turn are made in later batches. If the client itself has published since the first change,
        its changes go to the following batch, so that its own requests keep their order.
        """
        if not self.requests.resubscribing:
            self._collect(self.requests.published)
        return self._following if connection in self.publishing else self.requests

    def _collect(self, published: list[tuple[Client, Any, list[Row]]]) -> None:
        for connection, inbound in self.publishing.items():
            pending, inbound.pending = inbound.pending, None
            if pending is not None:
                published.append((connection, pending, pending.rows))
        self.publishing = {}

    def take(self) -> RequestBatch:
        """Return the current batch, with at most one turn of session changes, and begin a new batch."""
        requests, self.requests, self._following = self.requests, self._following, RequestBatch()
        self._collect(requests.published_later if requests.resubscribing else requests.published)
        self.gathered = self.arrived = 0
        if requests.changing:
            put_first(self.requests, keep_turn(requests, LAST_ROWS if self.draining else ROWS))
            if self.requests.changing:
                self.schedule()
        if self.crowded:
            self.crowded = False
            for connection in list(self.held):
                connection.flow()
        return requests

    async def filters_of(self, client_id: str) -> list[str] | None:
        """Return the filters of a client's stored session; None if it can't be read now."""
        found: asyncio.Future[list[str] | None] = self.loop.create_future()
        self.requests.lookups.append((found, client_id))
        self.schedule()
        return await found

    def deny(self, permissions: Permissions, action: Action, topics: Sequence[str]) -> None:
        """Log that a client was denied an action on topics or filters, at a limited rate."""
        if topics:
            fields: dict[str, object] = {"client_id": permissions.client_id, "user": permissions.user, "action": action}
            shown = [topic[:_LONG] for topic in topics[:_SHOWN]]
            fields |= {"topics": shown, "count": len(topics)}
            self.denied.note(permissions.client_id, fields)

    def figures_for(self, filters: Sequence[str]) -> list[Publish]:
        """Return the ``$SYS`` messages for a client that has just subscribed to filters."""
        return self.figures.matching(filters, self._counts)

    def spawn(self, client: Client, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine for a client, such as a plugin's call, and return its task.

        An exception is logged, and ends the client's connection.
        """
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, client))
        return task

    def _done(self, client: Client, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._failed(client, fault)

    def _failed(self, client: Client, fault: BaseException) -> None:
        _log.error("a client could not be served", exc_info=fault)
        client.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")

    async def cancel_tasks(self) -> None:
        """Cancel all tasks that `spawn` started, and wait for them."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
