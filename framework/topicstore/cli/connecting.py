"""Opening a command's database: directly in its directory, or through the server that has it open.

The directory is tried first. Backends that allow reading beside a writer, such as RocksDB, are read directly: a long
replay then doesn't burden the server, and file permissions apply. If the database's lock prevents opening it, the
command asks the server that holds the lock. It also asks the server if the directory is the copy of a site of a
cluster: only the site may write the copy, and shards that are not kept there are read at other sites. The server writes
its address into the directory (`topicstore.server.http.discovery`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import topicstore
from topicstore.runtime.closing import Closer
from topicstore.storage.directory.manifest import read_manifest

if TYPE_CHECKING:
    from topicstore.client.connection import Connection
    from topicstore.client.remote_database import RemoteDatabase

__all__ = ["AnyDatabase", "connected", "opened"]

AnyDatabase: TypeAlias = "topicstore.Database | RemoteDatabase"
"""A database in its directory, or one that a server has open."""


def opened(path: Path, mode: Literal["a", "r", "r+"], **arguments: Any) -> AnyDatabase:
    """Open a database as `topicstore.open` does or, if it is locked or a copy, connect to the server that has it open.

    With a server, ``arguments`` are ignored, because the server has opened the database with its own. Raises the errors
    of `topicstore.open`; `DatabaseLockedError` also if the server can't be reached.
    """
    try:
        found = topicstore.open(path, mode, **arguments)
    except (topicstore.DatabaseLockedError, topicstore.ManifestMismatchError) as refused:
        asked = isinstance(refused, topicstore.DatabaseLockedError) or _is_copy(path)
        connection = connected(path) if asked else None
        if connection is None:
            raise
    else:
        if mode != "r" or _is_whole(found):
            return found
        with Closer() as closer:
            closer.add(found.close)
            connection = connected(path)
        if connection is None:
            return found
        found.close()
    from topicstore.client.remote_database import RemoteDatabase

    return RemoteDatabase(path, connection)


def _is_whole(db: topicstore.Database) -> bool:
    """Return whether a database has all its shards; a site's copy may lack some."""
    return not any(shard.writer.elsewhere for shard in db.storage.shards)


def _is_copy(path: Path) -> bool:
    """Return whether a directory has a site's copy of a database that a cluster shares."""
    manifest = read_manifest(path)
    return manifest is not None and manifest.cluster is not None


def connected(path: Path) -> Connection | None:
    """Return a connection to the server that has the database in a directory open; None if there is no server.

    Raises `DatabaseLockedError` if the server has no HTTP interface.
    """
    from topicstore.server.http.discovery import find_server

    found = find_server(path)
    if found is None:
        return None
    if found.url is None:
        raise topicstore.DatabaseLockedError(
            f"{path} is open in a server, process {found.pid}, that serves no HTTP and so can't be asked; start it "
            "with --http 127.0.0.1:18083, or [http] in its settings"
        )
    from topicstore.client.connection import Connection

    return Connection(found.url, found.token, verify=found.trust())
