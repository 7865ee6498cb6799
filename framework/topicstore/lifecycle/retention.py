"""Retention: how long messages stay, and how many bytes of them.

Messages go by generations. Retention begins a new one when the current one is old or large enough, and
drops those whose newest message is older than the limit, or the oldest while there are too many bytes.
It may run at any moment, beside readers and writers; a run that was interrupted is made up for by the next.

A generation's age counts from its newest message, by positions; where those lie in the future, from
the moment it was sealed. So messages stay for ``max_age`` at least, and about ``rotate_every`` longer
at most. Bytes are those of the values that layouts wrote (``live_bytes``), not the engine's files, and only of
generations that are local.

With ``archive_to``, generations that would be dropped are archived there instead (`Database.archive`), and stay
until somebody drops them. If that fails they stay local, and the run raises; by itself it is tried again a minute
later at the earliest.

Messages with an expiry interval are no exception: in the history they stay as long as the others, and
replays return them; whoever delivers messages (sessions, retained look-ups) leaves out those that
expired. Retained messages, which have no generation, are removed once they have expired.

Stored form (state keyspace of shard 0; keys begin with a byte of one, left out here)::

    "ps" -> checksum (see `topicstore.contract.checksums`) and msgpack array of version 1, max_age and rotate_every in
            microseconds or nil, max_bytes or nil, when_full, archive_to or nil

Fields are only ever appended. The version is 2 where there is an ``archive_to``: who doesn't know it would drop.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import attrs
import msgspec

from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    InvalidArgumentError,
    NewerFormatError,
    QuotaExceededError,
)
from topicstore.contract.positions import time_of
from topicstore.pubsub.retained import remove_expired
from topicstore.shard.records import GenerationRecord
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.archive_locations import archive_directory, check_apart

if TYPE_CHECKING:
    from topicstore.database import Database

__all__ = ["Retention", "RetentionReport", "RetentionSettings", "WhenFull"]

WhenFull = Literal["refuse", "drop"]

_KEY = b"\1ps"
_VERSION = 1
_ARCHIVING_VERSION = 2
_PARTS = 4
"""Into how many generations an age is divided, unless told otherwise."""
_PARTS_OF_BYTES = 8
"""Into how many generations a number of bytes is divided."""
_FOREVER = 1 << 64
_AGAIN = 60_000_000
"""Microseconds after which archiving that failed is tried again."""


@attrs.frozen(kw_only=True)
class RetentionSettings:
    """What is kept. Lengths of time are seconds; None: no limit."""

    max_age: float | None = None
    """Messages older than this go."""
    rotate_every: float | None = None
    """A generation is written for so long; by default a quarter of ``max_age``."""
    max_bytes: int | None = None
    """Bytes of values in all generations together."""
    when_full: WhenFull = "refuse"
    """At ``max_bytes``: ``"refuse"`` to store (`QuotaExceededError`), or ``"drop"`` the oldest generations."""
    archive_to: str | None = None
    """Directory of an export to which generations are archived instead of dropped; a relative one lies from the
    database's own."""

    def __attrs_post_init__(self) -> None:
        for name in ("max_age", "rotate_every"):
            seconds = getattr(self, name)
            if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < 1e9):
                raise InvalidArgumentError(f"{name} is a number of seconds above 0, not {seconds!r}")
        if self.max_bytes is not None and (type(self.max_bytes) is not int or self.max_bytes < 1):
            raise InvalidArgumentError(f"max_bytes is a whole number of at least 1, not {self.max_bytes!r}")
        if self.when_full not in get_args(WhenFull):
            raise InvalidArgumentError(f"when_full is one of {', '.join(get_args(WhenFull))}, not {self.when_full!r}")
        if self.archive_to is not None and not isinstance(self.archive_to, str):
            raise InvalidArgumentError(f"archive_to is a path as text, not {self.archive_to!r}")

    @property
    def rotation(self) -> int | None:
        """Microseconds after which a generation that has messages is sealed."""
        if self.rotate_every is None:
            return None if self.max_age is None else _micros(self.max_age / _PARTS)
        return _micros(self.rotate_every)

    @property
    def limited(self) -> bool:
        """Whether there is anything that retention does by itself."""
        return self.rotation is not None or self.drops_bytes is not None

    @property
    def drops_bytes(self) -> int | None:
        """Bytes above which the oldest generations are dropped."""
        return self.max_bytes if self.when_full == "drop" else None


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


@attrs.frozen(kw_only=True)
class _Generation:
    """A generation over all shards. Times are microseconds since the epoch."""

    number: int
    created: int
    ended: int
    """From when on all its messages are older than that; of the current one the present."""
    messages: int
    live_bytes: int
    archived: bool
    """Nothing of it is local, so it counts for no limit on bytes."""


