"""Replays by the messages' own times: exact for late messages, and reading few messages outside the range."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.engine import STATE
from topicstore.shard import zones
from topicstore.shard.writer import PendingWrite
from topicstore.storage.reading.pages import ReplayPlace
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import Clock

SECOND = 1_000_000
START = 1_700_000_000 * SECOND
PAIRS: list[Any] = [("memory", "wildcard_optimized", {"epoch_bits": 10}), ("rocksdb", "block", {})]
"""A layout with epochs in memory, and one without epochs on a persistent backend."""
OTHERS = [
    ("memory", "reference"),
    ("memory", "block"),
    ("leveldb", "skipstream"),
    ("leveldb", "block"),
    ("rocksdb", "skipstream"),
]


@pytest.fixture
def small_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use zones of five messages."""
    monkeypatch.setattr(zones, "SIZE", 5)


# --- exact --------------------------------------------------------------------------------

times = st.integers(0, 60).map(lambda minute: START + minute * 60 * SECOND)
some = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), times), min_size=1, max_size=9)
steps = st.one_of(
    st.tuples(st.just("store"), some),
    st.tuples(st.just("store"), some),
    st.tuples(st.just("delete"), st.sampled_from("ab")),
    st.tuples(st.just("delete between"), st.tuples(times, times)),
    st.tuples(st.sampled_from(["generation", "drop", "compact", "reopen"]), st.none()),
)
queries = st.lists(st.tuples(st.sampled_from(["#", "a", "+"]), times, times), min_size=1, max_size=4)


@attrs.define
class History:
    """A database, and a plain list of the messages that it must hold."""

    path: Path
    arguments: dict[str, Any]
    db: ts.Database
    held: list[tuple[int, ts.Message]] = attrs.field(factory=list)
    """Messages with their generations."""
    stored: int = 0

    def step(self, what: str, argument: Any) -> None:
        """Apply a step to the database and to the list."""
        db, generations = self.db, self.db.generations()
        match what:
            case "store":
                new = [
                    ts.Message(topic, b"%d" % (self.stored + number), client, timestamp=time)
                    for number, (topic, client, time) in enumerate(argument)
                ]
                self.stored += len(new)
                db.store(new)
                self.held += [(generations[-1].number, message) for message in new]
            case "delete":
                db.delete(argument)
                self.held = [(number, m) for number, m in self.held if m.topic != argument]
            case "delete between":
                start, until = argument
                there = [
                    (number, m) for number, m in self.held if not (m.topic == "b" and start <= m.timestamp < until)
                ]
                by: Any = "position" if db.manifest.timestamps == "message" and self.stored % 2 else "timestamp"
                assert len(self.held) - len(there) == db.delete("b", start, until, by=by)
                self.held = there
            case "generation":
                db.add_generation()
            case "drop" if len(generations) > 1:
                db.drop_generation(generations[0].number)
                self.held = [(number, m) for number, m in self.held if number != generations[0].number]
            case "compact":
                db.compact()
            case "reopen" if self.arguments["backend"] != "memory":
                db.close()
                self.db = ts.open(self.path)

    def check(self, db: ts.Database, topic_filter: str, start: int, until: int) -> None:
        """Compare all kinds of replay with the list; with `timestamps="message"`, also replays without `by`."""
        for how in ({"by": "timestamp"}, {}) if db.manifest.timestamps == "message" else ({"by": "timestamp"},):
            self.check_by(db, topic_filter, {"start": start, "until": until, **how})

    def check_by(self, db: ts.Database, topic_filter: str, bounds: dict[str, Any]) -> None:
        start, until, by = bounds["start"], bounds["until"], bounds.get("by", "position")
        everything = list(db.replay(topic_filter, order="time"))
        wanted = [m for m in everything if start <= m.timestamp < until]
        assert sorted(m.payload for m in wanted) == sorted(
            m.payload for _, m in self.held if (topic_filter != "a" or m.topic == "a") and start <= m.timestamp < until
        )
        assert wanted == list(db.replay(topic_filter, order="time", **bounds))
        assert sorted(wanted, key=str) == sorted(db.replay(topic_filter, batch_size=3, **bounds), key=str)
        assert wanted[::-1] == list(db.replay(topic_filter, reverse=True, **bounds))
        assert wanted[:-4:-1] == list(db.replay(topic_filter, reverse=True, limit=3, **bounds))
        assert wanted[:3] == list(db.replay(topic_filter, order="time", limit=3, **bounds))
        by_timestamp, sort = sorted(wanted, key=lambda m: m.timestamp), {"order": "timestamp", **bounds}
        assert by_timestamp == list(db.replay(topic_filter, **sort))
        assert by_timestamp[::-1] == list(db.replay(topic_filter, reverse=True, batch_size=3, **sort))
        assert by_timestamp[:2] == list(db.replay(topic_filter, limit=2, **sort))
        assert by_timestamp[:-3:-1] == list(db.replay(topic_filter, reverse=True, limit=2, batch_size=1, **sort))
        assert len(wanted) == sum(batch.num_rows for batch in db.replay_arrow(topic_filter, **bounds))
        assert len(wanted) == db.explain(topic_filter, **bounds).messages
        for reverse in (False, True):
            place, found = ReplayPlace.beginning(db.storage, topic_filter, start, until, by=by, reverse=reverse), []
            for _ in range(len(wanted) + 1):  # pages of one message each
                page = next(ReplayPlace.from_bytes(place.to_bytes()).batches(db.storage, 1), None)
                if page is not None:
                    found += page[:1].to_messages()
                    place = place.after(page[:1])
            assert found == (wanted[::-1] if reverse else wanted)


