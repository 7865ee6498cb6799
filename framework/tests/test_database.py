"""Databases in unusual conditions: interruptions, damage, copies, Arrow from other libraries, many shards."""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pyarrow as pa
import pytest
import topicstore as ts
from topicstore.contract.engine import DATA, META, Engine, WriteBatch, encode_generation
from topicstore.contract.replay_plan import Order
from topicstore.storage.directory.manifest import read_manifest
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults import namespaces
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", shards=2) as opened:
        yield opened


def messages(count: int) -> list[ts.Message]:
    return [ts.Message("a/b", b"%d" % number, f"client-{number}") for number in range(count)]


def payloads(db: ts.Database) -> list[bytes]:
    return sorted(message.payload for message in db.replay("#"))


# --- interruptions ---


def test_an_interrupted_encode_closes_the_shard_and_loses_nothing(tmp_path: Path) -> None:
    """Changes that an interrupted layout has only half made in memory are never written to the engine."""
    with ts.open(tmp_path / "db") as opened:
        opened.store([ts.Message("a", b"1")])
        slab = opened.storage.shards[0].generations.slab(1)
        original = slab.trie.learn_all  # type: ignore[attr-defined]

        def interrupt(topics: list[str]) -> list[int]:
            original(topics)
            raise KeyboardInterrupt

        slab._topics._streams_of = interrupt  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            opened.store([ts.Message("new/topic", b"2")])
        with pytest.raises(ts.ShardReadOnlyError, match="KeyboardInterrupt"):
            opened.store([ts.Message("a", b"3")])
        assert [b"1"] == payloads(opened)
    with ts.open(tmp_path / "db") as opened:
        opened.store([ts.Message("new/topic", b"4")])
        assert [b"1", b"4"] == payloads(opened)
        assert opened.verify().ok


def test_a_lock_is_released_if_acquiring_the_next_is_interrupted(db: ts.Database) -> None:
    """If acquiring the second shard's lock is interrupted, the first lock is released, and another thread can store."""

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

        def _is_owned(self) -> bool:
            return False

    second = db.storage.shards[1]
    original = second.writer.lock
    second.writer.lock = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        db.store(messages(10))
    second.writer.lock = original
    begin(lambda: db.store(messages(10))).result(PATIENCE)
    assert 10 == len(payloads(db))


# --- times ---


def test_a_clock_out_of_range_counts_as_the_end_of_it(tmp_path: Path) -> None:
    """A clock before the allowed range counts as the range's start, and messages stored then can be read."""
    with ts.open(tmp_path / "db", clock=lambda: -5) as opened:
        opened.store([ts.Message("a", b"1")])
        assert [0] == [message.timestamp for message in opened.replay("#")]


# --- opening ---


def test_directories_that_were_mixed_up_are_noticed(tmp_path: Path) -> None:
    """Opening refuses a shard's directory that was replaced by another shard's or another database's."""
    for name in ("one", "other"):
        with ts.open(tmp_path / name, shards=2) as opened:
            opened.store(messages(4))
    shards = [tmp_path / "one" / f"shard-000{number}" for number in range(2)]
    shards[0].rename(tmp_path / "kept")
    shards[1].rename(shards[0])
    (tmp_path / "kept").rename(shards[1])
    with pytest.raises(ts.DataLossError, match=r"shard 0 of .* is not as it was closed"):
        ts.open(tmp_path / "one")
    (tmp_path / "one" / "closed").unlink()  # without this file, as after a kill, sizes aren't compared
    with pytest.raises(ts.CorruptionError, match="shard 0: its directory holds shard 1"):
        ts.open(tmp_path / "one")
    shutil.rmtree(shards[0])
    shutil.copytree(tmp_path / "other" / "shard-0000", shards[0])
    with pytest.raises(ts.CorruptionError, match="shard 0: its directory holds shard 0 of database"):
        ts.open(tmp_path / "one")


