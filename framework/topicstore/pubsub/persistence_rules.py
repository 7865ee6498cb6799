"""Persistence rules, which store messages that neither their publisher nor a durable subscription asks to store.

Stored form (state keyspace of shard 0; keys begin with the byte 1, which is left out here)::

    "pr" xxh3_128 of the value's msgpack -> record (see `topicstore.shard.record_codec`) of
                                            version 1, topic filter, client id or nil, least QoS

Fields are only ever appended.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from topicstore.contract.arguments import check_within
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable, to_list
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.topics import TopicFilter, check_utf8
from topicstore.runtime.bounded_cache import BoundedCache
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import Applied, FrameworkWrite, ShardState

from .filter_index import FilterIndex

__all__ = ["DECODERS", "PersistenceRule", "PersistenceRules", "stored_rules"]

_PREFIX = b"\1pr"
_VERSION = 1
_NEVER = 3
"""A number above every QoS."""
_REMEMBERED, _BYTES = 65_536, 16 << 20


@attrs.frozen
class PersistenceRule:
    """Messages to store: those whose topics match, of one publisher or of all, with at least a given QoS."""

    topic_filter: str = "#"
    client_id: str | None = attrs.field(default=None, kw_only=True)
    """The publisher's client id; None: any publisher."""
    least_qos: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        TopicFilter(self.topic_filter)
        if self.client_id is not None:
            check_utf8(self.client_id, "client id", InvalidArgumentError)
        check_within("least_qos", self.least_qos, 0, 2)

    @property
    def described(self) -> str:
        """The rule as text for people, such as ``sensors/# from QoS 1 on``."""
        of = "" if self.client_id is None else f" by client {self.client_id!r}"
        return f"{self.topic_filter}{of}{f' from QoS {self.least_qos} on' if self.least_qos else ''}"


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    topic_filter: str
    client_id: str | None
    least_qos: int


_CODEC = RecordCodec(_Record, _VERSION)

_Asked = str | tuple[str, str]
"""A topic, or topic and client id if any rule names a publisher."""


@attrs.frozen
class _Loaded:
    """The rules as they were read, and recent decisions by them. Replaced as a whole when rules change."""

    applied: Applied | None
    """The last applied write that changed rules, as of before they were read; None without a log."""
    filters: tuple[str, ...]
    """The topic filters of all rules, sorted."""
    by_client: bool
    """Whether any rule names a publisher."""
    routes: FilterIndex[PersistenceRule]
    least_qos: BoundedCache[_Asked, int] = attrs.field(factory=lambda: BoundedCache(_REMEMBERED, _BYTES))
    """The lowest QoS at which messages are stored."""


