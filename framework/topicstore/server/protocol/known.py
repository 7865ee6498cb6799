"""A small memory of what was worked out before, because topics and the properties of messages come again and again."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Known"]

K = TypeVar("K")
V = TypeVar("V")


class Known(dict[K, V]):
    """A dictionary that is emptied when it has ``entries`` entries, so that it stays small whatever clients send.

    Keys longer than ``longest`` are not remembered; they are bytes or text.
    """

    def __init__(self, entries: int, longest: int) -> None:
        super().__init__()
        self._entries = entries
        self._longest = longest

    def remember(self, key: K, value: V, length: int) -> V:
        """Remember and return a value; ``length`` is that of the key."""
        if length <= self._longest:
            if len(self) >= self._entries:
                self.clear()
            self[key] = value
        return value
