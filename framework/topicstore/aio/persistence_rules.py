"""`AsyncPersistenceRules`: the rules that decide which published messages are stored, in asyncio."""

from __future__ import annotations

from topicstore.pubsub.persistence_rules import PersistenceRules

from .face import Collection, iterated, threaded

__all__ = ["AsyncPersistenceRules"]


class AsyncPersistenceRules(Collection[PersistenceRules]):
    """The persistence rules of one database, as returned by `AsyncDatabase.persistence`; see `PersistenceRules`."""

    __aiter__ = iterated(PersistenceRules.__iter__)
    count = threaded(PersistenceRules.__len__)
    contains = threaded(PersistenceRules.__contains__)
    add = threaded(PersistenceRules.add)
    remove = threaded(PersistenceRules.remove)
    matching = threaded(PersistenceRules.matching)
