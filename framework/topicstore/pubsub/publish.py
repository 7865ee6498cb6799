"""Publishing: messages are stored, kept as their topic's retained message, or only passed on.

A published message is stored, once, if its publisher asks for it by the user property `PERSIST`. It is also stored if a
persistence rule (`topicstore.pubsub.persistence_rules`) or a durable subscription matches. A message of QoS 0 is stored
for a durable subscription only if `Sessions.store_qos0` is set. All other messages are passed to the current followers
and not stored. Programs that replay messages later should rely only on the user property or a rule, because
durable subscriptions may end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Column, Constant, to_iterable
from topicstore.contract.errors import DatabaseClosedError, TopicstoreError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Properties
from topicstore.contract.requests import Destinations, StoreResult
from topicstore.contract.state import StateWrite
from topicstore.storage.storage import Storage

from .durable_filters import DurableFilters
from .retained import retained_rows
from .retained_expiry import EarliestEnd

if TYPE_CHECKING:
    from .hub import Hub
    from .persistence_rules import PersistenceRules

__all__ = ["PERSIST", "Chosen", "PublishResult", "Publisher", "store_retaining"]

PERSIST = "topicstore-persist"
"""The user property by which a publisher requests that its message is stored; its value is ``1`` or ``true``."""

Chosen = bool | npt.NDArray[np.bool_]
"""For each message, whether it is to be stored; one value for all, or an array in which both values occur."""

_SYS = "$SYS/"
"""The beginning of topics with a server's own figures."""
_ASKING = frozenset(((PERSIST, "1"), (PERSIST, "true")))


@attrs.frozen(kw_only=True, slots=False)
class PublishResult(StoreResult):
    """The result of publishing. ``batch`` and ``ids`` cover the stored messages; ``count`` counts all messages."""

    stored: int
    """The number of stored messages: visible to the next read, and durable according to ``durability``."""
    routed: int
    """The number of messages that were not stored, but only passed to the current followers."""
    retained: int
    """The number of messages that became their topics' retained messages."""


class Publisher:
    """Publishes messages to one open database: stores those that must be durable, and routes the others.

    Thread-safe. Refers to the storage weakly, so that a database without other references closes itself.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)
        self._shared = storage.site is not None
        """Whether a cluster shares the database. Then all messages are stored, because subscribers may be elsewhere."""
        self._creating = ProcessLock()
        """Held while the next two are created on first use. Reading them needs no lock."""
        self._rules: PersistenceRules | None = None
        self._hub: Hub | None = None
        self.filters = DurableFilters()
        """The filters of durable subscriptions."""

    def storage(self) -> Storage:
        """Return the database's storage. Raises `DatabaseClosedError`."""
        storage = self._storage()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        return storage

    @property
    def rules(self) -> PersistenceRules:
        """The rules that decide by topic which messages are stored."""
        if self._rules is None:
            from .persistence_rules import PersistenceRules

            with self._creating:
                self._rules = self._rules or PersistenceRules(self.storage().state(0))
        return self._rules

    @property
    def hub(self) -> Hub:
        """The hub of the current followers. A read-only database doesn't notify it of new messages."""
        if self._hub is None:
            from .hub import Hub

            with self._creating:
                if self._hub is None:
                    storage = self.storage()
                    hub = Hub(storage)
                    if storage.mode is None:
                        storage.listen(hub)
                    self._hub = hub
        return self._hub

    @property
    def visibility_failure(self) -> str | None:
        """The last error of waiting for stored messages to become visible; None if there is none."""
        return None if self._hub is None else self._hub.reads.failure

    def requested(self, batch: MessageBatch) -> Chosen:
        """Return, for each message, whether a rule or its publisher requires that it is stored.

        On a site of a cluster, all messages are stored, because followers and sessions on other sites may match.
        Messages below ``$SYS`` are not stored: they describe one site, and only its own followers receive them.
        """
        if self._shared:
            return _of_topics(batch, lambda topic: not topic.startswith(_SYS))
        rules = self.rules
        return _either(_shortened(rules.matching(batch)) if rules else False, _asked(batch.properties, len(batch)))

    def publish(
        self,
        batch: MessageBatch,
        state: Mapping[int, Sequence[StateWrite]],
        requested: Chosen | None = None,
        failures: dict[int, TopicstoreError] | None = None,
    ) -> PublishResult:
        """Publish messages that have been checked, and commit state by shard with them; see `Database.publish`.

        requested: the result of `requested`, if the caller has it.
        failures:  receives the errors of shards, on a site of a cluster; the result has the other shards' messages.

        The caller has loaded `filters`, unless all messages are requested. No message is delivered before the commit.
        """
        storage = self.storage()
        stored = self._durable(batch, self.requested(batch) if requested is None else requested)
        keyed, writes = retained_rows(batch, storage)
        for shard, more in state.items():
            writes[shard] = [*writes.get(shard, ()), *more]
        interest, passing = storage.interest, False
        if interest.tracks and stored is not False and _asked(batch.properties, len(batch)) is False:
            filters = self.rules.filters
            passing = interest.current == filters or interest.begin(filters)
        result = _store(storage, batch, stored, keyed, writes, passing=passing, failures=failures)
        if failures:
            good = [storage.shard_of(client_id) not in failures for client_id in to_iterable(batch.client_ids)]
            keyed = {row: place for row, place in keyed.items() if good[row]}
        count = sum(good) if failures else len(batch)
        hub = self._hub
        if hub is not None and stored is not True:
            others = np.ones(len(batch), np.bool_) if stored is False else ~stored
            if failures:
                others &= np.array(good, np.bool_)
            _route(hub, batch, others, storage.clock())
        return PublishResult(
            count=count,
            stored=result.count,
            routed=count - result.count,
            retained=len(keyed) - (_without_payload(batch, keyed) if self._shared else 0),
            lifted=result.lifted,
            rejoin=result.rejoin,
        )

    def _durable(self, batch: MessageBatch, requested: Chosen) -> Chosen:
        """Return, for each message, whether to store it."""
        if requested is True or self._shared:
            return requested
        match, qos = self.filters.match, batch.qos
        if self.filters.store_qos0 or (isinstance(qos, Constant) and qos.value):
            return _either(requested, _of_topics(batch, match))
        of_qos0 = _of_topics(batch, partial(match, qos=0))
        if isinstance(qos, Constant):
            return _either(requested, of_qos0)
        light = np.fromiter(to_iterable(qos), np.int8, len(batch)) == 0
        return _either(requested, _shortened(np.where(light, of_qos0, _of_topics(batch, match))))


