"""Commands that only read take no lock: they work beside a program that writes, and change nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore.cli import cli

from .conftest import run


@pytest.fixture
def written(tmp_path: Path) -> Iterator[ts.Database]:
    """A database that is open for writing and holds every kind of data."""
    with ts.open(tmp_path / "db", mode="x", shards=2) as db:
        db.store([ts.Message(f"fleet/{n % 3}/speed", b"%d" % n, f"bus-{n % 5}") for n in range(60)])
        db.publish([ts.Message("fleet/0/state", b"on", "bus-0", retain=True)])
        db.queues.open("forward", max_messages=100).append([ts.Message("a/b", b"1", "c"), ts.Message("a/b", b"2", "c")])
        session = db.sessions.open("display", expiry_interval=None)
        session.subscribe("fleet/+/speed", qos=1)
        session.subscribe("$share/walls/fleet/#", qos=1)
        yield db


def test_it_sees_what_is_committed(written: ts.Database) -> None:
    """A command beside a writer sees messages that were committed just before."""
    written.store([ts.Message("fleet/9/speed", b"now", "bus-9")])
    assert "now" in run("replay", written.path, "fleet/9/#", "--format", "csv").stdout
    assert "2" in run("queue", "read", written.path, "forward").stdout
    assert 2 == len(written.queues.open("forward"))


def test_commands_that_change_something_name_the_holder(written: ts.Database) -> None:
    """Commands that change something fail with exit code 4, because another process has the database open."""
    for words in (("sessions", "kick", written.path, "display"), ("compact", written.path)):
        assert "open" in run(*words, code=4).stderr
    assert "open" in run("sessions", "expire", written.path, "display", "--yes", code=4).stderr


@pytest.mark.parametrize("backend", ["leveldb", "duckdb"])
def test_a_backend_that_cannot_be_read_beside_its_writer_says_what_can_be_done(tmp_path: Path, backend: str) -> None:
    """If the backend can't read beside a writer, the error names the backend and the alternatives."""
    with ts.open(tmp_path / "db", mode="x", backend=backend, layout="table" if backend == "duckdb" else "block"):
        said = run("info", tmp_path / "db", code=4).stderr
    assert backend in said.lower()
    assert "close it there first" in said
    assert "topicstore serve" in said
    assert (backend == "duckdb") == ("checkpoint" in said)


def test_following_prints_what_comes(written: ts.Database) -> None:
    """`--follow` prints the stored messages and then new ones, each once and in order."""
    found: list[Result] = []

    def follow() -> None:
        arguments = ["replay", str(written.path), "#", "--follow", "--limit", "65", "--format", "jsonl"]
        found.append(CliRunner().invoke(cli, arguments))

    thread = threading.Thread(target=follow)
    thread.start()
    for n in range(5):
        written.store([ts.Message("fleet/1/late", b"%d" % n, "bus-1")])
    thread.join()
    lines = [json.loads(line) for line in found[0].stdout.splitlines()]
    assert [str(n) for n in range(5)] == [line["payload"] for line in lines if line["topic"] == "fleet/1/late"]
    assert 60 == sum(line["topic"].endswith("/speed") for line in lines)


def test_a_database_of_one_process_is_not_followed(tmp_path: Path) -> None:
    """`--follow` is refused on LevelDB, which only one process can open."""
    ts.open(tmp_path / "db", mode="x", backend="leveldb").close()
    assert "leveldb" in run("replay", tmp_path / "db", "--follow", code=2).stderr


def test_sessions_of_a_reader_can_be_looked_at_only(written: ts.Database) -> None:
    """Sessions of a database that is open for reading can be read, but not changed."""
    before = written.sessions["display"]
    with ts.open(written.path, mode="r") as view:
        assert before == view.sessions["display"]
        assert [one.name for one in written.sessions.groups] == [one.name for one in view.sessions.groups]
        calls: list[Callable[[], Any]] = [
            lambda: view.sessions.open("another"),
            lambda: view.sessions.kick("display"),
            lambda: view.sessions.expire("display"),
            view.sessions.tick,
            view.sessions.deliver,
            view.sessions.checkpoint,
        ]
        for call in calls:
            with pytest.raises(ts.ReadOnlyDatabaseError):
                call()
        written.sessions.expire("display")
        assert ["display"] == [one.client_id for one in view.sessions]
        view.refresh()
        assert [] == list(view.sessions)
    with pytest.raises(ts.DatabaseClosedError):
        list(view.sessions)
