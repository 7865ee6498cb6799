"""`Backlogs`: bounds the number and the bytes of the messages that wait for a session, by skipping the oldest.

A session has no queue of its own: its subscriptions have places in the stored messages. So the bound moves the places
forward, which drops the messages in between for this session alone. Messages are not removed from the store, and
publishers are not refused: one absent client must not stop them.

The unread messages are read without a lock, at most `_LOOKED` messages of a filter and shard in one call. Only messages
that were read are skipped, and only if at least as many newer ones as the bound allows are known. So a call never skips
too many, and repeated calls reach the bound. Shared subscriptions are not bounded: their messages wait for a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import GenerationDroppedError, StateConflictError
from topicstore.contract.state import StateWrite
from topicstore.storage.counting.lag import LagCounter

from .cursors import FilterCursor
from .lag import ReadPositions, read_positions
from .locks import Around
from .model import Skipped, is_shared
from .records import VERSION, put
from .registry import SessionRegistry
from .session import Session

__all__ = ["Backlogs"]

_LOOKED = 200_000
"""The most messages of a filter and shard that one call reads, unless the bound itself is higher."""
_MOST = 10_000_000
"""The most messages that wait for a session if only their bytes are bounded."""

_Sizes = npt.NDArray[np.int64]


@attrs.frozen
class _Unread:
    """The first unread messages of a filter in a shard, in the order of their positions."""

    topic_filter: str
    shard: int
    positions: npt.NDArray[np.uint64]
    sizes: _Sizes
    whole: bool
    """Whether these are all unread messages."""

    def until(self, position: int) -> int:
        """Return the number of messages up to a position."""
        return int(np.searchsorted(self.positions, np.uint64(position), "right"))

    def between(self, after: int, position: int) -> Skipped:
        """Return the messages after one position up to another."""
        rows = slice(self.until(after), self.until(position))
        return Skipped(max(rows.stop - rows.start, 0), int(self.sizes[rows].sum()))


class Backlogs:
    """The bounds of the sessions of one open database.

    entered: calls a function under the sessions' mutex, and raises if the database is closed.
    """

    def __init__(self, registry: SessionRegistry, entered: Around) -> None:
        self._registry = registry
        self._entered = entered

    def bound(self, client_ids: Sequence[str], most: int | None, most_bytes: int | None) -> dict[str, Skipped]:
        """Bound the backlogs of sessions; return the skipped messages by client id. See `Sessions.bound_backlogs`."""
        found: dict[str, Skipped] = {}
        counter = LagCounter(self._registry.publisher.storage())
        for client_id in client_ids:
            unread = self._unread(counter, client_id, _MOST if most is None else most)
            cut = _cut(unread, _MOST if most is None else most, most_bytes)
            if cut is not None:
                skipped = self._skip(client_id, unread, cut)
                if skipped.messages:
                    found[client_id] = skipped
        return found

    def _unread(self, counter: LagCounter, client_id: str, most: int) -> list[_Unread]:
        """Return the unread messages of a session's filters, in each shard."""
        positions = self._entered(partial(self._positions_of, client_id))
        found: list[_Unread] = []
        for text, one in positions.items():
            for shard, (place, mark) in enumerate(zip(one.places, counter.marks, strict=True)):
                if place < mark and not is_shared(text):
                    found.append(_read(counter, text, one, shard, max(2 * most, _LOOKED)))
        return found

    def _positions_of(self, client_id: str) -> Mapping[str, ReadPositions]:
        registry = self._registry
        session = registry.connected.get(client_id)
        if session is not None and session.resuming is not None:
            return {}
        return read_positions(registry.states, registry.groups, client_id, session)

    # --- skipping ---

    def _skip(self, client_id: str, unread: Sequence[_Unread], cut: int) -> Skipped:
        """Skip the messages up to a position; return those that the session had not read meanwhile."""
        session = self._registry.connected.get(client_id)
        if session is None:
            return self._entered(lambda: self._skip_stored(client_id, unread, cut))
        return self._registry.locks.hold({session: None}, lambda: self._skip_connected(session, unread, cut))

    def _skip_connected(self, session: Session, unread: Sequence[_Unread], cut: int) -> Skipped:
        """Skip messages of a connected session. The caller holds its lock."""
        if session.ended is not None or session.resuming is not None:
            return Skipped()
        skipped, writes, moved = Skipped(), list[StateWrite](), dict[FilterCursor, None]()
        for one in unread:
            cursor = session.cursors.get(one.topic_filter)
            if isinstance(cursor, FilterCursor):
                end, place = _end(one, cut), cursor.places[one.shard]
                if end > place:
                    skipped += one.between(place, end)
                    cursor.skip(one.shard, end)
                    moved[cursor] = None
        for cursor in moved:
            writes += cursor.writes()
        try:
            self._registry.commits.write(session, [session.guard, *writes])
        except BaseException:
            for cursor in moved if session.ended is None else ():
                cursor.rewind()
            raise
        for cursor in moved:
            cursor.committed()
        session.ask()
        self._registry.skipped += skipped
        return skipped

    def _skip_stored(self, client_id: str, unread: Sequence[_Unread], cut: int) -> Skipped:
        """Skip messages of a session whose client is absent, unless the session changes at the same time."""
        states = self._registry.states
        found = self._registry.find(client_id)
        if found is None or client_id in self._registry.connected:
            return Skipped()
        numbers = {record.topic_filter: number for number, record in states.subscriptions(client_id)}
        places, skipped = states.places(client_id), Skipped()
        changed: dict[int, list[int]] = {}
        for one in unread:
            place = places.get(numbers.get(one.topic_filter, -1))
            end = _end(one, cut)
            if place is not None and end > place[one.shard]:
                skipped += one.between(place[one.shard], end)
                place[one.shard] = end
                changed[numbers[one.topic_filter]] = place
        keys = states.keys_of(client_id)
        writes = [put(keys.place(number), (VERSION, place)) for number, place in changed.items()]
        try:
            states.write_for(client_id, [found.guard, *writes])
        except StateConflictError:  # the session's client has just connected: the next call bounds its session
            return Skipped()
        self._registry.skipped += skipped
        return skipped


