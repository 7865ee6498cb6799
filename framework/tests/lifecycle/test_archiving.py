"""Archived generations are read like local ones by everything that reads a database."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import attrs
import pyarrow.parquet as pq
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.cli.files.export_source import open_export
from topicstore.contract.layout import ReadLimits
from topicstore.lifecycle import archive_slab as archive
from topicstore.lifecycle import exporting
from topicstore.sessions import Publish
from topicstore.shard.records import ranges_of
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import MOMENT, PATIENCE, begin, held_elsewhere, wait_until
from topicstore_conformance.oracle import strategies

SMALL = pytest.mark.usefixtures("small")
Fill = Callable[..., None]
FILTERS = ("#", "fleet/+/speed", "fleet/bus-1/#", "$SYS/#", "no/such/topic")


def everything(db: ts.Database) -> list[list[ts.Message]]:
    """Return the replays of all test filters in order of time."""
    return [list(db.replay(text, order="time")) for text in FILTERS]


def by_publisher(messages: Iterator[ts.Message]) -> dict[tuple[str, str], list[ts.Message]]:
    found: dict[tuple[str, str], list[ts.Message]] = {}
    for message in messages:
        found.setdefault((message.topic, message.client_id), []).append(message)
    return found


# --- replays are equal to what they were ------------------------------------------------


@attrs.frozen
class History:
    """Batches by generation, the generations' layouts, the generations to archive, and replays to compare."""

    generations: list[tuple[str, list[list[ts.Message]]]]
    archived: set[int]
    queries: list[tuple[str, int, int | None, int]]


def histories(layouts: tuple[str, ...], *, dollar: bool) -> st.SearchStrategy[History]:
    topics = strategies.topics() if dollar else strategies.topics().filter(lambda topic: topic[0] != "$")
    batches = st.lists(st.lists(strategies.messages(topics), min_size=1, max_size=12), max_size=4)
    generations = st.lists(st.tuples(st.sampled_from(layouts), batches), min_size=1, max_size=4)
    query = st.tuples(
        strategies.filters(topics),
        st.integers(0, 60),
        st.none() | st.integers(0, 60),
        st.integers(1, 40),
    )
    return st.builds(History, generations, st.sets(st.integers(1, 4)), st.lists(query, min_size=1, max_size=4))


PAIRS = [
    ("memory", ("reference",), tries(15, 60)),
    ("memory", ("block", "skipstream", "wildcard_optimized"), tries(30, 100)),
    ("rocksdb", ("block", "wildcard_optimized"), tries(8, 25)),
    ("duckdb", ("table", "block"), tries(3, 8)),
]


@pytest.mark.parametrize(("backend", "layouts", "examples"), PAIRS)
@SMALL
def test_archived_generations_replay_as_they_did(backend: str, layouts: tuple[str, ...], examples: int) -> None:
    """Replays before and after archiving are the same, in all layouts, even after the database is opened again."""
    learns = not {"reference", "table"} & set(layouts)

    @settings(COSTLY, max_examples=examples)
    @given(histories(layouts, dollar=learns))
    def holds(history: History) -> None:
        with tempfile.TemporaryDirectory() as directory:
            _archive_and_compare(Path(directory), backend, history)

    holds()


def _archive_and_compare(directory: Path, backend: str, history: History) -> None:
    clock = Clock()
    first = history.generations[0][0]
    with ts.open(directory / "db", backend=backend, layout=first, shards=2, clock=clock, auto_compact=False) as db:
        for layout, batches in history.generations:
            if db.generations()[-1].layout != layout:
                db.add_generation(layout)
            for batch in batches:
                clock.now += 7
                db.store(batch)
            clock.now += 3
            db.add_generation()
        sealed = {one.number for one in db.generations() if one.sealed is not None}
        before = list(_answers(db, history))
        held = db.info().messages
        db.archives.archive(directory / "export", generations=sorted(history.archived & sealed))
        assert {one.generation for one in db.archives} == history.archived & sealed
        assert list(_answers(db, history)) == before
        report = db.verify()
        assert (report.damages, report.messages, db.info().messages) == ([], held, held)
    if backend != "memory":
        with ts.open(directory / "db", mode="r", clock=clock) as reader:
            assert list(_answers(reader, history)) == before


