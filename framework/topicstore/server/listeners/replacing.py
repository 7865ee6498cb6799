"""Replacement of a running server's listeners, which reuses sockets whose addresses stay the same."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Sequence

from topicstore.server.config.model import ServerSettings

from .listener import Listener
from .peer import ConnectionFactory
from .reserving import NOT_HERE, ListenError, Place, bind, check_apart, places_of

__all__ = ["Replacement"]

_log = logging.getLogger("topicstore.server")


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
        for name in sorted(new, key=lambda name: name not in running):  # names that stay keep their ports
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
