"""`RemoteRetention`: the limits of a database that a server has open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from topicstore.lifecycle.retention import RetentionReport
from topicstore.lifecycle.retention_outlook import Departure
from topicstore.lifecycle.retention_policy import RetentionSettings

from .connection import Connection

__all__ = ["RemoteRetention"]


class _Outlook(msgspec.Struct):
    outlook: list[Departure]


class RemoteRetention:
    """The remote form of `topicstore.Database.retention`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def settings(self) -> RetentionSettings:
        """The current limits."""
        return self._connection.get("/retention", RetentionSettings)

    def set(self, **changed: Any) -> RetentionSettings:
        """Change limits; return all of them."""
        return self._connection.change("PUT", "/retention", RetentionSettings, json=changed)

    def outlook(self, *, limits: Mapping[str, Any] | None = None, count: bool = False) -> list[Departure]:
        """Return the future removals, with times and reasons; with ``count``, also how many messages filters remove."""
        if limits or count:
            return self._connection.change("POST", "/retention/outlook", list[Departure], json=dict(limits or {}))
        return self._connection.get("/retention", _Outlook).outlook

    def run(self) -> RetentionReport:
        """Remove the messages that exceed the limits now."""
        return self._connection.change("POST", "/retention/run", RetentionReport)
