"""`SessionContext`: what all sessions of one open database share, and each works with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from topicstore.contract.model import Message

from .commits import Commits
from .database_parts import Publish
from .dispatch import Dispatcher
from .durable_filters import DurableFilters
from .live_session import LiveSession
from .model import KEEP, Ended, Keep
from .session_state import SessionState
from .shared.groups import Groups

__all__ = ["End", "SessionContext"]


class End(Protocol):
    """Ends the connection of a session."""

    def __call__(
        self, session: LiveSession, why: Ended, *, send_will: bool, expiry_interval: float | Keep | None = KEEP
    ) -> None:
        """Commit everything of the session, and the end of its connection."""


@attrs.frozen(kw_only=True)
class SessionContext:
    """The parts that a session is made with."""

    dispatcher: Dispatcher[LiveSession]
    states: SessionState
    filters: DurableFilters
    groups: Groups
    commits: Commits
    publish: Publish
    retained: Callable[[str], list[Message]]
    """Returns the retained messages that match a filter."""
    end: End
