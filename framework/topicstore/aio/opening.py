"""`aopen`: opening a database for asyncio.

The modules of a database are imported in the thread that opens it. The import takes a second, and would otherwise block
the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec

from topicstore.runtime.closing import Closer

from .threads import Threads

if TYPE_CHECKING:
    import topicstore.opening
    from topicstore.database import Database

    from .database import AsyncDatabase

__all__ = ["Opening", "aopen"]

P = ParamSpec("P")


class Opening:
    """A database that is to be opened: ``db = await ts.aopen(path)``, or ``async with ts.aopen(path) as db``.

    If the task is cancelled while the database is being opened, the database is closed as soon as it is open.
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
    from .database import AsyncDatabase

    with Closer() as closer:
        closer.add(database.close)
        return AsyncDatabase(threads, database)


class _Aopen:
    """The function `aopen`, with the parameters and the documentation of `topicstore.open`."""

    @property
    def __wrapped__(self) -> Callable[..., Database]:
        import topicstore.opening

        return topicstore.opening.open

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Opening:
        return Opening(lambda: self.__wrapped__(*args, **kwargs))

    def __repr__(self) -> str:
        return "<function topicstore.aopen>"


if TYPE_CHECKING:

    def _for_asyncio(open_: Callable[P, Database]) -> Callable[P, Opening]: ...

    aopen = _for_asyncio(topicstore.opening.open)
else:
    aopen = _Aopen()
