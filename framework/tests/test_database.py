"""What a database does when something is unusual: interruptions, half-done changes, odd arguments."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import topicstore as ts
from topicstore import opening
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import META, STATE, Engine, WriteBatch, encode_generation
from topicstore.shard.records import load_tail
from topicstore.shard.write_path import Prepared
from topicstore.storage.manifest import Manifest, read_manifest
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


# --- generations over several shards ---


def test_an_addition_that_fails_between_shards_is_finished_by_the_next(db: ts.Database) -> None:
    """No generation is dropped that one of the shards still writes."""
    broken = db.storage.shards[1]
    original = broken.add_generation

    def fail(*_: object) -> int:
        raise ts.StorageFullError("disk full")

    broken.add_generation = fail  # type: ignore[method-assign]
    with pytest.raises(ts.StorageFullError):
        db.add_generation()
    assert [1] == [generation.number for generation in db.generations()]
    broken.add_generation = original  # type: ignore[method-assign]
    assert 2 == db.add_generation()
    assert [2, 2] == [shard.current for shard in db.storage.shards]
    db.store(messages(10))
    with pytest.raises(ts.GenerationError, match="the current one"):
        db.drop_generation(2)
    assert 10 == len(payloads(db))


def test_a_drop_that_one_shard_would_refuse_touches_none(tmp_path: Path) -> None:
    """With one shard ahead of the other, the newest common generation stays in both."""
    with ts.open(tmp_path / "db", shards=2) as opened:
        opened.store(messages(10))
        opened.storage.shards[0].add_generation("block", {})
        with pytest.raises(ts.GenerationError, match="the current one"):
            opened.drop_generation(1)
        assert 10 == len(payloads(opened))
    with ts.open(tmp_path / "db") as opened:
        assert 10 == len(payloads(opened))
        assert [2, 2] == [shard.current for shard in opened.storage.shards]


def test_a_shard_far_behind_catches_up_at_open(tmp_path: Path) -> None:
    """Generations that were added and dropped elsewhere meanwhile are passed through."""
    with ts.open(tmp_path / "db", shards=2) as opened:
        opened.store(messages(10))
        for _ in range(3):
            opened.storage.shards[0].add_generation("block", {})
        opened.storage.shards[0].drop_generation(2)
    with ts.open(tmp_path / "db") as opened:
        assert [1, 3, 4] == [generation.number for generation in opened.generations()]
        assert 10 == len(payloads(opened))
        assert opened.verify().ok


# --- interruptions ---


def test_an_interrupted_encode_closes_the_shard_and_loses_nothing(tmp_path: Path) -> None:
    """What a layout left half changed in memory never reaches the engine."""
    with ts.open(tmp_path / "db") as opened:
        opened.store([ts.Message("a", b"1")])
        slab = opened.storage.shards[0].slab(1)
        original = slab.trie.learn  # type: ignore[attr-defined]

        def interrupt(topic: str) -> int:
            original(topic)
            raise KeyboardInterrupt

        slab._topics._stream_of = interrupt  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            opened.store([ts.Message("new/topic", b"2")])
        with pytest.raises(ts.ShardReadOnlyError, match="KeyboardInterrupt"):
            opened.store([ts.Message("a", b"3")])
        assert [b"1"] == payloads(opened)
    with ts.open(tmp_path / "db") as opened:
        opened.store([ts.Message("new/topic", b"4")])
        assert [b"1", b"4"] == payloads(opened)
        assert opened.verify().ok


def test_a_lock_is_given_back_when_taking_the_next_is_interrupted(db: ts.Database) -> None:
    """Another thread can store afterwards."""

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

        def _is_owned(self) -> bool:
            return False

    second = db.storage.shards[1]
    original = second.log.lock
    second.log.lock = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        db.store(messages(10))
    second.log.lock = original
    begin(lambda: db.store(messages(10))).result(PATIENCE)
    assert 10 == len(payloads(db))


# --- times ---


def test_a_message_without_a_time_is_never_late(tmp_path: Path) -> None:
    """It follows what came before, though that lay ahead of the clock."""
    now = 1_700_000_000_000_000
    with ts.open(tmp_path / "db", timestamps="message", clock=lambda: now) as opened:
        opened.store([ts.Message("t", b"1", timestamp=now + 30_000_000), ts.Message("t", b"2")])
        result = opened.store([ts.Message("t", b"3")])
        assert [b"1", b"2", b"3"] == [message.payload for message in opened.replay("#")]
        assert [now + 30_000_000, now, now] == [message.timestamp for message in opened.replay("#")]
        assert 0 == result.lifted
        with pytest.raises(ts.LateMessageError, match="message 0 of the batch"):
            opened.store([ts.Message("t", b"4", timestamp=now)])


def test_a_clock_out_of_range_counts_as_the_end_of_it(tmp_path: Path) -> None:
    """What is stored can be read."""
    with ts.open(tmp_path / "db", clock=lambda: -5) as opened:
        opened.store([ts.Message("a", b"1")])
        assert [0] == [message.timestamp for message in opened.replay("#")]


# --- opening ---


def test_the_same_options_open_it_again(tmp_path: Path) -> None:
    """In whichever of the equal ways they are said; others are refused."""
    options = {"block": {"thresholds": (50, 10)}}
    for again in (options, options, {"block": {"thresholds": [50, 10], "level": "1"}}, None):
        ts.open(tmp_path / "db", options=again).close()
    with pytest.raises(ts.ManifestMismatchError, match="has its own options"):
        ts.open(tmp_path / "db", options={"block": {"thresholds": (50, 11)}})


def test_directories_that_were_mixed_up_are_noticed(tmp_path: Path) -> None:
    """Neither another shard nor another database's passes for one's own."""
    for name in ("one", "other"):
        with ts.open(tmp_path / name, shards=2) as opened:
            opened.store(messages(4))
    shards = [tmp_path / "one" / f"shard-000{number}" for number in range(2)]
    shards[0].rename(tmp_path / "kept")
    shards[1].rename(shards[0])
    (tmp_path / "kept").rename(shards[1])
    with pytest.raises(ts.DataLossError, match=r"shard 0 of .* is not as it was closed"):
        ts.open(tmp_path / "one")
    (tmp_path / "one" / "closed").unlink()  # as if it was killed: their files may have any size
    with pytest.raises(ts.CorruptionError, match="shard 0: its directory holds shard 1"):
        ts.open(tmp_path / "one")
    shutil.rmtree(shards[0])
    shutil.copytree(tmp_path / "other" / "shard-0000", shards[0])
    with pytest.raises(ts.CorruptionError, match="shard 0: its directory holds shard 0 of database"):
        ts.open(tmp_path / "one")


def test_a_newer_form_of_a_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that a later version of the layout wrote is left as it is."""
    from topicstore_layouts.block.layout import BlockLayout

    with monkeypatch.context() as later:
        later.setattr(BlockLayout, "format", 2)
        with ts.open(tmp_path / "db") as opened:
            opened.store(messages(1))
    with pytest.raises(ts.NewerFormatError, match="format 2 of layout 'block'"):
        ts.open(tmp_path / "db")


