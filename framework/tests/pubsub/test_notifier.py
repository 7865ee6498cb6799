"""`topicstore.pubsub.notifier` notifies all listening threads and event loops, also between a check and a wait."""

from __future__ import annotations

import asyncio

from topicstore.pubsub.notifier import Notifier, TaskWaiter, ThreadWaiter
from topicstore_conformance.faults.threads import PATIENCE, begin, wait_until


def test_a_notification_before_the_wait_counts_once() -> None:
    """A listener's wait ends once for any number of notifications since it registered, and not for earlier ones."""
    notifier = Notifier()
    notifier.notify()  # before any listener is registered
    with ThreadWaiter(notifier, 0) as listening:
        assert not listening.wait()
        notifier.notify()
        notifier.notify()
        assert listening.wait()
        assert not listening.wait()
    assert [] == notifier.waiters


def test_one_notification_wakes_all_threads() -> None:
    """One notification wakes all waiting threads, even if one of them listens again before another has woken."""
    notifier = Notifier()

    def wait() -> bool:
        with ThreadWaiter(notifier, PATIENCE) as listening:
            return listening.wait()

    found = [begin(wait) for _ in range(3)]
    wait_until(lambda: len(notifier.waiters) == len(found), "three threads to listen")
    with ThreadWaiter(notifier, 0) as quick:
        notifier.notify()
        assert quick.wait()
        assert not quick.wait()
    assert [True] * 3 == [future.result(PATIENCE) for future in found]


def test_a_task_is_woken_from_a_thread() -> None:
    """A task is woken by each notification from a thread; without one its wait ends at the timeout."""

    async def listen(notifier: Notifier) -> list[bool]:
        loop = asyncio.get_running_loop()
        with TaskWaiter(notifier, PATIENCE) as listening:
            on_stored = []
            for _ in range(2):
                await loop.run_in_executor(None, notifier.notify)
                on_stored.append(await listening.wait())
        with TaskWaiter(notifier, 0) as listening:
            return [*on_stored, await listening.wait()]

    assert [True, True, False] == asyncio.run(listen(Notifier()))


def test_a_closed_loop_is_skipped() -> None:
    """A listener whose event loop was closed is skipped, and the other listeners are woken."""
    notifier = Notifier()

    async def begin_listening() -> None:
        TaskWaiter(notifier, None).__enter__()

    asyncio.run(begin_listening())
    with ThreadWaiter(notifier, 0) as listening:
        notifier.notify()
        assert listening.wait()
