"""Calls of a function in a thread, for batches of questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Batches", "TooManyWaitingError"]

Q = TypeVar("Q")
A = TypeVar("A")


class TooManyWaitingError(Exception):
    """The questions exceed the number that may wait in a `Batches`; none of them was queued."""


class Batches(Generic[Q, A]):
    """Calls a function that answers many questions at once, in one separate thread.

    Questions that arrive during a call form the next batch, except cancelled ones. A batch has at most ``most``
    questions, and at most ``waiting`` questions wait.
    """

    def __init__(
        self, answer: Callable[[Sequence[Q]], Sequence[A]], name: str, *, most: int = 1_000, waiting: int = 20_000
    ) -> None:
        self._answer, self._most, self._waiting = answer, most, waiting
        self._thread = ThreadPoolExecutor(1, name)
        self._questions: list[tuple[Q, asyncio.Future[A]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, questions: Sequence[Q]) -> list[A]:
        """Return the answers, in the order of the questions.

        Raises what the function raises, for all questions of that call, and `TooManyWaitingError`.
        """
        if len(self._questions) + len(questions) > self._waiting:
            raise TooManyWaitingError(f"{len(self._questions):,} questions wait already")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[A]] = [loop.create_future() for _ in questions]
        self._questions += zip(questions, futures, strict=True)
        if self._task is None:
            self._task = loop.create_task(self._run())
        return await asyncio.gather(*futures)

    def _wanted(self) -> bool:
        """Drop cancelled questions; return whether others are left."""
        self._questions = [one for one in self._questions if not one[1].cancelled()]
        return bool(self._questions)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        taken: list[tuple[Q, asyncio.Future[A]]] = []
        try:
            while self._wanted():
                taken, self._questions = self._questions[: self._most], self._questions[self._most :]
                try:
                    answers = await loop.run_in_executor(self._thread, self._answer, [one for one, _ in taken])
                except Exception as error:  # noqa: BLE001 - it is raised in the callers
                    for _, future in taken:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), answer in zip(taken, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._task = None
            for _, future in taken + self._questions:
                future.cancel()  # no effect on answered questions
            self._questions = []

    def end(self) -> None:
        """Cancel waiting questions; the thread ends after its current call."""
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the thread has ended, after `end`. May be called in any thread."""
        self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Call `end`, then `join`."""
        self.end()
        self.join()
