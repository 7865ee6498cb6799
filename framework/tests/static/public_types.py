"""Uses of public names, keys and columns that mypy must accept or refuse.

`make lint` checks this module, and nothing executes it. mypy reports an unused `type: ignore`, so each line that has
one must be a line that mypy refuses.
"""

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
    reader.get(META, (1, 2, 3))  # type: ignore[misc]
    reader.get(DATA, b"key")  # type: ignore[misc]
    reader.get(DATA, (1, 2))  # type: ignore[misc]
    reader.get_many(DATA, [(1, 2, 3), b"key"])  # type: ignore[misc]
    for chunk in reader.scan(META, b"a", b"z"):
        names: list[bytes] = [key for key, _ in chunk]
        numbers: list[tuple[int, int, int]] = [key for key, _ in chunk]  # type: ignore[misc]
    reader.scan(DATA, b"a")  # type: ignore[misc]
    batch.put(STATE, b"key", b"value")
    batch.put(STATE, 1, b"value")  # type: ignore[misc]
    batch.put_many(DATA, [b"key"], [b"value"])  # type: ignore[misc]
    batch.delete(META, (1, 2, 3))  # type: ignore[misc]
    batch.delete_range(DATA, (1, 0, 0), b"z")  # type: ignore[misc]


def columns(batch: MessageBatch, topics: Column) -> None:
    MessageBatch(topics, [b""], ["c"], Constant(0, 1), np.array([True]), [None], [None], positions=batch.positions)
    MessageBatch("topic", [b""], ["c"], [0], [True], [None], [None])  # type: ignore[arg-type]
    MessageBatch(topics, None, ["c"], [0], [True], [None], [None])  # type: ignore[arg-type]
    MessageBatch(topics, [b""], ["c"], [0], [True], [None], [None], positions=[1])  # type: ignore[arg-type]
    batch.replace(payloads=1)  # type: ignore[arg-type]
    batch.positions = np.arange(3, dtype=np.uint64)  # type: ignore[misc]
    topics.codes  # type: ignore[union-attr]
    to_list({"topic"})  # type: ignore[arg-type]
    rows = np.array([0])
    first: Constant[int] = take(Constant(0, 3), rows)
    text: Constant[str] = take(Constant(0, 3), rows)  # type: ignore[assignment]


def names() -> None:
    with topicstore.open("path", "r", durability="sync") as db:
        for message in db.replay("#", "-2h", by="timestamp", order="timestamp", reverse=True, limit=10):
            message.payload.decode()
        db.replay("#", order="newest")  # type: ignore[arg-type]
        db.replay("#", until=1.5)  # type: ignore[arg-type]
    topicstore.open("path", "w")  # type: ignore[arg-type]
    topicstore.open("path", durability="synced")  # type: ignore[arg-type]
    topicstore.open("path", duration="sync")  # type: ignore[call-arg]
    topicstore.replay("#")  # type: ignore[attr-defined]
    topicstore.opne("path")  # type: ignore[attr-defined]
    topicstore.server.Serving  # type: ignore[attr-defined]


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
        await db.retained(1)  # type: ignore[arg-type]
        await db.replay("#", limt=1)  # type: ignore[call-arg, misc]
        await db.drop_generation()  # type: ignore[call-arg]
    db = await ts.aopen("data", mode="r")
    ts.aopen("data", mode="w")  # type: ignore[arg-type]
    await db.close()