def test_a_newer_form_of_a_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation in a newer format of its layout is refused on opening, and left unchanged."""
    from topicstore_layouts.block.layout import BlockLayout

    with monkeypatch.context() as later:
        later.setattr(BlockLayout, "format", 99)
        with ts.open(tmp_path / "db") as opened:
            opened.store(messages(1))
    with pytest.raises(ts.NewerFormatError, match="format 99 of layout 'block'"):
        ts.open(tmp_path / "db")


@pytest.mark.parametrize("missing", [False, True])
def test_damaged_messages_are_named(db: ts.Database, missing: bool) -> None:
    """Readers and `verify` report damage by shard and generation.

    `verify` also reports missing messages. Other shards stay readable.
    """
    db.store(messages(10))
    engine = db.storage.shards[1].writer.open_engine()
    (key, value), *_ = next(engine.scan(DATA, limit=1))
    harm, undo = WriteBatch(), WriteBatch()
    harm.delete(DATA, key) if missing else harm.put(DATA, key, value[:-1] + bytes((value[-1] ^ 1,)))
    undo.put(DATA, key, value)
    engine.write(harm)
    place = "shard 1, generation 1"
    for order in () if missing else get_args(Order):
        with pytest.raises(ts.CorruptionError, match=f"^{place}, .+: "):
            list(db.replay("#", order=order))
    assert {place} == {damage.place[: len(place)] for damage in db.verify().damages}
    others = [stream for stream in db.streams("#") if stream.shard == 0]
    read = [message for stream in others for message in db.read(db.cursor(stream, "#")).batch.to_messages()]
    assert {m.payload for m in messages(10) if db.shard_of(m.client_id) == 0} == {message.payload for message in read}
    engine.write(undo)
    assert (10, []) == (len(payloads(db)), db.verify().damages)


def test_a_checkpoint_is_whole_or_not_there(db: ts.Database, tmp_path: Path) -> None:
    """A failed checkpoint leaves no directory, and a successful one is an independent database.

    A checkpoint to an existing path is refused.
    """
    db.store(messages(10))
    full = ts.StorageFullError("disk full")
    engine = db.storage.shards[1].writer.engine
    with patch.object(engine, "checkpoint_steps", side_effect=full), pytest.raises(ts.StorageFullError):
        db.checkpoint(tmp_path / "copy")
    assert ["db"] == [path.name for path in tmp_path.iterdir()]
    with pytest.raises(ts.NotADatabaseError, match="inside the database"):
        db.checkpoint(tmp_path / "db" / "copy")
    cursors = [db.cursor(stream, "#") for stream in db.streams("#")]
    db.checkpoint(tmp_path / "copy")
    db.store(messages(1))
    with pytest.raises(ts.NotADatabaseError):
        db.checkpoint(tmp_path / "copy")
    with ts.open(tmp_path / "copy") as copy:
        assert 10 == len(payloads(copy)) == sum(len(copy.read(cursor).batch) for cursor in cursors)
        copy.store(messages(2))
        assert 12 == len(payloads(copy))
        assert read_manifest(tmp_path / "db") == read_manifest(tmp_path / "copy")
    assert 11 == len(payloads(db))


def test_no_checkpoint(tmp_path: Path) -> None:
    """A checkpoint is refused on a backend that can't make one, and makes no directory."""
    with ts.open("memory", backend="memory") as db, pytest.raises(ts.UnsupportedError):
        db.checkpoint(tmp_path / "copy")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(("backend", "layout"), [("rocksdb", "block"), ("duckdb", "table")])
def test_a_checkpoint_holds_writers_up_only_for_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, layout: str
) -> None:
    """Messages are stored while a checkpoint prepares and copies; the copy has those stored before its snapshot."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, layout=layout, shards=2) as db:
        db.store([ts.Message("a", b"first", f"c{n}") for n in range(10)])

        def store(text: bytes) -> None:
            # enough clients that each shard gets a message
            messages = [ts.Message("a", text, f"c{n}") for n in range(10)]
            begin(lambda: db.store(messages)).result(PATIENCE)

        kind: Any = type(db.storage.shards[0].writer.open_engine())
        in_steps, copying = kind.checkpoint_steps, getattr(kind, "_copy", None)

        def steps(self: Engine, path: Path) -> Any:
            made = in_steps(self, path)
            store(b"before")
            next(made)
            yield
            next(made)
            yield
            store(b"after")
            yield from made

        def copy_rows(self: Engine, *arguments: Any) -> None:
            store(b"after")
            copying(self, *arguments)

        monkeypatch.setattr(kind, "checkpoint_steps", steps)
        if copying is not None:
            monkeypatch.setattr(kind, "_copy", copy_rows)
        db.checkpoint(tmp_path / "copy")
        assert {b"first", b"before", b"after"} == set(payloads(db))
    with ts.open(tmp_path / "copy") as copy:
        assert 20 * [b"before"] + 10 * [b"first"] == payloads(copy)


# --- Arrow in and out ---


def test_tables_are_taken_like_batches(db: ts.Database) -> None:
    """Arrow tables are stored like batches, with any chunks and with fields in any order."""
    batch = ts.MessageBatch.from_messages(messages(6)).to_arrow()
    db.store(pa.Table.from_batches([batch.slice(0, 2), batch.slice(2)]))
    db.store(pa.Table.from_batches([], batch.schema))
    assert 6 == len(payloads(db))


class Stream:
    """An object with only Arrow's C stream interface, like the data frames of Polars and pandas."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


