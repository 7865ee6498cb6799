"""Promises about refusals: an invalid call raises its own error, and leaves everything as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import topicstore as ts
from topicstore import MAX_PAYLOAD, Message
from topicstore.contract.checksums import add_checksum, strip_checksum
from topicstore.contract.engine import STATE, Engine, K, Keyspace, WriteBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.database.fixtures import Fixtures, message_spaces
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle.checks import check_all
from topicstore_conformance.oracle.model import Model
from topicstore_conformance.subjects.pairs import Pair, pairs

__all__ = ["Refusals"]
GOOD = [Message(f"t/{number % 3}", b"%d" % number, f"c{number}") for number in range(10)]


class Held:
    """A database with some messages, and its model."""

    def __init__(self, pair: Pair, path: Path, **arguments: Any) -> None:
        self.db = pair.open(path, shards=3, clock=lambda: START, **arguments)
        chosen = {name: arguments[name] for name in ("timestamps", "late", "max_skew") if name in arguments}
        self.model = Model(shards=3, shard_of=self.db.shard_of, layout=pair.layout, **chosen)
        self.store(GOOD)

    def store(self, messages: list[Message]) -> None:
        assert [row.id for row in self.model.store(messages, START)] == self.db.store(messages).ids

    def refuses(self, messages: Any, error: type[ts.InvalidMessageError], index: int | None) -> None:
        """Check that a batch is refused because of this message, and that nothing of it is stored."""
        with pytest.raises(error) as refused:
            self.db.store(messages)
        assert (error, index) == (type(refused.value), refused.value.index)
        check_all(self.db, self.model)


BAD: dict[str, Message] = {
    "empty topic": Message("", b""),
    "plus in topic": Message("a/+", b""),
    "hash in topic": Message("a/#", b""),
    "plus within a level": Message("a+b", b""),
    "NUL in topic": Message("a\0b", b""),
    "surrogate in topic": Message("a\ud800", b""),
    "topic too long": Message("x" * 65_536, b""),
    "topic too long in UTF-8": Message("é" * 32_768, b""),
    "topic of bytes": Message(b"a", b""),  # type: ignore[arg-type]
    "no topic": Message(None, b""),  # type: ignore[arg-type]
    "payload of text": Message("a", "text"),  # type: ignore[arg-type]
    "payload of bytearray": Message("a", bytearray(b"x")),  # type: ignore[arg-type]
    "no payload": Message("a", None),  # type: ignore[arg-type]
    "client id of a number": Message("a", b"", 7),  # type: ignore[arg-type]
    "NUL in client id": Message("a", b"", "c\0"),
    "client id too long": Message("a", b"", "x" * 65_536),
    "QoS 3": Message("a", b"", "c", 3),
    "QoS -1": Message("a", b"", "c", -1),
    "QoS True": Message("a", b"", "c", True),
    "QoS 1.0": Message("a", b"", "c", 1.0),  # type: ignore[arg-type]
    "retain 1": Message("a", b"", "c", 0, 1),  # type: ignore[arg-type]
    "negative time": Message("a", b"", timestamp=-1),
    "time too large": Message("a", b"", timestamp=2**53),
    "time of float": Message("a", b"", timestamp=1.5),  # type: ignore[arg-type]
    "properties of a dict": Message("a", b"", properties={}),  # type: ignore[arg-type]
    "bad response topic": Message("a", b"", properties=ts.Properties(response_topic="a/#")),
    "bad indicator": Message("a", b"", properties=ts.Properties(payload_format_indicator=2)),
    "bad expiry": Message("a", b"", properties=ts.Properties(message_expiry_interval=2**32)),
    "bad user property": Message("a", b"", properties=ts.Properties(user_properties=(("a",),))),  # type: ignore[arg-type]
}


HOLDER = """
import sys, topicstore
with topicstore.open(sys.argv[1]) as db:
    print("open", flush=True)
    sys.stdin.read()