def _end(unread: _Unread, cut: int) -> int:
    """Return the position of the last message up to ``cut``; 0 if there is none."""
    count = unread.until(cut)
    return int(unread.positions[count - 1]) if count else 0


def _read(counter: LagCounter, text: str, one: ReadPositions, shard: int, limit: int) -> _Unread:
    """Read the first unread messages of a filter in a shard, about ``limit`` of them."""
    while True:
        positions, sizes, count = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], 0
        try:
            for batch in counter.batches(one.topic_filter, shard, one.places[shard]):
                if count >= limit:
                    break
                wanted = slice(None) if one.wanted is None else one.wanted(shard, batch)
                positions.append(batch.positions[wanted])
                sizes.append(_sizes(batch)[wanted])
                count += len(positions[-1])
        except GenerationDroppedError:  # the generation was dropped or archived meanwhile
            continue
        return _Unread(text, shard, np.concatenate(positions), np.concatenate(sizes), whole=count < limit)


def _sizes(batch: MessageBatch) -> _Sizes:
    return np.fromiter(map(len, to_iterable(batch.payloads)), np.int64, len(batch))


def _cut(unread: Sequence[_Unread], most: int, most_bytes: int | None) -> int | None:
    """Return the position up to which messages are to be skipped; None if the bound is kept.

    Positions of all shards are compared, because their first part is a time.
    """
    if not unread:
        return None
    positions = np.concatenate([one.positions for one in unread])
    sizes = np.concatenate([one.sizes for one in unread])
    order = np.argsort(positions, kind="stable")
    positions, newest_first = positions[order], sizes[order][::-1]
    kept = min(most, len(positions))
    if most_bytes is not None:
        kept = min(kept, int(np.searchsorted(np.cumsum(newest_first), most_bytes, "right")))
    if kept == len(positions):
        return None
    cut = int(positions[len(positions) - kept - 1])
    ends = [int(one.positions[-1]) for one in unread if not one.whole and len(one.positions)]
    return min([cut, *ends])
