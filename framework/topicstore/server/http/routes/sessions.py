"""``/sessions``, ``/groups`` and ``/lag``: durable sessions, shared subscriptions, and their lag."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import attrs
import msgspec
from litestar import Request, delete, get, post
from litestar.exceptions import ClientException, HTTPException
from litestar.params import PathParameter, QueryParameter

from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.guards import needs
from topicstore.server.http.parameters import SHARDS, After, Limit, Page
from topicstore.sessions import GroupMember, SessionInfo, SessionNotFoundError, Sessions
from topicstore.storage.counting.lag import Lag

__all__ = ["ROUTES"]

_ClientId = Annotated[str, PathParameter(description="The session's client id, percent-encoded.")]
_ClientIds = Annotated[
    list[str] | None, QueryParameter(description="Only these client ids; may be given several times.")
]
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
    """The subscription's lag; null if it was not requested."""


class ConnectionStatus(msgspec.Struct, kw_only=True):
    """The state of a session's connection, as documented by `SessionStatus`."""

    receive_maximum: int
    """Most messages in flight."""
    to_resend: int
    waits_for: str
    stuck_since: int | None
    missed: int
    refused: int
    address: str | None = None
    """The client's address and port; null for a session of the server's own process."""


class SessionEntry(msgspec.Struct, kw_only=True):
    """A session, as documented by `SessionInfo`. Times are microseconds since the epoch."""

    client_id: str
    connected: bool
    created: int
    expiry_interval: float | None
    expires: int | None
    will_due: int | None
    will_delay: float | None = None
    subscriptions: list[SubscriptionEntry]
    in_flight: int
    awaiting_pubrel: int
    in_memory: bool
    lag: Lag | None
    """The total lag of the session's subscriptions; null if it was not requested."""
    connection: ConnectionStatus | None = None
    """The connection's state; only when a single connected session is requested."""


class Kicked(msgspec.Struct):
    """The result of ending a session's connection."""

    client_id: str
    kicked: bool


class Expired(msgspec.Struct):
    """A session that was removed."""

    client_id: str
    expired: bool


class GroupEntry(msgspec.Struct, kw_only=True):
    """A shared subscription, as documented by `GroupInfo`."""

    name: str
    topic_filter: str
    members: tuple[GroupMember, ...]
    returned: int
    dropped: tuple[int, ...]
    lag: Lag | None
    """The group's lag; null if the group has no members, or in a cluster no site that owns their sessions answers."""


class SessionPage(Page[SessionEntry]):
    """A page of sessions."""

    missing: dict[int, str] = msgspec.field(default_factory=dict)
    """The shards of a cluster whose sessions are left out, and for each the reason why its owner has not answered."""


@get("/sessions", guards=[needs("read")], tags=["sessions"])
async def sessions(
    context: TheContext,
    request: Request[Any, Any, Any],
    after: After = None,
    limit: Limit = 100,
    prefix: _Prefix = None,
    search: _Search = None,
    connected: _Connected = None,
    lag: Annotated[bool, QueryParameter(description="Whether the lag of each session is found out.")] = False,
    sort: Annotated[
        Literal["client_id", "lag"], QueryParameter(description="By client id, or by lag, of which the longest first.")
    ] = "client_id",
) -> SessionPage:
    """Return a page of the sessions, sorted by client id; with `lag=true` including the lag of each.

    With `sort=lag` there is only one page, with the sessions that lag; the session with the oldest next message comes
    first. On a site of a cluster, each site lists the sessions of its own shards; `missing` has the shards whose
    owners don't answer.
    """
    if sort == "lag" and after is not None:
        raise ClientException("those that are furthest behind are one page: leave out after, or raise limit")
    db = context.db

    def own(shards: Collection[int]) -> SessionPage:
        held, whole = db.sessions, len(shards) == db.manifest.shards
        chosen = [
            one
            for one in held.clients(connected=connected)
            if one.startswith(prefix or "")
            and (search is None or search in one)
            and (whole or db.shard_of(one) in shards)
        ]
        if sort == "lag":
            return SessionPage(items=_entries(held, held.longest_behind(chosen, limit), lag=True))
        first = 0 if after is None else bisect_right(chosen, after)
        shown = chosen[first : first + limit]
        following = shown[-1] if first + limit < len(chosen) else None
        return SessionPage(items=_entries(held, shown, lag=lag), next=following)

    pages, missing = await context.gather(request, range(db.manifest.shards), own, SessionPage)
    for page in pages:
        missing |= page.missing
    # A shard that has moved meanwhile may be listed by both sites.
    items = [*{one.client_id: one for page in pages for one in page.items}.values()]
    if sort == "lag":
        if len(pages) > 1:
            items.sort(key=lambda one: 0.0 if one.lag is None else one.lag.seconds, reverse=True)
        return SessionPage(items=items[:limit], missing=missing)
    # A page may end with a session that has ended meanwhile, and is left out of its items.
    end = min((page.next for page in pages if page.next is not None), default=None)
    items = sorted((one for one in items if end is None or one.client_id <= end), key=lambda one: one.client_id)
    following = items[limit - 1].client_id if len(items) > limit else end
    return SessionPage(items=items[:limit], next=following, missing=missing)