POLARS = pa.schema(
    [
        ("topic", pa.string_view()),
        ("client_id", pa.dictionary(pa.uint32(), pa.large_string())),
        ("payload", pa.large_binary()),
        ("timestamp", pa.timestamp("ns", tz="UTC")),
    ]
)
"""The types that Polars and other libraries use for these columns."""


def test_whatever_hands_over_arrow_can_be_stored(db: ts.Database) -> None:
    table = pa.Table.from_batches([ts.MessageBatch.from_messages(messages(6)).to_arrow()])
    db.store(Stream(table.select(POLARS.names).cast(POLARS)))
    assert [message.payload for message in messages(6)] == payloads(db)
    assert {"client-0", "client-5"} <= {message.client_id for message in db.replay("#")}


def test_one_message_needs_no_list(db: ts.Database) -> None:
    """A single message is stored like a list of one message."""
    message = ts.Message("one", b"1", "me", timestamp=1_748_779_200_000_000)
    assert 1 == db.store(message).count
    assert [message] == list(db.replay("one"))


def test_a_relation_of_duckdb_can_be_stored(db: ts.Database) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        db.store(connection.sql("SELECT 'a/' || range AS topic, 'x'::BLOB AS payload FROM range(5000)"))
    assert 5_000 == len(payloads(db))


def test_a_bad_row_of_a_stream_is_named_by_its_number_in_all_of_it(db: ts.Database) -> None:
    good = ts.MessageBatch.from_messages(messages(4)).to_arrow()
    bad = pa.RecordBatch.from_pydict({"topic": ["a", "+"], "payload": [b"", b""]})
    parts = [good.select(["topic", "payload"]), bad.cast(pa.schema([ts.SCHEMA.field(n) for n in ("topic", "payload")]))]
    for table in (pa.Table.from_batches(parts), Stream(pa.Table.from_batches(parts))):
        with pytest.raises(ts.InvalidMessageError) as raised:
            db.store(table)
        assert 5 == raised.value.index
    assert [] == payloads(db)


def test_a_replay_in_arrow_is_a_reader_that_others_take(db: ts.Database, tmp_path: Path) -> None:
    """`replay_arrow` returns a `RecordBatchReader` in the order of the replay, which another database can store."""
    db.store(messages(100))
    reader = db.replay_arrow("#", batch_size=7)
    assert isinstance(reader, pa.RecordBatchReader)
    assert ts.SCHEMA == reader.schema
    with ts.open(tmp_path / "copy", shards=1) as copy:
        copy.store(reader)
        assert list(db.replay("#")) == [*copy.replay("#")]
        copy.store(db.replay_arrow("#", ids=True))
        assert 200 == len(payloads(copy))
    assert ts.SCHEMA_WITH_IDS == db.replay_arrow("none", ids=True).schema
    assert 0 == db.replay_arrow("none").read_all().num_rows


def test_a_replay_is_in_order_of_positions_unless_any_will_do() -> None:
    """A replay yields positions in ascending order over all shards and streams, unless `order="any"`."""
    with ts.open("memory", shards=4, backend="memory", layout="wildcard_optimized") as db:
        for number in range(300):
            db.store([ts.Message(f"a/{number % 7}", b"%d" % number, f"c{number % 11}")])
        positions, others = (
            [position for batch in replay for position in batch["position"].to_pylist()]
            for replay in (db.replay_arrow("#", ids=True), db.replay_arrow("#", ids=True, order="any"))
        )
        assert 300 == len(positions)
        assert positions == sorted(positions) == sorted(others)


def test_a_database_that_is_dropped_unclosed_says_so_and_closes(tmp_path: Path) -> None:
    """A database that is dropped without being closed warns, and releases its lock."""
    opened: ts.Database | None = ts.open(tmp_path / "db")
    with pytest.warns(ResourceWarning, match="was not closed"):
        opened = None  # noqa: F841
    ts.open(tmp_path / "db").close()


# --- counting ---


def test_dropping_a_generation_frees_its_disk_space(tmp_path: Path) -> None:
    """Dropping a generation frees its disk space even if nothing is written afterwards.

    RocksDB deletes replaced files a little later.
    """
    source = random.Random(1)
    with ts.open(tmp_path / "db", options={"rocksdb": {"write_buffer_bytes": 1 << 20}}) as opened:
        for _ in range(40):
            opened.store([ts.Message("a", source.randbytes(1 << 10)) for _ in range(100)])
        opened.add_generation()
        full = opened.info().disk_bytes
        opened.drop_generation(1)
        assert full > 4 << 20
        wait_until(lambda: opened.info().disk_bytes < full / 4, "the generation's files are gone")


