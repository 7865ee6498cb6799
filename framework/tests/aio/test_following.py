"""Subscriptions, sessions, queues and writers in asyncio: nothing is lost or repeated, whatever is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.sessions import Ended, Publish, SessionTakenOverError
from topicstore_conformance.faults.threads import PATIENCE

Main = Callable[[ts.AsyncDatabase], Coroutine[Any, Any, None]]


def with_database(path: Path, main: Main) -> None:
    async def run() -> None:
        async with ts.aopen(path / "db", backend="memory") as db:
            await asyncio.wait_for(main(db), PATIENCE)

    asyncio.run(run())


def numbered(first: int, last: int) -> list[ts.Message]:
    return [ts.Message("a/b", b"%d" % number, "me", qos=1) for number in range(first, last)]


async def some(messages: AsyncIterator[ts.Message], count: int) -> list[int]:
    return [int((await anext(messages)).payload) for _ in range(count)]


# --- subscriptions ---


def test_following(tmp_path: Path) -> None:
    """First what is stored, then what comes, with ``async for``."""

    async def main(db: ts.AsyncDatabase) -> None:
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

    with_database(tmp_path, main)


def test_who_iterates_is_told_of_dropped_generations(tmp_path: Path) -> None:
    """By an error, if that is wanted; the next message comes then."""

    async def main(db: ts.AsyncDatabase) -> None:
        async with db.subscribe("a/+", start=0, on_dropped="raise") as subscription:
            await db.store(numbered(0, 3))
            await db.add_generation()
            await db.store(numbered(3, 6))
            await db.drop_generation(1)
            with pytest.raises(ts.GenerationDroppedError):
                await anext(subscription)
            assert [3, 4, 5] == await some(subscription, 3)
            assert 1 == (await subscription.status()).dropped

    with_database(tmp_path, main)


def test_a_subscription_begins_when_it_is_needed(tmp_path: Path) -> None:
    """When it is entered, awaited or asked for a message; many tasks begin one."""

    async def main(db: ts.AsyncDatabase) -> None:
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

    with_database(tmp_path, main)


def test_cancelled_fetches_lose_nothing(tmp_path: Path) -> None:
    """What was read for them comes with the next, in order."""

    async def main(db: ts.AsyncDatabase) -> None:
        await db.store(numbered(0, 200))
        found: list[int] = []
        async with db.subscribe("#", start=0, batch_size=3) as subscription:
            turns = 0
            while len(found) < 200:
                fetching = asyncio.create_task(subscription.fetch())
                for _ in range(turns % 4):
                    await asyncio.sleep(0)
                turns += 1
                if turns % 3:
                    fetching.cancel()
                done = (await asyncio.gather(fetching, return_exceptions=True))[0]
                if not isinstance(done, BaseException):
                    found += [int(message.payload) for message in done.messages]
        assert list(range(200)) == found

    with_database(tmp_path, main)


def test_a_timed_out_iteration_goes_on(tmp_path: Path) -> None:
    """A wait for a message that is cancelled doesn't end the iteration."""

    async def main(db: ts.AsyncDatabase) -> None:
        async with db.subscribe("#") as subscription:
            waiting = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(0)
            waiting.cancel()
            assert not (await subscription.fetch(timeout=0)).messages
            await db.store(numbered(0, 1))
            assert [0] == await some(subscription, 1)

    with_database(tmp_path, main)


def test_waiting_needs_no_thread(tmp_path: Path) -> None:
    """Hundreds wait, and a store goes on."""

    async def main(db: ts.AsyncDatabase) -> None:
        async with db.subscribe("#") as subscription:
            waiting = [asyncio.create_task(subscription.fetch(limit=1)) for _ in range(200)]
            waiting += [asyncio.create_task(_wait(db)) for _ in range(200)]  # type: ignore[arg-type]
            await asyncio.sleep(0)
            session = await db.sessions.open("me")
            await session.subscribe("#")
            await db.publish(numbered(0, 300))
            await asyncio.gather(*waiting)

    with_database(tmp_path, main)


async def _wait(db: ts.AsyncDatabase) -> None:
    assert await db.sessions.wait()


# --- sessions ---


def test_a_session_delivers(tmp_path: Path) -> None:
    """The same packets by itself and together with the others; it is the same object for as long as it is held."""

    async def main(db: ts.AsyncDatabase) -> None:
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
            assert not await session.puback(packet.packet_id)  # nothing is acknowledged twice
        assert 0 == (await session.status()).in_flight
        await session.disconnect()
        assert Ended.DISCONNECTED is session.ended

    with_database(tmp_path, main)


