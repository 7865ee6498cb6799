"""Listeners: their sockets, and replacing their certificates, or the listeners themselves, while a server runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from ipaddress import ip_network
from typing import TYPE_CHECKING

import msgspec

from topicstore.server.config.model import Limits, ListenerSettings, ServerSettings
from topicstore.server.config.units import Address

from .accepting import Acceptor
from .peer import ConnectionFactory, Scheme, Via
from .reserving import NOT_HERE, ListenError, Place, bind, check_apart, places_of, unusable
from .tls import tls_context, unusable_files

if TYPE_CHECKING:
    from .proxy_header import Source

__all__ = ["Listener", "Replacement", "listen", "read_tls"]

_BACKLOG = 4_096
_log = logging.getLogger("topicstore.server")


def read_tls(name: str, settings: ListenerSettings) -> ssl.SSLContext | None:
    """Read a listener's certificate files, and return the TLS context; None without TLS. Raises `ListenError`."""
    tls = settings.tls
    if tls is None:
        return None
    try:
        return tls_context(tls, protocol="mqtt" if settings.protocol == "mqtt" else "http/1.1")
    except OSError as bad:
        raise ListenError(f"listener {name}: {unusable_files(tls, bad)}") from bad


class Listener:
    """The sockets that accept connections for one listener. Created by `listen`; used in the event loop only."""

    def __init__(
        self,
        name: str,
        settings: ListenerSettings,
        limits: Limits,
        connect: ConnectionFactory,
        below: int,
        key: bytes | None = None,
    ) -> None:
        self._settings, self._limits = settings, limits
        self._key = key if settings.protocol == "mqtt" and not settings.proxies else None
        self._connect, self._below = connect, below
        self.via = _via(name, settings)
        self._factory = self._factory_for(connect)
        self._servers: list[Acceptor] = []
        """The acceptors, one for each socket."""
        self._closed: list[Place] = []
        """The addresses that were closed until `reopen`."""
        self._stopped = False
        self._reloading = asyncio.Lock()

    def _factory_for(self, connect: ConnectionFactory) -> Callable[[Source | Via | None], asyncio.Protocol]:
        settings, limits = self._settings, self._limits
        if settings.protocol == "websocket":
            from .websocket import WebSocketEdge

            return lambda source: WebSocketEdge(
                connect, self._via_of(source), path=settings.path, origins=settings.origins, limits=limits
            )
        return lambda source: connect(self._via_of(source))

    def _via_of(self, source: Source | Via | None) -> Via:
        if isinstance(source, Via):
            return source
        return self.via if source is None else msgspec.structs.replace(self.via, source=source)

    def same(self, settings: ListenerSettings, limits: Limits) -> bool:
        """Return whether the listener can stay: equal settings without certificate files, which may have changed."""
        return (settings, limits) == (self._settings, self._limits) and settings.tls is None

    @property
    def address(self) -> Address:
        """The address in the settings."""
        return self._settings.listen

    @property
    def places(self) -> list[Place]:
        """The addresses to which the sockets are bound."""
        return [Place.of(one) for server in self._servers for one in server.sockets]

    @property
    def addresses(self) -> list[str]:
        """The bound addresses as ``HOST:PORT``; a port 0 of the settings is replaced by the bound port."""
        return [str(place) for place in self.places]

    @property
    def urls(self) -> list[str]:
        """The bound addresses as URLs."""
        path = self._settings.path if self._settings.protocol == "websocket" else ""
        return [f"{self.via.scheme}://{address}{path}" for address in self.addresses]

    def _serve(self, sockets: Sequence[socket.socket], context: ssl.SSLContext | None) -> list[Acceptor]:
        """Accept on bound sockets, which the acceptors then own. Raises `ListenError`; then the sockets are closed."""
        handshake, proxies = max(self._limits.connect_timeout, 0.001), list(map(ip_network, self._settings.proxies))
        now: list[Acceptor] = []
        try:
            for one in sockets:
                one.listen(_BACKLOG)
                now.append(
                    Acceptor(self.via.name, one, self._factory, self._below, handshake, context, proxies, self._key)
                )
        except BaseException as bad:  # no socket stays open if one fails
            _close(now)
            for one in sockets:
                one.close()
            if isinstance(bad, OSError):  # an address in use, for example
                raise unusable(self._settings.listen, bad) from bad
            raise
        return now

    def read_files(self) -> ssl.SSLContext | None:
        """Read the certificate files, and return the TLS context; None without TLS. Raises `ListenError`."""
        return read_tls(self.via.name, self._settings)

    async def start(self, context: ssl.SSLContext | None, bound: Sequence[socket.socket]) -> None:
        """Accept on bound sockets, which the listener then owns. Raises `ListenError`; then the sockets are closed."""
        self._servers = self._serve(bound, context)

    def duplicate(self, place: Place) -> socket.socket:
        """Duplicate the socket that is bound to an address; the caller owns the duplicate. Raises `ListenError`."""
        numbers = [one.fileno() for server in self._servers for one in server.sockets if Place.of(one) == place]
        if not numbers:
            raise ListenError(f"listener {self.via.name}: it was stopped meanwhile")
        try:
            return socket.socket(fileno=os.dup(numbers[0]))
        except OSError as bad:  # too many open files, for example
            raise ListenError(f"listener {self.via.name}: its sockets can't be taken over: {bad}") from bad

    def close(self, place: Place) -> None:
        """Stop accepting on an address and release it, until `reopen`."""
        for server in list(self._servers):
            if [Place.of(one) for one in server.sockets] == [place]:
                self._servers.remove(server)
                server.close()
                self._closed.append(place)

    async def reopen(self) -> None:
        """Accept again on the addresses that `close` has closed, unless it was stopped. Raises `ListenError`."""
        closed, self._closed = self._closed, []
        if closed and not self._stopped:
            self._servers += self._serve(bind(self._settings.listen, closed), self.read_files())

    async def reload(self) -> None:
        """Read the certificate files again, for new connections; open connections keep their certificate.

        The sockets stay bound, so no client is refused meanwhile. Raises `ListenError`; then nothing is changed.
        """
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        context = self.read_files()
        if context is None:
            return
        before = self._servers
        now = self._serve([self.duplicate(place) for place in self.places], context)
        if self._servers is not before:  # the listener was stopped meanwhile
            _close(now)
            return
        self._servers = now
        _close(before)

    def stop(self) -> None:
        """Stop accepting; open connections stay."""
        self._stopped = True
        _close(self._servers)
        self._servers, self._closed = [], []


