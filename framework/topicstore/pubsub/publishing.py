"""Publishing: what is stored, what is kept as its topic's retained message, and what only goes by.

A published message is stored, once, if its publisher asks for it (the user property `PERSIST`), if a
persistence rule matches (`topicstore.pubsub.persistence_rules`), or if a durable subscription does. The others are
handed to whoever listens now, and are gone. Who comes later, and replays, is promised the first two;
what was stored for a subscription is there as long as its generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_iterable
from topicstore.contract.model import Properties
from topicstore.contract.requests import Destinations, StoreResult
from topicstore.contract.state import StateWrite
from topicstore.storage.storage import Storage

from .hub import Hub
from .persistence_rules import PersistenceRules
from .retained import retained_rows

__all__ = ["PERSIST", "PublishResult", "publish"]

PERSIST = "topicstore-persist"
"""The user property with which a publisher asks for its message to be stored; its value is ``1`` or ``true``."""

_ASKING = frozenset(((PERSIST, "1"), (PERSIST, "true")))


@attrs.frozen(kw_only=True, slots=False)
class PublishResult(StoreResult):
    """What became of published messages. ``batch`` and ``ids`` are those of the stored ones; ``count`` is of all."""

    stored: int
    """How many were stored: visible to the next read, and as durable as the database was told."""
    routed: int
    """How many were not, and went to whoever listened."""
    retained: int
    """How many became their topics' retained messages."""


def publish(
    storage: Storage,
    batch: MessageBatch,
    state: Mapping[int, Sequence[StateWrite]],
    *,
    rules: PersistenceRules,
    wanted: Callable[[], Callable[[str], object]],
    hub: Callable[[], Hub | None],
) -> PublishResult:
    """Publish messages that were checked; see `Database.publish`.

    wanted: returns a function that says of a topic whether a durable subscription matches it; asked for only where
            neither rules nor publishers decide.
    hub:    returns who listens; asked for when everything was committed.
    """
    stored = _chosen(batch, rules, wanted)
    keyed, writes = retained_rows(batch, storage.shard_of)
    for shard, more in state.items():
        writes[shard] = [*writes.get(shard, ()), *more]
    result = _store(storage, batch, stored, keyed, writes)
    listening = hub()
    if listening is not None:
        _route(listening, batch, ~stored, storage.clock())
    return PublishResult(
        count=len(batch),
        stored=result.count,
        routed=len(batch) - result.count,
        retained=len(keyed),
        lifted=result.lifted,
        rejoin=result.rejoin,
    )


def _store(
    storage: Storage,
    batch: MessageBatch,
    stored: npt.NDArray[np.bool_],
    keyed: Mapping[int, tuple[int, bytes]],
    state: Mapping[int, Sequence[StateWrite]],
) -> StoreResult:
    """Commit what is stored and kept, and the state; what only goes by does not pass the plugins if all of it does."""
    if not keyed and stored.all():
        return storage.write(batch, state)
    if keyed or stored.any():
        return storage.write(batch, state, Destinations(stored=stored, keyed=keyed))
    if state:
        return storage.write(MessageBatch.empty(), state)
    return StoreResult(count=0, rejoin=MessageBatch.empty)


def _chosen(
    batch: MessageBatch, rules: PersistenceRules, wanted: Callable[[], Callable[[str], object]]
) -> npt.NDArray[np.bool_]:
    """Say of each message whether it is to be stored: what is quickly told first."""
    stored = rules.matching(batch)
    if not stored.all():
        stored |= _asked(batch.properties, len(batch))
    if not stored.all():
        stored |= _of_topics(batch, wanted())
    return stored


def _of_topics(batch: MessageBatch, chosen: Callable[[str], object]) -> npt.NDArray[np.bool_]:
    """Say of each message whether its topic is one of the ``chosen``; each topic is asked for once."""
    topics = to_iterable(batch.topics)
    found = set(filter(chosen, set(topics)))
    if not found:
        return np.zeros(len(batch), np.bool_)
    return np.fromiter(map(found.__contains__, topics), np.bool_, len(batch))


def _asked(properties: Iterable[Properties | None], rows: int) -> npt.NDArray[np.bool_] | bool:
    """Say of each message whether its publisher asks for it to be stored."""
    if isinstance(properties, Constant):
        return _asks(properties.value)
    return np.fromiter(map(_asks, to_iterable(properties)), np.bool_, rows)


def _asks(properties: Properties | None) -> bool:
    return properties is not None and not _ASKING.isdisjoint(properties.user_properties)


def _route(hub: Hub, batch: MessageBatch, live: npt.NDArray[np.bool_], now: int) -> None:
    """Hand the messages that are ``live`` to those who listen, with a time."""
    if not live.any():
        return
    rows = np.flatnonzero(live & _of_topics(batch, hub.matching))
    if len(rows):
        messages = (batch if len(rows) == len(batch) else batch.take(rows)).to_messages()
        hub.route([m if m.timestamp is not None else msgspec.structs.replace(m, timestamp=now) for m in messages])
