"""`ReadCache`: stretches of the streams, which are read once for all consumers that come by the same place.

A scan returns a `Stretch` of a shard, of which each consumer gets its `Run`. Stretches stay in memory as long as there
is room, for consumers that come by the same place later.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.storage.storage import Storage

from .visibility_watcher import VisibilityWatcher

__all__ = ["ReadCache", "Run", "Stretch"]

_ROWS = 131_072
"""Number of messages that are kept in memory for consumers that come by the same place."""
_BYTES = 32 << 20
"""Largest number of bytes of their payloads."""
_STRETCHES = 1_024


class Stretch:
    """All matching messages of a shard after ``after``, up to ``position``: the result of one scan, for example."""

    __slots__ = ("__weakref__", "_messages", "after", "batch", "position", "positions", "traits")

    def __init__(self, after: int, position: int, batch: MessageBatch) -> None:
        self.after = after
        self.position = position
        self.positions: Positions = batch.positions
        """The positions of the messages."""
        self.traits: object = None
        """What a consumer has found out about the messages, for others who deliver them."""
        self.batch = batch
        """The messages as columns."""
        self._messages: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """Return the messages as objects, which are made once for all consumers."""
        made = self._messages  # no `functools.cached_property`: until Python 3.12 that has one lock for all stretches
        if made is None:
            made = self._messages = self._made()
        return made

    def _made(self) -> list[Message]:
        return self.batch.to_messages()

    def covers(self, after: int) -> bool:
        """Return whether a consumer that has read everything up to ``after`` can read on here."""
        return self.after <= after < self.position

    def rows(self, after: int, limit: int) -> tuple[slice, int]:
        """Return the rows of at most ``limit`` messages after ``after``, and the position up to which they reach."""
        positions = self.positions
        rows = len(positions)
        start = int(np.searchsorted(positions, np.uint64(after), side="right")) if after > self.after and rows else 0
        stop = min(start + limit, rows)
        end = self.position if stop == rows else int(positions[stop - 1])
        return slice(start, stop), end


@attrs.frozen(slots=False)
class Run:
    """The next matching messages of one shard, in order of position."""

    stretch: Stretch = attrs.field(repr=False)
    rows: slice
    """The rows of the stretch that it consists of."""
    position: int
    """The position up to which everything has been read, and after which to go on."""
    caught_up: bool = False
    """Whether nothing more is visible at this moment; listeners are notified when there is."""
    dropped: tuple[int, ...] = ()
    """The generations that were dropped before this part of them could be read; some of it may have matched."""

    def __len__(self) -> int:
        return int(self.rows.stop) - int(self.rows.start)

    @functools.cached_property
    def batch(self) -> MessageBatch:
        """Return the messages as columns, with positions and shards."""
        return self.stretch.batch[self.rows]

    @property
    def messages(self) -> list[Message]:
        """Return the messages as objects, which are shared by all consumers."""
        messages = self.stretch.messages
        return messages if len(self) == len(messages) else self._some

    @functools.cached_property
    def _some(self) -> list[Message]:
        return self.stretch.messages[self.rows]

    @functools.cached_property
    def positions(self) -> list[int]:
        """Return the messages' positions."""
        return [] if not len(self) else self.stretch.positions[self.rows].tolist()


@attrs.frozen
class _Gap:
    """Positions of a shard between, or before, its live generations, where some were dropped."""

    generations: tuple[int, ...]
    first: int
    last: int