def _close(servers: Iterable[Acceptor]) -> None:
    for server in servers:
        server.close()


def _via(name: str, settings: ListenerSettings) -> Via:
    schemes: tuple[Scheme, Scheme] = ("mqtt", "mqtts") if settings.protocol == "mqtt" else ("ws", "wss")
    return Via(
        name=name,
        zone=settings.zone,
        scheme=schemes[settings.tls is not None],
        certificate_users=settings.tls is not None and settings.tls.user_from_certificate,
        behind_proxy=settings.behind_proxy or bool(settings.proxies),
        anonymous=settings.anonymous,
        sources=settings.sources,
        redirect=settings.redirect,
    )


async def listen(
    name: str,
    settings: ListenerSettings,
    limits: Limits,
    connect: ConnectionFactory,
    below: int,
    bound: Sequence[socket.socket] | None = None,
    key: bytes | None = None,
) -> Listener:
    """Open a listener; ``connect`` is called for each connection, ``below`` and ``key`` are arguments of `Acceptor`.

    ``bound`` are bound sockets, which the listener then owns; by default the address of the settings is bound. Raises
    `ListenError`.
    """
    listener = Listener(name, settings, limits, connect, below, key)
    try:
        context = listener.read_files()
    except BaseException:
        for one in bound or ():
            one.close()
        raise
    if bound is None:
        bound = bind(settings.listen, await asyncio.to_thread(places_of, settings.listen))
    await listener.start(context, bound)
    return listener


