"""`AsyncWriter`: a writer that combines many small puts into few large stores, in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message, MessageId
from topicstore.storage.buffered_writer import Writer

from .beginning import Beginning
from .threads import Threads

__all__ = ["AsyncWriter"]


class AsyncWriter(Beginning[Writer]):
    """A buffered writer, which collects the messages of many tasks and stores them in batches; see `Writer`.

    Made by `AsyncDatabase.writer`; enter it with ``async with``, or await and close it. Closing the database also
    closes the writer.
    """

    def __init__(self, threads: Threads, make: Callable[[], Writer]) -> None:
        super().__init__(threads, make, Writer.close, lambda: DatabaseClosedError("the writer is closed"))

    async def put(self, message: Message) -> MessageId:
        """Buffer a message, wait until it is stored, and return its id. Raises the error of storing.

        The message is then as durable as the database's ``durability`` says. Messages are stored in the order of the
        calls, as soon as there are ``max_items``, or after ``flush_interval`` seconds. If the task is cancelled, the
        message may be stored or not.
        """
        future = (await self._get()).put_nowait(message)
        try:
            await self._threads.finished(future)
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future.result()

    async def flush(self) -> None:
        """Store the buffered messages."""
        await self._threads.run((await self._get()).flush)

    async def close(self) -> None:
        """Store the buffered messages, and refuse further ones. May be called twice."""
        await super().close()

    def __repr__(self) -> str:
        writer = self._made
        return "<AsyncWriter, not begun>" if writer is None else f"<Async{repr(writer).removeprefix('<')}"
