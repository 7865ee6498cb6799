"""Refusals: an invalid call raises a specific error, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore import MAX_PAYLOAD, Message, opening
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import STATE
from topicstore.storage.directory.manifest import Manifest, read_manifest
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.subjects.pairs import pair_of

GOOD = [Message(f"t/{number % 3}", b"%d" % number, f"c{number}") for number in range(10)]


@pytest.fixture
def db() -> Iterator[ts.Database]:
    """A database of three shards, each with messages."""
    with ts.open("memory", backend="memory", shards=3, clock=lambda: START) as opened:
        opened.store(GOOD)
        yield opened


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed database on disk, with messages in each of its three shards."""
    need("rocksdb")
    with ts.open(tmp_path / "db", shards=3, clock=lambda: START) as opened:
        opened.store(GOOD)
    return tmp_path / "db"


def reopened(path: Path, **arguments: Any) -> ts.Database:
    return ts.open(path, clock=lambda: START, **arguments)


def contents(db: ts.Database) -> list[object]:
    """Return all contents of a database that a refused call must not change."""
    shards = db.storage.shards
    states = [dict(db.state(shard.number).scan()) for shard in shards]
    return [
        sorted(replayed(db), key=lambda row: row[0]),
        db.generations(),
        states,
        [s.writer.tail.last_position for s in shards],
    ]


@contextmanager
def refuses(db: ts.Database, error: type[Exception], index: int | None = None, match: str = ".") -> Iterator[None]:
    """Check that the block raises exactly this error, with this message index, and changes nothing."""
    before = contents(db)
    with pytest.raises(error, match=match) as refused:
        yield
    assert (error, index) == (type(refused.value), getattr(refused.value, "index", None))
    assert before == contents(db)


# --- messages ---


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Message("a/+", b""), ts.InvalidMessageError),
        (Message("a", "text"), ts.InvalidMessageError),  # type: ignore[arg-type]
        (Message("a", b"", timestamp=2**53), ts.InvalidMessageError),
        (Message("a", b"", properties=ts.Properties(response_topic="a/#")), ts.InvalidMessageError),
        (Message("a", bytes(MAX_PAYLOAD + 1)), ts.MessageTooLargeError),
        ("not a message", ts.InvalidMessageError),
    ],
    ids=["topic", "payload", "time", "properties", "too large", "no message"],
)
def test_one_bad_message_refuses_its_batch(db: ts.Database, bad: Any, error: type[Exception]) -> None:
    """If one message of a batch is invalid, the error names it, and no shard has any of the others."""
    for index in (0, 5, len(GOOD)):
        with refuses(db, error, index):
            db.store([*GOOD[:index], bad, *GOOD[index:]])
    db.store(GOOD)
    assert 2 * len(GOOD) == len(replayed(db))


def test_columns_that_hold_no_messages(db: ts.Database) -> None:
    """Columns that are missing, unknown, or bad in one row are refused."""
    table = pa.table({"topic": ["a"], "payload": [b"x"]})
    for columns in (table.append_column("surprise", pa.array([1])), table.select(["topic"]), pa.array([1, 2])):
        with refuses(db, ts.InvalidMessageError):
            db.store(columns)
    for topic in (None, "+"):
        with refuses(db, ts.InvalidMessageError, 1):
            db.store(pa.RecordBatch.from_pydict({"topic": ["a", topic], "payload": [b"", b""]}))


@pytest.mark.parametrize("wrong", [None, 3, "text", b"bytes"], ids=repr)
def test_what_is_not_a_batch_is_refused_by_name(db: ts.Database, wrong: object) -> None:
    """An argument that isn't a batch is refused with an error that names its type."""
    with refuses(db, ts.InvalidArgumentError, match=type(wrong).__name__):
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
    """`store` validates even a batch from the constructor, which doesn't validate its columns."""
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
    before = contents(db)
    with pytest.raises(ts.InvalidMessageError):
        db.store(ts.MessageBatch(**{**columns, **wrong}))
    assert before == contents(db)


# --- times ---


@pytest.mark.parametrize("late", ["raise", "lift"])
def test_too_far_ahead(late: str) -> None:
    """A time up to the allowed skew ahead of the clock is accepted; a later time is refused, with its index."""
    with ts.open("m", backend="memory", timestamps="message", late=late, max_skew=2.5, clock=lambda: START) as db:
        ahead = [Message("a", b"", f"c{n}", timestamp=START + 2_500_000 + (n == 3)) for n in range(6)]
        with refuses(db, ts.TimestampAheadError, 3):
            db.store(ahead)
        assert 1 == db.info().total.failed_batches
        assert 3 == db.store(ahead[:3]).count


