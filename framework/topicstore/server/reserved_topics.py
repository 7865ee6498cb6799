"""Topics reserved for the server, to which clients can't publish."""

from __future__ import annotations

from collections.abc import Iterable

from topicstore.contract.errors import InvalidMessageError

from .replay_topics import REPLAY, SHARE
from .sys_topics import SYS

__all__ = ["check_published", "may_be_published"]

_RESERVED = (SYS, SHARE, REPLAY)


def may_be_published(topic: str, levels: int) -> bool:
    """Return whether a client may publish to a valid topic; ``levels`` is the most levels of a topic."""
    return not topic.startswith(_RESERVED) and topic.count("/") < levels


def check_published(topics: Iterable[str]) -> None:
    """Raise `InvalidMessageError` for the first topic that is reserved for the server."""
    for index, topic in enumerate(topics):
        if topic.startswith(_RESERVED):
            raise InvalidMessageError(f"{topic[:80]!r} begins as the server's own topics do", index)
