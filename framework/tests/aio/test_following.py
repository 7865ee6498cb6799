"""Subscriptions, sessions, queues and writers in asyncio: cancellation neither loses nor repeats a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest
import topicstore as ts
from topicstore.sessions import Ended, Publish, SessionTakenOverError

T = TypeVar("T")


async def cancelled(call: Coroutine[Any, Any, T], turns: int, *, really: bool = True) -> T | None:
    """Begin a call, cancel it after `turns` iterations of the event loop, and return its result if it has finished."""
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    if really:
        task.cancel()
    (done,) = await asyncio.gather(task, return_exceptions=True)
    return None if isinstance(done, BaseException) else done


def numbered(first: int, last: int) -> list[ts.Message]:
    return [ts.Message("a/b", b"%d" % number, "me", qos=1) for number in range(first, last)]


async def some(messages: AsyncIterator[ts.Message], count: int) -> list[int]:
    return [int((await anext(messages)).payload) for _ in range(count)]


@pytest.mark.parametrize("what", ["subscription", "session", "queue"])
async def test_cancelled_calls_lose_nothing(db: ts.AsyncDatabase, what: str) -> None:
    """Messages that were read for a cancelled call are returned by the next call, each once and in order."""
    session = await db.sessions.open("me", expiry_interval=None)
    await session.subscribe("#")
    queue = await db.queues.open("q")
    subscription = await db.subscribe("#", start=0, batch_size=3)
    await db.publish(numbered(0, 200))
    await queue.append(numbered(0, 200))
    turns, found = 0, list[int]()
    while len(found) < 200:
        call: Any = {"subscription": subscription.fetch, "session": session.deliver, "queue": queue.read}[what]
        taken = await cancelled(call() if what == "subscription" else call(3), turns % 4, really=turns % 3 > 0)
        turns += 1
        messages = [one.message for one in taken] if isinstance(taken, list) else taken.messages if taken else []
        found += [int(message.payload) for message in messages]
    assert list(range(200)) == found
    await subscription.close()


# --- subscriptions ---


async def test_following(db: ts.AsyncDatabase) -> None:
    """`async for` yields the stored messages first, and then messages that are stored later."""
    await db.store(numbered(0, 100))
    async with db.subscribe("a/+", start=0, window=30, batch_size=10) as subscription:
        following = asyncio.create_task(some(subscription, 300))
        for first in range(100, 300, 20):
            await db.store(numbered(first, first + 20))
        assert list(range(300)) == await following
        assert {0} == set(subscription.place)
        assert "a/+" == subscription.topic_filter
    assert [] == [message async for message in subscription]
    with pytest.raises(ts.SubscriptionClosedError):
        await subscription.fetch()


async def test_dropped_generations_are_reported_while_iterating(db: ts.AsyncDatabase) -> None:
    """With `on_dropped="raise"`, a dropped generation raises an error, and the next call returns the next message."""
    async with db.subscribe("a/+", start=0, on_dropped="raise") as subscription:
        await db.store(numbered(0, 3))
        await db.add_generation()
        await db.store(numbered(3, 6))
        await db.drop_generation(1)
        with pytest.raises(ts.GenerationDroppedError):
            await anext(subscription)
        assert [3, 4, 5] == await some(subscription, 3)
        assert 1 == (await subscription.status()).dropped


async def test_a_subscription_begins_when_it_is_needed(db: ts.AsyncDatabase) -> None:
    """A subscription begins when it is entered or awaited or a message is requested, only once for many tasks."""
    subscription = db.subscribe("#")
    with pytest.raises(RuntimeError, match="has not begun"):
        _ = subscription.place
    fetching = [asyncio.create_task(subscription.fetch(limit=1)) for _ in range(4)]
    await db.subscribe("#").close()
    while "not begun" in repr(subscription):
        await asyncio.sleep(0.001)
    for number in range(4):
        await db.store(numbered(number, number + 1))
    batches = await asyncio.gather(*fetching)
    assert [0, 1, 2, 3] == sorted(int(message.payload) for batch in batches for message in batch.messages)
    await subscription.close()
    with pytest.raises(ts.InvalidFilterError):
        await db.subscribe("a/#/b")


async def test_a_timed_out_iteration_continues(db: ts.AsyncDatabase) -> None:
    """Cancelling a wait for a message doesn't end the iteration."""
    async with db.subscribe("#") as subscription:
        waiting = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        waiting.cancel()
        assert not (await subscription.fetch(timeout=0)).messages
        await db.store(numbered(0, 1))
        assert [0] == await some(subscription, 1)


