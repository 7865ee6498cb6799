"""Retention by age and by bytes: at any time, after kills, and with wrong clocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.errors import QuotaExceededError
from topicstore.lifecycle import retention
from topicstore.lifecycle.retention import Retention, RetentionSettings
from topicstore.runtime.locks import owned
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.generations import drop_generation
from topicstore.storage.quota import removing_bytes
from topicstore.storage.storage import Storage
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import PATIENCE, begin, running, wait_until

SECOND = 1_000_000
DAY = 86_400 * SECOND


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "rocksdb"])
def db(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    how = {"clock": clock, "monotonic": clock.monotonic}
    with ts.open(tmp_path / "db", backend=request.param, shards=2, **how) as opened:
        yield opened


@pytest.fixture
def quiet(db: ts.Database) -> ts.Database:
    """Return a database without retention in the background."""
    db.retention.stop()
    return db


def message(text: str, client_id: str = "me") -> ts.Message:
    return ts.Message("a/b", text.encode(), client_id)


def stored(db: ts.Database) -> list[str]:
    return [one.payload.decode() for one in db.replay("#", order="time")]


def live_bytes(db: ts.Database) -> int:
    return sum(generation.live_bytes for generation in db.generations())


# --- settings ---


def test_what_is_set_while_it_is_first_read_holds(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If settings change while they are read for the first time, the old values don't replace the new ones."""
    with ts.open(tmp_path / "db", clock=clock) as db:
        db.retention.set(max_age=1.0)
    with ts.open(tmp_path / "db", clock=clock) as db:
        setting = []

        def decode(key: bytes, stored: bytes) -> RetentionSettings:
            """Decode the stored settings, while another thread sets others."""
            older = whole(key, stored)
            setting.append(begin(lambda: db.retention.set(max_age=2.0)))
            if not owned(db.retention._reading):  # the other thread isn't blocked
                setting[0].result(PATIENCE)
            return older

        whole = retention._decode
        monkeypatch.setattr(retention, "_decode", decode)
        assert db.retention.settings.max_age is not None
        setting[0].result(PATIENCE)
        assert 2.0 == db.retention.settings.max_age


def test_what_is_not_named_stays_and_none_lifts_a_limit(db: ts.Database) -> None:
    """`set` changes only the given limits, and None removes one; durations can be a timedelta."""
    set_ = db.retention.set(max_age=timedelta(days=1), rotate_every=timedelta(hours=1), max_bytes=7, when_full="drop")
    assert RetentionSettings(max_age=86_400, rotate_every=3_600, max_bytes=7, when_full="drop") == set_
    assert set_ == db.retention.set()
    assert RetentionSettings(max_age=86_400, max_bytes=7, when_full="drop") == db.retention.set(rotate_every=None)
    assert RetentionSettings() == db.retention.set(max_age=None, max_bytes=None, when_full="refuse")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_age": 0},
        {"max_age": "1"},
        {"rotate_every": -1},
        {"max_age": timedelta(0)},
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"when_full": "x"},
    ],
)
def test_settings_that_are_none_are_refused(db: ts.Database, arguments: dict[str, object]) -> None:
    with pytest.raises(ts.InvalidArgumentError):
        db.retention.set(**arguments)  # type: ignore[arg-type]
    assert RetentionSettings() == db.retention.settings


def test_damaged_settings_are_an_error(db: ts.Database) -> None:
    db.state(0).write([FrameworkWrite(b"\1ps", b"damaged")])
    with pytest.raises(ts.CorruptionError, match="retention"):
        db.retention.run()


# --- age ---


def test_messages_go_by_age_never_early_and_not_much_late(quiet: ts.Database, clock: Clock) -> None:
    """A message stays for `max_age`, and longer at most by a generation's length and the pause between runs."""
    db = quiet
    db.retention.set(max_age=100, rotate_every=20)
    times: dict[str, int] = {}
    for step in range(60):
        times[f"{step}"] = clock.now
        db.store([message(f"{step}", f"client {step}")])
        clock.now += 7 * SECOND
        db.retention.run()
        there = set(stored(db))
        ages = {text: (clock.now - time) / SECOND for text, time in times.items()}
        assert {text for text, age in ages.items() if age < 100} <= there
        assert there <= {text for text, age in ages.items() if age <= 100 + 20 + 7 + 7}
    assert len(db.generations()) <= 8


