"""Retention: how long messages stay, and how many bytes of them.

Messages are removed by generations. Retention begins a new one when the current one is old or large enough, and drops
those whose newest message is older than the limit, or the oldest ones while there are too many bytes. It may run at any
time, concurrently with readers and writers; the next run completes one that was interrupted.

A generation's age counts from its newest message, by positions; where those lie in the future, from
the moment it was sealed. So messages stay for at least ``max_age``, and at most about ``rotate_every`` longer. Bytes
are those of the values that layouts wrote (``live_bytes``), not the engine's files, and only of generations that are
local. The limit on bytes has precedence over all others: the oldest generations are dropped whatever they hold. In the
background a drop makes a generation invisible at once; another thread then removes its messages, and a third one frees
their disk space. Where messages come faster than they are removed, storing waits: the bytes of all generations, and of
dropped ones that are not removed yet, exceed the limit by half of it and one batch at most. This doesn't hold while
dropping or archiving fails, nor after `stop`; and what an engine has yet to compact comes on top, on disk.

With ``filters``, messages whose topics match a filter stay for its time instead, shorter or longer; if several filters
match, for the longest. A generation is dropped as a whole when everything in it is too old, whatever its topics.
Messages that expire earlier are deleted (`topicstore.lifecycle.expiry`): by an explicit run at once, in the background
at most a quarter of their age later; and a generation of which nothing is left is dropped. Topics that begin with
``$``, but ``$SYS``, are deleted only if a filter names them or the layout learns topics; otherwise they are dropped
with their generation.

A process trusts the wall clock at the time when it opens the database. From then on nothing is removed before the time
has really passed, even if the clock jumps forward, or is set back for a while in which messages are stored
(`topicstore.lifecycle.clock_guard`). A clock that stays changed is trusted again ``max_age`` later, after the next
opening, or in a `Retention.run` that is given its time.

With ``archive_to``, generations that would be dropped are archived there instead (`Archives.archive`), and stay until
they are dropped explicitly; messages that expire by filters are deleted before that and not archived. If archiving
fails, they stay local, and the run raises. If the archive lacks what was archived there, as when its volume isn't
mounted, they stay too; the run then does all else, gives a `RuntimeWarning`, and its report says why. The background
reports either as its failure and tries again after a minute at the latest.

Messages with an expiry interval (MQTT 5, section 3.3.2.3.3) are no exception: they stay in the history as long as the
others, and replays return them; deliveries to sessions and look-ups of retained messages leave out those that have
expired. Retained messages, which have no generation, are removed once they have expired.

Stored form (state keyspace of shard 0; keys begin with the byte 1, which is left out here)::

    "ps" -> record (see `topicstore.shard.record_codec`) of version 1, max_age and rotate_every in
            microseconds or nil, max_bytes or nil, when_full, archive_to or nil, filters, each with
            microseconds or nil

Fields are only ever appended. The version is 2 where there is an ``archive_to``, and 3 where there are filters: a
program that doesn't know those would drop messages that are to stay.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import attrs
import msgspec

from topicstore.contract.arguments import KEEP, Keep, given
from topicstore.contract.errors import (
    DatabaseClosedError,
    InvalidArgumentError,
    ManifestMismatchError,
    QuotaExceededError,
    TopicstoreError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.times import Time, instant
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.locks import owned
from topicstore.runtime.warning import warn_caller
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.archive_locations import archive_directory, check_apart
from topicstore.storage.generations import (
    add_generation,
    drop_generation,
    live_records,
    reclaim_removed,
    remove_dropped,
)
from topicstore.storage.quota import removing_bytes, written_bytes
from topicstore.storage.storage import Storage

from .clock_guard import ClockGuard
from .expiry import expire
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
"""The part of the limit on bytes, as a divisor, by which it may be exceeded before writers have to wait."""
_PAUSE = 0.005
"""Seconds between two looks at whether enough was removed."""
_AGAIN = 60_000_000
"""Microseconds after which failed archiving is tried again."""


@attrs.frozen(kw_only=True)
class RetentionReport:
    """The result of a run of retention."""

    rotated: int | None
    """The generation that was begun; None if none was."""
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
    """The reasons why the rest stays, as sentences."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    max_age: int | None
    rotate_every: int | None
    max_bytes: int | None
    when_full: WhenFull
    archive_to: str | None = None
    filters: dict[str, int | None] = {}


_CODEC = RecordCodec(_Record, _FILTERS_VERSION)


