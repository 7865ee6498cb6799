"""`Server`: an MQTT server that a program embeds, on a database that the program has opened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import attrs

import topicstore as ts
from topicstore.contract.errors import InvalidArgumentError

from .access.access import Access
from .access.bans import FILE, BanFile, Bans
from .config.model import MESSAGES, Limits, Rule, ServerSettings
from .databases import change_database, check_database
from .http.discovery import Announcement, FoundServer
from .listeners import Listener, Replacement, Reserved, listen
from .listeners.tls import Expiry, read_ends
from .logs import set_level
from .mqtt.broker import Broker
from .mqtt.sys_topics import Traffic
from .recovering import Recovery
from .reload import Reloaded, in_force, new_access, summary, with_access_of
from .resource_limits import Descriptors, MemoryBudget

if TYPE_CHECKING:
    from topicstore.sessions import Session

    from .cluster import SiteTls
    from .http.http_server import HttpServer
    from .queue_bounds import QueueBounds

__all__ = ["Server"]

_SETTLE = 1.0
"""Seconds between two attempts to write settings of the database that another site may have to write."""
_LEAST = 0.1
"""Seconds that HTTP requests have to end, even if MQTT clients have used up the stop timeout."""

_log = logging.getLogger("topicstore.server")


class Server:
    """An MQTT server in the running event loop.

    ::

        with ts.open("data") as db:
            async with Server(db, ServerSettings()) as server:
                print(server.addresses)
                await server.wait()

    The program owns the database: the program may publish and read while the server serves, and closes the database
    after the server has ended. Leaving the block drains the server. All methods except `reread_soon` must be called in
    the event loop in which the server was entered.
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
        reserved: Reserved | None = None,
    ) -> None:
        """Create a server, which begins to serve when it is entered.

        access:   the access rules; by default those of the settings.
        read:     reads the settings again, for `reread`; called in a worker thread.
        file:     the file that ``read`` reads, in which `change_rules_soon` changes the access rules.
        storages: all open databases by name, including ``db``, for the HTTP interface; by default only ``db``.
        reserved: the bound sockets of all addresses of the settings; by default entering the server binds them.
        """
        self._db = db
        self._read, self._file = read, file
        self._storages: Mapping[str, ts.Database] = storages if storages is not None else {MESSAGES: db}
        self._settings = settings if settings is not None else ServerSettings()
        self._given = access
        self._reserved = reserved
        self._broker: Broker | None = None
        self._listeners: list[Listener] = []
        self._http: HttpServer | None = None
        self._tls: SiteTls | None = None
        """TLS of connections to other sites; None without a cluster."""
        self._recovery = Recovery(self._storages)
        self._queue_bounds: QueueBounds | None = None
        """The bounds of messages that wait for sessions; None until the settings have some."""
        self._expiry = Expiry()
        self._bans = Bans(BanFile(Path(db.path) / FILE))
        self._announcement: Announcement | None = None
        """The file that announces the running server, if it has no HTTP interface."""
        self._access: Access | None = None
        """The access rules, if the server must close them; None if the program has passed them."""
        self._retired: list[Access] = []
        """The access rules before settings were changed, which clients connected at that time may still use."""
        self._changing = asyncio.Lock()
        """Held while settings are changed."""
        self._unsettled: str | None = None
        """The reason why settings of the database can't be written on this site of a cluster; None if they are."""
        self._settling: asyncio.Task[None] | None = None
        """The task that writes them later; None if no cluster shares the database."""
        self._changing_rules = asyncio.Lock()
        """Held while access rules are changed in the settings file."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the server was entered."""

    async def __aenter__(self) -> Self:
        """Open the listeners. Raises `ListenError`, and the errors of `Access`."""
        settings, listeners = self._settings, list[Listener]()
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as undo:
            reserved = self._reserved if self._reserved is not None else await asyncio.to_thread(Reserved, settings)
            undo.callback(reserved.close)
            access = self._given
            if access is None:
                access = Access(settings.authentication, settings.authorization)
                undo.callback(access.close)
            await self._change_database(settings)
            if self._db.cluster is not None:
                self._settling = asyncio.create_task(self._settle())
                undo.push_async_callback(self._end_settling)
            http_server = await asyncio.to_thread(_http_server) if settings.http is not None else None
            descriptors = Descriptors.of(settings, self._storages.values())
            await asyncio.to_thread(self._bans.reread)
            if self._db.cluster is not None:
                from .cluster import SiteTls  # imported only on a site of a cluster

                self._tls = await asyncio.to_thread(SiteTls, settings.cluster)
            broker = Broker(self._db, settings, access, self._bans, descriptors.clients, self._tls)
            undo.push_async_callback(broker.stop)
            for name, one in settings.listeners.items():
                bound = reserved.take(name)
                listener = await listen(
                    name, one, settings.limits, broker.connection, descriptors.mqtt, bound, broker.key
                )
                undo.callback(listener.stop)
                listeners.append(listener)
            self._broker, self._listeners = broker, listeners
            undo.push_async_callback(asyncio.to_thread, self._recovery.stop)
            undo.push_async_callback(asyncio.to_thread, self._end_queue_bounds)
            self._recovery.start()
            self._bound_queues(settings.limits)
            if settings.http is not None and http_server is not None:
                self._http = http = await asyncio.to_thread(
                    http_server, self._db, settings.http, self, descriptors, self._tls
                )
                undo.push_async_callback(asyncio.to_thread, http.stop)
                await asyncio.to_thread(http.start, reserved.take(None))
            else:
                found = FoundServer(pid=os.getpid())
                self._announcement = await asyncio.to_thread(Announcement.of, self._db, found)
            ends = await asyncio.to_thread(read_ends, settings)
            descriptors.log(settings)
            self._expiry.use(ends)
            undo.pop_all()
        self._access = access if access is not self._given else None
        urls = [url for one in self._listeners for url in one.urls] + self.urls_of_http
        fields = {"version": ts.__version__, "pid": os.getpid(), "path": str(self._db.path), "urls": urls}
        _log.info("the server serves", extra={"fields": fields})
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
        """The addresses on which clients are accepted, with the ports that were bound."""
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
        """The settings in force."""
        return self._settings

    @property
    def restricts(self) -> bool:
        """Whether the settings in force restrict access by users, plugins or rules: see `HttpSettings.anonymous`."""
        settings, given = self._settings, self._given
        for one in settings.listeners.values():
            if one.anonymous == "never" or (one.tls is not None and one.tls.user_from_certificate):
                return True
        return settings.authentication.restricts or settings.authorization.restricts or bool(given and given.restricts)

    @property
    def bans(self) -> Bans:
        """The bans, in a file of the database's directory. May be used in any thread."""
        return self._bans

    @property
    def storages(self) -> Mapping[str, ts.Database]:
        """The open databases by name; ``messages`` is the database of the MQTT clients."""
        return self._storages

    @property
    def traffic(self) -> Traffic:
        """Counters of packets and bytes since the server started; all zero once it has ended."""
        return self._broker.serving.traffic if self._broker is not None else Traffic()

    def address_of(self, session: Session) -> str | None:
        """Return the address and port of a session's client; None if it isn't connected to this server. Thread-safe."""
        return None if self._broker is None else self._broker.serving.address_of(session)

    @property
    def certificate_ends(self) -> Mapping[str, datetime]:
        """The end of validity of the certificates in use, by the section of the settings that names them."""
        return self._expiry.ends

    @property
    def budgets(self) -> Mapping[str, MemoryBudget]:
        """The budgets of memory that clients occupy, by purpose; empty once the server has ended."""
        found: dict[str, MemoryBudget] = {}
        if self._broker is not None:
            found |= {"packets": self._broker.serving.unfinished, "connects": self._broker.serving.unadmitted}
        if self._http is not None:
            found["http"] = self._http.context.memory
        return found

    # --- other settings ---

    async def reload(self, settings: ServerSettings) -> Reloaded:
        """Apply new settings, as far as a running server can; return the changes, and the settings that need a restart.

        Files that the settings name are read again: certificates, plugins, users and tokens. Connected clients keep
        their negotiated limits until they connect again. The new access rules apply to their actions and deliveries
        when this method returns, and to their existing subscriptions when they connect again. A changed layout begins a
        new generation.

        Raises the errors of `__aenter__`, `SettingsError` for a setting that is fixed in an existing database, and
        `InvalidArgumentError` if the server has ended. Then nothing has changed.
        """
        async with self._changing:
            broker, before = self._serving(), self._settings
            settings = settings if self._given is None else with_access_of(before, settings)
            reloaded, following = summary(before, settings), in_force(before, settings)
            await asyncio.to_thread(check_database, self._db, following)
            await asyncio.to_thread(self._bans.reread)
            tls = self._tls
            context = None if tls is None else await asyncio.to_thread(tls.read)
            ends = await asyncio.to_thread(read_ends, following)
            access = new_access(before, following)
            if access is None:  # a new `Access` has just read its files
                await asyncio.to_thread(broker.serving.access.reread)
            replacement = Replacement(self._listeners)
            try:
                descriptors = Descriptors.of(
                    following, self._storages.values(), open_clients=len(broker.serving.connections)
                )
                await replacement.open(following, broker.connection, descriptors.mqtt, broker.key)
                await self._take_over(following)
                self._serving()
            except BaseException:
                await replacement.undo()
                if access is not None:
                    await _close(access)
                raise
            replacement.finish()
            if tls is not None and context is not None:
                tls.use(context)
            self._settings, self._listeners = following, replacement.listeners
            self._expiry.use(ends)
            if access is not None:
                self._retired += [] if self._access is None else [self._access]
                self._access = access
            broker.use(following, access, descriptors.clients)
            self._bound_queues(following.limits)
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
        """Apply new settings to the HTTP certificate and the database, in worker threads."""
        if self._http is not None:
            await asyncio.to_thread(self._http.reload)
        await self._change_database(settings)

    async def _change_database(self, settings: ServerSettings) -> None:
        """Apply settings to the database; `_settle` repeats it on a site that can't write them yet."""
        unsettled = await asyncio.to_thread(change_database, self._db, settings)
        if unsettled is not None and unsettled != self._unsettled:
            _log.info("persistence rules and retention of the settings are not written here: %s", unsettled)
        self._unsettled = unsettled

    async def _settle(self) -> None:
        """Apply the settings that the owner of a cluster's shard 0 writes, once this site is the owner."""
        failed = ""
        while True:
            await asyncio.sleep(_SETTLE)
            if self._unsettled is None:
                continue
            try:
                async with self._changing:
                    await self._change_database(self._settings)
            except ts.DatabaseClosedError:
                return
            except ts.TopicstoreError as bad:
                if str(bad) != failed:
                    failed = str(bad)
                    _log.warning("settings could not be applied to the database: %s", failed)

    async def _end_settling(self) -> None:
        task, self._settling = self._settling, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def can_reread(self) -> bool:
        """Whether the server was given a function that reads its settings, for `reread`."""
        return self._read is not None

    async def reread(self) -> Reloaded:
        """Read the settings again, and `reload` them. If reading raises, nothing changes.

        Raises `InvalidArgumentError` if the server has no function that reads them.
        """
        if self._read is None:
            raise InvalidArgumentError("this server has no settings to read again: a program has made them")
        return await self.reload(await asyncio.to_thread(self._read))

    async def _change_rules(self, rules: Sequence[Rule]) -> Reloaded:
        """Replace the access rules in the settings file, and `reread`. If `reread` raises, the file is unchanged.

        Raises `InvalidArgumentError` if the server has no file, and `SettingsError` if the file can't be changed.
        """
        if self._file is None:
            raise InvalidArgumentError("this server has no settings file in which access rules could be changed")
        from .config.edit import replace_rules, restore  # imported late: few servers change rules

        async with self._changing_rules:
            before = await asyncio.to_thread(replace_rules, self._file, rules)
            try:
                reloaded = await self.reread()
                if tuple(self._settings.authorization.rules) != tuple(rules):
                    raise InvalidArgumentError("rules of the environment, or of the program, count before the file")
            except BaseException:
                await asyncio.to_thread(restore, self._file, before)
                raise
            return reloaded

    def change_rules_soon(self, rules: Sequence[Rule]) -> Future[Reloaded]:
        """Begin to replace the access rules in the settings file, and to read it again. Called in any thread.

        The future raises the errors of `reread`, and `InvalidArgumentError` if there is no file, or if it can't be
        changed; then the file is unchanged.
        """
        if self._loop is None:
            raise InvalidArgumentError("the server was not entered")
        return asyncio.run_coroutine_threadsafe(self._change_rules(rules), self._loop)

    def reread_soon(self) -> Future[Reloaded]:
        """Begin `reread` in the server's event loop, and return its future. Called in any thread."""
        if self._loop is None:
            raise InvalidArgumentError("the server was not entered")
        return asyncio.run_coroutine_threadsafe(self.reread(), self._loop)

    # --- the end ---

    async def wait(self) -> None:
        """Wait until the server has ended. Raises `DatabaseClosedError` if it ended because the database was closed.

        Any number of tasks may wait, and each of them may be cancelled.
        """
        if self._broker is not None:
            ended = self._broker.ended
            await asyncio.wait((ended,))  # `wait` doesn't cancel `ended` with this task
            if not ended.cancelled():
                ended.result()

    async def drain(self) -> None:
        """Accept no more connections, serve pending requests, send DISCONNECT to the clients, and end.

        The server waits for MQTT and HTTP clients together at most `Limits.stop_timeout` seconds, then closes their
        connections. Idempotent.

        Sessions last until their session expiry. Wills are published, as after any end without the client's DISCONNECT
        (MQTT 5, section 3.1.2.5).
        """
        until = asyncio.get_running_loop().time() + self._settings.limits.stop_timeout
        await self._end(lambda broker: broker.drain(until), until)

    async def stop(self) -> None:
        """End at once, as if every connection had been lost; acknowledged messages are stored."""
        await self._end(Broker.stop, 0.0)

    async def _end(self, end: Callable[[Broker], Awaitable[None]], until: float) -> None:
        """End all parts; ``until`` is the event loop's time at which waiting for clients ends."""
        broker = self._broker
        if broker is not None:
            _log.info("the server stops", extra={"fields": {"clients": broker.serving.traffic.connected}})
        self._expiry.stop()
        for listener in self._listeners:
            listener.stop()
        accesses, self._retired = [*self._retired, *filter(None, [self._access])], []
        self._access = None
        async with contextlib.AsyncExitStack() as last:  # each callback runs even if an earlier one raises
            for access in accesses:
                last.push_async_callback(_close, access)
            if self._http is not None:
                last.push_async_callback(self._end_http, self._http, until)
            if self._announcement is not None:
                last.callback(self._announcement.withdraw)
            last.push_async_callback(self._end_broker, end)
            last.push_async_callback(self._end_settling)
            last.push_async_callback(asyncio.to_thread, self._recovery.stop)
            last.push_async_callback(asyncio.to_thread, self._end_queue_bounds)
            if self._http is not None:
                await asyncio.to_thread(self._http.begin_stop)
        if broker is not None:
            _log.info("the server has stopped")

    def _bound_queues(self, limits: Limits) -> None:
        """Apply the bounds of messages that wait for sessions. No thread is started before there are some."""
        if self._queue_bounds is None and (limits.max_queued, limits.max_queued_bytes) != (None, None):
            from .queue_bounds import QueueBounds

            self._queue_bounds = QueueBounds(self._db)
        if self._queue_bounds is not None:
            self._queue_bounds.use(limits)

    def _end_queue_bounds(self) -> None:
        if self._queue_bounds is not None:
            self._queue_bounds.stop()

    @staticmethod
    async def _end_http(http: HttpServer, until: float) -> None:
        patience = max(until - asyncio.get_running_loop().time(), _LEAST)
        await asyncio.to_thread(http.stop, patience)

    async def _end_broker(self, end: Callable[[Broker], Awaitable[None]]) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await end(broker)


def _http_server() -> type[HttpServer]:
    """Return the class of the HTTP interface; import the libraries that only HTTP needs, before clients connect."""
    from .http.http_server import HttpServer

    return HttpServer


async def _close(access: Access) -> None:
    """End the threads of access rules in a worker thread: a plugin may block, and signals must still be handled."""
    access.end()
    await asyncio.to_thread(access.join)