def test_an_empty_generation_is_used_on(quiet: ts.Database, clock: Clock) -> None:
    """An empty generation is not rotated, so an idle database gets no new generations."""
    db = quiet
    db.retention.set(max_age=100, rotate_every=10)
    for _ in range(5):
        clock.now += 1_000 * SECOND
        assert db.retention.run().rotated is None
    assert 1 == len(db.generations())


def test_a_given_time_counts(quiet: ts.Database, clock: Clock) -> None:
    """A retention run with `now` acts as if that were the current time."""
    db = quiet
    db.retention.set(max_age=100)
    db.store([message("1")])
    assert 2 == db.retention.run(clock.now + 99 * SECOND).rotated
    assert () == db.retention.run(clock.now + 99 * SECOND).dropped
    assert (1,) == db.retention.run(clock.now + 101 * SECOND).dropped


@pytest.mark.parametrize("how", ["run", "outlook"])
def test_a_given_time_is_written_as_everywhere(quiet: ts.Database, how: str) -> None:
    """`now` can be microseconds, a datetime with a time zone, or text; a number of seconds is refused."""
    call = getattr(quiet.retention, how)
    assert call("2030-01-01") == call(datetime(2030, 1, 1, tzinfo=UTC)) == call(1_893_456_000_000_000)
    with pytest.raises(ts.InvalidArgumentError, match="seems to be seconds"):
        call(1_893_456_000)


def test_imported_history_goes_by_its_own_times(tmp_path: Path, clock: Clock) -> None:
    """With positions from the messages' own times, the age of imported messages counts from these times."""
    with ts.open(tmp_path / "db", timestamps="message", clock=clock) as db:
        db.retention.stop()
        db.retention.set(max_age=100)
        db.store([ts.Message("a", b"old", timestamp=START - 10**12)])
        db.add_generation()
        db.store([ts.Message("a", b"new", timestamp=START - 10 * SECOND)])
        assert (1,) == db.retention.run().dropped
        assert ["new"] == stored(db)


def test_a_clock_that_was_ahead_does_not_keep_messages_for_ever(quiet: ts.Database, clock: Clock) -> None:
    """Messages stored while the clock was ahead are dropped `max_age` after their generation was sealed."""
    db = quiet
    db.retention.set(max_age=100, rotate_every=10)
    clock.jump(10**15)
    db.store([message("future")])
    with pytest.warns(RuntimeWarning, match="ahead"):
        assert 2 == db.retention.run().rotated
    clock.jump(SECOND - 10**15)
    db.store([message("present")])
    assert 3 == db.retention.run().rotated
    assert ["future", "present"] == stored(db)
    for _ in range(3):
        clock.now += 50 * SECOND
        db.retention.run()
    assert [] == stored(db)


def test_a_clock_that_was_behind_drops_nothing_early(quiet: ts.Database, clock: Clock) -> None:
    """If the clock was set to 1970 and back, no message is dropped before its age."""
    db = quiet
    db.retention.set(max_age=100, rotate_every=10)
    db.store([message("1")])
    clock.jump(1_000 - START)
    db.retention.run()
    db.store([message("2")])
    clock.jump(START - 1_000)
    clock.now = START + 50 * SECOND
    with pytest.warns(RuntimeWarning, match="ahead"):
        assert () == db.retention.run().dropped
    for _ in range(2):
        assert () == db.retention.run().dropped
    clock.now = START + 149 * SECOND
    assert () == db.retention.run().dropped
    assert ["1", "2"] == stored(db)
    clock.now = START + 151 * SECOND
    db.retention.run()
    db.retention.run()
    assert [] == stored(db)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("settings", [{"max_age": 100}, {"filters": {"a/#": 100}}])
def test_what_is_stored_while_the_clock_is_set_back_stays_for_its_age(
    quiet: ts.Database, clock: Clock, settings: dict[str, Any], seen: bool
) -> None:
    """Messages stored while the clock was behind stay for `max_age` after its correction, even if no run noticed."""
    db = quiet
    db.retention.set(rotate_every=1, **settings)
    clock.jump(-DAY)
    if seen:
        db.retention.run()
    db.store([message("1")])
    clock.jump(DAY)
    with pytest.warns(RuntimeWarning, match="ahead"):
        db.retention.run()
    clock.now += 99 * SECOND
    db.retention.run()
    assert ["1"] == stored(db)
    clock.now += 2 * SECOND
    db.retention.run()
    assert [] == stored(db)


