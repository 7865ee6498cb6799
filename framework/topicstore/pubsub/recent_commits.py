"""`RecentCommits`: recently committed batches in memory, for followers that have caught up.

A consumer that is notified of a commit reads the messages from memory, without a scan of the engine. The matching
topics of each filter are found when the batch is announced, once for all filters. So a filter's cost depends on its own
messages, not on the size of the commit. Message objects are created once for all filters.

The messages are the same as a scan would return: the committed columns with positions and times. Therefore a batch is
not cached if a plugin wraps reading, or if the layout hides the batch until its epoch ends; it is scanned instead.
"""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Sequence
from itertools import chain

import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.runtime.empty import EMPTY_LIST

from .read_cache import ReadBatch, ReadSlice

__all__ = ["Commit", "Matches", "RecentCommits"]

_COMMITS = 16_384
"""Largest number of commits that are kept in memory."""
_ROWS = 131_072
"""Largest number of messages of these commits, matching or not."""
_BYTES = 32 << 20
"""Largest number of bytes of these messages' payloads."""
_LISTED = 32 << 20
"""Largest number of bytes of the filters' lists of commits, which count once for each matching filter."""
_ENTRY, _TOPIC = 176, 8
"""Bytes of a commit in the list of one filter, and of each of its topics there."""

_WHOLE = 4_096
"""Largest commit, in messages, whose message objects are created all at once."""
_NEVER = 1 << 64
"""A position after all others."""