def _answers(db: ts.Database, history: History) -> Iterator[object]:
    """Yield each replay in order of time, by topic and publisher, and with positions."""
    for text, start, until, size in history.queries:
        end = None if until is None else START + until
        yield list(db.replay(text, START + start, end, order="time", batch_size=size))
        yield by_publisher(db.replay(text, START + start, end, batch_size=size))
        ids = db.replay_arrow(text, START + start, end, order="time", ids=True, batch_size=size)
        yield [row for batch in ids for row in batch.to_pylist()]


@SMALL
def test_each_stream_is_in_order_of_positions_and_ends(db: ts.Database, tmp_path: Path) -> None:
    db.archives.archive(tmp_path / "export")
    for stream in db.streams("#"):
        cursor = db.cursor(stream, "fleet/+/speed")
        positions: list[int] = []
        ended = False
        while not ended and len(positions) < 1_000:
            result = db.read(cursor, 3)
            positions += [one.position for one in result.batch.ids()]
            cursor = ts.Cursor.from_bytes(result.cursor.to_bytes())
            ended = result.end_of_stream or (result.caught_up and not stream.sealed)
        assert ended
        assert positions == sorted(set(positions))


@SMALL
def test_batches_keep_to_their_limits(db: ts.Database, tmp_path: Path) -> None:
    """Reads of an archive respect limits of rows, bytes and positions; after its deadline a read returns some rows."""
    db.archives.archive(tmp_path / "export")
    stream = next(one for one in db.streams("#") if one.generation == 1)
    cursor = db.cursor(stream, "#")
    assert len(db.read(cursor, 5).batch) == 5
    slab = db.storage.shards[stream.shard].generations.slab(1)
    parsed = ts.TopicFilter("#")
    bound = db.storage.shards[stream.shard].writer.watermark
    step = slab.next(0, parsed, cursor.place, ReadLimits(rows=1_000, bytes=5, bound=bound))
    sizes = [len(payload) for payload in step.batch.payloads]
    assert sum(sizes[:-1]) < 5 <= sum(sizes)
    late = slab.next(
        0, parsed, cursor.place, ReadLimits(rows=1_000, bytes=1 << 20, bound=bound, deadline=time.monotonic())
    )
    assert 0 < len(late.batch) < 100
    assert not late.exhausted
    first = int(late.batch.positions[0])
    none = slab.next(0, parsed, cursor.place, ReadLimits(rows=9, bytes=9, bound=first - 1))
    assert (len(none.batch), none.exhausted) == (0, True)
    one = slab.next(0, parsed, cursor.place, ReadLimits(rows=9, bytes=1 << 20, bound=first))
    assert (one.batch.positions.tolist(), one.exhausted) == ([first], True)


@SMALL
def test_what_can_not_match_is_not_decoded(db: ts.Database, tmp_path: Path, start: int) -> None:
    db.archives.archive(tmp_path / "export")
    slabs = [
        slab for shard in db.storage.shards for record, slab in shard.generations.with_slabs() if record.number < 3
    ]

    def reads(topic_filter: str, *times: int) -> tuple[int, int]:
        before = [attrs.evolve(slab.counters) for slab in slabs]
        list(db.replay(topic_filter, *times))
        pairs = list(zip(slabs, before, strict=True))
        visited = sum(slab.counters.visited - then.visited for slab, then in pairs)
        return visited, sum(slab.counters.skipped - then.skipped for slab, then in pairs)

    groups = sum(len(part.groups) for slab in slabs for part in slab.contents.parts)  # type: ignore[attr-defined]
    assert groups > 8
    assert reads("#") == (groups, 0)
    assert reads("nothing/here") == (0, groups)
    visited, skipped = reads("#", start, start + 2_000)
    assert 0 < visited + skipped <= 2


