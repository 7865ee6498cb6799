"""Opening detects fsynced writes that are missing, and drops them only if `recovery` says so."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore import Message
from topicstore.cli import cli
from topicstore.contract.engine import WriteBatch
from topicstore.contract.errors import DataLossError
from topicstore.runtime.locks import owned
from topicstore.shard.records import put_tail
from topicstore.storage.directory.recovery_points import RecoveryPoint, RecoveryPoints
from topicstore_conformance.backend.damage import flip
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.faults.threads import PATIENCE, begin

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Return a killed database that lacks the last 10 of 30 acknowledged batches, as if they were never logged."""
    with ts.open(tmp_path / "db", durability="sync", auto_compact=False) as db:
        for number in range(20):
            db.store([Message("t", b"%d" % number)])
        shutil.copytree(tmp_path / "db" / "shard-0000", tmp_path / "earlier")
        for number in range(20, 30):
            db.store([Message("t", b"%d" % number)])
    put_back(tmp_path)
    return tmp_path / "db"


def put_back(path: Path) -> None:
    """Replace the shard with its earlier copy, as if a power failure had lost the later writes."""
    (path / "db" / "closed").unlink()
    shutil.rmtree(path / "db" / "shard-0000")
    (path / "earlier").rename(path / "db" / "shard-0000")


def payloads(db: ts.Database) -> list[bytes]:
    return [message.payload for message in db.replay("t")]


@pytest.mark.parametrize("read_only", [False, True])
def test_lost_writes_are_reported_at_each_opening(cut: Path, read_only: bool) -> None:
    """Each opening reports the number of lost writes, and the times between which they were stored."""
    before = {path: path.read_bytes() for path in cut.glob("*") if path.is_file() and path.name != "LOCK"}
    for _ in range(2):
        with pytest.raises(
            DataLossError, match=r"shard 0 of .* lacks the last 10 of 31 writes .*recovery=\"point_in_time\""
        ):
            ts.open(cut, mode="r" if read_only else "a")
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("recovery", ["point_in_time", "salvage"])
def test_recovery_accepts_lost_writes(cut: Path, recovery: str) -> None:
    """With `recovery`, opening warns once, and later openings accept the database without the lost writes."""
    with pytest.warns(RuntimeWarning, match="lacks the last 10"):
        db = ts.open(cut, recovery=recovery)
    with db:
        assert [b"%d" % number for number in range(20)] == payloads(db)
        db.store([Message("t", b"new")])
    with ts.open(cut) as db:
        assert b"new" == payloads(db)[-1]


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_the_command_line_accepts_lost_writes(cut: Path) -> None:
    """``verify`` reports lost writes; with ``--recovery`` the command accepts the loss."""
    told = CliRunner().invoke(cli, ["verify", str(cut)])
    assert (1, True) == (told.exit_code, "lacks the last 10 of 31 writes" in told.stdout)
    accepted = CliRunner().invoke(cli, ["verify", "--recovery", "point_in_time", str(cut)])
    assert (0, True) == (accepted.exit_code, "20 messages are whole" in accepted.stdout)
    assert "lacks the last 10" in accepted.stderr
    assert 0 == CliRunner().invoke(cli, ["verify", str(cut)]).exit_code


def test_an_unknown_recovery_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.InvalidArgumentError, match="recovery is one of"):
        ts.open(tmp_path / "db", recovery="hope")  # type: ignore[arg-type]
    assert not (tmp_path / "db").exists()


def test_state_that_is_lost_is_reported(tmp_path: Path) -> None:
    """Every write is numbered, including writes of state alone, so that their loss is reported, too."""
    with ts.open(tmp_path / "db", durability="sync") as db:
        shutil.copytree(tmp_path / "db" / "shard-0000", tmp_path / "earlier")
        db.state(0).write([ts.StateWrite(b"acknowledged", b"1")])
    put_back(tmp_path)
    with pytest.raises(DataLossError, match="lacks the last 1 of 2 writes"):
        ts.open(tmp_path / "db")


@pytest.mark.parametrize("harm", [lambda _: b"", lambda data: data[:-1], lambda data: bytes(len(data))])
def test_without_notes_nothing_is_missed(cut: Path, harm: Callable[[bytes], bytes]) -> None:
    """If the file of synced writes is damaged or empty, the database can be opened, and nothing is reported."""
    notes = cut / "synced"
    notes.write_bytes(harm(notes.read_bytes()[:24]))
    with ts.open(cut) as db:
        assert 20 == len(payloads(db))


def test_one_torn_note_leaves_the_one_before(tmp_path: Path) -> None:
    """The two slots of a shard are written in turn, so that a torn write leaves the previous slot intact."""
    notes = RecoveryPoints(tmp_path, bytes(16), 2)
    for writes in (1, 2, 3):
        notes.record(1, writes, writes * 100)
    assert (None, RecoveryPoint(3, 300)) == (notes.read(0), notes.read(1))
    notes.close()
    flip(tmp_path / "synced", 48)  # the first slot of shard 1, written by the third call of `note`
    notes = RecoveryPoints(tmp_path, bytes(16), 2)
    assert RecoveryPoint(2, 200) == notes.read(1)
    notes.record(1, 4, 400)
    assert RecoveryPoint(4, 400) == notes.read(1)
    notes.close()


