"""Publishes of a cluster's clients: each message goes to the site that owns its publisher's shard.

A site stores the messages of its own shards, and forwards the others to their owners with the cluster's token. A
forwarded request has the header `FORWARDED`, and is not forwarded again: a document that two sites have read at
different times could otherwise send a request round in circles.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import attrs
import msgspec
import numpy as np
from litestar.exceptions import HTTPException

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import ShardElsewhereError
from topicstore.replication.site import ShardOwner, Site

from .formats.media_types import ARROW
from .formats.written import written

__all__ = ["FORWARDED", "RETRY", "Forwarder", "Parts", "parts_of", "redirection"]

FORWARDED = "Topicstore-Forwarded"
"""The header of a forwarded request; its value is the name of the site that forwards."""
RETRY: Mapping[str, str] = {"Retry-After": "1"}
"""The header of responses to requests that may succeed as soon as a shard has an owner."""
_THREADS = 8
"""Most requests that are forwarded to one site at the same time; others wait, and a silent site holds up only its own.
These threads are not those of the database, which a
forwarded request needs on the other site: two sites that forward to each other must not wait for each other."""
_LARGEST_ANSWER = 1 << 20


@attrs.frozen
class Parts:
    """The messages of a request by the sites that store them."""

    here: MessageBatch
    """The messages of this site's own shards."""
    elsewhere: Mapping[ShardOwner, MessageBatch]
    """The messages of other sites' shards, by owner."""


def parts_of(site: Site, batch: MessageBatch, shards: Mapping[str, int]) -> Parts:
    """Return the parts of a batch. ``shards`` has the shard of each client id.

    Raises `ShardElsewhereError` if a shard has no owner at the moment.
    """
    owners: dict[int, ShardOwner | None] = {}
    for shard in sorted(set(shards.values())):
        owner = None if site.owns(shard) else site.owner(shard)
        if owner is None and not site.owns(shard):
            raise ShardElsewhereError(f"no site writes shard {shard} at the moment", shard)
        owners[shard] = owner
    if not any(owners.values()):
        return Parts(batch, {})
    rows: dict[ShardOwner | None, list[int]] = {}
    for row, client_id in enumerate(to_iterable(batch.client_ids)):
        rows.setdefault(owners[shards[client_id]], []).append(row)
    split = {owner: batch.take(np.array(some)) for owner, some in rows.items()}
    return Parts(split.pop(None, batch[:0]), {owner: part for owner, part in split.items() if owner is not None})


def redirection(parts: Parts, path: str, query: str) -> HTTPException:
    """Return the response for messages of another site's shards where nothing is forwarded: 307, with its address.

    Messages of several sites can't be redirected, and are refused with 421.
    """
    owner, *others = parts.elsewhere
    if others or len(parts.here):
        sites = ", ".join(sorted(one.site for one in parts.elsewhere))
        return HTTPException(
            status_code=421,
            detail=f"the messages belong to shards of several sites ({sites} and others), and this server forwards "
            "none: send the messages of each publisher by themselves",
        )
    if not owner.http_address:
        return HTTPException(status_code=503, detail=f"site {owner.site}, which writes the shard, serves no HTTP")
    location = f"{owner.http_address}{path}" + f"?{query}" * bool(query)
    return HTTPException(status_code=307, detail=f"site {owner.site} writes the shard", headers={"Location": location})


class _Answer(msgspec.Struct):
    """The fields of another site's answer: counts, or the detail of a problem."""

    count: int = 0
    stored: int = 0
    routed: int = 0
    retained: int = 0
    detail: str = ""


class Forwarder:
    """Requests from one site to others, in threads of its own for each of them. Used in the event loop only."""

    def __init__(self, site: Site, token: str) -> None:
        self._site, self._token = site, token
        self._threads: dict[str, ThreadPoolExecutor] = {}
        """The threads by the site to which they forward."""
        self._patience = site.cluster.store_timeout

    def stop(self) -> None:
        """Wait for the requests that are being forwarded, and end the threads. Idempotent."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for threads in self._threads.values():
            threads.shutdown()

    def _threads_for(self, site: str) -> ThreadPoolExecutor:
        """Return the threads that forward to a site; end those of sites that were removed from the cluster."""
        if site not in self._threads:
            for gone in self._threads.keys() - self._site.document.sites.keys():
                self._threads.pop(gone).shutdown(wait=False)
            self._threads[site] = ThreadPoolExecutor(_THREADS, "topicstore-forwarding")
        return self._threads[site]

    async def forward(self, parts: Mapping[ShardOwner, MessageBatch], path: str, query: str) -> list[_Answer]:
        """Send each part to its owner, all at the same time, and return the owners' answers.

        Raises `HTTPException` if an owner doesn't answer or refuses; its text says which messages were published.
        """
        loop = asyncio.get_running_loop()
        calls = [
            loop.run_in_executor(self._threads_for(owner.site), self._send, owner, part, f"{path}?{query}")
            for owner, part in parts.items()
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        answers = [one for one in found if isinstance(one, _Answer)]
        for one in found:
            if isinstance(one, HTTPException) and answers:
                published = sum(answer.count for answer in answers)
                one.detail = f"{one.detail}; {published} messages of the request were published by other sites"
            if isinstance(one, BaseException):
                raise one
        return answers

    def _send(self, owner: ShardOwner, part: MessageBatch, target: str) -> _Answer:
        parsed = urlsplit(owner.http_address)
        if parsed.hostname is None:
            raise HTTPException(status_code=503, detail=f"site {owner.site}, which writes the shard, serves no HTTP")
        body = b"".join(written([part], ARROW))
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": ARROW,
            FORWARDED: self._site.name,
        }
        kind: Any = http.client.HTTPSConnection if parsed.scheme == "https" else http.client.HTTPConnection
        connection: http.client.HTTPConnection = kind(parsed.hostname, parsed.port, timeout=self._patience)
        try:
            connection.connect()
        except OSError as bad:
            connection.close()
            detail = f"site {owner.site}, which writes the shard, can't be reached at {owner.http_address}: {bad}"
            raise HTTPException(status_code=503, detail=detail, headers=dict(RETRY)) from bad
        try:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            data, retry = response.read(_LARGEST_ANSWER), response.getheader("Retry-After")
        except (OSError, http.client.HTTPException) as bad:
            detail = f"site {owner.site} gave no answer ({bad}); it is unknown whether it has stored its messages"
            raise HTTPException(status_code=503, detail=detail) from bad
        finally:
            connection.close()
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except msgspec.DecodeError:
            answer = _Answer(detail="an answer that is not JSON")
        if response.status == http.HTTPStatus.OK:
            return answer
        status = 502 if response.status in (401, 403, 404, 405) else response.status
        more = {} if retry is None else {"Retry-After": retry}
        raise HTTPException(status_code=status, detail=f"site {owner.site}: {answer.detail}", headers=more)