"""


def put(engine: Engine, space: Keyspace[K], key: K, value: bytes) -> None:
    """Put a value around the database."""
    write = WriteBatch()
    write.put(space, key, value)
    engine.write(write)


BAD_FILTERS: tuple[Any, ...] = ("", "a/#/b", "a#", "+a", "a/b+", "##", "a\0", "\udc00", "x" * 65_536, None, 7)


class Refusals(Fixtures):
    """Promises about which calls are refused, with which error, and that they change nothing."""

    @pytest.fixture
    def held(self, pair: Pair, directory: Path) -> Iterator[Held]:
        """A database with some messages."""
        held = Held(pair, directory / "db")
        with held.db:
            yield held

    def test_one_bad_message_refuses_its_batch(self, held: Held) -> None:
        """If one message of a batch is invalid, the error names it, and no shard has any of the others."""
        for number, bad in enumerate(BAD.values()):
            index = number % (len(GOOD) + 1)
            held.refuses([*GOOD[:index], bad, *GOOD[index:]], ts.InvalidMessageError, index)
        held.store(GOOD)
        check_all(held.db, held.model)

    def test_payload_too_large(self, held: Held) -> None:
        """A payload that is one byte larger than MQTT can carry is refused as too large."""
        held.refuses([*GOOD, Message("a", bytes(MAX_PAYLOAD + 1))], ts.MessageTooLargeError, len(GOOD))

    def test_what_is_not_messages(self, held: Held) -> None:
        """Arguments that aren't messages, and columns that don't fit, are refused."""
        held.refuses([GOOD[0], "not a message"], ts.InvalidMessageError, 1)
        table = pa.table({"topic": ["a"], "payload": [b"x"]})
        batch = table.to_batches()[0]
        held.refuses(batch.append_column("surprise", pa.array([1])), ts.InvalidMessageError, None)
        held.refuses(batch.select(["topic"]), ts.InvalidMessageError, None)
        for bad in (None, "+"):
            columns = pa.RecordBatch.from_pydict({"topic": ["a", bad], "payload": [b"", b""]})
            held.refuses(columns, ts.InvalidMessageError, 1)
        for nonsense in (7, None, "text", b"bytes", GOOD[0]):
            with pytest.raises(ts.InvalidArgumentError):
                held.db.store(nonsense)  # type: ignore[arg-type]
        check_all(held.db, held.model)

    @pytest.mark.parametrize("late", ["raise", "lift"])
    def test_too_far_ahead(self, pair: Pair, directory: Path, late: str) -> None:
        """A time up to the allowed skew ahead is accepted; one a microsecond later is refused, with its index."""
        held = Held(pair, directory / "db", timestamps="message", late=late, max_skew=2.5)
        with held.db:
            ahead = [Message("a", b"", f"c{n}", timestamp=START + 2_500_000 + (n == 3)) for n in range(6)]
            held.refuses(ahead, ts.TimestampAheadError, 3)
            held.store(ahead[:3])
            check_all(held.db, held.model)

    def test_late(self, pair: Pair, directory: Path) -> None:
        """A message older than its shard's newest is refused with its index; one exactly as old is accepted."""
        held = Held(pair, directory / "db", timestamps="message")
        with held.db:
            for client in ("c1", "c2", "c3"):
                held.refuses(
                    [Message("a", b"", "c1", timestamp=START), Message("a", b"", client, timestamp=START - 1)],
                    ts.LateMessageError,
                    1,
                )
            within = [Message("a", b"", "x", timestamp=START + time) for time in (5, 5, 7, 6)]
            held.refuses(within, ts.LateMessageError, 3)
            held.store(within[:3])
            held.store([Message("a", b"", "x")])  # without a time of its own it follows the message before it
            check_all(held.db, held.model)

    def test_late_is_lifted_and_counted(self, pair: Pair, directory: Path) -> None:
        """With ``late="lift"`` late messages keep their time, take the next position, and are counted permanently."""
        held = Held(pair, directory / "db", timestamps="message", late="lift")
        with held.db:
            late = [Message("a", b"%d" % n, "x", timestamp=START - n * 1_000_000) for n in range(5)]
            assert 4 == held.db.store(late).lifted
            held.model.store(late, START)
            assert 4 == sum(shard.lifted for shard in held.db.info().shards)
            check_all(held.db, held.model)

    def test_bad_filters(self, held: Held) -> None:
        """A filter that is invalid in MQTT is refused by every call that takes one."""
        for bad in BAD_FILTERS:
            for call in (held.db.replay, held.db.replay_arrow, held.db.streams, held.db.delete):
                with pytest.raises(ts.InvalidFilterError):
                    call(bad)
            stream = held.db.streams("#")[0]
            with pytest.raises(ts.InvalidFilterError):
                held.db.cursor(stream, bad)
        check_all(held.db, held.model)

    def test_bad_arguments_of_reading(self, held: Held) -> None:
        """Invalid orders, sizes and times are refused before anything is read."""
        naive = datetime(2024, 1, 1)  # noqa: DTZ001 - that is what is refused
        times = ({"start": naive}, {"until": "yesterday"}, {"start": -3_600}, {"until": 1_700_000_000}, {"start": 1.5})
        for arguments in ({"order": "topic"}, {"batch_size": 0}, *times):
            with pytest.raises(ts.InvalidArgumentError):
                held.db.replay("#", **arguments)
        cursor = held.db.cursor(held.db.streams("#")[0], "#")
        with pytest.raises(ts.InvalidArgumentError):
            held.db.read(cursor, 0)
        for shard in (-1, 3, "0"):
            with pytest.raises(ts.InvalidArgumentError):
                held.db.state(shard)  # type: ignore[arg-type]
            with pytest.raises(ts.InvalidArgumentError):
                held.db.store(GOOD, state={shard: []})  # type: ignore[dict-item]
        for key, value in ((b"", b""), (b"\0x", b""), ("text", b""), (b"a", "text")):
            with pytest.raises(ts.InvalidArgumentError):
                ts.StateWrite(key, value)  # type: ignore[arg-type]
        check_all(held.db, held.model)

    def test_state_conflict_refuses_all_shards(self, held: Held) -> None:
        """A state condition that fails in one shard keeps messages and state out of all."""
        right, wrong = ts.StateWrite(b"a", b"1", None), ts.StateWrite(b"a", b"1", b"something")
        for state in ({0: [right], 2: [wrong]}, {0: [wrong], 2: [right]}, {1: [right, wrong]}):
            with pytest.raises(ts.StateConflictError):
                held.db.store(GOOD, state=state)
            check_all(held.db, held.model)

    def test_bad_generations(self, held: Held) -> None:
        """A generation of an unknown layout or with bad options is refused, and none is added."""
        with pytest.raises(ts.UnknownPluginError):
            held.db.add_generation("no such layout")
        with pytest.raises(ts.InvalidOptionError):
            held.db.add_generation(options={"no such option": 1})
        check_all(held.db, held.model)

    # --- opening ------------------------------------------------------------------------------

    @requires("persistent")
    def test_contradicting_arguments(self, pair: Pair, directory: Path) -> None:
        """Arguments of open that contradict the manifest are refused; arguments that repeat it are accepted."""
        with Held(pair, directory / "db").db:
            pass
        other_layouts = [other.layout for other in pairs() if other.backend == pair.backend and other != pair]
        other_backends = [other.backend for other in pairs() if other.backend != pair.backend]
        contradictions: list[dict[str, Any]] = [
            {"shards": 4},
            {"durability": "sync"},
            {"timestamps": "message"},
            {"late": "lift"},
            {"max_skew": 61.0},
            *({"layout": layout} for layout in other_layouts[:1]),
            *({"backend": backend} for backend in other_backends[:1]),
        ]
        for arguments in contradictions:
            with pytest.raises(ts.ManifestMismatchError, match=next(iter(arguments))):
                ts.open(directory / "db", clock=lambda: START, **arguments)
        with pair.open(
            directory / "db",
            shards=3,
            durability="commit",
            timestamps="commit",
            late="raise",
            max_skew=60,
            clock=lambda: START,
        ) as db:
            assert len(GOOD) == sum(1 for _ in db.replay("#"))

    def test_bad_arguments_of_open(self, pair: Pair, directory: Path) -> None:
        """Bad arguments, unknown plugins and bad options are refused before any file is made."""
        refusals: list[tuple[type[Exception], dict[str, Any]]] = [
            (ts.InvalidArgumentError, {"shards": 0}),
            (ts.InvalidArgumentError, {"shards": 4_097}),
            (ts.InvalidArgumentError, {"shards": True}),
            (ts.InvalidArgumentError, {"durability": "maybe"}),
            (ts.InvalidArgumentError, {"timestamps": "now"}),
            (ts.InvalidArgumentError, {"late": "drop"}),
            (ts.InvalidArgumentError, {"max_skew": -1}),
            (ts.InvalidArgumentError, {"max_skew": float("nan")}),
            (ts.InvalidArgumentError, {"options": {"no such plugin": {}}}),
            (ts.InvalidOptionError, {"options": {pair.layout: {"no such option": 1}}}),
            (ts.InvalidOptionError, {"options": {pair.backend: {"no such option": 1}}}),
            (ts.UnknownPluginError, {"plugins": ["no such plugin"]}),
        ]
        for error, arguments in refusals:
            with pytest.raises(error) as refused:
                pair.open(directory / "db", **arguments)
            assert error is type(refused.value)
            assert not (directory / "db").exists()
        for backend, layout in (("no such", pair.layout), (pair.backend, "no such")):
            with pytest.raises(ts.UnknownPluginError, match="there are"):
                ts.open(directory / "db", backend=backend, layout=layout)
            assert not (directory / "db").exists()

    def test_what_is_not_a_database(self, pair: Pair, directory: Path) -> None:
        """A directory with other files, and a plain file, are refused as a database and left as they are."""
        (directory / "file").write_bytes(b"mine")
        (directory / "directory").mkdir()
        (directory / "directory" / "mine").write_bytes(b"mine")
        for name in ("file", "directory"):
            with pytest.raises(ts.NotADatabaseError):
                pair.open(directory / name)
        assert (b"mine", ["mine"]) == (
            (directory / "file").read_bytes(),
            [entry.name for entry in (directory / "directory").iterdir()],
        )
        with pytest.raises(ts.DatabaseNotFoundError):
            ts.open(directory / "nowhere", mode="r+")
        assert not (directory / "nowhere").exists()

    @requires("persistent")
    def test_create_where_one_is(self, pair: Pair, directory: Path) -> None:
        """The mode ``"x"`` refuses a database that exists."""
        with Held(pair, directory / "db").db:
            pass
        with pytest.raises(ts.NotADatabaseError):
            ts.open(directory / "db", mode="x")
        with ts.open(directory / "db", clock=lambda: START) as db:
            assert len(GOOD) == sum(1 for _ in db.replay("#"))

    @requires("persistent")
    def test_creation_that_lost_a_race(self, pair: Pair, directory: Path) -> None:
        """A database that is created by somebody else between looking and locking is not overwritten."""
        path = directory / "db"
        made: list[str] = []

        class Racing(Mapping[str, Any]):
            """Options that are read slowly: meanwhile another process creates the database."""

            def __len__(self) -> int:
                return 1

            def __iter__(self) -> Iterator[str]:
                if not made:
                    with pair.open(path, shards=2) as other:
                        other.store(GOOD)
                        made.append(other.manifest.id)
                return iter((pair.backend,))

            def __getitem__(self, name: str) -> Any:
                return {}

        with pytest.raises((ts.DatabaseLockedError, ts.ManifestMismatchError)):
            ts.open(path, backend=pair.backend, layout=pair.layout, shards=1, options=Racing()).close()
        with ts.open(path) as db:
            assert (made, len(GOOD)) == ([db.manifest.id], sum(1 for _ in db.replay("#")))

    @requires("persistent")
    def test_second_object_in_one_process(self, pair: Pair, directory: Path) -> None:
        """A second opening in one process is refused with an error that names the process, and the first goes on."""
        held = Held(pair, directory / "db")
        with held.db:
            for _ in range(2):
                with pytest.raises(ts.DatabaseLockedError, match=f"process {os.getpid()} on "):
                    ts.open(directory / "db", clock=lambda: START)
            held.store(GOOD)
            check_all(held.db, held.model)
        with ts.open(directory / "db", clock=lambda: START) as db:
            check_all(db, held.model)

    @requires("persistent")
    def test_second_process(self, pair: Pair, directory: Path) -> None:
        """While a process has the database open, another one is refused with an error that names the first."""
        held = Held(pair, directory / "db")
        held.db.close()
        command = [sys.executable, "-c", HOLDER, str(directory / "db")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert b"open\n" == holder.stdout.readline()
            with pytest.raises(ts.DatabaseLockedError, match=f"process {holder.pid} on "):
                ts.open(directory / "db")
            holder.kill()
        with ts.open(directory / "db", clock=lambda: START) as db:
            check_all(db, held.model)

    def test_closed(self, pair: Pair, directory: Path) -> None:
        """Every call on a closed database raises an error that says that it is closed."""
        held = Held(pair, directory / "db")
        db, stream = held.db, held.db.streams("#")[0]
        cursor, replay, state = db.cursor(stream, "#"), db.replay("#", batch_size=1), db.state(0)
        writer = db.writer()
        writer.close()
        db.close()
        db.close()
        calls: list[Callable[[], Any]] = [
            lambda: db.store(GOOD),
            lambda: db.streams("#"),
            lambda: db.cursor(stream, "#"),
            lambda: db.read(cursor),
            lambda: db.replay("#"),
            lambda: next(replay),
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
            lambda: db.checkpoint(directory / "copy"),
            lambda: db.writer(),
            lambda: writer.put(GOOD[0]),
        ]
        for call in calls:
            with pytest.raises(ts.DatabaseClosedError):
                call()

    @requires("persistent")
    @pytest.mark.parametrize("key", [b"\0tail", b"\0generation\0\0\0\x01"])
    def test_newer_records(self, pair: Pair, directory: Path, key: bytes) -> None:
        """A shard whose tail or generation record is of a later version isn't opened."""
        Held(pair, directory / "db").db.close()
        with pair.raw(directory / "db", 1) as engine:
            fields = msgspec.msgpack.decode(strip_checksum(key, engine.get(STATE, key) or b""))
            put(engine, STATE, key, add_checksum(key, msgspec.msgpack.encode([99, "something new", *fields[1:]])))
        with pytest.raises(ts.NewerFormatError, match="version 99"):
            ts.open(directory / "db", clock=lambda: START)
        with pair.raw(directory / "db", 1) as engine:
            put(engine, STATE, key, add_checksum(key, msgspec.msgpack.encode([*fields, "appended later"])))
        with ts.open(directory / "db", clock=lambda: START) as db:
            assert len(GOOD) == sum(1 for _ in db.replay("#"))

    def test_newer_messages(self, pair: Pair, directory: Path) -> None:
        """Reading stored messages of a later version raises the error for newer formats; the others stay readable."""
        with pair.open(directory / "db", clock=lambda: START) as db:
            db.store(GOOD)
            db.add_generation()
            db.store([Message("new", b"x")])
            engine = db.storage.shards[0].engine()
            space, *_ = message_spaces(engine)
            found = next(engine.scan(space, limit=1))[0]
            put(engine, space, found[0], b"\xee" + found[1][1:])
            with pytest.raises((ts.NewerFormatError, ts.CorruptionError)):
                list(db.replay("#"))
            assert [b"x"] == [
                m.payload
                for s in db.streams("#")
                if s.generation == 2
                for m in db.read(db.cursor(s, "#")).batch.to_messages()
            ]
            put(engine, space, *found)
            assert len(GOOD) + 1 == sum(1 for _ in db.replay("#"))

    def test_newer_cursor(self, held: Held) -> None:
        """A cursor of a later version is refused as not readable by this version."""
        saved = held.db.cursor(held.db.streams("#")[0], "#").to_bytes()
        with pytest.raises(ts.InvalidCursorError, match="newer"):
            ts.Cursor.from_bytes(b"\x02" + saved[1:])
