"""The event loop runs while calls wait in threads; a cancelled call is waited for, and its result is undone."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.aio.handover import Handover
from topicstore.aio.threads import MOST, Threads
from topicstore_conformance.database.intercepting_engines import Turnstile, replace_engine
from topicstore_conformance.faults.threads import PATIENCE, wait_until


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("topicstore")]


class Gate:
    """A call that blocks its thread until `open` is set."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.open.wait(PATIENCE)
        return "through"

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, PATIENCE)


async def test_the_loop_runs_while_the_engine_waits(tmp_path: Path) -> None:
    """The event loop runs other tasks while stores wait for the lock of a shard."""
    async with ts.aopen(tmp_path / "db", backend="memory") as db:
        shard = db.synchronous.storage.shards[0]
        with shard.writer.lock:
            stores = [asyncio.create_task(db.store([ts.Message("a", b"%d" % n)])) for n in range(40)]
            for _ in range(100):
                await asyncio.sleep(0)  # the event loop runs, but the message isn't stored yet
            assert not any(store.done() for store in stores)
            assert len([thread for thread in ours() if thread.name.startswith("topicstore-aio")]) <= MOST
        await asyncio.wait_for(asyncio.gather(*stores), PATIENCE)
        assert 40 == len([message async for message in db.replay("#")])


async def test_stores_that_wait_for_the_disk_share_flushes(tmp_path: Path) -> None:
    """Concurrent synchronous stores share fsyncs: the first store has its own, and the others share at most two."""
    async with ts.aopen(tmp_path / "db", backend="memory", durability="sync", auto_compact=False) as db:
        turnstile = Turnstile(db.synchronous.storage.shards[0].writer.open_engine())
        replace_engine(db.synchronous, turnstile)
        stores = [asyncio.create_task(db.store([ts.Message("a", b"%d" % n)])) for n in range(MOST)]
        await asyncio.to_thread(wait_until, lambda: db.synchronous.info().messages == MOST, "all are written")
        assert 1 == turnstile.begun
        turnstile.let_through(100)
        await asyncio.gather(*stores)
        assert turnstile.begun <= 3


def test_a_cancelled_store_has_stored_or_not(tmp_path: Path) -> None:
    """A cancelled store is waited for if it has begun; otherwise it never runs."""

    async def main() -> None:
        async with ts.aopen(tmp_path / "db") as db:
            shard = db.synchronous.storage.shards[0]
            with shard.writer.lock:
                stores = [asyncio.create_task(db.store([ts.Message("a", b"%d" % n)])) for n in range(20)]
                await asyncio.sleep(0)
                for store in stores:
                    store.cancel()
                results = await asyncio.gather(*stores, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
        with ts.open(tmp_path / "db") as again:
            assert len(list(again.replay("#"))) <= MOST

    asyncio.run(main())
    assert ours() == []


async def test_a_call_that_has_not_begun_is_withdrawn() -> None:
    """A call that is cancelled while all threads are busy never runs."""
    threads, gate, done = Threads(), Gate(), threading.Event()
    busy = [asyncio.create_task(threads.run(gate)) for _ in range(MOST)]
    await asyncio.sleep(0)
    late = asyncio.create_task(threads.run(done.set))
    await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    gate.open.set()
    assert ["through"] * MOST == await asyncio.gather(*busy)
    await threads.close(lambda: None)
    assert not done.is_set()


async def test_what_a_cancelled_call_makes_is_undone() -> None:
    """The result of a cancelled call is undone in a thread, after the call has returned."""
    threads, gate = Threads(), Gate()
    undone: Future[str] = Future()
    making = asyncio.create_task(threads.make(gate, undone.set_result))
    await gate.reached()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert not undone.done()
    gate.open.set()
    await threads.close(lambda: None)
    assert "through" == undone.result(0)


def test_closing_beside_calls() -> None:
    """Closing waits for running calls, refuses new ones, and continues when its own task is cancelled."""

    async def main() -> None:
        threads, gate, closed = Threads(), Gate(), threading.Event()
        running = asyncio.create_task(threads.run(gate))
        await gate.reached()
        closing = asyncio.create_task(threads.close(closed.set))
        await asyncio.to_thread(closed.wait, PATIENCE)
        with pytest.raises(ts.DatabaseClosedError):
            await threads.run(gate)
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        gate.open.set()
        assert "through" == await running
        await threads.close(lambda: None)

    asyncio.run(main())
    wait_until(lambda: ours() == [], "all threads have ended")


async def test_a_failing_close_is_reported_and_ends_the_threads() -> None:
    """An error during closing is raised, the threads end, and closing can be repeated."""
    threads = Threads()
    await threads.run(lambda: None)
    with pytest.raises(ts.EngineError, match="broken"):
        await threads.close(_fail)
    assert [] == [thread for thread in ours() if thread.name.startswith("topicstore-aio_")]
    await threads.close(lambda: None)


def _fail() -> None:
    raise ts.EngineError("broken")


async def test_calls_see_the_context_of_their_task() -> None:
    """A call runs in a copy of its task's context, as with `asyncio.to_thread`; tracing plugins rely on this."""
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    threads = Threads()
    variable.set(7)
    assert 7 == await threads.run(variable.get)
    await threads.close(lambda: None)


async def test_what_was_taken_for_a_cancelled_task_is_for_the_next() -> None:
    """An item that was taken for a cancelled task goes to the next task, once and in order."""
    threads, gate = Threads(), Gate()
    handover: Handover[str] = Handover(threads)
    first = asyncio.create_task(handover.take(gate))
    await gate.reached()
    second = asyncio.create_task(handover.take(lambda: "second"))
    third = asyncio.create_task(handover.take(lambda: "third"))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open.set()
    assert ["through", "third"] == await asyncio.gather(second, third)
    await threads.close(lambda: None)
