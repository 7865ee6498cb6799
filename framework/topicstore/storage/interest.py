"""`InterestSpans`: the ranges of messages that are stored only for sessions, and can be removed once delivered.

A *span* is a range of positions of a shard in which every message is stored only for sessions, except those of topics
that a filter of the span matches: the filters of the persistence rules of that time. A message that is stored for
another reason ends the spans before it is stored. So a message that is stored for any other reason than a session is
outside of every span, or matches a filter of its span. The log of a shard orders the end of its span before the
message, so this holds after any crash.

The spans of all shards begin and end together, once for many messages, unless stores by programs alternate with
publishes by clients. Of more than 10,000 spans of a shard the oldest is forgotten: its messages then stay like all
others. `topicstore.shard.interest_records` has the stored form, and `topicstore.storage.site_interest` the spans of a
database that a cluster shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import msgspec

from topicstore.contract.errors import ShardReadOnlyError, TopicstoreError
from topicstore.runtime.locks import FairLock, check_not_owned
from topicstore.shard.interest_records import SPANS, Span, decode_span, ended, removal, stored
from topicstore.shard.shard import Shard
from topicstore.shard.state import ShardState

__all__ = ["InterestSpans"]

_MOST = 10_000


@attrs.define(eq=False)
class InterestSpans:
    """The ranges of one open database's messages that are stored only for sessions. Thread-safe."""

    _shards: Sequence[Shard]
    _lock: FairLock = attrs.field(factory=FairLock, init=False)
    """Guards the changes of the attributes below, except `storing`. It is acquired before the locks of shards."""
    _spans: dict[int, dict[int, Span]] = attrs.field(factory=dict, init=False)
    """By shard, its spans by their `Span.after`, the oldest first. Shards that were not read yet are absent."""
    storing: set[object] = attrs.field(factory=set, init=False)
    """The running writes that no span may cover. A write is added before it reads `may_be_open`, and is removed at its
    end; no lock is needed. So `begin`, which sets `may_be_open` before it reads this, begins no span during it."""
    may_be_open: bool = attrs.field(default=True, init=False)
    """Whether a span may be open in some shard, so that a write of `storing` must call `end`."""
    tracks: bool = attrs.field(default=False, init=False)
    """Whether `begin` begins spans."""
    current: tuple[str, ...] | None = attrs.field(default=None, init=False)
    """The filters of the spans that are open in all shards; None if none is. A span that ends after a writer has read
    this doesn't cover the writer's messages, which then stay."""

    def track(self, *, on: bool) -> None:
        """Enable or disable `begin`."""
        with self._lock:
            if on != self.tracks:
                self.tracks, self.current = on, None

    # --- called by writes ---

    def begin(self, spare: tuple[str, ...]) -> bool:
        """Begin spans unless suitable ones are open: every later message is for sessions only, or matches ``spare``.

        Returns False if no span may be open, so that messages are stored without one.
        """
        check_not_owned(self._lock)
        with self._lock:
            if not self.tracks:
                return False
            if self.current == spare:
                return True
            if self._end_locked():
                return False
            self.may_be_open = True  # set before `storing` is read: `Storage.write` does the reverse
            if self.storing:
                self.may_be_open = False
                return False
            self.current = self._begin_locked(spare)
            return True

    def end(self) -> Mapping[int, TopicstoreError]:
        """End the spans; return, by shard, the errors because of which a span may still be open."""
        check_not_owned(self._lock)
        with self._lock:
            return self._end_locked()

    def forget(self) -> None:
        """Read the spans again when they are next needed. Called before a shard that took no writes is reopened."""
        with self._lock:
            self.may_be_open, self.current = True, None
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

    def _begin_locked(self, spare: tuple[str, ...]) -> tuple[str, ...] | None:
        """Begin spans; return the new value of `current`."""
        for shard in self._shards:
            self._begin_in_locked(shard, spare)
        return spare

    def _begin_in_locked(self, shard: Shard, spare: tuple[str, ...]) -> None:
        spans = self._read_locked(shard.number)
        oldest = [next(iter(spans))] if len(spans) >= _MOST else []
        self._change_locked(shard.number, oldest, [Span(shard.writer.last_position(), None, spare)])

    def _end_locked(self) -> Mapping[int, TopicstoreError]:
        """End the spans; return, by shard, the errors because of which a span may still be open."""
        if not self.may_be_open:
            return {}
        self.current = None
        failures = {shard.number: self._end_in_locked(shard) for shard in self._shards}
        failing = {shard: failure for shard, failure in failures.items() if failure is not None}
        self.may_be_open = bool(failing)
        return failing

    def _end_in_locked(self, shard: Shard) -> TopicstoreError | None:
        """End the open span of a shard, if there is one; return an error if the shard takes no writes."""
        try:
            shard.writer.check_writable()
        except ShardReadOnlyError as refusing:
            return refusing
        newest = next(reversed(self._read_locked(shard.number).values()), None)
        if newest is not None and newest.last is None:
            self._change_locked(shard.number, [newest.after], ended(newest, shard.writer.last_position()))
        return None

    def _read_locked(self, shard: int) -> dict[int, Span]:
        if shard not in self._spans:
            spans = (decode_span(*pair) for pair in self._state(self._shards[shard]).scan(SPANS))
            self._spans[shard] = {one.after: one for one in spans}
        return self._spans[shard]

    def _change_locked(self, shard: int, gone: Sequence[int], new: Sequence[Span]) -> None:
        writes = {write.key: write for write in (*map(removal, gone), *map(stored, new))}
        spans = self._spans.pop(shard)  # if the write fails, perhaps after its commit, the spans are read again
        self._state(self._shards[shard]).write(writes.values())
        found = {after: one for after, one in spans.items() if after not in gone} | {one.after: one for one in new}
        self._spans[shard] = dict(sorted(found.items()))

    @staticmethod
    def _state(shard: Shard) -> ShardState:
        return ShardState(shard.number, shard.writer.open_engine, shard.writer.write_state)