def test_a_generation_without_a_matching_topic_is_not_read(db: ts.Database, tmp_path: Path) -> None:
    """A generation with few topics is not read if none of them matches: the export has a list of its topics."""
    db.archives.archive(tmp_path / "export")
    shutil.rmtree(tmp_path / "export" / "shard=0000" / "generation=0001")
    with pytest.raises(ts.CorruptionError):
        list(db.replay("nothing/here"))
    for part in (tmp_path / "export").rglob("*.parquet"):
        part.unlink()
    assert list(db.replay("nothing/here", START + 150_000)) == []
    assert {stream.generation for stream in db.streams("$SYS/#", START + 150_000)} == {2, 3}
    assert db.streams("nothing/here", START + 150_000) == []
    with pytest.raises(ts.CorruptionError):
        list(db.replay("fleet/+/door", START + 150_000))


def test_the_memory_of_row_groups_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Decoded row groups are cached up to a limit for all databases, even if one row group exceeds the limit."""
    monkeypatch.setattr(exporting, "_GROUP_BYTES", 300_000)
    monkeypatch.setattr(exporting, "_BATCH", 10)
    monkeypatch.setattr(archive, "_KEPT_BYTES", 1_000_000)
    with ts.open(tmp_path / "db", backend="memory") as db:
        sizes = [30_000] * 100 + [2_000_000] + [30_000] * 20
        db.store([ts.Message("a", bytes([number % 256]) * size) for number, size in enumerate(sizes)])
        db.add_generation()
        before = list(db.replay("#"))
        db.archives.archive(tmp_path / "export")
        assert list(db.replay("#", batch_size=3)) == before
        assert archive._kept._size == sum(size for _, size in archive._kept._groups.values()) <= 1_000_000


# --- cursors of before ----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["reference", "block", "skipstream", "wildcard_optimized"])
def test_cursors_and_replays_of_before_say_so(tmp_path: Path, layout: str, fill: Fill, clock: Clock) -> None:
    """Cursors and replays from before an archiving raise an error, and neither lose nor repeat messages."""
    with ts.open(tmp_path / "db", backend="memory", layout=layout, clock=clock) as db:
        fill(db)
        db.add_generation()
        cursors = [db.cursor(stream, "#") for stream in db.streams("#") if stream.sealed]
        replay = db.replay("#", order="any", batch_size=4)
        next(replay)
        db.archives.archive(tmp_path / "export")
        for cursor in cursors:
            with pytest.raises(ts.GenerationArchivedError):
                db.read(cursor)
        with pytest.raises(ts.GenerationArchivedError):
            list(replay)


def test_garbage_is_no_place(db: ts.Database, tmp_path: Path) -> None:
    db.archives.archive(tmp_path / "export")
    slab = db.storage.shards[0].generations.slab(1)
    with pytest.raises(KeyError):
        slab.begin(1, ts.TopicFilter("#"), 0)
    for place in (b"", b"parquet\0", b"parquet\0" + bytes(9), bytes(8)):
        with pytest.raises(ts.GenerationArchivedError):
            slab.next(0, ts.TopicFilter("#"), place, ReadLimits(rows=1, bytes=1, bound=1))


# --- what can't be done, and dropping ---------------------------------------------------


@SMALL
def test_nothing_is_deleted_from_an_export_nor_elsewhere_by_the_same_call(db: ts.Database, tmp_path: Path) -> None:
    db.archives.archive(tmp_path / "export", generations=[1])
    before = everything(db)
    with pytest.raises(ts.GenerationError, match="generation 1 lies in an export"):
        db.delete("fleet/#")
    assert everything(db) == before
    behind = next(one.sealed for one in db.generations() if one.number == 1)
    assert behind is not None
    assert db.delete("fleet/#", behind + 1) == len(before[0]) - len(list(db.replay("fleet/#", 0, behind + 1)))


def test_the_error_says_from_when_on_something_can_be_deleted(db: ts.Database, tmp_path: Path) -> None:
    """The error of a refused delete states the time from which deletes succeed: the end of the archived generations."""
    db.archives.archive(tmp_path / "export")
    with pytest.raises(ts.GenerationError, match=r"generation 1, 2 lies .*begin at \d+ \(") as refused:
        db.delete("fleet/#")
    starts = [int(number) for number in re.findall(r"begin at (\d+)", str(refused.value))]
    assert db.delete("fleet/#", starts[0]) == 9
    assert len(list(db.replay("fleet/#"))) == 180


def test_slabs_refuse_what_would_change_them(db: ts.Database, tmp_path: Path) -> None:
    db.archives.archive(tmp_path / "export")
    slab = db.storage.shards[0].generations.slab(1)
    for change in (slab.committed, lambda: slab.delete(ts.TopicFilter("#"), 0, 1)):
        with pytest.raises(ts.GenerationError, match="never changed"):
            change()


def test_a_dropped_one_is_forgotten_and_its_files_stay(db: ts.Database, tmp_path: Path) -> None:
    target = tmp_path / "export"
    db.archives.archive(target)
    files = sorted(target.rglob("*"))
    left = [one for one in db.replay("#", order="time") if int(one.payload) >= 100]
    assert db.drop_generation(1)
    assert not db.drop_generation(1)
    assert list(db.replay("#", order="time")) == left
    assert [one.generation for one in db.archives] == [2]
    assert sorted(target.rglob("*")) == files


# --- where it is ------------------------------------------------------------------------


def test_local_bytes_go_and_it_says_where_they_are(db: ts.Database, tmp_path: Path) -> None:
    target = tmp_path / "export"
    before = db.generations()
    db.archives.archive(target, generations=[1])
    after = db.generations()
    assert [one.live_bytes for one in after] == [0, *(one.live_bytes for one in before[1:])]
    assert [one.messages for one in after] == [one.messages for one in before]
    assert {one.generation: one.path for one in db.archives} == {1: target}
    details = db.info().shards[1].slabs[1].details
    assert details["exported to"] == str(target / "shard=0001" / "generation=0001")
    keys = [
        key
        for shard in db.storage.shards
        for space, start, end in ranges_of(1)
        for chunk in shard.writer.open_engine().scan(space, start, end)
        for key in chunk
    ]
    assert keys == []


def test_a_relative_export_moves_with_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Fill) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    with ts.open("here/db") as db:
        fill(db)
        db.add_generation()
        before = everything(db)
        db.archives.archive("here/export")
    Path("here").rename("there")
    with ts.open(tmp_path / "there" / "db", mode="r+") as db:
        assert everything(db) == before
        assert {one.generation: one.path for one in db.archives} == {1: tmp_path / "there" / "export"}


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Fill) -> None:
    """A database opened by a relative path, and its exports, don't depend on the working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with ts.open("db") as db:
        for _ in range(2):
            fill(db)
            db.add_generation()
        before = everything(db)
        db.archives.archive("cold", generations=[1])
        monkeypatch.chdir("elsewhere")
        db.archives.archive("cold", generations=[2])
        db.checkpoint("../copy")
        assert {one.generation: one.path for one in db.archives} == {
            1: tmp_path / "cold",
            2: tmp_path / "elsewhere" / "cold",
        }
        assert everything(db) == before
    for name in ("db", "copy"):
        with ts.open(tmp_path / name, mode="r+") as again:
            assert everything(again) == before


