"""Retention: limits of the age and the number of bytes of stored messages.

Messages are removed by generations. Retention begins a new generation when the current one is old or large enough. It
drops generations whose newest message is older than the limit, or the oldest generations while there are too many
bytes. It may run at any time, concurrently with readers and writers; the next run completes an interrupted one.

A generation's age counts from its newest message, by positions or, if these lie in the future, from the time when it
was sealed. So messages stay for at least ``max_age``, and at most about ``rotate_every`` longer. The bytes are those of
the values that layouts wrote (``live_bytes``), not of the engine's files, and only of local generations. The limit on
bytes has precedence over all other limits: the oldest generations are dropped whatever they hold.

In the background, a drop makes a generation invisible immediately; a second thread then removes its messages, and a
third one frees their disk space. If messages are stored faster than they are removed, back-pressure makes writers wait.
So the bytes of all generations, including dropped ones not yet removed, exceed the limit by at most half of the limit
and one batch. This is not guaranteed while dropping or archiving fails, nor after `stop`. Data that the engine has yet
to compact takes additional disk space.

With ``filters``, messages whose topics match a filter stay for the filter's time instead, shorter or longer; if several
filters match, for the longest time. A generation is dropped as a whole when all its messages are too old for every
filter. Messages that expire earlier are deleted (`topicstore.lifecycle.expiry`): immediately by an explicit run, at
most a quarter of the filter's time later in the background. A generation without remaining messages is dropped.
Messages of topics that begin with ``$``, except ``$SYS``, are deleted only if a filter names them or the layout learns
topics; otherwise they are dropped with their generation.

A process trusts the wall clock when it opens the database. Afterwards no message is removed before the time has
actually elapsed, even if the clock jumps forward, or is set back for a while during which messages are stored
(`topicstore.runtime.clocks.ClockGuard`). A clock that stays changed is trusted again ``max_age`` later, after the next
opening, or in a `Retention.run` with an explicit time.

On a site of a cluster, only the owner of shard 0 begins and drops generations and changes the settings, and each owner
deletes messages in its own shards. All sites apply new settings within a second. Their background tasks also run
without local stores, because other sites store.

With ``archive_to``, generations are archived there instead of dropped (`Archives.archive`), and stay until they are
dropped explicitly. Messages that expire by filters are deleted before the archiving. If archiving fails, the
generations stay local, and the run raises. They also stay local if the archive lacks generations that were archived
there, as when its volume isn't mounted. Then the run does all other work, issues a `RuntimeWarning`, and its report
contains the reason. The background task reports either case as its failure, and tries again within a minute.

Messages with an expiry interval (MQTT 5, section 3.3.2.3.3) are treated like all others: they stay stored, and replays
return them, but deliveries to sessions and look-ups of retained messages leave out expired ones. Retained messages,
which belong to no generation, are removed after they have expired.

Stored form (state keyspace of shard 0; keys begin with the byte 1, which is left out here)::

    "ps" -> record (see `topicstore.shard.record_codec`) of version 1, max_age and rotate_every in
            microseconds or nil, max_bytes or nil, when_full, archive_to or nil, filters, each with
            microseconds or nil, delivered in microseconds or nil

Fields are only ever appended. The version is 2 with an ``archive_to``, and 3 with filters, so that older programs,
which would drop messages that must stay, refuse the record.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from topicstore.contract.arguments import KEEP, Keep, Length, given
from topicstore.contract.errors import (
    DatabaseClosedError,
    InvalidArgumentError,
    ManifestMismatchError,
    QuotaExceededError,
    TopicstoreError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.positions import time_of
from topicstore.contract.times import Time, instant
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.clocks import ClockGuard
from topicstore.runtime.locks import owned
from topicstore.runtime.warning import warn_caller
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import Applied, FrameworkWrite
from topicstore.storage.generations import (
    add_generation,
    all_live_records,
    archive_directory,
    check_apart,
    drop_generation,
    live_records,
    reclaim_removed,
    remove_dropped,
)
from topicstore.storage.quota import removing_bytes, written_bytes
from topicstore.storage.storage import Storage

from .expiry import count_expired, expire
from .retention_outlook import Departure, outlook, reasons
from .retention_policy import (
    FOREVER,
    GenerationAge,
    RetentionSettings,
    WhenFull,
    ages,
    due,
    is_emptied,
    micros,
    must_rotate,
    outdated,
    rules,
)

__all__ = ["DECODERS", "Retention", "RetentionReport"]

_KEY = b"\1ps"
_VERSION = 1
_ARCHIVING_VERSION = 2
_FILTERS_VERSION = 3
_EXCESS = 2
"""The divisor of the limit on bytes that gives the excess above which writers have to wait."""
_PAUSE = 0.005
"""Seconds between two checks of a waiting writer."""
_LOOK_EVERY = 1.0
"""Seconds between two looks, on a site of a cluster, at messages and limits of other sites."""
_AGAIN = 60_000_000
"""Microseconds after which a failed run is repeated."""


@attrs.frozen(kw_only=True)
class RetentionReport:
    """The result of a run of retention."""

    rotated: int | None
    """The number of the generation that was begun; None if none was begun."""
    dropped: tuple[int, ...]
    """The generations that were dropped, oldest first."""
    archived: tuple[int, ...]
    """The generations that were archived, oldest first."""
    messages: int
    """Number of messages in the dropped and archived generations."""
    live_bytes: int
    """Bytes of values in the dropped and archived generations."""
    expired: int
    """Number of retained messages that were removed because they had expired."""
    deleted: Mapping[str, int] = attrs.field(factory=dict)
    """Number of messages deleted before their generation, by filter; an empty text if no filter matches them."""
    why: tuple[str, ...] = attrs.field(default=(), eq=False)
    """The reasons why the remaining messages stay, as sentences."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    max_age: int | None
    rotate_every: int | None
    max_bytes: int | None
    when_full: WhenFull
    archive_to: str | None = None
    filters: dict[str, int | None] = {}
    delivered: int | None = None


