"""Retention by topic filter: which messages are deleted earlier or later than others, even after restarts and kills."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path

import attrs
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.lifecycle.retention import RetentionSettings
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.striking import Fault, striking
from topicstore_conformance.faults.threads import wait_until

SECOND = 1_000_000
FILTERS = {"debug/#": 10.0, "alarms/#": None, "+/day/#": 300.0}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["block", "wildcard_optimized"])
def db(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[ts.Database]:
    how = {"clock": clock, "monotonic": clock.monotonic, "auto_compact": False}
    with ts.open(tmp_path / "db", layout=request.param, shards=2, **how) as opened:
        opened.retention.stop()
        yield opened


def stored(db: ts.Database) -> set[str]:
    return {m.payload.decode() for topic_filter in ("#", "$SYS/#") for m in db.replay(topic_filter)}


def put(db: ts.Database, *topics: str) -> None:
    """Store a message in each topic; the payload is the topic and the clock's time."""
    now = db.clock()
    db.store([ts.Message(topic, f"{topic} {now}".encode(), f"client {n % 3}") for n, topic in enumerate(topics)])


# --- settings ---


def test_filters_are_stored_and_changed_as_a_whole(tmp_path: Path) -> None:
    """The filters are replaced as a whole: they stay if the argument is omitted, and None removes them."""
    with ts.open(tmp_path / "db") as db:
        wanted = db.retention.set(max_age=100, filters={"debug/#": timedelta(hours=1), "alarms/#": None})
        assert wanted.filters == {"debug/#": 3_600, "alarms/#": None}
    with ts.open(tmp_path / "db") as db:
        assert wanted == db.retention.settings
        assert wanted == db.retention.set(rotate_every=None)
        assert {"x": 1} == db.retention.set(filters={"x": 1}).filters
        assert RetentionSettings(max_age=100) == db.retention.set(filters=None)
    with ts.open(tmp_path / "db") as db:
        assert RetentionSettings(max_age=100) == db.retention.settings


@pytest.mark.parametrize("filters", [{"a/#/b": 1}, {"": 1}, {"a": 0}, {"a": -1}, {"a": "1"}, {1: 1}, ["a"], "a"])
def test_filters_that_are_none_are_refused(db: ts.Database, filters: object) -> None:
    with pytest.raises(ts.InvalidArgumentError):
        db.retention.set(filters=filters)  # type: ignore[arg-type]
    assert RetentionSettings() == db.retention.settings


# --- what goes ---


def test_what_matches_goes_earlier_or_later(db: ts.Database, clock: Clock) -> None:
    """A filter's messages are removed after the filter's age, or never if it has none; others after `max_age`."""
    db.retention.set(max_age=100, rotate_every=50, filters={"debug/#": 10, "alarms/#": None})
    put(db, "debug/a", "alarms/a", "plain/a", "$SYS/a")
    clock.now += 11 * SECOND
    report = db.retention.run()
    assert {"debug/#": 1} == report.deleted
    assert (None, ()) == (report.rotated, report.dropped)
    assert {f"alarms/a {START}", f"plain/a {START}", f"$SYS/a {START}"} == stored(db)
    clock.now += 90 * SECOND
    assert {"": 2} == db.retention.run().deleted
    assert {f"alarms/a {START}"} == stored(db)
    clock.now += 10**12
    db.retention.run(clock.now)
    assert {f"alarms/a {START}"} == stored(db)
    assert [] == db.verify().damages


def test_a_generation_of_which_nothing_is_left_goes(db: ts.Database, clock: Clock) -> None:
    """A generation is dropped once all its messages were deleted, and stays as long as a filter keeps one."""
    db.retention.set(max_age=100, rotate_every=10, filters={"alarms/#": None})
    for number in range(4):
        put(db, "plain/a", *(["alarms/a"] if number == 1 else []))
        clock.now += 11 * SECOND
        db.retention.run()
    clock.now += 101 * SECOND
    assert (1, 3, 4) == db.retention.run().dropped
    assert [2, 5] == [one.number for one in db.generations()]
    assert {f"alarms/a {START + 11 * SECOND}"} == stored(db)


