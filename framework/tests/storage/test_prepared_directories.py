"""Directories that an attacker has prepared: no symbolic link in them is followed, and new files are private."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.storage.directory.files import replace_file
from topicstore.storage.directory.manifest import MANIFEST
from topicstore_conformance.conditions.skipping import need

SECRET = b"what is precious"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory with a file, to which symbolic links point; a test must change neither."""
    directory = tmp_path / "victim"
    directory.mkdir()
    file = directory / "file"
    file.write_bytes(SECRET)
    yield directory
    assert [file] == list(directory.iterdir())
    assert SECRET == file.read_bytes()


@pytest.fixture
def umask() -> Iterator[None]:
    """Set the usual umask, 022."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["LOCK", f"{MANIFEST}.new"])
def test_links_in_an_empty_directory_are_not_followed(tmp_path: Path, victim: Path, name: str) -> None:
    need("rocksdb")
    prepared = tmp_path / "db"
    prepared.mkdir()
    (prepared / name).symlink_to(victim / "file")
    with pytest.raises(ts.NotADatabaseError, match=f"{name} is a symbolic link"):
        ts.open(prepared)


OTHERS: dict[str, Callable[[Path], object]] = {"a directory": Path.mkdir, "a pipe": os.mkfifo}


def put(kind: str, path: Path) -> None:
    """Replace a file or a directory of a database with something of another kind."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "a file":
        path.write_bytes(SECRET)
    else:
        OTHERS[kind](path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
@pytest.mark.parametrize("name", [MANIFEST, "LOCK", "closed", "shard-0000", "queues", "queues/q"])
@pytest.mark.parametrize("kind", [*OTHERS, "a file"])
def test_what_is_of_another_kind_is_reported(tmp_path: Path, backend: str, name: str, kind: str) -> None:
    """A file of the wrong kind is reported by name when the database is opened for reading or writing.

    No opening blocks at a named pipe.
    """
    need(backend)
    path = tmp_path / "db"
    with ts.open(path, backend=backend) as db:
        db.queues.open("q").append([ts.Message("t", b"1")])
    if path.joinpath(name).is_dir() is (kind == "a directory"):
        return
    put(kind, path / name)
    refused = 0
    for read_only in (False, True):
        try:
            with ts.open(path, mode="r" if read_only else "a") as db:
                refused += any(name in damage.place for damage in db.verify().damages)
                db.queues.open("q")
        except ts.TopicstoreError as error:
            refused += name in str(error)
    assert refused or (kind == "a file" and name in ("LOCK", "closed"))


@pytest.mark.parametrize("name", [MANIFEST, f"{MANIFEST}.new", "LOCK"])
def test_a_directory_in_the_place_of_a_file_keeps_a_database_from_being_made(tmp_path: Path, name: str) -> None:
    need("rocksdb")
    (tmp_path / "db" / name).mkdir(parents=True)
    with pytest.raises(ts.CorruptionError, match=f"{name}: this is not a file"):
        ts.open(tmp_path / "db")


def test_an_existing_temporary_file_is_replaced(tmp_path: Path, victim: Path) -> None:
    """A symbolic link with the name of a temporary file is replaced, and not written through."""
    (tmp_path / "temporary").symlink_to(victim / "file")
    replace_file(tmp_path / "file", b"new", temporary=tmp_path / "temporary")
    assert b"new" == (tmp_path / "file").read_bytes()
    assert not (tmp_path / "temporary").is_symlink()


@pytest.mark.parametrize(
    "name",
    ["LOCK", MANIFEST, "shard-0000", "shard-0000/LOCK", "shard-0000/rocksdict-config.json", "queues", "queues/q"],
)
def test_links_in_a_database_are_not_followed(tmp_path: Path, victim: Path, name: str) -> None:
    """A database with symbolic links in it can't be opened to write."""
    need("rocksdb")
    path = tmp_path / "db"
    with ts.open(path) as db:
        db.queues.open("q").append([ts.Message("t", b"1")])
    link = path / name
    moved = tmp_path / "moved"
    link.rename(moved)
    link.symlink_to(moved if name == MANIFEST else victim if moved.is_dir() else victim / "file")
    with pytest.raises(ts.NotADatabaseError, match=f"{name} is a symbolic link"):
        ts.open(path)


def test_a_queue_that_became_a_link_is_not_followed(tmp_path: Path, victim: Path) -> None:
    need("rocksdb")
    with ts.open(tmp_path / "db") as db:
        db.queues.open("q")
    (tmp_path / "db" / "queues" / "q" / "LOCK").unlink()
    (tmp_path / "db" / "queues" / "q" / "LOCK").symlink_to(victim / "file")
    with ts.open(tmp_path / "db") as db, pytest.raises(ts.NotADatabaseError, match="LOCK is a symbolic link"):
        db.queues.open("q")


def test_a_checkpoint_and_an_export_follow_no_link(tmp_path: Path, victim: Path) -> None:
    need("rocksdb")
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("t", b"1")])
        db.add_generation()
        (tmp_path / "copy").symlink_to(tmp_path / "nowhere")
        with pytest.raises(ts.NotADatabaseError, match="exists already"):
            db.checkpoint(tmp_path / "copy")
        db.archives.export(tmp_path / "empty", generations=[])
        (tmp_path / "empty" / "shard=0000").symlink_to(victim)
        with pytest.raises(ts.NotADatabaseError, match="shard=0000 is a symbolic link"):
            db.archives.export(tmp_path / "empty")


