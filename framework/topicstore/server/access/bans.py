"""Bans: client ids, users and addresses that may not connect, for a time or until the ban is lifted.

Bans of operators are in the file ``bans`` in the database's directory, a JSON object a line, with the fields of `Ban`.
Empty lines and lines that begin with ``#`` are ignored. The file is replaced atomically, and read again when it has
changed. Bans of clients that connect too often (flapping) are kept in memory, at most `_FLAPPING` of them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from topicstore.contract.errors import InvalidArgumentError
from topicstore.server.config.model import FlappingSettings
from topicstore.server.replaced_file import ReplacedFile, Watched

__all__ = ["FILE", "Ban", "BanFile", "BanFileError", "BanIndex", "Banned", "Bans"]

FILE = "bans"
"""The file's name in the database's directory."""
_MOST = 10_000
"""The most bans of the file, so that reading it stays quick."""
_FLAPPING, _COUNTED = 10_000, 10_000
"""The most bans of flapping clients, and the most client ids whose connections are counted; the oldest are forgotten.
"""
_LONGEST_VALUE = 65_535
_LONGEST_REASON = 1_000

_log = logging.getLogger("topicstore.server.access")

Banned = Literal["client", "user", "address"]
"""The kinds of values that a ban may name: a client id, a user name, or an IP address or network."""


class BanFileError(InvalidArgumentError):
    """The file of bans can't be read or changed, or a ban is invalid."""