class PersistenceRules:
    """The persistence rules of one database. Rules are durable; all methods are thread-safe.

    In a cluster, only the site that owns shard 0 can change rules; on other sites changes raise `ShardElsewhereError`.
    Each site applies the rules that its copy of shard 0 has.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._changing = ProcessLock()
        """Held while rules change. Guards `_loaded`, which is replaced as a whole, so reading it needs no lock."""
        self._loaded = self._load()

    def _load(self) -> _Loaded:
        # The version is read before the rules, so that a change in between makes them be read again.
        applied = None if self._state.last_applied is None else self._state.last_applied(_PREFIX)
        rules = list(self)
        routes: FilterIndex[PersistenceRule] = FilterIndex()
        for rule in rules:
            routes.add(TopicFilter(rule.topic_filter), rule)
        filters = tuple(sorted({rule.topic_filter for rule in rules}))
        return _Loaded(applied, filters, any(rule.client_id is not None for rule in rules), routes)

    def _current(self) -> _Loaded:
        """Return the rules, read again if another site has changed them."""
        last_applied = self._state.last_applied
        if last_applied is not None and self._loaded.applied != last_applied(_PREFIX):
            with self._changing:
                self._loaded = self._load()
        return self._loaded

    @property
    def filters(self) -> tuple[str, ...]:
        """The topic filters of all rules, sorted."""
        return self._current().filters

    def __repr__(self) -> str:
        return f"<PersistenceRules of {self._state!r}>"

    def __iter__(self) -> Iterator[PersistenceRule]:
        """Iterate over a snapshot of the rules, sorted by filter."""
        return iter(stored_rules(self._state))

    def __len__(self) -> int:
        """Return the number of rules."""
        return sum(1 for _ in self._state.scan(_PREFIX))

    def __bool__(self) -> bool:
        """Return whether there is any rule. Reads the database only after another site has changed the rules."""
        loaded = self._loaded if self._state.last_applied is None else self._current()
        return bool(loaded.filters)

    def __contains__(self, rule: PersistenceRule) -> bool:
        """Return whether there is a rule equal to this one."""
        return self._state.get(_encode(rule)[0]) is not None

    def add(self, topic_filter: str = "#", *, client_id: str | None = None, least_qos: int = 0) -> PersistenceRule:
        """Store matching messages from now on; return the rule. Adding an existing rule changes nothing.

        ``#`` doesn't match topics that begin with ``$`` [MQTT-4.7.2-1]; these need a separate rule.
        """
        rule = PersistenceRule(topic_filter, client_id=client_id, least_qos=least_qos)
        key, value = _encode(rule)
        with self._changing:
            self._state.write([FrameworkWrite(key, value)])
            self._loaded = self._load()
        return rule

    def remove(self, rule: PersistenceRule) -> bool:
        """Remove a rule; return False if no equal rule exists. Messages that were stored for it stay stored."""
        key, _ = _encode(rule)
        with self._changing:
            had = self._state.get(key) is not None
            self._state.write([FrameworkWrite(key, None)])
            self._loaded = self._load()
        return had

    # --- matching ---

    def matching(self, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        """Return, for each message, whether a rule matches it."""
        loaded = self._current()
        if not len(batch) or not loaded.filters:
            return np.zeros(len(batch), np.bool_)
        qos = np.fromiter(to_iterable(batch.qos), np.int8, len(batch))
        matching: npt.NDArray[np.bool_] = qos >= _least_qos(loaded, batch)
        return matching


def stored_rules(state: ShardState) -> list[PersistenceRule]:
    """Return the persistence rules in the state of shard 0, sorted by filter."""
    rules = [_decode(key, value) for key, value in state.scan(_PREFIX)]
    return sorted(rules, key=lambda rule: (rule.topic_filter, rule.client_id or "", rule.least_qos))


def _least_qos(loaded: _Loaded, batch: MessageBatch) -> npt.NDArray[np.int8]:
    known = loaded.least_qos
    asked: list[_Asked] = to_list(batch.topics)
    if loaded.by_client:
        asked = list(zip(asked, to_iterable(batch.client_ids), strict=True))  # type: ignore[arg-type]
    least = list(map(known.get, asked))
    if None in least:
        missing = {one for one, qos in zip(asked, least, strict=True) if qos is None}
        decided = {one: known.keep(one, _decide(loaded, one)) for one in missing}
        least = [decided[one] if qos is None else qos for one, qos in zip(asked, least, strict=True)]
    return np.array(least, np.int8)


def _decide(loaded: _Loaded, asked: _Asked) -> int:
    topic, client_id = asked if isinstance(asked, tuple) else (asked, None)
    matching = (rule for rule in loaded.routes.match(topic) if rule.client_id in (None, client_id))
    return min((rule.least_qos for rule in matching), default=_NEVER)


def _encode(rule: PersistenceRule) -> tuple[bytes, bytes]:
    record = _Record(_VERSION, rule.topic_filter, rule.client_id, rule.least_qos)
    key = _PREFIX + xxhash.xxh3_128_digest(msgspec.msgpack.encode(record))
    return key, _CODEC.encode(key, record)


def _decode(key: bytes, stored: bytes) -> PersistenceRule:
    record = _CODEC.decode(key, stored, "shard 0, state: persistence rule")
    return PersistenceRule(record.topic_filter, client_id=record.client_id, least_qos=record.least_qos)


DECODERS: Decoders = {_PREFIX: _decode}
"""Decoder of the state that holds the rules."""
