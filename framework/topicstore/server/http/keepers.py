"""`Keepers`: reads the shards that this site of a cluster doesn't keep, at the sites that keep them.

A request (`topicstore.shard.elsewhere`) is sent to ``POST /shards/{shard}/ask`` of the shard's owner, with the
cluster's token. If the owner doesn't answer, another site that keeps the shard gets the request. In each poll interval,
a thread reads the last positions of these shards, and wakes the subscriptions and sessions of this site that wait for
new messages. Owners also report new messages, so that waiting readers needn't wait for the poll: while a filter is
followed on this site, one response of ``GET /shards/moves`` is open from each site that owns shards, including shards
of which this site keeps a copy. The response also reports changed records of shared subscriptions, and stays open
while other sites have such records. If it fails, messages and records are delayed until the next poll.

A site that has not answered a request counts as unresponsive. It gets no further requests but the thread's probes, one
after each pause, until it answers a probe. So other readers, such as the sessions of all MQTT clients, wait for an
unresponsive site only once.
"""

from __future__ import annotations

import asyncio
import http
import threading
import time
from collections import defaultdict
from contextlib import suppress
from functools import partial

import httpx
import msgspec

import topicstore as ts
from topicstore.contract.errors import ShardElsewhereError
from topicstore.pubsub.notifier import Notifier, TaskWaiter
from topicstore.replication.site import ShardOwner, Site
from topicstore.runtime.background import BackgroundTask
from topicstore.runtime.closing import do_all
from topicstore.server.cluster import SiteTls
from topicstore.server.listeners import ListenError
from topicstore.shard.elsewhere import AskEnd

from .forwarding import FORWARDED, ONCE, SiteClients
from .guards import GRANTED
from .routes.ds import NOTHING, RECORDS, SIGN_OF_LIFE

__all__ = ["Keepers", "Reach"]

_CALLS = 8
"""Most requests of one kind, quick or not, to one site at the same time; further requests wait for these."""
_MARGIN = 5.0
"""Seconds to connect to a site, and seconds by which its answer may take longer than it waits for the log store."""
_QUICK = 3.0
"""Timeout in seconds until the answer to a quick request begins: the other site needn't wait for anything before it
answers. It is short because all MQTT clients may have to wait for the answer."""
_SLOWEST = 100_000
"""The least bytes per second in which an answer must arrive after it has begun."""
_PAUSE, _LONGEST_PAUSE = 2.0, 30.0
"""The first and the longest pause, in seconds, before a probe of an unresponsive site."""
_REVIEW = 1.0
"""Seconds between two reviews of the sites that are to report new messages: after a new follower, or a shard's move."""
_LARGEST_ANSWER = 1 << 30
"""Most bytes of an answer. One batch has few megabytes, or one message; counts have about 100 bytes a topic."""
_SIGN_OF_LIFE = msgspec.msgpack.encode(AskEnd(False))
"""The request that probes an unresponsive site."""