@pytest.mark.usefixtures("umask")
def test_directories_are_the_owners(tmp_path: Path) -> None:
    """Databases, copies and exports are private by default, and existing directories keep their permissions.

    Parent directories that are created with them get the usual permissions.
    """
    need("rocksdb")
    with ts.open(tmp_path / "above" / "db"):
        assert 0o755 == permissions(tmp_path / "above")
    there = tmp_path / "there"
    there.mkdir(0o755)
    for path, mode, expected in (
        (tmp_path / "own", None, 0o700),
        (tmp_path / "open", 0o755, 0o755),
        (there, None, 0o755),
    ):
        with ts.open(path) if mode is None else ts.open(path, permissions=mode) as db:
            db.add_generation()
            db.checkpoint(tmp_path / f"{path.name}-copy")
            db.archives.export(tmp_path / f"{path.name}-export")
        assert [expected, expected, 0o700] == [
            permissions(tmp_path / f"{path.name}{kind}") for kind in ("", "-copy", "-export")
        ]


@pytest.mark.usefixtures("umask")
def test_a_failed_import_keeps_the_permissions_of_an_empty_directory(tmp_path: Path) -> None:
    """A failed import into an empty directory removes only its own files, and keeps the directory's permissions."""
    need("rocksdb")
    path = tmp_path / "db"
    path.mkdir(0o700)
    assert 2 == CliRunner().invoke(cli, ["import", str(path)], input="bad").exit_code
    assert [] == list(path.iterdir())
    assert 0o700 == permissions(path)


def test_what_is_written_out_follows_no_link(tmp_path: Path, victim: Path) -> None:
    need("rocksdb")
    with ts.open(tmp_path / "db") as db:
        db.store([ts.Message("t", b"1")])
    (tmp_path / ".out.jsonl.part").symlink_to(victim / "file")
    result = CliRunner().invoke(cli, ["replay", str(tmp_path / "db"), "--output", str(tmp_path / "out.jsonl")])
    assert 0 == result.exit_code, result.output
    assert b'"payload":"1"' in (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb", "duckdb"])
def test_foreign_names_do_not_prevent_opening(tmp_path: Path, victim: Path, backend: str) -> None:
    """Entries such as `lost+found`, and editors' lock links, don't prevent opening."""
    need(backend)
    root = tmp_path / "volume"
    for name in ("lost+found", ".snapshot"):
        (root / name).mkdir(parents=True)
    (root / ".#notes").symlink_to("somebody@machine.1234:5678")
    (root / ".link").symlink_to(victim)
    with ts.open(root, backend=backend) as db:
        db.store([ts.Message("t", b"1")])
        (root / "shard-0000" / ".#CURRENT").symlink_to("somebody@machine.1234:5678")
    with ts.open(root) as db:
        db.store([ts.Message("t", b"2")])
    (root / "shard-0000" / ".#CURRENT").unlink()
    with ts.open(root, mode="r") as db:
        assert [b"1", b"2"] == [message.payload for message in db.replay("#")]


def test_what_is_in_the_way_of_a_new_database_is_named(tmp_path: Path) -> None:
    """The error for a directory that isn't empty lists up to three names, and the number of others."""
    for name in ("e", "d", "c", "b", "a", ".hidden"):
        (tmp_path / name).touch()
    with pytest.raises(ts.NotADatabaseError, match=r"In the way: a, b, c and 2 more$"):
        ts.open(tmp_path)
