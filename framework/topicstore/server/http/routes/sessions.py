"""``/sessions``, ``/groups`` and ``/lag``: the durable sessions of clients, and how far they are behind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import attrs
import msgspec
from litestar import delete, get, post
from litestar.exceptions import ClientException
from litestar.params import FromPath, FromQuery, QueryParameter

from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.pages import After, Limit, Page
from topicstore.sessions import GroupMember, SessionInfo, SessionNotFoundError, Sessions
from topicstore.storage.counting.lag import Lag

__all__ = ["ROUTES"]

_Connected = Annotated[bool | None, QueryParameter(description="Only those that are connected, or that are not.")]
_Search = Annotated[str | None, QueryParameter(description="Only those whose client ids have this text in them.")]
_Prefix = Annotated[str | None, QueryParameter(description="Only those whose client ids begin with this text.")]


class SubscriptionEntry(msgspec.Struct, kw_only=True):
    """A subscription of a session, with the options of MQTT 5, section 3.8.3.1."""

    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int
    lag: Lag | None
    """How far it is behind; null if that was not asked for."""


class ConnectionStatus(msgspec.Struct, kw_only=True):
    """What the connection of a session is at, as `SessionStatus` documents it."""

    receive_maximum: int
    """The window: how many messages may be in flight."""
    to_resend: int
    waits_for: str
    stuck_since: int | None
    missed: int
    refused: int


class SessionEntry(msgspec.Struct, kw_only=True):
    """A session, as `SessionInfo` documents it. Times are microseconds since the epoch."""

    client_id: str
    connected: bool
    created: int
    expiry_interval: float | None
    expires: int | None
    will_due: int | None
    subscriptions: list[SubscriptionEntry]
    in_flight: int
    awaiting_pubrel: int
    in_memory: bool
    lag: Lag | None
    """How far all its subscriptions are behind together; null if that was not asked for."""
    connection: ConnectionStatus | None = None
    """Of one session that is connected."""


class Kicked(msgspec.Struct):
    """A session whose connection was ended, if it had one."""

    client_id: str
    kicked: bool


class Expired(msgspec.Struct):
    """A session that was ended."""

    client_id: str
    expired: bool


class GroupEntry(msgspec.Struct, kw_only=True):
    """A shared subscription, as `GroupInfo` documents it."""

    name: str
    topic_filter: str
    members: tuple[GroupMember, ...]
    returned: int
    dropped: tuple[int, ...]
    lag: Lag | None
    """How far the group is behind; null if it has no member any more."""


@get("/sessions", guards=[needs("read")], tags=["sessions"], sync_to_thread=True)
def sessions(
    context: TheContext,
    after: After = None,
    limit: Limit = 100,
    prefix: _Prefix = None,
    search: _Search = None,
    connected: _Connected = None,
    lag: FromQuery[bool] = False,
    sort: FromQuery[Literal["client_id", "lag"]] = "client_id",
) -> Page[SessionEntry]:
    """Return a page of the sessions, sorted by client id; with `lag=true` how far each is behind.

    With `sort=lag` it is one page, of those that are behind: the one first whose next message is the oldest.
    """
    held = context.db.sessions
    chosen = [
        one
        for one in held.clients(connected=connected)
        if one.startswith(prefix or "") and (search is None or search in one)
    ]
    if sort == "lag":
        if after is not None:
            raise ClientException("those that are furthest behind are one page: leave out after, or raise limit")
        return Page(items=_entries(held, held.longest_behind(chosen, limit), lag=True))
    first = 0 if after is None else bisect_right(chosen, after)
    shown = chosen[first : first + limit]
    return Page(items=_entries(held, shown, lag=lag), next=shown[-1] if first + limit < len(chosen) else None)


@get("/sessions/{client_id:str}", guards=[needs("read")], tags=["sessions"], sync_to_thread=True)
def session(context: TheContext, client_id: FromPath[str]) -> SessionEntry:
    """Return a session: its subscriptions, how far each is behind, and what is in flight."""
    held = context.db.sessions
    entry = _entry(held[client_id], held.lag(client_id)[client_id])
    live = held.connected(client_id)
    if live is not None:
        status = attrs.asdict(live.status(), recurse=False)
        entry.connection = ConnectionStatus(**{name: status[name] for name in ConnectionStatus.__struct_fields__})
    return entry


@delete("/sessions/{client_id:str}", guards=[needs("write")], tags=["sessions"], status_code=200, sync_to_thread=True)
def expire(context: TheContext, client_id: FromPath[str]) -> Expired:
    """End a session for good, with its subscriptions and unacknowledged messages, and its connection (0x98)."""
    context.db.sessions.expire(client_id)
    return Expired(client_id, expired=True)


@post(
    "/sessions/{client_id:str}/kick", guards=[needs("write")], tags=["sessions"], status_code=200, sync_to_thread=True
)
def kick(context: TheContext, client_id: FromPath[str]) -> Kicked:
    """End the connection of a session's client, which is told 0x98 (administrative action).

    As after any lost connection the will is published, and the session stays for as long as its client asked for.
    """
    return Kicked(client_id, context.db.sessions.kick(client_id))


@get("/groups", guards=[needs("read")], tags=["sessions"], sync_to_thread=True)
def groups(context: TheContext) -> Page[GroupEntry]:
    """Return the shared subscriptions, sorted by filter: who shares each, and how far the group is behind."""
    held = context.db.sessions
    return Page(
        items=[
            GroupEntry(
                **attrs.asdict(one, recurse=False),
                lag=_lag_of_group(held, f"$share/{one.name}/{one.topic_filter}", [m.client_id for m in one.members]),
            )
            for one in held.groups
        ]
    )


@get("/lag", guards=[needs("read")], tags=["sessions"], opt={"way": "heavy"}, sync_to_thread=True)
def lag(context: TheContext, client_id: FromQuery[list[str] | None] = None) -> dict[str, dict[str, Lag]]:
    """Return, by client id and filter, how far sessions are behind; of all of them if none is named.

    Up to 10,000 waiting messages of a filter and shard are counted, if at most 65,536 of any topic follow there. Others
    are estimated: then `exact` is false.
    """
    return context.db.sessions.lag(*(client_id or ()))


def _entries(held: Sessions, clients: Sequence[str], *, lag: bool) -> list[SessionEntry]:
    """Return entries of those that haven't ended meanwhile."""
    lags = _lags(held, clients) if lag else {}
    found = []
    for client_id in clients:
        try:
            found.append(_entry(held[client_id], lags.get(client_id)))
        except SessionNotFoundError:
            continue
    return found


def _lags(held: Sessions, clients: Sequence[str]) -> Mapping[str, Mapping[str, Lag]]:
    while there := [client_id for client_id in clients if client_id in held]:
        try:
            return held.lag(*there)
        except SessionNotFoundError:  # one has ended since
            continue
    return {}


def _entry(info: SessionInfo, lags: Mapping[str, Lag] | None) -> SessionEntry:
    known: dict[str, Any] = attrs.asdict(info, recurse=False)
    known["subscriptions"] = [
        SubscriptionEntry(filter=text, lag=(lags or {}).get(text), **msgspec.structs.asdict(options))
        for text, options in info.subscriptions
    ]
    return SessionEntry(**known, lag=None if lags is None else sum(lags.values(), Lag.none()))


def _lag_of_group(held: Sessions, text: str, members: Sequence[str]) -> Lag | None:
    for client_id in members:
        found = _lags(held, [client_id]).get(client_id, {}).get(text)
        if found is not None:
            return found
    return None


ROUTES = [sessions, session, expire, kick, groups, lag]