def test_a_clock_that_was_set_back_still_rotates(quiet: ts.Database, clock: Clock) -> None:
    """Generations begun with the clock slightly ahead are rotated on time; far ahead, they are rotated at once."""
    db = quiet
    db.retention.set(rotate_every=10)
    for ahead, waits in ((5, True), (15, False)):
        clock.jump(ahead * SECOND)
        db.add_generation()
        clock.jump(-ahead * SECOND)
        db.store([message("1")])
        assert waits == (db.retention.run().rotated is None)
    assert db.retention._due[0] <= clock.monotonic() + 10 * SECOND


def generation_a_day(db: ts.Database, clock: Clock, days: int) -> None:
    """Store a message a day, each in its own generation."""
    for day in range(days):
        db.store([message(f"{day}")])
        clock.now += DAY
        db.add_generation()


def test_a_clock_that_jumps_forward_drops_nothing_early(quiet: ts.Database, clock: Clock) -> None:
    """After the clock jumps forward, a run warns once and drops only by elapsed time, until the clock is corrected."""
    db = quiet
    db.retention.set(max_age=7 * DAY // SECOND)
    generation_a_day(db, clock, 5)
    clock.jump(40 * DAY)
    with pytest.warns(RuntimeWarning, match="40 days ahead"):
        assert () == db.retention.run().dropped
    assert db.info().clock_ahead == 40 * DAY / SECOND
    for _ in range(3):
        clock.now += DAY
        db.retention.run()
    assert ["1", "2", "3", "4"] == stored(db)
    clock.jump(-40 * DAY)
    db.retention.run()
    assert ["1", "2", "3", "4"] == stored(db)
    assert db.info().clock_ahead == 0
    clock.now += DAY
    db.retention.run()
    assert ["2", "3", "4"] == stored(db)


def test_a_clock_that_was_set_right_counts_after_the_age(quiet: ts.Database, clock: Clock) -> None:
    """A corrected clock is trusted after `max_age` has passed, so that messages from 1970 are dropped at last."""
    db = quiet
    db.retention.set(max_age=100, rotate_every=10)
    db.store([message("before")])
    clock.jump(10**15)
    db.store([message("after")])
    with pytest.warns(RuntimeWarning, match="ahead"):
        db.retention.run()
    clock.now += 99 * SECOND
    db.store([message("later")])
    db.retention.run()
    assert ["before", "after", "later"] == stored(db)
    clock.now += 2 * SECOND
    db.retention.run()
    db.retention.run()
    assert ["later"] == stored(db)
    assert db.info().clock_ahead == 0


def test_a_second_jump_begins_its_own_time(quiet: ts.Database, clock: Clock) -> None:
    """After a second jump, `max_age` must pass again before the clock is trusted."""
    db = quiet
    db.retention.set(max_age=100)
    db.store([message("1")])
    db.add_generation()
    for _ in range(2):
        clock.jump(10**12)
        with pytest.warns(RuntimeWarning, match="ahead"):
            db.retention.run()
        clock.now += 49 * SECOND
    db.retention.run()
    assert ["1"] == stored(db)


def test_the_clock_that_a_run_is_given_or_that_is_found_at_opening_is_trusted(tmp_path: Path, clock: Clock) -> None:
    """The clock's time at opening, and a time that is passed to `run`, are trusted."""
    with ts.open(tmp_path / "db", clock=clock, monotonic=clock.monotonic) as db:
        db.retention.stop()
        db.retention.set(max_age=7 * DAY // SECOND)
        generation_a_day(db, clock, 3)
        assert (1,) == db.retention.run(clock.now + 5 * DAY).dropped
    clock.jump(6 * DAY)
    with ts.open(tmp_path / "db", clock=clock, monotonic=clock.monotonic) as db:
        db.retention.stop()
        assert (2,) == db.retention.run().dropped


# --- bytes ---


def test_a_full_database_refuses(db: ts.Database) -> None:
    """A full database refuses messages, but not state or reads, until there is room."""
    db.retention.set(max_bytes=20_000)
    asking = ts.Properties(user_properties=(("topicstore-persist", "1"),))
    while live_bytes(db) < 20_000:
        db.store([ts.Message("a", bytes(range(256)) * 2, "me")])
    assert live_bytes(db) < 22_000
    count = len(stored_bytes := [one.payload for one in db.replay("#")])
    for call in (db.store, db.publish):
        with pytest.raises(QuotaExceededError):
            call([ts.Message("a", b"", properties=asking)])
    assert stored_bytes == [one.payload for one in db.replay("#")]
    assert count > 5
    db.store([], state={0: [ts.StateWrite(b"z", b"1")]})
    db.publish([ts.Message("a", b"live"), ts.Message("b", b"retained", retain=True)])
    assert (b"1", [b"retained"]) == (db.state(0).get(b"z"), [m.payload for m in db.retained("#")])
    db.add_generation()
    db.drop_generation(1)
    db.store([message("again")])
    assert ["again"] == stored(db)


def test_a_limit_that_is_raised_makes_room(db: ts.Database) -> None:
    db.store([message("1")])
    db.retention.set(max_bytes=1)
    with pytest.raises(QuotaExceededError):
        db.store([message("2")])
    db.retention.set(max_bytes=10_000)
    db.store([message("2")])
    assert ["1", "2"] == stored(db)


def test_deleting_makes_room(db: ts.Database) -> None:
    db.store([message("1", f"client {n}") for n in range(100)])
    db.retention.set(max_bytes=live_bytes(db))
    with pytest.raises(QuotaExceededError):
        db.store([message("2")])
    db.delete("#")
    db.store([message("2")])
    assert ["2"] == stored(db)


def test_a_full_database_drops_the_oldest(quiet: ts.Database) -> None:
    """After each run the newest messages remain, within `max_bytes` and above half of it."""
    db = quiet
    db.retention.set(max_bytes=40_000, when_full="drop")
    for number in range(200):
        db.store([ts.Message("a", b"%d " % number + bytes(range(256)) * 2, "me")])
        db.retention.run()
        assert live_bytes(db) <= 40_000
    numbers = [int(one.payload.split()[0]) for one in db.replay("#", order="time")]
    assert list(range(numbers[0], 200)) == numbers
    assert live_bytes(db) > 20_000


@settings(COSTLY, max_examples=tries(20, 100))
@given(
    max_age=st.none() | st.integers(1, 300),
    rotate_every=st.none() | st.integers(1, 300),
    max_bytes=st.none() | st.integers(500, 5_000),
    steps=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3)), min_size=1, max_size=25),
)
def test_whatever_is_set_a_suffix_stays(
    max_age: int | None, rotate_every: int | None, max_bytes: int | None, steps: list[tuple[int, int]]
) -> None:
    """Runs remove only the oldest messages. Young ones stay if `max_bytes` allows it, and a second run does nothing."""
    clock = Clock()
    with ts.open("nowhere", backend="memory", layout="reference", clock=clock) as db:
        db.retention.stop()
        db.retention.set(max_age=max_age, rotate_every=rotate_every, max_bytes=max_bytes, when_full="drop")
        times: list[int] = []
        for seconds, count in steps:
            db.store([message(f"{len(times) + n}") for n in range(count)])
            times += [clock.now] * count
            clock.now += seconds * SECOND
            db.retention.run()
            again = db.retention.run()
            assert (None, ()) == (again.rotated, again.dropped)
            there = [int(text) for text in stored(db)]
            assert list(range(len(times) - len(there), len(times))) == there
            if max_bytes is None:
                young = [n for n, time in enumerate(times) if max_age is None or clock.now - time <= max_age * SECOND]
                assert set(young) <= set(there)
            else:
                assert live_bytes(db) <= max_bytes


