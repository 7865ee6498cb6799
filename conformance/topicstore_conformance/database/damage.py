"""Promises about full disks and flipped bytes: they are reported with their place, never hidden by wrong answers."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import topicstore as ts
from topicstore import Message, MessageId
from topicstore.contract.engine import KEYSPACES, META, WriteBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.database.fixtures import Fixtures, message_spaces
from topicstore_conformance.faults.clock import START
from topicstore_conformance.faults.crash import messages_of
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Damage"]
ROOM = 6 << 20
SEED = 3
"""The seed of all that is drawn: the same for every plugin."""
T = TypeVar("T")


def everything(db: ts.Database, *times: int) -> list[tuple[MessageId, Message]]:
    """Return all messages of a range of times, in order of position."""
    return replayed(db, "#", *times, order="time")


# --- a full disk ----------------------------------------------------------------------------

FULL = """
import json, os, sys
import topicstore as ts
path, backend, layout, durability, limit = sys.argv[1:]
if int(limit):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
db = ts.open(path, backend=backend, layout=layout, durability=durability)
acked, told = [], {}
try:
    for number in range(100_000):
        ids = db.store([ts.Message("t/%d" % (number % 5), os.urandom(20_000), "c")] * 3).ids
        acked.append([number, [id_.position for id_ in ids]])
except Exception as error:
    told["first"] = type(error).__name__
    told["recoverable"] = isinstance(error, ts.RecoverableError)
for call in (lambda: db.store([ts.Message("a", b"")]), lambda: db.delete("t/1"), lambda: db.add_generation(),
             lambda: db.state(0).write([ts.StateWrite(b"a", b"b")])):
    try:
        call()
        told.setdefault("later", []).append("nothing")
    except Exception as error:
        told.setdefault("later", []).append(type(error).__name__)
try:
    told["seen"] = [p for b in db.replay_arrow("#", order="time", ids=True)
                    for p in b.column("position").to_pylist()]
    told["failure"] = db.info().shards[0].failure
except Exception as error:
    told["seen"] = repr(error)
told["acked"] = acked
print(json.dumps(told), flush=True)
try:
    db.close()
except Exception:
    pass
"""


class Told(msgspec.Struct):
    """The child's report."""

    first: str
    recoverable: bool
    later: list[str]
    seen: list[int] | str
    acked: list[tuple[int, list[int]]]
    failure: str | None = None


# --- a flipped byte in a layout's values ------------------------------------------------------


def flipped(data: bytes, index: int, bit: int = 0) -> bytes:
    """Return the bytes with one bit inverted."""
    return data[:index] + bytes((data[index] ^ 1 << bit,)) + data[index + 1 :]


def attempt(call: Callable[[], T], *errors: type[ts.TopicstoreError]) -> tuple[T | None, ts.TopicstoreError | None]:
    """Return the result of a call, or the one of these errors with which it ends."""
    try:
        return call(), None
    except errors as error:
        return None, error


def names_a_place(error: BaseException | None) -> bool:
    """Return whether an error of a damaged message names its shard, its generation and where in it the message is."""
    return re.match(r"shard 0, generation \d+, .+: ", str(error)) is not None


def check_damaged(db: ts.Database, good: list[tuple[MessageId, Message]]) -> list[tuple[MessageId, Message]]:
    """Check that replays and verify report damage; return what can be read around it, by ranges of time."""
    _, error = attempt(lambda: everything(db), ts.CorruptionError, ts.NewerFormatError)
    assert error is not None
    assert names_a_place(error)
    damages = db.verify().damages
    assert damages
    assert all("shard 0" in damage.place for damage in damages)
    whole = []
    for number in range(12):
        times = START + number * 1_000, START + (number + 1) * 1_000
        rows, _ = attempt(partial(everything, db, *times), ts.CorruptionError, ts.NewerFormatError)
        whole += rows or []
    assert whole == [row for row in good if row in whole]
    return whole


