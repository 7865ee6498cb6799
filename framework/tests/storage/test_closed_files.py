"""Opening detects files of a properly closed database that are missing or truncated, without false reports."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore import Message
from topicstore.cli import cli
from topicstore.contract.engine import Engine
from topicstore.contract.errors import DataLossError
from topicstore.opening import open_lazily
from topicstore.plugins import load_target, registry
from topicstore.storage.directory.closed_files import ClosedFiles
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries

BACKENDS = ["rocksdb", "leveldb", "duckdb"]
EXPECTED = [b"%d" % number for number in range(30)]


@pytest.fixture(params=BACKENDS)
def closed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a database of 30 messages that was opened twice and closed."""
    need(request.param)
    for first in (0, 15):
        with ts.open(tmp_path / "db", backend=request.param, durability="sync", auto_compact=False) as db:
            for payload in EXPECTED[first : first + 15]:
                db.store([Message("t", payload, "c")])
    return tmp_path / "db"


def payloads(path: Path, **how: bool) -> list[bytes]:
    with ts.open(path, auto_compact=False, **how) as db:  # type: ignore[arg-type]
        return [message.payload for message in db.replay("t")]


def fresh(closed: Path) -> Path:
    """Return a new copy of a database."""
    copy = closed.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(closed, copy)
    return copy


def lengths(size: int, *, all_of_them: bool) -> Iterator[int | None]:
    """Yield lengths to which a file is truncated; None stands for removal."""
    yield from (None, 0, 1, size // 2, size - 1)
    if all_of_them:
        yield from random.Random(size).sample(range(size), min(size, tries(40, 1_000)))


def test_each_missing_or_shortened_file_is_reported(closed: Path) -> None:
    """If a file was removed or truncated, opening the database for reading or writing reports the file.

    The only exception is a file without which no message is missing.
    """
    told = 0
    for file in sorted(path for path in closed.glob("shard-*/*") if path.stat().st_size):
        for length in lengths(file.stat().st_size, all_of_them=file.name.startswith("MANIFEST")):
            copy = fresh(closed)
            cut = copy / file.relative_to(closed)
            cut.unlink() if length is None else os.truncate(cut, length)
            for mode in ("r", "a"):
                try:
                    assert EXPECTED == payloads(copy, mode=mode), (file.name, length)
                except DataLossError as lost:
                    assert f"shard-0000/{file.name}" in str(lost)  # noqa: PT017 - or everything is there
                    assert (copy / "closed").exists()
                    told += 1
    assert told >= 10


def test_recovery_accepts_missing_files(closed: Path) -> None:
    """With `recovery`, opening warns of changed files, and later openings don't."""
    (file,) = [path for path in closed.glob("shard-*/*") if path.name.startswith(("MANIFEST", "shard"))]
    with file.open("ab") as opened:
        opened.write(b"\0")  # the engine ignores the additional byte
    told = CliRunner().invoke(cli, ["verify", str(closed)])
    assert (1, True) == (told.exit_code, f"shard-0000/{file.name} has" in told.stdout)
    with pytest.warns(
        RuntimeWarning, match=f"opened all the same: shard 0 of .* is not as it was closed.*{file.name} has"
    ):
        db = ts.open(closed, recovery="point_in_time", auto_compact=False)
    db.close()
    assert EXPECTED == payloads(closed)


def test_what_an_engine_does_without_may_go(closed: Path) -> None:
    """Files that the engine doesn't need, and lock files, may be missing."""
    with ts.open(closed) as db:
        unneeded = load_target(registry().backend(db.storage.manifest.backend)).unneeded
    gone = [path for pattern in (*unneeded, "LOCK") for path in closed.glob(f"shard-*/{pattern}")]
    assert gone or not {*unneeded} - {"topicstore-reader-*", "topicstore-opening*", "*.cut-at-*"}
    for path in gone:
        path.unlink()
    assert EXPECTED == payloads(closed, mode="r")
    assert EXPECTED == payloads(closed)


def test_reading_and_copying_change_nothing(closed: Path) -> None:
    """Readers, a lazy opening, a refresh, ``verify`` and copying the directory don't invalidate the list of files."""
    with ts.open(closed, mode="r") as db:
        assert db.verify().ok
        db.refresh()
        assert EXPECTED == [message.payload for message in db.replay("t")]
    lazy = open_lazily(closed)
    assert 1 == len(lazy.shards[0].generations.listed())
    lazy.close()
    copy = fresh(closed)
    shutil.rmtree(closed)
    assert EXPECTED == payloads(copy)
    assert EXPECTED == payloads(copy)
    assert 0 == CliRunner().invoke(cli, ["verify", str(copy)]).exit_code


def test_a_checkpoint_is_a_closed_database(closed: Path) -> None:
    """A checkpoint has a list of files, too, so that truncation is detected."""
    with ts.open(closed) as db:
        if "checkpoint" not in db.storage.capabilities:
            pytest.skip("the engine makes no checkpoints")
        db.checkpoint(closed.with_name("checkpoint"))
    copy = closed.with_name("checkpoint")
    assert EXPECTED == payloads(copy, mode="r")
    file = max(copy.glob("shard-*/*"), key=lambda path: path.stat().st_size * path.name.startswith(("0", "shard")))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(DataLossError, match=file.name):
        payloads(copy)


def test_no_list_without_an_orderly_close(tmp_path: Path) -> None:
    """After a kill or a failed write, a database has no list of files, because its files may not be durable."""
    need("rocksdb")
    program = (
        "import os, signal, sys, topicstore as ts\n"
        "db = ts.open(sys.argv[1], auto_compact=False)\n"
        "db.store([ts.Message('t', b'0')])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "db")], check=False)
        assert -signal.SIGKILL == killed.returncode
        assert not (tmp_path / "db" / "closed").exists()
    db = ts.open(tmp_path / "db", auto_compact=False)
    db.storage.shards[0].writer.fail(OSError("it failed"))
    db.close()
    assert not (tmp_path / "db" / "closed").exists()
    assert [b"0", b"0"] == payloads(tmp_path / "db")
    assert (tmp_path / "db" / "closed").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("it failed")], ids=["ctrl-c", "failure"])