async def test_waiting_needs_no_thread(db: ts.AsyncDatabase) -> None:
    """The event loop serves hundreds of waiting calls without a thread for each, and other calls proceed."""
    async with db.subscribe("#") as subscription:
        waiting = [asyncio.create_task(subscription.fetch(limit=1)) for _ in range(200)]
        waiting += [asyncio.create_task(_wait(db)) for _ in range(200)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        session = await db.sessions.open("me")
        await session.subscribe("#")
        await db.publish(numbered(0, 300))
        await asyncio.gather(*waiting)


async def _wait(db: ts.AsyncDatabase) -> None:
    assert await db.sessions.wait()


# --- sessions ---


async def test_a_session_delivers(db: ts.AsyncDatabase) -> None:
    """A session delivers the same packets alone and together with others, and is the same object wherever returned."""
    session = await db.sessions.open("me", expiry_interval=None)
    assert not session.present
    await session.subscribe("a/+")
    await db.publish(numbered(0, 10))
    assert await db.sessions.wait()
    ((found, packets),) = await db.sessions.deliver(4)
    packets += await session.deliver()
    assert found is session
    assert session is await db.sessions.connected("me")
    assert await db.sessions.connected("you") is None
    assert list(range(10)) == [int(one.message.payload) for one in packets if isinstance(one, Publish)]
    for packet in packets:
        assert await session.puback(packet.packet_id)
        assert not await session.puback(packet.packet_id)  # an acknowledgement counts once
    assert 0 == (await session.status()).in_flight
    await session.disconnect()
    assert Ended.DISCONNECTED is session.ended


async def test_the_end_of_a_session_is_reported_in_the_loop(db: ts.AsyncDatabase) -> None:
    """`on_end` is called in the event loop, with the session and the reason."""
    loop, told = asyncio.get_running_loop(), asyncio.Queue[object]()

    def on_end(session: object, why: Ended) -> None:
        assert loop is asyncio.get_running_loop()
        told.put_nowait((session, why))

    first = await db.sessions.open("me", on_end=on_end)
    second = await db.sessions.open("me")
    assert (first, Ended.TAKEN_OVER) == await told.get()
    with pytest.raises(SessionTakenOverError):
        await first.deliver()
    assert second.ended is None


async def test_a_session_whose_opening_was_cancelled(db: ts.AsyncDatabase) -> None:
    """A session whose opening was cancelled is disconnected, or was never opened."""
    assert 0 == await db.sessions.count()
    for turns in range(6):
        opened = await cancelled(db.sessions.open("me", expiry_interval=None), turns)
        if opened is not None:
            await opened.disconnect()
    while await db.sessions.connected("me") is not None:
        await asyncio.sleep(0.001)


# --- queues ---


async def test_a_queue(db: ts.AsyncDatabase) -> None:
    """A queue can be read, committed and rewound."""
    queue = await db.queues.open("alarms", max_messages=100)
    assert await db.queues.contains("alarms")
    await queue.append(numbered(0, 50))
    assert (50, True, "alarms") == (len(queue), bool(queue), queue.name)
    for _ in range(2):
        batch = await queue.read(10)
        assert list(range(10)) == [int(message.payload) for message in batch.messages]
        await queue.rewind()
    assert 10 == await queue.commit(batch.last)
    assert [40] == [info.messages async for info in db.queues]
    assert await db.queues.drop("alarms")


async def test_a_rewind_discards_messages_of_cancelled_calls(db: ts.AsyncDatabase) -> None:
    """A rewind discards the messages that were read for cancelled calls, so that none is returned twice."""
    queue = await db.queues.open("alarms")
    await queue.append(numbered(0, 5))
    for turns in range(4):
        await cancelled(queue.read(2), turns)
        await queue.rewind()
        assert list(range(5)) == [int(message.payload) for message in (await queue.read()).messages]
        await queue.rewind()


# --- writers ---


async def test_puts_of_many_tasks_are_stored_together(db: ts.AsyncDatabase) -> None:
    """Messages are stored in the order of the calls to `put`, and each call returns when its message is stored."""
    async with db.writer(max_items=100, flush_interval=0.001) as writer:
        ids = await asyncio.gather(*(writer.put(message) for message in numbered(0, 1_000)))
        assert sorted(ids, key=lambda one: one.position) == ids
        assert list(range(1_000)) == [int(message.payload) async for message in db.replay("#")]
        with pytest.raises(ts.InvalidMessageError):
            await writer.put(ts.Message("a/+", b""))
        await writer.flush()
    with pytest.raises(ts.DatabaseClosedError):
        await writer.put(ts.Message("a", b""))


async def test_a_full_buffer_is_stored_at_once(db: ts.AsyncDatabase) -> None:
    """A full buffer is written without waiting for the flush interval, and without blocking the event loop."""
    writer = await db.writer(max_items=10, flush_interval=3_600)
    await asyncio.gather(*(writer.put(message) for message in numbered(0, 10)))
    waiting = asyncio.create_task(writer.put(ts.Message("a/b", b"10")))
    await asyncio.sleep(0)
    await writer.close()
    await waiting
    assert 11 == len([message async for message in db.replay("#")])


async def test_cancelled_puts_and_those_beside_them(db: ts.AsyncDatabase) -> None:
    """A cancelled `put` may or may not store its message; messages of other tasks are stored once."""
    async with db.writer(max_items=7, flush_interval=3_600) as writer:
        tasks = [asyncio.create_task(writer.put(message)) for message in numbered(0, 100)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        flushing = asyncio.create_task(writer.flush())
        await asyncio.gather(*tasks, flushing, return_exceptions=True)
    found = [int(message.payload) async for message in db.replay("#")]
    assert sorted(set(found)) == found
    assert {number for number, task in enumerate(tasks) if not task.cancelled()} <= set(found)
