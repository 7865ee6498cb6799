"""`Face`: the base class of the asynchronous interface's objects, and the functions that make their methods.

Each method is one of the synchronous object, called in a thread: ``store = threaded(Database.store)``. So it has the
same parameters, with the same types, and the same documentation. A method that never waits is called in the event loop
(`direct`), so that it is done when the call returns, without the way to a thread and back.
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
    """The asynchronous interface of a synchronous object."""

    def __init__(self, threads: Threads, find: Callable[[], S], of: object) -> None:
        """``find`` returns the synchronous object; it is called in a thread, and may make it. ``of`` is its owner."""
        self._threads = threads
        self._find = find
        self._of = of

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._of!r}>"


class Collection(Face[S]):
    """The asynchronous face of a collection: iterated with ``async for``; ``len`` and ``in`` are awaited methods."""

    def __iter__(self) -> Never:
        """Raise TypeError: without this, Python would ask for items 0, 1, 2 and so on, for ever."""
        raise TypeError(f"{type(self).__name__} is iterated with async for")

    def __contains__(self, _: object) -> Never:
        """Raise TypeError."""
        raise TypeError(f"whether something is in {type(self).__name__} is asked with: await ….contains(…)")


def threaded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, R]]:
    """Return a method of a face that calls a method of its synchronous object in a thread and returns its result."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._threads.run(lambda: method(self._find(), *args, **kwargs))

    return call


def direct(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, R]]:
    """Return a method of a face that calls a method that never waits, in the event loop; awaited like the others."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._threads.check_loop()
        return method(self._find(), *args, **kwargs)

    return call


def iterated(
    method: Callable[Concatenate[S, P], Iterable[R]], *, most: int | None = None
) -> Callable[Concatenate[Face[S], P], Iteration[R]]:
    """Return a method of a face that iterates, in a thread, over the result of its synchronous object's method.

    most: how many items are taken out of the thread at a time; by default the method's ``batch_size``.
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
