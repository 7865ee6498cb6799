"""`aopen`: opening a database for asyncio."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, ParamSpec

import topicstore.opening
from topicstore.database import Database
from topicstore.releasing import Taken

from .database import AsyncDatabase
from .threads import Threads

__all__ = ["Opening", "aopen"]

P = ParamSpec("P")


class Opening:
    """A database that is to be opened: ``db = await ts.aopen(path)``, or ``async with ts.aopen(path) as db``.

    If it is cancelled while it is being opened, it is closed as soon as it is open.
    """

    def __init__(self, open_: Callable[[], Database]) -> None:
        self._open = open_
        self._db: AsyncDatabase | None = None

    async def _opened(self) -> AsyncDatabase:
        threads = Threads()
        try:
            return await threads.make(lambda: _made(threads, self._open), lambda db: db.synchronous.close())
        except BaseException:
            threads.leave()
            raise

    def __await__(self) -> Generator[Any, None, AsyncDatabase]:
        return self._opened().__await__()

    async def __aenter__(self) -> AsyncDatabase:
        self._db = await self._opened()
        return self._db

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._db is not None:
            await self._db.close()

    def __repr__(self) -> str:
        return f"<Opening of a database: await it, or enter it with async with{', entered' * (self._db is not None)}>"


def _made(threads: Threads, open_: Callable[[], Database]) -> AsyncDatabase:
    database = open_()
    with Taken() as taken:
        taken.add(database.close)
        return AsyncDatabase(threads, database)


def _for_asyncio(open_: Callable[P, Database]) -> Callable[P, Opening]:
    """Return a function with the same parameters that opens a database for asyncio."""

    def aopen(*args: P.args, **kwargs: P.kwargs) -> Opening:
        return Opening(functools.partial(open_, *args, **kwargs))

    functools.update_wrapper(aopen, open_, ("__doc__",))
    return aopen


aopen = _for_asyncio(topicstore.opening.open)
