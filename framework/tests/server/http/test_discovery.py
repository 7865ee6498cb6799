"""Finding a running server from its database's directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import topicstore as ts
from click.testing import CliRunner
from topicstore.cli import cli
from topicstore.server.http.discovery import Announcement, FoundServer, find_server
from topicstore_conformance.mqtt.embedded import serving_http
from topicstore_conformance.mqtt.serving import serving

from .conftest import client_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a closed database."""
    with ts.open(tmp_path / "db", backend="rocksdb") as db:
        db.store([ts.Message("a", b"1", "c")])
    return tmp_path / "db"


def test_a_running_server_is_found_and_its_token_may_do_everything(directory: Path) -> None:
    with ts.open(directory) as db, serving_http(db):
        found = find_server(directory)
        assert found is not None
        assert os.getpid() == found.pid
        assert found.token not in repr(found)
        assert 0o600 == stat.S_IMODE((directory / "server.json").stat().st_mode)
        headers = {"Authorization": f"Bearer {found.token}"}
        answer = httpx.get(f"{found.url}/api/v5/info", headers=headers, trust_env=False)
        assert 200 == answer.status_code
        assert (db.info().id, db.info().messages) == (answer.json()["id"], answer.json()["messages"])
    assert find_server(directory) is None
    assert not (directory / "server.json").exists()


def test_a_database_at_rest_and_one_that_is_not_there_have_no_server(directory: Path) -> None:
    assert find_server(directory) is None
    assert find_server(directory / "nowhere") is None


def test_the_file_of_a_killed_server_is_replaced(directory: Path) -> None:
    with serving(directory, "--http", "127.0.0.1:0") as killed:
        before = find_server(directory)
        assert before is not None
        assert killed.pid == before.pid
        killed.kill()
    assert (directory / "server.json").exists()
    assert find_server(directory) is None
    with ts.open(directory) as db:
        assert [b"1"] == [message.payload for message in db.replay("#")]
        with serving_http(db):
            after = find_server(directory)
            assert after is not None
            assert (os.getpid(), True) == (after.pid, after.token != before.token)


def test_copies_and_verification_pass_over_the_file(directory: Path, tmp_path: Path) -> None:
    with ts.open(directory) as db, serving_http(db):
        assert db.verify().ok
        db.checkpoint(tmp_path / "copy")
        assert not (tmp_path / "copy" / "server.json").exists()
        with ts.open(tmp_path / "copy") as copy:
            assert [b"1"] == [message.payload for message in copy.replay("#")]


def test_a_copy_made_of_hard_links_has_no_server(directory: Path, tmp_path: Path) -> None:
    """A copy of the database made with hard links has no server, and commands can't change the shared files.

    The server of the original holds the locks on these files, too.
    """
    with ts.open(directory) as db, serving_http(db):
        shutil.copytree(directory, tmp_path / "copy", copy_function=os.link)
        assert find_server(directory) is not None
        assert find_server(tmp_path / "copy") is None
        result = CliRunner().invoke(cli, ["delete", str(tmp_path / "copy"), "#", "--yes"])
        assert (result.exit_code, "is open elsewhere" in result.stderr) == (4, True)
        assert [b"1"] == [message.payload for message in db.replay("#")]


def test_a_file_that_can_not_be_understood_is_reported(directory: Path) -> None:
    """A ``server.json`` that can't be parsed is an error, because it may belong to a server of another version."""
    with ts.open(directory) as db, serving_http(db):
        for content in ("", '{"url": "http://127.0', "[]", '{"address": "x"}', "\xff"):
            (directory / "server.json").write_text(content, "latin-1")
            result = CliRunner().invoke(cli, ["compact", str(directory)])
            assert (result.exit_code, "server.json" in result.stderr) == (4, True), content


def test_a_link_in_the_place_of_the_file_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (directory / "server.json.new").symlink_to(tmp_path / "elsewhere")
    announcement = Announcement(directory, FoundServer(url="http://127.0.0.1:1", pid=1, token="t"))
    place = directory.stat()
    assert find_server(directory) == FoundServer(
        url="http://127.0.0.1:1", pid=1, token="t", directory=(place.st_dev, place.st_ino)
    )
    announcement.withdraw()
    (directory / "server.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ts.NotADatabaseError):
        find_server(directory)
    assert "kept" == (tmp_path / "elsewhere").read_text()


def test_the_file_of_a_second_server_is_left_by_the_first(directory: Path) -> None:
    first = Announcement(directory, FoundServer(url="http://127.0.0.1:1", pid=1, token="t"))
    second = Announcement(directory, FoundServer(url="http://127.0.0.1:2", pid=1, token="t"))
    first.withdraw()
    first.withdraw()
    assert "http://127.0.0.1:2" == getattr(find_server(directory), "url", None)
    second.withdraw()
    assert find_server(directory) is None


def test_a_database_in_memory_has_no_file(tmp_path: Path) -> None:
    with ts.open(tmp_path / "db", backend="memory") as db, serving_http(db) as server, client_of(server) as http:
        assert find_server(tmp_path / "db") is None
        assert 200 == http.get("/info").status_code


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``server.json`` that is replaced while being read is read again.

    Replacing the file drops the lock on the old one, so the new file is locked, too.
    """
    announcement = Announcement(directory, FoundServer(url="http://127.0.0.1:1", pid=1, token="t"))
    flock, replaced = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if how & fcntl.LOCK_SH and not replaced:
            replaced.append(True)
            announcement.replace(FoundServer(url="http://127.0.0.1:2", pid=1, token="t"))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert "http://127.0.0.1:2" == getattr(find_server(directory), "url", None)
    assert replaced
    announcement.withdraw()


def test_a_file_of_which_only_a_part_fits_on_the_disk_is_not_left(directory: Path) -> None:
    """A ``server.json`` that doesn't fit on the disk is not left behind in part.

    `os.write` reports a short write only by its return value.
    """
    program = """
import resource, sys
from pathlib import Path
from topicstore.server.http.discovery import Announcement, FoundServer
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
try:
    Announcement(Path(sys.argv[1]), FoundServer(url="http://127.0.0.1:1", pid=1, token="t" * 40))
except OSError as bad:
    print(bad)
"""
    said = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=True)
    assert f"can't be written: File too large: '{directory}/server.json'" in said.stdout
    assert find_server(directory) is None
    assert not list(directory.glob("server.json*"))
