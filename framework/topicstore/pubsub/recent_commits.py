"""`RecentCommits`: batches that were committed a moment ago, still in memory, for followers that have caught up.

A consumer that is notified of a commit reads its messages here, without a scan of the engine. Which messages a filter
gets is worked out when the batch is announced, once for all filters together, so a commit of a thousand messages for a
thousand filters costs each of them its own message and no more. Messages become objects once for all filters.

What is read here is what a scan would return: the committed columns with their positions and times. So a batch is not
taken up if a plugin wraps reading, or if the layout hides it until its epoch is over; its messages are scanned then.
"""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Sequence

import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions

from .read_cache import Run, Stretch

__all__ = ["Commit", "Matches", "RecentCommits"]

_COMMITS = 16_384
"""Largest number of commits that are kept in memory."""
_ROWS = 131_072
"""Largest number of their messages, matching or not."""
_BYTES = 32 << 20
"""Largest number of bytes of their payloads."""
_LISTED = 32 << 20
"""Largest number of bytes of the lists in which filters have them: many filters may match the same messages."""
_ENTRY, _TOPIC = 176, 8
"""Bytes of a commit in the lists of one filter, and of each topic of it there."""

_WHOLE = 4_096
"""Largest number of messages of a commit that become objects all at once."""
_NEVER = 1 << 64
"""A position after all others."""


class Commit:
    """A batch that was announced, and is readable once it was committed and the watermark has reached it."""

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
        """``topics`` is the number of different topics."""
        positions = batch.positions
        self.batch = batch
        self.first = int(positions[0])
        self.last = int(positions[-1])
        self.committed = False
        """Whether the engine has taken it. Set under the shard's lock."""
        self.void = False
        """Whether it was announced and never committed. Set under the shard's lock."""
        self.matches: list[Matches] = []
        """Those that read it."""
        self.bytes = batch.payload_bytes()
        self.listed = 0
        """The bytes of the lists in which those have it, about. Set under the shard's lock."""
        self._topics = topics
        self._rows: dict[str, list[int]] | None = None
        """The rows of each topic, found when they are first needed."""
        self._messages: list[Message] | None = None

    def rows_of(self, topics: list[str]) -> list[int] | None:
        """Return the rows of some of its topics in ascending order; None if these are all rows."""
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
        """Return the messages of these rows as objects, which are made once unless the batch is large."""
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
        """The rows in ascending order; None if these are all rows."""

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
        if len(rows) == 1:  # much cheaper than an array of one number
            return positions[rows[0] : rows[0] + 1]
        return positions[np.array(rows, np.intp)]

    def batch(self) -> MessageBatch:
        batch, rows = self.commit.batch, self.rows
        return batch if rows is None else batch.take(np.array(rows, np.intp))


class _CommittedStretch(Stretch):
    """A stretch of recent commits, whose columns are gathered only for those who ask for them."""

    __slots__ = ("_columns", "_parts")

    def __init__(self, after: int, position: int, parts: Sequence[_Part]) -> None:
        self.after = after
        self.position = position
        self.traits = None
        self._messages = None
        self._columns: MessageBatch | None = None
        self.positions = parts[0].positions() if len(parts) == 1 else np.concatenate([p.positions() for p in parts])
        self._parts = parts

    @property
    def batch(self) -> MessageBatch:  # type: ignore[override]
        """Return the messages as columns."""
        columns = self._columns
        if columns is None:
            columns = self._columns = MessageBatch.concat([part.batch() for part in self._parts])
        return columns

    def _made(self) -> list[Message]:
        """Return the messages as objects, which all filters share."""
        parts = self._parts
        if len(parts) == 1:
            return parts[0].commit.messages(parts[0].rows)
        return [message for part in parts for message in part.commit.messages(part.rows)]


