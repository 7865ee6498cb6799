"""Limits on the deliveries of a session: the messages that its client may be sent, and the bytes in one delivery.

The server that holds the connection sets these limits. It may refuse messages (`Allow`), limit the bytes of a delivery,
and pause a session while its socket is full (`topicstore.sessions.Session.pause`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from topicstore.contract.arguments import check_within
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.model import Message

from .model import Publish, PubRel
from .portions import Portion

__all__ = ["ASKED", "Allow", "Permit", "check_max_bytes", "fitting", "likely", "only"]

Allow = Callable[[Sequence[Message]], Sequence[bool | None]]
"""Returns, for each message, whether it may be sent to the client; None: not known yet, so that the session is held
back until `topicstore.sessions.Session.ask_again`."""

ASKED = 128
"""Number of messages read at a time after an `Allow` has returned None once, which bounds repeated questions."""

_FIRST = 16
"""Number of messages in the first read with a limit of bytes, before the average payload size is known."""


def check_max_bytes(max_bytes: int | None) -> None:
    """Raise `InvalidArgumentError` unless ``max_bytes`` is None or a positive 64-bit integer."""
    if max_bytes is not None:
        check_within("max_bytes", max_bytes, 1, (1 << 63) - 1)


class Permit:
    """The `Allow` of one session: applies its answers, and records whether the session waits for an answer."""

    __slots__ = ("_client_id", "_clock", "allow", "asks", "refused", "undecided_since")

    def __init__(self, allow: Allow | None, client_id: str, clock: Callable[[], int]) -> None:
        self._client_id, self._clock = client_id, clock
        self.allow = allow
        """Returns which messages may be sent to the client; None: all."""
        self.asks = False
        """Whether `allow` has ever answered None."""
        self.refused = 0
        """The number of messages that `allow` refused."""
        self.undecided_since: int | None = None
        """The time since which the session waits for answers, or None. Cleared by any thread, without the lock."""

    def answers(self, messages: Sequence[Message]) -> list[bool] | None:
        """Return for each message whether it may be sent; None, and hold the session back, if an answer is missing.

        Raises `InvalidArgumentError` if `allow` raises, or returns a wrong number of answers.
        """
        answers = self._ask(messages)
        if None in answers:
            self.asks = True
            self.undecided_since = self._clock()  # before the second question, as `ask_again` may have been called
            answers = self._ask(messages)
            if None in answers:
                return None
            self.undecided_since = None
        return [answer is True for answer in answers]

    def remove_refused(self, found: dict[int, Message | None]) -> bool:
        """Replace the messages that may not be sent by None; return False, unchanged, if an answer is missing."""
        there = {row: message for row, message in found.items() if message is not None}
        answers = self.answers(list(there.values()))
        if answers is None:
            return False
        found.update((row, None) for row, answer in zip(there, answers, strict=True) if not answer)
        self.refused += answers.count(False)
        return True

    def _ask(self, messages: Sequence[Message]) -> list[bool | None]:
        if self.allow is None:
            return [True] * len(messages)
        try:
            answers = [answer if answer is None else bool(answer) for answer in self.allow(messages)]
        except Exception as failure:
            raise InvalidArgumentError(f"allow of session {self._client_id!r} raised {failure!r}") from failure
        if len(answers) != len(messages):
            raise InvalidArgumentError(
                f"allow of session {self._client_id!r} gave {len(answers)} answers for {len(messages)} messages"
            )
        return answers


def only(portion: Portion, answers: Sequence[bool]) -> Portion:
    """Return a portion with only the messages that may be sent."""
    if all(answers):
        return portion
    rows = [row for row, answer in enumerate(answers) if answer]

    def at(values: Any) -> Any:
        return [values[row] for row in rows] if isinstance(values, list) else values

    return attrs.evolve(
        portion,
        messages=[portion.messages[row] for row in rows],
        qos=at(portion.qos),
        positions=None if portion.positions is None else portion.positions[np.array(rows, np.intp)],
        packed=None,
        retain=at(portion.retain),
        expiry=at(portion.expiry),
    )


def likely(size: float | None, max_bytes: int) -> int:
    """Return the number of messages of about ``max_bytes`` together; ``size``: the average so far, None if unknown."""
    return _FIRST if size is None else max(int(max_bytes / max(size, 1.0)), 1)


def fitting(packets: Sequence[Publish | PubRel], max_bytes: int, *, least: int) -> int:
    """Return the number of first packets whose payloads fit into ``max_bytes``, but at least ``least``."""
    left = max_bytes
    for count, packet in enumerate(packets):
        if isinstance(packet, Publish):
            left -= len(packet.message.payload)
            if left < 0:
                return max(count, least)
    return len(packets)
