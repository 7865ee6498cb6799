"""`Storage`: the shards of one open database, accessed through its hooks. `topicstore.storage.opening` creates it.

Readers hold a reference to the `Storage`, and so keep the database open. The listener, retention, compaction and
queues, which register with `listen`, `jobs` and `on_close`, hold at most weak references to the `Storage`. So a
database without other references is closed.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import ALL_FIELDS, MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.cursors import Cursor
from topicstore.contract.errors import (
    DatabaseClosedError,
    InvalidArgumentError,
    InvalidCursorError,
    PlaceAheadError,
    ReadOnlyDatabaseError,
    TopicstoreError,
    WrongDatabaseError,
)
from topicstore.contract.forking import ProcessLock, holds_lock, remember
from topicstore.contract.layout import Layout
from topicstore.contract.positions import first_position
from topicstore.contract.replay_plan import Order, ReplayPlan, ShardPlan, TimeRange
from topicstore.contract.requests import (
    Destinations,
    ReadRequest,
    ReadResult,
    ReplayRequest,
    StoreRequest,
    StoreResult,
    Stream,
)
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.contract.validation import check_recent
from topicstore.runtime.clocks import Clocks, SteadyClock
from topicstore.runtime.closing import close_all, do_all
from topicstore.runtime.locks import holding, owned
from topicstore.shard.shard import Shard
from topicstore.shard.state import ShardState
from topicstore.shard.writer import CommitListener

from . import replays
from .background_jobs import BackgroundJobs
from .directory.ballast import Ballast
from .directory.manifest import Manifest
from .directory.recovery_points import RecoveryPoints
from .interest import InterestSpans
from .quota import Quota
from .read_only import Mode, ReadOnlyShards
from .replays import plan_replay, read_batch
from .shard_map import ShardMap
from .store_path import store_batch

if TYPE_CHECKING:
    from topicstore.replication.site import Site
    from topicstore.shard.elsewhere import AskSite

    from .followed_state import FollowedState

__all__ = ["Storage", "StorageListener"]


T = TypeVar("T")


class StorageListener(CommitListener, Protocol):
    """A listener for commits that is stopped when the database is closed."""

    watchers: list[Callable[[int, Collection[bytes]], object]]
    """Functions that are called with a shard's number when new messages of the shard are visible, by the thread that
    stores them, and when its state has changed, with the first bytes of the changed keys (`CommitListener.changed`).
    They must return immediately and not raise. Appending to the list, and removing from it, needs no lock."""

    @property
    def followed(self) -> bool:
        """Whether any reader follows a filter."""

    def stop(self) -> None:
        """End all waits, and stop notifying; called before the database is closed."""

    def join(self) -> None:
        """Wait until all threads of the listener have ended; called after the shards were closed."""


class Storage:
    """The shards of one open database, accessed through its hooks. All methods are thread-safe.

    Times are in microseconds since the epoch. Close it after use: an object that is freed without being closed emits a
    `ResourceWarning` and closes itself.
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
        unneeded: Sequence[str],
        make_layout: Callable[[str, Mapping[str, Any]], Layout],
        shard_map: ShardMap,
        clocks: Clocks,
        ballast: Ballast,
        recovery_points: RecoveryPoints | None,
        close_shards: Callable[[], None],
        unlock: Callable[[], None],
        recover_shard: Callable[[Shard], bool],
        allow_ancient: bool = False,
        site: Site | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.id = bytes.fromhex(manifest.id)
        """The database's id: sixteen bytes, the same for all copies of it, and part of every cursor."""
        self.shards = shards
        """The shards. The sequence is always the same object; `refresh` replaces its items."""
        self._read_only = isinstance(shards, ReadOnlyShards)
        self.plugins = tuple(plugins)
        """The names of the plugins that wrap the data path, outermost first."""
        self.capabilities = frozenset(capabilities)
        """The capabilities of the backend."""
        self.unneeded = unneeded
        """The backend's patterns of unneeded files: see `topicstore.contract.engine.Backend.unneeded`."""
        self.make_layout = make_layout
        """A function that creates a layout by name and options. It raises if the backend can't run the layout."""
        self.shard_map = shard_map
        self.site = site
        """This process as a site of a cluster; None if the database is not shared."""
        self.allow_ancient = allow_ancient
        """Whether to accept times that are probably not in microseconds: see `topicstore.contract.times`."""
        self.hooks = hooks
        """The hooks of the data path, including those of plugins."""
        self.clocks = clocks
        self.clock = clocks.wall
        """A function that returns the current time."""
        self.steady = SteadyClock(clocks)
        """A function that returns the current time without the clock's jumps since the database was opened."""
        self.ballast = ballast
        """The reserved disk space. Its own lock is acquired before those of shards."""
        self.recovery_points = recovery_points
        """The record of each shard's last fsynced write; None if the database is read-only or not persistent."""
        self.quota = Quota(shards)
        """The limit on the stored bytes, which retention sets."""
        if manifest.cluster is None:
            self.interest = InterestSpans(shards)
        else:
            from .site_interest import SiteInterestSpans  # imported here, because few databases are shared

            self.interest = SiteInterestSpans(shards)
        """The positions of messages that are stored only because sessions wait for them."""
        self.jobs = BackgroundJobs(shards, clocks.monotonic)
        """The background jobs that become due as messages are stored."""
        self.listener: StorageListener | None = None
        self._followed: Sequence[FollowedState] = ()
        """The states that `look_elsewhere` reads anew; replaced as a whole."""
        """The listener that `listen` has set, or None."""
        self._close_shards = close_shards
        self._unlock = unlock
        self._recover_shard = recover_shard
        self._closing = threading.RLock()  # not a `ProcessLock`: a plugin may close its own databases
        """Held while the database is closed or refreshed."""
        self._registering = ProcessLock()  # a garbage collection inside may close the database
        """Guards the attributes below, and `listener`. `listener` and `_refusal` can be read without it."""
        self._on_close: list[Callable[[], object]] = []
        self._kept: dict[type, Any] = {}
        self._refusal: str | None = None
        """The reason for refusing every call, after the close and in a forked process; None while it is open."""
        self.inherited = False
        """Whether this process is a fork of the one that opened the database, and so must not close it."""
        remember(self)

    def kept(self, make: type[T]) -> T:
        """Return the database's single object of class ``make``, which the first call creates."""
        with self._registering:
            if make not in self._kept:
                self._kept[make] = make()
            found: T = self._kept[make]
            return found

    # --- writing ---

    def write(
        self,
        batch: MessageBatch,
        state: Mapping[int, Sequence[StateWrite]],
        destinations: Destinations | None = None,
        *,
        passing: bool = False,
        failures: dict[int, TopicstoreError] | None = None,
    ) -> StoreResult:
        """Store a checked batch, and state by shard, through the hooks. Raises the errors of `Database.store`.

        passing:  whether the spans of `interest` may cover the messages.
        failures: receives the errors of shards, whose parts alone are not stored (`StoreRequest.failures`).
        """
        self.check_may_write()
        for shard in state:
            self.check_shard(shard)
        self.check_times(batch)
        stores = len(batch) and (destinations is None or destinations.stored.any())
        storing, write = self.interest.storing, object()
        try:
            if stores and not passing:
                storing.add(write)  # added before `may_be_open` is read: `InterestSpans.begin` does the reverse
                if self.interest.may_be_open:
                    self._end_spans(batch)
            if stores:
                self.quota.admit()
            request = StoreRequest(db=self, batch=batch, state=state, destinations=destinations, failures=failures)
            result: StoreResult = (
                self.hooks.topicstore_store(request=request)
                if self.plugins
                else store_batch(request, self.shards, self.shard_map, self.clock)
            )
        finally:
            storing.discard(write)
        self.jobs.stored(result.count)
        return result

    def _end_spans(self, batch: MessageBatch) -> None:
        """End the spans of `interest` before messages are stored that no span may cover.

        Raises an error if the span of a shard of the messages can't be ended: `ShardReadOnlyError` if the shard takes
        no writes, or `StorageUnavailableError`.
        """
        failures = self.interest.end()
        if failures:
            for shard in set(map(self.shard_of, set(to_iterable(batch.client_ids)))).intersection(failures):
                raise failures[shard]

    def state(self, shard: int) -> ShardState:
        """Return the key-value state of a shard."""
        self.check_shard(shard)
        found = self.shards[shard]
        writer = found.writer
        if self.site is None:
            return ShardState(shard, writer.open_engine, writer.write_state)
        undisturbed = found.generations.undisturbed
        return ShardState(shard, writer.open_engine, writer.write_state, writer.last_applied, undisturbed)

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that stores a publisher's messages."""
        return self.shard_map.of(client_id)

    def flush(self) -> None:
        """Fsync everything stored so far in all shards, whatever the durability; return when it is on disk."""
        self.check_open()
        do_all([shard.writer.flush for shard in self.shards], "could not be flushed")

    def recover(self) -> list[int]:
        """Reopen the shards that became read-only after a failed write: see `Database.recover`."""
        self.check_may_write()
        recovered: list[int] = []

        def recover(shard: Shard) -> None:
            if self._recover_shard(shard):
                recovered.append(shard.number)

        failed = [shard for shard in self.shards if shard.writer.failure is not None]
        self.interest.forget()  # before the shards take writes again: they may lack the last changes of spans
        try:
            do_all([partial(recover, shard) for shard in failed], "could not be opened again")
        finally:
            if recovered and self.listener is not None:
                self.listener.dropped()
        return recovered

    def locked(self, work: Callable[[], T]) -> T:
        """Call ``work`` while the locks of all shards are held, acquired in ascending order; return its result."""
        return holding([shard.writer.lock for shard in self.shards], work)

    # --- reading ---

    def streams(self, topic_filter: TopicFilter, start: int) -> list[Stream]:
        """Return the streams that may hold matching messages at or after a time. May ask other sites of a cluster."""
        self.check_open()
        first = first_position(start)
        return [
            Stream(shard=shard.number, generation=generation, number=number, pattern=pattern, sealed=sealed)
            for shard in self.shards
            for generation, number, pattern, sealed in shard.reader.streams(topic_filter, first)
        ]

    def begin(self, shard: int, generation: int, stream: int, topic_filter: TopicFilter, position: int) -> Cursor:
        """Return a cursor over a stream, from a position on: see `ShardReader.cursor`. May ask another site."""
        self.check_shard(shard)
        return self.shards[shard].reader.cursor(self.id, generation, stream, topic_filter, position)

    def read(
        self,
        cursor: Cursor,
        limit: int,
        *,
        until: int | None = None,
        bound: int | None = None,
        timeout: float | None = None,
        columns: frozenset[str] = ALL_FIELDS,
    ) -> ReadResult:
        """Fetch the next batch of a cursor, before the time ``until`` and up to the position ``bound``.

        The columns of the batch that are not among ``columns`` may be unread. Raises the errors of `Database.read`
        except `PlaceAheadError`, which `check_place` raises.
        """
        self._check_own(cursor)
        check_count("limit", limit)
        request = ReadRequest(db=self, cursor=cursor, limit=limit, until=until, bound=bound, timeout=timeout)
        if not self.plugins:
            request.columns = columns
            return read_batch(request, self.shards)
        result: ReadResult = self.hooks.topicstore_read(request=request)
        return result

    def check_place(self, cursor: Cursor) -> None:
        """Raise `PlaceAheadError` for a cursor after all stored messages, if its layout can detect that.

        A read-only database next to a writing process accepts every cursor, because it may not see all messages yet.
        A site of a cluster may be behind the site that made the cursor: before it raises, the call reads the logs to
        their ends. For a shard that the site doesn't keep, another site is asked. The call then also raises the errors
        of `Site.refresh`, and `ShardElsewhereError`.
        """
        self._check_own(cursor)
        shard, site = self.shards[cursor.shard], self.site
        if self.mode == "read-only":
            return
        if shard.elsewhere is not None:
            shard.elsewhere.check_place(cursor)
            return
        while True:
            try:
                slab = shard.generations.slab(cursor.generation)
                reached = slab.reached(cursor.stream, cursor.place)
                if reached is not None:
                    shard.reader.check_reached(reached, slab.epoch)
                return
            except PlaceAheadError:
                if site is None:
                    raise
            except (KeyError, ValueError, InvalidCursorError):
                if site is None:
                    return  # perhaps a place among keyed messages, which `read` checks
            site.refresh()
            site = None

    def _check_own(self, cursor: Cursor) -> None:
        """Raise an error unless ``cursor`` is a cursor of this database."""
        self.check_open()
        if not isinstance(cursor, Cursor):
            raise InvalidCursorError(f"a {type(cursor).__name__} is not a cursor")
        if cursor.database != self.id:
            raise WrongDatabaseError("the cursor was made by another database")
        if not 0 <= cursor.shard < len(self.shards):
            raise InvalidCursorError(f"there is no shard {cursor.shard}")

    def fetch(self, cursor: Cursor, bound: int, limit: int, columns: frozenset[str] = ALL_FIELDS) -> ReadResult:
        """Fetch the next batch of a cursor, up to a position. Replays read their streams with this method."""
        return self.read(cursor, limit, bound=bound, columns=columns)

    def plan(self, request: ReplayRequest) -> ReplayPlan:
        """Return the plan of a replay of messages stored before the call; `fetch` reads its streams."""
        self.check_open()
        if request.order not in ("time", "any"):
            raise InvalidArgumentError(f"order is 'time', 'any' or, of a replay, 'timestamp', not {request.order!r}")
        check_count("batch_size", request.batch_size)
        if not self.plugins:
            return plan_replay(request, self.shards, self.id)
        plan: ReplayPlan = self.hooks.topicstore_replay(request=request)
        return plan

    def plan_shard(
        self,
        shard: int,
        topic_filter: TopicFilter,
        first: int,
        last: int | None,
        *,
        since: float | None = None,
        timestamps: TimeRange | None = None,
    ) -> ShardPlan:
        """Return a plan that reads a shard's matching messages at positions ``first`` to ``last`` (None: to the end).

        ``since`` and ``timestamps`` are those of `topicstore.shard.reader.ShardReader.plan`. Without ``since``, the
        messages of a layout's epoch that hasn't ended are left out.
        """
        found = self.shards[shard]
        watermark = found.writer.watermark if found.elsewhere is None else found.elsewhere.watermark
        bound = watermark if last is None else min(last, watermark)
        return found.reader.plan(self.id, topic_filter, first, bound, since=since, timestamps=timestamps)

    def run_shards(
        self,
        plans: Sequence[ShardPlan],
        rows: int,
        order: Order = "time",
        timestamps: TimeRange | None = None,
        columns: frozenset[str] = ALL_FIELDS,
    ) -> Iterator[MessageBatch]:
        """Yield the batches of plans from `plan_shard`, of about ``rows`` rows at most.

        ``timestamps`` must be those with which the plans were created. Columns that are not among ``columns`` may be
        unread.
        """
        plan = ReplayPlan(shards=list(plans), order=order, batch_size=rows, timestamps=timestamps)
        return replays.run(plan, partial(self.fetch, columns=columns))

    # --- listening ---

    def listen(self, listener: StorageListener) -> None:
        """Set the listener, which is notified of all later commits. Raises `DatabaseClosedError`."""
        with self._registering:
            self.check_open()
            self.listener = listener
        for shard in self.shards:
            with shard.writer.lock:
                shard.writer.listener = listener

    # --- shards that other sites of a cluster keep ---

    def read_elsewhere(self, ask: AskSite | None) -> None:
        """Set the function that asks other sites about shards not kept on this site; None: their reads raise."""
        for shard in self.shards:
            shard.read_elsewhere(ask)

    def follow_states(self, followed: Sequence[FollowedState]) -> None:
        """Register states that `look_elsewhere` reads again if only other sites keep their shards."""
        self._followed = followed

    @property
    def followed_heads(self) -> frozenset[bytes]:
        """The first bytes of the keys whose changes concern the states of `follow_states`."""
        return frozenset(head for one in self._followed for head in one.heads)

    @property
    def copies_states(self) -> bool:
        """Whether a state of `follow_states` has values that only other sites keep."""
        return any(one.copied for one in self._followed)

    def look_elsewhere(self, shards: Collection[int] | None = None, states: Collection[int] | None = None) -> None:
        """Ask other sites for the ends of those of ``shards`` (None: all) that only other sites keep.

        Also ask for the states of `follow_states` in those of ``states`` (None: all). Notifies the listener of shards
        that have new messages.

        Raises `ShardElsewhereError`, several as an `ExceptionGroup`.
        """

        def look(shard: Shard) -> None:
            elsewhere = shard.elsewhere
            if elsewhere is None:
                return
            elsewhere.look()
            moved, removed = elsewhere.changes()
            if removed and self.listener is not None:
                self.listener.forget()
            if moved and self.listener is not None:
                self.listener.extended(shard.number)

        looks = [partial(look, shard) for shard in self.shards if shards is None or shard.number in shards]
        reads = [one.look for one in self._followed if states is None or one.state.shard in states]
        do_all([*looks, *reads], "could not be reached")

    def catch_up(self, shards: Collection[int] | None = None, *, states: bool = False) -> None:
        """Wait until reads of some shards, or of all, see everything that any site acknowledged before the call.

        With ``states``, reads of the states of `follow_states` do, too. Does nothing without a cluster. Raises the
        errors of `Site.refresh`, and `ShardElsewhereError`.
        """
        if self.site is None:
            return
        self.site.refresh(shards)
        for number, shard in enumerate(self.shards):
            elsewhere = shard.elsewhere
            if elsewhere is not None and (shards is None or number in shards):
                elsewhere.look(certain=True)
        for one in self._followed if states else ():
            one.look(certain=True)

    # --- read-only ---

    @property
    def mode(self) -> Mode | None:
        """The mode of a database that is open read-only; None if it is open for writing."""
        return self.shards.mode if isinstance(self.shards, ReadOnlyShards) else None

    def refresh(self) -> None:
        """Make newly stored messages visible in a read-only database: see `Database.refresh`."""
        self.check_open()
        with self._closing:
            self.check_open()
            if isinstance(self.shards, ReadOnlyShards):
                self.shards.refresh()

    # --- closing ---

    def on_close(self, stop: Callable[[], object]) -> None:
        """Register ``stop``, to be called before the shards are closed, last registered first.

        Raises `DatabaseClosedError`.
        """
        with self._registering:
            self.check_open()
            self._on_close.append(stop)

    def leave_to_parent(self) -> None:
        """Refuse all calls in a forked process."""
        self.inherited = True
        if self._refusal is None:
            self._refusal = f"the database at {self.path} was opened by another process; a fork can't use it"

    @property
    def entered(self) -> bool:
        """Whether this thread is inside another call that must end before the database can be closed.

        This is possible in a signal handler or a destructor, because it runs inside the call that it interrupts. An
        interrupted call that holds no lock, and isn't in an engine, handles the close like one by another thread.
        """
        return holds_lock() or owned(self._closing)

    @property
    def closed(self) -> bool:
        """Whether calls are refused: during and after the close, and in a forked child."""
        return self._refusal is not None

    def close(self) -> None:
        """Stop the listener, notify the plugins, close the shards and release the lock. This is idempotent.

        Each step is done even if another one raises; see `close_all`. If shards could not be closed, the next call
        tries again.
        """
        if self.inherited:
            return
        with self._closing:
            # The listener stops first, because plugins may wait for threads that wait for it.
            first = () if self.closed else (self._stop_listener, partial(self.hooks.topicstore_closed, db=self))
            close_all((*first, self.abandon))

    def abandon(self) -> None:
        """Close the database without notifying the plugins."""
        with self._registering:
            self._refusal = f"the database at {self.path} is closed"
        join = () if self.listener is None else (self.listener.join,)
        close_all((self._stop_listener, *reversed(self._on_close), self._close_shards, *join, self._unlock))

    def _stop_listener(self) -> None:
        if self.listener is not None:
            self.listener.stop()

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` if the database was closed, or belongs to another process."""
        if self._refusal is not None:
            raise DatabaseClosedError(self._refusal)

    def check_may_write(self) -> None:
        """Raise the errors of `check_open`, and `ReadOnlyDatabaseError` if the database is open read-only."""
        self.check_open()
        if self._read_only:
            raise ReadOnlyDatabaseError(
                f"the database at {self.path} was opened with mode='r': it can be read and refreshed, no more"
            )

    def check_writable(self) -> None:
        """Raise `ShardReadOnlyError` if a shard takes no writes."""
        for shard in self.shards:
            shard.writer.check_writable()

    def check_whole(self, shards: Sequence[Shard]) -> None:
        """Raise `ShardElsewhereError` unless this site of a cluster keeps a copy of each of ``shards``."""
        self.check_open()
        for shard in shards:
            if shard.writer.elsewhere:
                raise shard.writer.elsewhere_error()

    def check_readable(self) -> None:
        """Raise `ShardElsewhereError` if a shard can be read neither here nor at another site of the cluster."""
        self.check_open()
        for shard in self.shards if self.manifest.cluster is not None else ():
            elsewhere = shard.elsewhere
            if elsewhere is not None and not elsewhere.known:
                elsewhere.look()
            elif elsewhere is None and shard.writer.elsewhere:
                raise shard.writer.elsewhere_error()

    def check_times(self, batch: MessageBatch) -> None:
        """Raise `InvalidMessageError` for a time probably not in microseconds, unless ``allow_ancient`` is set."""
        if len(batch) and not self.allow_ancient:
            check_recent(batch.timestamps)

    def check_shard(self, shard: int) -> None:
        """Raise `InvalidArgumentError` if the shard doesn't exist."""
        self.check_open()
        if not isinstance(shard, int) or not 0 <= shard < len(self.shards):
            raise InvalidArgumentError(f"there is no shard {shard!r}; they go from 0 to {len(self.shards) - 1}")

    def __del__(self) -> None:
        if getattr(self, "_refusal", "not opened") is None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            self.abandon()

    def __repr__(self) -> str:
        named = f"{self.manifest.backend}/{self.manifest.layout}"
        return f"<Database {self.path} {named}{' closed' * self.closed}>"
