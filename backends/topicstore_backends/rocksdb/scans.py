"""Iterators of RocksDB, and the scans, snapshots and gets of many keys that use them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import rocksdict
from topicstore.contract.engine import K, Keyspace, Snapshot
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock

from topicstore_backends.keyspaces import ByKeyspace

from .errors import Translated
from .families import Family

__all__ = ["Cursor", "RocksdbSnapshot", "Scan"]

# A scan's first list is small, so that a seek costs microseconds; the next ones grow to these sizes.
FIRST_PAIRS, MOST_PAIRS = 16, 4096
FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 20
GROWTH = 4

T = TypeVar("T")


class Cursor:
    """The only owner of a RocksDB iterator, so that closing the engine can find and drop the iterator."""

    __slots__ = ("__weakref__", "bound", "bounded", "iterator", "lock", "standing")

    def __init__(
        self, family: Family, bound: bytes | None = None, *, caching: bool = True, lock: ProcessLock | None = None
    ) -> None:
        self.lock = lock or ProcessLock()
        """Held while the iterator is used. The cursors of one snapshot share it, because making a lock takes time."""
        self.standing: object = None
        """The scan at whose position the iterator stands; scans of one snapshot take turns."""
        options = rocksdict.ReadOptions()
        if not caching:
            options.fill_cache(False)  # type: ignore[call-arg]  # the stub forgot the argument
        if bound is not None:
            # Without a bound RocksDB would walk through all deleted keys after the range, up to the next
            # live key.
            options.set_iterate_upper_bound(bound)
        self.bounded = bound is not None
        self.bound = (options, bound)
        """Kept alive here, because the iterator points to them without holding references."""
        self.iterator: rocksdict.RdictIter | None = family.data.iter(options)

    def use(self, work: Callable[[rocksdict.RdictIter], T]) -> T:
        """Return the result of ``work`` on the iterator, with the lock held.

        If ``work`` raises, the frames of the traceback are cleared: otherwise a kept exception would keep the
        iterator alive and the database open.
        """
        with self.lock:
            if self.iterator is None:
                raise DatabaseClosedError("the engine or the snapshot is closed")
            try:
                return work(self.iterator)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                raise

    def values_of(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Seek to each key in turn; return the values, None where there is none."""
        return self.use(lambda iterator: self._values_of(iterator, keys))

    def _values_of(self, iterator: rocksdict.RdictIter, keys: Iterable[bytes]) -> list[bytes | None]:
        self.standing = None
        values: list[bytes | None] = []
        for key in keys:
            iterator.seek(key)
            found = iterator.key()
            if found is None:
                iterator.status()
            values.append(iterator.value() if found == key else None)
        return values

    def close(self) -> None:
        """Drop the iterator, after the call that is using it."""
        with self.lock:
            self.iterator = None


