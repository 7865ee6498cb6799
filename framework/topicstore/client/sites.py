"""The sites of a durable storage and what each keeps: as a server tells, or as the directory of a database does."""

from __future__ import annotations

import socket
from pathlib import Path

import attrs
import msgspec

from topicstore.contract.errors import UnsupportedError
from topicstore.server.settings import MESSAGES
from topicstore.server.sites import read_site
from topicstore.storage.directory.manifest import existing_manifest

from .connection import Connection
from .paths import part

__all__ = ["PlacedShard", "PlacedSite", "Placement", "placement_at_rest", "placement_of"]

_SIGNS = {"joining": "+", "leaving": "-"}


@attrs.frozen
class PlacedSite:
    """A site."""

    id: str
    node: str
    """The name of the server that manages it."""
    up: bool


@attrs.frozen
class PlacedShard:
    """A shard, and the sites that keep it."""

    id: str
    """The storage and the number, such as ``messages/0``."""
    replicas: list[str]
    transitions: list[str]
    """The sites that will get it, each after a ``+``, and those that give it up, after a ``-``."""


@attrs.frozen
class Placement:
    """Which sites there are, and which shards they keep."""

    this: str
    """The id of the site that was asked."""
    sites: list[PlacedSite]
    shards: list[PlacedShard]


class _Site(msgspec.Struct):
    node: str
    up: bool


class _Replica(msgspec.Struct):
    site: str


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
    """Return what a server tells. It lists itself first."""
    ids = connection.get("/ds/sites", list[str])
    sites = [(one, connection.get(f"/ds/sites/{part(one)}", _Site)) for one in ids]
    names = connection.get("/ds/storages", list[str])
    storages = [connection.get(f"/ds/storages/{part(name)}", _Storage) for name in names]
    return Placement(
        this=ids[0],
        sites=[PlacedSite(one, site.node, site.up) for one, site in sorted(sites)],
        shards=[_placed(storage.name, shard) for storage in storages for shard in storage.shards],
    )


def _placed(storage: str, shard: _Shard) -> PlacedShard:
    transitions = [f"{_SIGNS[one.transition]}{one.site}" for one in shard.transitions]
    return PlacedShard(f"{storage}/{shard.id}", [one.site for one in shard.replicas], transitions)


def placement_at_rest(path: Path) -> Placement:
    """Return what the directory of a database tells: its own site, which nobody serves. Raises `UnsupportedError`."""
    manifest, this = existing_manifest(path), read_site(path)
    if this is None:
        raise UnsupportedError(f"{path} is no site yet: a server with HTTP makes it one, as topicstore serve does")
    shards = [PlacedShard(f"{MESSAGES}/{number}", [this], []) for number in range(manifest.shards)]
    return Placement(this, [PlacedSite(this, f"topicstore@{socket.gethostname()}", up=False)], shards)
