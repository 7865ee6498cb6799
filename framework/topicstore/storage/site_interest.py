"""`SiteInterestSpans`: the spans of `topicstore.storage.interest` of a database that a cluster shares.

The owner of a shard begins and ends its spans, through the log, which orders them with the messages. It counts the
positions of proposed writes, so a span covers no message that was proposed before it and is stored later. Every replica
ends the open span of a shard when it applies a fence (`topicstore.replication.replica`). So a new owner finds no open
span, and its first message for sessions begins one. If the log store doesn't answer a change of spans, the owner waits
until the log has decided it, and then reads the spans again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import attrs

from topicstore.contract.errors import ShardElsewhereError, ShardMovedError, TopicstoreError
from topicstore.shard.interest_records import Span
from topicstore.shard.shard import Shard

from .interest import InterestSpans

__all__ = ["SiteInterestSpans"]

_AGAIN = 1.0
"""Seconds from a failure until spans may begin again. Messages stored in between are kept like all others."""
_Periods = tuple[int | None, ...]


@attrs.define(eq=False)
class SiteInterestSpans(InterestSpans):
    """The spans of interest of the shards that this site owns. Thread-safe.

    A span is a range of a shard's positions whose messages are stored only because sessions wait for them.
    """

    _began: tuple[tuple[str, ...], _Periods] | None = attrs.field(default=None, init=False)
    """The filters of the spans that are open in all shards of this site, and for each shard the site's period as its
    owner when the span began; None if no spans are open. Replaced as a whole, so reading it needs no lock. `current` is
    always None, because the shards of a site change."""
    _periods: dict[int, int | None] = attrs.field(factory=dict, init=False)
    """By shard, the period in which its spans were read."""
    _retry: float = attrs.field(default=float("-inf"), init=False)
    """The time (`time.monotonic`) from which spans may begin."""

    def begin(self, spare: tuple[str, ...]) -> bool:
        """Begin spans unless suitable ones are open, as in the base class; return False after a recent failure, too."""
        if self._began == (spare, self._owned()):
            return True
        return time.monotonic() >= self._retry and super().begin(spare)

    def of_shard(self, shard: int) -> tuple[Span, ...]:
        """Return the spans of a shard, the oldest first; none if another site owns it."""
        try:
            return super().of_shard(shard) if self._shards[shard].writer.owned else ()
        except (ShardElsewhereError, ShardMovedError):
            return ()

    def forget(self) -> None:
        """Read the spans again when they are next needed, as in the base class."""
        self._began = None
        super().forget()

    def _owned(self) -> _Periods:
        return tuple(shard.writer.epoch for shard in self._shards)

    def _end_locked(self) -> Mapping[int, TopicstoreError]:
        if self.may_be_open:
            self._began = None
        return super()._end_locked()

    def _begin_locked(self, spare: tuple[str, ...]) -> None:  # leaves `current` None
        periods = self._owned()
        owned = [shard for shard in self._shards if shard.writer.owned]
        failures = [self._tried_locked(partial(self._begin_in_locked, shard, spare)) for shard in owned]
        self._began = (spare, periods) if failures.count(None) == len(failures) else None

    def _end_in_locked(self, shard: Shard) -> TopicstoreError | None:
        end = super()._end_in_locked
        return self._tried_locked(lambda: end(shard)) if shard.writer.owned else None

    def _tried_locked(self, change: Callable[[], TopicstoreError | None]) -> TopicstoreError | None:
        """Change the spans of a shard; return an error that occurred. In a moved shard, a fence has ended the span."""
        try:
            return change()
        except (ShardElsewhereError, ShardMovedError):
            return None
        except TopicstoreError as failure:
            self._retry = time.monotonic() + _AGAIN
            return failure

    def _read_locked(self, shard: int) -> dict[int, Span]:
        writer = self._shards[shard].writer
        period = writer.epoch
        if self._periods.get(shard) != period:
            self._spans.pop(shard, None)
        if shard not in self._spans:
            writer.finish_all()  # the log may still accept a change of spans that had no answer
            self._periods[shard] = period
        return super()._read_locked(shard)