def test_filters_that_others_overrule_are_named(db: ts.Database) -> None:
    """`DatabaseInfo.kept` states the longer time for messages that a wider filter keeps longer than their own."""
    db.retention.set(filters={"#": "30d", "debug/#": "1h", "debug/+": "2h", "alarms/#": "infinity"})
    said = db.info().kept[-1]
    assert "messages that match # are kept for 30 days" in said
    assert "messages that match debug/# are kept as long as those that match #" in said
    assert "messages that match debug/+ are kept as long as those that match #" in said
    assert "messages that match alarms/# are kept for ever" in said


def test_where_all_ages_end_a_generation_goes_as_a_whole(db: ts.Database, clock: Clock) -> None:
    """A generation is dropped as a whole after the longest age; messages with that age aren't deleted before."""
    db.retention.set(max_age=100, rotate_every=10, filters={"long/#": 200})
    put(db, "plain", "long/a")
    clock.now += 101 * SECOND
    assert {"": 1} == db.retention.run().deleted
    clock.now += 100 * SECOND
    report = db.retention.run()
    assert ({}, (1,)) == (report.deleted, report.dropped)


def test_filters_that_change_begin_at_the_oldest_again(db: ts.Database, clock: Clock) -> None:
    """After filters change, the next run checks all messages again."""
    db.retention.set(filters={"a/#": 10, "a/b": 50})
    put(db, "a/b", "a/c")
    clock.now += 20 * SECOND
    assert {"a/#": 1} == db.retention.run().deleted
    db.retention.set(filters={"a/#": 10})
    assert {"a/#": 1} == db.retention.run().deleted
    assert set() == stored(db)


def test_what_is_archived_is_left_alone(db: ts.Database, clock: Clock, tmp_path: Path) -> None:
    """Short-lived messages are deleted before archiving; archived messages aren't deleted."""
    db.retention.set(max_age=100, rotate_every=20, archive_to=str(tmp_path / "cold"), filters=FILTERS)
    put(db, "debug/a", "alarms/a", "plain")
    clock.now += 21 * SECOND
    assert {"debug/#": 1} == db.retention.run().deleted
    clock.now += 100 * SECOND
    assert (1,) == db.retention.run().archived
    put(db, "debug/b")
    clock.now += 500 * SECOND
    assert {"debug/#": 1} == db.retention.run().deleted
    assert {f"alarms/a {START}", f"plain {START}"} == stored(db)


def test_what_a_clock_ahead_stored_goes_by_the_time_it_was_sealed(db: ts.Database, clock: Clock) -> None:
    """Messages stored while the clock was ahead are deleted once their age has passed since the sealing."""
    db.retention.set(rotate_every=10, filters={"debug/#": 100})
    clock.jump(10**15)
    put(db, "debug/future")
    with pytest.warns(RuntimeWarning, match="ahead"):
        db.retention.run()
    clock.jump(-(10**15))
    put(db, "debug/present")
    clock.now += 50 * SECOND
    assert 3 == db.retention.run().rotated
    clock.now += 99 * SECOND
    db.retention.run()
    assert 2 == len(stored(db))
    clock.now += 2 * SECOND
    db.retention.run()
    assert set() == stored(db)


def test_a_clock_that_jumps_forward_deletes_nothing_early(db: ts.Database, clock: Clock) -> None:
    db.retention.set(filters={"debug/#": 100, "alarms/#": None})
    put(db, "debug/a")
    clock.jump(10**12)
    with pytest.warns(RuntimeWarning, match="ahead"):
        report = db.retention.run()
    assert {} == report.deleted
    assert any("the clock is" in reason for reason in report.why)
    clock.now += 90 * SECOND
    db.retention.run()
    assert 1 == len(stored(db))


