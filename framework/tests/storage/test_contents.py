"""Topics, client ids and last messages of a database: always exact, whatever was counted before."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.engine import STATE
from topicstore.contract.layout import Heads
from topicstore.contract.positions import time_of
from topicstore.contract.topics import TopicFilter
from topicstore.shard import head_counter, tally_records
from topicstore.shard.reader import ShardReader
from topicstore.shard.tally_tables import TallyTables
from topicstore.storage.counting import contents, counting
from topicstore.storage.maintenance import delete_local
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.threads import PATIENCE, together, wait_until
from topicstore_layouts.block import compaction
from topicstore_layouts.block.format import Block
from topicstore_layouts.block.slab import BlockSlab

TOPICS = ("a", "a/b", "a/c", "a/b/c", "b/b", "é/☃", "$SYS/up", "$SYS/b")
FILTERS = ("#", "a/#", "+/b", "a/b", "+/+/c", "$SYS/#", "$SYS/up", "none")
CLIENTS = ("", "one", "two", "three", "four")
RANGE = 8
PAIRS = [
    pytest.param("memory", "reference", marks=pytest.mark.slow),
    ("memory", "block"),
    pytest.param("memory", "skipstream", marks=pytest.mark.slow),
    pytest.param("memory", "wildcard_optimized", marks=pytest.mark.slow),
    ("rocksdb", "block"),
    pytest.param("leveldb", "block", marks=pytest.mark.slow),
    ("duckdb", "table"),
]

Row = tuple[str, str, int]
"""Topic, client id, and bytes of the payload."""


# --- against a plain model ----------------------------------------------------------------


@attrs.define
class Model:
    """A database, and the messages that it should hold, by id and with their generations."""

    open: Callable[[], ts.Database]
    db: ts.Database
    held: dict[ts.MessageId, tuple[int, ts.Message]] = attrs.field(factory=dict)
    generation: int = 1

    def store(self, rows: list[Row]) -> None:
        messages = [ts.Message(topic, bytes(size), client_id) for topic, client_id, size in rows]
        ids = self.db.store(messages).ids
        self.held |= {one: (self.generation, message) for one, message in zip(ids, messages, strict=True)}

    def delete(self, topic_filter: str, part: tuple[int, int]) -> None:
        """Delete the messages of a time range, whose ends are given in tenths of the whole range."""
        times = sorted(time_of(one.position) for one in self.held) or [0]
        start, until = (times[(len(times) - 1) * tenth // 10] for tenth in sorted(part))
        gone = [
            one
            for one, (_, message) in self.held.items()
            if start <= time_of(one.position) < until and ts.matches(topic_filter, message.topic)
        ]
        assert len(gone) == self.db.delete(topic_filter, start, until)
        for one in gone:
            del self.held[one]

    def delete_but(self, topic_filter: str, spared: str) -> None:
        """Delete messages that match a filter, except those that match another, as retention does."""
        gone = [
            one
            for one, (_, message) in self.held.items()
            if ts.matches(topic_filter, message.topic) and not ts.matches(spared, message.topic)
        ]
        assert len(gone) == sum(
            delete_local(self.db.storage, shard, TopicFilter(topic_filter), 0, (1 << 64) - 1, [spared])
            for shard in self.db.storage.shards
        )
        for one in gone:
            del self.held[one]

    def add_generation(self) -> None:
        self.generation = self.db.add_generation()

    def drop(self) -> None:
        if self.generation > 1:
            oldest = self.db.generations()[0].number
            if oldest < self.generation:
                self.db.drop_generation(oldest)
                self.held = {one: held for one, held in self.held.items() if held[0] != oldest}

    def count(self, shard: int, ranges: int) -> None:
        left = itertools.count(-ranges)
        counting.count(self.db.storage, self.db.storage.shards[shard], lambda: next(left) >= 0)

    def count_all(self, shard: int, ranges: int) -> None:
        """Count by whole messages rather than by heads, for layouts without heads; older versions did so for all."""
        with patch.object(BlockSlab, "reads_heads", False):
            self.count(shard, ranges)

    def compact(self) -> None:
        self.db.compact()

    def merge(self, shard: int, steps: int) -> None:
        left = itertools.count(-steps)
        self.db.storage.shards[shard].rewriter.compact(whole=False, stop=lambda: next(left) >= 0)

    def reopen(self) -> None:
        if "persistent" in self.db.storage.capabilities:
            self.db.close()
            self.db = self.open()

    def check(self, topic_filter: str) -> None:
        """Compare all answers of the database with those computed from the model's messages."""
        matching = [
            (one, message) for one, (_, message) in self.held.items() if ts.matches(topic_filter, message.topic)
        ]
        matching.sort(key=lambda pair: (pair[0].position, pair[0].shard))
        by_topic = grouped(matching, lambda message: message.topic)
        assert by_topic == [attrs.astuple(tally) for tally in self.db.topics(topic_filter)]
        by_client = grouped(matching, lambda message: message.client_id)
        assert by_client == [attrs.astuple(tally) for tally in self.db.clients(topic_filter)]
        last = {message.topic: (message.topic, message.payload, message.client_id) for _, message in matching}
        found = [(message.topic, message.payload, message.client_id) for message in self.db.latest(topic_filter)]
        assert [last[topic] for topic in sorted(last)] == found


