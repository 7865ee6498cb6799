"""Scans and snapshots of LevelDB, which skip hidden ranges and detect damage that plyvel ignores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from threading import Lock, RLock
from typing import Any

import plyvel
from topicstore.contract.engine import K, Keyspace, Snapshot

from topicstore_backends.calls import Calls
from topicstore_backends.keyspaces import ByKeyspace

from .errors import lost
from .instance import Instance
from .keys import FORMAT, LAST, HiddenRanges, Pair, Space

__all__ = ["LeveldbSnapshot", "Past", "Present", "Scan", "values_of"]

# A scan's first list is small, so that a seek costs microseconds; the next ones grow to these sizes.
# Longer lists are slower, because their pairs leave the processor's cache before they are used.
FIRST_PAIRS, MOST_PAIRS = 16, 256
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 18
GROWTH = 4
# The number of pairs that are read in one step, before their sizes are known; all of them may be large.
PART_PAIRS = 32

_VALUE = itemgetter(1)


class Present:
    """The current state of the engine, from which scans and gets read."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.reader = instance.database
        self.calls = instance.calls
        self.hidden = HiddenRanges()
        self.changing = RLock()  # reentrant, because a signal handler may read
        """Held while a batch changes hidden ranges, so that no other thread sees the batch without the ranges."""

    def begin(self, space: Space, span: tuple[bytes, bytes], reverse: bool) -> tuple[Any, HiddenRanges, bool]:
        """Return an iterator, the hidden ranges at its creation, and whether its keys lack the keyspace's byte.

        plyvel omits that byte at no cost, but not in iterators of a snapshot. A scan that looks for hidden keys
        needs the byte.
        """
        with self.changing:
            bare = space.keyspace.shape is None and not self.hidden
            if bare:
                keyspace = self.reader.prefixed_db(space.start)
                stop = None if span[1] == space.end else span[1][1:]
                iterator = _iterator(keyspace, (span[0][1:], stop), reverse)
            else:
                iterator = _iterator(self.reader, span, reverse)
            return self.instance.give(iterator), self.hidden, bare

    def raw_iterator(self) -> Any:
        """Return an iterator that raises an error at any damaged block. The caller drops it soon."""
        return self.reader.raw_iterator(verify_checksums=True)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of all keys from one snapshot."""
        with self.changing:
            snapshot, hidden = self.reader.snapshot(), self.hidden
        try:
            return values_of(snapshot, hidden, keys)
        finally:
            snapshot.close()


class Past:
    """The state that a snapshot sees. Scans refer to this object, so that the snapshot lives as long as they do."""

    def __init__(self, instance: Instance, snapshot: Any, hidden: HiddenRanges) -> None:
        self.instance = instance
        self.reader = snapshot
        self.calls = Calls(instance.translated)
        self._hidden = hidden

    def begin(self, space: Space, span: tuple[bytes, bytes], reverse: bool) -> tuple[Any, HiddenRanges, bool]:
        """Return an iterator, the hidden ranges, and False: the iterator's keys begin with the keyspace's byte."""
        return self.instance.give(_iterator(self.reader, span, reverse)), self._hidden, False

    def raw_iterator(self) -> Any:
        """Return an iterator that raises an error at any damaged block. The caller drops it soon."""
        return self.reader.raw_iterator(verify_checksums=True)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of all keys."""
        return values_of(self.reader, self._hidden, keys)

    def close(self) -> None:
        """Release the snapshot, after the reads that are using it."""
        if not self.instance.left_to_parent:
            self.calls.end()
            self.instance.take_back(self.reader)

    def __del__(self) -> None:
        if hasattr(self, "calls"):  # otherwise a signal handler interrupted the constructor
            self.close()


def _iterator(reader: Any, span: tuple[bytes, bytes | None], reverse: bool) -> Any:
    return reader.iterator(start=span[0], stop=span[1], reverse=reverse, verify_checksums=True)


def values_of(reader: Any, hidden: HiddenRanges, keys: Sequence[bytes]) -> list[bytes | None]:
    """Return the values of stored keys, None where a key is absent or hidden."""
    get = reader.get
    if hidden:
        return [None if hidden.around(key) else get(key, verify_checksums=True) for key in keys]
    return [get(key, verify_checksums=True) for key in keys]


