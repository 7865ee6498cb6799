"""The HTTP interface, served by uvicorn in a thread with its own event loop.

So a request never blocks the event loop of the MQTT clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import uvicorn

import topicstore as ts
from topicstore.runtime.closing import Closer, close_all
from topicstore.server.config.model import HttpSettings
from topicstore.server.config.units import written_address
from topicstore.server.listeners import ListenError, bind, places_of
from topicstore.server.listeners.accepting import Acceptor
from topicstore.server.listeners.tls import Certificate
from topicstore.server.metrics.metrics import Metrics
from topicstore.server.resource_limits import Descriptors, MemoryBudget
from topicstore.server.sites import Sites
from topicstore.storage.directory.staging import sweep_staging_below

from .application import application, by_sent_path
from .connections import connections
from .context import Context, Mqtt
from .discovery import Announcement, FoundServer
from .jobs import Jobs
from .threads import RequestThreads
from .tokens import Tokens, token_file

if TYPE_CHECKING:
    from topicstore.server.cluster import SiteTls

__all__ = ["HttpServer"]

_THREADS = 8
"""Most calls of the database that run at the same time; others wait."""
_FAREWELL = 5.0
"""The default time that requests have to end, in seconds."""
_BACKLOG = 1_024
_LOCAL = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - not used for binding
"""By wildcard address, the address by which this machine reaches the listener."""

_log = logging.getLogger("topicstore.server")


class _Uvicorn(uvicorn.Server):
    """uvicorn in a thread: it doesn't handle signals, and sets the future ``serving`` when it serves."""

    def __init__(
        self,
        config: uvicorn.Config,
        bound: Sequence[socket.socket],
        certificate: Certificate | None,
        threads: RequestThreads,
        below: int,
    ) -> None:
        super().__init__(config)
        self.serving: Future[None] = Future()
        self._bound, self._certificate, self._threads, self._below = bound, certificate, threads, below

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers unchanged."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and set ``serving``. A TLS handshake has the time limit of a request's head."""
        await self.lifespan.startup()
        config, loop = self.config, asyncio.get_running_loop()
        loop.set_default_executor(self._threads)
        make: Any = config.http_protocol_class

        def connect(_: object) -> asyncio.Protocol:
            made: asyncio.Protocol = make(
                config=config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )
            return made

        context = None if self._certificate is None else self._certificate.context
        accepting: list[Any] = []
        self.servers = accepting
        for one in self._bound:
            one.listen(_BACKLOG)
            accepting.append(Acceptor("http", one, connect, self._below, make.keywords["period"], context))
        self.started = True
        self.serving.set_result(None)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, wait for requests for a limited time, and close the remaining connections."""
        await super().shutdown(sockets)
        unsent = [size for one in self.server_state.connections if (size := one.transport.get_write_buffer_size())]
        if unsent:
            text = "the server ends before %d clients of HTTP have read all: %d bytes were not sent"
            _log.warning(text, len(unsent), sum(unsent))
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class HttpServer:
    """The HTTP interface of one database. `start`, `reload` and `stop` may be called in any thread."""

    def __init__(
        self,
        db: ts.Database,
        settings: HttpSettings,
        mqtt: Mqtt,
        descriptors: Descriptors,
        tls: SiteTls | None = None,
    ) -> None:
        """Set up the interface; generates the site's id if there is none. Raises the errors of `Sites.this`.

        ``tls``: TLS of connections to other sites; None without a cluster.
        """
        self._settings, self._descriptors = settings, descriptors
        forwarder, token, self._keepers = None, None, None
        if db.cluster is not None and tls is not None:
            from topicstore.server.cluster import http_token  # imported only on a site of a cluster

            from .forwarding import Forwarder
            from .keepers import Keepers

            token = http_token(db.cluster)
            forwarder = Forwarder(db.cluster, token, tls)
            self._keepers = Keepers(db, db.cluster, token, tls)
        sites, memory = Sites(db, mqtt.storages), MemoryBudget(max(settings.memory, settings.body_size))
        self.context = Context(
            db=db,
            mqtt=mqtt,
            settings=settings,
            tokens=Tokens(token_file(settings.token_file, db.path), token),
            forwarder=forwarder,
            sites=sites,
            jobs=Jobs(),
            metrics=Metrics(db, mqtt, site=sites.this),
            threads=RequestThreads(_THREADS),
            memory=memory,
            stopping=threading.Event(),
        )
        self.addresses: Sequence[str] = ()
        """The addresses of the listening sockets, with the ports that were bound."""
        self.connections: Collection[Any] = ()
        """The open connections, each a `Connection`."""
        self._ending = threading.Lock()
        """Held while resources are released, so that every call of `stop` returns after that."""
        self._changing = threading.Lock()
        """Guards the following attributes. Not held while requests end, because a request may wait for `reload`."""
        self._closer = Closer()
        self._closer.add(self.context.threads.shutdown)
        self._closer.add(self.context.jobs.join)
        self._patience = _FAREWELL
        """Seconds that requests have to end when the server stops."""
        self._certificate: Certificate | None = None
        self._announcement: Announcement | None = None

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "http" if self._settings.tls is None else "https"

    def start(self, bound: Sequence[socket.socket] | None = None) -> None:
        """Begin to serve; return when requests are accepted. May be called once only.

        ``bound`` are the sockets to serve on, which `stop` closes; by default the addresses of the settings are bound.

        Raises `ListenError`, and `OSError` if the discovery file can't be written; then nothing is left open, and the
        object can't be started again.
        """
        with Closer() as begun:
            begun.add(self.stop)
            sockets = list(bound or ())
            with self._changing:
                self._closer.add(lambda: close_all(one.close for one in sockets))
                if self.context.stopping.is_set():
                    raise ListenError("the HTTP interface was stopped; make another one")
                if self._settings.tls is not None:
                    self._certificate = Certificate(self._settings.tls)
                if self._settings.export_dir is not None:
                    sweep_staging_below(self._settings.export_dir)  # left by a server that was killed
                for address in self._settings.listen.all if bound is None else ():
                    sockets += bind(address, places_of(address, " for HTTP"), " for HTTP")
                self.addresses = [written_address(one.getsockname()) for one in sockets]
                self._serve(sockets)
                self._closer.add(self.context.metrics.stop)
                self.context.metrics.start()
                self._announce(self._certificate)
                if self._keepers is not None:
                    self._closer.add(self._keepers.stop)
                    self._keepers.start()

    def _serve(self, bound: Sequence[socket.socket]) -> None:
        config: Any = uvicorn.Config(
            by_sent_path(application(self.context)),
            http=connections(self._descriptors.requests, self._settings.request_timeout, self.context.memory),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        server = _Uvicorn(config, bound, self._certificate, self.context.threads, self._descriptors.http)
        self.connections = server.server_state.connections
        thread = threading.Thread(target=_run, args=(server,), name="topicstore-http", daemon=True)
        thread.start()

        def end() -> None:
            config.timeout_graceful_shutdown = self._patience
            server.should_exit = True
            thread.join()

        self._closer.add(end)
        server.serving.result()

    def _announce(self, certificate: Certificate | None) -> None:
        """Write the discovery file, by which commands on this machine find the server. Raises `OSError`."""
        found = FoundServer(
            url=f"{self.scheme}://{_local(self.addresses[0])}",
            pid=os.getpid(),
            token=self.context.tokens.own,
            certificate=None if certificate is None else certificate.pem,
        )
        if self._announcement is not None:
            self._announcement.replace(found)
            return
        self._announcement = Announcement.of(self.context.db, found)
        if self._announcement is not None:
            self._closer.add(self._announcement.withdraw)

    def reload(self) -> None:
        """Read the certificate and the tokens again; open connections keep their certificate.

        Raises `ListenError`, `TokenFileError` and `OSError`; then the certificate is not changed. Nor is it changed
        before `start` and after `stop`.
        """
        self.context.tokens.reread()
        with self._changing:
            if self._certificate is not None and self._settings.tls is not None and not self.context.stopping.is_set():
                renewed = Certificate(self._settings.tls)
                self._announce(renewed)
                self._certificate.become(renewed)

    def begin_stop(self) -> None:
        """Refuse new requests except health checks, which report the stop, and wake waiting handlers. Idempotent.

        So a load balancer learns that the server will end.
        """
        if not self.context.stopping.is_set():
            self.context.stopping.set()
            close_all((self.context.jobs.stop, *self.context.on_stop))  # a copy: callbacks may remove themselves

    def stop(self, patience: float = _FAREWELL) -> None:
        """Give running requests ``patience`` seconds to end, and release all resources.

        Idempotent; returns after the release, even in concurrent calls.
        """
        self._patience = patience
        try:
            self.begin_stop()
        finally:
            with self._ending:
                with self._changing:
                    closer, self._closer = self._closer, Closer()
                closer.release()


def _run(server: _Uvicorn) -> None:
    try:
        server.run()
    except BaseException as failed:
        if server.serving.done():
            raise
        server.serving.set_exception(failed)


def _local(address: str) -> str:
    """Return the address by which this machine reaches a listener."""
    host, _, port = address.rpartition(":")
    return f"{_LOCAL.get(host, host)}:{port}"