def test_sealed_values_belong_to_their_keys() -> None:
    """Neither another key, nor another value, nor less of it passes."""
    stored = add_checksum(b"key", b"value")
    assert b"value" == strip_checksum(b"key", stored)
    for key, data in ((b"other", stored), (b"key", stored[:-1] + b"x"), (b"key", stored[:-1]), (b"key", b"")):
        with pytest.raises(ts.CorruptionError):
            strip_checksum(key, data)


def test_the_tail_survives_and_its_damage_is_noticed(tmp_path: Path) -> None:
    """The last position is not a number that a flipped bit may change."""
    with ts.open(tmp_path / "db") as opened:
        result = opened.store(messages(3))
        engine = opened.storage.shards[0].engine()
        assert result.ids[-1].position == load_tail(engine).last_position
        value = engine.get(STATE, b"\0tail")
        batch = WriteBatch()
        batch.put(STATE, b"\0tail", value[:-1] + bytes((value[-1] ^ 1,)))
        engine.write(batch)
    with pytest.raises(ts.CorruptionError, match="state: tail"):
        ts.open(tmp_path / "db")


def test_creating_never_opens_what_another_has_just_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it was made, with other settings, right after this process had looked whether there is one."""

    def read_then_create(path: Path) -> Manifest | None:
        found = read_manifest(path)
        monkeypatch.setattr(opening, "read_manifest", read_manifest)
        ts.open(path, shards=3).close()
        return found

    monkeypatch.setattr(opening, "read_manifest", read_then_create)
    with pytest.raises(ts.DatabaseLockedError, match="created by somebody else"):
        ts.open(tmp_path / "db", mode="x")
    with pytest.raises(ts.NotADatabaseError, match="there is a database"):
        ts.open(tmp_path / "db", mode="x")
    with ts.open(tmp_path / "db", mode="r") as there:
        assert 3 == there.manifest.shards


def test_a_checkpoint_is_whole_or_not_there(db: ts.Database, tmp_path: Path) -> None:
    """A failed one leaves no directory; a good one is a database of its own; none goes inside."""
    db.store(messages(10))
    original = db.storage.shards[1].log.engine.checkpoint

    def fail(_: Path) -> None:
        raise ts.StorageFullError("disk full")

    db.storage.shards[1].log.engine.checkpoint = fail  # type: ignore[method-assign]
    with pytest.raises(ts.StorageFullError):
        db.checkpoint(tmp_path / "copy")
    assert ["db"] == [path.name for path in tmp_path.iterdir()]
    db.storage.shards[1].log.engine.checkpoint = original  # type: ignore[method-assign]
    with pytest.raises(ts.NotADatabaseError, match="inside the database"):
        db.checkpoint(tmp_path / "db" / "copy")
    db.checkpoint(tmp_path / "copy")
    db.store(messages(1))
    with ts.open(tmp_path / "copy") as copy:
        assert 10 == len(payloads(copy))
        assert read_manifest(tmp_path / "db") == read_manifest(tmp_path / "copy")


@pytest.mark.parametrize(("backend", "layout"), [("rocksdb", "block"), ("duckdb", "table")])
def test_a_checkpoint_holds_writers_up_only_for_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, layout: str
) -> None:
    """Messages are stored while it prepares and while it copies; the copy has the former and not the latter."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, layout=layout, shards=2) as db:
        db.store([ts.Message("a", b"first", f"c{n}") for n in range(10)])

        def store(text: bytes) -> None:
            messages = [ts.Message("a", text, f"c{n}") for n in range(10)]  # for both shards
            begin(lambda: db.store(messages)).result(PATIENCE)

        kind: Any = type(db.storage.shards[0].engine())
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


