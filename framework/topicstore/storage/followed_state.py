"""`FollowedState`: selected values of a shard's state, of this site's copy of the shard or of another site's."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from topicstore.contract.engine import Keyspace, Reader
from topicstore.shard.elsewhere import AskState, Selection, Values
from topicstore.shard.shard import Shard
from topicstore.shard.state import Applied, ShardState

__all__ = ["FollowedState"]


class _StateCopy(Reader):
    """Selected values of a shard's state at another site, as an engine with nothing else would return them."""

    def __init__(self, selection: Selection, values: Values, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self.applied = values.applied
        self.changes = values.changes
        self.last_applied = dict(zip(selection.watched, values.changes, strict=True))
        self._keys = [key for key, _ in pairs]
        self._values = dict(pairs)

    def get(self, keyspace: Keyspace[Any], key: Any) -> bytes | None:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def get_many(self, keyspace: Keyspace[Any], keys: Sequence[Any]) -> list[bytes | None]:
        """Return the value of each key, or None."""
        return [self._values.get(key) for key in keys]

    def scan(
        self,
        keyspace: Keyspace[Any],
        start: Any = None,
        end: Any = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[Any, bytes]]]:
        """Yield the pairs from ``start`` to before ``end`` in one list, unless there are none."""
        first = 0 if start is None else bisect_left(self._keys, start)
        keys = self._keys[first : None if end is None else bisect_left(self._keys, end)]
        pairs = [(key, self._values[key]) for key in islice(reversed(keys) if reverse else keys, limit)]
        if pairs:
            yield pairs

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    @property
    def pairs(self) -> Sequence[tuple[bytes, bytes]]:
        """All keys and values, ascending."""
        return [(key, self._values[key]) for key in self._keys]


class FollowedState:
    """Follows selected values of a shard's state, in this site's copy of the shard or in another site's. Thread-safe.

    A later reading never returns an older state. All values from another site are kept in memory.
    """

    def __init__(self, shard: Shard, selection: Selection) -> None:
        self._shard, self._selection = shard, selection
        self._lock = threading.Lock()
        """Guards `_copy`, and the decision which copy is read."""
        self._copy: _StateCopy | None = None
        """The values at another site, unless this site has a copy of the shard with all changes that they include."""
        writer = shard.writer
        self.state = ShardState(
            shard.number, self._reader, writer.write_state, self._last_applied, shard.generations.undisturbed
        )
        """The values, to be read by selected keys only. `ShardElsewhereError` is raised while they are unknown."""

    @property
    def heads(self) -> Sequence[bytes]:
        """The heads of the keys by whose changes the values count as changed."""
        return self._selection.watched

    @property
    def copied(self) -> bool:
        """Whether there are values, and they are read at another site."""
        copy = self._current()
        return copy is not None and len(copy) > 0

    @property
    def known(self) -> bool:
        """Whether the values can be read."""
        return self._current() is not None or not self._shard.writer.elsewhere

    def look(self, *, certain: bool = False) -> None:
        """Ask for the values of a shard that this site doesn't keep; else do nothing.

        With ``certain``, or if nothing is known, the values include everything acknowledged before the call. Raises
        `ShardElsewhereError`.
        """
        before, elsewhere = self._current(), self._shard.elsewhere
        if elsewhere is None:
            return
        applied, known = (0, []) if before is None else (before.applied, before.changes)
        found = elsewhere.values(AskState(self._selection, certain or before is None, applied, known))
        pairs = found.pairs if found.pairs is not None or before is None else before.pairs
        copy = _StateCopy(self._selection, found, pairs or ())
        with self._lock:
            if self._copy is None or self._copy.applied <= copy.applied:
                self._copy = copy

    def _current(self) -> _StateCopy | None:
        """Return the values at another site, if those are to be read."""
        with self._lock:
            log, copy = self._shard.writer.log, self._copy
            whole = not self._shard.writer.elsewhere
            if copy is not None and whole and (log is None or log.applied >= copy.applied):
                self._copy = copy = None
            return copy

    def _reader(self) -> Reader:
        writer, copy = self._shard.writer, self._current()
        if copy is None and writer.elsewhere:
            raise writer.elsewhere_error()
        return writer.open_engine() if copy is None else copy

    def _last_applied(self, head: bytes) -> Applied:
        copy = self._current()
        return self._shard.writer.last_applied(head) if copy is None else copy.last_applied[head]
