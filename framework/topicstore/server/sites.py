"""The sites that keep replicas of a database's shards.

If a cluster shares the database, the cluster's document names the sites. A database without a cluster has only this
site, with all shards. The first server that serves HTTP generates the site's random id of 16 upper-case hexadecimal
digits, and stores it in the file ``site`` of the database's directory. A checkpoint of a database omits the file,
because a server on the copy is another site.
"""

from __future__ import annotations

import functools
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

import topicstore as ts
from topicstore.contract.errors import CorruptionError, ReplicasRefusedError, UnknownSiteError, UnrecoverableError
from topicstore.storage.directory.files import read_own, replace_file

if TYPE_CHECKING:
    from topicstore.replication.info import ClusterInfo

__all__ = [
    "ReplicaInfo",
    "ReplicaTransition",
    "ShardReplicas",
    "SiteInfo",
    "SiteShard",
    "Sites",
    "StorageReplicas",
    "UnknownStorageError",
    "read_site",
]

_FILE = "site"
_SITE = re.compile(rb"[0-9A-F]{16}\n?")
_ALONE = "no cluster shares the storage, so its shards are on this site and on no other"

ReplicaStatus = Literal["up", "down", "lost"]
Transition = Literal["joining", "leaving"]


class UnknownStorageError(UnrecoverableError, LookupError):
    """There is no storage with that name."""


@attrs.frozen(kw_only=True)
class SiteShard:
    """A replica of a shard on a site."""

    storage: str
    id: str
    status: ReplicaStatus
    """``down`` if the site is down, or if the replica takes no writes since one failed."""


@attrs.frozen(kw_only=True)
class SiteInfo:
    """A site and its shards."""

    node: str
    """The name of the server that manages the site."""
    up: bool
    shards: list[SiteShard]
    back_off: float = 0.0
    """Remaining back-off in seconds after failed writes, counted from the site's last heartbeat.

    The sites that aren't in back-off take shards over first."""


@attrs.frozen(kw_only=True)
class ReplicaInfo:
    """A replica of a shard, with its site."""

    site: str
    status: ReplicaStatus
    """``down`` if the site is down, or if the replica takes no writes since one failed."""


@attrs.frozen(kw_only=True)
class ReplicaTransition:
    """A change of a shard's replicas that is under way."""

    site: str
    transition: Transition


@attrs.frozen(kw_only=True)
class ShardReplicas:
    """A shard and the sites that keep replicas of it."""

    id: str
    replicas: list[ReplicaInfo]
    transitions: list[ReplicaTransition] = attrs.field(factory=list)
    """The sites that are receiving the shard, and those that will release it."""


@attrs.frozen(kw_only=True)
class StorageReplicas:
    """A storage and its shards."""

    name: str
    shards: list[ShardReplicas]


def read_site(directory: Path) -> str | None:
    """Return the site id in a database's directory; None if there is none. Raises `CorruptionError`."""
    try:
        stored = read_own(directory / _FILE)
    except FileNotFoundError:
        return None
    if _SITE.fullmatch(stored) is None:
        raise CorruptionError("not a site's id: 16 upper-case hexadecimal digits", str(directory / _FILE))
    return stored.decode().strip()


