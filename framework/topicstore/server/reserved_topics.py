"""Topics to which no client publishes: they mean something to the server itself."""

from __future__ import annotations

from collections.abc import Iterable

from topicstore.contract.errors import InvalidMessageError

from .replay_topics import REPLAY, SHARE
from .sys_topics import SYS

__all__ = ["check_published", "may_be_published"]

_RESERVED = (SYS, SHARE, REPLAY)


def may_be_published(topic: str, levels: int) -> bool:
    """Return whether a valid topic may be one of a client's message or will; ``levels``: how many it may have."""
    return not topic.startswith(_RESERVED) and topic.count("/") < levels


def check_published(topics: Iterable[str]) -> None:
    """Raise `InvalidMessageError` for the first topic to which no client publishes."""
    for index, topic in enumerate(topics):
        if topic.startswith(_RESERVED):
            raise InvalidMessageError(f"{topic[:80]!r} begins as the server's own topics do", index)