@pytest.mark.usefixtures("small_zones")
@pytest.mark.parametrize(
    ("backend", "layout", "options"), [*PAIRS, *(pytest.param(*pair, {}, marks=pytest.mark.slow) for pair in OTHERS)]
)
@pytest.mark.parametrize("timestamps", ["commit", "message"])
def test_any_history(backend: str, layout: str, options: dict[str, Any], timestamps: str) -> None:
    """After any history of late messages, generations, deletes and openings, time ranges are exact."""
    need(backend)

    @settings(COSTLY, max_examples=tries(6, 60))
    @given(st.lists(steps, min_size=1, max_size=8), queries)
    def any_history(history: list[tuple[str, Any]], asked: list[tuple[str, int, int]]) -> None:
        how = {"backend": backend, "layout": layout, "shards": 2, "timestamps": timestamps, "late": "lift"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "db")
            both = History(path, how, ts.open(path, options={layout: options}, auto_compact=False, **how))
            for step in history:
                both.step(*step)
            for query in asked:
                both.check(both.db, *query)
            both.db.close()
            if backend != "memory":
                with ts.open(path, mode="r") as db:
                    both.check(db, *asked[0])

    any_history()


@pytest.mark.parametrize(("backend", "layout", "options"), [*PAIRS, ("leveldb", "skipstream", {})])
def test_more_messages_of_one_microsecond_than_positions_have(
    tmp_path: Path, backend: str, layout: str, options: dict[str, Any]
) -> None:
    """If one microsecond has more messages than positions, all are found and deleted by their own time.

    That also holds after the database was reopened.
    """
    need(backend)
    how = {"backend": backend, "layout": layout, "options": {layout: options}, "timestamps": "message"}
    with ts.open(tmp_path / "db", **how) as db:
        for first in range(0, 6_000, 2_000):
            db.store([ts.Message("meter", b"%d" % n, timestamp=START) for n in range(first, first + 2_000)])
        db.store([ts.Message("valve", b"open", timestamp=START + 20)])

        def found(db: ts.Database) -> list[int]:
            ranges = [(START, START + 1), (START + 1, START + 20), (START + 20, None), (0, START), (0, None)]
            return [len(list(db.replay("#", start, until))) for start, until in ranges]

        assert [6_000, 0, 1, 0, 6_001] == found(db)
        assert 0 == db.delete("#", START + 1, START + 20)
        if backend != "memory":
            db.close()
            db = ts.open(tmp_path / "db")
        assert [6_000, 0, 1, 0, 6_001] == found(db)
        assert 1 == db.delete("#", START + 20)
        assert 6_000 == db.delete("#", START, START + 1)
        assert [0, 0, 0, 0, 0] == found(db)
        db.close()


