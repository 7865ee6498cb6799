"""`SessionContext`: the parts that all sessions of one open database share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import attrs

from topicstore.contract.arguments import KEEP, Keep
from topicstore.contract.times import Time
from topicstore.pubsub.durable_filters import DurableFilters
from topicstore.pubsub.publish import Publisher
from topicstore.pubsub.retained_lookup import RetainedMessages
from topicstore.storage.counting.lag import Lag

from .commits import Commits
from .dispatcher import Dispatcher
from .live_session import LiveSession
from .locks import SessionLocks, SessionMutex
from .model import Ended
from .session_store import SessionState
from .shared.groups import Groups

__all__ = ["End", "SessionContext"]


class End(Protocol):
    """Ends the connection of a session."""

    def __call__(
        self,
        session: LiveSession,
        why: Ended,
        *,
        send_will: bool,
        expiry_interval: timedelta | float | Keep | None = KEEP,
    ) -> None:
        """Commit all changes of the session and the end of its connection, or raise."""


@attrs.frozen(kw_only=True)
class SessionContext:
    """The shared parts that each session is created with."""

    dispatcher: Dispatcher[LiveSession]
    mutex: SessionMutex
    locks: SessionLocks[LiveSession]
    states: SessionState
    filters: DurableFilters
    groups: Groups
    commits: Commits
    publisher: Publisher
    load_filters: Callable[[], None]
    """Loads `filters`, unless they are loaded. Takes all locks."""
    retained: RetainedMessages
    """The retained messages of all topics."""
    instant: Callable[[Time], int]
    """Returns a time as microseconds since the epoch. Raises `InvalidArgumentError`."""
    end: End
    lag: Callable[..., dict[str, dict[str, Lag]]]
    """Returns the lag by client id and filter; takes client ids as arguments. Takes the locks itself."""