@get(
    "/sessions/{client_id:str}", guards=[needs("read")], tags=["sessions"], opt={"of_owner": True}, sync_to_thread=True
)
def session(context: TheContext, client_id: _ClientId) -> SessionEntry:
    """Return a session: its subscriptions with their lag, and its messages in flight.

    On a site of a cluster, the owner of the session's shard answers.
    """
    _check_owned(context, client_id)
    held = context.db.sessions
    entry = _entry(held[client_id], held.lag(client_id)[client_id])
    live = held.connected(client_id)
    if live is not None:
        status = attrs.asdict(live.status(), recurse=False)
        entry.connection = ConnectionStatus(
            **{name: status[name] for name in ConnectionStatus.__struct_fields__ if name in status},
            address=context.mqtt.address_of(live),
        )
    return entry


@delete("/sessions/{client_id:str}", guards=[needs("write")], tags=["sessions"], status_code=200, sync_to_thread=True)
def expire(context: TheContext, client_id: _ClientId) -> Expired:
    """Permanently end a session with its subscriptions and unacknowledged messages, and its connection (0x98)."""
    _check_owned(context, client_id)
    context.db.sessions.expire(client_id)
    return Expired(client_id, expired=True)


@post(
    "/sessions/{client_id:str}/kick", guards=[needs("write")], tags=["sessions"], status_code=200, sync_to_thread=True
)
def kick(context: TheContext, client_id: _ClientId) -> Kicked:
    """End the connection of a session's client with reason code 0x98 (administrative action).

    As after any lost connection, the will is published, and the session lasts until its session expiry.
    """
    _check_owned(context, client_id)
    return Kicked(client_id, context.db.sessions.kick(client_id))


@get("/groups", guards=[needs("read")], tags=["sessions"])
async def groups(context: TheContext, request: Request[Any, Any, Any]) -> Page[GroupEntry]:
    """Return the shared subscriptions, sorted by filter, with the members and the lag of each group.

    On a site of a cluster, each site counts the lag of the groups with members in its own shards.
    """
    db = context.db

    def own(shards: Collection[int]) -> Page[GroupEntry]:
        held, found = db.sessions, []
        for one in held.groups:
            here = [member.client_id for member in one.members if db.shard_of(member.client_id) in shards]
            lag = _lag_of_group(held, f"$share/{one.name}/{one.topic_filter}", here)
            found.append(GroupEntry(**attrs.asdict(one, recurse=False), lag=lag))
        return Page(items=found)

    pages, _ = await context.gather(request, range(db.manifest.shards), own, Page[GroupEntry])
    entries: dict[tuple[str, str], GroupEntry] = {}
    for entry in (entry for page in pages for entry in page.items):
        known = entries.setdefault((entry.name, entry.topic_filter), entry)
        known.lag = entry.lag if known.lag is None else known.lag
    return Page(items=[entries[key] for key in sorted(entries)])


@get("/lag", guards=[needs("read")], tags=["sessions"], opt={"way": "heavy"})
async def lag(
    context: TheContext, request: Request[Any, Any, Any], client_id: _ClientIds = None
) -> dict[str, dict[str, Lag]]:
    """Return the lag of sessions by client id and filter; of all sessions if none is named.

    For each filter and shard, up to 10,000 waiting messages are counted, unless the shard has more than 65,536 later
    messages, of any topic. Larger numbers are estimated; then `exact` is false.

    On a site of a cluster, the owners of the sessions' shards answer. If one doesn't, the response is 503.
    """
    db = context.db

    def own(shards: Collection[int]) -> dict[str, dict[str, Lag]]:
        held = db.sessions
        wanted = held.clients() if client_id is None else client_id
        there = [one for one in wanted if db.shard_of(one) in shards]
        return {name: dict(found) for name, found in _lags(held, there).items()}

    asked = range(db.manifest.shards) if client_id is None else {db.shard_of(one) for one in client_id}
    found, missing = await context.gather(request, asked, own, dict[str, dict[str, Lag]])
    for shard, why in missing.items():
        text = f"the sessions of shard {shard} can't be read: {why}"
        raise HTTPException(status_code=503, detail=text, headers={"Retry-After": "1"})
    lags = dict(sorted(pair for some in found for pair in some.items()))
    for one in client_id or ():
        if one not in lags and SHARDS not in request.headers:  # a site that has forwarded the request checks it itself
            raise SessionNotFoundError(f"there is no session of client {one!r}")
    return lags


def _check_owned(context: Context, client_id: str) -> None:
    """Raise `ShardElsewhereError` if another site of a cluster owns the shard of a client id.

    This site's copy of the shard may not have the session yet.
    """
    context.db.storage.shards[context.db.shard_of(client_id)].writer.check_owned()


def _entries(held: Sessions, clients: Sequence[str], *, lag: bool) -> list[SessionEntry]:
    """Return the entries of sessions, except those that have ended meanwhile."""
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
        except SessionNotFoundError:  # a session has ended meanwhile
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
