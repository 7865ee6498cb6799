"""What the connections of one server share: its settings, what is asked of the store, and how much waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from topicstore.sessions import Publish, Session, SessionCounts

from .access.access import Access
from .asked import Asked, Client, Row, Wanted
from .memory_budget import MemoryBudget
from .protocol.bounds import LARGEST_CONNECT
from .protocol.reason import ReasonCode
from .settings import ServerSettings
from .sys_topics import Figures, Traffic
from .turns import LAST_ROWS, ROWS, keep_turn, put_first

__all__ = ["Serving"]

_MOST_BYTES = 8 << 20
"""Bytes from clients that may wait for the next hop; from there on nothing is read from any socket."""
_SHARE = 8
"""The part of the memory for packets that aren't whole which clients have together before they were let in: one in
eight."""

_log = logging.getLogger("topicstore.server")


class Serving:
    """Used in the event loop only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: ServerSettings,
        access: Access,
        clients: int,
        *,
        version: str,
        counts: Callable[[], SessionCounts],
    ) -> None:
        """``counts`` returns the counts of the connected sessions, without waiting."""
        self.loop, self.access = loop, access
        self.unfinished, self.unadmitted = MemoryBudget(0), MemoryBudget(0)
        """Packets that aren't whole, of clients that were let in, and of others."""
        self.use(settings, clients)
        self.traffic = Traffic()
        self.figures = Figures(self.traffic, version)
        self.asked = Asked()
        """What goes over with the next hop."""
        self._following = Asked()
        """What has to wait for the hop after it."""
        self.sessions: dict[Session, Client] = {}
        """The connections of sessions that are connected."""
        self.connections: dict[Client, None] = {}
        """All connections, also those without a session."""
        self.opening: dict[Client, asyncio.Task[None]] = {}
        """The connections whose CONNECT is being served, with what finds out who they are."""
        self.held: dict[Client, int] = {}
        """The connections from which nothing is read, with how much of what they are sent wasn't taken."""
        self.crowded = False
        """Whether so much waits that nothing is read from any client."""
        self.draining = False
        """Whether no client may connect any more."""
        self.arrived = 0
        """Bytes that came since the last hop began."""
        self.publishing: dict[Client, None] = {}
        """The connections that have messages for the next hop."""
        self.gathered = 0
        """How many messages these are."""
        self.on_kick: Callable[[], object] = lambda: None
        """Called when there is something for the next hop."""
        self.long_packets = asyncio.Lock()
        """Held by the connection whose SUBSCRIBE or UNSUBSCRIBE of many filters is the next to be checked."""
        self._counts = counts
        self._tasks: set[asyncio.Task[Any]] = set()

    def use(self, settings: ServerSettings, clients: int) -> None:
        """Have settings hold from now on: for connections that begin, and for the next hop.

        ``clients`` is the most clients that there are file descriptors for.
        """
        self.most = min(settings.limits.connections, clients)
        """Clients that may be connected at the same time."""
        self.settings, self.limits, self.buffer = settings, settings.limits, settings.messages.local_write_buffer
        self.unfinished.most = max(settings.limits.unfinished_packets, settings.limits.packet_size)
        self.unadmitted.most = max(settings.limits.unfinished_packets // _SHARE, LARGEST_CONNECT)

    def end_slow(self) -> None:
        """End connections whose clients take too long for a packet."""
        if self.limits.packet_timeout:
            for budget in (self.unfinished, self.unadmitted):
                budget.end_slow(self.limits.packet_timeout, self.loop.time())

    # --- what connections call ---

    @property
    def full(self) -> bool:
        """Whether as many clients are connected, or about to be, as may be."""
        return self.traffic.connected + len(self.opening) >= self.most

    def add(self, connection: Client) -> None:
        """Note a new connection."""
        self.connections[connection] = None
        self.traffic.connections += 1

    def remove(self, connection: Client) -> None:
        """Note that a connection's socket is closed."""
        self.connections.pop(connection, None)
        self._give_up(connection)
        self.held.pop(connection, None)

    def begin(self, session: Session, connection: Client) -> None:
        """Note whose connection a session's is, from its CONNACK on."""
        self.opening.pop(connection, None)
        self.sessions[session] = connection
        self.traffic.connect()

    def leave(self, session: Session, connection: Client) -> None:
        """Note that a session's connection is over, if it had begun."""
        if self.sessions.get(session) is connection:
            del self.sessions[session]
            self.traffic.connected -= 1

    def hold(self, connection: Client, held: bool) -> None:
        """Note whether nothing is read from a connection."""
        if held:
            self.held[connection] = -1
        else:
            self.held.pop(connection, None)

    def shut(self, connection: Client) -> None:
        """Note that the last word was said on a connection."""
        self._give_up(connection)
        self.hold(connection, held=False)

    def admit(self, connection: Client, work: Coroutine[Any, Any, None]) -> None:
        """Have it found out who a client is, as `spawn`, unless its connection ends before that: others wait for it."""
        self.opening[connection] = self.spawn(connection, work)

    def _give_up(self, connection: Client) -> None:
        task = self.opening.pop(connection, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def kick(self) -> None:
        """Note that there is something for the next hop."""
        self.on_kick()

    def gather(self, connection: Client, messages: int) -> None:
        """Note that a connection has messages for the next hop, so many more than before."""
        self.publishing[connection] = None
        self.gathered += messages
        self.on_kick()
        if not self.crowded and (self.gathered >= self.buffer.max_items or self.arrived > _MOST_BYTES):
            self.crowded = True
            for other in self.sessions.values():
                other.flow()

    def subscribe(self, connection: Client, session: Session, wanted: list[Wanted]) -> None:
        """Ask for subscriptions, which a connection is told of portion by portion.

        They hold for all that is published by whomever from now on, unless they have to wait for other clients' turns.
        """
        self._change_of(connection).subscribes.append((connection, session, wanted))
        self.kick()

    def unsubscribe(self, connection: Client, session: Session, filters: list[str]) -> None:
        """Ask for the end of subscriptions, as `subscribe`."""
        self._change_of(connection).unsubscribes.append((connection, session, filters))
        self.kick()

    def _change_of(self, connection: Client) -> Asked:
        """Return the hop that has to change a connection's subscriptions.

        What came before the first change of a hop is published before it. What comes later is published after all of
        its changes, though not after those that are too many for it; a client that has published in between by itself
        waits for the next hop, so that its own requests keep their order.
        """
        if not self.asked.resubscribing:
            self._collect(self.asked.published)
        return self._following if connection in self.publishing else self.asked

    def _collect(self, published: list[tuple[Client, Any, list[Row]]]) -> None:
        for connection in self.publishing:
            pending = connection.take_published()
            if pending is not None:
                published.append((connection, pending, pending.rows))
        self.publishing = {}

    def take(self) -> Asked:
        """Return what goes over now, at most a turn of changes, and begin anew."""
        asked, self.asked, self._following = self.asked, self._following, Asked()
        self._collect(asked.published_later if asked.resubscribing else asked.published)
        self.gathered = self.arrived = 0
        put_first(self.asked, keep_turn(asked, LAST_ROWS if self.draining else ROWS))
        if self.asked.changing:
            self.kick()
        if self.crowded:
            self.crowded = False
            for connection in list(self.held):
                connection.flow()
        return asked

    async def filters_of(self, client_id: str) -> list[str] | None:
        """Return the filters of a client's stored session; None if it can't be read now."""
        found: asyncio.Future[list[str] | None] = self.loop.create_future()
        self.asked.lookups.append((found, client_id))
        self.kick()
        return await found

    def figures_for(self, filters: Sequence[str]) -> list[Publish]:
        """Return the figures of the server that a client which has just subscribed is sent."""
        return self.figures.matching(filters, self._counts)

    def spawn(self, client: Client, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something for a client that waits for others, such as a plugin's answer. Return the task.

        A fault of the server in that is logged, and ends the client's connection.
        """
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._done, client))
        return task

    def _done(self, client: Client, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a client could not be served", exc_info=fault)
            client.end(ReasonCode.UNSPECIFIED_ERROR, "the server failed")

    async def settle(self) -> None:
        """End what was spawned."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