def test_late() -> None:
    """A message older than its shard's newest one is refused with its index; equal or missing times are accepted."""
    with ts.open("memory", backend="memory", shards=3, timestamps="message", clock=lambda: START) as db:
        db.store(GOOD)
        for client in ("c1", "c2", "c3"):
            with refuses(db, ts.LateMessageError, 1):
                db.store([Message("a", b"", "c1", timestamp=START), Message("a", b"", client, timestamp=START - 1)])
        within = [Message("late", b"%d" % time, "x", timestamp=START + time) for time in (5, 5, 7, 6)]
        with refuses(db, ts.LateMessageError, 3):
            db.store(within)
        assert 0 == db.store([*within[:3], Message("late", b"none", "x")]).lifted
        assert [b"5", b"5", b"7", b"none"] == [message.payload for message in db.replay("late")]
        assert [START + 7, START] == [message.timestamp for message in db.replay("late")][2:]


def test_late_messages_are_lifted_and_counted(tmp_path: Path) -> None:
    """With ``late="lift"`` late messages keep their time, take the next position, and are counted permanently."""
    how: dict[str, Any] = {"timestamps": "message", "late": "lift", "clock": lambda: START}
    late = [Message("a", b"%d" % n, "x", timestamp=START - n * 1_000_000) for n in range(5)]
    with ts.open(tmp_path / "db", **how) as db:
        assert 4 == db.store(late).lifted
        assert 4 == db.store(late[1:]).lifted
        assert late + late[1:] == list(db.replay("#"))
    with ts.open(tmp_path / "db", **how) as db:
        assert [8] == [shard.lifted for shard in db.info().shards]


# --- arguments ---


@pytest.mark.parametrize("bad", ["", "a/#/b", "a#", "+a", "a/b+", "a\0", "\udc00", "x" * 65_536, None, 7])
def test_bad_filters(db: ts.Database, bad: Any) -> None:
    """A filter that is invalid in MQTT is refused by every call that takes one."""
    stream = db.streams("#")[0]
    for call in (db.replay, db.replay_arrow, db.streams, db.delete, lambda text: db.cursor(stream, text)):
        with refuses(db, ts.InvalidFilterError):
            call(bad)


def test_bad_arguments_of_reading(db: ts.Database) -> None:
    """Invalid orders and times are refused before anything is read."""
    naive = datetime(2024, 1, 1)  # noqa: DTZ001 - that is what is refused
    times = ({"start": naive}, {"until": "yesterday"}, {"start": -3_600}, {"until": 1_700_000_000}, {"start": 1.5})
    wrong: tuple[dict[str, Any], ...] = ({"order": "topic"}, {"reverse": True, "order": "any"}, *times)
    for arguments in wrong:
        with refuses(db, ts.InvalidArgumentError):
            db.replay("#", **arguments)


@pytest.mark.parametrize("limit", [0, -1, 1.5, float("nan"), "3", None, True])
def test_limits_are_whole_numbers(db: ts.Database, limit: Any) -> None:
    """Limits and batch sizes that aren't positive whole numbers are refused."""
    cursor = db.cursor(db.streams("#")[0], "#")
    with pytest.raises(ts.InvalidArgumentError, match="limit is a whole number"):
        db.read(cursor, limit)
    with pytest.raises(ts.InvalidArgumentError, match="batch_size is a whole number"):
        db.replay("#", batch_size=limit)


def test_bad_state(db: ts.Database) -> None:
    """Missing shards, reserved keys and objects other than `StateWrite` are refused, and so are the call's messages."""
    wrong: tuple[Any, ...] = (
        *({shard: []} for shard in (-1, 3, "0")),
        *({0: writes} for writes in ({b"k": b"v"}, [b"k"], [("k", b"v")])),
    )
    for state in wrong:
        with refuses(db, ts.InvalidArgumentError):
            db.store(GOOD, state=state)
    for shard in (-1, 3, "0"):
        with refuses(db, ts.InvalidArgumentError):
            db.state(shard)  # type: ignore[arg-type]
    for key, value in ((b"", b""), (b"\0x", b""), ("text", b""), (b"a", "text")):
        with refuses(db, ts.InvalidArgumentError):
            ts.StateWrite(key, value)  # type: ignore[arg-type]
    with refuses(db, ts.InvalidArgumentError, match="not a bytes"):
        db.state(0).write({b"mine": b"2"})  # type: ignore[arg-type]