class Scan(Iterator[list[Pair]]):
    """An iterator over the pairs of one range, a list at a time."""

    _iterator: Any = None  # read by `__del__` even if a signal handler interrupted the constructor

    def __init__(
        self, source: Present | Past, space: Space, span: tuple[bytes, bytes], reverse: bool, limit: int | None
    ) -> None:
        self._source = source
        self._space = space
        self._span = span
        self._reverse = reverse
        self._left = limit
        self._lock = Lock()
        """Held while the iterator is used: plyvel's iterators must not be used by two threads at a time."""
        self._hidden = HiddenRanges()
        self._bare = False
        self._ahead: list[Pair] = []
        """The pairs that were read and didn't fit into the last list."""
        self._failure: plyvel.Error | None = None
        self._begun = self._ended = False
        self._below: bytes | None = None
        """After a backward seek over a hidden range: the key below which all further keys must lie."""
        self._pairs, self._bytes = FIRST_PAIRS, FIRST_BYTES
        self._typical = FIRST_BYTES
        """The bytes of a typical value as observed so far. The initial estimate makes the first part one pair."""
        self._done = (limit is not None and limit <= 0) or span[0] >= span[1]

    def __next__(self) -> list[Pair]:
        if self._done:
            raise StopIteration
        instance, calls = self._source.instance.calls, self._source.calls
        with instance.lock(), instance, calls.lock(), calls, self._lock:
            if self._iterator is None:
                begun = self._source.begin(self._space, self._span, self._reverse)
                self._iterator, self._hidden, self._bare = begun
            chunk = self._take()
        if self._left == 0 or (self._ended and not self._ahead):
            self.close()
        if not chunk:
            raise StopIteration
        self._pairs = min(self._pairs * GROWTH, MOST_PAIRS)
        self._bytes = min(self._bytes * GROWTH, MOST_BYTES)
        if self._bare:
            return chunk
        decode = self._space.decode
        return [(decode(key), value) for key, value in chunk]

    def close(self) -> None:
        """End the scan and close its iterator. Dropping the scan does the same."""
        with self._lock:
            self._done = True
            iterator, self._iterator = self._iterator, None
        if iterator is not None:
            self._source.instance.take_back(iterator)

    def __del__(self) -> None:
        if self._iterator is not None:
            self.close()

    def _take(self) -> list[Pair]:
        """Collect pairs up to the end of the range, the limit, or the size of a list."""
        chunk: list[Pair] = []
        room = self._bytes
        most = self._pairs if self._left is None else min(self._pairs, self._left)
        while len(chunk) < most:
            part = self._ahead or self._fetch(min(PART_PAIRS, most - len(chunk), max(1, room // self._typical)))
            self._ahead = []
            if not part:
                break
            size = sum(map(len, map(_VALUE, part)))
            self._typical = size // len(part) + 1
            if size > room:
                fits = _fitting(part, room) or (0 if chunk else 1)
                chunk += part[:fits]
                self._ahead = part[fits:]
                break
            chunk += part
            room -= size
        if self._left is not None:
            self._left -= len(chunk)
        return chunk

    def _fetch(self, count: int) -> list[Pair]:
        """Read up to ``count`` pairs that aren't hidden; none at the end of the range."""
        hidden = self._hidden
        while True:
            part = self._read(count)
            if not (part and hidden):
                return part
            seen = [pair for pair in part if hidden.around(pair[0]) is None]
            self._leap(hidden.around(part[-1][0]))
            if seen:
                return seen

    def _leap(self, over: tuple[bytes, bytes] | None) -> None:
        """Seek past a hidden range, in the direction of the scan."""
        if over is None:
            return
        if not self._reverse:
            self._iterator.seek(over[1])
        elif over[0] <= self._span[0]:
            self._ended = True
        else:
            self._iterator.seek(over[0])
            self._below = over[0]

    def _read(self, count: int) -> list[Pair]:
        """Read up to ``count`` pairs. Pairs before damage are returned first; the next call raises the error."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            return []
        part: list[Pair] = []
        try:
            part.extend(islice(self._iterator, count))
        except plyvel.Error as error:
            if not part:
                raise
            self._failure = error
            return part
        if self._below is not None:
            part = self._check_leap(part)
        if len(part) < count:
            self._ended = True
            part = part or self._check_end()
        self._begun = True
        return part

    def _check_leap(self, part: list[Pair]) -> list[Pair]:
        """Check the pairs read after a backward seek; return only those within the range."""
        below, self._below = self._below, None
        if not part and self._source.reader.get(FORMAT, verify_checksums=True) is None:
            raise lost()
        if part and below is not None and part[0][0] >= below:
            raise lost()
        return part if part and part[0][0] >= self._span[0] else []

    def _check_end(self) -> list[Pair]:
        """Raise `CorruptionError` if the range ended because of damage; return pairs that plyvel left out, if any."""
        start, end = self._span
        if not self._reverse and self._is_last_there():
            return []
        if self._reverse and self._begun:
            return []
        with self._source.raw_iterator() as again:
            again.seek(end)
            if not again.valid():
                raise lost()
            if self._reverse:
                again.prev()
                if again.valid() and again.key() == start:
                    return [(start[1:] if self._bare else start, again.value())]
        return []

    def _is_last_there(self) -> bool:
        """Return whether the database's last key is readable: then no damage has ended a forward scan."""
        with suppress(plyvel.Error):
            return self._source.reader.get(LAST, verify_checksums=True) is not None
        return False


def _fitting(part: list[Pair], room: int) -> int:
    """Return the number of pairs, from the first on, that fit into ``room`` bytes."""
    for number, (_, value) in enumerate(part):
        room -= len(value)
        if room < 0:
            return number
    return len(part)


class LeveldbSnapshot(Snapshot):
    """A snapshot of LevelDB, with the ranges that were hidden when it was made."""

    def __init__(self, past: Past, spaces: ByKeyspace[Space]) -> None:
        self._past = past
        self._spaces = spaces

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None if the snapshot has no such key."""
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, None for a key that the snapshot doesn't have."""
        stored = self._spaces[keyspace.name].encode_all(keys)
        instance, calls = self._past.instance.calls, self._past.calls
        with instance.lock(), instance, calls.lock(), calls:
            return self._past.get_many(stored)

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the pairs of a range that the snapshot sees; see `LeveldbEngine.scan`."""
        space = self._spaces[keyspace.name]
        return Scan(self._past, space, space.encode_span(start, end), reverse, limit)

    def close(self) -> None:
        """Release the snapshot, which ends its scans. Idempotent."""
        self._past.close()
