"""`SharedSubscriptions`: the public interface to the shared subscriptions of a database."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from topicstore.contract.arguments import check_length
from topicstore.sessions.entrance import Around
from topicstore.sessions.model import GroupInfo

from .groups import Groups

__all__ = ["SharedSubscriptions"]


class SharedSubscriptions:
    """The shared subscriptions of one open database: the attribute `Sessions.groups`. Iterated in order of filters.

    All methods are thread-safe.
    """

    def __init__(self, groups: Groups, entered: Around) -> None:
        self._groups = groups
        self._entered = entered
        """Calls a function under the sessions' lock; raises if the database is closed."""

    def __iter__(self) -> Iterator[GroupInfo]:
        """Iterate over a snapshot of all shared subscriptions, with their members, connected or not."""
        return iter(self._entered(self._groups.infos))

    def __len__(self) -> int:
        """Return the number of shared subscriptions."""
        return len(self._entered(self._groups.infos))

    def __contains__(self, topic_filter: str) -> bool:
        """Return whether any session has this subscription, ``$share/<name>/<filter>``."""
        return self._entered(lambda: self._groups.find(topic_filter)) is not None

    def __repr__(self) -> str:
        return f"<SharedSubscriptions: slow after {self.slow_after} s, handed over after {self.handover_after} s>"

    @property
    def slow_after(self) -> float:
        """Seconds for which a member's window may be full before its share goes to other members; may be set."""
        return self._groups.slow_after

    @slow_after.setter
    def slow_after(self, length: timedelta | float) -> None:
        self._groups.slow_after = check_length("slow_after", length)

    @property
    def handover_after(self) -> float | None:
        """Seconds after a disconnect before other members get a member's messages in flight at QoS 1; None: never.

        May be set.
        """
        return self._groups.handover_after

    @handover_after.setter
    def handover_after(self, length: timedelta | float | None) -> None:
        self._groups.handover_after = None if length is None else check_length("handover_after", length)