def grouped(
    rows: list[tuple[ts.MessageId, ts.Message]], key: Callable[[ts.Message], str]
) -> list[tuple[str, int, int, int, int]]:
    """Return name, messages, bytes, first time and last time of each group, sorted by name."""
    groups: dict[str, list[tuple[ts.MessageId, ts.Message]]] = {}
    for row in rows:
        groups.setdefault(key(row[1]), []).append(row)
    return [
        (
            name,
            len(group),
            sum(len(message.payload) + len(message.topic.encode()) for _, message in group),
            min(time_of(one.position) for one, _ in group),
            max(time_of(one.position) for one, _ in group),
        )
        for name, group in sorted(groups.items())
    ]


row = st.tuples(st.sampled_from(TOPICS), st.sampled_from(CLIENTS), st.integers(0, 300))
step = st.one_of(
    st.tuples(st.just("store"), st.lists(row, min_size=1, max_size=40)),
    st.tuples(st.just("store"), st.lists(row, min_size=100, max_size=200)),
    st.tuples(st.just("count"), st.integers(0, 1), st.integers(1, 30)),
    st.tuples(st.just("count"), st.integers(0, 1), st.just(1_000)),
    st.tuples(st.just("count_all"), st.integers(0, 1), st.sampled_from((1, 5, 1_000))),
    st.tuples(st.just("merge"), st.integers(0, 1), st.sampled_from((1, 5, 1_000))),
    st.tuples(st.just("delete"), st.sampled_from(FILTERS), st.tuples(st.integers(0, 10), st.integers(0, 10))),
    st.tuples(st.just("delete_but"), st.sampled_from(FILTERS), st.sampled_from(FILTERS)),
    st.tuples(st.sampled_from(("add_generation", "drop", "compact", "reopen"))),
    st.tuples(st.just("check"), st.sampled_from(FILTERS)),
)


@pytest.mark.parametrize(("backend", "layout"), PAIRS)
def test_all_that_is_stored_is_counted_whatever_happened_to_it(backend: str, layout: str) -> None:
    """Counts equal those of a model after stores, deletes, drops, merges, counting and restarts in any order."""
    need(backend, layout)

    @settings(COSTLY, max_examples=tries(6, 400) if backend == "memory" else tries(2, 60))
    @given(st.lists(step, min_size=3, max_size=20))
    def run(steps: list[tuple[Any, ...]]) -> None:
        now = itertools.count(1_700_000_000_000_000, 1_000)
        with (
            tempfile.TemporaryDirectory() as directory,
            patch.object(counting, "RANGE", RANGE),
            patch.object(tally_records, "_PART_BYTES", 100),  # the size of about two rows
            patch.object(head_counter, "_ROWS_A_PAIR", 2),
            patch.multiple(compaction, SEGMENT_ROWS=64, WORTH_ROWS=16),
        ):

            def opened() -> ts.Database:
                options = {"wildcard_optimized": {"epoch_bits": 4}} if layout == "wildcard_optimized" else {}
                return ts.open(
                    Path(directory) / "db",
                    backend=backend,
                    layout=layout,
                    shards=2,
                    clock=lambda: next(now),
                    options=options,
                )

            model = Model(opened, opened())
            try:
                for name, *arguments in [*steps, *(("check", text) for text in FILTERS)]:
                    getattr(model, name)(*arguments)
            finally:
                model.db.close()

    run()


# --- what is read for it ------------------------------------------------------------------


