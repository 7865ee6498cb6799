"""What people see while they type: completion, and what objects say of themselves."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import topicstore as ts
import topicstore.aio
import topicstore.sessions


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", mode="x", backend="memory", layout="reference") as db:
        db.store([ts.Message("a/b", b"1", "c")])
        yield db


def test_completion_shows_public_names_only() -> None:
    """Each of which is there."""
    assert sorted(ts.__all__) == dir(ts)
    for name in dir(ts):
        assert getattr(ts, name) is not None


def test_completion_of_a_database_shows_what_is_for_users(db: ts.Database) -> None:
    """And all of it is documented."""
    names = [name for name in dir(db) if not name.startswith("_")]
    assert "storage" not in names
    assert {"store", "replay", "sessions", "path", "read_only", "close"} <= set(names)
    undocumented = [name for name in names if name not in vars(db) and not inspect.getdoc(getattr(type(db), name))]
    assert [] == undocumented


def test_public_classes_have_a_repr() -> None:
    """Of their own, which says what an object is."""
    for module in (ts, topicstore.aio, topicstore.sessions):
        for name in module.__all__:
            found = getattr(module, name)
            assert not isinstance(found, type) or found.__repr__ is not object.__repr__, name


@pytest.mark.parametrize(
    "program",
    ["pass", "ts.Message('a/b', b'1')", "ts.matches('a/+', 'a/b')", "ts.LateMessageError", "ts.aopen('data')"],
)
def test_importing_costs_little(program: str) -> None:
    """Until a database is opened, for asyncio in a thread, no library is loaded that takes long to import."""
    script = (
        f"import sys, topicstore as ts; {program}\n"
        "print([m for m in ('numpy', 'pyarrow', 'pluggy', 'attr', 'importlib.metadata') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


@pytest.mark.parametrize("name", ["replay", "store", "publish", "info"])
def test_what_is_asked_of_the_module_in_place_of_a_database(name: str) -> None:
    """The error says how to come by one."""
    with pytest.raises(AttributeError, match=rf"{name} is of an open database: with topicstore.open"):
        getattr(ts, name)
    with pytest.raises(AttributeError, match="has no attribute 'rpelay'"):
        _ = ts.rpelay


def test_objects_say_what_they_are(db: ts.Database) -> None:
    """Whatever a program may hold, and print; none shows a mere address."""
    stream = db.streams("#")[0]
    cursor = db.cursor(stream, "#")
    subscription = db.subscribe("a/#")
    held = (
        db,
        db.info(),
        db.generations(),
        db.explain("#"),
        db.retention,
        db.retention.settings,
        db.archives,
        db.persistence,
        db.sessions,
        db.sessions.open("client"),
        db.queues,
        db.queues.open("alarms"),
        db.state(0),
        db.writer(),
        subscription,
        stream,
        cursor,
        db.read(cursor),
        db.verify(),
        ts.TopicFilter("a/+"),
    )
    subscription.close()
    for one in held:
        assert " object at 0x" not in repr(one)
        assert len(repr(one)) > len(type(one).__name__) + 2


def test_what_was_closed_still_says_what_it_is(db: ts.Database) -> None:
    """Looking at it in a debugger raises nothing."""
    held = (db, db.retention, db.archives, db.persistence, db.sessions, db.queues, db.state(0), db.writer())
    db.close()
    assert all(map(repr, held))
