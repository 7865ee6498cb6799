"""Tests of full disks and damaged values: errors name the file or key, and no wrong data is returned."""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import topicstore as ts
from topicstore import Message, MessageId
from topicstore.contract.engine import KEYSPACES, META, Engine, WriteBatch

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.clock import START
from topicstore_conformance.oracle.checks import replayed
from topicstore_conformance.subjects.pairs import Pair, make_backend

__all__ = ["Damage"]
ROOM = 6 << 20
SEED = 3
"""The seed of all random draws, which is the same for every plugin."""
T = TypeVar("T")


def everything(db: ts.Database, *times: int) -> list[tuple[MessageId, Message]]:
    """Return all messages of a range of times in microseconds, in order of time."""
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
    """The report of a child that fills its disk: errors, and the positions of the messages acknowledged and read."""

    first: str
    recoverable: bool
    later: list[str]
    seen: list[int] | str
    acked: list[tuple[int, list[int]]]
    failure: str | None = None


# --- damaged values -------------------------------------------------------------------------


def flipped(data: bytes, index: int, bit: int = 0) -> bytes:
    """Return the bytes with one bit inverted."""
    return data[:index] + bytes((data[index] ^ 1 << bit,)) + data[index + 1 :]


def attempt(call: Callable[[], T], *errors: type[ts.TopicstoreError]) -> tuple[T | None, ts.TopicstoreError | None]:
    """Return a call's result and None, or None and the error that the call raised, if it has one of these types."""
    try:
        return call(), None
    except errors as error:
        return None, error


def check_opened(path: Path, good: list[tuple[MessageId, Message]]) -> None:
    """Open a damaged database and check that it reports the damage or returns exactly the good messages."""
    db, error = attempt(lambda: ts.open(path, clock=lambda: START + 10_000_000), ts.EngineError, ts.NewerFormatError)
    if db is None:
        assert str(path) in str(error) or "shard 0" in str(error)
        return
    with db:
        seen, error = attempt(lambda: everything(db), ts.CorruptionError, ts.NewerFormatError)
        damages = db.verify().damages
        if seen is None:
            assert str(path) in str(error) or "shard 0" in str(error)
            assert damages
        else:
            assert good == seen or (damages and [row for row in good if row in seen] == seen)


def harms(engine: Engine, draw: random.Random) -> Iterator[tuple[WriteBatch, WriteBatch]]:
    """Yield writes that flip a bit in some values or delete keys of `META`, each with the write that undoes it."""
    for space in KEYSPACES:
        found = [item for chunk in engine.scan(space) for item in chunk]
        some = draw.sample([item for item in found if item[1]], min(tries(3, 6), len(found)))
        lost = draw.sample(found, min(tries(8, 100), len(found))) if space is META else []
        for number, (key, value) in enumerate([*some, *lost]):
            harm, undo = WriteBatch(), WriteBatch()
            if number < len(some):
                harm.put(space, key, flipped(value, draw.randrange(len(value)), draw.randrange(8)))
            else:
                harm.delete(space, key)
            undo.put(space, key, value)
            yield harm, undo


class Damage(Fixtures):
    """Tests of a full disk and of damaged values."""

    @pytest.fixture
    def small_disk(self) -> Iterator[tuple[Path, int]]:
        """Yield a directory with little space, and the file size limit in bytes to set.

        The limit is 0 if the directory is a small file system of its own, which only root can mount.
        """
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
        """A batch that doesn't fit on the disk raises StorageFullError, and acknowledged messages stay readable."""
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
                assert len(survived) - len(acked) in (0, 3)  # the unacknowledged batch is stored whole or not at all
                assert [] == db.verify().damages
                assert db.store([Message("a", b"1")]).ids[0].position > survived[-1]

    @requires("persistent")
    def test_files_of_a_closed_database(self, pair: Pair, directory: Path) -> None:
        """After a close, a missing file of the engine, or one of another size, raises EngineError at the next opening.

        A damaged list of the files is ignored: the database opens, and has all messages.
        """
        path, messages = directory / "db", [Message("t", b"%d" % number, "c") for number in range(5)]
        with pair.open(path, shards=2) as db:
            db.store(messages)
            wanted = everything(db)
        unneeded, kept = make_backend(pair.backend).unneeded, path.with_name("kept")
        path.rename(kept)
        files = [file.relative_to(kept) for file in sorted(kept.glob("shard-*/**/*")) if file.is_file()]
        for name in [name for name in files if not any(fnmatchcase(name.name, pattern) for pattern in unneeded)]:
            content = (kept / name).read_bytes()
            for other in (None, content[:-1], content + b"\0") if content else ():
                shutil.copytree(kept, path)
                (path / name).unlink() if other is None else (path / name).write_bytes(other)
                for mode in ("r", "r+"):
                    opened, error = attempt(functools.partial(ts.open, path, mode=mode), ts.EngineError)
                    if opened is not None:
                        opened.close()
                    assert error, f"{name} is {'missing' if other is None else 'of another size'}"
                shutil.rmtree(path)
        (kept / "closed").write_bytes(
            (kept / "closed").read_bytes().translate(bytes.maketrans(b"123456789", b"234567891"))
        )
        with ts.open(kept) as db:
            assert wanted == everything(db)

    @requires("persistent")
    @pytest.mark.parametrize("compacted", [False, True])
    def test_flipped_or_missing(self, pair: Pair, directory: Path, compacted: bool) -> None:
        """A flipped bit in any value, or a missing key of `META`, is reported or harmless; no result is wrong."""
        path = directory / "db"
        with pair.open(path, options={pair.layout: pair.small()}, clock=lambda: START) as db:
            for number in range(3):
                db.store([Message(f"t/{number * n}", b"%d" % n, f"c{n}") for n in range(5)])
            if compacted:
                db.compact()
            db.add_generation()
            good = everything(db)
        with pair.raw(path) as engine:
            for number, (harm, undo) in enumerate(harms(engine, random.Random(SEED))):
                engine.write(harm)
                engine.flush_log()
                copy = shutil.copytree(path, directory / f"copy-{number}")
                engine.write(undo)
                check_opened(copy, good)