def filled(path: Path, layout: str) -> ts.Database:
    """Return a database of two shards with 20,400 messages of 40 topics and 10 client ids."""
    db = ts.open(path, mode="x", backend="memory", layout=layout, shards=2, auto_compact=False)
    for first in range(0, 20_400, 400):
        store(db, range(first, first + 400))
    return db


def store(db: ts.Database, numbers: range) -> None:
    db.store([ts.Message(f"f/{n % 40}", b"%d" % n, f"c{n % 10}") for n in numbers])


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    """A database whose layout reads heads, so that its compactions count."""
    with filled(tmp_path / "db", "block") as db:
        yield db


@pytest.fixture
def ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ts.Database]:
    """A database whose messages are counted in ranges of 1,000, because its layout doesn't read heads."""
    monkeypatch.setattr(counting, "RANGE", 1_000)
    with filled(tmp_path / "ranges", "skipstream") as db:
        yield db


def messages_read(db: ts.Database) -> int:
    return db.info().total.read_messages


def test_what_was_counted_is_not_read(ranges: ts.Database) -> None:
    """After `compact`, counting topics reads only messages that no tally table includes yet.

    With a filter, only matching messages are read. The last message of each topic is read by its position.
    """
    db = ranges
    everything = db.topics()
    assert 20_400 == messages_read(db) == sum(topic.messages for topic in everything)
    db.compact()
    rest = sum(counting.backlog(shard) for shard in db.storage.shards)
    assert 0 < rest < 2_000
    before = messages_read(db)
    assert [topic for topic in everything if topic.topic in {"f/7", "f/8"}] == [*db.topics("f/7"), *db.topics("f/8")]
    assert messages_read(db) - before < rest // 10
    before = messages_read(db)
    assert [b"%d" % n for n in range(20_360, 20_400)] == sorted(message.payload for message in db.latest())
    assert messages_read(db) - before < 2 * rest


def test_a_compaction_counts_what_it_rewrites(db: ts.Database) -> None:
    """After a compaction only messages stored since are read for counts, and no payload is decompressed for them."""
    everything = db.topics()
    db.compact()
    assert [0, 0] == [counting.backlog(shard) for shard in db.storage.shards]
    db.storage.kept(contents.TopicCounts)._kept.clear()
    before = messages_read(db)
    with patch.object(Block, "payloads", side_effect=AssertionError("payloads were decompressed")):
        assert everything == db.topics()
        assert 10 == len(db.clients())
        assert before == messages_read(db)
        store(db, range(400))
        assert 20_800 == sum(topic.messages for topic in db.topics())
        assert 400 == messages_read(db) - before
        assert 20_800 == sum(client.messages for client in db.clients())
        assert 800 == messages_read(db) - before


def test_few_messages_of_each_topic_are_not_worth_a_table(tmp_path: Path) -> None:
    """A compaction makes no table of nearly as many rows as messages; `compact` or the first query counts these."""
    with ts.open(tmp_path / "db", backend="memory", layout="block", auto_compact=False) as db:
        db.store([ts.Message(f"a/{n % 300}", b"x", "c") for n in range(1_000)])
        (shard,) = db.storage.shards
        shard.rewriter.compact(whole=True)
        assert () == shard.tallies.ranges(1)
        assert [4] == [topic.messages for topic in db.topics("a/7")]
        assert 4 == messages_read(db)
        db.add_generation()
        db.compact()
        assert [1_000] == [counted.messages for counted in shard.tallies.ranges(1)]
        assert 300 == len(db.topics())
        assert 4 == messages_read(db) - 1_000  # read by `compact`


def test_what_cannot_match_is_not_counted(db: ts.Database, ranges: ts.Database) -> None:
    """The first counts of a filter read only matching messages, and later ones those stored since."""
    for one in (db, ranges):
        assert [510] == [topic.messages for topic in one.topics("f/7")]
        assert 510 == messages_read(one)
        assert [510] == [client.messages for client in one.clients("f/7")]
        assert 1_020 == messages_read(one)
        store(one, range(40))
        assert [511] == [topic.messages for topic in one.topics("f/7")]
        assert 1_021 == messages_read(one)


def test_counts_of_few_filters_are_kept(db: ts.Database) -> None:
    """Counts of the most recently requested filters are cached; counts of other filters are computed again."""
    for number in range(17):
        db.topics(f"f/{number}")
    before = messages_read(db)
    assert [510] == [topic.messages for topic in db.topics("f/1")]
    assert before == messages_read(db)
    assert [510] == [topic.messages for topic in db.topics("f/0")]
    assert 510 == messages_read(db) - before


