"""Persistence rules: which published messages are stored although neither publisher nor subscriber asks for it.

Stored form (state keyspace of shard 0; keys begin with a byte of one, left out here)::

    "pr" xxh3_128 of the value's msgpack -> record (see `topicstore.shard.record_codec`) of
                                            version 1, topic filter, client id or nil, least QoS

Fields are only ever appended.
"""

from __future__ import annotations

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
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.state import FrameworkWrite, ShardState

from .filter_index import FilterIndex

__all__ = ["PersistenceRule", "PersistenceRules"]

_PREFIX = b"\1pr"
_VERSION = 1
_NEVER = 3
"""Above every QoS."""
_REMEMBERED = 65_536


@attrs.frozen
class PersistenceRule:
    """Store the messages whose topics match, of one publisher or of all, from a QoS on."""

    topic_filter: str = "#"
    client_id: str | None = attrs.field(default=None, kw_only=True)
    """The publisher's; None: whoever published."""
    least_qos: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        TopicFilter(self.topic_filter)
        if self.client_id is not None:
            check_utf8(self.client_id, "client id", InvalidArgumentError)
        check_within("least_qos", self.least_qos, 0, 2)


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    topic_filter: str
    client_id: str | None
    least_qos: int


_CODEC = RecordCodec(_Record, _VERSION)

_Asked = str | tuple[str, str]
"""A topic, or topic and client id if some rule asks for the publisher."""


@attrs.frozen
class _Decisions:
    """What the rules say of the messages that were asked for lately. Replaced as a whole when rules change."""

    by_client: bool
    least_qos: dict[_Asked, int] = attrs.field(factory=dict)
    """From which QoS on messages are stored."""


class PersistenceRules:
    """The persistence rules of one database. Durable; all methods may be called from any thread."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._changing = ProcessLock()
        """Held while rules change. Guards `_decisions`, which is replaced as a whole, so a glance needs no lock."""
        self._routes: FilterIndex[PersistenceRule] = FilterIndex()
        rules = self.list()
        for rule in rules:
            self._routes.add(TopicFilter(rule.topic_filter), rule)
        self._decisions = _undecided(rules)

    def list(self) -> list[PersistenceRule]:
        """Return the rules, sorted by filter."""
        rules = [_decode(key, value) for key, value in self._state.scan(_PREFIX)]
        return sorted(rules, key=lambda rule: (rule.topic_filter, rule.client_id or "", rule.least_qos))

    def add(self, topic_filter: str = "#", *, client_id: str | None = None, least_qos: int = 0) -> PersistenceRule:
        """Store messages that match from now on; return the rule. Adding one that there is changes nothing.

        ``#`` matches no topics that begin with ``$``; those need a filter of their own.
        """
        rule = PersistenceRule(topic_filter, client_id=client_id, least_qos=least_qos)
        key, value = _encode(rule)
        with self._changing:
            self._state.write([FrameworkWrite(key, value)])
            self._routes.add(TopicFilter(topic_filter), rule)
            self._decisions = _undecided(self.list())
        return rule

    def remove(self, rule: PersistenceRule) -> bool:
        """Remove a rule; False if there was none like it. What was stored for it stays."""
        key, _ = _encode(rule)
        with self._changing:
            self._state.write([FrameworkWrite(key, None)])
            had = self._routes.remove(TopicFilter(rule.topic_filter), rule)
            self._decisions = _undecided(self.list())
        return had

    # --- asking ---

    def matching(self, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        """Say of each message whether a rule matches."""
        if not len(batch) or not len(self._routes):
            return np.zeros(len(batch), np.bool_)
        qos = np.fromiter(to_iterable(batch.qos), np.int8, len(batch))
        matching: npt.NDArray[np.bool_] = qos >= self._least_qos(batch)
        return matching

    def _least_qos(self, batch: MessageBatch) -> npt.NDArray[np.int8]:
        decisions = self._decisions
        known = decisions.least_qos
        asked: list[_Asked] = to_list(batch.topics)
        if decisions.by_client:
            asked = list(zip(asked, to_iterable(batch.client_ids), strict=True))  # type: ignore[arg-type]
        try:
            return np.fromiter(map(known.__getitem__, asked), np.int8, len(asked))
        except KeyError:
            known.update({one: self._decide(one) for one in set(asked) if one not in known})
        if len(known) > _REMEMBERED:
            with self._changing:
                if self._decisions is decisions:  # else rules have changed since
                    self._decisions = _Decisions(decisions.by_client)
        return np.fromiter(map(known.__getitem__, asked), np.int8, len(asked))

    def _decide(self, asked: _Asked) -> int:
        topic, client_id = asked if isinstance(asked, tuple) else (asked, None)
        matching = (rule for rule in self._routes.match(topic) if rule.client_id in (None, client_id))
        return min((rule.least_qos for rule in matching), default=_NEVER)


def _undecided(rules: list[PersistenceRule]) -> _Decisions:
    return _Decisions(any(rule.client_id is not None for rule in rules))


def _encode(rule: PersistenceRule) -> tuple[bytes, bytes]:
    record = _Record(_VERSION, rule.topic_filter, rule.client_id, rule.least_qos)
    key = _PREFIX + xxhash.xxh3_128_digest(msgspec.msgpack.encode(record))
    return key, _CODEC.encode(key, record)


def _decode(key: bytes, stored: bytes) -> PersistenceRule:
    record = _CODEC.decode(key, stored, "shard 0, state: persistence rule")
    return PersistenceRule(record.topic_filter, client_id=record.client_id, least_qos=record.least_qos)