class Commit:
    """A batch in memory, which is announced before the engine commits it.

    Its messages can be read once it is committed and the watermark has reached its last position.
    """

    __slots__ = (
        "_messages",
        "_rows",
        "_topics",
        "batch",
        "bytes",
        "committed",
        "first",
        "last",
        "listed",
        "matches",
        "void",
    )

    def __init__(self, batch: MessageBatch, topics: int) -> None:
        """Create an uncommitted batch. ``topics``: the number of distinct topics."""
        self.batch = batch
        self.first, self.last = batch.span
        self.committed = False
        """Whether the engine has committed the batch. Set under the shard's lock."""
        self.void = False
        """Whether the commit failed after the announcement. Set under the shard's lock."""
        self.matches: list[Matches] = []
        """The filters' lists that contain the commit."""
        self.bytes = batch.payload_bytes()
        self.listed = 0
        """The approximate size, in bytes, of the entries in these lists. Set under the shard's lock."""
        self._topics = topics
        self._rows: dict[str, list[int]] | None = None
        """The rows of each topic, computed on first use."""
        self._messages: list[Message] | None = None

    def rows_of(self, topics: list[str]) -> list[int] | None:
        """Return the rows of some topics of the batch in ascending order; None if these are all its topics."""
        if len(topics) == self._topics:
            return None
        rows = self._rows or self._find_rows()
        if len(topics) == 1:
            return rows[topics[0]]
        return sorted([row for topic in topics for row in rows[topic]])

    def _find_rows(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, topic in enumerate(to_iterable(self.batch.topics)):
            if topic in rows:
                rows[topic].append(row)
            else:
                rows[topic] = [row]
        self._rows = rows
        return rows

    def messages(self, rows: list[int] | None) -> list[Message]:
        """Return the messages of these rows as objects, which are created only once unless the batch is large."""
        made = self._messages
        if made is None and rows is not None and len(self.batch) > _WHOLE:
            return self.batch.take(np.array(rows, np.intp)).to_messages()
        if made is None:
            made = self._messages = self.batch.to_messages()
        return made if rows is None else [made[row] for row in rows]


class _Part:
    """The messages of a commit that match a filter."""

    __slots__ = ("commit", "rows")

    def __init__(self, commit: Commit, rows: list[int] | None) -> None:
        self.commit = commit
        self.rows = rows
        """The rows in ascending order; None for all rows."""

    def __len__(self) -> int:
        return len(self.commit.batch) if self.rows is None else len(self.rows)

    def after(self, position: int, limit: int) -> _Part:
        """Return the first ``limit`` of the messages after a position."""
        start = int(np.searchsorted(self.positions(), np.uint64(position), side="right"))
        rows = range(len(self.commit.batch)) if self.rows is None else self.rows
        return _Part(self.commit, list(rows[start : start + limit]))

    def positions(self) -> Positions:
        rows, positions = self.rows, self.commit.batch.positions
        if rows is None:
            return positions
        if len(rows) == 1:  # a slice is much cheaper than indexing by an array
            return positions[rows[0] : rows[0] + 1]
        return positions[np.array(rows, np.intp)]

    def batch(self) -> MessageBatch:
        batch, rows = self.commit.batch, self.rows
        return batch if rows is None else batch.take(np.array(rows, np.intp))


class _CommittedBatch(ReadBatch):
    """A read batch of recent commits, whose columns are created on first use."""

    __slots__ = ("_columns", "_parts")

    def __init__(self, after: int, position: int, parts: Sequence[_Part]) -> None:
        self.after = after
        self.position = position
        self.columns = None
        self._messages = None
        self._columns: MessageBatch | None = None
        self.positions = parts[0].positions() if len(parts) == 1 else np.concatenate([p.positions() for p in parts])
        self._parts = parts

    @property
    def batch(self) -> MessageBatch:  # type: ignore[override]
        """The messages as columns."""
        columns = self._columns
        if columns is None:
            columns = self._columns = MessageBatch.concat([part.batch() for part in self._parts])
        return columns

    @property
    def messages(self) -> list[Message]:
        """The messages as objects, which all filters share."""
        made, parts = self._messages, self._parts
        if made is None:
            found = [part.commit.messages(part.rows) for part in parts]
            made = self._messages = found[0] if len(parts) == 1 else list(chain.from_iterable(found))
        return made


class Matches:
    """The recent commits of one shard with messages that match one filter: all of them after a position."""

    __slots__ = ("_commits", "_joined", "_lasts", "_lock", "answer", "since")

    def __init__(self, lock: threading.Lock) -> None:
        """``lock`` guards the attributes. No other lock is taken under it."""
        self.answer: tuple[tuple[int, int], ReadSlice] | None = None
        """The position and limit of the last read, and its result, for other consumers with the same ones. Replaced as
        a whole, so reading it needs no lock."""
        self._lock = lock
        self.since = _NEVER
        """The position after which all announced commits with matching messages are in memory. Reading it needs no
        lock, but the value may be outdated then."""
        self._commits: list[tuple[Commit, list[str]]] = EMPTY_LIST
        """The commits, each with its matching topics."""
        self._lasts: list[int] = EMPTY_LIST
        """Their last positions."""
        self._joined: ReadBatch | None = None
        """The read batch that was read last, for other consumers at the same position."""

    def begin(self, position: int) -> None:
        """Forget all commits; those after a position will be announced."""
        with self._lock:
            self._begin_locked(position)

    def end(self) -> None:
        """Forget all commits, because further ones won't be announced."""
        self.begin(_NEVER)

    def forget(self) -> None:
        """Forget the commits announced so far, because some of their messages were deleted."""
        with self._lock:
            self._begin_locked(self._lasts[-1] if self._lasts else self.since)

    def _begin_locked(self, position: int) -> None:
        self.since = position
        self._commits = self._lasts = EMPTY_LIST
        self._joined = self.answer = None

    def add(self, commit: Commit, topics: list[str]) -> None:
        """Add a commit that is announced. The caller holds the shard's lock."""
        with self._lock:
            if self._commits and self._commits[-1][0].void:
                self._commits.pop()
                self._lasts.pop()
            self._commits, self._lasts = self._commits or [], self._lasts or []
            self._commits.append((commit, topics))
            self._lasts.append(commit.last)
        commit.matches.append(self)
        commit.listed += _ENTRY + _TOPIC * len(topics)

    def keep(self, asked: tuple[int, int], read_slice: ReadSlice) -> None:
        """Cache the result of a read, if the messages are from these commits and not from a scan."""
        with self._lock:
            if read_slice.whole is self._joined:
                self.answer = asked, read_slice

    def evict(self, commit: Commit) -> None:
        """Forget a commit and all earlier ones."""
        with self._lock:
            count = bisect.bisect_right(self._lasts, commit.last)
            if count:
                self.since = self._lasts[count - 1]
                del self._commits[:count], self._lasts[:count]
                self._joined = self.answer = None

    def read(self, after: int, watermark: int, limit: int) -> tuple[ReadBatch, bool] | None:
        """Return the readable messages after a position, and whether no further message is readable now.

        There are at most ``limit`` messages. Returns None if messages after the position must be scanned.
        """
        with self._lock:
            if after < self.since:
                return None
            joined = self._joined
            if joined is not None and joined.covers(after):
                return joined, joined.position == self._lasts[-1]
            start = bisect.bisect_right(self._lasts, after)
            before = self._lasts[start - 1] if start else self.since
            following = self._commits[start : start + limit]
        parts, all_read = _readable(following, watermark, limit)
        if not parts:
            return ReadBatch(after, after, MessageBatch.empty()), True
        position = parts[-1].commit.last
        if len(parts[0]) > limit:  # `_readable` returns no part after it
            parts = [parts[0].after(after, limit)]
            before, all_read = after, False
            position = min(position, int(parts[0].positions()[-1])) if len(parts[0]) else position
        whole = _CommittedBatch(before, position, parts)
        with self._lock:
            if before >= self.since:  # no commit of the read batch was evicted meanwhile
                self._joined = whole
        return whole, all_read


def _readable(following: list[tuple[Commit, list[str]]], watermark: int, limit: int) -> tuple[list[_Part], bool]:
    """Return the first readable commits with at most ``limit`` messages together, and whether no other is readable.

    The first commit is returned even if it has more messages.
    """
    rows = 0
    parts: list[_Part] = []
    for commit, topics in following:
        if not commit.committed or commit.last > watermark:
            return parts, True
        part = _Part(commit, commit.rows_of(topics))
        rows += len(part)
        if parts and rows > limit:
            return parts, False
        parts.append(part)
    return parts, len(parts) < limit


class RecentCommits:
    """The recent commits of all shards, within limits of number and memory."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """Guards the attributes below. Lock order: a shard's lock, this lock, the lock of a `Matches`."""
        self._commits: collections.deque[Commit] = collections.deque()
        self._rows = 0
        self._bytes = 0
        self._listed = 0

    def remember(self, commit: Commit) -> None:
        """Add a commit, and evict the oldest commits above the limits."""
        with self._lock:
            self._commits.append(commit)
            self._rows += len(commit.batch)
            self._bytes += commit.bytes
            self._listed += commit.listed
            while self._rows > _ROWS or self._bytes > _BYTES or self._listed > _LISTED or len(self._commits) > _COMMITS:
                oldest = self._commits.popleft()
                self._rows -= len(oldest.batch)
                self._bytes -= oldest.bytes
                self._listed -= oldest.listed
                for matches in oldest.matches:
                    matches.evict(oldest)

    def forget(self) -> None:
        """Forget all commits. The caller also calls `Matches.forget` of each filter."""
        with self._lock:
            self._commits.clear()
            self._rows = self._bytes = self._listed = 0
