"""The limit of a client's publish rate."""

from __future__ import annotations

__all__ = ["Rate"]


class Rate:
    """A rate limiter for the publishes of one client, in messages and bytes a second; None: no limit."""

    __slots__ = ("_begun", "_bytes", "_messages", "_most_bytes", "_most_messages")

    def __init__(self, most_messages: int | None, most_bytes: int | None) -> None:
        self._most_messages, self._most_bytes = most_messages, most_bytes
        self._begun = float("-inf")
        self._messages = self._bytes = 0

    def take(self, messages: int, size: int, now: float) -> float:
        """Count messages that came at ``now``; return the seconds for which reading must pause, 0 for none.

        A single batch may exceed the rate; the excess is subtracted from the following seconds.
        """
        passed = now - self._begun
        if passed >= 1.0:
            seconds = min(int(passed), 1_000_000) if passed < float("inf") else 1_000_000
            self._messages = max(self._messages - seconds * (self._most_messages or 0), 0)
            self._bytes = max(self._bytes - seconds * (self._most_bytes or 0), 0)
            self._begun = now
            passed = 0.0
        self._messages += messages
        self._bytes += size
        over = max(
            _over(self._messages, self._most_messages),
            _over(self._bytes, self._most_bytes),
        )
        return over - passed if over else 0.0


def _over(count: int, most: int | None) -> int:
    """Return the number of seconds after which the count is within the rate again."""
    return 0 if most is None or count <= most else -(-(count - most) // most)
