"""Interactive use: completion of names, and the `repr` of objects."""

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
    """`dir` of the module lists its public names, and each of them exists."""
    assert sorted(ts.__all__) == dir(ts)
    for name in dir(ts):
        assert getattr(ts, name) is not None


def test_completion_of_a_database_shows_what_is_for_users(db: ts.Database) -> None:
    """`dir` of a database lists the names for users only, and all of them are documented."""
    names = [name for name in dir(db) if not name.startswith("_")]
    assert "storage" not in names
    assert {"store", "replay", "sessions", "path", "read_only", "close"} <= set(names)
    undocumented = [name for name in names if name not in vars(db) and not inspect.getdoc(getattr(type(db), name))]
    assert [] == undocumented


def test_public_classes_have_a_repr() -> None:
    """Each public class has a `repr` of its own."""
    for module in (ts, topicstore.aio, topicstore.sessions):
        for name in module.__all__:
            found = getattr(module, name)
            assert not isinstance(found, type) or found.__repr__ is not object.__repr__, name


@pytest.mark.parametrize(
    "program",
    ["pass", "ts.Message('a/b', b'1')", "ts.matches('a/+', 'a/b')", "ts.LateMessageError", "ts.aopen('data')"],
)
def test_importing_costs_little(program: str) -> None:
    """No slow library is imported until a database is opened; `aopen` imports them in a thread."""
    script = (
        f"import sys, topicstore as ts; {program}\n"
        "print([m for m in ('numpy', 'pyarrow', 'pluggy', 'attr', 'importlib.metadata') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


@pytest.mark.parametrize("name", ["replay", "store", "publish", "info"])
def test_what_is_asked_of_the_module_in_place_of_a_database(name: str) -> None:
    """Calling a database's method on the module raises an error that says how to open a database."""
    with pytest.raises(AttributeError, match=rf"{name} is of an open database: with topicstore.open"):
        getattr(ts, name)
    with pytest.raises(AttributeError, match="has no attribute 'rpelay'"):
        _ = ts.rpelay


def test_objects_say_what_they_are(db: ts.Database) -> None:
    """The `repr` of every object that a program gets describes it, not only its address."""
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
    """The `repr` of an object whose database was closed raises nothing."""
    held = (db, db.retention, db.archives, db.persistence, db.sessions, db.queues, db.state(0), db.writer())
    db.close()
    assert all(map(repr, held))
