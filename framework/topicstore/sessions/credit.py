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

__all__ = ["Allow", "allowed", "check_max_bytes", "fitting", "likely", "only_allowed"]

Allow = Callable[[Sequence[Message]], Sequence[bool]]
"""Says for each message whether a client may be sent it."""

_FIRST = 16
"""Number of messages that are read first where bytes are limited, and nothing is known of their size yet."""


def check_max_bytes(max_bytes: int | None) -> None:
    """Raise `InvalidArgumentError` if this is no limit of bytes."""
    if max_bytes is not None:
        check_within("max_bytes", max_bytes, 1, (1 << 63) - 1)


def allowed(allow: Allow, messages: Sequence[Message], client_id: str) -> list[bool]:
    """Return for each message whether it may be sent. Raises `InvalidArgumentError` if ``allow`` doesn't say."""
    try:
        answers = [bool(answer) for answer in allow(messages)]
    except Exception as failure:
        raise InvalidArgumentError(f"allow of session {client_id!r} raised {failure!r}") from failure
    if len(answers) != len(messages):
        raise InvalidArgumentError(
            f"allow of session {client_id!r} gave {len(answers)} answers for {len(messages)} messages"
        )
    return answers


def only_allowed(allow: Allow, portion: Portion, client_id: str) -> Portion:
    """Return a portion with those messages only that may be sent."""
    answers = allowed(allow, portion.messages, client_id)
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
