"""`RemoteSessions`: durable sessions of a database that a server has open."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from topicstore.sessions import GroupInfo, SessionInfo, SubscribeOptions
from topicstore.storage.counting.lag import Lag

from .connection import Connection
from .paths import part

__all__ = ["RemoteSessions"]


class _Subscription(msgspec.Struct):
    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int

    def pair(self) -> tuple[str, SubscribeOptions]:
        options = msgspec.structs.asdict(self)
        return options.pop("filter"), SubscribeOptions(**options)


class _Session(msgspec.Struct):
    client_id: str
    connected: bool
    created: int
    expiry_interval: float | None
    expires: int | None
    will_due: int | None
    subscriptions: list[_Subscription]
    in_flight: int
    awaiting_pubrel: int
    in_memory: bool

    def info(self) -> SessionInfo:
        known = msgspec.structs.asdict(self)
        known["subscriptions"] = tuple(one.pair() for one in self.subscriptions)
        return SessionInfo(**known)


class _Kicked(msgspec.Struct):
    kicked: bool


class RemoteSessions:
    """The remote form of `topicstore.Database.sessions`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __iter__(self) -> Iterator[SessionInfo]:
        """Iterate over all sessions, sorted by client id."""
        return (one.info() for one in self._connection.pages("/sessions", _Session))

    def __getitem__(self, client_id: str) -> SessionInfo:
        """Return a session. Raises `SessionNotFoundError`."""
        return self._connection.get(f"/sessions/{part(client_id)}", _Session).info()

    @property
    def groups(self) -> Iterator[GroupInfo]:
        """The shared subscriptions, sorted by filter."""
        return iter(self._connection.items("/groups", GroupInfo))

    def lag(self, *client_ids: str) -> dict[str, dict[str, Lag]]:
        """Return the lag of sessions (by default all) behind the stored messages, by client id and filter."""
        return self._connection.get("/lag", dict[str, dict[str, Lag]], client_id=list(client_ids) or None)

    def kick(self, client_id: str) -> bool:
        """End the connection of a session; return whether there was one."""
        return self._connection.change("POST", f"/sessions/{part(client_id)}/kick", _Kicked).kicked

    def expire(self, client_id: str) -> None:
        """End a client's session for good, and its connection if there is one. Raises `SessionNotFoundError`."""
        self._connection.change("DELETE", f"/sessions/{part(client_id)}")
