"""`AsyncArchives`: generations exported as Parquet, in asyncio."""

from __future__ import annotations

from topicstore.lifecycle.archives import Archives

from .face import Collection, iterated, threaded

__all__ = ["AsyncArchives"]


class AsyncArchives(Collection[Archives]):
    """The exports of one database, as returned by `AsyncDatabase.archives`; see `Archives`."""

    export = threaded(Archives.export)
    archive = threaded(Archives.archive)
    __aiter__ = iterated(Archives.__iter__)
    __getitem__ = threaded(Archives.__getitem__)
    count = threaded(Archives.__len__)
    contains = threaded(Archives.__contains__)
