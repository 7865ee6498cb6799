"""Retention: how long messages stay, and how many bytes of them.

Messages go by generations. Retention begins a new one when the current one is old or large enough, and
drops those whose newest message is older than the limit, or the oldest while there are too many bytes.
It may run at any moment, beside readers and writers; a run that was interrupted is made up for by the next.

A generation's age counts from its newest message, by positions; where those lie in the future, from
the moment it was sealed. So messages stay for ``max_age`` at least, and about ``rotate_every`` longer
at most. Bytes are those of the values that layouts wrote (``live_bytes``), not the engine's files, and only of
generations that are local.

A process trusts the wall clock as it finds it when it opens the database. From then on nothing goes earlier than time
has really passed, though the clock jumps forward (`topicstore.lifecycle.clock_guard`). A clock that was set for good
counts again ``max_age`` later, after the next opening, or in a `Retention.run` that is given its time.

With ``archive_to``, generations that would be dropped are archived there instead (`Archives.archive`), and stay
until somebody drops them. If that fails they stay local, and the run raises; by itself it is tried again a minute
later at the earliest.

Messages with an expiry interval are no exception: in the history they stay as long as the others, and
replays return them; whoever delivers messages (sessions, retained look-ups) leaves out those that
expired. Retained messages, which have no generation, are removed once they have expired.

Stored form (state keyspace of shard 0; keys begin with a byte of one, left out here)::

    "ps" -> record (see `topicstore.shard.record_codec`) of version 1, max_age and rotate_every in
            microseconds or nil, max_bytes or nil, when_full, archive_to or nil

Fields are only ever appended. The version is 2 where there is an ``archive_to``: who doesn't know it would drop.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import attrs
import msgspec

from topicstore.background import BackgroundTask
from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError, QuotaExceededError
from topicstore.contract.forking import ProcessLock
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.archive_locations import archive_directory, check_apart
from topicstore.storage.generations import add_generation, drop_generation, live_records
from topicstore.storage.storage import Storage

from .clock_guard import ClockGuard
from .quota import Quota, written_bytes
from .retention_policy import (
    FOREVER,
    GenerationAge,
    RetentionSettings,
    WhenFull,
    ages,
    due,
    micros,
    must_rotate,
    outdated,
)

__all__ = ["Retention", "RetentionReport"]

_KEY = b"\1ps"
_VERSION = 1
_ARCHIVING_VERSION = 2
_AGAIN = 60_000_000
"""Microseconds after which archiving that failed is tried again."""


@attrs.frozen(kw_only=True)
class RetentionReport:
    """What a run did."""

    rotated: int | None
    """The generation that was begun."""
    dropped: tuple[int, ...]
    """The generations that were dropped, oldest first."""
    archived: tuple[int, ...]
    """The generations that were archived, oldest first."""
    messages: int
    """Messages in them."""
    live_bytes: int
    """Bytes of values in them."""
    expired: int
    """Retained messages that were removed."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    max_age: int | None
    rotate_every: int | None
    max_bytes: int | None
    when_full: WhenFull
    archive_to: str | None = None


_CODEC = RecordCodec(_Record, _ARCHIVING_VERSION)