def _without_payload(batch: MessageBatch, rows: Collection[int]) -> int:
    """Return how many of some rows have no payload."""
    return sum(not payload for payload in to_iterable(batch.take(np.array(list(rows), np.intp)).payloads))


def store_retaining(
    storage: Storage,
    batch: MessageBatch,
    state: Mapping[int, Sequence[StateWrite]],
    *,
    stored: Sequence[bool],
    retained: Sequence[bool],
) -> StoreResult:
    """Store messages, and set the retained messages of those with ``retain``, in one write for each shard.

    stored:   for each message, whether to store it; False only for messages that an earlier call has stored.
    retained: for each message, whether it may become its topic's retained message; False only for messages that an
              earlier call has considered.
    """
    counting = batch.take(np.flatnonzero(retained))
    keyed, writes = retained_rows(counting, storage)
    rows = np.flatnonzero(retained).tolist()
    for shard, more in state.items():
        writes[shard] = [*writes.get(shard, ()), *more]
    keyed = {rows[row]: key for row, key in keyed.items()}
    return _store(storage, batch, _shortened(np.array(stored, np.bool_)), keyed, writes)


def _store(
    storage: Storage,
    batch: MessageBatch,
    stored: Chosen,
    keyed: Mapping[int, tuple[int, bytes]],
    state: Mapping[int, Sequence[StateWrite]],
    *,
    passing: bool = False,
    failures: dict[int, TopicstoreError] | None = None,
) -> StoreResult:
    """Commit stored and retained messages and the state. If all messages are only passed on, plugins are not called.

    Raises the errors of `Storage.write` for all messages, also those that are only passed on.
    """
    if not keyed and stored is True:
        return storage.write(batch, state, passing=passing, failures=failures)
    if keyed or stored is not False:
        earliest = storage.kept(EarliestEnd)
        if keyed:
            earliest.look(storage)
        rows = np.full(len(batch), stored) if isinstance(stored, bool) else stored
        result = storage.write(batch, state, Destinations(stored=rows, keyed=keyed), passing=passing, failures=failures)
        earliest.expect(batch, keyed, storage.clock())
        return result
    storage.check_may_write()
    storage.check_times(batch)
    if state:
        return storage.write(MessageBatch.empty(), state, failures=failures)
    return StoreResult(count=0, rejoin=MessageBatch.empty)


def _either(some: Chosen, others: Chosen) -> Chosen:
    """Return, for each message, whether one of two choices is True."""
    if some is True or others is True:
        return True
    if others is False:
        return some
    return others if some is False else _shortened(some | others)


def _shortened(chosen: npt.NDArray[np.bool_]) -> Chosen:
    return True if chosen.all() else chosen if chosen.any() else False


def _of_topics(batch: MessageBatch, chosen: Callable[[str], object]) -> Chosen:
    """Return, for each message, whether ``chosen`` returns True for its topic; each topic is checked once."""
    if isinstance(batch.topics, Constant):
        return bool(chosen(batch.topics.value))
    topics = to_iterable(batch.topics)
    distinct = set(topics)
    found = set(filter(chosen, distinct))
    if len(found) in (0, len(distinct)):
        return bool(found)
    return np.fromiter(map(found.__contains__, topics), np.bool_, len(batch))


def _asked(properties: Column, rows: int) -> Chosen:
    """Return, for each message, whether its publisher requests that it is stored."""
    if isinstance(properties, Constant):
        return _asks(properties.value)
    return _shortened(np.fromiter(map(_asks, to_iterable(properties)), np.bool_, rows))


def _asks(properties: Properties | None) -> bool:
    return properties is not None and not _ASKING.isdisjoint(properties.user_properties)


def _route(hub: Hub, batch: MessageBatch, others: npt.NDArray[np.bool_], now: int) -> None:
    """Pass the messages that are ``live`` to the current followers; messages without a timestamp get ``now``."""
    if not others.any():
        return
    rows = np.flatnonzero(others & _of_topics(batch, hub.matching))
    if len(rows):
        messages = (batch if len(rows) == len(batch) else batch.take(rows)).to_messages()
        hub.route([m if m.timestamp is not None else msgspec.structs.replace(m, timestamp=now) for m in messages])