# --- by itself ---


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when retention has dropped a generation."""
    event = threading.Event()

    def tell(storage: Storage, generation: int, *, remove: bool) -> bool:
        done = drop_generation(storage, generation, remove=remove)
        event.set()
        return done

    monkeypatch.setattr("topicstore.lifecycle.retention.drop_generation", tell)
    return event


def test_it_works_by_itself_when_something_is_stored(db: ts.Database, dropped: threading.Event) -> None:
    """Retention runs in the background after stores; without a limit there is no thread."""
    db.store([message("0")])
    assert db.retention._task._thread is None
    db.retention.set(max_bytes=10_000, when_full="drop")

    def dropped_after_storing() -> bool:
        db.store([ts.Message("a", bytes(100), "me")])
        return dropped.is_set()

    wait_until(dropped_after_storing, "a generation to be dropped")
    assert db.retention.failure is None


def test_it_works_at_intervals_where_nothing_is_stored(db: ts.Database, clock: Clock, dropped: threading.Event) -> None:
    """Retention runs at intervals, even without stores."""
    db.retention.set(max_age=100)
    db.store([message("1")])
    db.add_generation()
    clock.now += 200 * SECOND
    db.retention.start(0.001)
    assert dropped.wait(PATIENCE)
    assert [] == stored(db)


def test_closing_waits_for_it(tmp_path: Path, clock: Clock) -> None:
    """Closing waits for the background thread, without a warning."""
    with ts.open(tmp_path / "db", backend="memory", clock=clock) as db:
        db.retention.set(max_age=100)
        db.retention.start(0.001)
        thread = db.retention._task._thread
    assert thread is not None
    assert not thread.is_alive()
    assert db.retention.failure is None
    with pytest.raises(ts.DatabaseClosedError):
        db.retention.run()


def test_a_failure_is_reported(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the background is reported as a warning, and the database stays usable."""
    told = threading.Event()
    monkeypatch.setattr("topicstore.runtime.background.warnings.warn", lambda *_, **__: told.set())
    db.state(0).write([FrameworkWrite(b"\1ps", b"damaged")])
    db.retention.start(10 * PATIENCE)
    assert told.wait(PATIENCE)
    assert "checksum" in (db.retention.failure or "")


