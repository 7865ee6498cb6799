"""What mypy knows of public names, keys and columns, so that a wrong one is found before it runs."""

from pathlib import Path

import pytest
import topicstore
from mypy import api

PROGRAM = """
from typing import assert_type

import numpy as np
import topicstore
import topicstore as ts
import topicstore.server
from topicstore import MessageBatch
from topicstore.contract.columns import Column, Constant, take, to_list
from topicstore.contract.engine import DATA, META, STATE, K, Keyspace, Reader, WriteBatch
from topicstore.queues.queue import QueueBatch
from topicstore.sessions import SessionInfo


def typed(reader: Reader, batch: WriteBatch, any_of_them: Keyspace[K], key: K) -> None:
    reader.get(META, b"key")
    reader.get(DATA, (1, 2, 3))
    reader.get(any_of_them, key)
    reader.get(META, (1, 2, 3))  # refused
    reader.get(DATA, b"key")  # refused
    reader.get(DATA, (1, 2))  # refused
    reader.get_many(DATA, [(1, 2, 3), b"key"])  # refused
    for chunk in reader.scan(META, b"a", b"z"):
        names: list[bytes] = [key for key, _ in chunk]
        numbers: list[tuple[int, int, int]] = [key for key, _ in chunk]  # refused
    reader.scan(DATA, b"a")  # refused
    batch.put(STATE, b"key", b"value")
    batch.put(STATE, 1, b"value")  # refused
    batch.put_many(DATA, [b"key"], [b"value"])  # refused
    batch.delete(META, (1, 2, 3))  # refused
    batch.delete_range(DATA, (1, 0, 0), b"z")  # refused


def columns(batch: MessageBatch, topics: Column) -> None:
    MessageBatch(topics, [b""], ["c"], Constant(0, 1), np.array([True]), [None], [None], positions=batch.positions)
    MessageBatch("topic", [b""], ["c"], [0], [True], [None], [None])  # refused
    MessageBatch(topics, None, ["c"], [0], [True], [None], [None])  # refused
    MessageBatch(topics, [b""], ["c"], [0], [True], [None], [None], positions=[1])  # refused
    batch.replace(payloads=1)  # refused
    batch.positions = np.arange(3, dtype=np.uint64)  # refused
    topics.codes  # refused
    to_list({"topic"})  # refused
    rows = np.array([0])
    first: Constant[int] = take(Constant(0, 3), rows)
    text: Constant[str] = take(Constant(0, 3), rows)  # refused


def names() -> None:
    with topicstore.open("path", "r", durability="sync") as db:
        for message in db.replay("#", "-2h", by="timestamp", order="timestamp", reverse=True, limit=10):
            message.payload.decode()
        db.replay("#", order="newest")  # refused
        db.replay("#", until=1.5)  # refused
    topicstore.open("path", "w")  # refused
    topicstore.open("path", durability="synced")  # refused
    topicstore.open("path", duration="sync")  # refused
    topicstore.replay("#")  # refused
    topicstore.opne("path")  # refused
    topicstore.server.Serving  # refused


async def face() -> None:
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
        await db.retained(1)  # refused
        await db.replay("#", limt=1)  # refused
        await db.drop_generation()  # refused
    db = await ts.aopen("data", mode="r")
    ts.aopen("data", mode="w")  # refused
    await db.close()
"""


def test_mypy_refuses_wrong_names_keys_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the lines that say so: each has a name or argument that is none, another keyspace's key, or no column."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", str(Path(topicstore.__file__).parents[1]))
    settings = ["--strict", "--follow-imports=silent", "--no-error-summary", "--hide-error-context"]
    found, failed, _ = api.run([*settings, "--config-file=", f"--cache-dir={tmp_path}/cache", str(program)])
    assert not failed
    refused = {int(line.split(":")[1]) for line in found.splitlines() if ": error: " in line}
    marked = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# refused")}
    assert sorted(marked) == sorted(refused), found