class Sites:
    """The sites that this server knows. Thread-safe. In a cluster, each call asks its log store."""

    def __init__(self, db: ts.Database, storages: Mapping[str, ts.Database]) -> None:
        """``storages`` are the open databases by name, including ``db``, the database of the messages."""
        self._shards = {name: [str(number) for number in range(one.manifest.shards)] for name, one in storages.items()}
        self._directory = db.path if "persistent" in db.storage.capabilities and not db.read_only else None
        self._cluster = db.cluster
        self._shared = next((name for name, one in storages.items() if one is db and db.cluster is not None), None)
        """The name of the storage that the cluster shares; None without a cluster."""

    @functools.cached_property
    def this(self) -> str:
        """The id of this site. Raises `CorruptionError` and `OSError` at the first access, which isn't thread-safe."""
        if self._cluster is not None:
            return self._cluster.name
        known = None if self._directory is None else read_site(self._directory)
        if known is not None:
            return known
        made = secrets.token_hex(8).upper()
        if self._directory is not None:
            replace_file(self._directory / _FILE, f"{made}\n".encode(), temporary=self._directory / f"{_FILE}.new")
        return made

    def _info(self) -> ClusterInfo | None:
        """Return the state of the cluster; None without one. Raises `StorageUnavailableError`."""
        return None if self._cluster is None else self._cluster.info()

    def sites(self) -> list[str]:
        """Return the ids of all known sites, this one first. Raises `StorageUnavailableError`."""
        info = self._info()
        others = [] if info is None else [one.name for one in info.sites if one.name != self.this]
        return [self.this, *others]

    def site(self, site: str) -> SiteInfo:
        """Return a site. Raises `UnknownSiteError` and `StorageUnavailableError`."""
        info = self._info()
        found = None if info is None else next((one for one in info.sites if one.name == site), None)
        if found is None and (info is not None or site != self.this):
            raise UnknownSiteError(f"there is no site {site!r}")
        up = found is None or found.beats
        host = "" if found is None or site == self.this else found.address.rpartition(":")[0]
        failed = [] if info is None else [str(one.shard) for one in info.shards if site in one.failed]
        shards = [
            SiteShard(
                storage=name, id=shard, status="up" if up and (name != self._shared or shard not in failed) else "down"
            )
            for name, all_shards in self._shards.items()
            for shard in all_shards
            if (site == self.this if info is None or name != self._shared else _keeps(info, int(shard), site))
        ]
        back_off = 0.0 if found is None else found.back_off
        return SiteInfo(node=f"topicstore@{host or socket.gethostname()}", up=up, shards=shards, back_off=back_off)

    def storages(self) -> list[str]:
        """Return the names of the storages that have replicas."""
        return list(self._shards)

    def storage(self, name: str) -> StorageReplicas:
        """Return a storage. Raises `UnknownStorageError` and `StorageUnavailableError`."""
        self._check_storage(name)
        info = self._info() if name == self._shared else None
        if info is None:
            replicas = [ReplicaInfo(site=self.this, status="up")]
            shards = [ShardReplicas(id=shard, replicas=replicas) for shard in self._shards[name]]
        else:
            up = {one.name for one in info.sites if one.beats}
            shards = [
                ShardReplicas(
                    id=str(one.shard),
                    replicas=[
                        ReplicaInfo(site=site, status="up" if site in up and site not in one.failed else "down")
                        for site in one.replicas
                    ],
                    transitions=[
                        *(ReplicaTransition(site=site, transition="joining") for site in one.joining),
                        *(ReplicaTransition(site=site, transition="leaving") for site in one.leaving),
                    ],
                )
                for one in info.shards
            ]
        return StorageReplicas(name=name, shards=shards)

    def replicas(self, name: str) -> list[str]:
        """Return the ids of the sites that keep replicas of a storage.

        Raises `UnknownStorageError` and `StorageUnavailableError`.
        """
        return sorted({one.site for shard in self.storage(name).shards for one in shard.replicas})

    def set_replicas(self, name: str, sites: Sequence[str]) -> list[str]:
        """Set the sites that keep the replicas of a storage, and return them.

        Raises `UnknownStorageError` and `ReplicasRefusedError`; in a cluster also the errors of `Site.set_replicas`.
        """
        self._check_storage(name)
        if not sites:
            raise ReplicasRefusedError("a storage is kept by at least one site; the list is empty")
        if self._cluster is not None and name == self._shared:
            self._cluster.set_replicas(None, sites)
            return list(dict.fromkeys(sites))
        for site in sites:
            if site != self.this:
                raise ReplicasRefusedError(f"there is no site {site!r}: {_ALONE}")
        return [self.this]

    def join(self, name: str, site: str) -> None:
        """Let a site keep replicas of a storage. Raises as `set_replicas`, and as `Site.join` in a cluster."""
        self._check_storage(name)
        if self._cluster is not None and name == self._shared:
            self._cluster.join(site)
        else:
            self.set_replicas(name, [site])

    def leave(self, name: str, site: str) -> None:
        """Let a site pass its replicas of a storage on to other sites.

        Raises `UnknownStorageError`, `UnknownSiteError` and `ReplicasRefusedError`; in a cluster as `Site.leave`.
        """
        self._check_storage(name)
        if self._cluster is not None and name == self._shared:
            self._cluster.leave(site)
            return
        self._check_site(site)
        raise ReplicasRefusedError(f"site {site} has the only replica of each shard: {_ALONE}")

    def forget(self, site: str) -> None:
        """Remove a site that is permanently lost.

        Raises `UnknownSiteError` and `ReplicasRefusedError`; in a cluster, also the errors of `Site.forget`.
        """
        if self._cluster is not None:
            self._cluster.forget(site)
            return
        self._check_site(site)
        raise ReplicasRefusedError(f"site {site} is this one, and it is up; only a site that is gone can be forgotten")

    def _check_site(self, site: str) -> None:
        if site != self.this:
            raise UnknownSiteError(f"there is no site {site!r}")

    def _check_storage(self, name: str) -> None:
        if name not in self._shards:
            there = ", ".join(map(repr, self._shards))
            raise UnknownStorageError(f"there is no storage {name!r}; there is {there}")


def _keeps(info: ClusterInfo, shard: int, site: str) -> bool:
    return site in info.shards[shard].replicas