_CODEC = RecordCodec(_Record, _FILTERS_VERSION)


class Retention:
    """The retention of one database, as returned by `Database.retention`. All methods are thread-safe."""

    def __init__(self, storage: Storage, expire: Callable[[Storage, int], int]) -> None:
        """``expire`` removes the retained messages that have expired at a given time, and returns their number."""
        self._storage_ref = weakref.ref(storage)  # weak: a database without other references closes itself
        self._expire = expire
        self._task = BackgroundTask("retention", self._work)
        self._removal = BackgroundTask("removal", lambda _: self._remove())
        """Removes the messages of generations that were dropped in the background."""
        self._reclaiming = BackgroundTask("reclaiming", lambda _: self._reclaim())
        """Frees the disk space of removed messages, which may take long."""
        self._running = ProcessLock()
        """Held by a run. Guards the attributes below, which are replaced as a whole, so that reading needs no lock."""
        self._shards = storage.shards
        self._reading = ProcessLock()
        """Held while the settings are read or changed; acquired after `_running`. Guards `_known`, which is replaced as
        a whole."""
        self._known: tuple[Applied, RetentionSettings] | None = None
        """The settings, and the last applied write that changed them; None before they are read."""
        self._started = False
        """Whether `start` was called."""
        self._led = False
        """Whether this process owned shard 0 at the last run."""
        self._quota = storage.quota
        self._interest = storage.interest
        storage.jobs.add(self._wake_if_due, messages=0)  # due at every store, which `ClockGuard.stored` must see
        self._due = (FOREVER, FOREVER)
        """The monotonic time, and the number of bytes written, after which a run may be due."""
        self._refused: ManifestMismatchError | None = None
        """The error because of which the last run could not use the archive; None if there was none."""
        self._guard = ClockGuard(storage.clocks)
        """Used under `_running`; `ClockGuard.held_back` may be read without it."""
        storage.quota.enforce = self._enforce_quota
        if storage.site is not None:
            self._task.interval = _LOOK_EVERY
            self._task.wake()

    def __repr__(self) -> str:
        return f"<Retention of {self._storage_ref()!r}>"

    @property
    def failure(self) -> str | None:
        """The error of the last run in the background; None if it succeeded."""
        return self._task.failure or self._removal.failure or self._reclaiming.failure

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the clock had jumped ahead at the last run, which don't count as elapsed."""
        return self._guard.held_back / 1e6

    # --- settings ---

    @property
    def settings(self) -> RetentionSettings:
        """The current settings; by default all messages are kept."""
        known = self._known
        if known is not None and known[0] == self._shards[0].writer.last_applied(_KEY):
            return known[1]
        with self._reading:
            return self._read_locked()

    def was_set(self) -> bool:
        """Return whether any of the settings was ever set, in this process or before. Reads the database."""
        return self._storage().state(0).get(_KEY) is not None

    def _read_locked(self) -> RetentionSettings:
        """Read the settings, of which another site of a cluster may have stored new ones."""
        state = self._storage().state(0)
        applied = self._shards[0].writer.last_applied(_KEY)  # noted first, so that a later change is read again
        stored = state.get(_KEY)
        settings = RetentionSettings() if stored is None else _decode(_KEY, stored)
        if self._known is None or self._known[1] != settings:
            self._adopt_locked(settings)
        self._known = applied, settings
        return settings

    def set(
        self,
        *,
        max_age: Length | Keep | None = KEEP,
        rotate_every: Length | Keep | None = KEEP,
        max_bytes: int | str | Keep | None = KEEP,
        when_full: WhenFull | Keep = KEEP,
        archive_to: str | Keep | None = KEEP,
        filters: Mapping[str, Length | None] | Keep | None = KEEP,
        delivered: Length | Keep | None = KEEP,
    ) -> RetentionSettings:
        """Change the settings durably, and return all settings (see `RetentionSettings`).

        Omitted settings stay unchanged; None removes a limit. ``filters`` replaces all earlier filters:
        ``{"debug/#": "1h", "alarms/#": "infinity"}`` keeps debug messages for an hour, alarms forever, and other
        messages for ``max_age``.

        ``max_age`` and ``max_bytes`` drop whole generations. Messages that were stored before the first limit share a
        generation, and are therefore dropped together. Raises `InvalidArgumentError` for invalid values, and
        `ManifestMismatchError` if ``archive_to`` lies inside the database's directory.
        """
        changed = given(
            {
                "max_age": max_age,
                "rotate_every": rotate_every,
                "max_bytes": max_bytes,
                "when_full": when_full,
                "archive_to": archive_to,
                "filters": filters,
                "delivered": delivered,
            }
        )
        storage = self._storage()
        with self._running, self._reading:  # so that the last stored settings are adopted last
            settings = attrs.evolve(self._read_locked(), **changed)
            if changed.get("archive_to") is not None:
                check_apart(storage.path, archive_directory(storage.path, changed["archive_to"]))
            storage.state(0).write([FrameworkWrite(_KEY, _encode(settings))])
            self._adopt_locked(settings)
            self._known = self._shards[0].writer.last_applied(_KEY), settings
        return settings

    def _adopt_locked(self, settings: RetentionSettings) -> None:
        self._interest.track(on=settings.delivered is not None)
        self._quota.reset()
        self._due = (0, 0) if settings.limited else (FOREVER, FOREVER)

    # --- called by stores ---

    def _enforce_quota(self) -> None:
        """If the database is full, raise `QuotaExceededError` or drop generations, according to ``when_full``."""
        settings = self.settings
        if settings.drops_bytes is not None:
            self._make_room(settings.drops_bytes)
        elif settings.max_bytes is not None:
            try:
                self._quota.check(settings.max_bytes)
            except QuotaExceededError:
                self._wake_if_due()  # removing expired messages may make room for later stores
                raise
        else:
            self._quota.lift()

    def _make_room(self, most: int) -> None:
        """If the limit is far exceeded, drop the generations that are due, and wait until they are removed."""
        storage, bound = self._storage(), most + most // _EXCESS
        shards, failing = storage.shards, self._removal.failure is not None or self._task.stopping.is_set()
        if failing or not self._quota.reached(bound, removing=True):
            return
        if self._running.owned() or any(owned(shard.writer.lock) for shard in shards):
            return  # a run, or a store that a signal handler interrupted, would wait for itself
        try:
            self._sweep(storage, None, at_once=False)
        except (TopicstoreError, OSError):
            self._task.wake()  # the background task will meet and report the same error
            return
        while self._quota.reached(bound, removing=True) and removing_bytes(shards):
            if self._removal.failure is not None or self._task.stopping.wait(_PAUSE):
                return

    def _wake_if_due(self) -> None:
        """Wake the background task, at a store, if a run may be due."""
        self._guard.stored()  # even without limits: a limit that is set later must not remove too young messages
        time, written = self._due
        late = time < FOREVER and self._storage().clocks.monotonic() >= time
        if late or (written < FOREVER and written_bytes(self._storage().shards) >= written):
            self._task.wake()

    def _look_at_site(self) -> None:
        """Wake the background task if a run may be due by messages or limits of other sites.

        Also if shard 0, whose owner begins and drops generations, has come to this site.
        """
        if self.settings.limited:
            if self._shards[0].writer.owned != self._led:
                self._due = (0, 0)
            self._wake_if_due()

    # --- running ---

    def run(self, now: Time | None = None) -> RetentionReport:
        """Begin, drop, archive and delete by the limits, and remove expired retained messages; return a report.

        ``now``: the time to use; by default the time of the database's clock, minus the time by which the clock has
        jumped ahead. Raises `InvalidArgumentError` for an invalid time.
        """
        storage = self._storage()
        report = self._run(storage, self._given(now), at_once=True)
        if self._refused is not None:
            warn_caller(f"what is due could not be archived, and stays: {self._refused}")
        return report

    def outlook(
        self, now: Time | None = None, *, limits: Mapping[str, Any] | None = None, count: bool = False
    ) -> list[Departure]:
        """Return the future removals, with time and reason: by generation, oldest first, and by filter. Read-only.

        ``now``: as in `run`. ``limits``: arguments of `set`; the result is that after such a call. ``count``: count
        the messages that each filter removes now, by reading topics and sizes of all that match it and are old enough.

        A server of a cluster asks the others about shards that it doesn't keep. Raises `ShardElsewhereError` if no site
        that keeps a shard answers, because the times depend on all shards.
        """
        storage, at = self._storage(), self._given(now)
        held_back = self._guard.held_back if at is None else 0
        time = storage.clock() if at is None else at
        settings = attrs.evolve(self.settings, **given(limits or {}))
        live, failed = all_live_records(storage)
        for error in failed.values():
            raise error
        shards = storage.shards
        newest = time_of(
            max(one.reader.watermark if one.elsewhere is None else one.elsewhere.current_watermark() for one in shards)
        )
        there = ages(live, time)
        expired = count_expired(storage, rules(settings), there, time - held_back) if count else None
        return outlook(settings, there, time, newest, held_back, expired)

    def _given(self, now: Time | None) -> int | None:
        storage = self._storage()
        return None if now is None else instant(now, storage.clock, allow_ancient=storage.allow_ancient)

    def _run(self, storage: Storage, now: int | None, *, at_once: bool) -> RetentionReport:
        report = self._sweep(storage, now, at_once=at_once)
        if now is None:
            now = min(storage.clock(), storage.steady())  # the time that `RetainedExpiry` uses, too
        return attrs.evolve(report, expired=self._expire(storage, now))

    def start(self, interval: float) -> None:
        """Run every ``interval`` seconds in the background, until the database is closed.

        Without this, the background task runs only when messages are stored. That suffices unless old messages must be
        removed even while no new messages are stored.
        """
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"interval is seconds above 0, not {interval!r}")
        self._storage().check_open()
        self._started = True
        self._task.interval = interval
        self._task.wake()

    def stop(self) -> None:
        """Stop the background tasks, and wait until they have ended. Idempotent."""
        tasks = self._task, self._removal, self._reclaiming
        for task in tasks:
            task.stop()
        for task in tasks:
            task.join()

    def _remove(self) -> None:
        storage = self._storage_ref()
        if storage is not None:
            remove_dropped(storage)
            self._reclaiming.wake()

    def _reclaim(self) -> None:
        storage = self._storage_ref()
        if storage is not None:
            reclaim_removed(storage)

    def _sweep(self, storage: Storage, given: int | None, *, at_once: bool) -> RetentionReport:
        with self._running:
            # A site of a cluster that has no generation yet decides nothing.
            leads = self._led = storage.shards[0].writer.owned and bool(live_records(storage.shards))
            settings, written = self.settings, written_bytes(self._storage().shards)
            now, held_back, passed = given, 0, storage.clocks.monotonic()
            if now is None:
                self._guard.look(settings.longest_age)
                now, held_back = storage.clock(), self._guard.held_back
            rotated = None
            if leads and must_rotate(settings, self._ages(storage, now)[-1], now):
                rotated = add_generation(storage)
            self._due = (passed + _AGAIN, FOREVER)  # the time of the next run if this one fails
            archiving, limits = settings.archive_to is not None, rules(settings)
            old = outdated(settings, self._in_turn(storage, now), now - held_back) if leads else []
            if archiving and old:  # so that expired messages aren't archived
                expired = expire(storage, limits, self._ages(storage, now), now - held_back, at_once=True)
            self._refused = None
            gone = self._let_go(storage, settings, old, remove=at_once)
            if not (archiving and old):  # after the drops, which save deletes
                expired = expire(storage, limits, self._ages(storage, now), now - held_back, at_once=at_once)
            emptied = [one for one in self._in_turn(storage, now)[:-1] if leads and is_emptied(settings, one)]
            gone += self._let_go(storage, settings, emptied, remove=at_once)
            if self._refused is None:
                wait, until = due(settings, self._in_turn(storage, now), now, held_back, written)
                if not leads:  # the owner of shard 0 begins and drops generations
                    wait, until = FOREVER, FOREVER
                self._due = (passed + min(wait, expired.wait), until)
            if self.settings != settings:
                self._due = (0, 0)
            there = self._ages(storage, now)
        numbers = {one.number for one in gone}
        archived = numbers.intersection(one.number for one in there if one.archived)
        return RetentionReport(
            rotated=rotated,
            dropped=tuple(sorted(numbers - archived)),
            archived=tuple(sorted(archived)),
            messages=sum(one.messages for one in gone),
            live_bytes=sum(one.live_bytes for one in gone),
            expired=0,
            deleted=expired.deleted,
            why=(*([] if self._refused is None else [str(self._refused)]), *reasons(settings, there, now, held_back)),
        )

    def _let_go(
        self, storage: Storage, settings: RetentionSettings, generations: list[GenerationAge], *, remove: bool
    ) -> list[GenerationAge]:
        """Drop or archive generations; return those for which this succeeded.

        If the archive refuses a generation, the error is kept in `_refused`. Without ``remove``, the messages of
        dropped generations are removed in the background.
        """
        gone = []
        for one in generations:
            try:
                if _let_go(storage, settings, one, remove=remove):
                    gone.append(one)
            except ManifestMismatchError as refused:
                self._refused = refused
        if gone and not remove:
            self._removal.wake()
        return gone

    def _in_turn(self, storage: Storage, now: int) -> list[GenerationAge]:
        """Return the generations that may be dropped or archived: with ``archive_to``, those not archived yet."""
        archiving = self.settings.archive_to is not None
        return [one for one in self._ages(storage, now) if not (archiving and one.archived)]

    def _ages(self, storage: Storage, now: int) -> list[GenerationAge]:
        return ages(live_records(storage.shards), now)

    def _storage(self) -> Storage:
        storage = self._storage_ref()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        return storage

    def _work(self, woken: bool) -> None:
        """Run in the background; unless a store woke the task, also remove expired retained messages."""
        storage = self._storage_ref()
        if storage is None:  # the database has no references left, and is about to close itself
            return
        if woken:
            self._sweep(storage, None, at_once=False)
        elif storage.site is not None and not self._started:
            self._look_at_site()
        else:
            self._run(storage, None, at_once=False)
        if self._refused is not None:
            raise self._refused