def test_a_checkpoint_that_looks_elsewhere_for_exports_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Fill
) -> None:
    monkeypatch.chdir(tmp_path)
    with ts.open("db") as db:
        fill(db)
        db.add_generation()
        db.archives.archive("cold")
        before = everything(db)
        db.checkpoint("beside")
        with pytest.warns(UserWarning, match=re.escape(f"looks for it in {tmp_path}/backup/cold")):
            db.checkpoint("backup/db")
    shutil.copytree("cold", "backup/cold")
    for name in ("beside", "backup/db"):
        with ts.open(name, mode="r+") as copy:
            assert everything(copy) == before


@SMALL
def test_an_archived_one_can_be_archived_elsewhere(db: ts.Database, tmp_path: Path) -> None:
    """Archiving to another directory copies from the old export, which can then be removed."""
    before = everything(db)
    db.archives.archive(tmp_path / "old")
    assert db.archives.archive(tmp_path / "new").slabs == 0
    assert db.archives.archive(tmp_path / "new", generations=[1, 2]).slabs == 4
    shutil.rmtree(tmp_path / "old")
    assert everything(db) == before
    assert {one.path for one in db.archives} == {tmp_path / "new"}
    assert db.verify().ok


def test_an_older_version_refuses_it(db: ts.Database, tmp_path: Path) -> None:
    """An older version refuses to open archived generations, because it would take them for empty."""
    versions = {record.version for shard in db.storage.shards for record in shard.generations.listed()}
    db.archives.archive(tmp_path / "export", generations=[1])
    assert versions == {1}
    assert [record.version for record in db.storage.shards[0].generations.listed()] == [2, 1, 1]