class Retention:
    """The retention of one database, as `Database.retention` gives it. All methods may be called from any thread."""

    def __init__(self, db: Database) -> None:
        self.failure: str | None = None
        """Why it failed the last time that it worked by itself; None if it did not."""
        self._db = weakref.ref(db)  # else a database that nobody holds would not be closed
        self._running = threading.Lock()
        self._settings: RetentionSettings | None = None
        self._room_until = 0
        """Bytes written up to which there is room for certain."""
        self._due = (_FOREVER, _FOREVER)
        """Time, or bytes written, from which on there may be something to do."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._starting = threading.RLock()  # a garbage collection inside may close the database
        self._interval: float | None = None
        self._thread: threading.Thread | None = None

    # --- settings ---

    @property
    def settings(self) -> RetentionSettings:
        """What is kept; at first everything."""
        if self._settings is None:
            stored = self._database().state(0).get(_KEY)
            self._adopt(RetentionSettings() if stored is None else _decode(stored))
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
        db = self._database()
        if archive_to is not None:
            check_apart(db.path, archive_directory(db.path, archive_to))
        db.state(0).write([FrameworkWrite(_KEY, _encode(settings))])
        with self._running:
            self._adopt(settings)
        return settings

    def _adopt(self, settings: RetentionSettings) -> None:
        self._settings = settings
        self._room_until = 0
        self._due = (0, 0) if settings.limited else (_FOREVER, _FOREVER)

    # --- beside every store ---

    def check_room(self) -> None:
        """Raise `QuotaExceededError` if the database is full, and to refuse then. Cheap.

        A batch that begins below the limit is stored whole.
        """
        settings = self.settings
        if settings.max_bytes is None or settings.when_full != "refuse":
            return
        written = self._written()
        if written >= self._room_until:
            live = sum(record.live_bytes for shard in self._database().shards for record in shard.generations())
            if live >= settings.max_bytes:
                self.stored()  # what is too old may go, and make room for the next
                raise QuotaExceededError(
                    f"the database holds {live:,} bytes of values, and may hold {settings.max_bytes:,}: "
                    "delete messages, drop generations, or raise the limit (retention, max_bytes)"
                )
            self._room_until = written + settings.max_bytes - live

    def stored(self) -> None:
        """Something was stored: work in the background if there may be something to do. Cheap."""
        time, written = self._due
        late = time < _FOREVER and self._database().clock() >= time
        if late or (written < _FOREVER and self._written() >= written):
            self._begin()

    # --- running ---

    def run(self, now: int | None = None) -> RetentionReport:
        """Rotate and drop what is due, and remove expired retained messages.

        ``now``: microseconds since the epoch; by default the present, by the database's clock.
        """
        db = self._database()
        now = db.clock() if now is None else now
        report = self._sweep(db, now)
        return attrs.evolve(report, expired=remove_expired(db, now))

    def start(self, interval: float) -> None:
        """Run every ``interval`` seconds in the background, until the database is closed.

        Without it, retention works in the background when something is stored: that is enough unless old
        messages must go though nothing new comes.
        """
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"interval is seconds above 0, not {interval!r}")
        self._interval = interval
        self._begin()

    def stop(self) -> None:
        """Return when nothing runs in the background any more, nor will. May be called twice."""
        with self._starting:
            self._stopping.set()
            self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _sweep(self, db: Database, now: int) -> RetentionReport:
        with self._running:
            settings, written = self.settings, self._written()
            rotated = None
            if _must_rotate(settings, self._generations(now)[-1], now):
                rotated = db.add_generation()
            archiving = settings.archive_to is not None
            generations = [one for one in self._generations(now) if not (archiving and one.archived)]
            outdated = _outdated(settings, generations, now)
            self._due = (now + _AGAIN, _FOREVER)  # should it fail
            gone = [one for one in outdated if self._let_go(db, settings, one.number)]
            numbers = tuple(one.number for one in gone)
            self._due = _due(settings, [one for one in generations if one not in outdated], now, written)
        return RetentionReport(
            rotated=rotated,
            dropped=() if archiving else numbers,
            archived=numbers if archiving else (),
            messages=sum(one.messages for one in gone),
            live_bytes=sum(one.live_bytes for one in gone),
            expired=0,
        )

    def _let_go(self, db: Database, settings: RetentionSettings, generation: int) -> bool:
        """Drop or archive a generation; return False if it was dropped before."""
        if settings.archive_to is None:
            return db.drop_generation(generation)
        from .exporting import archive

        archive(db, settings.archive_to, [generation])
        return True

    def _generations(self, now: int) -> list[_Generation]:
        """Return the live generations, oldest first."""
        shards = self._database().shards
        return _joined([{record.number: record for record in shard.generations()} for shard in shards], now)

    def _written(self) -> int:
        """Return the bytes of values written since the database was opened: live bytes never grow by more."""
        return sum(shard.counters.bytes for shard in self._database().shards)

    def _database(self) -> Database:
        db = self._db()
        if db is None:
            raise DatabaseClosedError("the database is closed")
        return db

    # --- in the background ---

    def _begin(self) -> None:
        self._wake.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._stopping.is_set():
                    self._thread = threading.Thread(target=self._work, name="topicstore-retention", daemon=True)
                    self._thread.start()

    def _work(self) -> None:
        going = True
        while going:
            try:
                going = self._run_when_due()
            except DatabaseClosedError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it must be shown; the next run may fare better
                self.failure = str(error) or type(error).__name__
                warnings.warn(f"background retention failed: {self.failure}", RuntimeWarning, stacklevel=1)

    def _run_when_due(self) -> bool:
        """Wait until it is woken, or its interval is over, and run; return False at the end."""
        woken = self._wake.wait(self._interval)
        self._wake.clear()
        db = self._db()
        if db is None or self._stopping.is_set():
            return False
        if woken:
            self._sweep(db, db.clock())
        else:
            self.run()
        self.failure = None
        return True


def _micros(seconds: float) -> int:
    return max(1, round(seconds * 1e6))


def _joined(by_shard: Sequence[Mapping[int, GenerationRecord]], now: int) -> list[_Generation]:
    """Return the generations that all shards have, oldest first, from their records by number."""
    found: list[_Generation] = []
    latest = now
    for number in sorted(set.intersection(*map(set, by_shard)), reverse=True):
        records = [of_shard[number] for of_shard in by_shard]
        found.append(
            _Generation(
                number=number,
                created=max(record.created for record in records),
                ended=max(_ended(record, latest, now) for record in records),
                messages=sum(record.messages for record in records),
                live_bytes=sum(record.live_bytes for record in records),
                archived=all(record.archive is not None for record in records),
            )
        )
        latest = min(latest, found[-1].created)
    return found[::-1]


def _ended(record: GenerationRecord, latest: int, now: int) -> int:
    """Return the time of the newest message of a shard's part of a generation.

    If that lies in the future, the time of its sealing; if that does too, ``latest``, by when another had followed.
    """
    if record.sealed is None or record.last_position is None:
        return now
    return next((time for time in (time_of(record.last_position), record.sealed) if time <= now), latest)


def _must_rotate(settings: RetentionSettings, current: _Generation, now: int) -> bool:
    """Say whether the current generation is old or large enough. An empty one goes on being used."""
    if not current.messages:
        return False
    every, most = settings.rotation, settings.drops_bytes
    # The distance, because a clock that was wrong may have noted a time in the future.
    old = every is not None and abs(now - current.created) >= every
    return old or (most is not None and current.live_bytes >= most // _PARTS_OF_BYTES)


def _outdated(settings: RetentionSettings, generations: Sequence[_Generation], now: int) -> list[_Generation]:
    """Return the sealed generations that must go: of those that are local, a run of the oldest."""
    oldest = 0 if settings.max_age is None else now - _micros(settings.max_age)
    most = settings.drops_bytes
    live = sum(generation.live_bytes for generation in generations)
    gone = []
    for generation in generations[:-1]:
        if generation.ended < oldest or (most is not None and live > most and not generation.archived):
            gone.append(generation)
            live -= generation.live_bytes
        elif not generation.archived:
            break
    return gone


def _due(settings: RetentionSettings, generations: Sequence[_Generation], now: int, written: int) -> tuple[int, int]:
    """Return from which time on, or bytes written, something may have to be done about these generations."""
    times = [_FOREVER]
    current, oldest = generations[-1], generations[0]
    if settings.rotation is not None:
        times.append((min(current.created, now) if current.messages else now) + settings.rotation)
    if settings.max_age is not None and oldest is not current:
        times.append(oldest.ended + _micros(settings.max_age) + 1)
    most = settings.drops_bytes
    if most is None:
        return min(times), _FOREVER
    live = sum(generation.live_bytes for generation in generations)
    return min(times), written + max(0, min(most - live, most // _PARTS_OF_BYTES - current.live_bytes))


def _encode(settings: RetentionSettings) -> bytes:
    max_age = None if settings.max_age is None else _micros(settings.max_age)
    rotate_every = None if settings.rotate_every is None else _micros(settings.rotate_every)
    version = _VERSION if settings.archive_to is None else _ARCHIVING_VERSION
    record = _Record(version, max_age, rotate_every, settings.max_bytes, settings.when_full, settings.archive_to)
    return add_checksum(_KEY, msgspec.msgpack.encode(record))


def _decode(stored: bytes) -> RetentionSettings:
    try:
        record = msgspec.msgpack.decode(strip_checksum(_KEY, stored), type=_Record)
    except (CorruptionError, msgspec.DecodeError) as bad:
        raise CorruptionError(str(bad), "shard 0, state: retention") from bad
    if record.version > _ARCHIVING_VERSION:
        newest = _ARCHIVING_VERSION
        raise NewerFormatError(f"the retention settings have version {record.version}; this reads up to {newest}")
    return RetentionSettings(
        max_age=None if record.max_age is None else record.max_age / 1e6,
        rotate_every=None if record.rotate_every is None else record.rotate_every / 1e6,
        max_bytes=record.max_bytes,
        when_full=record.when_full,
        archive_to=record.archive_to,
    )