def test_a_state_conflict_refuses_all_shards(db: ts.Database) -> None:
    """If a state condition fails in one shard, neither messages nor state are stored in any shard."""
    right, wrong = ts.StateWrite(b"a", b"1", None), ts.StateWrite(b"a", b"1", b"something")
    for state in ({0: [right], 2: [wrong]}, {0: [wrong], 2: [right]}, {1: [right, wrong]}):
        with refuses(db, ts.StateConflictError):
            db.store(GOOD, state=state)


def test_bad_generations(db: ts.Database) -> None:
    """A generation of an unknown layout or with bad options is refused, and none is added."""
    with refuses(db, ts.UnknownPluginError):
        db.add_generation("no such layout")
    for options in ({"no such option": 1}, {"thresholds": [2**70]}):
        with refuses(db, ts.InvalidOptionError):
            db.add_generation(options=options)


def test_generations_that_cannot_be_dropped(db: ts.Database) -> None:
    """The current generation, and one that never existed, can't be dropped; a repeated drop has no effect."""
    db.add_generation()
    assert [True, False, False] == [db.drop_generation(1) for _ in range(3)]
    with refuses(db, ts.GenerationError, match="current"):
        db.drop_generation(2)
    for never in (0, -1, 3, 2**32):
        with refuses(db, ts.GenerationError, match="no generation"):
            db.drop_generation(never)


# --- cursors ---


def test_forged_cursors(db: ts.Database) -> None:
    """A cursor with a good checksum but a forged place is refused, or reads nothing outside its stream."""
    cursor = db.cursor(db.streams("#")[0], "#")
    changes: tuple[dict[str, Any], ...] = (
        {"shard": 3},
        {"shard": 2**40},
        {"generation": 0},
        {"generation": 2},
        {"generation": 2**70},
        {"stream": 2**31},
        {"place": b""},
        {"place": b"\xff" * 100},
    )
    for change in changes:
        with refuses(db, ts.InvalidCursorError):
            db.read(msgspec.structs.replace(cursor, **change))
    for other in (None, cursor.to_bytes(), 7):
        with refuses(db, ts.InvalidCursorError):
            db.read(other)  # type: ignore[arg-type]


def test_cursors_of_another_database(db: ts.Database) -> None:
    """A cursor is refused by every database except the one that created it."""
    with ts.open("other", backend="memory", shards=3) as other:
        other.store(GOOD)
        with pytest.raises(ts.WrongDatabaseError):
            other.read(db.cursor(db.streams("#")[0], "#"))


def test_streams_that_are_not_there(db: ts.Database) -> None:
    """A cursor can't be created for a stream that doesn't exist."""
    stream = db.streams("#")[0]
    changes: tuple[dict[str, Any], ...] = ({"number": 2**31}, {"generation": 9}, {"generation": 0})
    for change in changes:
        with refuses(db, ts.InvalidCursorError):
            db.cursor(attrs.evolve(stream, **change), "#")
    with refuses(db, ts.InvalidArgumentError):
        db.cursor(attrs.evolve(stream, shard=4), "#")


# --- opening ---


def test_contradicting_arguments(path: Path) -> None:
    """Arguments of open that contradict the manifest are refused; arguments that repeat it are accepted."""
    contradictions: list[dict[str, Any]] = [
        {"shards": 4},
        {"durability": "sync"},
        {"timestamps": "message"},
        {"late": "lift"},
        {"max_skew": 61.0},
        {"layout": "reference"},
        {"backend": "memory"},
    ]
    for arguments in contradictions:
        with pytest.raises(ts.ManifestMismatchError, match=next(iter(arguments))):
            reopened(path, **arguments)
    same: dict[str, Any] = {"backend": "rocksdb", "layout": "block", "durability": "commit", "timestamps": "commit"}
    with reopened(path, shards=3, late="raise", max_skew=60, **same) as db:
        assert len(GOOD) == len(replayed(db))


def test_the_same_options_open_it_again(tmp_path: Path) -> None:
    """Options equal to those of the manifest are accepted in any form, and others are refused."""
    options = {"block": {"thresholds": (50, 10)}}
    for again in (options, options, {"block": {"thresholds": [50, 10], "level": "1"}}, None):
        ts.open(tmp_path / "db", options=again).close()
    with pytest.raises(ts.ManifestMismatchError, match="has its own options"):
        ts.open(tmp_path / "db", options={"block": {"thresholds": (50, 11)}})


