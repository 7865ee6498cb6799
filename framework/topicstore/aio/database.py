"""`AsyncDatabase`: an open database in asyncio. `topicstore.aio.opening` makes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from topicstore.contract.arguments import Length
from topicstore.contract.times import Time
from topicstore.database import BATCH_SIZE, Database

from .archives import AsyncArchives
from .face import Face, iterated, threaded
from .persistence_rules import AsyncPersistenceRules
from .queues import AsyncQueues
from .retention import AsyncRetention
from .sessions import AsyncSessions
from .state import AsyncShardState
from .subscription import AsyncSubscription
from .threads import Threads
from .writer import AsyncWriter

if TYPE_CHECKING:
    from topicstore.pubsub.subscription import OnDropped
    from topicstore.storage.directory.manifest import Manifest

    from .cluster import AsyncSite

__all__ = ["AsyncDatabase"]


class AsyncDatabase(Face[Database]):
    """An open database in asyncio, with the methods of `Database` under the same names and with the same parameters.

    Made by `topicstore.aopen`; close it, or enter it with ``async with``. Use it only in the event loop that opened it;
    in another event loop its methods raise `RuntimeError`.

    Methods are awaited, except those whose results are iterated over with ``async for`` (`replay`, `replay_arrow`,
    `subscribe`) or entered with ``async with`` (`subscribe`, `writer`). Attributes are not.

    Calls run in threads, eight at a time; calls of `store` that wait for the disk at the same time share one flush. A
    cancelled call may have been made, be in progress, or never be made: a cancelled `store` may have stored its
    messages or not. A call that has begun runs to its end, for which `close` waits.
    """

    def __init__(self, threads: Threads, database: Database) -> None:
        of = database.storage
        super().__init__(threads, lambda: database, of)
        self.synchronous = database
        """The synchronous `Database`, for use in threads. Its calls in the event loop's own thread block the loop."""
        self.queues = AsyncQueues(threads, lambda: database.queues, of)
        """The durable, bounded queues."""
        self.archives = AsyncArchives(threads, lambda: database.archives, of)
        """The generations that are exported as Parquet."""
        self.retention = AsyncRetention(threads, database.retention, of)
        """The limits on the age and on the bytes of messages."""
        self.persistence = AsyncPersistenceRules(threads, lambda: database.persistence, of)
        """The rules that decide which published messages are stored."""
        self.sessions = AsyncSessions(threads, lambda: database.sessions, of)
        """The durable sessions of the database."""

    # --- attributes, which are in memory ---

    @property
    def path(self) -> Path:
        """The database's directory."""
        return self.synchronous.path

    @property
    def manifest(self) -> Manifest:
        """The settings with which the database was created."""
        return self.synchronous.manifest

    @property
    def id(self) -> bytes:
        """The 16 bytes that identify the database, the same in all of its copies and cursors."""
        return self.synchronous.id

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins that wrap the data path, outermost first."""
        return self.synchronous.plugins

    @property
    def read_only(self) -> bool:
        """Whether the database was opened with ``mode="r"``, so that it can't be written."""
        return self.synchronous.read_only

    @property
    def cluster(self) -> AsyncSite | None:
        """The `Site` of this process in the cluster that shares the database; None if no cluster shares it."""
        site = self.synchronous.cluster
        if site is None:
            return None
        from .cluster import AsyncSite

        return AsyncSite(self._threads, lambda: site, self.synchronous.storage)

    # --- storing ---

    store = threaded(Database.store)
    publish = threaded(Database.publish)
    retained = threaded(Database.retained)
    flush = threaded(Database.flush)
    recover = threaded(Database.recover)
    shard_of = threaded(Database.shard_of)

    def writer(self, *, max_items: int = 1_000, flush_interval: Length = 0.1) -> AsyncWriter:
        """Return a buffered writer; enter it with ``async with``, or await and close it. See `Database.writer`."""
        database = self.synchronous
        return AsyncWriter(self._threads, lambda: database.writer(max_items=max_items, flush_interval=flush_interval))

    async def state(self, shard: int) -> AsyncShardState:
        """Return the key-value state of a shard, which holds small values beside the messages."""
        return AsyncShardState(self._threads, self.synchronous.state(shard))

    # --- reading ---

    streams = threaded(Database.streams)
    cursor = threaded(Database.cursor)
    read = threaded(Database.read)
    replay = iterated(Database.replay)
    replay_arrow = iterated(Database.replay_arrow, most=1)
    explain = threaded(Database.explain)
    topics = threaded(Database.topics)
    clients = threaded(Database.clients)
    latest = threaded(Database.latest)
    learned_topics = threaded(Database.learned_topics)
    sql = threaded(Database.sql)

    # --- following ---

    def subscribe(
        self,
        topic_filter: str,
        start: Time | Mapping[int, int] | None = None,
        *,
        window: int | None = None,
        batch_size: int = BATCH_SIZE,
        on_dropped: OnDropped = "warn",
    ) -> AsyncSubscription:
        """Follow a filter: first the messages stored from ``start`` on, then new ones live, none lost or repeated.

        start:      a time (0 for the beginning); a place, as returned by `AsyncSubscription.place` and
                    `AsyncSubscription.acknowledged`; or None for only the messages stored after the subscription
                    begins.
        window:     the maximum number of delivered but unacknowledged messages (`AsyncSubscription.acknowledge`);
                    None for no limit.
        batch_size: the maximum number of messages in a batch.
        on_dropped: the reaction of iterating to generations that were dropped unread; see `Database.subscribe`.

        The subscription begins when it is entered, awaited, or asked for its first message; errors in the arguments are
        raised there. Each shard's messages come in order of positions.
        """
        database = self.synchronous
        return AsyncSubscription(
            self._threads,
            topic_filter,
            lambda: database.subscribe(
                topic_filter, start, window=window, batch_size=batch_size, on_dropped=on_dropped
            ),
            on_dropped,
        )

    refresh = threaded(Database.refresh)
    clock = threaded(Database.clock)

    # --- removing ---

    delete = threaded(Database.delete)

    # --- generations ---

    add_generation = threaded(Database.add_generation)
    generations = threaded(Database.generations)
    drop_generation = threaded(Database.drop_generation)

    # --- maintenance ---

    compact = threaded(Database.compact)
    checkpoint = threaded(Database.checkpoint)
    verify = threaded(Database.verify)
    info = threaded(Database.info)

    # --- closing ---

    async def close(self) -> None:
        """Close the database as `Database.close` does, and wait until all its threads have ended.

        Calls in progress end or raise `DatabaseClosedError`; later calls raise it. Tasks that wait for messages are
        woken. If the task is cancelled, closing continues in a thread, and another `close` waits for it. May be called
        twice.
        """
        await self._threads.close(self.synchronous.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self.synchronous).removeprefix('<')}"
