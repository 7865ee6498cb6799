"""`Storage`: the shards of one open database, behind its hooks. `topicstore.storage.opening` makes one.

Whoever reads holds this, and so keeps the database open. What it holds itself, who listens, retention, compaction and
queues, which register with `listen`, `after_store` and `on_close`, holds it weakly or not at all, so that a database
that nobody holds any more is closed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from topicstore.clocks import Clocks, SteadyClock
from topicstore.contract.arguments import check_count
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import (
    DatabaseClosedError,
    InvalidArgumentError,
    InvalidIteratorError,
    ReadOnlyDatabaseError,
    WrongDatabaseError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.iterators import Iterator as StreamIterator
from topicstore.contract.layout import Layout
from topicstore.contract.replay_plan import Order, ReplayPlan, ShardPlan
from topicstore.contract.requests import (
    Destinations,
    IterateRequest,
    NextResult,
    ReplayRequest,
    StoreRequest,
    StoreResult,
    Stream,
    StreamsRequest,
)
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.releasing import release_all
from topicstore.shard.commit_log import CommitListener
from topicstore.shard.locks import holding
from topicstore.shard.shard import Shard
from topicstore.shard.state import ShardState

from . import replays
from .ballast import Ballast
from .manifest import Manifest
from .read_only import Mode, ReadOnlyShards
from .shard_map import ShardMap

__all__ = ["Storage", "StorageListener"]


class StorageListener(CommitListener, Protocol):
    """Who is told what happens to stored messages: see `CommitListener` for commits."""

    def dropped(self) -> None:
        """A generation was dropped. Called under the locks of no shard."""

    def forget(self) -> None:
        """Messages were deleted or archived: what was read before may not be handed out any more."""

    def stop(self) -> None:
        """The database is about to be closed: nobody is told anything more, and who waits is let go."""

    def join(self) -> None:
        """Return when no thread of it runs. The shards are closed by then."""


class Storage:
    """The shards of one open database, behind its hooks. All methods may be called from any thread.

    Times are microseconds since the epoch. Close it; one that is dropped unclosed warns, and closes itself.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        shards: Sequence[Shard],
        hooks: Any,
        *,
        plugins: Sequence[str],
        capabilities: Collection[str],
        make_layout: Callable[[str, Mapping[str, Any]], Layout],
        shard_map: ShardMap,
        clocks: Clocks,
        ballast: Ballast,
        close_shards: Callable[[], None],
        unlock: Callable[[], None],
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.id = bytes.fromhex(manifest.id)
        """Sixteen bytes, the same for all copies of the database, and in every iterator."""
        self.shards = shards
        """Always the same object; `refresh` changes what it gives."""
        self.plugins = tuple(plugins)
        """Names of those that stand around the data path, outermost first."""
        self.capabilities = frozenset(capabilities)
        """Of the backend."""
        self.make_layout = make_layout
        """Makes a layout by name and options, or says why it can't run on the backend."""
        self.shard_map = shard_map
        self.hooks = hooks
        """The data path, with its plugins."""
        self.clocks = clocks
        self.clock = clocks.wall
        """Returns the present."""
        self.steady = SteadyClock(clocks)
        """Returns the present too, without what the clock has jumped since the database was opened."""
        self.ballast = ballast
        """Guarded by the locks of all shards, once it is open."""
        self.before_store: list[Callable[[], object]] = []
        """Called before messages are stored; may refuse by raising. Guarded by nothing: set while it is opened."""
        self.after_store: list[Callable[[int], object]] = []
        """Called with the number of messages that were stored. Guarded by nothing: set while it is opened."""
        self.listener: StorageListener | None = None
        """None as long as nobody follows what is stored; see `listen`."""
        self._close_shards = close_shards
        self._unlock = unlock
        self._closing = threading.Lock()
        """Held while it is closed, or refreshed."""
        self._registering = ProcessLock()  # a garbage collection inside may close the database
        """Guards what follows, and `listener`; a glance at it, or at `_closed`, needs no lock."""
        self._on_close: list[Callable[[], object]] = []
        self._closed = False
        self._owner = os.getpid()

    # --- writing ---

    def write(
        self,
        batch: MessageBatch,
        state: Mapping[int, Sequence[StateWrite]],
        destinations: Destinations | None = None,
    ) -> StoreResult:
        """Store a checked batch, and state by shard, through the hooks. Errors are those of `Database.store`."""
        self.check_may_write()
        for shard in state:
            self.check_shard(shard)
        if len(batch) and (destinations is None or destinations.stored.any()):
            for admit in self.before_store:
                admit()
        request = StoreRequest(db=self, batch=batch, state=state, destinations=destinations)
        result: StoreResult = self.hooks.topicstore_store(request=request)
        for stored in self.after_store:
            stored(result.count)
        return result

    def state(self, shard: int) -> ShardState:
        """Return the state keyspace of a shard: small values beside the messages."""
        self.check_shard(shard)
        found = self.shards[shard]
        return ShardState(found.reader, found.write_state)

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that a publisher's messages go to."""
        return self.shard_map.of(client_id)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self.check_open()
        for shard in self.shards:
            shard.flush()

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the locks of all shards, in ascending order."""
        return holding(shard.lock for shard in self.shards)

    # --- reading ---

    def streams(self, topic_filter: TopicFilter, start: int) -> list[Stream]:
        """Return the streams that may hold matching messages at or after a time."""
        self.check_open()
        request = StreamsRequest(db=self, topic_filter=topic_filter, start=start)
        streams: list[Stream] = self.hooks.topicstore_streams(request=request)
        return streams

    def begin(
        self, shard: int, generation: int, stream: int, topic_filter: TopicFilter, position: int
    ) -> StreamIterator:
        """Return an iterator over a stream, from a position on. Raises what `Database.iterate` raises."""
        self.check_shard(shard)
        try:
            place = self.shards[shard].slab(generation).begin(stream, topic_filter, position)
        except KeyError as unknown:
            raise InvalidIteratorError(f"shard {shard}, generation {generation} has no stream {stream}") from unknown
        return StreamIterator(self.id, shard, generation, stream, topic_filter.text, place)

    def next(
        self,
        iterator: StreamIterator,
        limit: int,
        *,
        until: int | None = None,
        bound: int | None = None,
        timeout: float | None = None,
    ) -> NextResult:
        """Fetch the next batch of an iterator, up to a time ``until`` and the position ``bound``."""
        self.check_open()
        if not isinstance(iterator, StreamIterator):
            raise InvalidIteratorError(f"a {type(iterator).__name__} is not an iterator")
        if iterator.database != self.id:
            raise WrongDatabaseError("the iterator was made by another database")
        if not 0 <= iterator.shard < len(self.shards):
            raise InvalidIteratorError(f"there is no shard {iterator.shard}")
        check_count("limit", limit)
        request = IterateRequest(db=self, iterator=iterator, limit=limit, until=until, bound=bound, timeout=timeout)
        result: NextResult = self.hooks.topicstore_iterate(request=request)
        return result

    def fetch(self, iterator: StreamIterator, bound: int, limit: int) -> NextResult:
        """Fetch the next batch of an iterator up to a position: what a replay is run with."""
        return self.next(iterator, limit, bound=bound)

    def plan(self, request: ReplayRequest) -> ReplayPlan:
        """Return which streams a replay of everything stored before the call reads; `fetch` reads them."""
        self.check_open()
        if request.order not in (None, "time"):
            raise InvalidArgumentError(f"order is None or 'time', not {request.order!r}")
        check_count("batch_size", request.batch_size)
        plan: ReplayPlan = self.hooks.topicstore_replay(request=request)
        return plan

    def plan_shard(
        self, shard: int, topic_filter: TopicFilter, first: int, last: int | None, *, since: float | None = None
    ) -> ShardPlan:
        """Plan to read a shard's matching messages with positions from ``first`` to ``last`` (None: all there are).

        ``since``: as in `topicstore.shard.reads.Reads.plan`; None: what a layout still hides is left out.
        """
        found = self.shards[shard]
        bound = found.watermark if last is None else min(last, found.watermark)
        return found.plan(self.id, topic_filter, first, bound, since=since)

    def run_shards(self, plans: Sequence[ShardPlan], rows: int, order: Order | None = "time") -> Iterator[MessageBatch]:
        """Yield the batches of plans that `plan_shard` made, of about as many rows at most."""
        return replays.run(ReplayPlan(shards=list(plans), order=order, batch_size=rows), self.fetch)

    # --- being told ---

    def listen(self, listener: StorageListener) -> None:
        """Tell a listener, the only one, of everything that is committed from now on. Raises `DatabaseClosedError`."""
        with self._registering:
            self.check_open()
            self.listener = listener
        for shard in self.shards:
            with shard.lock:
                shard.log.listener = listener

    # --- as a reader ---

    @property
    def mode(self) -> Mode | None:
        """How it is read that was opened to be read only; None: it may be written."""
        return self.shards.mode if isinstance(self.shards, ReadOnlyShards) else None

    def refresh(self) -> None:
        """See what was stored since it was opened to be read only, or last refreshed; see `Database.refresh`."""
        with self._closing:
            self.check_open()
            if isinstance(self.shards, ReadOnlyShards):
                self.shards.refresh()

    # --- the end ---

    def on_close(self, stop: Callable[[], object]) -> None:
        """Call ``stop`` before the shards are closed. Who registers last is stopped first. Raises as `listen` does."""
        with self._registering:
            self.check_open()
            self._on_close.append(stop)

    @property
    def inherited(self) -> bool:
        """Whether another process opened it, of which this one is a fork: closing it is the other one's."""
        return os.getpid() != self._owner

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is being."""
        return self._closed

    def close(self) -> None:
        """Let go who listens, tell the plugins, close the shards and give back the lock. May be called twice.

        Each of these is done, whatever another raises; see `release_all`. What could not be closed is
        tried again by the next call.
        """
        if self.inherited:
            return
        with self._closing:
            told = () if self._closed else (self._stop_listener, partial(self.hooks.topicstore_closed, db=self))
            release_all((*told, self.abandon))  # first the listener: a plugin may wait for somebody who listens

    def abandon(self) -> None:
        """Close it without telling the plugins."""
        with self._registering:
            self._closed = True
        join = () if self.listener is None else (self.listener.join,)
        release_all((self._stop_listener, *reversed(self._on_close), self._close_shards, *join, self._unlock))

    def _stop_listener(self) -> None:
        if self.listener is not None:
            self.listener.stop()

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` if it was closed, or belongs to another process."""
        if self._closed:
            raise DatabaseClosedError(f"the database at {self.path} is closed")
        if self.inherited:
            raise DatabaseClosedError(
                f"the database at {self.path} was opened by process {self._owner}; a fork can't use it"
            )

    def check_may_write(self) -> None:
        """Raise what `check_open` raises, and `ReadOnlyDatabaseError` if it was opened to be read only."""
        self.check_open()
        if isinstance(self.shards, ReadOnlyShards):
            raise ReadOnlyDatabaseError(
                f"the database at {self.path} was opened with read_only=True: it can be read and refreshed, no more"
            )

    def check_writable(self) -> None:
        """Raise `ShardReadOnlyError` if a shard takes no writes."""
        for shard in self.shards:
            shard.check_writable()

    def check_shard(self, shard: int) -> None:
        """Raise `InvalidArgumentError` if there is no such shard."""
        self.check_open()
        if not isinstance(shard, int) or not 0 <= shard < len(self.shards):
            raise InvalidArgumentError(f"there is no shard {shard!r}; they go from 0 to {len(self.shards) - 1}")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self.inherited:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            self.abandon()

    def __repr__(self) -> str:
        named = f"{self.manifest.backend}/{self.manifest.layout}"
        return f"<Database {self.path} {named}{' closed' * self._closed}>"
