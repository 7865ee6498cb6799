"""Binds the addresses of a server before any socket accepts.

IPv6 sockets are for IPv6 only (IPV6_V6ONLY), so that ``[::]`` and ``0.0.0.0`` can have the same port.
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
from topicstore.runtime.closing import Closer
from topicstore.server.config.model import ServerSettings
from topicstore.server.config.units import Address, written_address

__all__ = ["NOT_HERE", "ListenError", "Place", "Reserved", "bind", "check_apart", "places_of", "unusable"]

_ANY = ("0.0.0.0", "::")  # noqa: S104 - not used for binding
NOT_HERE = frozenset((errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL))
"""The errors of a machine without IPv6, where a name such as ``localhost`` may still have an IPv6 address."""


class ListenError(InvalidArgumentError):
    """A listener can't be opened or changed: an address in use, or a certificate that can't be read."""


@attrs.frozen
class Place:
    """A socket address: one of the addresses to which a host and a port resolve."""

    family: int
    at: tuple[Any, ...] = attrs.field(eq=lambda at: (at[0], at[1], *at[3:]))  # IPv6's flow label doesn't count

    @classmethod
    def of(cls, bound: socket.socket) -> Self:
        """Return the address of a bound socket."""
        return cls(int(bound.family), bound.getsockname())

    @property
    def port(self) -> int:
        """The port; 0 for any free port."""
        return int(self.at[1])

    def meets(self, other: Place) -> bool:
        """Return whether two addresses conflict, so that only one socket can listen."""
        if self.family != other.family or self.port != other.port or not self.port:
            return False
        return self.at[0] == other.at[0] or self.at[0] in _ANY or other.at[0] in _ANY

    def shares(self, other: Place) -> bool:
        """Return whether two addresses are equal apart from the port."""
        return (self.family, self.at[0], self.at[3:]) == (other.family, other.at[0], other.at[3:])

    def bind(self) -> socket.socket:
        """Return a new socket that is bound to the address, and doesn't listen yet. Raises OSError."""
        with Closer() as closer:
            bound = socket.socket(self.family, socket.SOCK_STREAM)
            closer.add(bound.close)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.setblocking(False)
            bound.bind(self.at)
            return bound

    def __str__(self) -> str:
        return written_address(self.at)


def unusable(address: object, bad: OSError, what: str = "") -> ListenError:
    """Return the error for an address that can't be bound."""
    reason = os.strerror(bad.errno) if bad.errno and bad.errno > 0 else str(bad)
    return ListenError(f"can't listen on {address}{what}: {reason}")


def places_of(address: Address, what: str = "") -> list[Place]:
    """Resolve an address to all its socket addresses; may block on name resolution. Raises `ListenError`."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as bad:
        raise unusable(address, bad, what) from bad
    return list(dict.fromkeys(Place(int(family), at) for family, _, _, _, at in found))


def bind(address: Address, places: Iterable[Place], what: str = "") -> list[socket.socket]:
    """Bind sockets to the socket addresses that this machine has. Raises `ListenError`, also if it has none."""
    missing: OSError | None = None
    with Closer() as closer:
        bound: list[socket.socket] = []
        for place in places:
            try:
                one = place.bind()
            except OSError as bad:
                if bad.errno not in NOT_HERE:
                    raise unusable(address, bad, what) from bad
                missing = bad
            else:
                closer.add(one.close)
                bound.append(one)
        if missing is not None and not bound:
            raise unusable(address, missing, what) from missing
        return bound


def check_apart(wanted: Iterable[tuple[str, Place]]) -> None:
    """Raise `ListenError` if two addresses conflict; each is paired with its listener's description for the error."""
    for (name, place), (other, there) in combinations(wanted, 2):
        if place.meets(there):
            raise ListenError(f"can't listen on {there} for {other}: {place} is for {name} already")


class Reserved:
    """Sockets that are bound to all addresses of a server's settings, and don't listen yet.

    Each listener takes its sockets. The others are closed by `close`, or at the end of the ``with`` block.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Bind all addresses of listeners and of HTTP. Raises `ListenError`; then no socket stays bound."""
        self._sockets: dict[str | None, list[socket.socket]] = {}
        named: dict[str | None, tuple[Address, ...]] = {one: (had.listen,) for one, had in settings.listeners.items()}
        if settings.http is not None:
            named[None] = settings.http.listen.all
        found = {name: [(one, places_of(one, _what(name))) for one in each] for name, each in named.items()}
        owners = {name: "HTTP" if name is None else f"the listener {name}" for name in named}
        check_apart((owners[name], place) for name, each in found.items() for _, places in each for place in places)
        with Closer() as closer:
            closer.add(self.close)
            for name, each in found.items():
                self._sockets[name] = []
                for address, places in each:
                    self._sockets[name] += bind(address, places, _what(name))

    def places(self, name: str | None) -> list[Place]:
        """Return the bound addresses of a listener, or of HTTP (None); none once its sockets were taken."""
        return [Place.of(one) for one in self._sockets.get(name, ())]

    def take(self, name: str | None) -> list[socket.socket]:
        """Return the sockets of a listener, or of HTTP (None), which the caller then owns."""
        return self._sockets.pop(name)

    def close(self) -> None:
        """Close the sockets that were not taken. Idempotent."""
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