class FailingNotes:
    """A patch that makes writes to the file `synced` fail, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
        self.asked = 0
        self.failing = True
        real = os.pwrite

        def pwrite(file: int, data: bytes, offset: int) -> int:
            if Path(f"/proc/self/fd/{file}").readlink().name == "synced":
                self.asked += 1
                if self.failing:
                    raise OSError(error, os.strerror(error))
            return real(file, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("durability", ["commit", "sync"])
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_a_note_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, durability: str) -> None:
    """If writing to `synced` fails, messages are stored and delivered; a warning and ``info`` report the failure."""
    need(backend)
    db = ts.open(tmp_path / "db", backend=backend, durability=durability, auto_compact=False)
    db.flush()
    notes = FailingNotes(monkeypatch, errno.EIO)
    with db.subscribe("t") as subscription:
        with pytest.warns(RuntimeWarning, match="go unnoticed, because .*synced could not be written") as warned:
            _ = [db.store([Message("t", b"1")]), db.state(0).write([ts.StateWrite(b"key", b"value")]), db.flush()]
        assert 1 == len(warned)
        assert [b"1"] == [message.payload for message in subscription.fetch(timeout=60).messages]
        assert b"value" == db.state(0).get(b"key")
        info = db.info()
        assert info.shards[0].failure is None
        assert os.strerror(errno.EIO) in str(info.notes_failure)
        assert 1 == db.store([Message("t", b"2")]).count
        assert [b"2"] == [message.payload for message in subscription.fetch(timeout=60).messages]
    notes.failing = False
    db.flush()
    assert db.info().notes_failure is None
    reached = RecoveryPoints(tmp_path / "db", db.storage.id, 1)
    assert db.storage.shards[0].writer.tail.writes == reached.read(0).writes  # type: ignore[union-attr]
    notes.failing = True
    with pytest.warns(RuntimeWarning, match="go unnoticed"):
        _ = [db.store([Message("t", b"3")]), db.close()]
    monkeypatch.undo()
    with ts.open(tmp_path / "db") as db:
        assert [b"1", b"2", b"3"] == payloads(db)


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_snapshot_of_hard_links_keeps_its_notes(tmp_path: Path, backend: str, closed: bool) -> None:
    """A snapshot made of hard links keeps its own `synced` when the original database is written to."""
    need(backend)
    db = ts.open(tmp_path / "db", backend=backend, durability="sync", auto_compact=False)
    db.store([Message("t", b"1")])
    if closed:
        db.close()
    # engines continue to write to open files, so only files of a closed database are linked
    shutil.copytree(tmp_path / "db", tmp_path / "snapshot", copy_function=os.link if closed else shutil.copy2)
    (tmp_path / "snapshot" / "synced").unlink()
    os.link(tmp_path / "db" / "synced", tmp_path / "snapshot" / "synced")
    db = ts.open(tmp_path / "db") if closed else db
    for number in (b"2", b"3"):
        db.store([Message("t", number)])
    db.close()
    with ts.open(tmp_path / "snapshot") as db:
        assert [b"1"] == payloads(db)
    with ts.open(tmp_path / "db") as db:
        assert [b"1", b"2", b"3"] == payloads(db)


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_a_checkpoint_that_is_put_back(tmp_path: Path, backend: str) -> None:
    """Restoring a checkpoint replaces `synced` and the list of files, so no later writes are reported as lost."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, durability="sync") as db:
        db.store([Message("t", b"1")])
        if "checkpoint" not in db.storage.capabilities:
            pytest.skip(f"{backend} makes no checkpoints")
        db.checkpoint(tmp_path / "copy")
        db.store([Message("t", b"2")])
    shutil.rmtree(tmp_path / "db" / "shard-0000")
    shutil.copytree(tmp_path / "copy", tmp_path / "db", dirs_exist_ok=True)
    with ts.open(tmp_path / "db") as db:
        assert [b"1"] == payloads(db)
    reached = RecoveryPoints(tmp_path / "copy", db.storage.id, 1).read(0)
    assert reached is not None
    assert reached.writes < db.storage.shards[0].writer.tail.writes + 1


@pytest.mark.parametrize("stored", [True, False])
def test_writes_of_a_release_that_does_not_number_them(tmp_path: Path, stored: bool) -> None:
    """Writes of an older release, which doesn't number writes, are not reported as lost."""
    with ts.open(tmp_path / "db", durability="sync", auto_compact=False) as db:
        for number in range(5):
            db.store([Message("t", b"%d" % number)])
    (tmp_path / "db" / "closed").unlink()
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        log = db.storage.shards[0].writer
        if stored:
            db.store([Message("t", b"5")])
        batch = WriteBatch()
        put_tail(batch, msgspec.structs.replace(log.tail, writes=0))
        log.engine.write(batch)
        notes = (tmp_path / "db" / "synced").read_bytes()
        copied = shutil.copytree(tmp_path / "db", tmp_path / "killed")
    (copied / "synced").write_bytes(notes)
    for number in range(2):
        with ts.open(copied, auto_compact=False) as db:
            assert 5 + stored + number == len(payloads(db))
            db.store([Message("t", b"again")])


