"""`ReadCache`: reads messages once for all consumers that read from the same position.

A scan reads a `ReadBatch`: all matching messages of a shard in a range of positions. Each consumer gets a `ReadSlice`
of it. Read batches are cached within limits, for consumers that reach the same position later.
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

__all__ = ["ReadBatch", "ReadCache", "ReadSlice"]

_ROWS = 131_072
"""Largest number of cached messages."""
_BYTES = 32 << 20
"""Largest number of bytes of the cached messages' payloads."""
_BATCHES = 1_024


class ReadBatch:
    """All matching messages of a shard after ``after``, up to ``position``: the result of one scan, for example."""

    __slots__ = ("__weakref__", "_messages", "after", "batch", "columns", "position", "positions")

    def __init__(self, after: int, position: int, batch: MessageBatch) -> None:
        self.after = after
        self.position = position
        self.positions: Positions = batch.positions
        """The positions of the messages."""
        self.columns: object = None
        """Properties of the messages that one consumer has computed for the others, in `topicstore.sessions`."""
        self.batch = batch
        """The messages as columns."""
        self._messages: list[Message] | None = None

    @property
    def messages(self) -> list[Message]:
        """The messages as objects, created once for all consumers."""
        made = self._messages  # `functools.cached_property` has one lock for all objects before Python 3.12
        if made is None:
            made = self._messages = self.batch.to_messages()
        return made

    def covers(self, after: int) -> bool:
        """Return whether the read batch contains the messages that follow ``after``."""
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
class ReadSlice:
    """The next matching messages of one shard, in order of position."""

    whole: ReadBatch = attrs.field(repr=False)
    rows: slice
    """The rows of the read batch that belong to the slice."""
    position: int
    """The position up to which all messages were read, and after which the next read begins."""
    caught_up: bool = False
    """Whether no further message is visible now; listeners are notified of later ones."""
    dropped: tuple[int, ...] = ()
    """The generations in this range that were dropped before they were read; they may have had matching messages."""

    def __len__(self) -> int:
        return int(self.rows.stop) - int(self.rows.start)

    @functools.cached_property
    def batch(self) -> MessageBatch:
        """The messages as columns, with positions and shards."""
        return self.whole.batch[self.rows]

    @property
    def messages(self) -> list[Message]:
        """The messages as objects, shared by all consumers."""
        messages = self.whole.messages
        return messages if len(self) == len(messages) else self._some

    @functools.cached_property
    def _some(self) -> list[Message]:
        return self.whole.messages[self.rows]

    @functools.cached_property
    def positions(self) -> list[int]:
        """The messages' positions."""
        return [] if not len(self) else self.whole.positions[self.rows].tolist()


@attrs.frozen
class _Gap:
    """Positions of a shard between, or before, its live generations, where some were dropped."""

    generations: tuple[int, ...]
    first: int
    last: int