def test_where_no_position_is_displaced_nothing_else_is_read(tmp_path: Path) -> None:
    """While every position equals its message's time, a replay of a time range reads only matching messages."""
    with ts.open(tmp_path / "db", backend="memory", timestamps="message", auto_compact=False) as db:
        db.store([ts.Message("a", b"%d" % n, timestamp=START + n) for n in range(10_000)])
        before = messages_read(db)
        assert 10 == len(list(db.replay("a", START + 5_000, START + 5_010)))
        assert 10 == messages_read(db) - before


def test_a_clock_that_was_set_back_is_reported_at_once(tmp_path: Path) -> None:
    """The first store after the clock was set back warns, and later ones don't until the clock has caught up."""
    clock = Clock()
    with ts.open(tmp_path / "db", backend="memory", clock=clock) as db:
        db.store([ts.Message("a", b"1")])
        clock.now -= 3_600 * SECOND
        with pytest.warns(UserWarning, match="last position lies 59 minutes in the future"):
            db.store([ts.Message("a", b"2")])
        with warnings.catch_warnings(record=True) as told:
            db.store([ts.Message("a", b"3")])
        assert [] == told
        clock.now += 7_200 * SECOND
        db.store([ts.Message("a", b"4")])
        clock.now -= 3_600 * SECOND
        with pytest.warns(UserWarning, match="last position lies 59 minutes in the future"):
            db.store([ts.Message("a", b"5")])
        assert 5 == len(list(db.replay("a")))