def _let_go(storage: Storage, settings: RetentionSettings, generation: GenerationAge, *, remove: bool) -> bool:
    """Drop or archive a generation; return False if it was dropped before."""
    if settings.archive_to is None or is_emptied(settings, generation):
        return drop_generation(storage, generation.number, remove=remove)
    from .exporting import archive  # a late import, because loading pyarrow is slow

    archive(storage, settings.archive_to, [generation.number])
    return True


def _encode(settings: RetentionSettings) -> bytes:
    max_age = None if settings.max_age is None else micros(settings.max_age)
    rotate_every = None if settings.rotate_every is None else micros(settings.rotate_every)
    filters = {name: None if length is None else micros(length) for name, length in settings.filters.items()}
    version = _FILTERS_VERSION if filters else _VERSION if settings.archive_to is None else _ARCHIVING_VERSION
    delivered = None if settings.delivered is None else micros(settings.delivered)
    limits = max_age, rotate_every, settings.max_bytes, settings.when_full, settings.archive_to, filters, delivered
    return _CODEC.encode(_KEY, _Record(version, *limits))


def _decode(key: bytes, stored: bytes) -> RetentionSettings:
    record = _CODEC.decode(key, stored, "shard 0, state: retention settings")
    return RetentionSettings(
        max_age=None if record.max_age is None else record.max_age / 1e6,
        rotate_every=None if record.rotate_every is None else record.rotate_every / 1e6,
        max_bytes=record.max_bytes,
        when_full=record.when_full,
        archive_to=record.archive_to,
        filters={name: None if length is None else length / 1e6 for name, length in record.filters.items()},
        delivered=None if record.delivered is None else record.delivered / 1e6,
    )


DECODERS: Decoders = {_KEY: _decode}
"""Decoder of the state that holds the settings."""