def test_a_note_that_fails_holds_up_neither_followers_nor_what_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If writing to `synced` fails, messages still become visible, and generations can be added and dropped."""
    options = {"wildcard_optimized": {"epoch_bits": 10}}
    db = ts.open(
        tmp_path / "db",
        layout="wildcard_optimized",
        durability="sync",
        options=options,
        auto_compact=False,
    )
    notes = FailingNotes(monkeypatch, errno.ENOSPC)
    with db.subscribe("t") as subscription:
        db.store([Message("t", b"1")])
        assert [b"1"] == [message.payload for message in subscription.fetch(timeout=60).messages]
        assert 2 == db.add_generation()
        assert db.drop_generation(1)
    notes.failing = False
    db.close()


def test_an_interrupted_record_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupted write of a record to `synced`, the next flush writes the record again."""
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        log = db.storage.shards[0].writer
        real = log._record_recovery_point

        def interrupted(*_: int) -> None:
            raise KeyboardInterrupt

        db.store([Message("t", b"1")])
        monkeypatch.setattr(log, "_record_recovery_point", interrupted)
        with pytest.raises(KeyboardInterrupt):
            db.flush()
        monkeypatch.setattr(log, "_record_recovery_point", real)
        db.flush()
        reached = RecoveryPoints(tmp_path / "db", db.storage.id, 1)
        assert log.tail.writes == reached.read(0).writes  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", ["rocksdb", "duckdb"])
def test_one_note_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Each batch writes to `synced` once, even with an engine that syncs each write itself."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, durability="sync", auto_compact=False) as db:
        notes = FailingNotes(monkeypatch, 0)
        notes.failing = False
        for _ in range(3):
            db.store([Message("t", b"1")])
        assert 3 == notes.asked
        db.flush()
        assert 3 == notes.asked


def test_notes_are_taken_under_one_lock(tmp_path: Path) -> None:
    """A lock keeps two threads from writing the same slot of `synced`."""
    need("duckdb")
    with ts.open(tmp_path / "db", backend="duckdb", auto_compact=False) as db:
        log = db.storage.shards[0].writer
        real, held = log._record_recovery_point, []

        def note(*arguments: int) -> bool:
            held.append((owned(log._recording_lock), owned(log.lock)))
            return real(*arguments)

        log._record_recovery_point = note
        db.store([Message("t", b"1")])
        db.state(0).write([ts.StateWrite(b"key", b"value")])
        db.add_generation()
        db.flush()
    assert {(True, False)} == set(held[:-1])
    assert all(flushing for flushing, _ in held)


@pytest.mark.parametrize("made", ["directory", "fifo", "socket", "link"])
def test_what_is_no_file(tmp_path: Path, made: str) -> None:
    """If the file `closed` is a directory, link, pipe or socket, opening raises an error and doesn't block."""
    with ts.open(tmp_path / "db") as db:
        db.store([Message("t", b"1")])
    file = tmp_path / "db" / "closed"
    file.rename(tmp_path / "moved")
    if made == "directory":
        file.mkdir()
    elif made in ("fifo", "socket"):
        os.mknod(file, 0o600 | (stat.S_IFIFO if made == "fifo" else stat.S_IFSOCK))
    else:
        file.symlink_to(tmp_path / "moved")
    error, what = (
        (ts.NotADatabaseError, "is a symbolic link") if made == "link" else (ts.CorruptionError, "this is not a file")
    )
    for mode in ("r", "a"):
        told = begin(partial(ts.open, tmp_path / "db", mode=mode)).exception(PATIENCE)
        assert type(told) is error
        assert re.match(rf"{file}:? {what}", str(told))
    file.rmdir() if made == "directory" else file.unlink()
    (tmp_path / "moved").rename(file)
    for mode in ("r", "a"):
        with ts.open(tmp_path / "db", mode=mode) as db:
            assert [b"1"] == payloads(db)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("made", ["directory", "fifo"])
def test_unreadable_notes_do_not_prevent_opening(tmp_path: Path, read_only: bool, made: str) -> None:
    """If `synced` can't be read, opening warns and continues, because it is advisory."""
    with ts.open(tmp_path / "db") as db:
        db.store([Message("t", b"1")])
    file = tmp_path / "db" / "synced"
    file.unlink()
    file.mkdir() if made == "directory" else os.mkfifo(file)
    with pytest.warns(RuntimeWarning, match="go unnoticed, because .*synced could not be read: .* not a file"):
        db = ts.open(tmp_path / "db", mode="r" if read_only else "a")
    assert [b"1"] == payloads(db)
    db.close()
