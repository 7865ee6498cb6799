"""`ReadCache`: what was read of the streams, once for everybody who stands in front of it.

A scan brings a `Stretch` of a shard, of which each consumer gets its `Run`. Stretches stay in memory as long as there
is room, for consumers who come by the same place later.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.storage.storage import Storage

from .visibility_watcher import VisibilityWatcher

__all__ = ["ReadCache", "Run", "Stretch"]

_ROWS = 131_072
"""Messages that are kept in memory for consumers who come by the same place."""
_BYTES = 32 << 20
"""Of their payloads."""
_STRETCHES = 1_024


class Stretch:
    """What one scan brought: all matching messages of a shard behind ``after``, up to ``position``."""

    __slots__ = ("__dict__", "__weakref__", "after", "batch", "position")

    def __init__(self, after: int, position: int, batch: MessageBatch) -> None:
        self.after = after
        self.position = position
        self.batch = batch

    @functools.cached_property
    def messages(self) -> list[Message]:
        """The messages as objects, made once for all who want them."""
        return self.batch.to_messages()

    def covers(self, after: int) -> bool:
        """Say whether who has read everything up to ``after`` can read on here."""
        return self.after <= after < self.position

    def view(self, after: int, limit: int) -> Run:
        """Return at most ``limit`` messages behind ``after``."""
        positions = self.batch.positions
        rows = len(self.batch)
        start = int(np.searchsorted(positions, np.uint64(after), side="right")) if after > self.after and rows else 0
        stop = min(start + limit, rows)
        end = self.position if stop == rows else int(positions[stop - 1])
        return Run(self, slice(start, stop), end)


@attrs.frozen(slots=False)
class Run:
    """The next matching messages of one shard, in order of position."""

    stretch: Stretch = attrs.field(repr=False)
    rows: slice
    """Those of the stretch that it is."""
    position: int
    """Everything up to here has been looked at; who goes on, goes on behind it."""
    caught_up: bool = False
    """Nothing more can be seen at this moment; listeners are told when there is."""
    dropped: tuple[int, ...] = ()
    """Generations that were dropped before this part of them could be read; some of it may have matched."""

    def __len__(self) -> int:
        return int(self.rows.stop) - int(self.rows.start)

    @functools.cached_property
    def batch(self) -> MessageBatch:
        """Return the messages as columns, with positions and shards."""
        return self.stretch.batch[self.rows]

    @functools.cached_property
    def messages(self) -> list[Message]:
        """Return the messages as objects, shared with everybody who reads them."""
        messages = self.stretch.messages
        return messages if len(self) == len(messages) else messages[self.rows]

    @functools.cached_property
    def positions(self) -> list[int]:
        """Return the messages' positions."""
        return [] if not len(self) else self.stretch.batch.positions[self.rows].tolist()


@attrs.frozen
class _Gap:
    """Positions of a shard between, or in front of, its live generations: some were dropped there."""

    generations: tuple[int, ...]
    first: int
    last: int


class ReadCache:
    """The reads of everybody who follows one open database. All methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)  # else a database that nobody holds would not be closed
        self._shards = storage.shards
        self._lock = threading.Lock()
        """Guards `_memory` and its sums."""
        self._visibility = VisibilityWatcher(storage.shards)
        self._gaps: list[tuple[object, list[_Gap]]] = [(None, []) for _ in storage.shards]
        """By shard, for the live generations that they were found from. Replaced in one step by whoever comes first."""
        self._memory: collections.deque[tuple[weakref.ref[Stretch], list[Stretch], int, int]] = collections.deque()
        """Stretches in the lists that keep them, with their rows and bytes."""
        self._rows = 0
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    # --- reading ---

    def scan(
        self, topic_filter: TopicFilter, shard: int, first: int, last: int | None, rows: int
    ) -> tuple[Iterator[MessageBatch], int]:
        """Plan to read positions from ``first`` to ``last``, or all that can be seen; return batches and the bound."""
        storage = self._storage()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        plan = storage.plan_shard(shard, topic_filter, first, last)
        return storage.run_shards([plan], rows), plan.bound

    def remember(self, stretch: Stretch, where: list[Stretch]) -> None:
        """A stretch is kept in a list; take the oldest from theirs if too many are."""
        rows, size = len(stretch.batch), stretch.batch.payload_bytes()
        with self._lock:
            self._memory.append((weakref.ref(stretch), where, rows, size))
            self._rows += rows
            self._bytes += size
            while self._rows > _ROWS or self._bytes > _BYTES or len(self._memory) > _STRETCHES:
                oldest, kept, rows, size = self._memory.popleft()
                self._rows -= rows
                self._bytes -= size
                with contextlib.suppress(ValueError):  # its feed has let go of it
                    kept.remove(oldest())  # type: ignore[arg-type]

    def forget(self) -> None:
        """Keep nothing of what was read: some of it was deleted."""
        with self._lock:
            self._memory.clear()
            self._rows = self._bytes = 0

    # --- what can be seen ---

    def hides(self, shard: int) -> bool:
        """Say whether a layout of the shard hides the epoch that is being written."""
        return any(slab.epoch > 1 for _, slab in self._shards[shard].slabs())

    def await_visible(self, wake: Callable[[int], object], shard: int, seen: int, position: int) -> None:
        """Wake who has seen everything up to ``seen`` when everything up to a position can be."""
        committed = min(position, self._shards[shard].last_position)  # an announced batch may never be
        if seen < committed:
            self._visibility.add(wake, shard, committed)

    @property
    def failure(self) -> str | None:
        """Why waiting for what can't be seen yet failed the last time; None if it did not."""
        return self._visibility.failure

    # --- what is gone ---

    def gone(self) -> frozenset[int]:
        """Return the generations that were dropped by now."""
        live = {record.number for shard in self._shards for record, _ in shard.live}
        return frozenset(range(1, max(live, default=1))) - live

    def dropped_between(self, shard: int, after: int, position: int, quiet: tuple[int, int]) -> tuple[int, ...]:
        """Return the generations that who reads from ``after`` to ``position`` may have missed something of."""
        begin, end = quiet
        return tuple(
            number
            for gap in self._gaps_of(shard)
            if after < gap.last
            and gap.first <= position
            and not (begin <= after and gap.last <= end)  # nothing in it matched
            for number in gap.generations
        )

    def _gaps_of(self, shard: int) -> list[_Gap]:
        live, gaps = self._gaps[shard]
        if live is not self._shards[shard].live:
            live = self._shards[shard].live
            gaps = _gaps([record for record, _ in live])
            self._gaps[shard] = live, gaps
        return gaps

    # --- the end ---

    def stop(self) -> None:
        """Wait for nothing more."""
        self._visibility.stop()

    def join(self) -> None:
        """Return when no thread runs; the shards are closed by then."""
        self._visibility.join()


def _gaps(live: list[GenerationRecord]) -> list[_Gap]:
    """Return where generations are missing that had positions."""
    gaps, number, end = [], 0, 0
    for record in live:
        if record.number > number + 1 and record.first_position > end + 1:
            gaps.append(_Gap(tuple(range(number + 1, record.number)), end + 1, record.first_position - 1))
        number, end = record.number, record.last_position or 0
    return gaps