# --- arguments ---


@pytest.mark.parametrize("wrong", [ts.Message("a", b""), None, 3, "text", b"bytes"], ids=repr)
def test_what_is_not_a_batch_is_refused_by_name(db: ts.Database, wrong: object) -> None:
    """The first mistake that everybody makes gets a clear answer."""
    with pytest.raises(ts.InvalidArgumentError, match=type(wrong).__name__):
        db.store(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"topics": ["a", "a/+/#"]},
        {"qos": [0, 7]},
        {"payloads": [b"x", "text"]},
        {"payloads": [b"x"]},
        {"client_ids": ("c", None)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_batch_made_by_hand_is_checked_like_any_other(db: ts.Database, wrong: dict[str, object]) -> None:
    """The constructor checks nothing, so the store does; nothing of a bad one is stored."""
    columns: dict[str, object] = {
        "topics": ["a", "b"],
        "payloads": [b"x", b"y"],
        "client_ids": ["c", "d"],
        "qos": [0, 1],
        "retain": [False, True],
        "timestamps": [None, 5],
        "properties": [None, None],
    }
    db.store(ts.MessageBatch(**columns))
    with pytest.raises(ts.InvalidMessageError):
        db.store(ts.MessageBatch(**{**columns, **wrong}))
    assert [b"x", b"y"] == payloads(db)


def test_tables_are_taken_like_batches(db: ts.Database) -> None:
    """Chunks and the order of fields don't matter."""
    batch = ts.MessageBatch.from_messages(messages(6)).to_arrow()
    db.store(pa.Table.from_batches([batch.slice(0, 2), batch.slice(2)]))
    db.store(pa.Table.from_batches([], batch.schema))
    assert 6 == len(payloads(db))


# --- Arrow in and out ---


class Stream:
    """What hands over Arrow through C and is no class of PyArrow's, as Polars' and pandas' frames."""

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
"""Types as other libraries have them."""


def test_whatever_hands_over_arrow_can_be_stored(db: ts.Database) -> None:
    table = pa.Table.from_batches([ts.MessageBatch.from_messages(messages(6)).to_arrow()])
    db.store(Stream(table.select(POLARS.names).cast(POLARS)))
    assert [message.payload for message in messages(6)] == payloads(db)
    assert {"client-0", "client-5"} <= {message.client_id for message in db.replay("#")}


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


def test_arrow_without_columns_holds_no_messages(db: ts.Database) -> None:
    with pytest.raises(ts.InvalidMessageError, match="no columns of messages"):
        db.store(pa.array([1, 2]))  # type: ignore[arg-type]


def test_a_replay_in_arrow_is_a_reader_that_others_take(db: ts.Database, tmp_path: Path) -> None:
    """Another database, for one; rows and order are those of the replay."""
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


def test_errors_come_through_a_reader_as_they_are(db: ts.Database) -> None:
    """Not as one of Arrow's: whoever reads in Python catches ours."""
    db.store(messages(100))
    reader = db.replay_arrow("#", batch_size=7)
    reader.read_next_batch()
    db.close()
    with pytest.raises(ts.DatabaseClosedError):
        reader.read_all()


def test_a_replay_is_in_order_of_positions_unless_any_will_do(tmp_path: Path) -> None:
    """Over shards and streams; what goes back has no other."""
    with ts.open(tmp_path / "db", shards=4, backend="memory", layout="wildcard_optimized") as db:
        for number in range(300):
            db.store([ts.Message(f"a/{number % 7}", b"%d" % number, f"c{number % 11}")])
        positions = [p for batch in db.replay_arrow("#", ids=True) for p in batch["position"].to_pylist()]
        assert sorted(positions) == positions
        assert 300 == len(positions)
        assert sorted(positions) == sorted(
            p for batch in db.replay_arrow("#", ids=True, order="any") for p in batch["position"].to_pylist()
        )
        with pytest.raises(ts.InvalidArgumentError, match="not 'none'"):
            db.replay("#", order="none")  # type: ignore[arg-type]
        with pytest.raises(ts.InvalidArgumentError, match="leave out order"):
            db.replay("#", reverse=True, order="any")


@pytest.mark.parametrize("limit", [0, -1, 1.5, float("nan"), "3", None, True])
def test_limits_are_whole_numbers(db: ts.Database, limit: object) -> None:
    """Whatever else is given."""
    db.store(messages(2))
    stream = db.streams("#")[0]
    with pytest.raises(ts.InvalidArgumentError, match="limit is a whole number"):
        db.read(db.cursor(stream, "#"), limit)  # type: ignore[arg-type]
    with pytest.raises(ts.InvalidArgumentError, match="batch_size is a whole number"):
        db.replay("#", batch_size=limit)  # type: ignore[arg-type]


def test_a_database_that_is_dropped_unclosed_says_so_and_closes(tmp_path: Path) -> None:
    """Its lock does not stay behind."""
    opened: ts.Database | None = ts.open(tmp_path / "db")
    with pytest.warns(ResourceWarning, match="was not closed"):
        opened = None  # noqa: F841
    ts.open(tmp_path / "db").close()


def test_the_lock_names_its_holder(db: ts.Database) -> None:
    """Process and time."""
    with pytest.raises(ts.DatabaseLockedError, match=f"process {os.getpid()} on "):
        ts.open(db.path)


# --- the buffered writer ---


def test_a_callback_may_put_flush_and_close(db: ts.Database) -> None:
    """Futures are done outside the writer's locks."""
    writer = db.writer(max_items=2, flush_interval=3_600)
    first = writer.put(ts.Message("a", b"1"))
    first.add_done_callback(lambda _: (writer.put(ts.Message("a", b"3")), writer.flush(), writer.close()))
    writer.put(ts.Message("a", b"2"))
    assert [b"1", b"2", b"3"] == payloads(db)


def test_a_late_message_fails_alone(tmp_path: Path) -> None:
    """Those around it are stored, and their futures say where."""
    now = 1_700_000_000_000_000
    with (
        ts.open(tmp_path / "db", timestamps="message", clock=lambda: now) as opened,
        opened.writer(max_items=3, flush_interval=3_600) as writer,
    ):
        times = [now, now - 10, now]
        futures = [writer.put(ts.Message("a", b"%d" % n, timestamp=time)) for n, time in enumerate(times)]
        assert isinstance(futures[1].exception(), ts.LateMessageError)
        ids = [futures[0].result(), futures[2].result()]
        assert ids == sorted(ids)
        assert [b"0", b"2"] == payloads(opened)


def fail(db: ts.Database, error: BaseException | None) -> None:
    """Let every write of a database's only shard fail, or none again."""
    shard = db.storage.shards[0]
    if error is None:
        del shard.prepare  # type: ignore[method-assign]
        return

    def prepare(*_: object) -> Prepared:
        raise error

    shard.prepare = prepare  # type: ignore[method-assign]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ts.Database]:
    """A database of one shard."""
    with ts.open(tmp_path / "small") as opened:
        yield opened


@pytest.mark.parametrize("how", ["block", "flush", "close", "database", "put"])
@pytest.mark.parametrize("who", ["caller", "thread"])
def test_a_failure_that_nobody_has_seen_is_raised(small: ts.Database, how: str, who: str) -> None:
    """Once, with how many messages it cost, whichever thread stored them."""
    writer = small.writer(max_items=5, flush_interval=3_600 if who == "caller" else 0.001)
    fail(small, ts.StorageFullError("no room"))
    futures = [writer.put(ts.Message("a", b"%d" % n)) for n in range(5 if who == "caller" else 1)]
    if who == "thread" or how == "put":
        wait_until(lambda: all(future.done() for future in futures), "the messages to fail")
    ends = {
        "block": lambda: writer.__exit__(None, None, None),
        "flush": writer.flush,
        "close": writer.close,
        "database": small.close,
        "put": lambda: writer.put(ts.Message("a", b"")),
    }
    with pytest.raises(ExceptionGroup, match=f"not stored: {len(futures)}") as raised:
        ends[how]()
    assert raised.group_contains(ts.StorageFullError)
    writer.close()  # it was told


def test_a_failure_that_somebody_has_seen_is_not_raised_again(small: ts.Database) -> None:
    """Who asks the future, before or after, or leaves a callback there, is the one to be told."""
    told: list[object] = []
    fail(small, ts.StorageFullError("no room"))
    with small.writer(max_items=3, flush_interval=3_600) as writer:
        futures = [writer.put(ts.Message("a", b"%d" % n)) for n in range(2)]
        futures[0].add_done_callback(told.append)
        futures.append(writer.put(ts.Message("a", b"2")))
        with pytest.raises(ts.StorageFullError):
            futures[1].result()
        assert isinstance(futures[2].exception(), ts.StorageFullError)
    assert told == [futures[0]]


def test_what_ends_the_block_is_raised_as_it_is(small: ts.Database) -> None:
    """What the writer could not store is noted there."""
    fail(small, ts.StorageFullError("no room"))

    def use() -> None:
        with small.writer(flush_interval=3_600) as writer:
            writer.put(ts.Message("a", b""))
            raise KeyError("something else")

    with pytest.raises(KeyError) as raised:
        use()
    assert "StorageFullError: no room" in raised.value.__notes__[0]


def test_a_writer_whose_thread_was_told_to_end_goes_on(small: ts.Database) -> None:
    """An error of whatever kind fails the messages at hand and no others."""
    writer = small.writer(flush_interval=0.001)
    fail(small, SystemExit())
    lost = writer.put(ts.Message("a", b"1"))
    assert isinstance(lost.exception(PATIENCE), InterruptedError)
    fail(small, None)
    assert writer.put(ts.Message("a", b"2")).result(PATIENCE).shard == 0
    writer.close()


def test_a_callback_that_ends_its_thread_keeps_no_other_future_waiting(small: ts.Database) -> None:
    """What was stored together is told to all."""

    def end(_: object) -> None:
        raise SystemExit

    with small.writer(flush_interval=3_600) as writer:
        futures = [writer.put(ts.Message("a", b"%d" % number)) for number in range(3)]
        futures[0].add_done_callback(end)
        with pytest.raises(SystemExit):
            writer.flush()
        assert [0, 0, 0] == [future.result(0).shard for future in futures]


@pytest.mark.parametrize(("items", "interval"), [(0, 1), (1.5, 1), (1, 0), (1, float("nan")), (1, float("inf"))])
def test_a_writer_needs_sane_numbers(db: ts.Database, items: int, interval: float) -> None:
    """It would never flush, or never rest."""
    with pytest.raises(ts.InvalidArgumentError):
        db.writer(max_items=items, flush_interval=interval)


def test_closing_the_database_stores_what_writers_hold(tmp_path: Path) -> None:
    """No message that was put is forgotten, and none is taken afterwards."""
    opened = ts.open(tmp_path / "db")
    writer = opened.writer(flush_interval=3_600)
    future = writer.put(ts.Message("a", b"1"))
    opened.close()
    assert 0 == future.result().shard
    with pytest.raises(ts.DatabaseClosedError):
        writer.put(ts.Message("a", b"2"))
    with ts.open(tmp_path / "db") as again:
        assert [b"1"] == payloads(again)


# --- counting ---


def test_dropping_a_generation_gives_its_disk_back(tmp_path: Path) -> None:
    """Without a later write; RocksDB deletes files a moment after it has replaced them."""
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
    """State doesn't count, and what is deleted no longer does."""
    for layout in ("block", "reference"):
        with ts.open(tmp_path / layout, layout=layout) as opened:
            opened.store(messages(100), state={0: [ts.StateWrite(b"k", bytes(1 << 20))]})
            full = opened.info().live_bytes
            assert 0 < full < 20_000
            assert 100 == opened.delete("#")
            assert opened.info().live_bytes < full  # what is left are the names of topics and client ids
            assert 0 == opened.info().messages


def test_reserved_state_stays_hidden(db: ts.Database) -> None:
    """The logical layer's own keys are neither listed nor written."""
    state = db.state(0)
    state.write([ts.StateWrite(b"mine", b"1")])
    assert [(b"mine", b"1")] == list(state.scan())
    assert [] == list(state.scan(b"\0"))
    assert [] == list(state.scan(b"\0tail"))
    with pytest.raises(ts.InvalidArgumentError):
        ts.StateWrite(b"\0tail", b"")
    with pytest.raises(ts.InvalidArgumentError, match="not a bytes"):
        state.write({b"mine": b"2"})  # type: ignore[arg-type]


def test_a_plugin_may_only_wrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that would replace the store is refused when the database is opened."""
    import types
    from importlib.metadata import EntryPoint

    from topicstore.plugins import GROUP, Registry

    def replaces(request: object) -> None:
        """Store nothing."""
        del request

    plugin = types.ModuleType("replaces_")
    plugin.topicstore_store = ts.hookimpl(replaces)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "replaces_", plugin)
    entries = [
        EntryPoint("backends", "topicstore_backends.plugin", GROUP),
        EntryPoint("layouts", "topicstore_layouts.plugin", GROUP),
        EntryPoint("replaces", "replaces_", GROUP),
    ]
    monkeypatch.setattr("topicstore.storage.opening.registry", lambda: Registry(entries))
    with pytest.raises(ts.PluginError, match="topicstore_store of plugin 'replaces' must be"):
        ts.open(tmp_path / "db", plugins=["replaces"])
    assert not (tmp_path / "db").exists()


def test_options_of_layouts(tmp_path: Path) -> None:
    """At creation of the first layout only; later generations remember those that the layout had last."""
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


@pytest.mark.parametrize("state", [{0: {b"k": b"v"}}, {0: [b"k"]}, {0: [("k", b"v")]}])
def test_state_that_is_none_is_refused(tmp_path: Path, state: object) -> None:
    """A clear error, and nothing is stored."""
    with ts.open(tmp_path / "db", mode="x") as db:
        with pytest.raises(ts.InvalidArgumentError, match="a StateWrite, not"):
            db.store([ts.Message("a", b"1")], state=state)  # type: ignore[arg-type]
        assert [] == list(db.replay("#"))


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized"])
def test_options_that_cannot_be_stored_leave_nothing_behind(tmp_path: Path, layout: str) -> None:
    """They are refused before there is a file, and as options of a later generation too."""
    for thresholds in ([2**70], [-1], []):
        with pytest.raises(ts.InvalidOptionError, match="thresholds"):
            ts.open(tmp_path / "db", mode="x", layout=layout, options={layout: {"thresholds": thresholds}})
        assert not (tmp_path / "db").exists()
    with ts.open(tmp_path / "db", mode="x", layout=layout) as db, pytest.raises(ts.InvalidOptionError):
        db.add_generation(layout, {"thresholds": [2**70]})


@pytest.mark.parametrize("layout", ["block", "skipstream", "wildcard_optimized"])
def test_a_generation_that_cannot_be_opened(tmp_path: Path, layout: str) -> None:
    """The others are read and written; what needs it is told; it can be dropped, and another begun."""
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
    engine, prefix = db.storage.shards[0].engine(), encode_generation(generation) + b"\x01"
    (key, value), *_ = next(iter(engine.scan(META, prefix, prefix + b"\xff")))
    write = WriteBatch()
    write.put(META, key, bytes([value[0] ^ 1]) + value[1:])
    engine.write(write)


@pytest.mark.parametrize("wrong", ["a\0b", "\udcff"])
def test_paths_are_utf8(db: ts.Database, tmp_path: Path, wrong: str) -> None:
    """Engines can't open others: refused before anything is made."""
    path = tmp_path / wrong
    for act in (ts.open, ts.open, ts.open, db.checkpoint, db.archives.export, db.archives.archive):
        with pytest.raises(ts.InvalidArgumentError, match="path"):
            act(path)
    with pytest.raises(ts.InvalidArgumentError, match="path"):
        db.retention.set(max_age=1, archive_to=wrong)
    assert ["db"] == [entry.name for entry in tmp_path.iterdir()]


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    """Also one of files, and where permissions were meant. Nothing is made."""
    for mode in ("w", "rb", "", None, 0o755):
        with pytest.raises(ts.InvalidArgumentError, match=r"mode is one of a, x, r\+, r, not"):
            ts.open(tmp_path / "db", mode)  # type: ignore[arg-type]
    assert not (tmp_path / "db").exists()


# --- many shards ---

SHARDS = 200
FILES = 4_096
"""More than so many shards have open, of RocksDB 11 each, and of a reader beside them."""
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
    """All are written, survive a kill, are verified and read beside their writer, and open again after that."""
    need("rocksdb")
    everything, deleted = [8_000, SHARDS], 160
    assert [[*everything, *everything, 8_000, 0, deleted], [8_000 - deleted, SHARDS]] == namespaces.run(
        MANY, tmp_path / "db", SHARDS
    )
    assert [8_000 - deleted, SHARDS] == namespaces.run(MANY, tmp_path / "db", SHARDS)[0][:2]