class Retention:
    """The retention of one database, as `Database.retention` gives it. All methods may be called from any thread."""

    def __init__(self, storage: Storage, expire: Callable[[Storage, int], int]) -> None:
        """``expire`` removes the retained messages whose time is over at a moment, and returns how many."""
        self._storage_ref = weakref.ref(storage)  # else a database that nobody holds would not be closed
        self._expire = expire
        self._task = BackgroundTask("retention", self._work, goes_on=True)
        self._running = ProcessLock()
        """Held by a run. Guards what follows; each is replaced as a whole, so a glance needs no lock."""
        self._settings: RetentionSettings | None = None
        """None before they were read."""
        self._quota = Quota()
        self._due = (FOREVER, FOREVER)
        """By the monotonic clock, or in bytes written, from when on there may be something to do."""
        self._guard = ClockGuard(storage.clocks)
        """Used under `_running`; a glance at what it holds back needs no lock."""

    @property
    def failure(self) -> str | None:
        """Why it failed the last time that it worked by itself; None if it did not."""
        return self._task.failure

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the clock has jumped ahead, as the last run found it; they don't count as passed."""
        return self._guard.held_back / 1e6

    # --- settings ---

    @property
    def settings(self) -> RetentionSettings:
        """What is kept; at first everything."""
        return self._settings or self._read_settings()

    def _read_settings(self) -> RetentionSettings:
        with self._running:
            if self._settings is None:
                stored = self._storage().state(0).get(_KEY)
                self._adopt_locked(RetentionSettings() if stored is None else _decode(stored))
            return self._settings or RetentionSettings()

    def set(
        self,
        *,
        max_age: float | None = None,
        rotate_every: float | None = None,
        max_bytes: int | None = None,
        when_full: WhenFull = "refuse",
        archive_to: str | None = None,
    ) -> RetentionSettings:
        """Say what is kept from now on, durably, in place of what held before (see `RetentionSettings`).

        Generations go as wholes: what was stored in the current one before the first limit was set goes as one.
        Raises `InvalidArgumentError`, and `ManifestMismatchError` if ``archive_to`` lies inside the database.
        """
        settings = RetentionSettings(
            max_age=max_age,
            rotate_every=rotate_every,
            max_bytes=max_bytes,
            when_full=when_full,
            archive_to=archive_to,
        )
        storage = self._storage()
        if archive_to is not None:
            check_apart(storage.path, archive_directory(storage.path, archive_to))
        with self._running:  # so that what is stored last holds
            storage.state(0).write([FrameworkWrite(_KEY, _encode(settings))])
            self._adopt_locked(settings)
        return settings

    def _adopt_locked(self, settings: RetentionSettings) -> None:
        self._settings = settings
        self._quota = Quota()
        self._due = (0, 0) if settings.limited else (FOREVER, FOREVER)

    # --- beside every store ---

    def admit(self) -> None:
        """Raise `QuotaExceededError` if the database is full, and is to refuse then. Cheap."""
        settings = self.settings
        if settings.max_bytes is not None and settings.when_full == "refuse":
            try:
                self._quota.check(settings.max_bytes, self._storage().shards)
            except QuotaExceededError:
                self.stored(0)  # what is too old may go, and make room for the next
                raise

    def stored(self, _messages: int) -> None:
        """Messages were stored: work in the background if there may be something to do. Cheap."""
        time, written = self._due
        late = time < FOREVER and self._storage().clocks.monotonic() >= time
        if late or (written < FOREVER and written_bytes(self._storage().shards) >= written):
            self._task.wake()

    # --- running ---

    def run(self, now: int | None = None) -> RetentionReport:
        """Rotate and drop what is due, and remove expired retained messages.

        ``now``: microseconds since the epoch, which counts as it is; by default the present, by the database's clock,
        but for what that has jumped ahead.
        """
        storage = self._storage()
        report = self._sweep(storage, now)
        if now is None:
            now = storage.clock() - self._guard.held_back
        return attrs.evolve(report, expired=self._expire(storage, now))

    def start(self, interval: float) -> None:
        """Run every ``interval`` seconds in the background, until the database is closed.

        Without it, retention works in the background when something is stored: that is enough unless old
        messages must go though nothing new comes.
        """
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"interval is seconds above 0, not {interval!r}")
        self._storage().check_open()
        self._task.interval = interval
        self._task.wake()

    def stop(self) -> None:
        """Return when nothing runs in the background any more, nor will. May be called twice."""
        self._task.stop()
        self._task.join()

    def _sweep(self, storage: Storage, given: int | None) -> RetentionReport:
        with self._running:
            settings, written = self.settings, written_bytes(self._storage().shards)
            now, held_back, passed = given, 0, storage.clocks.monotonic()
            if now is None:
                self._guard.look(FOREVER if settings.max_age is None else micros(settings.max_age))
                now, held_back = storage.clock(), self._guard.held_back
            rotated = None
            if must_rotate(settings, self._ages(storage, now)[-1], now):
                rotated = add_generation(storage)
            archiving = settings.archive_to is not None
            generations = [one for one in self._ages(storage, now) if not (archiving and one.archived)]
            old = outdated(settings, generations, now - held_back)
            self._due = (passed + _AGAIN, FOREVER)  # should it fail
            gone = [one for one in old if _let_go(storage, settings, one.number)]
            numbers = tuple(one.number for one in gone)
            left = [one for one in generations if one not in old]
            wait, until = due(settings, left, now, held_back, written)
            self._due = (passed + wait, until)
        return RetentionReport(
            rotated=rotated,
            dropped=() if archiving else numbers,
            archived=numbers if archiving else (),
            messages=sum(one.messages for one in gone),
            live_bytes=sum(one.live_bytes for one in gone),
            expired=0,
        )

    def _ages(self, storage: Storage, now: int) -> list[GenerationAge]:
        return ages(live_records(storage.shards), now)

    def _storage(self) -> Storage:
        storage = self._storage_ref()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        return storage

    def _work(self, woken: bool) -> None:
        """Do what is due, in the background; at every interval also what nothing that was stored announces."""
        storage = self._storage_ref()
        if storage is None:  # nobody holds the database any more; it is about to be closed
            return
        if woken:
            self._sweep(storage, None)
        else:
            self.run()


def _let_go(storage: Storage, settings: RetentionSettings, generation: int) -> bool:
    """Drop or archive a generation; return False if it was dropped before."""
    if settings.archive_to is None:
        return drop_generation(storage, generation)
    from .exporting import archive  # with pyarrow, which takes longer to import than all else

    archive(storage, settings.archive_to, [generation])
    return True


def _encode(settings: RetentionSettings) -> bytes:
    max_age = None if settings.max_age is None else micros(settings.max_age)
    rotate_every = None if settings.rotate_every is None else micros(settings.rotate_every)
    version = _VERSION if settings.archive_to is None else _ARCHIVING_VERSION
    return _CODEC.encode(
        _KEY, _Record(version, max_age, rotate_every, settings.max_bytes, settings.when_full, settings.archive_to)
    )


def _decode(stored: bytes) -> RetentionSettings:
    record = _CODEC.decode(_KEY, stored, "shard 0, state: retention settings")
    return RetentionSettings(
        max_age=None if record.max_age is None else record.max_age / 1e6,
        rotate_every=None if record.rotate_every is None else record.rotate_every / 1e6,
        max_bytes=record.max_bytes,
        when_full=record.when_full,
        archive_to=record.archive_to,
    )
