"""``/info``: sizes and counts of the database."""

from __future__ import annotations

from litestar import get

from topicstore.database import DatabaseInfo
from topicstore.server.http.context import TheContext
from topicstore.server.http.guards import needs

__all__ = ["ROUTES"]


@get("/info", guards=[needs("read")], tags=["database"], sync_to_thread=True)
def info(context: TheContext) -> DatabaseInfo:
    """Return sizes, counts, generations and shards of the database, as `Database.info` does."""
    return context.db.info()


ROUTES = [info]