class Replacement:
    """A replacement of running listeners: `open` the new ones, and then either `finish` or `undo`.

    Sockets stay bound, even under another listener's name, so that no client is refused: until `finish`, both the old
    and the new listener accept. If an address can only be bound after another one is closed, such as ``0.0.0.0`` and
    ``127.0.0.1``, the old one is closed first; clients that connect in between are refused.
    """

    def __init__(self, running: Sequence[Listener]) -> None:
        self._running = running
        self.listeners: list[Listener] = []
        """All listeners of the new settings, in their order, including unchanged ones."""
        self._free: list[tuple[Listener, Place]] = []
        """The sockets of replaced listeners that no new listener has taken over."""
        self._sockets: dict[str, list[socket.socket]] = {}
        """The bound sockets of new listeners before they accept, by name."""

    async def open(
        self, settings: ServerSettings, connect: ConnectionFactory, below: int, key: bytes | None = None
    ) -> None:
        """Open the listeners of new settings; certificate files are read again. Raises `ListenError`: then call `undo`.

        ``below`` and ``key`` are the arguments of `Acceptor`.
        """
        running = {listener.via.name: listener for listener in self._running}
        new: dict[str, tuple[Listener, ssl.SSLContext | None]] = {}
        for name, one in settings.listeners.items():
            listener = running.get(name)
            if listener is None or not listener.same(one, settings.limits):
                listener = Listener(name, one, settings.limits, connect, below, key)
                new[name] = listener, listener.read_files()
            self.listeners.append(listener)
        wanted = {one.via.name: await asyncio.to_thread(places_of, one.address) for one in self.listeners}
        check_apart((f"the listener {name}", place) for name, places in wanted.items() for place in places)
        self._free = [(one, place) for one in self._running if one not in self.listeners for place in one.places]
        later: list[tuple[Listener, Place]] = []
        for name in sorted(new, key=lambda name: name not in running):  # listeners that stay choose ports first
            self._sockets[name] = []
            later += [(new[name][0], place) for place in wanted[name] if not self._take_over(new[name][0], place)]
        await self._bind(later)
        for name, (listener, context) in new.items():
            await listener.start(context, self._sockets.pop(name))

    def _take_over(self, listener: Listener, place: Place) -> bool:
        """Take over the socket that is bound to an address, for a new listener; return whether there is one."""
        for one in sorted(self._free, key=lambda one: one[0].via.name != listener.via.name):
            before, bound = one
            if place == bound or (not place.port and before.address == listener.address and place.shares(bound)):
                self._sockets[listener.via.name].append(before.duplicate(bound))
                self._free.remove(one)
                return True
        return False

    async def _bind(self, wanted: Sequence[tuple[Listener, Place]]) -> None:
        """Bind addresses that no listener has; addresses that conflict with old sockets come last."""
        blocked: list[tuple[Listener, Place]] = []
        for listener, place in wanted:
            sockets = self._sockets[listener.via.name]
            try:
                sockets += bind(listener.address, [place])
            except ListenError as bad:
                found = bad.__cause__.errno if isinstance(bad.__cause__, OSError) else None
                if found == errno.EADDRINUSE and any(place.meets(bound) for _, bound in self._free):
                    blocked.append((listener, place))
                elif not sockets or found not in NOT_HERE:
                    raise
        for listener, place in blocked:
            for one in [one for one in self._free if place.meets(one[1])]:
                before, bound = one
                before.close(bound)
                self._free.remove(one)
                text = "the listener %s was closed at %s, so that the listener %s can be opened at %s"
                _log.info(text, before.via.name, bound, listener.via.name, place)
            self._sockets[listener.via.name] += bind(listener.address, [place])

    def finish(self) -> None:
        """Stop the replaced listeners."""
        for listener in self._running:
            if listener not in self.listeners:
                listener.stop()

    async def undo(self) -> None:
        """Stop the new listeners, and restore the old ones. Failures to restore a listener are logged."""
        for listener in self.listeners:
            if listener not in self._running:
                listener.stop()
        for sockets in self._sockets.values():
            for one in sockets:
                one.close()
        for listener in self._running:
            try:
                await listener.reopen()
            except ListenError as bad:
                _log.error("the listener %s, which was closed for another one, is not back: %s", listener.via.name, bad)