def test_no_list_after_a_close_that_did_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """If a close fails or is interrupted within the engine, no list of files is written, not even by a later close."""
    need("rocksdb")
    db = ts.open(tmp_path / "db", auto_compact=False)
    db.store([Message("t", b"0")])
    engine = type(db.storage.shards[0].writer.open_engine())
    real = engine.close

    def fails(closed: Engine) -> None:
        monkeypatch.setattr(engine, "close", real)
        real(closed)
        raise error

    monkeypatch.setattr(engine, "close", fails)
    with pytest.raises(type(error)):
        db.close()
    db.close()
    assert not (tmp_path / "db" / "closed").exists()
    assert [b"0"] == payloads(tmp_path / "db")
    assert (tmp_path / "db" / "closed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["unlink", "fsync", "replace"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kills_within_leave_no_stale_list(tmp_path: Path, backend: str, step: str, when: str) -> None:
    """After a kill at any call that changes the list of files, opening reports nothing falsely."""
    need(backend)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        db.store([Message("t", b"0")])
    program = f"""
import os, signal, sys, topicstore as ts
countdown, real = int(sys.argv[2]), os.{step}
def killing(*arguments, **how):
    global countdown
    countdown -= 1
    if not countdown and {when!r} == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    done = real(*arguments, **how)
    if not countdown:
        os.kill(os.getpid(), signal.SIGKILL)
    return done
os.{step} = killing
with ts.open(sys.argv[1], auto_compact=False) as db:
    db.store([ts.Message('t', b'0')])
"""
    stored, ended = 1, None
    for number in range(1, 20):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "db"), str(number)], check=False
        ).returncode
        found = len(payloads(tmp_path / "db", mode="r"))
        assert stored <= found <= stored + 1
        stored = found
        assert stored == len(payloads(tmp_path / "db"))
        if not ended:
            break
    assert 0 == ended
    assert number > 1


def listing(path: Path) -> ClosedFiles:
    return ClosedFiles(path, bytes(16), 1, ())


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Return a directory that has a single file and a list of files."""
    (tmp_path / "shard-0000").mkdir()
    (tmp_path / "shard-0000" / "file").write_bytes(b"12345")
    listing(tmp_path).write()
    return tmp_path


@pytest.mark.parametrize("meanwhile", ["opened", "closed again"])
def test_a_writer_that_comes_while_a_reader_compares(
    listed: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """If a writer changes the list while a reader compares it, the reader compares again or skips the check."""
    real = ClosedFiles._read

    def read(files: ClosedFiles) -> list[bytes] | None:
        found = real(files)
        monkeypatch.undo()
        files.remove()
        (listed / "shard-0000" / "file").write_bytes(b"123456789")
        if meanwhile == "closed again":
            monkeypatch.setattr(ClosedFiles, "_read", read_again)
        return found

    def read_again(files: ClosedFiles) -> list[bytes] | None:
        monkeypatch.undo()
        (listed / "shard-0000" / "file").write_bytes(b"12345")
        files.write()
        return real(files)

    monkeypatch.setattr(ClosedFiles, "_read", read)
    listing(listed).check(0)
    (listed / "shard-0000" / "file").write_bytes(b"1")
    if meanwhile == "closed again":
        with pytest.raises(DataLossError, match="has 1 bytes, and had 5"):
            listing(listed).check(0)


@pytest.mark.parametrize(
    "harm", [lambda _: b"", lambda data: data[:-3], lambda data: data.replace(b"5", b"6"), lambda data: data + b"{}"]
)
def test_a_damaged_list_is_ignored(listed: Path, harm: Callable[[bytes], bytes]) -> None:
    """A damaged list of files, or one of another database, is ignored."""
    (listed / "shard-0000" / "file").unlink()
    with pytest.raises(DataLossError, match="shard-0000/file, of 5 bytes, is gone"):
        listing(listed).check(0)
    ClosedFiles(listed, b"1" * 16, 1, ()).check(0)
    file = listed / "closed"
    file.write_bytes(harm(file.read_bytes()))
    listing(listed).check(0)


def test_an_outdated_list_is_ignored(closed: Path) -> None:
    """An outdated list of files is ignored; older versions leave it behind when they write."""
    left = (closed / "closed").read_bytes()
    with ts.open(closed, auto_compact=False) as db:
        db.store([Message("t", b"of an older version", "c")])
    (closed / "closed").write_bytes(left)
    assert [*EXPECTED, b"of an older version"] == payloads(closed, mode="r")
    assert [*EXPECTED, b"of an older version"] == payloads(closed)


def test_a_list_of_an_earlier_version_is_read(closed: Path) -> None:
    """A list of an earlier version, without the line about `synced`, still detects missing files."""
    with ts.open(closed, mode="r") as db:
        listed = ClosedFiles(closed, db.storage.id, 1, db.storage.unneeded)
    rest = (closed / "closed").read_bytes().split(b"\n", 1)[1].splitlines()[:-1]
    lines = b"\n".join(rest) + b"\n"
    (closed / "closed").write_bytes(listed._checksum(lines) + b"\n" + lines)
    listed.check(0)
    main = next(path for name in ("CURRENT", "shard.duckdb") for path in closed.glob(f"shard-*/{name}"))
    main.unlink()
    with pytest.raises(DataLossError):
        listed.check(0)