def test_a_failed_count_counts_nothing_twice(db: ts.Database) -> None:
    """Counts are exact after a count of several generations that failed in one of them."""
    db.add_generation()
    store(db, range(400))
    heads = ShardReader.heads

    def failing(reader: ShardReader, generation: int, *more: Any) -> Iterator[Heads]:
        if generation == 2:
            raise KeyboardInterrupt
        return heads(reader, generation, *more)

    with patch.object(ShardReader, "heads", failing), pytest.raises(KeyboardInterrupt):
        db.topics()
    assert 20_800 == sum(topic.messages for topic in db.topics())


def test_a_narrow_filter_reads_few_parts_of_a_table(db: ts.Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow filter reads only a logarithmic number of the parts of a tally table."""
    monkeypatch.setattr(tally_records, "_PART_BYTES", 100)
    everything = {topic.topic: topic for topic in db.topics()}
    db.compact()
    reads: list[int] = []
    load = tally_records._load_part
    monkeypatch.setattr(tally_records, "_load_part", lambda *arguments: reads.append(1) or load(*arguments))
    assert 20_400 == sum(client.messages for client in db.clients())
    parts = len(reads)
    assert parts >= 40
    for text in everything:
        reads.clear()
        assert [everything[text].messages] == [client.messages for client in db.clients(text)]
        assert len(reads) <= 2 * parts.bit_length()


def test_gaps_between_tables_are_counted_and_messages_after_them_are_not(
    db: ts.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a layout that reads heads, the counter counts messages between tally tables, but none after the last table.

    Older versions leave such gaps.
    """
    monkeypatch.setattr(compaction, "SEGMENT_ROWS", 4_000)
    shard = db.storage.shards[0]
    everything = db.topics()
    assert 0 == counting.count(db.storage, shard)
    with patch.object(BlockSlab, "reads_heads", False), patch.object(counting, "RANGE", 1_000):
        counting.count(db.storage, shard, iter((False, False, True)).__next__)  # the first 2,000 messages
    with patch.object(TallyTables, "join", lambda *_: []):
        shard.rewriter.compact(whole=True)
    assert 0 == counting.count(db.storage, shard)
    waiting = counting.backlog(shard)
    assert waiting == sum(record.messages for record in shard.generations.listed()) - 2_000
    store(db, range(400))
    shard.rewriter.compact(whole=True)
    gap = counting.backlog(shard)
    assert 0 < gap < waiting
    assert gap == counting.count(db.storage, shard)
    assert 0 == counting.backlog(shard)
    assert [one.messages + 10 for one in everything] == [one.messages for one in db.topics()]


def test_a_sealed_generation_is_counted_to_its_end(db: ts.Database, tmp_path: Path) -> None:
    """A sealed generation is counted completely, and its counts stay when it is archived."""
    db.add_generation()
    everything = db.topics()
    db.compact()
    before = messages_read(db)
    assert everything == db.topics()
    assert 40 == len(db.latest())
    assert 80 >= messages_read(db) - before
    db.archives.archive(tmp_path / "export")
    before = messages_read(db)
    assert everything == db.topics()
    assert before == messages_read(db)


def test_an_archived_generation_is_counted_too(db: ts.Database, tmp_path: Path) -> None:
    """An archived generation that wasn't counted is counted from its export; a refused delete changes no counts."""
    db.add_generation()
    everything = db.topics()
    db.archives.archive(tmp_path / "export")
    assert everything == db.topics()
    db.compact()
    before = messages_read(db)
    with pytest.raises(ts.GenerationError):
        db.delete("f/1")
    assert everything == db.topics()
    assert before == messages_read(db)


def test_deleting_topics_makes_nothing_be_counted_again(db: ts.Database) -> None:
    """Deleting all messages of a topic updates the tables; deleting a part of a range causes a recount of the range."""
    db.compact()
    rest = sum(counting.backlog(shard) for shard in db.storage.shards)
    before = messages_read(db)
    assert 510 == db.delete("f/3")
    assert 39 == len(db.topics())
    assert messages_read(db) - before <= rest
    middle = db.topics("f/4")[0]
    assert 0 < db.delete("f/4", until=(middle.first + middle.last) // 2) < 510
    left = db.topics("f/4")[0].messages
    assert left == len(list(db.replay("f/4")))


def test_there_are_about_as_many_tables_as_the_logarithm_of_the_messages(
    ranges: ts.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are at most seven tally tables of each size, so their number grows with the logarithm of messages."""
    db = ranges
    monkeypatch.setattr(counting, "RANGE", 10)
    everything = db.topics()
    for shard in db.storage.shards:
        counting.count(db.storage, shard)
        levels = [counted.level for counted in shard.tallies.ranges(1)]
        assert sorted(levels, reverse=True) == levels
        assert all(levels.count(level) < 8 for level in levels)
        assert 3 == levels[0]
    assert everything == db.topics()


def test_a_table_may_be_of_more_topics_than_a_part_holds(tmp_path: Path) -> None:
    """A table of many topics and client ids is stored in parts, so that no stored value is large."""
    with ts.open(tmp_path / "db", backend="memory", layout="block", auto_compact=False) as db:
        db.store([ts.Message(f"{'x' * 500}/{n}", b"", f"client {n}") for n in range(5_000)])
        db.add_generation()
        everything = db.topics()
        db.compact()
        (counted,) = db.storage.shards[0].tallies.ranges(1)
        assert counted.parts > 2
        assert all(
            len(value) < 1 << 20
            for chunk in db.storage.shards[0].writer.open_engine().scan(STATE)
            for _, value in chunk
        )
        assert everything == db.topics()
        assert 5_000 == len(db.clients())


def test_the_last_messages_of_many_topics_are_read_together(db: ts.Database) -> None:
    """The last messages of several topics are read together if they are close together, and otherwise one by one."""
    now = db.clock()
    db.add_generation()
    db.compact()
    reads = db.info().total.reads
    assert 40 == len(db.latest())
    assert db.info().total.reads - reads < 20
    with patch.object(contents, "_SEEK", 0):
        assert 40 == len(db.latest())
    assert db.topics()[0].last < now + 60_000_000


def test_a_reader_gets_the_same_counts(tmp_path: Path) -> None:
    """A reader beside a writer gets the same counts as the writer, and doesn't read counted messages either."""
    need("rocksdb")
    with ts.open(tmp_path / "db", backend="rocksdb", auto_compact=False) as db:
        db.store([ts.Message(f"a/{n % 9}", b"x", "c") for n in range(900)])
        db.compact()
        db.store([ts.Message(f"a/{n % 9}", b"x", "c") for n in range(50)])
        with ts.open(tmp_path / "db", mode="r") as view:
            assert db.topics() == view.topics()
            assert 50 == messages_read(view)
            assert db.latest("a/+") == view.latest("a/+")


# --- in the background, and interrupted -------------------------------------------------------


def test_what_is_stored_is_counted_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Background counting starts once there are enough messages, including those stored before it was running."""
    need("rocksdb")
    monkeypatch.setattr(counting, "RANGE", 1_000)
    monkeypatch.setattr(counting, "FIRST_REST", 0.0)
    path = tmp_path / "db"
    with ts.open(path, backend="rocksdb", layout="skipstream", auto_compact=False) as db:
        db.store([ts.Message(f"a/{n % 9}", b"x", "c") for n in range(3_500)])
        everything = db.topics()

    def counted() -> int:
        return sum(one.messages for one in db.storage.shards[0].tallies.ranges(1))

    with ts.open(path) as db:
        wait_until(lambda: counted() == 3_000, "what was there to be counted")
        assert everything == db.topics()
        db.store([ts.Message("b", b"", "c")] * 2_000)
        wait_until(lambda: counted() == 5_000, "what was stored to be counted")
        assert [2_000] == [topic.messages for topic in db.topics("b")]
        assert db.info().counting_failure is None


def test_counting_rests_before_its_first_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting thread sleeps before it counts its first range, and ends at once when the database is closed."""
    monkeypatch.setattr(counting, "RANGE", 100)
    monkeypatch.setattr(counting, "FIRST_REST", 10 * PATIENCE)
    with ts.open(tmp_path / "db", backend="memory", layout="skipstream") as db:
        db.store([ts.Message(f"a/{n % 9}", b"x", "c") for n in range(1_000)])
        wait_until(lambda: "counting" in " ".join(thread.name for thread in threading.enumerate()), "the thread")
        db.store([ts.Message("b", b"", "c")] * 1_000)
        assert () == db.storage.shards[0].tallies.ranges(1)


def test_a_delete_beside_counting_is_not_counted(ranges: ts.Database) -> None:
    """Messages that are deleted while two ranges are being counted don't appear in the counts afterwards."""
    db = ranges
    shard = db.storage.shards[0]
    stops = itertools.count()

    def stop() -> bool:
        if next(stops) == 2:
            assert db.delete("f/#") == 20_400
        return False

    counting.count(db.storage, shard, stop)
    assert [] == db.topics()
    assert [] == db.latest()


def test_two_may_count_at_once(ranges: ts.Database) -> None:
    """`compact` and background counting can run at the same time without counting twice."""
    db = ranges
    everything = db.topics()

    def count() -> None:
        for shard in db.storage.shards:
            counting.count(db.storage, shard)

    together(count, count, count)
    assert everything == db.topics()
    assert sum(counting.backlog(shard) for shard in db.storage.shards) < 2_000


def test_what_is_dropped_beside_counting_leaves_nothing(db: ts.Database) -> None:
    """Dropping a generation while its messages are counted raises no error, and leaves no tally tables."""
    db.add_generation()
    add = TallyTables.add

    def dropped(tables: TallyTables, *arguments: Any) -> None:
        db.drop_generation(1)
        add(tables, *arguments)

    with patch.object(TallyTables, "add", dropped):
        counting.count(db.storage, db.storage.shards[0])
    assert () == db.storage.shards[0].tallies.ranges(1)
    assert [] == db.topics()


KILLED = """
import topicstore as ts
from topicstore.contract.engine import STATE
from topicstore.storage.counting import counting
from topicstore.shard import head_counter, tally_tables
from topicstore_layouts.block import compaction
path, what, until = arguments
counting.RANGE = 20
compaction.SEGMENT_ROWS, tally_tables._MERGED, head_counter._ROWS_A_PAIR = 150, 2, 1
counts(RocksdbEngine, "write")
with ts.open(path, mode="r+", auto_compact=False) as db:
    if what in ("count", "merge"):
        db.compact()
    else:
        db.delete(f"a/{what}/#")
        db.delete("a/+/2", until=until)
"""


@pytest.mark.parametrize("what", ["count", "merge", "delete"])
def test_killed_again_and_again_it_counts_what_is_there(
    tmp_path: Path, run_until: Callable[..., object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill at any write of counting, of a merge or of a delete, counts are exact, and counting continues."""
    need("rocksdb")
    monkeypatch.setattr(counting, "RANGE", 20)
    path, times = tmp_path / "db", list[int]()
    layout = "block" if what == "merge" else "reference"
    with ts.open(path, layout=layout, backend="rocksdb", auto_compact=False) as db:
        for first in range(0, 1_000, 100):
            rows = range(first, first + 100)
            db.store([ts.Message(f"a/{n % 10}/{n % 3}", b"%d" % n, f"c{n % 4}") for n in rows])
            times.append(db.clock())
        if what == "delete":
            db.compact()
    deaths = {"count": (1, 2, 3, 5, 8), "merge": (1, 2, 3, 2), "delete": (1, 2, 3, 1, 2, 3)}[what]
    for number, death in enumerate(deaths):
        moment = ("before", "within", "after")[number % 3]
        run_until((death, moment), KILLED, path, str(number) if what == "delete" else what, times[number])
        with ts.open(path, mode="r+", auto_compact=False) as db:
            held: dict[str, int] = {}
            for message in db.replay("#"):
                held[message.topic] = held.get(message.topic, 0) + 1
            assert held == {tally.topic: tally.messages for tally in db.topics()}
            assert db.verify().ok
            if what == "delete":  # the next delete needs tally tables, which the kill may have left missing
                db.compact()
    with ts.open(path, mode="r+", auto_compact=False) as db:
        db.compact()
        assert counting.backlog(db.storage.shards[0]) < 20


def test_a_damaged_table_is_reported(db: ts.Database) -> None:
    """`verify` reports a damaged tally table; counts are read from the messages, and a delete removes the table."""
    everything = db.topics()
    db.compact()
    shard = db.storage.shards[0]
    damaged = [pair for chunk in shard.writer.open_engine().scan(STATE, b"\0tally\0", b"\0tally\1") for pair in chunk]
    put(shard.writer.open_engine(), STATE, {key: value[:-1] + bytes((value[-1] ^ 1,)) for key, value in damaged})
    assert everything == db.topics()
    assert len(damaged) == len(db.verify().damages)
    db.delete("#")
    assert [] == db.topics()
    assert db.verify().ok
