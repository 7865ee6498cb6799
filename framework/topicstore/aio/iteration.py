"""`Iteration`: an asynchronous iterator over items that a thread reads in portions.

One portion is read ahead while the previous one is consumed. The first portion has one item, so that it arrives soon;
the following portions grow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from types import TracebackType
from typing import Generic, Self, TypeVar

from topicstore.contract.errors import DatabaseClosedError

from .threads import Threads

__all__ = ["Iteration"]

T = TypeVar("T")

_MOST = 1_024
"""The largest number of items in a portion."""
_GROWTH = 4
"""The factor by which portions grow."""
_Portion = tuple[list[T], Exception | None]
"""Items, and the error that was raised after them."""


class Iteration(AsyncIterator[T], Generic[T]):
    """An asynchronous iterator over items that are read in a thread.

    Reading begins with the first ``anext``, which also raises errors in the arguments. An iterator that is left early
    stops reading when it is closed (by `aclose`, `contextlib.aclosing` or ``async with``) or garbage-collected. A
    portion that is then being read is read to its end and discarded.

    A cancelled ``anext``, as by a timeout, loses nothing: the next ``anext`` returns the same item.
    """

    def __init__(self, threads: Threads, what: str, begin: Callable[[], Iterable[T]], most: object = None) -> None:
        """Iterate over the result of ``begin``, which is called in a thread.

        ``what`` is shown by ``repr``. ``most`` limits the items of a portion if it is an int from 1 to 1,023.
        """
        self._threads = threads
        self._what = what
        self._begin = begin
        self._most = most if isinstance(most, int) and 0 < most < _MOST else _MOST
        self._count = 1
        """The number of items of the next portion. Like ``_source``, used only by the thread that is reading."""
        self._source: Iterator[T] | None = None
        self._portion: Iterator[T] = iter(())
        """The rest of the current portion."""
        self._ahead: Future[_Portion[T]] | None = None
        """The next portion, which is being read."""
        self._failure: Exception | None = None
        """The error to raise after the current portion."""
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while True:
            for one in self._portion:
                return one
            await self._next_portion()

    async def _next_portion(self) -> None:
        if self._failure is not None:
            failure = self._failure
            self._leave()
            raise failure
        if self._over:
            raise StopAsyncIteration
        ahead = self._ahead = self._ahead or self._threads.submit(self._read)
        await self._threads.finished(ahead)
        if self._ahead is not ahead:  # another task has taken the portion, or the iteration was closed
            return
        self._ahead = None
        items, self._failure = ahead.result()
        self._portion = iter(items)
        if not items and self._failure is None:
            self._leave()
        elif self._failure is None:
            self._read_ahead()

    def _read_ahead(self) -> None:
        try:
            self._ahead = self._threads.submit(self._read)
        except DatabaseClosedError as closed:
            self._failure = closed

    def _read(self) -> _Portion[T]:
        """Return the next portion. Called in a thread."""
        items: list[T] = []
        try:
            source = self._source
            if source is None and not self._over:
                source = self._source = iter(self._begin())
            items.extend(islice(source or (), self._count))
        except Exception as error:  # noqa: BLE001 - raised after the items that were read before it
            return items, error
        self._count = min(self._count * _GROWTH, self._most)
        return items, None

    def _leave(self) -> None:
        self._over = True
        if self._ahead is not None:
            self._ahead.cancel()
        self._portion = iter(())
        self._ahead = self._source = self._failure = None

    async def aclose(self) -> None:
        """Stop reading and end the iteration. May be called twice."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __repr__(self) -> str:
        return f"<Iteration of {self._what}{', over' * self._over}>"
