"""`InterestSpans`: the ranges of messages that are stored only for sessions, and can be removed once delivered.

A *span* is a range of positions of a shard in which every message is stored only for sessions, except those of topics
that a filter of the span matches: the filters of the persistence rules of that time. A message that is stored for
another reason ends the spans before it is stored. So a message is outside of every span, or matches a filter of its
span, if anything but a session asked for it. The log of a shard orders the end of its span before the message, so this
holds after any crash.

The spans of all shards begin and end together, once for many messages, unless programs store and clients publish in
turns. Of more than 10,000 spans of a shard the oldest is forgotten: its messages then stay like all others. A database
that a cluster shares begins no spans; those of a database that became a cluster are ended by the owners of its shards.

Stored form (state keyspace of every shard; keys begin with the byte 1, which is left out here)::

    "pi" position:8 -> a span that begins after the position, which is big-endian: record (see
                       `topicstore.shard.record_codec`) of version 1, last position, or nil while it is open, filters
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import msgspec

from topicstore.runtime.locks import FairLock, check_not_owned
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.shard import Shard
from topicstore.shard.state import FrameworkWrite, ShardState

__all__ = ["DECODERS", "InterestSpans", "Span"]

_PREFIX = b"\1pi"
_VERSION = 1
_MOST = 10_000


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A range of positions of a shard; see the module."""

    after: int
    """The position after which the span begins."""
    last: int | None
    """The last position of the span; None while the span is open."""
    spare: tuple[str, ...]
    """The filters of messages that are stored whether or not a session waits for them."""


class _Record(msgspec.Struct, frozen=True, array_like=True):
    version: int
    last: int | None
    spare: tuple[str, ...]


_CODEC = RecordCodec(_Record, _VERSION)


@attrs.define(eq=False)
class InterestSpans:
    """The spans of one open database. Thread-safe."""

    _shards: Sequence[Shard]
    _possible: bool
    """Whether spans may begin: not if a cluster shares the database, because every message is stored there."""
    _lock: FairLock = attrs.field(factory=FairLock, init=False)
    """Guards the changes of the attributes below, except `storing`. It is acquired before the locks of shards."""
    _spans: dict[int, dict[int, Span]] = attrs.field(factory=dict, init=False)
    """By shard, its spans by their `Span.after`, the oldest first. Shards that were not read yet are absent."""
    storing: set[object] = attrs.field(factory=set, init=False)
    """The running writes that no span may cover. A write is added before it reads `goes_on`, and is removed at its
    end; no lock is needed. So `begin`, which sets `goes_on` before it reads this, begins no span during it."""
    goes_on: bool = attrs.field(default=True, init=False)
    """Whether a span may be open in some shard, so that a write of `storing` must call `end`."""
    tracks: bool = attrs.field(default=False, init=False)
    """Whether `begin` begins spans."""
    current: tuple[str, ...] | None = attrs.field(default=None, init=False)
    """The filters of the spans that are open in all shards; None if none is. A span that ends after a writer has read
    this doesn't cover the writer's messages, which then stay."""

    def track(self, *, on: bool) -> None:
        """Have `begin` begin spans or not."""
        on = on and self._possible
        with self._lock:
            if on != self.tracks:
                self.tracks, self.current = on, None

    # --- called by writes ---

    def begin(self, spare: tuple[str, ...]) -> bool:
        """Have spans cover messages that are stored only for sessions, or match ``spare``; return whether they do."""
        check_not_owned(self._lock)
        with self._lock:
            if not self.tracks:
                return False
            if self.current == spare:
                return True
            if self._end_locked():
                return False
            self.goes_on = True  # before `storing` is read
            if self.storing:
                self.goes_on = False
                return False
            for shard in self._shards:
                spans = self._spans[shard.number]
                oldest = [next(iter(spans))] if len(spans) >= _MOST else []
                self._change_locked(shard.number, oldest, [Span(self._position(shard.number), None, spare)])
            self.current = spare
            return True

    def end(self) -> frozenset[int]:
        """End the spans; return the shards that take no writes, in which a span may still be open."""
        check_not_owned(self._lock)
        with self._lock:
            return self._end_locked()

    def forget(self) -> None:
        """Read the spans again when they are next needed. Called before a shard that took no writes is reopened."""
        with self._lock:
            self.goes_on, self.current = True, None
            self._spans.clear()

    # --- called by the removal ---

    def of_shard(self, shard: int) -> tuple[Span, ...]:
        """Return the spans of a shard, the oldest first."""
        check_not_owned(self._lock)
        with self._lock:
            return tuple(self._read_locked(shard).values())

    def removed(self, shard: int, upto: int) -> None:
        """Record that no message up to a position of a shard is stored only for sessions."""
        check_not_owned(self._lock)
        with self._lock:
            spans = self._read_locked(shard)
            begun = [one for one in spans.values() if one.after < upto]
            left = [msgspec.structs.replace(one, after=upto) for one in begun if one.last is None or one.last > upto]
            if begun:
                self._change_locked(shard, [one.after for one in begun], left)

    # --- under the lock ---

    def _position(self, shard: int) -> int:
        return self._shards[shard].writer.tail.last_position

    def _end_locked(self) -> frozenset[int]:
        """End the spans; return the shards that take no writes, in which a span may still be open."""
        if not self.goes_on:
            return frozenset()
        self.current = None
        if not self._possible:
            self._spans.clear()  # another site may have ended spans of a database that became a cluster
        refusing = {shard.number for shard in self._shards if shard.writer.failure is not None}
        elsewhere = False
        for shard in self._shards:
            if shard.number not in refusing:
                newest = next(reversed(self._read_locked(shard.number).values()), None)
                if newest is not None and newest.last is None:
                    if not shard.writer.owned:  # its owner ends the span before it stores anything
                        elsewhere = True
                        continue
                    last = self._position(shard.number)
                    ended = [msgspec.structs.replace(newest, last=last)] if last > newest.after else []
                    self._change_locked(shard.number, [newest.after], ended)
        self.goes_on = bool(refusing) or elsewhere
        return frozenset(refusing)

    def _read_locked(self, shard: int) -> dict[int, Span]:
        if shard not in self._spans:
            stored = self._state(self._shards[shard]).scan(_PREFIX)
            self._spans[shard] = {(one := _decode(*pair)).after: one for pair in stored}
        return self._spans[shard]

    def _change_locked(self, shard: int, gone: Sequence[int], new: Sequence[Span]) -> None:
        writes = {_key(after): FrameworkWrite(_key(after), None) for after in gone}
        for one in new:
            value = _CODEC.encode(_key(one.after), _Record(_VERSION, one.last, one.spare))
            writes[_key(one.after)] = FrameworkWrite(_key(one.after), value)
        spans = self._spans.pop(shard)  # after an error, which may come after the commit, they are read again
        self._state(self._shards[shard]).write(writes.values())
        found = {after: one for after, one in spans.items() if after not in gone} | {one.after: one for one in new}
        self._spans[shard] = dict(sorted(found.items()))

    @staticmethod
    def _state(shard: Shard) -> ShardState:
        return ShardState(shard.number, shard.writer.open_engine, shard.writer.write_state)


def _key(after: int) -> bytes:
    return _PREFIX + after.to_bytes(8, "big")


def _decode(key: bytes, stored: bytes) -> Span:
    record = _CODEC.decode(key, stored, "state: ranges of messages that are stored only for sessions")
    return Span(int.from_bytes(key[len(_PREFIX) :], "big"), record.last, record.spare)


DECODERS: Decoders = {_PREFIX: _decode}
"""Decoder of the state that holds the spans."""
