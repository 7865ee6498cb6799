"""Where a command finds its database: in the directory, or with the server that has it open.

The directory is tried first, so a command pays for a server only if there is one. Reading beside a writer, as RocksDB
can, stays as it is: a long replay then costs the server nothing, and the files say who may read them. Everything else
that a lock refuses is asked of the server that holds it, which says where it is in the directory
(`topicstore.server.http.discovery`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import topicstore

if TYPE_CHECKING:
    from topicstore.client.connection import Connection
    from topicstore.client.remote_database import RemoteDatabase

__all__ = ["AnyDatabase", "connected", "opened"]

AnyDatabase: TypeAlias = "topicstore.Database | RemoteDatabase"
"""A database in its directory, or one that a server has open."""


def opened(path: Path, mode: Literal["a", "r", "r+"], **arguments: Any) -> AnyDatabase:
    """Open a database as `topicstore.open` does, or the one that a server has open.

    Arguments of the opening are the server's own then. Raises the errors of `topicstore.open`, and
    `DatabaseLockedError` also if the server can't be asked.
    """
    try:
        return topicstore.open(path, mode, **arguments)
    except topicstore.DatabaseLockedError:
        connection = connected(path)
        if connection is None:
            raise
    from topicstore.client.remote_database import RemoteDatabase

    return RemoteDatabase(path, connection)


def connected(path: Path) -> Connection | None:
    """Return a connection to the server that has the database in a directory open; None if there is none.

    Raises `DatabaseLockedError` if it serves no HTTP, by which it could be asked.
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
