"""`Feed`: one topic filter with followers, and the messages that were read for it recently.

All followers of a filter share its feed. A consumer's place is one position for each shard, up to which all messages
were read. Consumers that read from the same place get the same read batch of messages, from memory. A feed knows the
position after which no matching message exists, because a matching batch is announced before it becomes visible. So a
consumer that has caught up doesn't read until a matching message is stored, and then skips all other messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationDroppedError, TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.empty import EMPTY_DICT, EMPTY_LIST

from .read_cache import ReadBatch, ReadCache, ReadSlice
from .recent_commits import Commit, Matches

__all__ = ["Feed", "Listener"]

ROWS = 4_096
"""Number of messages that one scan reads at a time."""
_OPEN_SCANS = 4
"""Largest number of scans of one filter and shard that are kept open for continuation."""
_RECENT = 8
"""Largest number of read batches of one filter and shard that are cached, within the hub's limits."""
_APART = 1_000_000 << COUNTER_BITS
"""Distance of positions (one second) above which `Feed.fetch` uses separate scans."""
_FOREVER = 1 << 64


class Listener(Protocol):
    """A follower of a feed. The storing or closing thread calls its methods, which must not block, store or raise."""

    def on_stored(self, feed: Feed, shard: int) -> None:
        """Handle the event that a shard has new messages, or that a generation of it was dropped."""

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        """Queue matching messages that are not stored."""

    def closed(self) -> None:
        """Handle the event that the database is being closed."""


@attrs.define
class _OpenScan:
    """A scan that can be continued."""

    batches: Iterator[MessageBatch]
    bound: int
    ahead: MessageBatch | None
    """The next batch, read in advance to detect the end of the scan; None at the end."""