class Matches:
    """The recent commits of one shard with messages that match one filter: all of them after a position."""

    __slots__ = ("_commits", "_joined", "_lasts", "_lock", "_since", "answer")

    def __init__(self) -> None:
        self.answer: tuple[tuple[int, int], Run] | None = None
        """The last place and limit that a consumer asked with, and the answer, which all who ask the same share. It is
        replaced as a whole, so it can be read without the lock."""
        self._lock = threading.Lock()
        """Guards the attributes below. No other lock is taken under it."""
        self._since = _NEVER
        """The position after which every commit with matching messages is here, once it is announced."""
        self._commits: list[tuple[Commit, list[str]]] = []
        """The commits, with those of their topics that match."""
        self._lasts: list[int] = []
        """Their last positions."""
        self._joined: Stretch | None = None
        """The stretch that was read last, for others who come by the same place."""

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
            self._begin_locked(self._lasts[-1] if self._lasts else self._since)

    def _begin_locked(self, position: int) -> None:
        self._since = position
        self._commits.clear()
        self._lasts.clear()
        self._joined = self.answer = None

    def reach_back_to(self, position: int) -> bool:
        """Say whether all that follows a position is here. It needs no lock, and may have changed on return."""
        return position >= self._since

    def add(self, commit: Commit, topics: list[str]) -> None:
        """Add a commit that is announced; under the shard's lock."""
        with self._lock:
            if self._commits and self._commits[-1][0].void:
                self._commits.pop()
                self._lasts.pop()
            self._commits.append((commit, topics))
            self._lasts.append(commit.last)
        commit.matches.append(self)
        commit.listed += _ENTRY + _TOPIC * len(topics)

    def keep(self, asked: tuple[int, int], run: Run) -> None:
        """Keep an answer, if it was read here: what was scanned has a bound of its own."""
        with self._lock:
            if run.stretch is self._joined:
                self.answer = asked, run

    def evict(self, commit: Commit) -> None:
        """Forget a commit, and those before it."""
        with self._lock:
            count = bisect.bisect_right(self._lasts, commit.last)
            if count:
                self._since = self._lasts[count - 1]
                del self._commits[:count], self._lasts[:count]
                self._joined = self.answer = None

    def read(self, after: int, watermark: int, limit: int) -> tuple[Stretch, bool] | None:
        """Return the readable commits after a position, and whether no further one is readable now.

        There are at most ``limit`` messages. Returns None if some must be scanned.
        """
        with self._lock:
            if after < self._since:
                return None
            joined = self._joined
            if joined is not None and joined.covers(after):
                return joined, joined.position == self._lasts[-1]
            start = bisect.bisect_right(self._lasts, after)
            before = self._lasts[start - 1] if start else self._since
            following = self._commits[start : start + limit]
        parts, all_read = _readable(following, watermark, limit)
        if not parts:
            return Stretch(after, after, MessageBatch.empty()), True
        position = parts[-1].commit.last
        if len(parts[0]) > limit:  # then it is the only one
            parts = [parts[0].after(after, limit)]
            before, all_read = after, False
            position = min(position, int(parts[0].positions()[-1])) if len(parts[0]) else position
        stretch = _CommittedStretch(before, position, parts)
        with self._lock:
            if before >= self._since:  # otherwise some of it was forgotten
                self._joined = stretch
        return stretch, all_read


def _readable(following: list[tuple[Commit, list[str]]], watermark: int, limit: int) -> tuple[list[_Part], bool]:
    """Return the first commits that are readable and have at most ``limit`` messages, and whether these are all."""
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
    """The recent commits of all shards, as many as there is room for."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        """Guards the attributes below. It is taken after a shard's lock, and before those of `Matches`."""
        self._commits: collections.deque[Commit] = collections.deque()
        self._rows = 0
        self._bytes = 0
        self._listed = 0

    def remember(self, commit: Commit) -> None:
        """Keep a commit until there are too many others."""
        with self._lock:
            self._commits.append(commit)
            self._rows += len(commit.batch)
            self._bytes += commit.bytes
            self._listed += commit.listed
            while self._too_many_locked():
                oldest = self._commits.popleft()
                self._rows -= len(oldest.batch)
                self._bytes -= oldest.bytes
                self._listed -= oldest.listed
                for matches in oldest.matches:
                    matches.evict(oldest)

    def _too_many_locked(self) -> bool:
        much = self._rows > _ROWS or self._bytes > _BYTES or self._listed > _LISTED
        return much or len(self._commits) > _COMMITS

    def forget(self) -> None:
        """Forget all commits. Their readers forget them, too, each with `Matches.forget`."""
        with self._lock:
            self._commits.clear()
            self._rows = self._bytes = self._listed = 0
