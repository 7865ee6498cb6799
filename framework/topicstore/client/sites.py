"""The sites of a durable storage and their shards, as reported by a server or read from a database's directory."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path

import attrs
import msgspec

from topicstore.contract.errors import UnsupportedError
from topicstore.server.config.model import MESSAGES
from topicstore.server.sites import read_site
from topicstore.storage.directory.manifest import existing_manifest

from .connection import Connection
from .paths import part

__all__ = ["PlacedShard", "PlacedSite", "Placement", "placement_at_rest", "placement_of"]

_SIGNS = {"joining": "+", "leaving": "-"}


@attrs.frozen
class PlacedSite:
    """A site of the cluster."""

    id: str
    node: str
    """The name of the server that manages the site."""
    up: bool
    back_off: float = 0.0
    """Remaining back-off in seconds after failed writes, during which the other sites take shards over first."""


@attrs.frozen
class PlacedShard:
    """A shard, and the sites that hold its replicas."""

    id: str
    """The storage's name and the shard's number, such as ``messages/0``."""
    replicas: list[str]
    transitions: list[str]
    """The sites that will receive the shard, each prefixed by ``+``, and those that will release it, by ``-``."""
    failed: list[str] = attrs.field(factory=list)
    """The replicas that take no writes since a write failed, although their sites are up."""


@attrs.frozen
class Placement:
    """The sites of a cluster, and the shards with their replicas."""

    this: str
    """The id of the site that reports the placement."""
    sites: list[PlacedSite]
    shards: list[PlacedShard]


class _Site(msgspec.Struct):
    node: str
    up: bool
    back_off: float = 0.0


class _Replica(msgspec.Struct):
    site: str
    status: str = "up"


class _Transition(msgspec.Struct):
    site: str
    transition: str


class _Shard(msgspec.Struct):
    id: str
    replicas: list[_Replica]
    transitions: list[_Transition] = []


class _Storage(msgspec.Struct):
    name: str
    shards: list[_Shard]


def placement_of(connection: Connection) -> Placement:
    """Return the placement that a server reports. ``this`` is the server's own site, which it lists first."""
    ids = connection.get("/ds/sites", list[str])
    sites = [(one, connection.get(f"/ds/sites/{part(one)}", _Site)) for one in ids]
    names = connection.get("/ds/storages", list[str])
    storages = [connection.get(f"/ds/storages/{part(name)}", _Storage) for name in names]
    up = {one for one, site in sites if site.up}
    return Placement(
        this=ids[0],
        sites=[PlacedSite(one, site.node, site.up, site.back_off) for one, site in sorted(sites)],
        shards=[_placed(storage.name, shard, up) for storage in storages for shard in storage.shards],
    )


def _placed(storage: str, shard: _Shard, up: Collection[str]) -> PlacedShard:
    transitions = [f"{_SIGNS[one.transition]}{one.site}" for one in shard.transitions]
    failed = [one.site for one in shard.replicas if one.status == "down" and one.site in up]
    return PlacedShard(f"{storage}/{shard.id}", [one.site for one in shard.replicas], transitions, failed)


def placement_at_rest(path: Path) -> Placement:
    """Return the placement recorded in a database's directory: its own site, which is down because no server runs.

    Raises `UnsupportedError` if the directory has no site id yet, or is a copy of a database that a cluster shares.
    """
    manifest, this = existing_manifest(path), read_site(path)
    if manifest.cluster is not None:
        raise UnsupportedError(
            f"{path} is a copy of a database that is shared through {manifest.cluster}: ask a server of the cluster, "
            "by --url"
        )
    if this is None:
        raise UnsupportedError(f"{path} is no site yet: a server with HTTP makes it one, as topicstore serve does")
    shards = [PlacedShard(f"{MESSAGES}/{number}", [this], []) for number in range(manifest.shards)]
    return Placement(this, [PlacedSite(this, f"topicstore@{socket.gethostname()}", up=False)], shards)