# --- kills ---

KILLED = """
import topicstore as ts, topicstore.lifecycle.retention
path, where = arguments
now = [1_700_000_000_000_000]
db = ts.open(path, shards=3, clock=lambda: now[0])
for n in range(3):
    db.store([ts.Message("a", b"%d" % n, f"client {i}") for i in range(20)])
    db.add_generation()
    now[0] += 60_000_000
db.store([ts.Message("a", b"3", f"client {i}") for i in range(20)])
now[0] += 60_000_000
counts(*{
    "while rotating": (db.storage.shards[2].writer, "commit_locked", lambda pending: pending.install),
    "before dropping": (topicstore.lifecycle.retention, "drop_generation"),
    "between shards": (db.storage.shards[1].writer, "commit_locked", lambda pending: pending.install),
    "before removing": (db.storage.shards[0].generations, "remove_dropped"),
}[where])
db.retention.set(max_age=100, rotate_every=50)
db.retention.run()
"""


@pytest.mark.parametrize("where", ["while rotating", "before dropping", "between shards", "before removing"])
def test_a_run_that_was_killed_is_made_up_for(tmp_path: Path, run_until: Callable[..., object], where: str) -> None:
    """If a run was killed, the next run completes it, and no other message is lost."""
    run_until((1, "before"), KILLED, tmp_path / "db", where)
    with ts.open(tmp_path / "db", clock=Clock(START + 240 * SECOND)) as db:
        db.retention.run()
        assert ["3"] * 20 == stored(db)
        assert [] == db.verify().damages
        again = db.retention.run()
        assert (None, ()) == (again.rotated, again.dropped)


# --- when dropping is behind ---


@pytest.mark.parametrize("behind", ["dropping", "removing"])
def test_the_limit_on_bytes_holds_however_far_the_background_is_behind(
    db: ts.Database, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    """However far the background lags, the database exceeds `max_bytes` by at most half of `max_bytes` and a batch."""

    def held() -> int:
        live = sum(record.live_bytes for shard in db.storage.shards for record in shard.generations.listed())
        return live + removing_bytes(db.storage.shards)

    limit, batch = 100_000, [ts.Message("a/b", random.Random(3).randbytes(5_000), "me")]
    if behind == "dropping":  # the thread isn't woken, and space is reclaimed only when the database is closed
        monkeypatch.setattr(db.retention._task, "wake", lambda: None)
        monkeypatch.setattr(retention, "reclaim_removed", lambda _: db.retention._reclaiming.stopping.wait(PATIENCE))
    else:  # dropped messages are removed only once a store waits for space

        def remove_dropped(storage: Storage) -> None:
            wait_until(
                lambda: running(Retention._make_room) or db.retention._removal.stopping.is_set() or len(done) == 100,
                "a store to wait",
            )
            remove(storage)

        remove = retention.remove_dropped
        monkeypatch.setattr(retention, "remove_dropped", remove_dropped)
    db.retention.set(max_bytes=limit, when_full="drop")
    done: list[int] = []
    for _ in range(100):
        db.store(batch)
        # read under the lock, because a drop moves bytes from one count to the other
        done.append(db.storage.locked(held))
    assert max(done) <= limit + limit // 2 + 2 * sum(len(one.payload) for one in batch)
    assert db.retention.failure is None