@pytest.mark.parametrize(
    ("error", "arguments", "match"),
    [
        (ts.InvalidArgumentError, {"shards": 0}, "."),
        (ts.InvalidArgumentError, {"shards": 4_097}, "."),
        (ts.InvalidArgumentError, {"shards": True}, "."),
        (ts.InvalidArgumentError, {"durability": "maybe"}, "."),
        (ts.InvalidArgumentError, {"timestamps": "now"}, "."),
        (ts.InvalidArgumentError, {"late": "drop"}, "."),
        (ts.InvalidArgumentError, {"max_skew": -1}, "."),
        (ts.InvalidArgumentError, {"max_skew": float("nan")}, "."),
        (ts.InvalidArgumentError, {"options": {"no such plugin": {}}}, "."),
        (ts.InvalidOptionError, {"options": {"block": {"no such option": 1}}}, "."),
        (ts.InvalidOptionError, {"options": {"rocksdb": {"no such option": 1}}}, "."),
        *((ts.InvalidOptionError, {"options": {"block": {"thresholds": bad}}}, "thres") for bad in ([2**70], [-1], [])),
        (ts.UnknownPluginError, {"plugins": ["no such plugin"]}, "."),
        (ts.UnknownPluginError, {"backend": "no such"}, "there are"),
        (ts.UnknownPluginError, {"layout": "no such"}, "there are"),
        *(
            (ts.InvalidArgumentError, {"mode": mode}, r"mode is one of a, x, r\+, r, not")
            for mode in ("w", "rb", "", None, 0o755)
        ),
        (ts.DatabaseNotFoundError, {"mode": "r+"}, "."),
        (ts.DatabaseNotFoundError, {"mode": "r"}, "."),
    ],
)
def test_bad_arguments_of_open(tmp_path: Path, error: type[Exception], arguments: dict[str, Any], match: str) -> None:
    """Bad arguments, unknown plugins, bad options and missing databases are refused before any file is made."""
    with pytest.raises(error, match=match) as refused:
        ts.open(tmp_path / "db", **arguments)
    assert error is type(refused.value)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["a\0b", "\udcff"])
def test_paths_are_utf8(tmp_path: Path, wrong: str) -> None:
    """Paths that engines can't open are refused before anything is created."""
    with ts.open(tmp_path / "db") as db:
        for act in (ts.open, db.checkpoint, db.archives.export, db.archives.archive):
            with pytest.raises(ts.InvalidArgumentError, match="path"):
                act(tmp_path / wrong)
        with pytest.raises(ts.InvalidArgumentError, match="path"):
            db.retention.set(max_age=1, archive_to=wrong)
    assert ["db"] == [entry.name for entry in tmp_path.iterdir()]


def test_what_is_not_a_database(tmp_path: Path) -> None:
    """A directory with other files, or a plain file, isn't opened as a database, and is left as it is."""
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "mine").write_bytes(b"mine")
    for name in ("file", "directory"):
        with pytest.raises(ts.NotADatabaseError):
            ts.open(tmp_path / name)
    assert b"mine" == (tmp_path / "file").read_bytes()
    assert ["mine"] == [entry.name for entry in (tmp_path / "directory").iterdir()]


def test_a_lost_manifest(path: Path) -> None:
    """A database whose manifest is missing is not opened as an empty one."""
    (path / "topicstore.json").unlink()
    files = sorted(path.rglob("*"))
    with pytest.raises(ts.NotADatabaseError):
        ts.open(path, shards=3)
    assert files == sorted(path.rglob("*"))


def test_create_where_one_is(path: Path) -> None:
    """The mode ``"x"`` refuses a database that exists."""
    with pytest.raises(ts.NotADatabaseError, match="there is a database"):
        ts.open(path, mode="x")
    with reopened(path) as db:
        assert len(GOOD) == len(replayed(db))