class Retention:
    """The retention of one database, as returned by `Database.retention`. All methods may be called from any thread."""

    def __init__(self, storage: Storage, expire: Callable[[Storage, int], int]) -> None:
        """Create it; ``expire`` removes the retained messages that have expired at a time, and returns their number."""
        self._storage_ref = weakref.ref(storage)  # otherwise a database without other references would not be closed
        self._expire = expire
        self._task = BackgroundTask("retention", self._work)
        self._removal = BackgroundTask("removal", lambda _: self._remove())
        """Removes the messages of generations that were dropped in the background."""
        self._reclaiming = BackgroundTask("reclaiming", lambda _: self._reclaim())
        """Frees their disk space, which may take long."""
        self._running = ProcessLock()
        """Held by a run. Guards the attributes below; each is replaced as a whole, so reading one needs no lock."""
        self._settings: RetentionSettings | None = None
        """The settings; None before they were read."""
        self._quota = storage.quota
        storage.jobs.add(self._wake_if_due, messages=0)  # at every store: the guard notes where the clock is
        self._due = (FOREVER, FOREVER)
        """The monotonic time, and the number of bytes written, from which on there may be something to do."""
        self._refused: ManifestMismatchError | None = None
        """Why the last run could not use the archive; None if it could."""
        self._guard = ClockGuard(storage.clocks)
        """Used under `_running`; reading how much it holds back needs no lock."""
        storage.quota.enforce = self._enforce_quota

    def __repr__(self) -> str:
        return f"<Retention of {self._storage_ref()!r}>"

    @property
    def failure(self) -> str | None:
        """Why the last run in the background failed; None if it did not."""
        return self._task.failure or self._removal.failure or self._reclaiming.failure

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the clock has jumped ahead according to the last run; they don't count as passed."""
        return self._guard.held_back / 1e6

    # --- settings ---

    @property
    def settings(self) -> RetentionSettings:
        """The current settings; by default everything is kept."""
        return self._settings or self._read_settings()

    def _read_settings(self) -> RetentionSettings:
        with self._running:
            return self._settings_locked()

    def _settings_locked(self) -> RetentionSettings:
        if self._settings is None:
            stored = self._storage().state(0).get(_KEY)
            self._adopt_locked(RetentionSettings() if stored is None else _decode(_KEY, stored))
        return self._settings or RetentionSettings()

    def set(
        self,
        *,
        max_age: timedelta | float | Keep | None = KEEP,
        rotate_every: timedelta | float | Keep | None = KEEP,
        max_bytes: int | Keep | None = KEEP,
        when_full: WhenFull | Keep = KEEP,
        archive_to: str | Keep | None = KEEP,
        filters: Mapping[str, timedelta | float | None] | Keep | None = KEEP,
    ) -> RetentionSettings:
        """Change the settings durably from now on, and return all of them (see `RetentionSettings`).

        Omitted settings stay as they are; None removes a limit. ``filters`` replaces all earlier filters:
        ``{"debug/#": timedelta(hours=1), "alarms/#": None}`` keeps debug messages for an hour, alarms for ever, and
        others for ``max_age``.

        Generations are dropped as a whole: all messages that the current one holds when the first limit is set are
        dropped together. Raises `InvalidArgumentError`, and `ManifestMismatchError` if ``archive_to`` lies inside the
        database.
        """
        changed = given(
            {
                "max_age": max_age,
                "rotate_every": rotate_every,
                "max_bytes": max_bytes,
                "when_full": when_full,
                "archive_to": archive_to,
                "filters": filters,
            }
        )
        storage = self._storage()
        with self._running:  # so that the settings stored last apply
            settings = attrs.evolve(self._settings_locked(), **changed)
            if changed.get("archive_to") is not None:
                check_apart(storage.path, archive_directory(storage.path, changed["archive_to"]))
            storage.state(0).write([FrameworkWrite(_KEY, _encode(settings))])
            self._adopt_locked(settings)
        return settings

    def _adopt_locked(self, settings: RetentionSettings) -> None:
        self._settings = settings
        self._quota.reset()
        self._due = (0, 0) if settings.limited else (FOREVER, FOREVER)

    # --- beside every store ---

    def _enforce_quota(self) -> None:
        """Raise `QuotaExceededError`, or make room, if the database is full and the settings say so."""
        settings = self.settings
        if settings.drops_bytes is not None:
            self._make_room(settings.drops_bytes)
        elif settings.max_bytes is not None:
            try:
                self._quota.check(settings.max_bytes)
            except QuotaExceededError:
                self._wake_if_due()  # removing expired messages may make room for the next
                raise
        else:
            self._quota.lift()

    def _make_room(self, most: int) -> None:
        """Drop what is due, and wait until it is removed, if the background is far behind with that."""
        storage, bound = self._storage(), most + most // _EXCESS
        shards, failing = storage.shards, self._removal.failure is not None or self._task.stopping.is_set()
        if failing or not self._quota.reached(bound, removing=True):
            return
        if self._running.owned() or any(owned(shard.writer.lock) for shard in shards):
            return  # this is called within a run, or a signal handler is within a store: both would wait for themselves
        try:
            self._sweep(storage, None, at_once=False)
        except (TopicstoreError, OSError):
            self._task.wake()  # it finds the same error, and reports it
            return
        while self._quota.reached(bound, removing=True) and removing_bytes(shards):
            if self._removal.failure is not None or self._task.stopping.wait(_PAUSE):
                return

    def _wake_if_due(self) -> None:
        """Wake the background task, at a store, if there may be something to do."""
        self._guard.stored()  # also without limits: one that is set later must not remove what is younger
        time, written = self._due
        late = time < FOREVER and self._storage().clocks.monotonic() >= time
        if late or (written < FOREVER and written_bytes(self._storage().shards) >= written):
            self._task.wake()

    # --- running ---

    def run(self, now: Time | None = None) -> RetentionReport:
        """Rotate, drop and delete what is due, and remove expired retained messages; return a report.

        ``now`` is the time to use; by default the time of the database's clock, less the time by which that has jumped
        ahead. Raises `InvalidArgumentError` for an invalid one.
        """
        storage = self._storage()
        report = self._run(storage, self._given(now), at_once=True)
        if self._refused is not None:
            warn_caller(f"what is due could not be archived, and stays: {self._refused}")
        return report

    def outlook(self, now: Time | None = None) -> list[Departure]:
        """Return what will be removed when and why: by generation, oldest first, and by filter. Changes nothing.

        ``now``: as in `run`.
        """
        storage, given = self._storage(), self._given(now)
        held_back = self._guard.held_back if given is None else 0
        time = storage.clock() if given is None else given
        return outlook(self.settings, self._ages(storage, time), time, held_back)

    def _given(self, now: Time | None) -> int | None:
        storage = self._storage()
        return None if now is None else instant(now, storage.clock, allow_ancient=storage.allow_ancient)

    def _run(self, storage: Storage, now: int | None, *, at_once: bool) -> RetentionReport:
        report = self._sweep(storage, now, at_once=at_once)
        if now is None:
            now = min(storage.clock(), storage.steady())  # as in the background: `RetainedExpiry`
        return attrs.evolve(report, expired=self._expire(storage, now))

    def start(self, interval: float) -> None:
        """Run every ``interval`` seconds in the background, until the database is closed.

        Without it, retention works in the background when messages are stored; that is enough unless old messages must
        be removed even if no new ones come.
        """
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"interval is seconds above 0, not {interval!r}")
        self._storage().check_open()
        self._task.interval = interval
        self._task.wake()

    def stop(self) -> None:
        """Stop running in the background, and wait until it has stopped. May be called twice."""
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
            settings, written = self.settings, written_bytes(self._storage().shards)
            now, held_back, passed = given, 0, storage.clocks.monotonic()
            if now is None:
                self._guard.look(settings.longest_age)
                now, held_back = storage.clock(), self._guard.held_back
            rotated = None
            if must_rotate(settings, self._ages(storage, now)[-1], now):
                rotated = add_generation(storage)
            self._due = (passed + _AGAIN, FOREVER)  # in case it fails
            archiving, limits = settings.archive_to is not None, rules(settings)
            old = outdated(settings, self._in_turn(storage, now), now - held_back)
            if archiving and old:  # before messages that expire by a filter are archived
                expired = expire(storage, limits, self._ages(storage, now), now - held_back, at_once=True)
            self._refused = None
            gone = self._let_go(storage, settings, old, remove=at_once)
            if not (archiving and old):  # after whole generations, from which nothing has to be deleted first
                expired = expire(storage, limits, self._ages(storage, now), now - held_back, at_once=at_once)
            emptied = [one for one in self._in_turn(storage, now)[:-1] if is_emptied(settings, one)]
            gone += self._let_go(storage, settings, emptied, remove=at_once)
            if self._refused is None:
                wait, until = due(settings, self._in_turn(storage, now), now, held_back, written)
                self._due = (passed + min(wait, expired.wait), until)
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
        """Drop or archive generations; return those that are gone, without those that the archive can't take.

        Without ``remove``, the messages of dropped ones are removed in the background.
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
        """Return the generations that may be removed; if they are to be archived, those that aren't yet."""
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
        """Do what is due, in the background; at every interval also work that no store announces."""
        storage = self._storage_ref()
        if storage is None:  # the database has no references any more, and is about to be closed
            return
        if woken:
            self._sweep(storage, None, at_once=False)
        else:
            self._run(storage, None, at_once=False)
        if self._refused is not None:
            raise self._refused


def _let_go(storage: Storage, settings: RetentionSettings, generation: GenerationAge, *, remove: bool) -> bool:
    """Drop or archive a generation; return False if it was dropped before."""
    if settings.archive_to is None or is_emptied(settings, generation):
        return drop_generation(storage, generation.number, remove=remove)
    from .exporting import archive  # with pyarrow, which takes longer to import than all else

    archive(storage, settings.archive_to, [generation.number])
    return True


def _encode(settings: RetentionSettings) -> bytes:
    max_age = None if settings.max_age is None else micros(settings.max_age)
    rotate_every = None if settings.rotate_every is None else micros(settings.rotate_every)
    filters = {name: None if length is None else micros(length) for name, length in settings.filters.items()}
    version = _FILTERS_VERSION if filters else _VERSION if settings.archive_to is None else _ARCHIVING_VERSION
    limits = max_age, rotate_every, settings.max_bytes, settings.when_full, settings.archive_to, filters
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
    )


DECODERS: Decoders = {_KEY: _decode}
"""Decoder of the state that holds the settings."""