def test_cancelled_deliveries_are_handed_out_later(tmp_path: Path) -> None:
    """All packets come, once, in order, though many calls are cancelled."""

    async def main(db: ts.AsyncDatabase) -> None:
        session = await db.sessions.open("me", expiry_interval=None)
        await session.subscribe("#")
        await db.publish(numbered(0, 200))
        found: list[int] = []
        turns = 0
        while len(found) < 200:
            delivering = asyncio.create_task(session.deliver(3))
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            turns += 1
            if turns % 3:
                delivering.cancel()
            done = (await asyncio.gather(delivering, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                found += [int(one.message.payload) for one in done if isinstance(one, Publish)]
        assert list(range(200)) == found

    with_database(tmp_path, main)


def test_the_end_of_a_session_is_told_in_the_loop(tmp_path: Path) -> None:
    """With the session that asked to be told."""

    async def main(db: ts.AsyncDatabase) -> None:
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

    with_database(tmp_path, main)


def test_a_session_whose_opening_was_cancelled(tmp_path: Path) -> None:
    """Is disconnected; or it was never opened."""

    async def main(db: ts.AsyncDatabase) -> None:
        assert 0 == await db.sessions.count()
        for turns in range(6):
            opening = asyncio.create_task(db.sessions.open("me", expiry_interval=None))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            found = (await asyncio.gather(opening, return_exceptions=True))[0]
            if not isinstance(found, BaseException):
                await found.disconnect()
        while await db.sessions.connected("me") is not None:
            await asyncio.sleep(0.001)

    with_database(tmp_path, main)


# --- queues ---


def test_a_queue(tmp_path: Path) -> None:
    """What was read for a call that was cancelled comes with the next; a rewind begins again."""

    async def main(db: ts.AsyncDatabase) -> None:
        queue = await db.queues.open("alarms", max_messages=100)
        assert await db.queues.contains("alarms")
        await queue.append(numbered(0, 50))
        assert (50, True, "alarms") == (len(queue), bool(queue), queue.name)
        found: list[int] = []
        for turns in range(100):
            reading = asyncio.create_task(queue.read(1))
            for _ in range(turns % 4):
                await asyncio.sleep(0)
            reading.cancel()
            done = (await asyncio.gather(reading, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                found += [int(message.payload) for message in done.messages]
        while batch := (await queue.read(7)).messages:
            found += [int(message.payload) for message in batch]
        assert list(range(50)) == found
        await queue.rewind()
        batch = await queue.read(10)
        assert list(range(10)) == [int(message.payload) for message in batch.messages]
        assert 10 == await queue.commit(batch.last)
        assert [40] == [info.messages async for info in db.queues]
        assert await db.queues.drop("alarms")

    with_database(tmp_path, main)


def test_a_rewind_forgets_what_was_read_for_nobody(tmp_path: Path) -> None:
    """Else it would come twice."""

    async def main(db: ts.AsyncDatabase) -> None:
        queue = await db.queues.open("alarms")
        await queue.append(numbered(0, 5))
        for turns in range(4):
            reading = asyncio.create_task(queue.read(2))
            for _ in range(turns):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await queue.rewind()
            found = [int(message.payload) for message in (await queue.read()).messages]
            assert list(range(5)) == found
            await queue.rewind()

    with_database(tmp_path, main)


# --- writers ---


def test_puts_of_many_tasks_are_stored_together(tmp_path: Path) -> None:
    """In the order in which they were called, and each knows when its message is stored."""

    async def main(db: ts.AsyncDatabase) -> None:
        async with db.writer(max_items=100, flush_interval=0.001) as writer:
            ids = await asyncio.gather(*(writer.put(message) for message in numbered(0, 1_000)))
            assert sorted(ids, key=lambda one: one.position) == ids
            assert list(range(1_000)) == [int(message.payload) async for message in db.replay("#")]
            with pytest.raises(ts.InvalidMessageError):
                await writer.put(ts.Message("a/+", b""))
            await writer.flush()
        with pytest.raises(ts.DatabaseClosedError):
            await writer.put(ts.Message("a", b""))

    with_database(tmp_path, main)


def test_a_full_buffer_is_stored_at_once(tmp_path: Path) -> None:
    """Not only when the interval is over; nobody's loop is held up meanwhile."""

    async def main(db: ts.AsyncDatabase) -> None:
        writer = await db.writer(max_items=10, flush_interval=3_600)
        await asyncio.gather(*(writer.put(message) for message in numbered(0, 10)))
        waiting = asyncio.create_task(writer.put(ts.Message("a/b", b"10")))
        await asyncio.sleep(0)
        await writer.close()
        await waiting
        assert 11 == len([message async for message in db.replay("#")])

    with_database(tmp_path, main)


def test_cancelled_puts_and_those_beside_them(tmp_path: Path) -> None:
    """A cancelled one stored its message or not; the others are stored once."""

    async def main(db: ts.AsyncDatabase) -> None:
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

    with_database(tmp_path, main)