class ReadCache:
    """The reads for all followers of one open database. All methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)  # otherwise a database without other references would not be closed
        self._shards = storage.shards
        self._lock = ProcessLock()
        """Guards `_memory` and its sums."""
        self._visibility = VisibilityWatcher(storage.shards)
        self._gaps: list[tuple[object, list[_Gap]]] = [(None, []) for _ in storage.shards]
        """By shard, the live generations and the gaps between them. Replaced in one step."""
        self._memory: collections.deque[tuple[weakref.ref[Stretch], list[Stretch], int, int]] = collections.deque()
        """The stretches that are kept, the lists that hold them, and their rows and bytes."""
        self._rows = 0
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    # --- reading ---

    def scan(
        self, topic_filter: TopicFilter, shard: int, first: int, last: int | None, rows: int
    ) -> tuple[Iterator[MessageBatch], int]:
        """Begin to read positions from ``first`` to ``last``, or all visible ones; return batches and the bound."""
        storage = self._storage()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        plan = storage.plan_shard(shard, topic_filter, first, last)
        return storage.run_shards([plan], rows), plan.bound

    def remember(self, stretch: Stretch, where: list[Stretch]) -> None:
        """Note a stretch that a list keeps; remove the oldest stretches from their lists if there are too many."""
        rows, size = len(stretch.batch), stretch.batch.payload_bytes()
        with self._lock:
            self._memory.append((weakref.ref(stretch), where, rows, size))
            self._rows += rows
            self._bytes += size
            while self._rows > _ROWS or self._bytes > _BYTES or len(self._memory) > _STRETCHES:
                oldest, kept, rows, size = self._memory.popleft()
                self._rows -= rows
                self._bytes -= size
                with contextlib.suppress(ValueError):  # its feed has dropped it
                    kept.remove(oldest())  # type: ignore[arg-type]

    def forget(self) -> None:
        """Forget all that was read, because some of it was deleted."""
        with self._lock:
            self._memory.clear()
            self._rows = self._bytes = 0

    # --- what can be seen ---

    def watermark(self, shard: int) -> int:
        """Return the highest position of a shard that readers may see."""
        return self._shards[shard].writer.watermark

    def hides(self, shard: int) -> bool:
        """Return whether a layout of the shard hides the epoch that is being written."""
        return any(slab.epoch > 1 for _, slab in self._shards[shard].generations.with_slabs())

    def await_visible(self, wake: Callable[[int], object], shard: int, seen: int, position: int) -> None:
        """Call ``wake`` of a reader that has read up to ``seen`` when everything up to a position is visible."""
        last = self._shards[shard].writer.tail.last_position
        committed = min(position, last)  # an announced batch may never be committed
        if seen < committed:
            self._visibility.add(wake, shard, committed)

    @property
    def failure(self) -> str | None:
        """Why waiting for hidden messages to become visible failed the last time; None if it did not."""
        return self._visibility.failure

    # --- what is gone ---

    def gone(self) -> frozenset[int]:
        """Return the generations that have been dropped."""
        live = {record.number for shard in self._shards for record, _ in shard.generations.live}
        return frozenset(range(1, max(live, default=1))) - live

    def dropped_between(self, shard: int, after: int, position: int, quiet: tuple[int, int]) -> tuple[int, ...]:
        """Return the dropped generations of which a reader from ``after`` to ``position`` may have missed messages."""
        gaps = self._gaps_of(shard)
        if not gaps:
            return ()
        begin, end = quiet
        return tuple(
            number
            for gap in gaps
            if after < gap.last
            and gap.first <= position
            and not (begin <= after and gap.last <= end)  # nothing in it matched
            for number in gap.generations
        )

    def _gaps_of(self, shard: int) -> list[_Gap]:
        live, gaps = self._gaps[shard]
        if live is not self._shards[shard].generations.live:
            live = self._shards[shard].generations.live
            gaps = _gaps([record for record, _ in live])
            self._gaps[shard] = live, gaps
        return gaps

    # --- the end ---

    def stop(self) -> None:
        """Stop waiting for messages to become visible."""
        self._visibility.stop()

    def join(self) -> None:
        """Wait until no thread runs. The shards have to be closed before."""
        self._visibility.join()


def _gaps(live: list[GenerationRecord]) -> list[_Gap]:
    """Return the gaps where generations that had positions are missing."""
    gaps, number, end = [], 0, 0
    for record in live:
        if record.number > number + 1 and record.first_position > end + 1:
            gaps.append(_Gap(tuple(range(number + 1, record.number)), end + 1, record.first_position - 1))
        number, end = record.number, record.last_position or 0
    return gaps
