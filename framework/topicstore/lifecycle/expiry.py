"""Retention by topic filter: deletes messages before their generation is dropped, by rules.

A rule deletes messages older than its age that match its filter, except messages that another filter keeps longer. One
rule may be for messages that no filter matches. A rule passes through the positions of a shard once, the oldest first,
with the ordinary delete, in ranges of positions, and stores its progress after each range. So a rule reads each message
once, and rewrites each block or key at most once for each range that ends in it. In the background, a range covers at
least a quarter of the age. After an interruption the range is repeated. New messages get higher positions, so they are
never before the stored progress. After a change of the rules, every rule begins again at the oldest message.

Stored form (state keyspace of every shard; keys begin with the byte 1, which is left out here)::

    "pt" -> record (see `topicstore.shard.record_codec`) of version 1, the digest of all rules, and, by the name of a
            rule, the first position that the rule has not processed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic

import attrs
import msgspec
import numpy as np
import xxhash

from topicstore.contract.errors import CorruptionError
from topicstore.contract.positions import first_position, time_of
from topicstore.contract.topics import TopicFilter
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.records import GenerationRecord
from topicstore.shard.rewriter import Decoders
from topicstore.shard.shard import Shard
from topicstore.shard.state import FrameworkWrite
from topicstore.shard.tally_tables import Span
from topicstore.storage.counting.counting import read_counts
from topicstore.storage.maintenance import delete_local
from topicstore.storage.storage import Storage

from .retention_policy import FOREVER, GenerationAge, Rule

__all__ = ["DECODERS", "Expired", "count_expired", "expire"]

_KEY = b"\1pt"
_VERSION = 1
_PARTS = 4
"""The divisor of a rule's age that gives the length of a range in background runs."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    digest: bytes
    reached: dict[str, int]


_CODEC = RecordCodec(_Record, _VERSION)


@attrs.frozen
class Expired:
    """The result of applying the rules."""

    deleted: Mapping[str, int]
    """Number of deleted messages, by the name of the rule."""
    wait: int
    """Microseconds after which further messages may have expired."""


def expire(
    storage: Storage, rules: Sequence[Rule], generations: Sequence[GenerationAge], now: int, *, at_once: bool
) -> Expired:
    """Delete messages that have expired by the rules: all with ``at_once``, otherwise only ranges of full length.

    A site of a cluster deletes messages only in the shards that it owns.

    ``now``: microseconds since the epoch. ``generations``: their ages, which also apply to messages with positions in
    the future.

    Raises `CorruptionError` for the first shard and rule that find damage, after all others were processed.
    """
    deleted = dict.fromkeys((rule.name for rule in rules), 0)
    wait, digest, damages = FOREVER, _digest(rules), list[CorruptionError]()
    for number, shard in enumerate(storage.shards) if rules else ():
        if not shard.writer.owned:
            continue
        before = _reached(storage, number, digest)
        reached = dict(before)
        for rule in rules:
            cutoff, first = now - rule.age, reached.get(rule.name, 0)
            last = _last_expired(shard, shard.generations.listed(), generations, cutoff)
            if last >= first and (at_once or cutoff - time_of(first) >= rule.age // _PARTS):
                wanted = None if rule.matches is None else TopicFilter(rule.matches)
                try:
                    deleted[rule.name] += delete_local(storage, shard, wanted, first, last, rule.spare)
                except CorruptionError as bad:
                    damages.append(bad)
                    continue
                reached[rule.name] = first = last + 1
            pending = time_of(first) if shard.writer.watermark >= first else now
            wait = min(wait, max(pending + rule.age + rule.age // _PARTS + 1 - now, 1))
        if reached != before:
            write = FrameworkWrite(_KEY, _CODEC.encode(_KEY, _Record(_VERSION, digest, reached)))
            storage.state(number).write([write])
    if damages:
        raise damages[0]
    return Expired({name: count for name, count in deleted.items() if count}, wait)


def count_expired(
    storage: Storage, rules: Sequence[Rule], generations: Sequence[GenerationAge], now: int
) -> dict[str, int]:
    """Return the number of messages that `expire` would delete now, by the name of the rule.

    The messages are read, without payloads if the layout can do so. Messages of topics that begin with ``$`` are
    counted only for filters that begin with ``$``. At a site of a cluster, the messages of all shards are counted:
    those of a shard that the site doesn't keep are counted by another site.

    Raises the errors of reading.
    """
    counts = dict.fromkeys((rule.name for rule in rules), 0)
    digest, began = _digest(rules), monotonic()
    for number, shard in enumerate(storage.shards) if rules else ():
        elsewhere = shard.elsewhere
        # Without the progress of the rules, ranges whose messages were deleted are read once more.
        reached = _reached(storage, number, digest) if elsewhere is None else {}
        records = [slab.record for slab in shard.reader.slabs(None).slabs]
        for rule in rules:
            last = _last_expired(shard, records, generations, now - rule.age)
            spare = [TopicFilter(name) for name in rule.spare]
            wanted = TopicFilter(rule.matches or "#")
            for record in records:
                before = max(reached.get(rule.name, 0), record.first_position) - 1
                end = last if record.last_position is None else min(last, record.last_position)
                if before < end and record.archive is None:
                    span = Span(before, end)
                    tally = (
                        read_counts(storage, shard, record.number, wanted, span, began, topics=True)
                        if elsewhere is None
                        else elsewhere.counts_between(record.number, wanted, span.before, span.last)
                    )
                    going = np.ones(len(tally), np.bool_)
                    for one in spare:
                        going &= ~tally.matching(one)
                    counts[rule.name] += int(tally.messages[going].sum())
    return counts


def _last_expired(
    shard: Shard, records: Sequence[GenerationRecord], generations: Sequence[GenerationAge], cutoff: int
) -> int:
    """Return the last position of a shard that is visible to readers and older than ``cutoff``."""
    ended = {generation.number: generation.ended for generation in generations}
    last = first_position(cutoff) - 1
    for record in records:
        if record.last_position is None or ended.get(record.number, cutoff) >= cutoff:
            break
        last = max(last, record.last_position)
    return min(last, shard.reader.watermark)


def _reached(storage: Storage, shard: int, digest: bytes) -> dict[str, int]:
    stored = storage.state(shard).get(_KEY)
    if stored is None:
        return {}
    record = _decode(_KEY, stored)
    return record.reached if record.digest == digest else {}


def _digest(rules: Sequence[Rule]) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode([(rule.name, rule.age, rule.spare) for rule in rules]))


def _decode(key: bytes, stored: bytes) -> _Record:
    return _CODEC.decode(key, stored, "state: how far retention by filters has come")


DECODERS: Decoders = {_KEY: _decode}
"""Decoder of the state that holds the progress of the rules."""
