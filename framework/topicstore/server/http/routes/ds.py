"""``/ds``: sites, storages and replicas, in the format of EMQX's durable storage API.

``POST /shards/{shard}/ask`` answers requests of other sites of the cluster about a shard that they don't keep.
``GET /shards/moves`` reports to them which of these shards have new messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, delete, get, post, put
from litestar.exceptions import ClientException, PermissionDeniedException
from litestar.params import JSONBody, PathParameter, QueryParameter

from topicstore.pubsub.notifier import Notifier, TaskWaiter
from topicstore.server.http.context import Context, TheContext
from topicstore.server.http.guards import is_site, needs
from topicstore.server.http.streaming import Streamed
from topicstore.server.sites import SiteInfo, StorageReplicas

__all__ = ["NOTHING", "RECORDS", "ROUTES", "SIGN_OF_LIFE"]

SIGN_OF_LIFE = 5.0
"""Seconds after which a site that reports new messages reports `NOTHING`, if nothing else."""
NOTHING = b"\xff" * 4
"""A report that no shard has new messages; other reports are the number of a shard, big-endian."""
RECORDS = 1 << 31
"""The bit of a report by which not messages of the shard are new, but records of shared subscriptions have changed."""

_Site = Annotated[str, PathParameter(description="The id of a site.")]
_Storage = Annotated[str, PathParameter(description="The name of a storage, such as `messages`.")]

_TAGS = ["Durable storage"]


@get("/ds/sites", guards=[needs("read")], tags=_TAGS, sync_to_thread=True)
def sites(context: TheContext) -> list[str]:
    """Return the ids of the known sites."""
    return context.sites.sites()


@get("/ds/sites/{site:str}", guards=[needs("read")], tags=_TAGS, sync_to_thread=True)
def site(context: TheContext, site: _Site) -> SiteInfo:
    """Return a site: the name of its node, whether it is up, its shards, and its remaining back-off in seconds."""
    return context.sites.site(site)


@put("/ds/sites/{site:str}/forget", guards=[needs("admin")], tags=_TAGS, status_code=204, sync_to_thread=True)
def forget(context: TheContext, site: _Site) -> None:
    """Remove a site that is permanently lost."""
    context.sites.forget(site)


@get("/ds/storages", guards=[needs("read")], tags=_TAGS, sync_to_thread=False)
def storages(context: TheContext) -> list[str]:
    """Return the names of the durable storages."""
    return context.sites.storages()


@get("/ds/storages/{ds:str}", guards=[needs("read")], tags=_TAGS, sync_to_thread=True)
def storage(context: TheContext, ds: _Storage) -> StorageReplicas:
    """Return a storage: its shards, and the replicas of each."""
    return context.sites.storage(ds)


@get("/ds/storages/{ds:str}/replicas", guards=[needs("read")], tags=_TAGS, sync_to_thread=True)
def replicas(context: TheContext, ds: _Storage) -> list[str]:
    """Return the ids of the sites that keep replicas of a storage."""
    return context.sites.replicas(ds)


@put("/ds/storages/{ds:str}/replicas", guards=[needs("admin")], tags=_TAGS, status_code=202, sync_to_thread=True)
def set_replicas(context: TheContext, ds: _Storage, data: JSONBody[list[str]]) -> list[str]:
    """Set the sites that keep the replicas of a storage. The change is made in the background."""
    return context.sites.set_replicas(ds, data)


@put(
    "/ds/storages/{ds:str}/replicas/{site:str}",
    guards=[needs("admin")],
    tags=_TAGS,
    status_code=202,
    sync_to_thread=True,
)
def join(context: TheContext, ds: _Storage, site: _Site) -> str:
    """Add a site to the replicas of a storage. The change is made in the background."""
    context.sites.join(ds, site)
    return "OK"


@delete(
    "/ds/storages/{ds:str}/replicas/{site:str}",
    guards=[needs("admin")],
    tags=_TAGS,
    status_code=202,
    sync_to_thread=True,
)
def leave(context: TheContext, ds: _Storage, site: _Site) -> str:
    """Remove a site from the replicas of a storage. The change is made in the background."""
    context.sites.leave(ds, site)
    return "OK"


@post("/shards/{shard:int}/ask", guards=[needs("read")], tags=_TAGS, status_code=200, opt={"way": "site"})
async def ask(
    context: TheContext,
    request: Request[Any, Any, Any],
    shard: Annotated[int, PathParameter(description="The number of a shard.")],
) -> Response[bytes]:
    """Answer a request of another site of the cluster about a shard that the other site doesn't keep.

    The bodies of request and answer are an internal format of the cluster, so only its sites may ask.
    """
    if not is_site(request):
        raise PermissionDeniedException("only the sites of the cluster ask each other")
    from topicstore.storage.answering import answer  # imported only on a site of a cluster

    body, loop = await request.body(), asyncio.get_running_loop()
    try:
        found = await loop.run_in_executor(context.threads, answer, context.db.storage, shard, body)
    except msgspec.DecodeError as bad:
        raise ClientException(f"the request is not of a known form: {bad}") from bad
    return Response(found, media_type="application/vnd.msgpack")


@get("/shards/moves", guards=[needs("read")], tags=_TAGS, media_type="application/octet-stream", sync_to_thread=False)
def moves(
    context: TheContext,
    request: Request[Any, Any, Any],
    shard: Annotated[list[int], QueryParameter(max_items=4_096, description="The numbers of the shards to follow.")],
) -> Streamed:
    """Report to another site of the cluster, until it disconnects, which of some shards have new messages or records.

    The body is in a form of the cluster's own, so only its sites may ask.
    """
    if not is_site(request):
        raise PermissionDeniedException("only the sites of the cluster ask each other")
    for number in shard:
        context.db.storage.check_shard(number)
    return Streamed(_Moves(context, frozenset(shard)), "application/octet-stream")


class _Moves:
    """The numbers of shards with new messages, or with `RECORDS`, each as 4 bytes; `NOTHING` as a sign of life."""

    held = 0

    def __init__(self, context: Context, shards: frozenset[int]) -> None:
        self._context, self._shards = context, shards
        self._notifier = Notifier()
        self._moved = dict.fromkeys(shard | kind for shard in shards for kind in (0, RECORDS))
        """The shards to report, at first all of them, so that the site reads each once. Adding, removing and copying
        keys needs no lock."""
        self._ended = False
        self._followed = context.db.storage.followed_heads
        self._listener = context.db.storage.listener
        if self._listener is not None:
            self._listener.watchers.append(self._move)
        context.on_stop.append(self._end)
        if context.stopping.is_set():
            self._end()

    def _move(self, shard: int, heads: Collection[bytes]) -> None:
        if shard in self._shards and (not heads or not self._followed.isdisjoint(heads)):
            self._moved[shard | RECORDS if heads else shard] = None
            self._notifier.notify()

    def _end(self) -> None:
        self._ended = True
        self._notifier.notify()

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        return self

    async def __anext__(self) -> bytes:
        with TaskWaiter(self._notifier, SIGN_OF_LIFE) as waiter:
            while not (self._moved or self._ended):
                if not await waiter.wait():
                    return NOTHING
        if self._ended:
            raise StopAsyncIteration
        moved = list(self._moved)
        for shard in moved:
            self._moved.pop(shard, None)
        return b"".join(number.to_bytes(4, "big") for number in moved)

    async def aclose(self) -> None:
        """Stop following. Idempotent."""
        with suppress(ValueError):  # an earlier call has removed the callback
            self._context.on_stop.remove(self._end)
        if self._listener is not None:
            with suppress(ValueError):
                self._listener.watchers.remove(self._move)


ROUTES = [sites, site, forget, storages, storage, replicas, set_replicas, join, leave, ask, moves]