def check_opened(path: Path, good: list[tuple[MessageId, Message]]) -> str:
    """Open a damaged database and check that it reports the damage or that everything in it is right; return which."""
    db, error = attempt(lambda: ts.open(path, clock=lambda: START + 10_000_000), ts.EngineError, ts.NewerFormatError)
    if db is None:
        assert str(path) in str(error) or "shard 0" in str(error)
        return "not opened"
    with db:
        seen, error = attempt(lambda: everything(db), ts.CorruptionError, ts.NewerFormatError)
        damages = db.verify().damages
        if seen is None:
            assert str(path) in str(error) or "shard 0" in str(error)
            assert damages
            return "noticed"
        assert good == seen or (damages and [row for row in good if row in seen] == seen)
        return "noticed" if damages else "harmless"


# --- a flipped byte in a file -----------------------------------------------------------------


def make(pair: Pair, path: Path, shards: int = 1) -> list[tuple[MessageId, Message]]:
    """Store during three openings, so that there are several table files; return the messages."""
    for life in range(3):
        with pair.open(path, shards=shards, clock=lambda life=life: START + life * 1_000_000) as db:
            for number in range(5):
                db.store(messages_of(life * 5 + number))
            good = everything(db)
    return good


def table_files(path: Path) -> list[Path]:
    """Return the engine's table files, if it has files with such names."""
    return sorted(file for kind in ("sst", "ldb") for file in path.glob(f"shard-*/*.{kind}"))