@pytest.mark.parametrize("mode", ["a", "x"])
def test_creating_never_opens_what_another_has_just_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """If another process creates the database before the lock is acquired, ``"x"`` doesn't open or overwrite it."""

    def read_then_create(path: Path) -> Manifest | None:
        found = read_manifest(path)
        monkeypatch.setattr(opening, "read_manifest", read_manifest)
        with ts.open(path, shards=3) as other:
            other.store(GOOD)
        return found

    monkeypatch.setattr(opening, "read_manifest", read_then_create)
    with pytest.raises((ts.DatabaseLockedError, ts.ManifestMismatchError)):
        ts.open(tmp_path / "db", mode=mode, shards=1).close()
    with ts.open(tmp_path / "db", mode="r") as there:
        assert (3, len(GOOD)) == (there.manifest.shards, len(replayed(there)))


def test_a_second_opening_in_one_process(path: Path) -> None:
    """A second opening in the same process is refused with an error that says so, and the first stays usable."""
    with reopened(path) as db:
        for _ in range(2):
            with pytest.raises(
                ts.DatabaseLockedError, match=rf"is open elsewhere in this process \(pid {os.getpid()}\)"
            ):
                ts.open(path)
        db.store(GOOD)
    with reopened(path) as db:
        assert 2 * len(GOOD) == len(replayed(db))


HOLDER = """
import sys, topicstore
with topicstore.open(sys.argv[1]) as db:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_second_process(path: Path) -> None:
    """While a process has the database open, another one is refused with an error that names the first."""
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert b"open\n" == holder.stdout.readline()
        with pytest.raises(ts.DatabaseLockedError, match=f"process {holder.pid} on "):
            ts.open(path)
        holder.kill()
    with reopened(path) as db:
        assert len(GOOD) == len(replayed(db))


@pytest.mark.parametrize(("key", "name"), [(b"\0tail", "tail"), (b"\0generation\0\0\0\x01", "generation 1")])
def test_newer_and_damaged_records(path: Path, key: bytes, name: str) -> None:
    """A shard with a newer or damaged tail or generation record isn't opened; additional fields are ignored."""

    def keep(value: bytes) -> None:
        with pair_of("rocksdb", "block").raw(path, 1) as engine:
            put(engine, STATE, {key: value})

    with pair_of("rocksdb", "block").raw(path, 1) as engine:
        stored = engine.get(STATE, key) or b""
    fields = msgspec.msgpack.decode(strip_checksum(key, stored))
    keep(stored[:-1] + bytes((stored[-1] ^ 1,)))
    with pytest.raises(ts.CorruptionError, match=f"state: {name}"):
        reopened(path)
    keep(add_checksum(key, msgspec.msgpack.encode([99, "something new", *fields[1:]])))
    with pytest.raises(ts.NewerFormatError, match="version 99"):
        reopened(path)
    keep(add_checksum(key, msgspec.msgpack.encode([*fields, "appended later"])))
    with reopened(path) as db:
        assert len(GOOD) == len(replayed(db))


# --- closed ---


def test_closed(tmp_path: Path) -> None:
    """Every call on a closed database raises an error that says that it is closed."""
    with ts.open("memory", backend="memory") as db:
        db.store(GOOD)
        stream = db.streams("#")[0]
        cursor, replay, arrow = db.cursor(stream, "#"), db.replay("#", batch_size=1), db.replay_arrow("#", batch_size=1)
        state = db.state(0)
        assert (b"0", 1) == (next(replay).payload, next(arrow).num_rows)
    db.close()
    calls: list[Callable[[], Any]] = [
        lambda: db.store(GOOD),
        lambda: db.streams("#"),
        lambda: db.cursor(stream, "#"),
        lambda: db.read(cursor),
        lambda: db.replay("#"),
        lambda: list(replay),
        lambda: arrow.read_all(),
        lambda: db.delete("#"),
        lambda: db.add_generation(),
        lambda: db.drop_generation(1),
        lambda: db.generations(),
        lambda: db.info(),
        lambda: db.verify(),
        lambda: db.state(0),
        lambda: state.get(b"a"),
        lambda: list(state.scan()),
        lambda: state.write([ts.StateWrite(b"a", b"b")]),
        lambda: db.flush(),
        lambda: db.checkpoint(tmp_path / "copy"),
        lambda: db.writer(),
        lambda: db.publish(GOOD),
        lambda: db.retained("#"),
        lambda: db.subscribe("#"),
        lambda: db.explain("#"),
        lambda: db.topics(),
        lambda: db.clients(),
        lambda: db.latest(),
        lambda: db.learned_topics(),
        lambda: db.compact(),
    ]
    for call in calls:
        with pytest.raises(ts.DatabaseClosedError):
            call()
