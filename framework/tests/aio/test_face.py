"""The asynchronous API has the same names, parameters and types as the synchronous API."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import aio

INTERNAL = {
    "Database": {"storage", "hub"},
    "Sessions": {"states", "dispatcher", "shared", "entered"},
    "PersistenceRules": {"filters"},
    "Queue": {"write_copy"},
    "Queues": {"write_copies"},
    "Session": {"on_end"},
    "ShardState": {"last_applied"},
}
"""Names without an underscore that are not part of the API for users."""
OTHERWISE = {"fetch_async", "wait_async", "notify", "put_nowait"}
"""Methods of the synchronous API for event loops; the asynchronous API has `fetch`, `wait` and `put` instead."""
NOT_AWAITED = {
    ("Database", "replay"),
    ("Database", "replay_arrow"),
    ("Database", "subscribe"),
    ("Database", "writer"),
    ("Queues", "damages"),
    ("ShardState", "scan"),
}
"""Methods that return an iterator or a context manager, and so are not coroutines."""
Pair = tuple[object, object]


def names(one: object) -> set[str]:
    return {name for name in dir(one) if not name.startswith("_")} - INTERNAL.get(type(one).__name__, set()) - OTHERWISE


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Pairs of equivalent objects of the synchronous and the asynchronous API, by class."""
    path = tmp_path_factory.mktemp("face") / "db"
    with asyncio.Runner() as runner, ts.open(path, backend="memory") as db:
        there = runner.run(_pairs(db, str(path) + "-aio"))
        yield there
        there["Subscription"][0].close()  # type: ignore[attr-defined]
        runner.run(there["Database"][1].close())  # type: ignore[attr-defined]


async def _pairs(db: ts.Database, path: str) -> dict[str, Pair]:
    adb = await ts.aopen(path, backend="memory")
    return {
        "Database": (db, adb),
        "Archives": (db.archives, adb.archives),
        "PersistenceRules": (db.persistence, adb.persistence),
        "Queue": (db.queues.open("q"), await adb.queues.open("q")),
        "Queues": (db.queues, adb.queues),
        "Retention": (db.retention, adb.retention),
        "Session": (db.sessions.open("me"), await adb.sessions.open("me")),
        "Sessions": (db.sessions, adb.sessions),
        "ShardState": (db.state(0), await adb.state(0)),
        "Subscription": (db.subscribe("#"), await adb.subscribe("#")),
        "Writer": (db.writer(), await adb.writer()),
    }


def test_it_has_the_same_names(pairs: dict[str, Pair]) -> None:
    """The asynchronous API has all public names of the synchronous API, and only three more."""
    for synchronous, asynchronous in pairs.values():
        assert set() == names(synchronous) - names(asynchronous)
        assert names(asynchronous) - names(synchronous) <= {"synchronous", "contains", "count"}


def test_methods_have_the_same_parameters(pairs: dict[str, Pair]) -> None:
    """Methods have the same parameters, defaults and types in both APIs, except that sessions are `AsyncSession`."""
    for kind, (synchronous, asynchronous) in pairs.items():
        for name in names(synchronous):
            method = getattr(synchronous, name)
            if callable(method) and not isinstance(method, type):
                assert parameters(method) == parameters(getattr(asynchronous, name)), (kind, name)


def parameters(method: Any) -> list[inspect.Parameter]:
    found = inspect.signature(method).parameters.values()
    return [
        one.replace(annotation="" if one.name == "on_end" else str(one.annotation).replace("AsyncSession", "Session"))
        for one in found
    ]


def test_methods_are_awaited(pairs: dict[str, Pair]) -> None:
    """All methods are coroutines, except those that return an iterator or a context manager."""
    for kind, (_, asynchronous) in pairs.items():
        for name in names(asynchronous) - {"synchronous"}:
            method = getattr(asynchronous, name)
            if callable(method):
                assert inspect.iscoroutinefunction(method) is ((kind, name) not in NOT_AWAITED), (kind, name)


def test_everything_is_documented_and_says_what_it_is(pairs: dict[str, Pair]) -> None:
    """All public names are documented, also inherited ones, and the `repr` of each object describes it."""
    for kind, (_, asynchronous) in pairs.items():
        assert " object at 0x" not in repr(asynchronous)
        for name in names(asynchronous):
            found = getattr(type(asynchronous), name, None)
            assert found is None or inspect.getdoc(found), (kind, name)


def test_opening_takes_what_open_takes(tmp_path: Path) -> None:
    """`aopen` takes the same arguments and has the same docstring as `open`, and opens nothing until it is awaited."""
    assert inspect.signature(ts.aopen) == inspect.signature(ts.open).replace(
        return_annotation=inspect.signature(ts.aopen).return_annotation
    )
    assert ts.open.__doc__ == ts.aopen.__doc__
    assert " object at 0x" not in repr(ts.aopen(tmp_path / "db"))
    assert aio.AsyncDatabase is ts.AsyncDatabase
    assert not (tmp_path / "db").exists()