class _ShardView:
    """A feed's view of one shard."""

    __slots__ = ("lock", "matches", "newest", "quiet", "recent", "scans", "telling", "unannounced")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while the shard is read for this filter. Guards `recent` and `scans`."""
        self.telling = threading.Lock()
        """Guards `matches` and the attributes below; each is replaced as a whole, so reading one needs no lock."""
        self.matches = Matches(self.telling)
        """The recent commits that are still in memory."""
        self.unannounced = 0
        """The position up to which messages were committed before there was a listener."""
        self.newest = 0
        """The last position of the last batch that was announced, or `unannounced`."""
        self.quiet = (0, 0)
        """A range of positions without a matching message: after the first, up to and including the second."""
        self.recent: list[ReadBatch] = EMPTY_LIST
        """The read batches read recently. `ReadCache.remember` also removes some of them, atomically."""
        self.scans: dict[int, _OpenScan] = EMPTY_DICT
        """The open scans, by the position up to which each has read."""

    def listen(self, end: int) -> None:
        """Begin following: all batches after position ``end``, and perhaps some before it, will be announced."""
        with self.telling:
            self.quiet = (0, 0)
            self.unannounced = end
            self.newest = max(self.newest, end)
        self.matches.begin(end)

    def reached(self, position: int) -> bool:
        """Record that all messages up to a position were read; return whether no announced batch follows."""
        with self.telling:
            if position < self.newest:
                return False
            self.quiet = (position, _FOREVER)
            return True


class Feed:
    """The matching messages of all shards. Created by `Hub.feed`; all methods are thread-safe."""

    def __init__(self, reads: ReadCache, topic_filter: TopicFilter) -> None:
        self.topic_filter = topic_filter
        self.listeners: dict[Listener, None] = {}
        """The listeners. Guarded by the hub's lock; notification uses an atomic copy."""
        self.announced = False
        """Whether the hub announces the batches of all shards to this feed. Set and cleared by the hub."""
        self._reads = reads
        self._shards = [_ShardView() for _ in range(len(reads))]

    # --- announcements ---

    def listen(self, shard: int, end: int) -> None:
        """Begin following a shard: all its batches after position ``end`` will be announced."""
        self._shards[shard].listen(end)

    def leave(self) -> None:
        """Stop following: batches will not be announced any more."""
        for view in self._shards:
            view.matches.end()

    def announce(self, shard: int, first: int, last: int, commit: Commit | None, topics: list[str]) -> None:
        """Record that a batch with these positions, about to be committed, has matching messages of ``topics``.

        ``commit``: the batch, if its messages can be read from memory after the commit; otherwise None.
        """
        view = self._shards[shard]
        with view.telling:
            begin, end = view.quiet
            if first <= end:
                view.quiet = (begin, first - 1)
            view.newest = last
        if commit is None:
            view.matches.begin(last)
        else:
            view.matches.add(commit, topics)

    def wake(self, shard: int) -> None:
        """Notify the listeners that a shard has new messages."""
        for listener in list(self.listeners):
            listener.on_stored(self, shard)

    def route(self, messages: list[Message]) -> None:
        """Pass messages that are not stored to the listeners."""
        for listener in list(self.listeners):
            listener.routed(self, messages)

    def forget(self) -> None:
        """Clear the caches and open scans, because messages were deleted or dropped."""
        for view in self._shards:
            with view.lock:
                view.matches.forget()
                view.recent.clear()
                view.scans.clear()

    # --- reading ---

    def read(self, shard: int, after: int, limit: int) -> ReadSlice:
        """Return at most ``limit`` matching messages after position ``after``, in order of position.

        Raises the errors of reading; then the call may be repeated.
        """
        view = self._shards[shard]
        answer = view.matches.answer
        if answer is not None and answer[0] == (after, limit):
            read_slice = answer[1]
            if not read_slice.caught_up or read_slice.position >= view.newest:
                return read_slice
        with view.lock:
            quiet = view.quiet
            whole, ended = self._committed(view, shard, after) or self._read_before(view, shard, after)
            rows, position = whole.rows(after, limit)
            caught_up = ended and position == whole.position
            dropped = self._reads.dropped_between(shard, after, position, quiet)
            read_slice = ReadSlice(whole, rows, position, caught_up, dropped)
            if len(read_slice) and not dropped:
                view.matches.keep((after, limit), read_slice)
        return read_slice

    def quiet_after(self, shard: int, after: int) -> bool:
        """Return whether no matching message after a position was announced, so that none is visible. Doesn't read.

        The shard must be followed.
        """
        view = self._shards[shard]
        begin, end = view.quiet
        return after >= view.newest or (begin <= after and end == _FOREVER)

    def in_memory(self, shard: int, after: int) -> bool:
        """Return whether `read` needs no scan. Takes no lock, so the answer may be outdated on return."""
        return after >= self._shards[shard].matches.since

    def unread(self, shard: int, after: int) -> bool:
        """Return whether there may be matching messages after position ``after``. Raises the errors of reading."""
        read_slice = self.read(shard, after, 1)
        return bool(len(read_slice)) or not read_slice.caught_up

    def fetch(self, shard: int, positions: Sequence[int]) -> dict[int, Message]:
        """Read the messages at these positions, by position; messages that were deleted are left out."""
        wanted = np.array(sorted(set(positions)), dtype=np.uint64)
        found: dict[int, Message] = {}
        for first, last in _spans(wanted):
            for batch in self._between(shard, first, last):
                hits = batch.take(np.flatnonzero(np.isin(batch.positions, wanted)))
                if len(hits):
                    found.update(zip(hits.positions.tolist(), hits.to_messages(), strict=True))
        return found

    def _between(self, shard: int, first: int, last: int) -> Iterator[MessageBatch]:
        while True:
            try:
                for batch in self._reads.scan(self.topic_filter, shard, first, last, ROWS)[0]:
                    first = int(batch.positions[-1]) + 1
                    yield batch
            except GenerationDroppedError:  # dropped during the scan; a new scan continues without the generation
                continue
            return

    def _committed(self, view: _ShardView, shard: int, after: int) -> tuple[ReadBatch, bool] | None:
        """Read after a position from the recent commits in memory; None if they don't reach back so far."""
        found = view.matches.read(after, self._reads.watermark(shard), ROWS)
        if found is not None and found[1]:
            view.reached(found[0].position)
        return found

    def _read_before(self, view: _ShardView, shard: int, after: int) -> tuple[ReadBatch, bool]:
        """Read after a position before the recent commits: from the cached read batches, or by a scan."""
        for recent in view.recent:
            if recent.covers(after):
                return recent, recent.position >= view.newest
        return self._scan(view, shard, after)

    def _scan(self, view: _ShardView, shard: int, after: int) -> tuple[ReadBatch, bool]:
        """Scan after a position; return the read batch, and whether no further message is visible."""
        begin, end = view.quiet
        quiet = begin <= after <= end
        if quiet and end == _FOREVER:
            return ReadBatch(after, after, MessageBatch.empty()), True
        scan = view.scans.pop(after, None)
        old = scan is not None  # a continued scan ends at the watermark at which it began
        if scan is None:
            scan = self._open_scan(shard, end if quiet else after)
        if scan.ahead is None:
            whole, ended = ReadBatch(after, max(after, scan.bound), MessageBatch.empty()), True
        else:
            whole, ended = self._step(view, scan, begin if quiet else after)
            self._remember(view, whole)
        if ended:
            ended = self._reached(view, shard, whole.position) or not old
        return whole, ended

    def _open_scan(self, shard: int, after: int) -> _OpenScan:
        """Begin a scan after a position."""
        while True:
            batches, bound = self._reads.scan(self.topic_filter, shard, after + 1, None, ROWS)
            try:
                return _OpenScan(batches, bound, next(batches, None))
            except GenerationDroppedError:  # the next plan leaves the dropped generation out
                continue

    def _step(self, view: _ShardView, scan: _OpenScan, after: int) -> tuple[ReadBatch, bool]:
        """Take a scan's current batch, and read the next one; return the read batch, and whether it is the last."""
        batch = cast("MessageBatch", scan.ahead)  # the caller has checked that there is a batch
        position = int(batch.positions[-1])
        try:
            scan.ahead = next(scan.batches, None)
        except TopicstoreError:  # the next scan continues after this read batch, or raises the error again
            return ReadBatch(after, position, batch), False
        if scan.ahead is None:
            return ReadBatch(after, scan.bound, batch), True
        view.scans = view.scans or {}
        view.scans[position] = scan
        if len(view.scans) > _OPEN_SCANS:
            del view.scans[next(iter(view.scans))]
        return ReadBatch(after, position, batch), False

    def _remember(self, view: _ShardView, whole: ReadBatch) -> None:
        view.recent = view.recent or []
        view.recent.append(whole)
        del view.recent[:-_RECENT]
        self._reads.remember(whole, view.recent)

    def _reached(self, view: _ShardView, shard: int, position: int) -> bool:
        """Return whether all announced messages are read. If some are hidden, wake followers once they are visible."""
        if view.reached(position):
            return True
        if position < view.unannounced or self._reads.hides(shard):
            self._reads.await_visible(self.wake, shard, position, view.newest)
        return False


def _spans(positions: Positions) -> list[tuple[int, int]]:
    """Group ascending positions that are close together; return the first and last position of each group."""
    if not len(positions):
        return []
    cuts = np.flatnonzero(np.diff(positions) > np.uint64(_APART)) + 1
    return [(int(group[0]), int(group[-1])) for group in np.split(positions, cuts)]
