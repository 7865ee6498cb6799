"""`AsyncQueues` and `AsyncQueue`: durable, bounded queues in asyncio."""

from __future__ import annotations

from topicstore.contract.arguments import KEEP, Keep
from topicstore.queues.queue import Queue, QueueBatch
from topicstore.queues.queues import Queues
from topicstore.queues.record import Overflow

from .face import Collection, Face, iterated, threaded
from .handover import Handover
from .threads import Threads

__all__ = ["AsyncQueue", "AsyncQueues"]


class AsyncQueue(Face[Queue]):
    """One queue, as returned by `AsyncQueues.open`; see `Queue`.

    Use only one object for each queue, because the object holds the read position.
    """

    def __init__(self, threads: Threads, queue: Queue) -> None:
        super().__init__(threads, lambda: queue, queue)
        self._queue = queue
        self._reads: Handover[QueueBatch] = Handover(threads)

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._queue.name

    @property
    def bytes(self) -> int:
        """The bytes of uncommitted messages: topics, client ids and payloads, and about 6 bytes for each message."""
        return self._queue.bytes

    @property
    def dropped(self) -> int:
        """The number of messages refused or removed because the queue was full, since its creation."""
        return self._queue.dropped

    def __len__(self) -> int:
        """Return the number of messages that are not yet committed."""
        return len(self._queue)

    def __bool__(self) -> bool:
        """Return True, even for an empty queue."""
        return True

    def __repr__(self) -> str:
        return f"<Async{repr(self._queue).removeprefix('<')}"

    info = threaded(Queue.info)
    damages = threaded(Queue.damages)
    append = threaded(Queue.append)
    peek = threaded(Queue.peek)
    commit = threaded(Queue.commit)
    bound = threaded(Queue.bound)
    close = threaded(Queue.close)

    async def read(self, limit: int = 1_000) -> QueueBatch:
        """Return the messages after the last ones read: at most ``limit``, perhaps fewer; none only at the queue's end.

        Messages stay in the queue until they are committed: when the queue is opened again, reading begins at the first
        uncommitted message. Messages read for a cancelled call are returned by the next call, regardless of its
        ``limit``.
        """
        return await self._reads.take(lambda: self._queue.read(limit))

    async def rewind(self) -> None:
        """Move the read position back to the first uncommitted message, so that later ones are returned again."""
        await self._reads.discard(self._queue.rewind)


class AsyncQueues(Collection[Queues]):
    """The queues of one database, as returned by `AsyncDatabase.queues`; see `Queues`."""

    async def open(
        self,
        name: str,
        *,
        max_messages: int | Keep | None = KEEP,
        max_bytes: int | str | Keep | None = KEEP,
        overflow: Overflow | Keep = KEEP,
    ) -> AsyncQueue:
        """Open the queue with that name, or create it; see `Queues.open`."""
        queue = await self._threads.run(
            lambda: self._find().open(name, max_messages=max_messages, max_bytes=max_bytes, overflow=overflow)
        )
        return AsyncQueue(self._threads, queue)

    __aiter__ = iterated(Queues.__iter__)
    __getitem__ = threaded(Queues.__getitem__)
    count = threaded(Queues.__len__)
    opened = threaded(Queues.opened)
    damages = iterated(Queues.damages)
    drop = threaded(Queues.drop)
    contains = threaded(Queues.__contains__)
    close = threaded(Queues.close)
