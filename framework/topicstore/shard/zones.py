"""Zone maps of timestamps, with which a replay by timestamp skips ranges of positions.

A zone is `SIZE` consecutive messages of a generation in one shard, with the spans in which their timestamps lie (a zone
map, as in Moerkotte, "Small Materialized Aggregates", VLDB 1998). The current zone is part of the
shard's tail, so every write updates it. A zone's record is stored in the engine write that fills the zone or seals its
generation.

Stored form (state keyspace)::

    00 "zone" u32 generation, u64 first position    -> ZoneRecord

A ZoneRecord is a record (`topicstore.shard.record_codec`) of version 1. The spans of a zone may be wider than the times
of its messages, for example after a delete, and are never narrower. Positions that no zone covers may have messages of
any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Column, Constant, to_integers, to_iterable, window
from topicstore.contract.engine import STATE, Reader, WriteBatch, encode_generation
from topicstore.contract.replay_plan import TimeRange

from .record_codec import RecordCodec

__all__ = ["SIZE", "Span", "Zone", "ZoneRecord", "fill", "load_zones", "may_hold", "put_zone", "remove_zones"]

SIZE = 65_536
"""The number of messages in a zone."""
_MOST_SPANS = 6
"""The maximum number of spans of a zone. With several spans, a few messages with a distant timestamp don't widen the
zone to all times in between."""
_NEAR = 60_000_000
"""The maximum gap, in microseconds, between two spans that are joined into one."""
_VERSION = 1
_KEY = b"\0zone"

Span = tuple[int, int]
"""The least and the greatest of a set of positions or timestamps."""


class ZoneRecord(msgspec.Struct, frozen=True, gc=False, array_like=True, kw_only=True):
    """A zone to which no more messages are added."""

    version: int = _VERSION
    first: int
    """The first position of the zone, which covers all messages of its generation from there to ``last``."""
    last: int
    """The last position of the zone, inclusive."""
    spans: tuple[Span, ...]
    """The spans in which the messages' timestamps lie, in order."""


class Zone(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The current zone of a shard, to which messages are added."""

    first: int
    """The first position of the zone, which covers all messages of its generation from there on."""
    messages: int = 0
    """The number of messages added to the zone."""
    spans: tuple[Span, ...] = ()
    """The spans in which the messages' timestamps lie, in order."""

    def closed(self, last: int) -> ZoneRecord:
        """Return the record of the zone, which ends at position ``last``."""
        return ZoneRecord(first=self.first, last=last, spans=self.spans)

    def with_messages(self, timestamps: Column) -> Zone:
        """Return the zone with additional messages that have these timestamps."""
        return Zone(self.first, self.messages + len(timestamps), _extended(self.spans, timestamps))


def fill(zone: Zone, placed: MessageBatch) -> tuple[Sequence[ZoneRecord], Zone]:
    """Add messages after those of the current zone; return the records of full zones, and the new current zone.

    The batch must have positions and timestamps.
    """
    begin, rows, timestamps = 0, len(placed), placed.timestamps
    if zone.messages + rows < SIZE:  # the usual case: the batch fills no zone
        return (), Zone(zone.first, zone.messages + rows, _extended(zone.spans, timestamps))
    full: list[ZoneRecord] = []
    while zone.messages + rows - begin >= SIZE:
        end = begin + max(SIZE - zone.messages, 1)  # a zone from a version with another `SIZE` may be larger
        last = int(placed.positions[end - 1])
        full.append(zone.with_messages(window(timestamps, begin, end)).closed(last))
        zone, begin = Zone(last + 1), end
    if begin < rows:
        zone = zone.with_messages(window(timestamps, begin, rows))
    return full, zone


def may_hold(times: TimeRange, zones: Iterable[ZoneRecord], first: int, last: int) -> Iterator[Span]:
    """Yield the spans of positions from ``first`` to ``last`` that may have messages of ``times``, in order.

    The zones must be in order of positions, and may overlap.
    """
    for zone in zones:
        if first <= zone.last and not times.overlaps_any(zone.spans):
            if first < zone.first:
                yield first, min(zone.first - 1, last)
            first = zone.last + 1
        if first > last:
            return
    yield first, last


# --- spans ------------------------------------------------------------------------------


def _extended(spans: tuple[Span, ...], timestamps: Column) -> tuple[Span, ...]:
    """Return the spans extended to include these timestamps, which must not be empty."""
    if isinstance(timestamps, Constant):
        least = greatest = timestamps.value
    else:
        least, greatest = _bounds(timestamps)
    if spans:
        begin, end = spans[-1]
        if begin <= least <= end + _NEAR and (greatest <= end or greatest - least <= _NEAR):  # the usual case
            return spans if greatest <= end else (*spans[:-1], (begin, greatest))
        if any(begin <= least and greatest <= end for begin, end in spans):
            return spans
    return _joined([*spans, *_split(timestamps, least, greatest)])


def _bounds(timestamps: Column) -> Span:
    if isinstance(timestamps, np.ndarray):
        return int(timestamps.min()), int(timestamps.max())
    held = to_iterable(timestamps)
    return min(held), max(held)


def _split(timestamps: Column, least: int, greatest: int) -> list[Span]:
    """Return the spans of the timestamps, divided at the widest gaps."""
    if greatest - least <= _NEAR:
        return [(least, greatest)]
    times = np.sort(to_integers(timestamps))
    gaps = np.diff(times)
    after = np.flatnonzero(gaps > _NEAR)
    if len(after) >= _MOST_SPANS:
        after = np.sort(after[np.argsort(gaps[after])[1 - _MOST_SPANS :]])
    begins, ends = times[np.append(0, after + 1)], times[np.append(after, len(times) - 1)]
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Sort the spans, and join those that overlap or lie near each other, until at most `_MOST_SPANS` are left."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] <= _NEAR:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    while len(joined) > _MOST_SPANS:
        nearest = min(range(1, len(joined)), key=lambda at: joined[at][0] - joined[at - 1][1])
        joined[nearest - 1 : nearest + 1] = [(joined[nearest - 1][0], joined[nearest][1])]
    return tuple(joined)


# --- the stored form --------------------------------------------------------------------

_ZONES = RecordCodec(ZoneRecord, _VERSION)


def put_zone(batch: WriteBatch, generation: int, record: ZoneRecord) -> None:
    """Add the record of a zone to a write."""
    key = _KEY + encode_generation(generation) + record.first.to_bytes(8, "big")
    batch.put(STATE, key, _ZONES.encode(key, record))


def load_zones(reader: Reader, generation: int) -> Iterator[ZoneRecord]:
    """Yield the recorded zones of a generation in order of positions. Raises `CorruptionError`."""
    for chunk in reader.scan(STATE, _KEY + encode_generation(generation), _KEY + encode_generation(generation + 1)):
        for key, data in chunk:
            yield _ZONES.decode(key, data, f"state: zone {key[len(_KEY) :].hex()}")


def remove_zones(batch: WriteBatch, generation: int) -> None:
    """Add the removal of the records of a generation's zones to a write."""
    batch.delete_range(STATE, _KEY + encode_generation(generation), _KEY + encode_generation(generation + 1))