class Scan(Iterator[list[tuple[K, bytes]]]):
    """An iterator over the pairs of one range, a list at a time."""

    def __init__(
        self,
        translated: Translated,
        family: Family,
        open_cursor: Callable[[Family, bytes | None], Cursor],
        span: tuple[bytes | None, bytes | None],
        reverse: bool,
        limit: int | None,
    ) -> None:
        self._translated = translated
        self._family = family
        self._open_cursor = open_cursor
        self._start, self._end = span
        self._reverse = reverse
        self._left = limit
        self._cursor: Cursor | None = None
        self._token = object()
        self._behind = False
        """Whether the iterator stands on the last pair that was returned rather than on the next one."""
        self._pairs, self._bytes = FIRST_PAIRS, FIRST_BYTES
        self._done = limit is not None and limit <= 0
        self._past = self._far_end()

    def __next__(self) -> list[tuple[K, bytes]]:
        if self._done:
            raise StopIteration
        if self._cursor is None:
            self._cursor = self._open_cursor(self._family, self._end)
            if self._cursor.bounded and not self._reverse:
                self._past = None  # RocksDB checks the upper bound itself
        cursor = self._cursor
        with self._translated:
            chunk = cursor.use(lambda iterator: self._advance(cursor, iterator))
        if self._done or not chunk:
            self.close()
        if not chunk:
            raise StopIteration
        self._pairs = min(self._pairs * GROWTH, MOST_PAIRS)
        self._bytes = min(self._bytes * GROWTH, MOST_BYTES)
        return chunk

    def close(self) -> None:
        """End the scan and release its iterator. Dropping the scan does the same."""
        self._done = True
        self._cursor = None

    def _far_end(self) -> Callable[[bytes], bool] | None:
        """Return a predicate for keys past the range in the scan's direction, or None if the range is open there."""
        if self._reverse:
            return None if self._start is None else self._start.__gt__
        return None if self._end is None else self._end.__le__

    def _advance(self, cursor: Cursor, iterator: rocksdict.RdictIter) -> list[tuple[K, bytes]]:
        """Return the next list, which begins where the last list ended."""
        if cursor.standing is not self._token:
            self._seek(iterator)
            cursor.standing = self._token
        elif self._behind and self._reverse:
            iterator.prev()
        elif self._behind:
            iterator.next()
        return self._take(iterator)

    def _seek(self, iterator: rocksdict.RdictIter) -> None:
        """Seek to the first pair that was not returned yet."""
        if not self._reverse:
            if self._start is None:
                iterator.seek_to_first()
            else:
                iterator.seek(self._start)
        elif self._end is None:
            iterator.seek_to_last()
        else:
            iterator.seek_for_prev(self._end)
            if iterator.key() == self._end:
                iterator.prev()

    def _take(self, iterator: rocksdict.RdictIter) -> list[tuple[K, bytes]]:
        """Collect pairs up to the end of the range, the limit, or the size of a list.

        Pairs are read one by one, because only this bounds a list of large values and avoids needless reads: a value
        past the end, or past the limit, may be a block of its own on disk.
        """
        chunk: list[tuple[K, bytes]] = []
        append, get_key, get_value = chunk.append, iterator.key, iterator.value
        advance = iterator.prev if self._reverse else iterator.next
        past, decode, room = self._past, self._family.decode, self._bytes
        count = self._pairs if self._left is None else min(self._pairs, self._left)
        last = None
        self._behind = False
        for left in range(count, 0, -1):
            key = get_key()
            if key is None:
                if not chunk:  # pairs before damage are returned first; the next call raises
                    iterator.status()
                break
            if past is not None and past(key):
                self._done = True
                break
            value = get_value()
            size = len(value)
            if size > room and chunk:
                break
            append((key if decode is None else decode(key), value))
            last = key
            room -= size
            if left == 1 or room < size:
                self._behind = True
                break
            advance()
        if last is not None:
            self._note(last, len(chunk))
        return chunk

    def _note(self, last: bytes, taken: int) -> None:
        """Remember where to continue if another scan moves the iterator."""
        if self._reverse:
            self._end = last
        else:
            self._start = last + b"\0"
        if self._left is not None:
            self._left -= taken
            self._done = self._done or not self._left


class RocksdbSnapshot(Snapshot):
    """A snapshot: one open iterator per keyspace, all made from the same state."""

    def __init__(self, translated: Translated, cursors: ByKeyspace[tuple[Family, Cursor]]) -> None:
        self._translated = translated
        self._cursors = cursors

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None if the snapshot has no such key."""
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, None for a key that the snapshot doesn't have."""
        family, cursor = self._cursors[keyspace.name]
        encoded = family.encode_all(keys)
        with self._translated:
            return cursor.values_of(encoded)

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the pairs of a range that the snapshot sees; see `RocksdbEngine.scan`."""
        family, cursor = self._cursors[keyspace.name]
        span = family.encode_span(start, end)
        return Scan(self._translated, family, lambda _family, _end: cursor, span, reverse, limit)

    def close(self) -> None:
        """Drop the iterators, which ends the scans. Idempotent."""
        for _, cursor in self._cursors.values():
            cursor.close()