class Damage(Fixtures):
    """Promises about a full disk and about damage."""

    @pytest.fixture
    def small_disk(self) -> Iterator[tuple[Path, int]]:
        """A directory with little room, and the largest size of a file in it: 0 if the disk itself is the limit."""
        with quick_directory() as directory:
            mount = Path(directory, "disk")
            mount.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(mount)]
            may = os.geteuid() == 0 and shutil.which("mount") is not None
            if may and subprocess.run(command, capture_output=True).returncode == 0:
                try:
                    yield mount, 0
                finally:
                    subprocess.run(["umount", str(mount)], check=True)
            else:
                yield mount, ROOM

    @requires("persistent")
    @pytest.mark.parametrize("durability", ["commit", "sync"])
    def test_full_disk(self, pair: Pair, durability: str, small_disk: tuple[Path, int]) -> None:
        """A batch that doesn't fit is refused with its own error; what was acknowledged stays readable, also later."""
        mount, limit = small_disk
        command = [sys.executable, "-c", FULL, str(mount / "db"), pair.backend, pair.layout, durability, str(limit)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        told = msgspec.json.decode(done.stdout, type=Told)
        acked = [position for _, positions in told.acked for position in positions]
        assert ("StorageFullError", True) == (told.first, told.recoverable)
        assert ["ShardReadOnlyError"] * 4 == told.later
        assert acked == told.seen
        assert told.failure
        with quick_directory() as roomy:
            shutil.copytree(mount / "db", Path(roomy, "db"))
            with ts.open(Path(roomy, "db")) as db:
                survived = [id_.position for id_, _ in everything(db)]
                assert acked == survived[: len(acked)]
                assert len(survived) - len(acked) in (0, 3)  # the unacknowledged batch is there or not, never by half
                assert [] == db.verify().damages
                assert db.store([Message("a", b"1")]).ids[0].position > survived[-1]

    @pytest.mark.parametrize("compacted", [False, True])
    def test_flipped_value(self, pair: Pair, directory: Path, compacted: bool) -> None:
        """Any byte changed in a stored message is noticed by readers and by verify; the rest stays readable."""
        draw = random.Random(SEED)
        now = [START]
        with pair.open(directory / "db", clock=lambda: now[0]) as db:
            for number in range(12):
                db.store([Message(f"t/{n % 3}", b"%d/%d " % (number, n) * 20, "c") for n in range(6)])
                now[0] += 1_000
            if compacted:
                db.compact()
            good = everything(db)
            engine = db.storage.shards[0].engine()
            stored = [
                (s, *item) for s in message_spaces(engine) for chunk in engine.scan(s) for item in chunk if item[1]
            ]
            for _ in range(tries(10, 25)):
                space, key, value = draw.choice(stored)
                write = WriteBatch()
                write.put(space, key, flipped(value, draw.randrange(len(value)), draw.randrange(8)))
                engine.write(write)
                whole = check_damaged(db, good)
                # Its own batch is gone, and perhaps the one before, whose end shows where the damaged one begins;
                # messages that were merged with it may be unreadable, too.
                assert compacted or len(whole) >= len(good) - 12
                write = WriteBatch()
                write.put(space, key, value)
                engine.write(write)
                assert good == everything(db)
                assert [] == db.verify().damages

    def test_missing_value(self, pair: Pair, directory: Path) -> None:
        """If a stored message is missing, verify notices it by the count."""
        with pair.open(directory / "db", clock=lambda: START) as db:
            for number in range(4):
                db.store([Message("t", b"%d" % number, "c")])
            db.add_generation()
            engine = db.storage.shards[0].engine()
            space, *_ = message_spaces(engine)
            key = next(engine.scan(space, limit=1))[0][0]
            write = WriteBatch()
            write.delete(space, key)
            engine.write(write)
            assert [True] == ["shard 0, generation 1" in damage.place for damage in db.verify().damages]

    @requires("persistent")
    @pytest.mark.parametrize("compacted", [False, True])
    def test_missing_names(self, pair: Pair, directory: Path, compacted: bool) -> None:
        """If values that a layout keeps beside its messages are lost, readers and verify say so; no answer is wrong."""
        with pair.open(directory / "db", clock=lambda: START) as db:
            db.store([Message(f"t/{number}", b"%d" % number, f"c{number}") for number in range(5)])
            if compacted:
                db.compact()
            good = everything(db)
        with pair.raw(directory / "db") as engine:
            found = [item for chunk in engine.scan(META) for item in chunk]
        for key, _ in random.Random(7).sample(found, min(len(found), tries(8, 100))):
            copy = directory / key.hex()
            shutil.copytree(directory / "db", copy)
            with pair.raw(copy) as engine:
                write = WriteBatch()
                write.delete(META, key)
                engine.write(write)
            check_opened(copy, good)

    @requires("persistent")
    @pytest.mark.parametrize("compacted", [False, True])
    def test_flipped_anything(self, pair: Pair, directory: Path, compacted: bool) -> None:
        """Any byte changed in any value of any keyspace is reported, or harmless; no answer is wrong."""
        draw = random.Random(SEED)
        with pair.open(directory / "db", options={pair.layout: pair.small()}, clock=lambda: START) as db:
            for number in range(3):
                db.store([Message(f"t/{number * n}", b"%d" % n, f"c{n}") for n in range(5)])
            if compacted:
                db.compact()
            db.add_generation()
            good = everything(db)
        with pair.raw(directory / "db") as engine:
            for space in KEYSPACES:
                found = [item for chunk in engine.scan(space) for item in chunk if item[1]]
                for key, value in draw.sample(found, min(tries(3, 6), len(found))):
                    write, undo = WriteBatch(), WriteBatch()
                    write.put(space, key, flipped(value, draw.randrange(len(value)), draw.randrange(8)))
                    undo.put(space, key, value)
                    engine.write(write)
                    copy = directory / f"{space.name}-{draw.randrange(2**40)}"
                    engine.flush_log()
                    shutil.copytree(directory / "db", copy)
                    engine.write(undo)
                    check_opened(copy, good)

    @requires("persistent")
    def test_flipped_byte_in_a_table(self, pair: Pair) -> None:
        """A byte changed anywhere in a table file is reported at open, by readers and by verify, or is harmless."""
        draw = random.Random(SEED)
        with quick_directory() as directory:
            good = make(pair, Path(directory, "db"))
            names = [file.relative_to(Path(directory, "db")) for file in table_files(Path(directory, "db"))]
            if not names:
                pytest.skip(f"{pair.backend} keeps no table files of the kinds known here")
            outcomes = set()
            for number in range(tries(10, 30)):
                copy = Path(directory, f"copy-{number}")
                shutil.copytree(Path(directory, "db"), copy)
                file = copy / names[number % len(names)]
                data = file.read_bytes()
                file.write_bytes(flipped(data, draw.randrange(len(data)), draw.randrange(8)))
                outcomes.add(check_opened(copy, good))
                shutil.rmtree(copy)
            assert "noticed" in outcomes or "not opened" in outcomes

    @requires("persistent")
    def test_rest_is_readable_beside_a_damaged_table(self, pair: Pair) -> None:
        """If one shard's messages are damaged, reading it names the file, and the other shards can be read."""
        with quick_directory() as directory:
            path = Path(directory, "db")
            good = make(pair, path, shards=3)
            files = [file for file in table_files(path) if file.parent.name == "shard-0001"]
            if not files:
                pytest.skip(f"{pair.backend} keeps no table files of the kinds known here")
            with pair.raw(path, 1) as engine:
                space, *_ = message_spaces(engine)
                probe = [value for chunk in engine.scan(space) for _, value in chunk if value]
            hurt = 0
            for file in table_files(path):
                data = file.read_bytes()
                places = [data.find(value[-40:]) for value in probe]
                for place in places if file.parent.name == "shard-0001" else ():
                    if place >= 0:
                        data = flipped(data, place)
                        hurt += 1
                file.write_bytes(data)
            if not hurt:
                pytest.skip(f"{pair.backend} stores values in a form that can't be found in its files")
            db, error = attempt(partial(ts.open, path, clock=lambda: START + 10_000_000), ts.CorruptionError)
            if db is None:
                assert "shard-0001" in str(error) or "shard 1" in str(error)
                pytest.skip(f"{pair.backend} keeps so much together that the damage reaches what opening reads")
            with db:
                with pytest.raises(ts.CorruptionError) as refused:
                    everything(db)
                assert "shard-0001" in str(refused.value) or "shard 1" in str(refused.value)
                others = [stream for stream in db.streams("#") if stream.shard != 1]
                read = []
                for stream in others:
                    batch = db.read(db.cursor(stream, "#"), 100_000).batch
                    read += batch.ids() if len(batch) else []
                assert sorted(id_ for id_, _ in good if id_.shard != 1) == sorted(read)
                damages = db.verify().damages
                assert damages
                assert all("shard 1" in damage.place or "shard-0001" in damage.reason for damage in damages)

    @requires("persistent")
    def test_flipped_byte_in_the_log(self, pair: Pair) -> None:
        """If a byte of the log was changed, opening names the place, or has whole batches from the first on."""
        draw = random.Random(SEED)
        with quick_directory() as directory:
            path = Path(directory, "db")
            with pair.open(path, durability="sync") as db:
                ids = [db.store(messages_of(number)).ids for number in range(15)]
                shutil.copytree(path, Path(directory, "kept"))
            logs = sorted(Path(directory, "kept", "shard-0000").glob("[0-9]*.log"))
            if not logs:
                pytest.skip(f"{pair.backend} keeps no files called NUMBER.log")
            prefixes = [sorted(id_ for batch in ids[:count] for id_ in batch) for count in range(len(ids) + 1)]
            refused = 0
            for number in range(tries(10, 25)):
                copy = Path(directory, f"copy-{number}")
                shutil.copytree(Path(directory, "kept"), copy)
                log = copy / "shard-0000" / logs[-1].name
                data = log.read_bytes()
                log.write_bytes(flipped(data, draw.randrange(len(data)), draw.randrange(8)))
                opened, error = attempt(partial(ts.open, copy), ts.CorruptionError)
                if opened is None:
                    assert "shard-0000" in str(error) or "shard 0" in str(error)
                    refused += 1
                else:
                    with opened as db:
                        assert sorted(id_ for id_, _ in everything(db)) in prefixes
                        assert [] == db.verify().damages
                shutil.rmtree(copy)
            assert refused > 0

    @requires("persistent")
    def test_lost_manifest_and_lost_shard(self, pair: Pair, directory: Path) -> None:
        """A database without its manifest, or without one of its shards, isn't opened as an empty one."""
        with pair.open(directory / "db", shards=2) as db:
            db.store([Message("a", b"1", f"c{number}") for number in range(8)])
        shutil.copytree(directory / "db", directory / "copy")
        (directory / "copy" / "topicstore.json").unlink()
        with pytest.raises(ts.NotADatabaseError):
            pair.open(directory / "copy", shards=2)
        shutil.rmtree(directory / "db" / "shard-0001") if (directory / "db" / "shard-0001").is_dir() else None
        with pytest.raises(ts.EngineError):
            ts.open(directory / "db")
