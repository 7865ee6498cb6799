"""Forwarding of clients' requests to the sites of a cluster that own the shards of the requests.

A change of another site's shard raises `ShardElsewhereError`, and nothing was done: then the request is forwarded to
the owner as a whole, with the cluster's token, the scope that this site has granted the client, and the client's body;
the response passes back. Requests that concern several sites are split by owner: the messages of a publish, an import,
and a deletion. A forwarded request has the header `FORWARDED`, and is not forwarded again: a document that two sites
have read at different times could otherwise make a request circulate.
"""

from __future__ import annotations

import asyncio
import http
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import attrs
import httpx
import msgspec
import numpy as np
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import ShardElsewhereError
from topicstore.replication.site import ShardOwner, Site
from topicstore.server.cluster import SiteTls
from topicstore.server.listeners import ListenError

from .formats.response_bodies import ARROW, written
from .guards import GRANTED, granted
from .parameters import SHARDS
from .problems import problem

__all__ = ["FORWARDED", "ONCE", "RETRY", "Call", "Forwarder", "Parts", "Reply", "SiteClients", "owners_of", "parts_of"]

T = TypeVar("T")
C = TypeVar("C", httpx.Client, httpx.AsyncClient)

FORWARDED = "Topicstore-Forwarded"
"""The header of a forwarded request; its value is the name of the site that forwards."""
RETRY: Mapping[str, str] = {"Retry-After": "1"}
"""The header of responses to requests that may succeed as soon as a shard has an owner."""
_CALLS = 8
"""Most requests that are forwarded to one site at the same time; others wait. So an unresponsive site holds up only its
own requests. A waiting forward holds no thread, because the requests may use all threads of a site."""
_MARGIN = 5.0
"""Seconds to connect to a site, and seconds by which its answer may take longer than it waits for the log store."""
_LARGEST_ANSWER, _LARGEST_PAGE = 1 << 20, 64 << 20
"""Most bytes of the answer to a change, and to a reading request: 10,000 sessions with their subscriptions have some
megabytes."""
_PASSED = ("accept", "content-type", "user-agent")
"""The client's headers that are forwarded."""
_POOL = httpx.Limits(max_connections=None, max_keepalive_connections=0)
"""Connections close after each request. So an idle client has nothing to close, and no request meets a connection that
the other site is closing. Callers bound the number of their requests."""
ONCE: Mapping[str, str] = {"Connection": "close"}
"""The header of requests to other sites by which these close the connection first. The end that closes first keeps the
connection in TIME_WAIT for a minute; that costs this site a local port, of which it has about 28,000 for each other
site, and the other site none (RFC 9293, section 3.6.1)."""
_OWN = (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding", b"upgrade")
"""The headers of a response that concern one connection alone."""


@attrs.frozen
class Parts:
    """The messages of a request by the sites that store them."""

    here: MessageBatch
    """The messages of this site's own shards."""
    elsewhere: Mapping[ShardOwner, bytes]
    """The messages of other sites' shards by owner, as Arrow's IPC stream format."""


def owners_of(site: Site, shards: Collection[int]) -> dict[int, ShardOwner | None]:
    """Return the owner of each shard; None for this site. Raises `ShardElsewhereError` if one has no owner."""
    owners: dict[int, ShardOwner | None] = {}
    for shard in sorted(shards):
        owner = None if site.owns(shard) else site.owner(shard)
        if owner is None and not site.owns(shard):
            raise ShardElsewhereError(f"no site writes shard {shard} at the moment", shard)
        owners[shard] = owner
    return owners


def parts_of(site: Site, batch: MessageBatch, shards: Mapping[str, int]) -> Parts:
    """Return the parts of a batch. ``shards`` has the shard of each client id.

    Raises `ShardElsewhereError` if a shard has no owner at the moment.
    """
    owners = owners_of(site, set(shards.values()))
    if not any(owners.values()):
        return Parts(batch, {})
    rows: dict[ShardOwner | None, list[int]] = {}
    for row, client_id in enumerate(to_iterable(batch.client_ids)):
        rows.setdefault(owners[shards[client_id]], []).append(row)
    split = {owner: batch.take(np.array(some)) for owner, some in rows.items()}
    here = split.pop(None, batch[:0])
    return Parts(here, {one: b"".join(written([part], ARROW)) for one, part in split.items() if one is not None})


def _redirection(owner: ShardOwner, request: Request[Any, Any, Any]) -> HTTPException:
    """Return the response of a site that forwards nothing: 307, with the owner's address."""
    if not owner.http_address:
        return HTTPException(status_code=503, detail=f"site {owner.site}, which writes the shard, serves no HTTP")
    headers = {"Location": f"{owner.http_address}{_target(request.scope)}"}
    return HTTPException(status_code=307, detail=f"site {owner.site} writes the shard", headers=headers)


def _target(scope: Any) -> str:
    """Return the path and the query of a request, as they were sent."""
    query = scope["query_string"].decode("latin-1")
    return str(scope["raw_path"].decode("latin-1")) + f"?{query}" * bool(query)


class _Problem(msgspec.Struct):
    """The fields of another site's problem document that are used."""

    detail: str = ""


class Reply:
    """The response of another site, whose body is read as it is used."""

    def __init__(self, status: int, headers: Sequence[tuple[bytes, bytes]], pieces: AsyncIterator[bytes]) -> None:
        self.status, self.headers = status, headers
        self.pieces = pieces
        """The pieces of the body. Raises `HTTPException` if the site doesn't send the rest."""


@attrs.frozen
class Call:
    """A request for another site."""

    method: str
    target: str
    """The path and the query, percent-encoded."""
    headers: Mapping[str, str]
    body: bytes = b""


class SiteClients(Generic[C]):
    """HTTP clients for ``http`` and ``https``, replaced when the cluster's certificates are reloaded. Thread-safe.

    They ignore proxies from the environment, and follow no redirects.
    """

    def __init__(self, tls: SiteTls, make: Callable[..., C]) -> None:
        self._tls = tls
        self._make: Callable[..., C] = make
        self._clients: dict[str, tuple[ssl.SSLContext | None, C]] = {}
        """The client for each scheme, with the TLS context that it uses. Entries are replaced as a whole."""

    def of(self, scheme: str) -> C:
        """Return the client for a scheme. Raises `ListenError` if the files of the certificates can't be read."""
        context = self._tls.context if scheme == "https" else None
        known = self._clients.get(scheme)
        if known is None or known[0] is not context:
            client = self._make(verify=context or False, limits=_POOL, trust_env=False)
            known = self._clients[scheme] = context, client
        return known[1]


class Forwarder:
    """Requests from one site to others. Used in the event loop of HTTP only.

    At most `_CALLS` requests are in progress at each other site; further ones wait, without delaying those for other
    sites. A request then waits for the answer for `Cluster.store_timeout`, as long as the site itself waits for the log
    store, and `_MARGIN` seconds. When the server stops, forwarding tasks are cancelled, and their connections closed.
    """

    def __init__(self, site: Site, token: str, tls: SiteTls) -> None:
        self._site, self._token = site, token
        self._turns: dict[str, asyncio.Semaphore] = {}
        """The turns of requests by the site to which they are forwarded."""
        self._clients = SiteClients(tls, httpx.AsyncClient)
        self._patience = site.cluster.store_timeout + _MARGIN

    def call(
        self, request: Request[Any, Any, Any], body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Call:
        """Return a client's request for another site: with the scope that this site has granted the client."""
        named = (
            {name: value for name, value in request.headers.items() if name in _PASSED} if headers is None else headers
        )
        own = {FORWARDED: self._site.name, GRANTED: granted(request) or ""}
        return Call(request.method, _target(request.scope), {**named, **own}, body)

    def check(self, request: Request[Any, Any, Any], owners: Collection[ShardOwner], *, here: bool) -> None:
        """Raise `HTTPException` unless parts of a request may be forwarded to their owners.

        A request that was forwarded already gets 421. If the settings say that nothing is forwarded, a request for a
        single owner gets 307 with the owner's address. A request for several owners, or with a part for this site
        (``here``), then gets 421.
        """
        if (sender := request.headers.get(FORWARDED)) is not None:
            text = f"site {sender} has forwarded the request for a shard that another site writes by now"
            raise HTTPException(status_code=421, detail=text, headers=dict(RETRY))
        if not owners or self._forwards(request):
            return
        owner, *others = owners
        if not others and not here:
            raise _redirection(owner, request)
        sites = ", ".join(sorted(one.site for one in owners))
        raise HTTPException(
            status_code=421,
            detail=f"the request concerns shards of several sites ({sites} and others), and this server forwards none: "
            "send what concerns the shards of each site by itself",
        )

    def answer(self, request: Request[Any, Any, Any], error: ShardElsewhereError) -> Response[bytes] | None:
        """Return the response to a request that failed with ``error`` before it changed anything.

        The request is forwarded, and the response is that of the shard's owner. If the settings say so, the response
        is a redirection to the owner instead. A request that was already forwarded gets 421. Returns None while the
        shard has no owner, and for a GET request, unless its route has the option ``of_owner``.
        """
        if (sender := request.headers.get(FORWARDED)) is not None:
            text = f"{error}; site {sender} has forwarded the request here, and it is not forwarded again"
            return problem(421, text, name=type(error).__name__, headers=RETRY)
        owner = self._site.owner(error.shard)
        if owner is None or (request.method == "GET" and not request.route_handler.opt.get("of_owner")):
            return None
        if not self._forwards(request):
            there = _redirection(owner, request)
            return problem(there.status_code, there.detail, headers=there.headers)
        return _Forwarded(self, owner)

    @staticmethod
    def _forwards(request: Request[Any, Any, Any]) -> bool:
        settings = request.app.state.context.mqtt.settings.cluster
        return settings is None or bool(settings.forward)

    async def ask(
        self, calls: Mapping[ShardOwner, Call], kind: type[T], largest: int = _LARGEST_ANSWER
    ) -> list[T | HTTPException]:
        """Send requests to their sites, all at the same time; return the answers, JSON of a type, in their order.

        A site that can't be reached, does not answer or refuses has an `HTTPException` as its answer, and so has one
        whose answer has more than ``largest`` bytes.
        """
        answers = [self._ask(owner, call, kind, largest) for owner, call in calls.items()]
        return list(await asyncio.gather(*answers))

    async def gather(
        self,
        request: Request[Any, Any, Any],
        shards: Collection[int],
        own: Callable[[Collection[int]], T],
        kind: type[T],
    ) -> tuple[list[T], dict[int, str]]:
        """Send a reading request to the owners of shards, at the same time, each for its own ones: see `SHARDS`.

        ``own`` answers for shards of this site, in a thread. Return the answers of all sites, and by shard the reason
        why there is none. A request that was forwarded already is not forwarded again.
        """
        wanted, missing = defaultdict[ShardOwner, list[int]](list), dict[int, str]()
        mine = [shard for shard in shards if self._site.owns(shard)]
        for shard in sorted(set(shards).difference(mine)):
            owner = self._site.owner(shard)
            if owner is None or FORWARDED in request.headers:
                missing[shard] = f"site {self._site.name} doesn't write it" + " and knows no owner" * (owner is None)
            else:
                wanted[owner].append(shard)
        calls = {one: self.call(request, b"", {SHARDS: ",".join(map(str, some))}) for one, some in wanted.items()}
        asked = asyncio.create_task(self.ask(calls, kind, _LARGEST_PAGE))
        try:
            loop, threads = asyncio.get_running_loop(), request.app.state.context.threads
            found = [await loop.run_in_executor(threads, own, mine)] if mine else []
            answers = await asked
        finally:
            asked.cancel()
        for some, answer in zip(wanted.values(), answers, strict=True):
            if isinstance(answer, HTTPException):
                missing |= dict.fromkeys(some, answer.detail)
            else:
                found.append(answer)
        return found, missing

    @staticmethod
    def raise_first(answers: Sequence[object], done: str) -> None:
        """Raise the first error among answers.

        Unless all sites failed, the error's text also has ``done``, the description of the completed part.
        """
        errors = [one for one in answers if isinstance(one, HTTPException)]
        if errors and len(errors) < len(answers):
            errors[0].detail = f"{errors[0].detail}; {done}"
        if errors:
            raise errors[0]

    async def _ask(self, owner: ShardOwner, call: Call, kind: type[T], largest: int) -> T | HTTPException:
        try:
            async with self.send(owner, call) as reply:
                data = bytearray()
                async for piece in reply.pieces:
                    data += piece
                    if len(data) > largest:
                        return HTTPException(status_code=502, detail=f"site {owner.site} gave too long an answer")
        except HTTPException as failed:
            return failed
        try:
            if reply.status == http.HTTPStatus.OK:
                return msgspec.json.decode(data, type=kind)
            detail = msgspec.json.decode(data, type=_Problem).detail
        except msgspec.DecodeError:
            detail = "an answer that is not the expected JSON"
        status = 502 if reply.status in (200, 401, 403, 404, 405) else reply.status
        retry = dict(reply.headers).get(b"retry-after")
        more = {} if retry is None else {"Retry-After": retry.decode("latin-1")}
        return HTTPException(status_code=status, detail=f"site {owner.site}: {detail}", headers=more)

    @asynccontextmanager
    async def send(self, owner: ShardOwner, call: Call) -> AsyncIterator[Reply]:
        """Send a request to a site, and yield its response. Raises `HTTPException` if the site doesn't respond."""
        gone = self._turns.keys() - self._site.document.sites.keys()
        for name in gone:
            del self._turns[name]
        turns = self._turns.setdefault(owner.site, asyncio.Semaphore(_CALLS))
        try:
            async with asyncio.timeout(self._patience):
                await turns.acquire()
        except TimeoutError as late:
            detail = f"site {owner.site} has not answered other requests for {self._patience:g} s"
            raise HTTPException(status_code=503, detail=detail, headers=dict(RETRY)) from late
        try:
            response = await self._answered(owner, call)
            try:
                headers = [(name.lower(), value) for name, value in response.headers.raw]
                yield Reply(response.status_code, headers, self._pieces(owner, response))
            finally:
                await response.aclose()
        finally:
            turns.release()

    async def _answered(self, owner: ShardOwner, call: Call) -> httpx.Response:
        """Send a request, and return the response, whose body is not read yet and which the caller closes."""
        if not owner.http_address:
            raise HTTPException(status_code=503, detail=f"site {owner.site}, which writes the shard, serves no HTTP")
        try:
            with self._unanswered(owner):
                request = httpx.Request(
                    call.method,
                    owner.http_address,
                    headers={"Authorization": f"Bearer {self._token}", **ONCE, **call.headers},
                    content=call.body,
                    extensions={
                        "target": call.target.encode("latin-1"),
                        "timeout": httpx.Timeout(self._patience, connect=_MARGIN).as_dict(),
                    },
                )
                return await self._clients.of(request.url.scheme).send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL, ListenError) as bad:
            why = str(bad) or "no answer"
            detail = f"site {owner.site}, which writes the shard, can't be reached at {owner.http_address}: {why}"
            raise HTTPException(status_code=503, detail=detail, headers=dict(RETRY)) from bad

    async def _pieces(self, owner: ShardOwner, response: httpx.Response) -> AsyncIterator[bytes]:
        with self._unanswered(owner):
            async for piece in response.aiter_raw():
                yield piece

    @contextmanager
    def _unanswered(self, owner: ShardOwner) -> Iterator[None]:
        """Convert the failure of a connection to `HTTPException`, unless it was not made."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.TransportError as bad:
            why = str(bad) or f"for {self._patience:g} s"
            detail = f"site {owner.site} gave no answer ({why}); it is unknown whether it has carried the request out"
            raise HTTPException(status_code=503, detail=detail) from bad


class _Forwarded(Response[bytes]):
    """The response of a shard's owner to a client's request, which is forwarded as a whole."""

    def __init__(self, forwarder: Forwarder, owner: ShardOwner) -> None:
        super().__init__(b"")
        self._forwarder, self._owner = forwarder, owner

    def to_asgi_response(self, app: Any, request: Request[Any, Any, Any], **_: Any) -> Any:
        """Return the ASGI application that forwards the request, and sends the response."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            begun = False
            try:
                call = self._forwarder.call(request, await request.body())
                async with self._forwarder.send(self._owner, call) as reply:
                    if reply.status == http.HTTPStatus.UNAUTHORIZED:
                        text = f"site {self._owner.site} does not accept the cluster's token"
                        raise HTTPException(status_code=502, detail=text)
                    headers = [one for one in reply.headers if one[0] not in _OWN]
                    begun = True
                    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
                    async for piece in reply.pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except HTTPException as failed:
                if begun:
                    raise
                refused = problem(failed.status_code, failed.detail, headers=failed.headers)
                await refused.to_asgi_response(None, request)(scope, receive, send)

        return respond
