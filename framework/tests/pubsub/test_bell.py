"""`topicstore.pubsub.notifier` notifies all listening threads and event loops, also between a check and a wait."""

from __future__ import annotations

import asyncio

from topicstore.pubsub.notifier import Bell, ListeningTask, ListeningThread
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until


def test_a_ring_before_the_wait_counts_once() -> None:
    """Notifications after a listener registered end one wait, however many there are; earlier ones end none."""
    bell = Bell()
    bell.ring()  # before any listener is registered
    with ListeningThread(bell, 0) as listening:
        assert not listening.wait()
        bell.ring()
        bell.ring()
        assert listening.wait()
        assert not listening.wait()
    assert [] == bell.listening


def test_one_ring_wakes_all_threads() -> None:
    """One notification wakes all waiting threads, even if one of them listens again before another has woken."""
    bell = Bell()

    def wait() -> bool:
        with ListeningThread(bell, PATIENCE) as listening:
            return listening.wait()

    found = [begin(wait) for _ in range(3)]
    wait_until(lambda: len(bell.listening) == len(found), "three threads to listen")
    with ListeningThread(bell, 0) as quick:
        bell.ring()
        assert quick.wait()
        assert not quick.wait()
    assert [True] * 3 == [future.result(PATIENCE) for future in found]


def test_a_task_is_woken_from_a_thread() -> None:
    """A task is woken by each notification from a thread; without one its wait ends at the timeout."""

    async def listen(bell: Bell) -> list[bool]:
        loop = asyncio.get_running_loop()
        with ListeningTask(bell, PATIENCE) as listening:
            woken = []
            for _ in range(2):
                await loop.run_in_executor(None, bell.ring)
                woken.append(await listening.wait())
        with ListeningTask(bell, 0) as listening:
            return [*woken, await listening.wait()]

    assert [True, True, False] == asyncio.run(listen(Bell()))


def test_a_loop_that_was_closed_harms_nobody() -> None:
    """A listener whose event loop was closed is skipped, and the other listeners are woken."""
    bell = Bell()

    async def begin_listening() -> None:
        ListeningTask(bell, None).__enter__()

    asyncio.run(begin_listening())
    with ListeningThread(bell, 0) as listening:
        bell.ring()
        assert listening.wait()
