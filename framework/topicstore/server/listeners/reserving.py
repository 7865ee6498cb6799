"""Binding the addresses of a server, before anything accepts on them.

An IPv6 address is for IPv6 only (IPV6_V6ONLY), also ``[::]``, so that it and ``0.0.0.0`` can have the same port.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from itertools import combinations
from typing import Any, Self

import attrs

from topicstore.contract.errors import InvalidArgumentError
from topicstore.runtime.closing import Taken
from topicstore.server.addresses import Address, written_address
from topicstore.server.settings import ServerSettings

__all__ = ["NOT_HERE", "ListenError", "Place", "Reserved", "bind", "check_apart", "places_of", "unusable"]

_ANY = ("0.0.0.0", "::")  # noqa: S104 - nothing is bound by this
NOT_HERE = frozenset((errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL))
"""The errors of a machine without IPv6, of which a name such as ``localhost`` may have an address all the same."""


class ListenError(InvalidArgumentError):
    """A listener can't be opened or changed: an address in use, or a certificate that can't be read."""


@attrs.frozen
class Place:
    """Where a socket is bound: one of the addresses that a host and a port stand for."""

    family: int
    at: tuple[Any, ...] = attrs.field(eq=lambda at: (at[0], at[1], *at[3:]))  # the flow of IPv6 is no part of it

    @classmethod
    def of(cls, bound: socket.socket) -> Self:
        """Return where a socket is bound."""
        return cls(int(bound.family), bound.getsockname())

    @property
    def port(self) -> int:
        """The port; 0 for a free one."""
        return int(self.at[1])

    def meets(self, other: Place) -> bool:
        """Return whether only one socket can listen at both."""
        if self.family != other.family or self.port != other.port or not self.port:
            return False
        return self.at[0] == other.at[0] or self.at[0] in _ANY or other.at[0] in _ANY

    def shares(self, other: Place) -> bool:
        """Return whether they differ in nothing but the port."""
        return (self.family, self.at[0], self.at[3:]) == (other.family, other.at[0], other.at[3:])

    def bind(self) -> socket.socket:
        """Return a new socket that is bound there, and doesn't listen yet. Raises OSError."""
        with Taken() as taken:
            bound = socket.socket(self.family, socket.SOCK_STREAM)
            taken.add(bound.close)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.setblocking(False)
            bound.bind(self.at)
            return bound

    def __str__(self) -> str:
        return written_address(self.at)


def unusable(address: object, bad: OSError, what: str = "") -> ListenError:
    """Return the error for an address that can't be had."""
    reason = os.strerror(bad.errno) if bad.errno and bad.errno > 0 else str(bad)
    return ListenError(f"can't listen on {address}{what}: {reason}")


def places_of(address: Address, what: str = "") -> list[Place]:
    """Return all that an address stands for; it may wait for the name to be found. Raises `ListenError`."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as bad:
        raise unusable(address, bad, what) from bad
    return list(dict.fromkeys(Place(int(family), at) for family, _, _, _, at in found))


def bind(address: Address, places: Iterable[Place], what: str = "") -> list[socket.socket]:
    """Return sockets that are bound to all places of an address that this machine has. Raises `ListenError`."""
    missing: OSError | None = None
    with Taken() as taken:
        bound: list[socket.socket] = []
        for place in places:
            try:
                one = place.bind()
            except OSError as bad:
                if bad.errno not in NOT_HERE:
                    raise unusable(address, bad, what) from bad
                missing = bad
            else:
                taken.add(one.close)
                bound.append(one)
        if missing is not None and not bound:
            raise unusable(address, missing, what) from missing
        return bound


def check_apart(wanted: Iterable[tuple[str, Place]]) -> None:
    """Raise `ListenError` if nobody could listen at two of several places, each given with who is to have it."""
    for (name, place), (other, there) in combinations(wanted, 2):
        if place.meets(there):
            raise ListenError(f"can't listen on {there} for {other}: {place} is for {name} already")


class Reserved:
    """Sockets that are bound to the addresses of a server's settings, and that nobody listens on yet.

    Listeners take theirs. Those that nobody has taken are closed by `close`, or at the end of the ``with`` block.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Bind all addresses of listeners and of HTTP. Raises `ListenError`; then none is bound."""
        self._sockets: dict[str | None, list[socket.socket]] = {}
        named: dict[str | None, tuple[Address, ...]] = {one: (had.listen,) for one, had in settings.listeners.items()}
        if settings.http is not None:
            named[None] = settings.http.listen.all
        found = {name: [(one, places_of(one, _what(name))) for one in each] for name, each in named.items()}
        owners = {name: "HTTP" if name is None else f"the listener {name}" for name in named}
        check_apart((owners[name], place) for name, each in found.items() for _, places in each for place in places)
        with Taken() as taken:
            taken.add(self.close)
            for name, each in found.items():
                self._sockets[name] = []
                for address, places in each:
                    self._sockets[name] += bind(address, places, _what(name))

    def take(self, name: str | None) -> list[socket.socket]:
        """Return the sockets of a listener, or of HTTP (None), which are the caller's from now on."""
        return self._sockets.pop(name)

    def close(self) -> None:
        """Close the sockets that nobody has taken. May be called again."""
        left, self._sockets = self._sockets, {}
        for sockets in left.values():
            for one in sockets:
                one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _what(name: str | None) -> str:
    return "" if name is not None else " for HTTP"