def test_by_itself_it_waits_until_it_is_worth_the_work(db: ts.Database, clock: Clock) -> None:
    """In the background, messages are deleted up to a quarter of their age late, so that fewer runs are needed."""
    db.retention.set(filters={"debug/#": 100})
    looked = 0
    for step in range(80):
        put(db, "debug/a")
        clock.now += 5 * SECOND
        before = stored(db)
        db.retention._sweep(db.storage, None, at_once=False)
        there = stored(db)
        looked += before != there
        ages = sorted((clock.now - int(text.split()[1])) // SECOND for text in there)
        assert ages[-1] <= 100 + 25 + 5
        young = min(step + 1, 20)
        assert ages[:young] == list(range(5, 5 * young + 1, 5))
    assert looked <= 400 // 25


def test_it_works_by_itself_when_something_is_stored(tmp_path: Path, clock: Clock) -> None:
    """A store starts a retention run in the background when a message is 1.25 times as old as its filter's limit."""
    with ts.open(tmp_path / "db", clock=clock, monotonic=clock.monotonic) as db:
        db.retention.set(filters={"debug/#": 100})
        put(db, "debug/a")
        clock.now += 130 * SECOND
        put(db, "plain")
        wait_until(lambda: {f"plain {clock.now}"} == stored(db), "the message to be deleted")
        assert db.retention.failure is None


def test_damage_in_one_shard_keeps_no_other_from_its_work(
    db: ts.Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in one shard is raised after the other shards were processed, and the next run repeats that shard."""
    db.retention.set(filters={"debug/#": 10})
    db.store([ts.Message("debug/a", b"%d" % n, f"client {n}") for n in range(20)])
    mine = [n for n in range(20) if db.shard_of(f"client {n}") == 0]
    clock.now += 11 * SECOND

    def fails(*_: object) -> int:
        raise ts.CorruptionError("the checksum is wrong", "shard 0")

    with monkeypatch.context() as patched:
        patched.setattr(db.storage.shards[0].rewriter, "delete_local", fails)
        with pytest.raises(ts.CorruptionError):
            db.retention.run()
    assert {str(n) for n in mine} == stored(db)
    assert {"debug/#": len(mine)} == db.retention.run().deleted


# --- why ---


def test_a_run_reports_why_messages_stay(db: ts.Database, clock: Clock) -> None:
    """`why` says why something stays: no limit, no messages, the current generation, a generation's age, a filter."""
    assert db.retention.run().why == ("no limit is set, so nothing goes",)
    db.retention.set(max_bytes=10**9)
    assert "messages are refused" in db.retention.run().why[0]
    db.retention.set(max_age=100, filters={"debug/#": 10})
    assert db.retention.run().why == ("there are no messages",)
    put(db, "debug/a", "plain")
    current, rule = db.retention.run().why
    assert "generation 1: it is the current one: another begins at 2023-11-14T22:13:45Z" in current
    assert "what matches debug/#: a run deletes what is older than 10 s" in rule
    clock.now += 30 * SECOND
    sealed, *_ = db.retention.run().why
    assert "generation 1: it goes as a whole when its newest message is older than 100 s" in sealed
    assert "from 2023-11-14T22:15:01Z on" in sealed


def test_the_outlook_comes_true(db: ts.Database, clock: Clock) -> None:
    """A generation is dropped at the time that `outlook` returns, and not before."""
    db.retention.set(max_age=100, rotate_every=20)
    put(db, "plain")
    clock.now += 21 * SECOND
    db.retention.run()
    first, current = db.retention.outlook()
    assert (1, 1, START + 100 * SECOND + 1) == (first.generation, first.messages, first.when)
    assert (2, None) == (current.generation, current.when)
    assert first.when is not None
    assert () == db.retention.run(first.when - 1).dropped
    assert (1,) == db.retention.run(first.when).dropped


# --- a model ---

TOPICS = ["debug/a", "debug/day/b", "alarms/a", "alarms/day/a", "plain", "plain/day/x", "$SYS/x", "debug/$x"]
LENGTHS = st.none() | st.integers(1, 200)


@attrs.define
class Model:
    """The stored messages, and the settings that decide which of them must stay."""

    max_age: float | None
    filters: Mapping[str, float | None]
    times: dict[str, tuple[str, int]] = attrs.field(factory=dict)
    """The topic and time of each payload."""

    def age(self, topic: str) -> float | None:
        """Return the seconds for which messages of a topic stay, or None for ever."""
        found = [length for name, length in self.filters.items() if ts.matches(name, topic)]
        if not found:
            return self.max_age
        return None if None in found else max(length for length in found if length is not None)

    def must_stay(self, now: int) -> set[str]:
        """Return the payloads of messages whose topic's age limit hasn't passed."""
        return {text for text, (topic, time) in self.times.items() if not self._old(topic, time, now)}

    def must_go(self, now: int) -> set[str]:
        """Return the payloads that are too old, except those with the longest age, which go with their generation."""
        ages = [self.max_age, *self.filters.values()]
        longest = None if None in ages else max(age for age in ages if age is not None)
        return {
            text
            for text, (topic, time) in self.times.items()
            if self._old(topic, time, now) and self.age(topic) != longest and (self.filters or longest is None)
        }

    def _old(self, topic: str, time: int, now: int) -> bool:
        age = self.age(topic)
        return age is not None and now - time > age * SECOND


FAULTS = st.builds(Fault, st.sampled_from(["full", "before", "after"]), st.sampled_from([1, 1, 2, 3, 5]))
STEP = st.one_of(
    st.tuples(st.just("store"), st.lists(st.sampled_from(TOPICS), min_size=1, max_size=6)),
    st.tuples(st.just("wait"), st.integers(1, 150)),
    st.tuples(st.just("run"), st.none()),
    st.tuples(
        st.just("set"), st.dictionaries(st.sampled_from([*FILTERS, "#", "plain", "$SYS/x"]), LENGTHS, max_size=4)
    ),
    st.tuples(st.sampled_from(["reopen", "seal", "compact", "sweep"]), st.none()),
    *[st.tuples(st.just("struck"), st.tuples(st.integers(1, 150), FAULTS))] * 2,
)


def run_struck(db: ts.Database, fault: Fault) -> None:
    """Run retention with a fault, and replace the database with the state after the fault."""
    killed = db.path.parent / "killed"
    with striking(fault, [shard.writer.engine for shard in db.storage.shards], db.path, killed):
        db.retention.run()
    db.close()
    if fault.kills:
        shutil.rmtree(db.path)
        killed.rename(db.path)


@settings(COSTLY, max_examples=tries(30, 200))
@given(
    max_age=LENGTHS,
    rotate_every=LENGTHS,
    filters=st.sampled_from([{}, FILTERS]),
    steps=st.lists(STEP, min_size=3, max_size=25),
)
@pytest.mark.parametrize(
    "layout", ["block", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("skipstream", "reference"))]
)
def test_exactly_what_is_too_old_goes(
    layout: str,
    max_age: int | None,
    rotate_every: int | None,
    filters: Mapping[str, float | None],
    steps: list[tuple[str, object]],
) -> None:
    """A run deletes exactly the messages that are too old, except those that go with their generation.

    A second run does nothing. Filters change, generations are sealed and compacted, databases are reopened, and runs
    are killed or find the disk full.
    """
    clock, model, numbers = Clock(), Model(max_age, filters), count()
    with quick_directory() as directory:

        def opened() -> ts.Database:
            how = {"clock": clock, "monotonic": clock.monotonic, "auto_compact": False}
            found = ts.open(Path(directory) / "db", layout=layout, shards=2, **how)
            found.retention.stop()
            return found

        db = opened()
        db.retention.set(max_age=max_age, rotate_every=rotate_every, filters=filters)
        for what, how in [*steps, ("run", None)]:
            if what == "store":
                assert isinstance(how, list)
                rows = [ts.Message(topic, b"%d" % next(numbers), f"c{n}") for n, topic in enumerate(how)]
                db.store(rows)
                model.times |= {m.payload.decode(): (m.topic, clock.now) for m in rows}
                clock.now += 1
            elif what == "wait":
                assert isinstance(how, int)
                clock.now += how * SECOND
            elif what == "set":
                assert isinstance(how, dict)
                model.filters = db.retention.set(filters=how).filters
            elif what == "reopen":
                db.close()
                db = opened()
            elif what in ("seal", "compact"):
                {"seal": db.add_generation, "compact": db.compact}[what]()
            elif what == "struck":
                assert isinstance(how, tuple)
                clock.now += how[0] * SECOND
                run_struck(db, how[1])
                db = opened()
            elif what == "sweep":
                db.retention._sweep(db.storage, None, at_once=False)
            else:
                db.retention.run()
                there = stored(db)
                assert model.must_stay(clock.now) <= there
                assert not there & model.must_go(clock.now)
                again = db.retention.run()
                assert (None, (), {}) == (again.rotated, again.dropped, again.deleted)
            # filters that were set later might have kept the deleted message
            there = stored(db)
            assert model.must_stay(clock.now) <= there or what == "set"
            model.times = {text: row for text, row in model.times.items() if text in there}
        assert [] == db.verify().damages
        db.close()