def test_another_process_sees_it_when_it_looks_again(tmp_path: Path, fill: Fill) -> None:
    with ts.open(tmp_path / "db") as db:
        fill(db)
        db.add_generation()
        before = everything(db)
        with ts.open(tmp_path / "db", mode="r") as reader:
            db.archives.archive(tmp_path / "export")
            assert everything(reader) == before
            reader.refresh()
            assert everything(reader) == before
            assert {one.generation: one.path for one in reader.archives} == {1: tmp_path / "export"}


# --- beside other work ------------------------------------------------------------------


@SMALL
def test_a_subscription_that_lags_reads_on(db: ts.Database, tmp_path: Path) -> None:
    """A subscription that lags behind continues reading from the archive."""
    expected = list(db.replay("fleet/#", order="time"))
    with closing(db.subscribe("fleet/#", 0, batch_size=7)) as subscription:
        got = list(subscription.fetch(timeout=PATIENCE).messages)
        db.archives.archive(tmp_path / "export")
        while len(got) < len(expected):
            batch = subscription.fetch(timeout=PATIENCE)
            assert (batch.dropped, bool(batch.messages)) == ((), True)
            got += batch.messages
        db.store([ts.Message("fleet/new", b"live", "c1")])
        assert [one.payload for one in subscription.fetch(timeout=PATIENCE).messages] == [b"live"]
    assert by_publisher(iter(got)) == by_publisher(iter(expected))


@SMALL
def test_a_session_reads_on_and_its_flight_too(db: ts.Database, tmp_path: Path) -> None:
    """Messages that were sent to a client but not acknowledged are read from the archive for redelivery."""
    session = db.sessions.open("me", expiry_interval=None, receive_maximum=4)
    session.subscribe("jobs/#", 1)
    db.publish([ts.Message("jobs/1", b"%d" % number, "c1", 1) for number in range(12)])
    sent = [one for one in session.deliver() if isinstance(one, Publish)]
    assert [one.message.payload for one in sent] == [b"0", b"1", b"2", b"3"]
    db.add_generation()
    db.archives.archive(tmp_path / "export")
    db._sessions, db._made_publisher = None, None  # discards sessions in memory, as a new process would
    again = db.sessions.open("me", receive_maximum=4, expiry_interval=None)
    got: list[bytes] = []
    while deliveries := [one for one in again.deliver() if isinstance(one, Publish)]:
        got += [one.message.payload for one in deliveries]
        again.puback(*[one.packet_id for one in deliveries])
    assert got == [b"%d" % number for number in range(12)]