CRASHING = """
import os, signal, sys
import topicstore as ts
from topicstore.shard import zones
from topicstore.shard.writer import PendingWrite

zones.SIZE = 50
db = ts.open(sys.argv[1], shards=2)
for n in range(40):
    db.store([ts.Message("a", b"%d" % (10 * n + k), f"c{k}", timestamp=int(sys.argv[2]) + (n * 37 % 40) * 10**9 + k)
              for k in range(10)])
    if n == 20:
        db.add_generation()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("small_zones")
def test_after_a_crash(tmp_path: Path) -> None:
    """After a kill, the zone that was being filled is complete, because each write stores it."""
    need("rocksdb")
    program = [sys.executable, "-c", CRASHING, str(tmp_path / "db"), str(START)]
    assert -signal.SIGKILL == subprocess.run(program, check=False).returncode
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("a", b"later", "c1", timestamp=START + 7 * 10**9)])
        everything = list(db.replay("a", order="time"))
        assert 401 == len(everything)
        for n in range(40):
            start = START + n * 10**9
            found = list(db.replay("a", start, start + 10, by="timestamp", order="time"))
            assert [m for m in everything if start <= m.timestamp < start + 10] == found


@pytest.mark.usefixtures("small_zones")
def test_an_archived_generation(tmp_path: Path) -> None:
    """An archived generation keeps its zones until the generation is dropped."""
    pytest.importorskip("pyarrow")
    with ts.open(tmp_path / "db", mode="x", backend="memory", layout="block") as db:
        db.store([ts.Message("a", b"%d" % n, timestamp=START + n * 10**9) for n in range(30)])
        db.add_generation()
        db.archives.archive(tmp_path / "cold")
        db.store([ts.Message("a", b"late", timestamp=START + 3 * 10**9)])
        before = messages_read(db)
        found = db.replay("a", START + 3 * 10**9, START + 4 * 10**9, by="timestamp")
        assert [b"3", b"late"] == [message.payload for message in found]
        assert 6 == messages_read(db) - before
        db.drop_generation(1)
        reader = db.storage.shards[0].writer.open_engine()
        assert [] == list(zones.load_zones(reader, 1))
        assert [b"late"] == [message.payload for message in db.replay("a", START, START + 10**10, by="timestamp")]


@pytest.mark.usefixtures("small_zones")
def test_what_was_stored_before_there_were_zones(tmp_path: Path) -> None:
    """Messages that were stored without zones, by an older version, are read for every time range."""
    need("rocksdb")
    message = ts.Message("a", b"old", timestamp=START)
    with ts.open(tmp_path / "db", mode="x", backend="rocksdb") as db:
        db.store([message] * 12)

        def without_zones(pending: PendingWrite) -> None:
            zones.remove_zones(pending.write, 1)
            pending.tail = msgspec.structs.replace(pending.tail, zone=None)

        db.storage.shards[0].writer.commit(without_zones)
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("a", b"new", timestamp=START + n * 10**9) for n in range(12)])
        assert 13 == len(list(db.replay("a", START, START + 1, by="timestamp")))
        db.add_generation()
        assert 13 == len(list(db.replay("a", START, START + 1, by="timestamp")))


@pytest.mark.usefixtures("small_zones")
def test_a_damaged_zone_is_reported(tmp_path: Path) -> None:
    """`verify` and replays that need a damaged zone report it with its shard and number; others still work."""
    with ts.open(tmp_path / "db", mode="x", backend="memory", layout="block") as db:
        db.store([ts.Message("a", b"", timestamp=START)] * 12)
        engine = db.storage.shards[0].writer.open_engine()
        ((key, value), *_) = [pair for chunk in engine.scan(STATE, b"\0zone", b"\0zonf") for pair in chunk]
        put(engine, STATE, {key: value[:-1] + bytes([value[-1] ^ 1])})
        assert 12 == len(list(db.replay("#")))
        with pytest.raises(ts.CorruptionError, match=r"shard 0, state: zone 00000001"):
            list(db.replay("#", START, by="timestamp"))
        assert ["shard 0, state"] == [damage.place[:14] for damage in db.verify().damages]


# --- what is asked ------------------------------------------------------------------------


def test_what_it_is_compared_with(tmp_path: Path) -> None:
    """`start` and `until` are compared with positions unless `by` says otherwise; any other `by` is refused."""
    with ts.open(tmp_path / "db", mode="x", backend="memory", layout="block") as db:
        db.store([ts.Message("a", b"", timestamp=START)])
        assert [] == list(db.replay("a", START, START + 1))
        assert 1 == len(list(db.replay("a", START, START + 1, by="timestamp")))
        assert 1 == len(list(db.replay("a", by="timestamp")))
        for by in ("time", None, 1):
            with pytest.raises(ts.InvalidArgumentError, match="by is 'position' or 'timestamp'"):
                db.replay("a", by=by)  # type: ignore[arg-type]


# --- efficient ----------------------------------------------------------------------------


def messages_read(db: ts.Database) -> int:
    return sum(shard.counters.read_messages for shard in db.info().shards)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ts.Database]:
    """Half a million messages of a year; each batch has one far older message, and one message is months late."""
    path = tmp_path_factory.mktemp("large") / "db"  # background counting would also read messages
    with ts.open(path, mode="x", backend="memory", layout="block", auto_compact=False) as db:
        for batch in range(50):
            at = START + batch * 10_000 * 60 * SECOND
            rows = [ts.Message("a", b"", "c", timestamp=at + n * 60 * SECOND) for n in range(9_999)]
            db.store([*rows, ts.Message("a", b"", "c", timestamp=START - 10**15)])
        db.store([ts.Message("a", b"late", "c", timestamp=START + 100 * 60 * SECOND)])
        yield db


@pytest.mark.parametrize("how", [{}, {"order": "time"}, {"reverse": True}, {"reverse": True, "limit": 2}])
def test_hardly_more_than_a_zone_is_read_for_a_minute(large: ts.Database, how: dict[str, Any]) -> None:
    """A replay of one minute reads two of eight zones: the minute's own zone, and the zone of a late message."""
    before = messages_read(large)
    minute = START + 100 * 60 * SECOND
    found = list(large.replay("a", minute, minute + SECOND, by="timestamp", **how))
    assert {b"", b"late"} == {message.payload for message in found}
    assert messages_read(large) - before <= 2 * zones.SIZE + 50_000
    told = large.explain("a", minute, minute + SECOND, by="timestamp")
    assert (2, 8) == (told.zones, told.all_zones)
    assert "by timestamps: 2 of 8 zones" in str(told)


def test_nothing_is_read_for_a_time_without_messages(large: ts.Database) -> None:
    """A replay of a time without messages reads nothing, even if each zone has messages before and after that time."""
    before = messages_read(large)
    for start in (START - 10**14, START + 10**15):
        assert [] == list(large.replay("a", start, start + SECOND, by="timestamp"))
        assert [] == list(large.replay("a", start, start + SECOND, by="timestamp", reverse=True))
    assert before == messages_read(large)
    (unread,) = large.explain("a", START - 10**14, START, by="timestamp").unread
    assert "no timestamp of it lies between the two" == unread.reason
