"""`Keepers`: reads the shards that this site of a cluster doesn't keep, at the sites that keep them.

A question (`topicstore.shard.elsewhere`) is sent to ``POST /shards/{shard}/ask`` of the shard's owner, with the
cluster's token. If the owner doesn't answer, another site that keeps the shard is asked. Once a poll interval, a thread
asks for the ends of these shards, and wakes the subscriptions and sessions of this site that wait for new messages.
"""

from __future__ import annotations

import http
import threading
import time

import httpx
import msgspec

import topicstore as ts
from topicstore.contract.errors import ShardElsewhereError
from topicstore.replication.site import ShardOwner, Site
from topicstore.runtime.background import BackgroundTask
from topicstore.server.cluster import SiteTls
from topicstore.server.listeners import ListenError

from .forwarding import FORWARDED, SiteClients
from .guards import GRANTED

__all__ = ["Keepers"]

_CALLS = 8
"""The most questions to one site at the same time; further ones wait."""
_MARGIN = 5.0
"""Seconds to connect to a site, and seconds that an answer may take in addition to a wait for the log store."""
_QUICK = 10.0
"""Seconds for an answer without such a wait. Few, because the store's thread may wait, and with it all MQTT clients."""
_AVOIDED = 2.0
"""Seconds for which a site that didn't answer is not asked again, so that further questions don't wait for it."""
_LARGEST_ANSWER = 1 << 30
"""The most bytes of an answer. A batch has few megabytes, or one message; counts have about 100 bytes a topic."""


class Keepers:
    """A client of the other sites of a cluster, which answer questions about shards. All methods are thread-safe."""

    def __init__(self, db: ts.Database, site: Site, token: str, tls: SiteTls) -> None:
        """Create a client that authenticates itself with ``token``, the secret that the cluster's sites share."""
        self._storage, self._site = db.storage, site
        self._headers = {"Authorization": f"Bearer {token}", FORWARDED: site.name, GRANTED: "read"}
        self._clients = SiteClients(tls, httpx.Client)
        self._turns: dict[str, threading.BoundedSemaphore] = {}
        """By site, the bound on concurrent questions, so that a silent site delays only questions to itself."""
        self._patience = site.cluster.store_timeout + _MARGIN
        self._failed: dict[str, float] = {}
        """By site, the time (`time.monotonic`) of the last unanswered question. Entries are replaced atomically."""
        self._looking = BackgroundTask("reading of shards elsewhere", lambda _: self._storage.look_elsewhere())

    def start(self) -> None:
        """Let the database read at other sites the shards that this site doesn't keep, and follow these shards."""
        self._storage.read_elsewhere(self.ask)
        self._looking.interval = self._site.cluster.poll_interval
        self._looking.wake()

    def stop(self) -> None:
        """Stop following. Reads of shards that this site doesn't keep raise `ShardElsewhereError` again. Idempotent."""
        self._looking.stop()
        self._storage.read_elsewhere(None)
        self._looking.join()

    def ask(self, shard: int, question: bytes, waits: bool) -> bytes:
        """Return the answer of the shard's owner, or else of another site that keeps the shard.

        waits: whether the site may wait for the log store before it answers.

        Raises `ShardElsewhereError` if no site answers; it names the owner, and the text has each site's reason.
        """
        refusals = []
        for keeper in self._site.keepers(shard):
            if not keeper.http_address:
                refusals.append(f"site {keeper.site} serves no HTTP")
            elif time.monotonic() - self._failed.get(keeper.site, float("-inf")) < _AVOIDED:
                refusals.append(f"site {keeper.site} had no answer a moment ago")
            else:
                try:
                    return self._answer(keeper, shard, question, self._patience if waits else _QUICK)
                except _RefusedError as refused:
                    refusals.append(f"site {keeper.site}: {refused}")
                except (httpx.HTTPError, httpx.InvalidURL, ListenError) as bad:
                    self._failed[keeper.site] = time.monotonic()
                    refusals.append(f"site {keeper.site}: {str(bad) or type(bad).__name__}")
        owner = self._site.owner(shard)
        name, address = ("", "") if owner is None else (owner.site, owner.address)
        why = "; ".join(refusals) or "no other site keeps it"
        raise ShardElsewhereError(
            f"shard {shard} is not kept on this site, and can't be read: {why}", shard, name, address
        )

    def _answer(self, keeper: ShardOwner, shard: int, question: bytes, patience: float) -> bytes:
        request = httpx.Request(
            "POST",
            f"{keeper.http_address}/api/v5/shards/{shard}/ask",
            headers=self._headers,
            content=question,
            extensions={"timeout": httpx.Timeout(patience, connect=_MARGIN).as_dict()},
        )
        turns = self._turns.setdefault(keeper.site, threading.BoundedSemaphore(_CALLS))
        if not turns.acquire(timeout=patience):
            raise _RefusedError(f"it has not answered other questions for {patience:g} s")
        try:
            response = self._clients.of(request.url.scheme).send(request, stream=True)
            try:
                data = bytearray()
                for piece in response.iter_raw():
                    data += piece
                    if len(data) > _LARGEST_ANSWER:
                        raise _RefusedError("its answer is too long")
            finally:
                response.close()
        finally:
            turns.release()
        if response.status_code != http.HTTPStatus.OK:
            raise _RefusedError(_detail(data) or f"status {response.status_code}")
        return bytes(data)


class _RefusedError(Exception):
    """A site refused a question, or gave no usable answer; the text is the reason."""


class _Problem(msgspec.Struct):
    detail: str = ""


def _detail(data: bytes | bytearray) -> str:
    try:
        return msgspec.json.decode(data, type=_Problem).detail
    except msgspec.DecodeError:
        return ""
