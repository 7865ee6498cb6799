"""`InterestSpans`: which messages are stored only because sessions wait for them, so that they can go once delivered.

A *span* is a range of positions of a shard in which every message is stored only for sessions, except those of topics
that a filter of the span matches: the filters of the persistence rules of that time. A message that is stored for
another reason ends the spans before it is stored. So a message is outside of every span, or matches a filter of its
span, if anything but a session asked for it. The log of a shard orders the end of its span before the message, so this
holds after any crash.

The spans of all shards begin and end together, once for many messages, unless programs store and clients publish in
turns. Of more than 10,000 spans of a shard the oldest is forgotten: its messages then stay like all others.

Stored form (state keyspace of every shard; keys begin with the byte 1, which is left out here)::

    "pi" position:8 -> a span that begins after the position, which is big-endian: record (see
                       `topicstore.shard.record_codec`) of version 1, last position or nil if it goes on, filters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import msgspec

from topicstore.contract.forking import ProcessLock
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.shard import Shard
from topicstore.shard.state import FrameworkWrite, ShardState

__all__ = ["DECODERS", "InterestSpans", "Span"]

_PREFIX = b"\1pi"
_VERSION = 1
_MOST = 10_000
_SETTLING = 1_000_000
"""Microseconds in which no span begins after writes needed no `InterestSpans.storing`, so that these have ended."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A range of positions of a shard; see the module."""

    after: int
    """The position after which it begins."""
    last: int | None
    """Its last position; None: it goes on."""
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
    _monotonic: Callable[[], int]
    _lock: ProcessLock = attrs.field(factory=ProcessLock, init=False)
    """Guards the attributes below. It is acquired before the locks of shards."""
    _spans: list[dict[int, Span]] = attrs.field(factory=list, init=False)
    """The spans of each shard by their beginning, the oldest first; empty before they are read."""
    _storing: int = attrs.field(default=0, init=False)
    """The number of writes under way that no span may cover."""
    _tracked_from: int | None = attrs.field(default=None, init=False)
    """The monotonic time from which spans may begin; None: never."""
    _ended: bool = attrs.field(default=False, init=False)
    """Whether no span goes on in any shard."""
    current: tuple[str, ...] | None = attrs.field(default=None, init=False)
    """The filters of the spans that go on; None if none does. A span that ends after it was read doesn't cover the
    reader's messages, which then stay. Reading it needs no lock."""
    idle: bool = attrs.field(default=False, init=False)
    """Whether no span goes on, and none can begin: a write then needs no `storing`. Reading it needs no lock."""

    def track(self, *, on: bool) -> None:
        """Have `begin` begin spans or not."""
        with self._lock:
            if on != (self._tracked_from is not None):
                since = self._monotonic() + (_SETTLING if self.idle else 0)
                self.idle, self._tracked_from, self.current = False, since if on else None, None

    # --- called by writes ---

    def begin(self, spare: tuple[str, ...]) -> None:
        """Have spans cover messages that are stored only for sessions, or match ``spare``, unless it is impossible.

        The caller has found that `current` has other filters.
        """
        with self._lock:
            if self._tracked_from is None:
                self._end_locked()
                self.idle = True
                return
            if self.current == spare or self._storing or self._monotonic() < self._tracked_from:
                return
            self._end_locked()
            self._ended = False
            for number in self._writable():
                spans = self._spans[number]
                oldest = [next(iter(spans))] if len(spans) >= _MOST else []
                self._change_locked(number, oldest, [Span(self._position(number), None, spare)])
            self.current = spare

    @contextmanager
    def storing(self) -> Iterator[None]:
        """End the spans, and begin none until the end of the context, in which messages are stored for any reason."""
        counted = False
        try:
            with self._lock:
                self._end_locked()
                self.idle = self._tracked_from is None
                self._storing += 1
                counted = True
            yield
        finally:
            if counted:
                with self._lock:
                    self._storing -= 1

    def forget(self) -> None:
        """Read the spans again when they are next needed, because a shard may have lost writes."""
        with self._lock:
            self._spans, self.current, self._ended, self.idle = [], None, False, False

    # --- called by the removal ---

    def of_shard(self, shard: int) -> tuple[Span, ...]:
        """Return the spans of a shard, the oldest first."""
        with self._lock:
            self._read_locked()
            return tuple(self._spans[shard].values())

    def removed(self, shard: int, upto: int) -> None:
        """Record that no message up to a position of a shard is stored only for sessions."""
        with self._lock:
            self._read_locked()
            begun = [one for one in self._spans[shard].values() if one.after < upto]
            left = [msgspec.structs.replace(one, after=upto) for one in begun if one.last is None or one.last > upto]
            if begun:
                later = {at: one for at, one in self._spans[shard].items() if at >= upto}
                self._change_locked(shard, [one.after for one in begun], left)
                self._spans[shard] = {one.after: one for one in left} | later

    # --- under the lock ---

    def _writable(self) -> list[int]:
        """Return the shards that take writes. Before another one takes messages again, `forget` is called."""
        return [shard.number for shard in self._shards if shard.writer.failure is None]

    def _position(self, shard: int) -> int:
        return self._shards[shard].writer.tail.last_position

    def _end_locked(self) -> None:
        if self._ended:
            return
        self._read_locked()
        self.current = None
        for number in self._writable():
            spans = self._spans[number]
            newest = next(reversed(spans.values()), None)
            if newest is not None and newest.last is None:
                last = max(self._position(number), newest.after)
                ended = [] if last == newest.after else [msgspec.structs.replace(newest, last=last)]
                self._change_locked(number, [newest.after], ended)
        self._ended = True

    def _read_locked(self) -> None:
        if not self._spans:
            stored = [self._state(shard).scan(_PREFIX) for shard in self._shards]
            self._spans = [{(one := _decode(*pair)).after: one for pair in pairs} for pairs in stored]

    def _change_locked(self, shard: int, gone: Sequence[int], new: Sequence[Span]) -> None:
        writes = {_key(after): FrameworkWrite(_key(after), None) for after in gone}
        for one in new:
            value = _CODEC.encode(_key(one.after), _Record(_VERSION, one.last, one.spare))
            writes[_key(one.after)] = FrameworkWrite(_key(one.after), value)
        self._state(self._shards[shard]).write(writes.values())
        spans = self._spans[shard]
        for after in gone:
            del spans[after]
        spans.update({one.after: one for one in new})

    @staticmethod
    def _state(shard: Shard) -> ShardState:
        return ShardState(shard.number, shard.writer.open_engine, shard.writer.write_state)


def _key(after: int) -> bytes:
    return _PREFIX + after.to_bytes(8, "big")


def _decode(key: bytes, stored: bytes) -> Span:
    record = _CODEC.decode(key, stored, "state: which messages are stored only for sessions")
    return Span(int.from_bytes(key[len(_PREFIX) :], "big"), record.last, record.spare)


DECODERS: Decoders = {_PREFIX: _decode}
"""Decoder of the state that holds the spans."""
