"""Durations, sizes and addresses of settings: ``"100ms"``, ``"8MB"``, ``"127.0.0.1:1883"``.

Durations and sizes have the notation of `topicstore.contract.quantities`.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable
from typing import Any, Self

from topicstore.contract.quantities import INFINITY, format_duration, format_size, parse_duration, parse_size

__all__ = [
    "Address",
    "Addresses",
    "Duration",
    "Period",
    "Quota",
    "Size",
    "is_forwarded",
    "is_loopback",
    "site_of",
    "written_address",
]

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:\s]+)):([0-9]{1,9})")
_FORWARDED = frozenset(
    (
        "cdn-loop",
        "client-ip",
        "fastly-client-ip",
        "forwarded",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-proxyuser-ip",
        "x-real-ip",
        "x-remote-ip",
    )
)
_FORWARDED_BEGINNINGS = ("cf-", "x-envoy-", "x-forwarded", "x-original-")


class Addresses(str):
    """One or several addresses in one string, separated by commas."""

    __slots__ = ("all",)

    all: tuple[Address, ...]

    @classmethod
    def read(cls, given: Any) -> Addresses:
        """Parse one address, or a list of addresses. Raises ValueError."""
        if not isinstance(given, (list, tuple)):
            return Address(given)
        if not given:
            raise ValueError("the list has no address")
        found = tuple(map(Address, given))
        if len(found) == 1:
            return found[0]
        made = Addresses(", ".join(found))
        made.all = found
        return made


class Address(Addresses):
    """A host and a port in one string, ``HOST:PORT``."""

    __slots__ = ("host", "port")

    host: str
    port: int

    def __new__(cls, text: str) -> Self:
        """Parse ``HOST:PORT``. Raises ValueError."""
        found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ValueError(f"{text!r} is not HOST:PORT, such as '127.0.0.1:1883' or '[::1]:1883'")
        if int(found[3]) > 65_535:
            raise ValueError(f"{text!r} is not HOST:PORT: the highest port is 65535")
        made = super().__new__(cls, text)
        made.host, made.port = found[1] or found[2], int(found[3])
        made.all = (made,)
        return made


def written_address(address: Any) -> str:
    """Return a socket's address as ``HOST:PORT``, with an IPv6 host in brackets; other kinds as ``str``."""
    if not isinstance(address, (tuple, list)):
        return str(address)
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@functools.lru_cache(1_024)
def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or the name ``localhost``."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def site_of(host: str) -> str:
    """Return the address or network by which clients of one site are counted together.

    For IPv6 this is the /64 network, the smallest that a site is assigned (RFC 6177); for IPv4 the address itself.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address) if address.is_loopback else str(ipaddress.ip_network((address, 64), strict=False))


def is_forwarded(headers: Iterable[str]) -> bool:
    """Return whether a request has a header by which proxies name the client that they forward for.

    A proxy may run on this machine while its clients are on other machines. ``headers`` are the headers' names.
    """
    return any(name in _FORWARDED or name.startswith(_FORWARDED_BEGINNINGS) for name in map(str.lower, headers))


_LONGEST = float(0xFFFFFFFF)
_MOST_BYTES = (1 << 63) - 1


class Duration(float):
    """A time in seconds, from 0 to 2**32 - 1: the range of MQTT's four-byte intervals."""

    @classmethod
    def read(cls, text: Any) -> Self:
        """Parse a duration such as ``"100ms"``. Raises ValueError."""
        seconds = parse_duration(text)
        if seconds > _LONGEST:
            raise ValueError(f"{text[:80]!r} is longer than {_LONGEST:,.0f} seconds")
        return cls(seconds)

    def __str__(self) -> str:
        """Return the duration in the notation of the settings."""
        return format_duration(self)


class Period(Duration):
    """A time in seconds, or ``"infinity"``."""

    @classmethod
    def read(cls, text: Any) -> Self:
        """Parse a duration or ``"infinity"``. Raises ValueError."""
        return cls(float("inf")) if text == INFINITY else super().read(text)

    @property
    def limit(self) -> float | None:
        """The period in seconds; None for infinity."""
        return None if self == float("inf") else float(self)

    def __str__(self) -> str:
        """Return the period in the notation of the settings."""
        return INFINITY if self.limit is None else super().__str__()


class Size(int):
    """A number of bytes, from 1 to 2**63 - 1."""

    @classmethod
    def read(cls, text: Any) -> Self:
        """Parse a size such as ``"8MB"``, rounded to whole bytes. Raises ValueError."""
        whole = parse_size(text)
        if whole > _MOST_BYTES:
            raise ValueError(f"{text[:80]!r} is more than {_MOST_BYTES:,} bytes")
        if whole < 1:
            raise ValueError(f"{text!r} is less than a byte")
        return cls(whole)

    def __str__(self) -> str:
        """Return the size in the notation of the settings."""
        return format_size(self)


class Quota(Size):
    """A number of bytes, or ``"infinity"``, whose value is 0."""

    @classmethod
    def read(cls, text: Any) -> Self:
        """Parse a size or ``"infinity"``. Raises ValueError."""
        return cls(0) if text == INFINITY else super().read(text)

    @property
    def limit(self) -> int | None:
        """The quota in bytes; None for infinity."""
        return int(self) or None

    def __str__(self) -> str:
        """Return the quota in the notation of the settings."""
        return INFINITY if self.limit is None else super().__str__()
