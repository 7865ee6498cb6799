"""The asynchronous face has what the synchronous one has: the same names, parameters and types."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import aio

INTERNAL = {
    "Database": {"storage", "hub"},
    "Sessions": {"states", "dispatcher", "shared", "entered"},
    "Queue": {"write_copy"},
    "Queues": {"write_copies"},
    "Session": {"on_end"},
}
"""Public in Python, and not for users."""
OTHERWISE = {"fetch_async", "wait_async", "notify", "put_nowait"}
"""What the synchronous face has for event loops: here it is `fetch`, `wait` and `put`."""
NOT_AWAITED = {
    ("Database", "replay"),
    ("Database", "replay_arrow"),
    ("Database", "subscribe"),
    ("Database", "writer"),
    ("Queues", "damages"),
    ("ShardState", "scan"),
}
"""What they return is iterated over, or entered."""
Pair = tuple[object, object]


def names(one: object) -> set[str]:
    return {name for name in dir(one) if not name.startswith("_")} - INTERNAL.get(type(one).__name__, set()) - OTHERWISE


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Objects of both faces."""
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


KINDS = [
    "Archives",
    "Database",
    "PersistenceRules",
    "Queue",
    "Queues",
    "Retention",
    "Session",
    "Sessions",
    "ShardState",
    "Subscription",
    "Writer",
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_has_the_same_names(pairs: dict[str, Pair], kind: str) -> None:
    """So that it can't fall behind; what it has besides is for asyncio only."""
    synchronous, asynchronous = pairs[kind]
    assert set() == names(synchronous) - names(asynchronous)
    assert names(asynchronous) - names(synchronous) <= {"synchronous", "contains", "count"}


@pytest.mark.parametrize("kind", KINDS)
def test_methods_have_the_same_parameters(pairs: dict[str, Pair], kind: str) -> None:
    """In the same order, with the same defaults and types; sessions are those of asyncio."""
    synchronous, asynchronous = pairs[kind]
    for name in names(synchronous):
        method = getattr(synchronous, name)
        if callable(method) and not isinstance(method, type):
            assert parameters(method) == parameters(getattr(asynchronous, name)), name


def parameters(method: Any) -> list[inspect.Parameter]:
    found = inspect.signature(method).parameters.values()
    return [
        one.replace(annotation="" if one.name == "on_end" else str(one.annotation).replace("AsyncSession", "Session"))
        for one in found
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_methods_are_awaited(pairs: dict[str, Pair], kind: str) -> None:
    """All of them, but for those whose results are iterated over or entered."""
    _, asynchronous = pairs[kind]
    for name in names(asynchronous) - {"synchronous"}:
        method = getattr(asynchronous, name)
        if callable(method):
            assert inspect.iscoroutinefunction(method) is ((kind, name) not in NOT_AWAITED), name


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_documented_and_says_what_it_is(pairs: dict[str, Pair], kind: str) -> None:
    """Also what was taken over from the synchronous face."""
    _, asynchronous = pairs[kind]
    assert " object at 0x" not in repr(asynchronous)
    for name in names(asynchronous):
        found = getattr(type(asynchronous), name, None)
        assert found is None or inspect.getdoc(found), name


def test_opening_takes_what_open_takes(tmp_path: Path) -> None:
    """And each says what it is."""
    assert inspect.signature(ts.aopen) == inspect.signature(ts.open).replace(
        return_annotation=inspect.signature(ts.aopen).return_annotation
    )
    assert ts.open.__doc__ == ts.aopen.__doc__
    assert " object at 0x" not in repr(ts.aopen(tmp_path / "db"))
    assert aio.AsyncDatabase is ts.AsyncDatabase
    assert not (tmp_path / "db").exists()


PROGRAM = """
from __future__ import annotations

from typing import assert_type

import topicstore as ts
from topicstore.queues.queue import QueueBatch
from topicstore.sessions import SessionInfo


async def main() -> None:
    async with ts.aopen("data", "x", backend="memory", durability="sync") as db:
        assert_type(db, ts.AsyncDatabase)
        assert_type(await db.store([ts.Message("a", b"1")]), ts.StoreResult)
        assert_type(await db.retained("#"), list[ts.Message])
        assert_type([message async for message in db.replay("#", limit=1)], list[ts.Message])
        async for message in db.subscribe("#", start=0):
            assert_type(message, ts.Message)
        async with db.writer(flush_interval=0.01) as writer:
            assert_type(await writer.put(ts.Message("a", b"1")), ts.MessageId)
        subscription = await db.subscribe("#")
        assert_type(await subscription.fetch(timeout=1), ts.SubscriptionBatch)
        session = await db.sessions.open("me", expiry_interval=None)
        assert_type(await session.puback(1), int)
        assert_type([info async for info in db.sessions], list[SessionInfo])
        assert_type(await db.sessions["me"], SessionInfo)
        queue = await db.queues.open("alarms", max_messages=10)
        assert_type(await queue.read(), QueueBatch)
        assert_type(await (await db.state(0)).get(b"k"), bytes | None)
        await db.retained(1)  # type: ignore[arg-type]
        await db.replay("#", limt=1)  # type: ignore[call-arg, misc]
        await db.drop_generation()  # type: ignore[call-arg]
    db = await ts.aopen("data", mode="r")
    ts.aopen("data", mode="w")  # type: ignore[arg-type]
    await db.close()
"""


def test_types_are_exact(tmp_path: Path) -> None:
    """A strict mypy knows what is returned, and finds wrong arguments."""
    pytest.importorskip("mypy", reason="needs mypy: pip install mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", tmp_path / "cache"]
    framework = str(Path(ts.__file__).parents[1])
    checked.append(tmp_path / "program.py")
    done = subprocess.run(checked, env={"MYPYPATH": framework}, capture_output=True, text=True, cwd=tmp_path)
    assert 0 == done.returncode, done.stdout + done.stderr
