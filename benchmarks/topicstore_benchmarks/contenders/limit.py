"""The interface of limits: the speed of an engine or a file without the work that makes it a message store."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from topicstore import Message

from .contender import Contender

__all__ = ["Limit"]


class Limit(Contender):
    """A contender that is stored and read as a whole, in a form that is prepared before the clock starts.

    Only ``store`` and ``replay all`` are measured. There are no filters, no starts and no order but that of
    storing; what is read stays in the engine's own form, so no `Message` objects are made. Those of `replay` are
    for checking that everything was stored, and aren't timed.
    """

    abilities: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def encode(self, batch: list[Message]) -> Any:
        """Return what `store` takes in place of a batch. Not timed."""

    def finish(self) -> None:
        """Write messages that are held back. Timed, once, after the last batch."""

    @abstractmethod
    def scan(self) -> int:
        """Read everything; return the number of messages. This call is timed."""
