"""`Feed`: one topic filter that somebody follows, and what was read for it lately.

All who follow a filter share its feed. A consumer's place is one number a shard: everything up to
that position is read. Who asks at the same place gets the same stretch, from memory. A feed knows
behind which position nothing matching can be, because a batch that matches is announced before
it can be seen: so who has caught up reads nothing until there is something, and then begins there,
however much was stored between for others.
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

from .read_cache import ReadCache, Run, Stretch

__all__ = ["Feed", "Listener"]

ROWS = 4_096
"""Messages of one scan."""
_WALKS = 4
"""Scans of one filter and shard that are kept open to go on."""
_RECENT = 8
"""Stretches of one filter and shard that are kept in memory, if the hub has room."""
_APART = 1_000_000 << COUNTER_BITS
"""Positions between two messages that are read again, from which on each is sought by itself: a second."""
_FOREVER = 1 << 64


class Listener(Protocol):
    """Who follows a feed. These run in the thread that stores, or closes: be quick, don't store, don't raise."""

    def woken(self, feed: Feed, shard: int) -> None:
        """There is something to read in a shard, or a generation of it was dropped."""

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        """Messages that match came by and are stored nowhere."""

    def closed(self) -> None:
        """The database is being closed."""


@attrs.define
class _Walk:
    """A scan that can go on."""

    batches: Iterator[MessageBatch]
    bound: int
    ahead: MessageBatch | None
    """What comes next, read already, so that the end is known when it comes; None at the end."""


class _ShardView:
    """A feed's view of one shard."""

    __slots__ = ("lock", "newest", "quiet", "recent", "telling", "unannounced", "walks")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while the shard is read for this filter. Guards `recent` and `walks`."""
        self.telling = threading.Lock()
        """Guards what follows; each is replaced as a whole, so a glance needs no lock."""
        self.unannounced = 0
        """Commits up to here were made before anybody listened."""
        self.newest = 0
        """The last position of the last batch that was announced, or `unannounced`."""
        self.quiet = (0, 0)
        """Nothing that matches lies behind the first of these, up to and with the second."""
        self.recent: list[Stretch] = []
        """`ReadCache.remember` takes from it too, in one step."""
        self.walks: dict[int, _Walk] = {}
        """By the position that each has read."""

    def listen(self, end: int) -> None:
        """Batches behind position ``end``, and perhaps some before it, are announced from now on."""
        with self.telling:
            self.quiet = (0, 0)
            self.unannounced = end
            self.newest = max(self.newest, end)

    def announce(self, first: int, last: int) -> None:
        """A batch with these positions, which is about to be committed, holds messages that match."""
        with self.telling:
            begin, end = self.quiet
            self.quiet = (begin, min(end, first - 1))
            self.newest = last

    def reached(self, position: int) -> bool:
        """Everything up to here was read; note, and return, whether nothing that was announced lies behind it."""
        with self.telling:
            if position < self.newest:
                return False
            self.quiet = (position, _FOREVER)
            return True


class Feed:
    """The matching messages of all shards. Made by `Hub.feed`; all methods may be called from any thread."""

    def __init__(self, reads: ReadCache, topic_filter: TopicFilter) -> None:
        self.topic_filter = topic_filter
        self.listeners: dict[Listener, None] = {}
        """Guarded by the hub's lock; who tells them copies it in one step."""
        self._reads = reads
        self._shards = [_ShardView() for _ in range(len(reads))]

    # --- being told ---

    def listen(self, shard: int, end: int) -> None:
        """Batches of a shard behind position ``end`` are announced from now on."""
        self._shards[shard].listen(end)

    def announce(self, shard: int, first: int, last: int) -> None:
        """A batch with these positions, which is about to be committed, holds messages that match."""
        self._shards[shard].announce(first, last)

    def wake(self, shard: int) -> None:
        """Tell the listeners that there is something to read."""
        for listener in list(self.listeners):
            listener.woken(self, shard)

    def route(self, messages: list[Message]) -> None:
        """Tell the listeners of messages that are stored nowhere."""
        for listener in list(self.listeners):
            listener.routed(self, messages)

    def forget(self) -> None:
        """Keep nothing of what was read: some of it was deleted, or dropped."""
        for view in self._shards:
            with view.lock:
                view.recent.clear()
                view.walks.clear()

    # --- reading ---

    def read(self, shard: int, after: int, limit: int) -> Run:
        """Return at most ``limit`` matching messages behind position ``after``, in order of position.

        Raises what reading raises; the same call may then be made again.
        """
        view = self._shards[shard]
        with view.lock:
            quiet = view.quiet
            stretch = next((recent for recent in view.recent if recent.covers(after)), None)
            if stretch is None:
                stretch, ended = self._scan(view, shard, after)
            else:
                ended = stretch.position >= view.newest
        run = stretch.view(after, limit)
        caught_up = ended and run.position == stretch.position
        dropped = self._reads.dropped_between(shard, after, run.position, quiet)
        return attrs.evolve(run, caught_up=caught_up, dropped=dropped) if caught_up or dropped else run

    def fetch(self, shard: int, positions: Sequence[int]) -> dict[int, Message]:
        """Read the messages at these positions again; those that are not there any more are left out."""
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
            except GenerationDroppedError:  # under it: a new scan goes on without
                continue
            return

    def _scan(self, view: _ShardView, shard: int, after: int) -> tuple[Stretch, bool]:
        """Read on behind a position; return what was read, and whether it is all that can be seen."""
        begin, end = view.quiet
        quiet = begin <= after <= end
        if quiet and end == _FOREVER:
            return Stretch(after, after, MessageBatch.empty()), True
        walk = view.walks.pop(after, None)
        old = walk is not None  # then it ends where everything ended that could be seen when it began
        if walk is None:
            walk = self._walk(shard, end if quiet else after)
        if walk.ahead is None:
            stretch, ended = Stretch(after, max(after, walk.bound), MessageBatch.empty()), True
        else:
            stretch, ended = self._step(view, walk, begin if quiet else after)
            self._remember(view, stretch)
        if ended:
            ended = self._reached(view, shard, stretch.position) or not old
        return stretch, ended

    def _walk(self, shard: int, after: int) -> _Walk:
        """Begin a scan behind a position."""
        while True:
            batches, bound = self._reads.scan(self.topic_filter, shard, after + 1, None, ROWS)
            try:
                return _Walk(batches, bound, next(batches, None))
            except GenerationDroppedError:  # under it: the next plan leaves it out
                continue

    def _step(self, view: _ShardView, walk: _Walk, after: int) -> tuple[Stretch, bool]:
        """Take what a scan has read, and let it read ahead; return the stretch, and whether it was the last."""
        batch = cast("MessageBatch", walk.ahead)  # the caller has looked
        position = int(batch.positions[-1])
        try:
            walk.ahead = next(walk.batches, None)
        except TopicstoreError:  # a new scan goes on behind this one, or says why it can't
            return Stretch(after, position, batch), False
        if walk.ahead is None:
            return Stretch(after, walk.bound, batch), True
        view.walks[position] = walk
        if len(view.walks) > _WALKS:
            del view.walks[next(iter(view.walks))]
        return Stretch(after, position, batch), False

    def _remember(self, view: _ShardView, stretch: Stretch) -> None:
        view.recent.append(stretch)
        del view.recent[:-_RECENT]
        self._reads.remember(stretch, view.recent)

    def _reached(self, view: _ShardView, shard: int, position: int) -> bool:
        """Say whether everything that was announced is read; what is committed but hidden is waited for."""
        if view.reached(position):
            return True
        if position < view.unannounced or self._reads.hides(shard):
            self._reads.await_visible(self.wake, shard, position, view.newest)
        return False


def _spans(positions: Positions) -> list[tuple[int, int]]:
    """Return the first and last of each group of ascending positions that lie close together."""
    if not len(positions):
        return []
    cuts = np.flatnonzero(np.diff(positions) > np.uint64(_APART)) + 1
    return [(int(group[0]), int(group[-1])) for group in np.split(positions, cuts)]
