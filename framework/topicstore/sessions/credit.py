"""How much a client is given: which messages, and how many bytes of them at a time.

The program that holds the connection knows what the client can take. It may refuse messages (`Allow`), limit the bytes
of a delivery, and hold a session back while its socket is full (`topicstore.sessions.Session.pause`).
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
"""Says for each message whether a client may be sent it; None: that is not known yet, and the session is held back
until `topicstore.sessions.Session.ask_again`."""

ASKED = 128
"""Number of messages that are read at a time once an `Allow` has not known an answer: so many are asked about again."""

_FIRST = 16
"""Number of messages that are read first where bytes are limited, and nothing is known of their size yet."""


def check_max_bytes(max_bytes: int | None) -> None:
    """Raise `InvalidArgumentError` if this is no limit of bytes."""
    if max_bytes is not None:
        check_within("max_bytes", max_bytes, 1, (1 << 63) - 1)


class Permit:
    """Which messages the client of one session may be sent, and whether the session waits for an answer to that."""

    __slots__ = ("_client_id", "_clock", "allow", "asks", "refused", "undecided_since")

    def __init__(self, allow: Allow | None, client_id: str, clock: Callable[[], int]) -> None:
        self._client_id, self._clock = client_id, clock
        self.allow = allow
        """Says which messages the client may be sent; None: all."""
        self.asks = False
        """Whether `allow` has ever not known an answer."""
        self.refused = 0
        """How many messages were left out because of `allow`."""
        self.undecided_since: int | None = None
        """Since when the session waits for answers; None: it doesn't. Cleared in any thread, without the lock."""

    def answers(self, messages: Sequence[Message]) -> list[bool] | None:
        """Return for each message whether it may be sent; None, and let the session wait, if that is not known yet.

        Raises `InvalidArgumentError` if `allow` doesn't say.
        """
        answers = self._ask(messages)
        if None in answers:
            self.asks = True
            self.undecided_since = self._clock()  # before it is asked again: an answer may have come in between
            answers = self._ask(messages)
            if None in answers:
                return None
            self.undecided_since = None
        return [answer is True for answer in answers]

    def remove_refused(self, found: dict[int, Message | None]) -> bool:
        """Put None in place of the messages that may not be sent; return False, and change none, as `answers` waits."""
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
    """Return a portion with those messages only that may be sent."""
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
    """Return how many messages have about so many bytes, by the size of earlier ones; None: there were none."""
    return _FIRST if size is None else max(int(max_bytes / max(size, 1.0)), 1)


def fitting(packets: Sequence[Publish | PubRel], max_bytes: int, *, least: int) -> int:
    """Return how many packets, but not fewer than ``least``, have payloads of at most so many bytes together."""
    left = max_bytes
    for count, packet in enumerate(packets):
        if isinstance(packet, Publish):
            left -= len(packet.message.payload)
            if left < 0:
                return max(count, least)
    return len(packets)