class ReadCache:
    """The reads for all followers of one open database. All methods are thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = weakref.ref(storage)  # weak, so that a database without other references closes itself
        self._shards = storage.shards
        self._lock = ProcessLock()
        """Guards `_memory` and its sums."""
        self._visibility = VisibilityWatcher(storage.shards)
        self._gaps: list[tuple[object, list[_Gap]]] = [(None, []) for _ in storage.shards]
        """By shard, the live generations and the gaps between them. Entries are replaced atomically."""
        self._memory: collections.deque[tuple[weakref.ref[ReadBatch], list[ReadBatch], int, int]] = collections.deque()
        """The cached read batches, the lists that hold them, and their numbers of rows and bytes."""
        self._rows = 0
        self._bytes = 0

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self._shards)

    # --- reading ---

    def scan(
        self, topic_filter: TopicFilter, shard: int, first: int, last: int | None, rows: int
    ) -> tuple[Iterator[MessageBatch], int]:
        """Begin a scan from position ``first`` to ``last`` (None: the watermark); return its batches and its end."""
        storage = self._storage()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        plan = storage.plan_shard(shard, topic_filter, first, last)
        return storage.run_shards([plan], rows), plan.bound

    def remember(self, whole: ReadBatch, where: list[ReadBatch]) -> None:
        """Record that the list ``where`` holds a read batch; above the limits, remove the oldest from their lists."""
        rows, size = len(whole.batch), whole.batch.payload_bytes()
        with self._lock:
            self._memory.append((weakref.ref(whole), where, rows, size))
            self._rows += rows
            self._bytes += size
            while self._rows > _ROWS or self._bytes > _BYTES or len(self._memory) > _BATCHES:
                oldest, kept, rows, size = self._memory.popleft()
                self._rows -= rows
                self._bytes -= size
                with contextlib.suppress(ValueError):  # the feed has removed the read batch already
                    kept.remove(oldest())  # type: ignore[arg-type]

    def forget(self) -> None:
        """Clear the records of cached read batches, because messages were deleted."""
        with self._lock:
            self._memory.clear()
            self._rows = self._bytes = 0

    # --- visibility ---

    def watermark(self, shard: int) -> int:
        """Return the highest position of a shard that readers may see.

        Raises `ShardElsewhereError` on a site that keeps no copy of the shard, and has reached no other site with one.
        """
        found = self._shards[shard]
        if not found.writer.elsewhere:
            return found.writer.watermark
        if found.elsewhere is None or not found.elsewhere.known:
            raise found.writer.elsewhere_error()
        return found.elsewhere.watermark

    def hides(self, shard: int) -> bool:
        """Return whether a layout of the shard hides the epoch that is being written."""
        return any(slab.epoch > 1 for _, slab in self._shards[shard].generations.with_slabs())

    def await_visible(self, wake: Callable[[int], object], shard: int, seen: int, position: int) -> None:
        """Call ``wake`` once all messages up to ``position`` are visible, unless the reader has ``seen`` them."""
        last = self._shards[shard].reader.last_position
        committed = min(position, last)  # an announced batch may never be committed
        if seen < committed:
            self._visibility.add(wake, shard, committed)

    @property
    def failure(self) -> str | None:
        """The last error of waiting until hidden messages are visible; None if the last wait succeeded."""
        return self._visibility.failure

    # --- dropped generations ---

    def gone(self) -> frozenset[int]:
        """Return the generations that have been dropped."""
        live = {record.number for shard in self._shards for record, _ in shard.generations.live}
        return frozenset(range(1, max(live, default=1))) - live

    def dropped_between(self, shard: int, after: int, position: int, quiet: tuple[int, int]) -> tuple[int, ...]:
        """Return the dropped generations whose messages a reader from ``after`` to ``position`` may have missed."""
        live, gaps = self._gaps[shard]
        if live is not self._shards[shard].generations.live:
            live = self._shards[shard].generations.live
            gaps = _gaps([record for record, _ in live])
            self._gaps[shard] = live, gaps
        if not gaps:
            return ()
        begin, end = quiet
        return tuple(
            number
            for gap in gaps
            if after < gap.last
            and gap.first <= position
            and not (begin <= after and gap.last <= end)  # no message of the dropped generation matched
            for number in gap.generations
        )

    # --- closing ---

    def stop(self) -> None:
        """Stop waiting for messages to become visible."""
        self._visibility.stop()

    def join(self) -> None:
        """Wait until the thread has ended. The caller must have closed the shards first."""
        self._visibility.join()


def _gaps(live: list[GenerationRecord]) -> list[_Gap]:
    """Return the gaps that dropped generations with messages have left."""
    gaps, number, end = [], 0, 0
    for record in live:
        if record.number > number + 1 and record.first_position > end + 1:
            gaps.append(_Gap(tuple(range(number + 1, record.number)), end + 1, record.first_position - 1))
        number, end = record.number, record.last_position or 0
    return gaps