def test_readers_and_writers_beside_it_see_everything(tmp_path: Path, fill: Fill) -> None:
    """Replays during archivings return all messages, or raise `GenerationArchivedError`."""
    with ts.open(tmp_path / "db", shards=2) as db:
        for _ in range(4):
            fill(db, 100)
            db.add_generation()
        expected = len(list(db.replay("#")))
        stop, replays = threading.Event(), ([], [])
        beside = [begin(partial(_read_until, stop, db, expected, ended)) for ended in replays]
        beside.append(begin(partial(_write_until, stop, db)))
        try:
            for number in range(1, 5):
                for ended in replays:
                    wait_until(ended.__len__, "a replay to come to its end")
                    ended.clear()
                db.archives.archive(tmp_path / "export", generations=[number])
        finally:
            stop.set()
        for one in beside:
            one.result(PATIENCE)
        assert len(list(db.replay("#"))) == expected
        assert db.verify().ok


def _read_until(stop: threading.Event, db: ts.Database, expected: int, ended: list[None]) -> None:
    """Count replays that finish, except for those that raise `GenerationArchivedError`."""
    while not stop.is_set():
        with suppress(ts.GenerationArchivedError):
            assert sum(1 for _ in db.replay("#", batch_size=50)) == expected
            ended.append(None)


def _write_until(stop: threading.Event, db: ts.Database) -> None:
    for number in itertools.count():
        db.store([ts.Message("$SYS/tick", b"", f"c{number}")])
        if stop.wait(MOMENT):
            return


def test_a_delete_waits_and_then_is_refused(db: ts.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete that waits for an archiving is refused afterwards, because its messages are in the export."""
    before = everything(db)
    write, deleting = exporting._write, []

    def write_and_delete(*arguments: object) -> object:
        if not deleting:
            deleting.append(begin(lambda: db.delete("fleet/#")))
            wait_until(
                lambda: held_elsewhere(db.storage.shards[0].generations.rewrite_lock._turn),
                "the delete to wait for the shard",
            )
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "_write", write_and_delete)
    db.archives.archive(tmp_path / "export")
    with pytest.raises(ts.GenerationError):
        deleting[0].result(PATIENCE)
    assert everything(db) == before


@SMALL
def test_an_export_ends_with_its_database(db: ts.Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the database ends an export at its next batch, and leaves no file of it."""
    compare = exporting._compare

    def close_and_compare(*arguments: object) -> None:
        db.close()  # called within another call, so another thread closes the database
        wait_until(lambda: db.storage.closed, "the other thread to begin closing")
        compare(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exporting, "_compare", close_and_compare)
    with pytest.raises(ts.DatabaseClosedError):
        db.archives.archive(tmp_path / "export")
    assert list((tmp_path / "export").rglob("*.parquet")) == []


# --- plugins ----------------------------------------------------------------------------


def test_rows_are_exported_as_stored_and_pass_the_plugins_once(tmp_path: Path, reversing: str, fill: Fill) -> None:
    """Exports contain payloads as plugins have stored them, and can't be imported without these plugins."""
    with ts.open(tmp_path / "db", plugins=[reversing]) as db:
        fill(db)
        db.add_generation()
        before = everything(db)
        db.archives.archive(tmp_path / "export")
        assert everything(db) == before
    stored = pq.read_table(tmp_path / "export" / "shard=0000" / "generation=0001" / "part-00000.parquet")
    payloads = [one.payload for messages in before for one in messages]
    assert {payload[::-1] for payload in stored["payload"].to_pylist()} == set(payloads)
    with ts.open(tmp_path / "new") as new, pytest.raises(ts.ImportSourceError, match="reversing"):
        open_export(tmp_path / "export", new)


# --- looking ----------------------------------------------------------------------------


def test_explain_and_sql_know_of_it(tmp_path: Path, fill: Fill) -> None:
    with ts.open(tmp_path / "db", backend="duckdb", layout="table") as db:
        fill(db)
        db.add_generation()
        fill(db, 10)
        db.archives.archive(tmp_path / "export")
        explained = db.explain("fleet/+/speed")
        assert [slab.reads.visited > 0 for slab in explained.slabs] == [True, True]
        counted = db.sql("SELECT count(*) FROM messages")
        assert counted.column(0).to_pylist() == [len(list(db.replay("#")))]
