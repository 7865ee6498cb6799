"""One listener: its sockets, who accepts on them, and changing certificates while it serves."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial

from topicstore.contract.errors import InvalidArgumentError
from topicstore.server.addresses import Address, written_address
from topicstore.server.limits import Limits
from topicstore.server.settings import ListenerSettings

from .handshake import FailedHandshakes, Handshake
from .peer import ConnectionFactory, Scheme, Via
from .tls import tls_context, unusable
from .websocket import WebSocketEdge

__all__ = ["ListenError", "Listener", "listen", "read_tls"]

_BACKLOG = 4_096


class ListenError(InvalidArgumentError):
    """A listener can't be opened or changed: an address in use, or a certificate that can't be read."""


def read_tls(name: str, settings: ListenerSettings) -> ssl.SSLContext | None:
    """Return what a listener needs for TLS, read from its files; None if it speaks none. Raises `ListenError`."""
    tls = settings.tls
    if tls is None:
        return None
    try:
        return tls_context(tls, protocol="mqtt" if settings.protocol == "mqtt" else "http/1.1")
    except OSError as bad:
        raise ListenError(f"listener {name}: {unusable(tls, bad)}") from bad


class Listener:
    """Sockets that accept connections. Made by `listen`; everything is called in the event loop."""

    def __init__(self, name: str, settings: ListenerSettings, limits: Limits, connect: ConnectionFactory) -> None:
        self._settings, self._limits = settings, limits
        self._connect = connect
        self.via = _via(name, settings)
        self._factory = self._factory_for(connect)
        self._failed = FailedHandshakes(name)
        self._servers: list[asyncio.Server] = []
        self._reloading = asyncio.Lock()

    def _factory_for(self, connect: ConnectionFactory) -> Callable[[], asyncio.Protocol]:
        via, settings, limits = self.via, self._settings, self._limits
        if settings.protocol == "websocket":
            return lambda: WebSocketEdge(connect, via, path=settings.path, origins=settings.origins, limits=limits)
        return lambda: connect(via)

    def same(self, settings: ListenerSettings, limits: Limits) -> bool:
        """Return whether settings say nothing new: neither they nor files that they name."""
        return (settings, limits) == (self._settings, self._limits) and settings.tls is None

    @property
    def address(self) -> Address:
        """The address that its settings say."""
        return self._settings.listen

    @property
    def addresses(self) -> list[str]:
        """The addresses on which it listens, with the ports that were taken."""
        return [written_address(one.getsockname()) for server in self._servers for one in server.sockets]

    @property
    def urls(self) -> list[str]:
        """Its addresses as URLs."""
        path = self._settings.path if self._settings.protocol == "websocket" else ""
        return [f"{self.via.scheme}://{address}{path}" for address in self.addresses]

    def _context(self) -> ssl.SSLContext | None:
        return read_tls(self.via.name, self._settings)

    async def _serve(self, context: ssl.SSLContext | None, bound: socket.socket | None) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        factory = self._factory
        if context is not None:
            seconds = max(self._limits.connect_timeout, 0.001)
            factory = partial(Handshake, self._factory, context, seconds, self._failed)
        if bound is not None:
            return await loop.create_server(factory, sock=bound, backlog=_BACKLOG)
        address = self._settings.listen
        return await loop.create_server(factory, address.host, address.port, backlog=_BACKLOG)

    async def start(self) -> None:
        """Bind the address, and accept. Raises `ListenError`."""
        context = self._context()
        try:
            self._servers = [await self._serve(context, None)]
        except OSError as bad:
            reason = os.strerror(bad.errno) if bad.errno and bad.errno > 0 else str(bad)
            raise ListenError(f"can't listen on {self._settings.listen}: {reason}") from bad

    async def reload(self) -> None:
        """Read the TLS files again; connections from now on get what is in them, those that are there keep theirs.

        The sockets stay bound, and no client is refused meanwhile. Raises `ListenError`; then nothing is changed.
        """
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        context = self._context()
        if context is None:
            return
        before = self._servers
        now = await self._taken_over(context, before)
        if self._servers is not before:  # stopped meanwhile
            _close(now)
            return
        self._servers = now
        _close(before)

    async def changed(self, settings: ListenerSettings, limits: Limits) -> Listener:
        """Return a listener with other settings, but the same address, on the same sockets; TLS files are read again.

        Until this one is stopped, both accept, so that no client is refused. Raises `ListenError`.
        """
        following = Listener(self.via.name, settings, limits, self._connect)
        following._servers = await following._taken_over(following._context(), self._servers)
        return following

    async def _taken_over(
        self, context: ssl.SSLContext | None, before: Iterable[asyncio.Server]
    ) -> list[asyncio.Server]:
        """Return servers that accept on the sockets of others."""
        now: list[asyncio.Server] = []
        try:
            for number in [one.fileno() for server in before for one in server.sockets]:
                bound = socket.socket(fileno=os.dup(number))
                try:
                    now.append(await self._serve(context, bound))
                except BaseException:
                    bound.close()
                    raise
        except BaseException as bad:
            _close(now)
            if isinstance(bad, OSError):  # such as too many open files
                raise ListenError(f"listener {self.via.name}: its sockets can't be taken over: {bad}") from bad
            raise
        return now

    def stop(self) -> None:
        """Accept no more; connections that are there stay."""
        _close(self._servers)
        self._servers = []


def _close(servers: Iterable[asyncio.Server]) -> None:
    for server in servers:
        server.close()


def _via(name: str, settings: ListenerSettings) -> Via:
    schemes: tuple[Scheme, Scheme] = ("mqtt", "mqtts") if settings.protocol == "mqtt" else ("ws", "wss")
    return Via(
        name=name,
        zone=settings.zone,
        scheme=schemes[settings.tls is not None],
        certificate_users=settings.tls is not None and settings.tls.user_from_certificate,
        behind_proxy=settings.behind_proxy,
    )


async def listen(name: str, settings: ListenerSettings, limits: Limits, connect: ConnectionFactory) -> Listener:
    """Open a listener; ``connect`` is called for every connection. Raises `ListenError`."""
    listener = Listener(name, settings, limits, connect)
    await listener.start()
    return listener
