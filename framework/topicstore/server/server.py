"""`Server`: an MQTT server that a program embeds, on a database that the program has opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import attrs

import topicstore as ts
from topicstore.contract.errors import InvalidArgumentError

from .access.access import Access
from .broker import Broker
from .descriptors import Descriptors
from .http.discovery import Announcement, FoundServer
from .http.http_server import HttpServer
from .listeners import Listener, Replacement, Reserved, listen
from .logs import set_level
from .memory_budget import MemoryBudget
from .recovering import Recovery
from .reloading import Reloaded, in_force, new_access, summary, with_access_of
from .retaining import change_database, check_database
from .settings import MESSAGES, ServerSettings
from .sys_topics import Traffic

__all__ = ["Server"]

_LEAST = 0.1
"""Seconds that requests of HTTP have to end, though MQTT's clients have taken all the time."""

_log = logging.getLogger("topicstore.server")


class Server:
    """An MQTT server in the running event loop.

    ::

        with ts.open("data") as db:
            async with Server(db, ServerSettings()) as server:
                print(server.addresses)
                await server.wait()

    The database stays the program's: it may publish and read while the server serves, and closes it after the server
    has ended. Leaving the block drains the server. All methods are called in the event loop in which it was entered.
    """

    def __init__(
        self,
        db: ts.Database,
        settings: ServerSettings | None = None,
        *,
        access: Access | None = None,
        read: Callable[[], ServerSettings] | None = None,
        storages: Mapping[str, ts.Database] | None = None,
        reserved: Reserved | None = None,
    ) -> None:
        """Make a server; it begins to serve when it is entered.

        access:   who may do what; by default what the settings say.
        read:     reads the settings again, for `reread`; called in a thread.
        storages: all open databases by name, with ``db``, for the HTTP interface; by default only that.
        reserved: the bound sockets of all addresses of the settings; by default they are bound when it is entered.
        """
        self._db = db
        self._read = read
        self._storages: Mapping[str, ts.Database] = storages if storages is not None else {MESSAGES: db}
        self._settings = settings if settings is not None else ServerSettings()
        self._given = access
        self._reserved = reserved
        self._broker: Broker | None = None
        self._listeners: list[Listener] = []
        self._http: HttpServer | None = None
        self._recovery = Recovery(self._storages)
        self._announcement: Announcement | None = None
        """What says that it runs, if no HTTP interface does."""
        self._access: Access | None = None
        """Who may do what, where it is the server's to close."""
        self._retired: list[Access] = []
        """What said so before settings were changed: clients that were connected then go on asking it."""
        self._changing = asyncio.Lock()
        """Held while settings are changed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which it serves."""

    async def __aenter__(self) -> Self:
        """Open the listeners. Raises `ListenError`, and what `Access` raises."""
        settings, listeners = self._settings, list[Listener]()
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as undo:
            reserved = self._reserved if self._reserved is not None else await asyncio.to_thread(Reserved, settings)
            undo.callback(reserved.close)
            access = self._given
            if access is None:
                access = Access(settings.authentication, settings.authorization)
                undo.callback(access.close)
            await asyncio.to_thread(change_database, self._db, settings)
            descriptors = Descriptors.of(settings, self._storages.values())
            broker = Broker(self._db, settings, access, descriptors.clients)
            undo.push_async_callback(broker.stop)
            for name, one in settings.listeners.items():
                bound = reserved.take(name)
                listener = await listen(name, one, settings.limits, broker.connection, descriptors.mqtt, bound)
                undo.callback(listener.stop)
                listeners.append(listener)
            self._broker, self._listeners = broker, listeners
            undo.push_async_callback(asyncio.to_thread, self._recovery.stop)
            self._recovery.start()
            if settings.http is not None:
                self._http = http = await asyncio.to_thread(HttpServer, self._db, settings.http, self, descriptors)
                undo.push_async_callback(asyncio.to_thread, http.stop)
                await asyncio.to_thread(http.start, reserved.take(None))
            else:
                found = FoundServer(pid=os.getpid())
                self._announcement = await asyncio.to_thread(Announcement.of, self._db, found)
            descriptors.log(settings)
            undo.pop_all()
        self._access = access if access is not self._given else None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drain the server."""
        await self.drain()

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners, in the order of the settings."""
        return tuple(self._listeners)

    @property
    def addresses(self) -> list[str]:
        """The addresses on which clients are accepted, with the ports that were taken."""
        return [address for listener in self._listeners for address in listener.addresses]

    @property
    def http(self) -> HttpServer | None:
        """The HTTP interface, if the settings have one."""
        return self._http

    @property
    def urls_of_http(self) -> list[str]:
        """The addresses of the HTTP interface, as URLs."""
        http = self._http
        return [] if http is None else [f"{http.scheme}://{address}" for address in http.addresses]

    @property
    def settings(self) -> ServerSettings:
        """The settings with which it runs."""
        return self._settings

    @property
    def restricts(self) -> bool:
        """Whether there are users, plugins or rules, by the settings that hold now: see `HttpSettings.anonymous`."""
        settings, given = self._settings, self._given
        if any(one.tls is not None and one.tls.user_from_certificate for one in settings.listeners.values()):
            return True
        return settings.authentication.restricts or settings.authorization.restricts or bool(given and given.restricts)

    @property
    def storages(self) -> Mapping[str, ts.Database]:
        """The open databases by name; ``messages`` is that of the MQTT clients."""
        return self._storages

    @property
    def traffic(self) -> Traffic:
        """What has gone through the server since it started; all zero once it has ended."""
        return self._broker.serving.traffic if self._broker is not None else Traffic()

    @property
    def budgets(self) -> Mapping[str, MemoryBudget]:
        """What clients hold of the server's memory, by what it is; empty once it has ended."""
        found: dict[str, MemoryBudget] = {}
        if self._broker is not None:
            found |= {"packets": self._broker.serving.unfinished, "connects": self._broker.serving.unadmitted}
        if self._http is not None:
            found["http"] = self._http.context.memory
        return found

    # --- other settings ---

    async def reload(self, settings: ServerSettings) -> Reloaded:
        """Have other settings hold, as far as they can while it runs; return what changed, and what needs a restart.

        Files that the settings name are read again: certificates, plugins, users and tokens. Clients that are connected
        keep what was settled with them until they connect again. What they may do, and be sent, is as the new settings
        say when it returns; their subscriptions are looked at when they connect again. A changed layout begins a new
        generation.

        Raises what entering the server raises, `SettingsError` for what can't be changed in a database that is there,
        and `InvalidArgumentError` if the server has ended. Then nothing has changed.
        """
        async with self._changing:
            broker, before = self._serving(), self._settings
            settings = settings if self._given is None else with_access_of(before, settings)
            reloaded, following = summary(before, settings), in_force(before, settings)
            await asyncio.to_thread(check_database, self._db, following)
            access = new_access(before, following)
            if access is None:  # else it has just read it
                await asyncio.to_thread(broker.serving.access.reread)
            replacement = Replacement(self._listeners)
            try:
                descriptors = Descriptors.of(
                    following, self._storages.values(), open_clients=len(broker.serving.connections)
                )
                await replacement.open(following, broker.connection, descriptors.mqtt)
                await self._take_over(following)
                self._serving()
            except BaseException:
                await replacement.undo()
                if access is not None:
                    await _close(access)
                raise
            replacement.finish()
            self._settings, self._listeners = following, replacement.listeners
            if access is not None:
                self._retired += [] if self._access is None else [self._access]
                self._access = access
            broker.use(following, access, descriptors.clients)
            await broker.renewed()
            descriptors.log(following)
            if before.log.level != following.log.level:
                set_level(following.log)
        _log.info("settings and certificates were read again", extra={"fields": attrs.asdict(reloaded)})
        return reloaded

    def _serving(self) -> Broker:
        if self._broker is None:
            raise InvalidArgumentError("the server has ended, or was not entered")
        return self._broker

    async def _take_over(self, settings: ServerSettings) -> None:
        """Change what is left to change beside the event loop: the certificate for HTTP, and the database."""
        if self._http is not None:
            await asyncio.to_thread(self._http.reload)
        await asyncio.to_thread(change_database, self._db, settings)

    @property
    def can_reread(self) -> bool:
        """Whether the server has a function for `reread`, which reads its settings."""
        return self._read is not None

    async def reread(self) -> Reloaded:
        """Read the settings again, and `reload` them. Raises what reading raises, and changes nothing then.

        Raises `InvalidArgumentError` if the server has no function that reads them.
        """
        if self._read is None:
            raise InvalidArgumentError("this server has no settings to read again: a program has made them")
        return await self.reload(await asyncio.to_thread(self._read))

    def reread_soon(self) -> Future[Reloaded]:
        """Begin `reread` in the server's event loop, and return its result to come. Called in any thread."""
        if self._loop is None:
            raise InvalidArgumentError("the server was not entered")
        return asyncio.run_coroutine_threadsafe(self.reread(), self._loop)

    # --- the end ---

    async def wait(self) -> None:
        """Wait until the server was drained or stopped, or can't go on: then raise the reason, `DatabaseClosedError`.

        Any number of tasks may wait, and each of them may be cancelled.
        """
        if self._broker is not None:
            ended = self._broker.ended
            await asyncio.wait((ended,))  # which doesn't cancel it if the waiting task is cancelled
            if not ended.cancelled():
                ended.result()

    async def drain(self) -> None:
        """Accept no more connections, complete what was requested, send DISCONNECT to the clients, and end.

        Clients are waited for as long as `Limits.stop_timeout` says, those of MQTT and of HTTP together; then their
        connections are broken off. May be called again.

        Sessions last as long as their clients have asked for; wills are published, as after any end that is not the
        client's own (MQTT 5, section 3.1.2.5).
        """
        until = asyncio.get_running_loop().time() + self._settings.limits.stop_timeout
        await self._end(lambda broker: broker.drain(until), until)

    async def stop(self) -> None:
        """End at once, as if every connection had broken; what was acknowledged is stored."""
        await self._end(Broker.stop, 0.0)

    async def _end(self, end: Callable[[Broker], Awaitable[None]], until: float) -> None:
        """End all parts; ``until``: the time of the event loop until which clients are waited for."""
        for listener in self._listeners:
            listener.stop()
        accesses, self._retired = [*self._retired, *filter(None, [self._access])], []
        self._access = None
        async with contextlib.AsyncExitStack() as last:  # each is done, whatever happens to those before it
            for access in accesses:
                last.push_async_callback(_close, access)
            if self._http is not None:
                last.push_async_callback(self._end_http, self._http, until)
            if self._announcement is not None:
                last.callback(self._announcement.withdraw)
            last.push_async_callback(self._end_broker, end)
            last.push_async_callback(asyncio.to_thread, self._recovery.stop)
            if self._http is not None:
                await asyncio.to_thread(self._http.begin_stop)

    @staticmethod
    async def _end_http(http: HttpServer, until: float) -> None:
        patience = max(until - asyncio.get_running_loop().time(), _LEAST)
        await asyncio.to_thread(http.stop, patience)

    async def _end_broker(self, end: Callable[[Broker], Awaitable[None]]) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await end(broker)


async def _close(access: Access) -> None:
    """End its threads, beside the event loop: a plugin may take its time, and a second signal is to be heard."""
    access.end()
    await asyncio.to_thread(access.join)
