"""A `topicstore.server.Server` within the test's process, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import topicstore as ts
from topicstore.server.access.access import Access
from topicstore.server.config.model import HttpSettings, ListenerSettings, ServerSettings
from topicstore.server.config.units import Address
from topicstore.server.server import Server

from topicstore_conformance.faults.threads import PATIENCE

from .raw_client import RawClient

__all__ = ["ANY_PORT", "Embedded", "serving_http"]

_T = TypeVar("_T")

ANY_PORT = Address("127.0.0.1:0")
"""A free port of this machine."""


class Embedded:
    """A server on the test's database, which serves within a ``with`` block and is drained at the block's end.

    settings: the server's settings; their listeners are replaced with one on a free port of the loopback interface.
    access:   the access rules, if the settings can't express them; called in the event loop.

    The other arguments are those of `Server`.
    """

    def __init__(
        self,
        db: ts.Database,
        settings: ServerSettings | None = None,
        *,
        access: Access | None = None,
        read: Callable[[], ServerSettings] | None = None,
        file: Path | None = None,
        storages: Mapping[str, ts.Database] | None = None,
    ) -> None:
        listeners = {"mqtt": ListenerSettings(listen=ANY_PORT)}
        self.db = db
        self._settings = msgspec.structs.replace(settings or ServerSettings(), listeners=listeners)
        self._access, self._read, self._file, self._storages = access, read, file, storages
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self.server: Server  # set when the ``with`` block begins
        self.port = 0

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine in the server's event loop; return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the server's event loop, and return its result."""
        return self.begin(work).result(PATIENCE)

    def held(self) -> int:
        """Return the number of connections that the server doesn't read from at the moment."""

        async def count() -> int:
            broker = self.server._broker  # noqa: SLF001 - no public attribute shows which connections are not read
            return 0 if broker is None else len(broker.serving.held)

        return self.do(count())

    def memory(self, of: str) -> int:
        """Return the bytes of memory that clients use of a budget of `Server.budgets`; ``of`` is the budget's key."""

        async def look() -> int:
            return self.server.budgets[of].held

        return self.do(look())

    def client(self, client_id: str | None = None, *, version: int = 5, **options: Any) -> RawClient:
        """Return a raw client; if ``client_id`` is given, connect it with the options of `RawClient.connect`."""
        client = RawClient(self.port, version=version)
        if client_id is not None:
            client.connect(client_id, **options)
        return client

    def __enter__(self) -> Self:
        self._thread.start()

        async def start() -> Server:
            server = Server(
                self.db,
                self._settings,
                access=self._access,
                read=self._read,
                file=self._file,
                storages=self._storages,
            )
            return await server.__aenter__()

        try:
            self.server = self.do(start())
        except BaseException:
            self._end()
            raise
        self.port = int(self.server.addresses[0].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.do(self.server.drain())
        finally:
            self._end()

    def _end(self) -> None:
        """Stop the event loop, wait until its thread ends, and close it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


@contextmanager
def serving_http(
    db: ts.Database,
    *,
    read: Callable[[], ServerSettings] | None = None,
    file: Path | None = None,
    storages: Mapping[str, ts.Database] | None = None,
    **http: Any,
) -> Iterator[Server]:
    """Serve a database to MQTT and HTTP clients within this process, by default both on free ports.

    ``read``, ``file`` and ``storages`` are arguments of `Server`, all others of `HttpSettings`.
    """
    settings = ServerSettings(http=HttpSettings(**{"listen": ANY_PORT, **http}))
    with Embedded(db, settings, read=read, file=file, storages=storages) as embedded:
        yield embedded.server
