"""Asynchronous iteration over items that a thread reads: one batch is read ahead, and no item is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from itertools import chain
from pathlib import Path

import pytest
import topicstore as ts
from hypothesis import given
from hypothesis import strategies as st
from topicstore.aio.iteration import Iteration
from topicstore.aio.threads import Threads
from topicstore_conformance.faults.threads import PATIENCE, wait_until


class Source:
    """An iterable that counts the items taken from it, and sets `left` when its iteration ends."""

    def __init__(self, count: int, failing: bool = False) -> None:
        self.count = count
        self.failing = failing
        self.taken = 0
        self.left = threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.taken += 1
                yield number
            if self.failing:
                raise ts.EngineError("broken")
        finally:
            self.left.set()


@given(count=st.integers(0, 3_000), most=st.none() | st.integers(3, 2_000), failing=st.booleans())
def test_all_comes_in_order(count: int, most: int | None, failing: bool) -> None:
    """Items before an error come in order; then the error is raised once, and the iteration ends."""

    async def main() -> tuple[list[int], list[str]]:
        threads, found, errors = Threads(), [], []
        reading = Iteration(threads, "numbers", Source(count, failing), most)
        for _ in range(2):
            try:
                async for number in reading:
                    found.append(number)  # noqa: PERF401 - some come before the error
            except ts.EngineError as error:
                errors.append(str(error))
        await threads.close(lambda: None)
        return found, errors

    assert (list(range(count)), ["broken"] * failing) == asyncio.run(main())


async def test_one_portion_is_read_ahead() -> None:
    """At most one batch is read ahead, however slow the consumer is."""
    threads, source = Threads(), Source(100_000)
    async with Iteration(threads, "numbers", source, 10) as reading:
        for seen in range(1, 200):
            await anext(reading)
            assert source.taken <= seen + 20
    await asyncio.to_thread(wait_until, source.left.is_set, "what was left early is over")
    with pytest.raises(StopAsyncIteration):
        await anext(reading)
    await threads.close(lambda: None)


@pytest.mark.parametrize("how", ["forgotten", "aclosing"])
async def test_left_early(how: str) -> None:
    """The source is closed when its iteration is abandoned or closed early."""
    threads, source = Threads(), Source(100_000)
    if how == "forgotten":
        async for _ in Iteration(threads, "numbers", source):
            break
    else:
        async with aclosing(Iteration(threads, "numbers", source)) as reading:
            async for _ in reading:
                break
    await asyncio.to_thread(wait_until, source.left.is_set, "what was left early is over")
    assert source.taken <= 5
    await threads.close(lambda: None)


async def test_a_cancelled_wait_loses_nothing() -> None:
    """An iteration continues at the same item after a wait was cancelled, for example by a timeout."""
    gate, entered = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 0
        entered.set()
        assert gate.wait(PATIENCE)
        yield from range(1, 10)

    threads = Threads()
    reading = Iteration(threads, "numbers", source)
    assert 0 == await anext(reading)
    for _ in range(2):
        waiting = asyncio.ensure_future(anext(reading))
        await asyncio.to_thread(entered.wait, PATIENCE)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    gate.set()
    assert list(range(1, 10)) == [number async for number in reading]
    await threads.close(lambda: None)


async def test_several_tasks_share_what_there_is() -> None:
    """Each item goes to exactly one of the tasks that share an iteration."""

    async def some(reading: Iteration[int]) -> list[int]:
        return [number async for number in reading]

    threads = Threads()
    reading = Iteration(threads, "numbers", Source(3_000))
    found = await asyncio.gather(*(some(reading) for _ in range(4)))
    assert list(range(3_000)) == sorted(chain.from_iterable(found))
    await threads.close(lambda: None)


async def test_replays_of_a_database(tmp_path: Path) -> None:
    """Replays return the messages of the synchronous API, and raise errors at the first message."""
    messages = [ts.Message(f"a/{n % 7}", b"%d" % n, "c") for n in range(5_000)]
    async with ts.aopen(tmp_path / "db", backend="memory") as db:
        await db.store(messages)
        expected = list(db.synchronous.replay("a/+", reverse=True, limit=3_000))
        assert expected == [message async for message in db.replay("a/+", reverse=True, limit=3_000)]
        batches = [batch.num_rows async for batch in db.replay_arrow("#", batch_size=1_000)]
        assert 5_000 == sum(batches)
        for wrong in (db.replay("#/a"), db.replay_arrow("#", batch_size=0)):
            with pytest.raises((ts.InvalidFilterError, ts.InvalidArgumentError)):
                await anext(wrong)
        left = db.replay("#")
        await anext(left)
    with pytest.raises(ts.DatabaseClosedError):
        async for _ in left:
            pass