class Reach:
    """The state of requests to one site: answered or unresponsive. Thread-safe. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.shard: int | None = None
        """The shard of the request that had no answer; None unless the site is unresponsive."""
        self._noted = self._again = float("-inf")
        """The times of the last failure, and of the next probe."""
        self._pause = 0.0

    def fail(self, shard: int, began: float, now: float, *, late: bool) -> None:
        """Record that a request about a shard had no answer. ``late``: the request timed out.

        The pause doubles if the request timed out soon after the previous pause. Requests that had begun before the
        last failure are ignored.
        """
        with self._lock:
            if began > self._noted:
                soon = began < self._again + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE) if late and soon else _PAUSE
                self.shard, self._noted, self._again = shard, now, now + self._pause

    def answer(self) -> None:
        """Record that the site has answered a request."""
        self.shard = None

    def due(self, now: float) -> int | None:
        """Return the shard for a probe, if the site is unresponsive and its pause is over; None otherwise."""
        with self._lock:
            return self.shard if now >= self._again else None


class Keepers:
    """A client that reads shards at the other sites of a cluster. All methods are thread-safe."""

    def __init__(self, db: ts.Database, site: Site, token: str, tls: SiteTls) -> None:
        """Create a client that authenticates itself with ``token``, the secret that the cluster's sites share."""
        self._storage, self._site = db.storage, site
        self._headers = {"Authorization": f"Bearer {token}", FORWARDED: site.name, GRANTED: "read", **ONCE}
        self._tls = tls
        self._clients = SiteClients(tls, httpx.Client)
        self._turns: dict[tuple[str, bool], threading.BoundedSemaphore] = {}
        """The semaphores of requests, by site and by whether the site may wait for its log store. So an unresponsive
        site holds up only its own requests, and quick requests wait only for quick requests."""
        self._patience = site.cluster.store_timeout + _MARGIN
        self._reach: dict[str, Reach] = {}
        """By site, whether it answers."""
        self._looking = BackgroundTask("reading of shards elsewhere", lambda _: self.look())
        self._hearing = BackgroundTask("following of shards elsewhere", lambda _: self._look_at_moved())
        self._moved: dict[int, None] = {}
        """The reported shards, with `RECORDS` or without. Adding, removing and copying keys needs no lock."""
        self._following = threading.Thread(target=self._run, name="topicstore-following", daemon=True)
        self._stopping, self._stopped = Notifier(), False

    def start(self) -> None:
        """Let the database read at other sites the shards that this site doesn't keep, and follow these shards."""
        self._storage.read_elsewhere(self.ask)
        self._looking.interval = self._site.cluster.poll_interval
        self._looking.wake()
        self._following.start()

    def stop(self) -> None:
        """Stop following. Reads of shards that this site doesn't keep raise `ShardElsewhereError` again. Idempotent."""
        tasks = self._looking, self._hearing
        for task in tasks:
            task.stop()
        self._stopped = True
        self._stopping.notify()
        self._storage.read_elsewhere(None)
        for task in tasks:
            task.join()
        if self._following.ident is not None:
            self._following.join()

    def look(self) -> None:
        """Probe unresponsive sites whose pause is over; read the last positions of shards that this site doesn't keep.

        Raises `ShardElsewhereError`, several as an `ExceptionGroup`.
        """
        for name, reach in list(self._reach.items()):
            shard = reach.due(time.monotonic())
            if shard is None:
                continue
            keeper = next((one for one in self._site.keepers(shard) if one.site == name and one.http_address), None)
            if keeper is None:  # the site has dropped the shard, so the next request for another shard is the probe
                reach.answer()
            else:
                with suppress(_RefusedError):
                    self._ask(reach, keeper, shard, _SIGN_OF_LIFE, False)
        self._storage.look_elsewhere()

    def _look_at_moved(self) -> None:
        moved = list(self._moved)
        for word in moved:
            self._moved.pop(word, None)
        messages, records = (
            {word for word in moved if word < RECORDS},
            {word - RECORDS for word in moved if word >= RECORDS},
        )
        look = partial(self._storage.look_elsewhere, messages, records)
        do_all((partial(self._site.follow, messages | records), look), "could not be read")

    def _run(self) -> None:
        asyncio.run(self._follow())

    async def _follow(self) -> None:
        """Keep a response open from each site that is to report new messages, until `stop`.

        Every `_REVIEW` seconds it determines these sites anew, and reopens responses that have ended.
        """
        clients = SiteClients(self._tls, httpx.AsyncClient)
        open_now: dict[tuple[str, tuple[int, ...]], asyncio.Task[None]] = {}
        while not self._stopped:
            wanted = self._followed()
            for key in open_now.keys() - wanted:
                open_now[key].cancel()
            open_now = {key: task for key, task in open_now.items() if key in wanted and not task.done()}
            for key in wanted - open_now.keys():
                open_now[key] = asyncio.create_task(self._hear(clients, *key))
            with TaskWaiter(self._stopping, _REVIEW) as waiter:
                if not self._stopped:
                    await waiter.wait()

    def _followed(self) -> set[tuple[str, tuple[int, ...]]]:
        """Return the addresses of the sites that are to report new messages, each with its shards."""
        listener, found = self._storage.listener, defaultdict[str, list[int]](list)
        if listener is not None and (listener.followed or self._storage.copies_states):
            for shard in self._storage.shards:
                keepers = () if self._site.owns(shard.number) else self._site.keepers(shard.number)
                if keepers and keepers[0].http_address:
                    found[keepers[0].http_address].append(shard.number)
        return {(address, tuple(shards)) for address, shards in found.items()}

    async def _hear(self, clients: SiteClients[httpx.AsyncClient], address: str, shards: tuple[int, ...]) -> None:
        """Wake `_hearing` for each report of a site, until the response ends or a sign of life is missing."""
        with suppress(httpx.HTTPError, httpx.InvalidURL, ListenError):  # the next poll finds the messages
            url = httpx.URL(f"{address}/api/v5/shards/moves", params={"shard": shards})
            timeout = httpx.Timeout(_MARGIN, read=_MARGIN + SIGN_OF_LIFE)
            async with clients.of(url.scheme).stream("GET", url, headers=self._headers, timeout=timeout) as response:
                if response.status_code != http.HTTPStatus.OK:
                    return
                rest = b""
                async for piece in response.aiter_raw():
                    data = rest + piece
                    rest = data[len(data) - len(data) % 4 :]
                    for at in range(0, len(data) - 3, 4):
                        self._note_moved(data[at : at + 4])

    def _note_moved(self, word: bytes) -> None:
        if word != NOTHING:
            self._moved[int.from_bytes(word, "big")] = None
            self._hearing.wake()

    def ask(self, shard: int, body: bytes, waits: bool) -> bytes:
        """Return the answer of the shard's owner, or else of another site that keeps the shard.

        waits: whether the site may wait for the log store before it answers.

        Raises `ShardElsewhereError` if no site answers; it names the owner, and the text has each site's reason.
        """
        refusals = []
        for keeper in self._site.keepers(shard):
            reach = self._reach.setdefault(keeper.site, Reach())
            if not keeper.http_address:
                refusals.append(f"site {keeper.site} serves no HTTP")
            elif reach.shard is not None:
                refusals.append(f"site {keeper.site} had no answer a moment ago")
            else:
                try:
                    return self._ask(reach, keeper, shard, body, waits)
                except _RefusedError as refused:
                    refusals.append(f"site {keeper.site}: {refused}")
        owner = self._site.owner(shard)
        name, address = ("", "") if owner is None else (owner.site, owner.address)
        why = "; ".join(refusals) or "no other site keeps it"
        raise ShardElsewhereError(
            f"shard {shard} is not kept on this site, and can't be read: {why}", shard, name, address
        )

    def _ask(self, reach: Reach, keeper: ShardOwner, shard: int, body: bytes, waits: bool) -> bytes:
        """Return the answer of a site. Raises `_RefusedError` if there is none."""
        probes = reach.shard is not None
        patience = self._patience if waits else _QUICK
        turns = self._turns.setdefault((keeper.site, waits), threading.BoundedSemaphore(_CALLS))
        if not turns.acquire(timeout=patience):
            raise _RefusedError(f"it has not answered other requests for {patience:g} s")
        began = time.monotonic()
        try:
            if not probes and reach.shard is not None:
                raise _RefusedError("it had no answer to other requests")
            status, data = self._answer(keeper, shard, body, patience)
        except (httpx.HTTPError, httpx.InvalidURL, ListenError) as bad:
            reach.fail(shard, began, time.monotonic(), late=isinstance(bad, httpx.TimeoutException))
            raise _RefusedError(str(bad) or type(bad).__name__) from bad
        finally:
            turns.release()
        reach.answer()
        if status != http.HTTPStatus.OK:
            raise _RefusedError(_detail(data) or f"status {status}")
        return data

    def _answer(self, keeper: ShardOwner, shard: int, body: bytes, patience: float) -> tuple[int, bytes]:
        """Return the status and the body of a site's response, which begins within ``patience`` seconds."""
        request = httpx.Request(
            "POST",
            f"{keeper.http_address}/api/v5/shards/{shard}/ask",
            headers=self._headers,
            content=body,
            extensions={"timeout": httpx.Timeout(patience, connect=min(patience, _MARGIN)).as_dict()},
        )
        end = time.monotonic() + patience
        response = self._clients.of(request.url.scheme).send(request, stream=True)
        try:
            data = bytearray()
            for piece in response.iter_raw():
                data += piece
                if len(data) > _LARGEST_ANSWER:
                    raise _RefusedError("its answer is too long")
                if time.monotonic() > end + len(data) / _SLOWEST:
                    raise httpx.ReadTimeout(f"only {len(data)} bytes came in {patience:g} s and more")
        finally:
            response.close()
        return response.status_code, bytes(data)


class _RefusedError(Exception):
    """A site refused a request, or its answer is unusable; the text is the reason."""


class _Problem(msgspec.Struct):
    detail: str = ""


def _detail(data: bytes | bytearray) -> str:
    try:
        return msgspec.json.decode(data, type=_Problem).detail
    except msgspec.DecodeError:
        return ""
