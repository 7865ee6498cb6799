"""What is missing that was on disk once is told, and what to do about it is done when it is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore import Message
from topicstore.cli import cli
from topicstore.contract.errors import DataLossError
from topicstore.storage.synced_writes import Synced, SyncedWrites

pytest.importorskip("rocksdict", reason='needs rocksdict: pip install "topicstore[rocksdb]"')


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Return a database of which the last 10 of 30 acknowledged batches are gone, without a trace in the engine."""
    with ts.open(tmp_path / "db", durability="sync", auto_compact=False) as db:
        for number in range(20):
            db.store([Message("t", b"%d" % number)])
        shutil.copytree(tmp_path / "db" / "shard-0000", tmp_path / "earlier")
        for number in range(20, 30):
            db.store([Message("t", b"%d" % number)])
    shutil.rmtree(tmp_path / "db" / "shard-0000")
    (tmp_path / "earlier").rename(tmp_path / "db" / "shard-0000")
    return tmp_path / "db"


def payloads(db: ts.Database) -> list[bytes]:
    return [message.payload for message in db.replay("t")]


@pytest.mark.parametrize("read_only", [False, True])
def test_lost_writes_are_told_at_each_opening(cut: Path, read_only: bool) -> None:
    """With how many there are, and the times between which they were stored."""
    before = {path: path.read_bytes() for path in cut.glob("*") if path.is_file() and path.name != "LOCK"}
    for _ in range(2):
        with pytest.raises(DataLossError, match=r"shard 0 lacks the last 10 of 31 writes .*recovery=\"point_in_time\""):
            ts.open(cut, read_only=read_only)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize("recovery", ["point_in_time", "salvage"])
def test_who_knows_of_them_goes_on_without(cut: Path, recovery: str) -> None:
    """It is warned of once; from then on the database is as if they had never been."""
    with pytest.warns(RuntimeWarning, match="lacks the last 10"):
        db = ts.open(cut, recovery=recovery)
    with db:
        assert [b"%d" % number for number in range(20)] == payloads(db)
        db.store([Message("t", b"new")])
    with ts.open(cut) as db:
        assert b"new" == payloads(db)[-1]


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_the_command_line_goes_on_without(cut: Path) -> None:
    """``verify`` says what is missing, and with ``--recovery`` lets it go."""
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


def test_state_that_is_lost_is_told(tmp_path: Path) -> None:
    """Every write has a number, also one without messages."""
    with ts.open(tmp_path / "db", durability="sync") as db:
        shutil.copytree(tmp_path / "db" / "shard-0000", tmp_path / "earlier")
        db.state(0).write([ts.StateWrite(b"acknowledged", b"1")])
    shutil.rmtree(tmp_path / "db" / "shard-0000")
    (tmp_path / "earlier").rename(tmp_path / "db" / "shard-0000")
    with pytest.raises(DataLossError, match="lacks the last 1 of 2 writes"):
        ts.open(tmp_path / "db")


@pytest.mark.parametrize("harm", [lambda _: b"", lambda data: data[:-1], lambda data: bytes(len(data))])
def test_without_notes_nothing_is_missed(cut: Path, harm: Callable[[bytes], bytes]) -> None:
    """A power failure may take them; what is there can be opened all the same."""
    notes = cut / "synced"
    notes.write_bytes(harm(notes.read_bytes()[:24]))
    with ts.open(cut) as db:
        assert 20 == len(payloads(db))


def test_one_torn_note_leaves_the_one_before(tmp_path: Path) -> None:
    """They are written in turn."""
    notes = SyncedWrites(tmp_path, bytes(16), 2)
    for writes in (1, 2, 3):
        notes.note(1, writes, writes * 100)
    assert (None, Synced(3, 300)) == (notes.read(0), notes.read(1))
    notes.close()
    file = tmp_path / "synced"
    content = bytearray(file.read_bytes())
    content[48] ^= 1  # of the first slot of shard 1, which has the third note
    file.write_bytes(content)
    notes = SyncedWrites(tmp_path, bytes(16), 2)
    assert Synced(2, 200) == notes.read(1)
    notes.note(1, 4, 400)
    assert Synced(4, 400) == notes.read(1)
    notes.close()
