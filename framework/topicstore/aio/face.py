"""`Face`: the base class of the asynchronous wrappers, and the functions that make their methods.

Each method calls the method of the synchronous object in a thread: ``store = threaded(Database.store)``. So it has the
same parameters, types and documentation. A method that never blocks is called directly in the event loop (`direct`),
which saves the switch to a thread and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Concatenate, Generic, Never, ParamSpec, TypeVar

from .iteration import Iteration
from .threads import Threads

__all__ = ["Collection", "Face", "direct", "iterated", "threaded"]

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


class Face(Generic[S]):
    """An asynchronous wrapper of a synchronous object."""

    def __init__(self, threads: Threads, find: Callable[[], S], of: object) -> None:
        """Wrap the object that ``find`` returns; ``of`` is the object's owner, shown by ``repr``.

        Methods call ``find`` in a thread, because it may create the object.
        """
        self._threads = threads
        self._find = find
        self._of = of

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._of!r}>"


class Collection(Face[S]):
    """An asynchronous wrapper of a collection, iterated with ``async for``.

    The awaited methods ``count`` and ``contains`` replace ``len`` and ``in``.
    """

    def __iter__(self) -> Never:
        """Raise TypeError. Without this method, ``for`` would call ``__getitem__`` with 0, 1, 2 and so on, for ever."""
        raise TypeError(f"{type(self).__name__} is iterated with async for")

    def __contains__(self, _: object) -> Never:
        """Raise TypeError: ``await ….contains(…)`` is the membership test."""
        raise TypeError(f"whether something is in {type(self).__name__} is asked with: await ….contains(…)")


def threaded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, R]]:
    """Return an async method of a wrapper that calls ``method`` of the synchronous object in a thread."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._threads.run(lambda: method(self._find(), *args, **kwargs))

    return call


def direct(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, R]]:
    """Return an async method of a wrapper that calls ``method``, which never blocks, in the event loop's thread."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._threads.check_loop()
        return method(self._find(), *args, **kwargs)

    return call


def iterated(
    method: Callable[Concatenate[S, P], Iterable[R]], *, most: int | None = None
) -> Callable[Concatenate[Face[S], P], Iteration[R]]:
    """Return a method of a wrapper that returns an async iterator over the result of ``method``, read in a thread.

    most: the largest number of items that the thread reads at a time; by default the argument ``batch_size``.
    """

    @functools.wraps(method)
    def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> Iteration[R]:
        return Iteration(
            self._threads,
            method.__name__,
            lambda: method(self._find(), *args, **kwargs),
            kwargs.get("batch_size") if most is None else most,
        )

    return call