class Ban(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ban."""

    kind: Banned
    """The kind of `value`: whether it is a client id, a user name, or an address or network."""
    value: str
    """The client id, the user name, or the address or network, such as ``192.0.2.7`` or ``2001:db8::/32``."""
    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    """The time at which the ban ends; None if it lasts until it is lifted."""
    reason: str = ""
    """The reason for the ban, for operators; clients don't see it."""
    flapping: bool = False
    """Whether the server has banned the client by itself, because it connects too often."""

    def ended(self, now: float) -> bool:
        """Return whether the ban is over, ``now`` in seconds since the epoch."""
        return self.until is not None and self.until.timestamp() <= now

    def checked(self) -> Ban:
        """Return the ban with an address in canonical form. Raises `BanFileError` if the ban is invalid."""
        if not 1 <= len(self.value) <= _LONGEST_VALUE or len(self.reason) > _LONGEST_REASON:
            raise BanFileError(
                f"a ban's value has 1 to {_LONGEST_VALUE:,} characters, and its reason at most {_LONGEST_REASON:,}"
            )
        if self.kind != "address":
            return self
        try:
            network = ipaddress.ip_network(self.value)
        except ValueError as bad:
            raise BanFileError(f"{self.value!r} is neither an address nor a network: {bad}") from bad
        usual = str(network.network_address) if network.num_addresses == 1 else str(network)
        return msgspec.structs.replace(self, value=usual)


class BanIndex:
    """The bans by kind and value. Immutable, so thread-safe."""

    def __init__(self, bans: Iterable[Ban] = ()) -> None:
        """Index bans, whose values must be checked."""
        self.bans: Mapping[tuple[Banned, str], Ban] = {(ban.kind, ban.value): ban for ban in bans}
        self._networks: dict[tuple[int, int], dict[int, Ban]] = {}
        """By version and number of the bits that differ within a network, the bans by the bits before these."""
        for ban in self.bans.values():
            if ban.kind == "address":
                network = ipaddress.ip_network(ban.value)
                open_bits = network.max_prefixlen - network.prefixlen
                found = self._networks.setdefault((network.version, open_bits), {})
                found[int(network.network_address) >> open_bits] = ban

    def find(self, client_id: str, users: Iterable[str | None], host: str, now: float) -> Ban | None:
        """Return a ban of a client: of its id, one of its user names, or its address; None if there is none.

        host: the client's IP address; another text has no ban.
        now:  seconds since the epoch.
        """
        if not self.bans:
            return None
        names: list[tuple[Banned, str]] = [("client", client_id), *(("user", user) for user in users if user)]
        found = [ban for name in names if (ban := self.bans.get(name)) is not None]
        return next((ban for ban in [*found, *self._of_address(host)] if not ban.ended(now)), None)

    def _of_address(self, host: str) -> list[Ban]:
        if not self._networks:
            return []
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:  # a Unix socket has no IP address
            return []
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        version, number = address.version, int(address)
        return [
            networks[number >> open_bits]
            for (of, open_bits), networks in self._networks.items()
            if of == version and number >> open_bits in networks
        ]


_NONE = BanIndex()


class BanFile:
    """The file of bans. All methods use the disk: call them in a thread."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """``now`` returns the time in seconds since the epoch."""
        self.path, self.now = path, now
        self.file = ReplacedFile(path, "bans", BanFileError)

    def read(self) -> list[Ban]:
        """Return the file's bans, including expired ones; none if there is no file. Raises `BanFileError`."""
        try:
            return [self._ban(number, line) for number, line in self.file.lines()]
        except BanFileError as bad:
            if isinstance(bad.__cause__, FileNotFoundError):
                return []
            raise

    def put(self, ban: Ban) -> Ban:
        """Add a ban, or replace the one of the same kind and value; return it with its value in canonical form.

        Bans that are over are removed. Raises `BanFileError`.
        """
        ban = ban.checked()

        def change(lines: list[str]) -> list[str]:
            kept = self._without(lines, ban.kind, ban.value)
            if len(kept) >= _MOST:
                raise BanFileError(f"{self.path} has {_MOST:,} bans already; ban a network instead of its addresses")
            return [*kept, msgspec.json.encode(ban).decode()]

        self.file.change(change, missing_ok=True)
        return ban

    def remove(self, kind: Banned, value: str) -> Ban | None:
        """Remove a ban, and return it; None if there is none. Raises `BanFileError`."""
        asked = Ban(kind=kind, value=value).checked()
        found = [ban for ban in self.read() if (ban.kind, ban.value) == (kind, asked.value)]
        if found:
            self.file.change(lambda lines: self._without(lines, kind, asked.value), missing_ok=False)
        return found[0] if found else None

    def _without(self, lines: list[str], kind: Banned, value: str) -> list[str]:
        """Return the lines of comments, and of bans that are not over and have another kind or value."""
        kept = []
        for number, line in enumerate(lines, 1):
            if not line.startswith("#"):
                ban = self._ban(number, line)
                if (ban.kind, ban.value) == (kind, value) or ban.ended(self.now()):
                    continue
            kept.append(line)
        return kept

    def _ban(self, number: int, line: str) -> Ban:
        try:
            return msgspec.json.decode(line, type=Ban).checked()
        except (msgspec.MsgspecError, BanFileError) as bad:
            raise BanFileError(f"{self.path}, line {number}: {bad}") from bad


class Bans:
    """The bans of a server. Thread-safe, but `counted` must be called in one thread."""

    def __init__(self, file: BanFile) -> None:
        self._file, self._now = file, file.now
        self._watched = Watched[BanIndex](file.file, lambda: BanIndex(file.read()), missing=_NONE)
        self._logged = ""
        """The error of the file that was logged last."""
        self._lock = threading.Lock()
        self._flapping: OrderedDict[str, Ban] = OrderedDict()
        """The bans of flapping clients, by client id. Guarded by the lock."""
        self._connections: OrderedDict[str, list[float]] = OrderedDict()
        """By client id, the beginning of its current period, and the number of connections in it."""

    def reread(self) -> None:
        """Read the file. Raises `BanFileError`; then its last valid content stays in force."""
        self._watched.reread()

    async def current(self) -> BanIndex:
        """Return the bans of the file, which a worker thread reads if it has changed.

        If the file can't be read, that is logged, and its last valid content counts.
        """
        if not os.access(self._file.path, os.F_OK):  # a third of the time of `exists`; called for each connection
            return _NONE  # most servers have no such file, and need no thread to read it
        found = self._watched.unchanged()
        if found is not None:
            return found
        try:
            return await asyncio.to_thread(self._watched.now)
        except BanFileError as bad:
            if str(bad) != self._logged:
                self._logged = str(bad)
                _log.error("nobody is banned: %s", bad)
            return _NONE

    async def find(self, client_id: str, users: Iterable[str | None], host: str) -> Ban | None:
        """Return a ban that applies to a client, for flapping or from the file (`BanIndex.find`); None without one."""
        now = self._now()
        with self._lock:
            ban = self._flapping.get(client_id)
        if ban is not None and not ban.ended(now):
            return ban
        return (await self.current()).find(client_id, users, host, now)

    def listed(self) -> list[Ban]:
        """Return all bans that are not over, sorted. Raises `BanFileError`."""
        now = self._now()
        with self._lock:
            flapping = list(self._flapping.values())
        found = [*self._watched.now().bans.values(), *flapping]
        return sorted((ban for ban in found if not ban.ended(now)), key=lambda ban: (ban.kind, ban.value))

    def put(self, kind: Banned, value: str, *, seconds: float | None, reason: str) -> Ban:
        """Ban a client id, user or address, for some seconds or, with None, until it is lifted.

        The ban is in the file on return. Raises `BanFileError`.
        """
        until = None
        if seconds is not None:
            try:
                until = datetime.fromtimestamp(self._now(), UTC) + timedelta(seconds=seconds)
            except OverflowError as bad:
                raise BanFileError(
                    f"a ban of {seconds:,} seconds has no end that can be written: leave it out"
                ) from bad
        return self._file.put(Ban(kind=kind, value=value, until=until, reason=reason))

    def remove(self, kind: Banned, value: str) -> Ban | None:
        """Lift a ban, and return it; None if there is none. Raises `BanFileError`."""
        flapping = None
        if kind == "client":
            with self._lock:
                flapping = self._flapping.pop(value, None)
        return self._file.remove(kind, value) or flapping

    def counted(self, client_id: str, settings: FlappingSettings) -> Ban | None:
        """Count a connection that has ended, and return the ban of a client that has connected too often."""
        now = self._now()
        period = self._connections.get(client_id)
        if period is None or now - period[0] >= settings.window_time:
            period = self._connections[client_id] = [now, 0]
            self._connections.move_to_end(client_id)
            if len(self._connections) > _COUNTED:
                self._connections.popitem(last=False)
        period[1] += 1
        if period[1] < settings.max_count:
            return None
        del self._connections[client_id]
        until = datetime.fromtimestamp(now, UTC) + timedelta(seconds=settings.ban_time)
        reason = f"connected {settings.max_count} times within {settings.window_time}"
        ban = Ban(kind="client", value=client_id, until=until, reason=reason, flapping=True)
        with self._lock:
            self._flapping[client_id] = ban
            self._flapping.move_to_end(client_id)
            if len(self._flapping) > _FLAPPING:
                self._flapping.popitem(last=False)
        return ban