def test_live_bytes_are_those_of_messages(tmp_path: Path) -> None:
    """`live_bytes` counts neither state nor deleted messages."""
    for layout in ("block", "reference"):
        with ts.open(tmp_path / layout, layout=layout) as opened:
            opened.store(messages(100), state={0: [ts.StateWrite(b"k", bytes(1 << 20))]})
            full = opened.info().live_bytes
            assert 0 < full < 20_000
            assert 100 == opened.delete("#")
            assert opened.info().live_bytes < full  # the names of topics and client ids still take disk space
            assert 0 == opened.info().messages


def test_options_of_layouts(tmp_path: Path) -> None:
    """Options at creation apply to the first layout only; a later generation inherits the latest of its layout."""
    with pytest.raises(ts.InvalidArgumentError, match=r"skipstream.*add_generation"):
        ts.open(tmp_path / "db", mode="x", options={"block": {}, "skipstream": {"thresholds": [1, 1]}})
    with ts.open(tmp_path / "db", mode="x", options={"block": {"level": 5}}) as db:
        db.add_generation("reference")
        db.add_generation("block")
        db.add_generation("block", {"level": 7})
        db.add_generation("skipstream")
        db.add_generation("block")
        levels = [generation.options.get("level") for generation in db.generations()]
        assert [5, None, 5, 7, None, 7] == levels


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized"])
def test_a_generation_that_cannot_be_opened(tmp_path: Path, layout: str) -> None:
    """If a generation can't be opened, calls that need it raise, other calls work, and it can be dropped."""
    clock = Clock(START)
    path = tmp_path / "db"
    with ts.open(path, mode="x", layout=layout, clock=clock, auto_compact=False) as db:
        db.store([ts.Message("t", b"old")])
        _damage_learned(db, 1)
    clock.now += 10_000_000
    with ts.open(path, clock=clock) as db:
        for call in (lambda: list(db.replay("#")), lambda: db.store([ts.Message("t", b"x")]), lambda: db.streams("#")):
            with pytest.raises(ts.CorruptionError, match="shard 0, generation 1"):
                call()
        assert ["shard 0, generation 1"] == [damage.place[:21] for damage in db.verify().damages]
        assert 2 == db.add_generation()
        db.store([ts.Message("t", b"new")])
        clock.now += 10_000_000
        assert [b"new"] == [message.payload for message in db.replay("#", start=clock.now - 15_000_000)]
        db.compact()
        assert db.drop_generation(1)
        assert [b"new"] == [message.payload for message in db.replay("#")]
        assert [] == db.verify().damages


def _damage_learned(db: ts.Database, generation: int) -> None:
    engine, prefix = db.storage.shards[0].writer.open_engine(), encode_generation(generation) + b"\x01"
    (key, value), *_ = next(iter(engine.scan(META, prefix, prefix + b"\xff")))
    put(engine, META, {key: bytes([value[0] ^ 1]) + value[1:]})


# --- many shards ---

SHARDS = 200
FILES = 4_096
"""The limit of open files that the test needs: RocksDB opens 11 for each shard, and the reader others."""
MANY = """
import os, resource
import topicstore as ts

path, shards = arguments[0], int(arguments[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)

def by_shard(db):
    shards = [db.shard_of(message.client_id) for message in db.replay("#")]
    return [len(shards), len(set(shards))]

if not os.path.exists(path):
    if not (child := os.fork()):
        db = ts.open(path, backend="rocksdb", shards=shards)
        for generation in range(2):
            db.store([ts.Message(f"a/{n % 50}", b"%d" % n, f"client-{n}") for n in range(4_000)])
            generation or db.add_generation()
        os._exit(0)  # as if it were killed
    os.waitpid(child, 0)
with ts.open(path) as db, ts.open(path, mode="r") as reader:
    say(*by_shard(db), *by_shard(reader), db.verify().messages, len(db.verify().damages), db.delete("a/1"))
    reader.refresh()
    say(*by_shard(reader))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < FILES, reason=f"needs {FILES} open files: ulimit -Hn"
)
def test_two_hundred_shards(tmp_path: Path) -> None:
    """Two hundred shards can be written, survive a kill, are verified and read beside the writer, and reopen."""
    need("rocksdb")
    everything, deleted = [8_000, SHARDS], 160
    assert [[*everything, *everything, 8_000, 0, deleted], [8_000 - deleted, SHARDS]] == namespaces.run(
        MANY, tmp_path / "db", SHARDS
    )
    assert [8_000 - deleted, SHARDS] == namespaces.run(MANY, tmp_path / "db", SHARDS)[0][:2]
