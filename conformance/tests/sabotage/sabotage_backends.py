"""Backends that break one promise each, and the test that must tell it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from sabotage import Saboteur, suites_of
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    META,
    STATE,
    Backend,
    Engine,
    EngineInfo,
    K,
    Key,
    Keyspace,
    Snapshot,
    WriteBatch,
)
from topicstore.contract.engine import Reader as EngineReader
from topicstore.contract.errors import (
    CorruptionError,
    EngineError,
    InvalidArgumentError,
    StorageFullError,
    UnsupportedError,
)
from topicstore_backends.memory import MemoryBackend, MemoryOptions
from topicstore_backends.plugin import topicstore_backends
from topicstore_conformance.backend.suite import BackendSuite
from topicstore_conformance.faults.threads import PATIENCE
from topicstore_conformance.subjects.subject import BackendSubject

CAPABILITIES = {spec.name: spec.capabilities for spec in topicstore_backends()}
Chunks = Iterator[list[tuple[Key, bytes]]]


# --- right, but for what a subclass changes --------------------------------------------------


class Wrapped(Engine):
    """An engine that hands everything on to another one. Snapshots read by the same methods."""

    def __init__(self, inner: Any, path: Path, create: bool) -> None:
        self.inner = inner
        self.path = path
        self.reopened = not create

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        self.inner.write(batch, sync=sync)

    def flush_log(self) -> None:
        self.inner.flush_log()

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        return self.read_many(self.inner, keyspace, keys)

    def scan(
        self, keyspace: Keyspace[K], start: K | None = None, end: K | None = None, **how: Any
    ) -> Iterator[list[tuple[K, bytes]]]:
        return self.read(self.inner, keyspace, start, end, **how)

    def snapshot(self) -> Snapshot:
        return WrappedSnapshot(self, self.inner.snapshot())

    def info(self) -> EngineInfo:
        return self.inner.info()

    def close(self) -> None:
        self.inner.close()

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        self.inner.reclaim(keyspace, start, end)

    def verify(self) -> Iterator[str]:
        return self.inner.verify()

    def checkpoint(self, path: Path) -> None:
        self.inner.checkpoint(path)

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        return self.inner.sql(statement, parameters, beside=beside)

    # What most saboteurs change.

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        return reader.get_many(keyspace, keys)

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        return reader.scan(keyspace, start, end, **how)


class WrappedSnapshot(Snapshot):
    """A snapshot that reads as its engine does."""

    def __init__(self, engine: Wrapped, inner: Any) -> None:
        self.engine = engine
        self.inner = inner

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        return self.get_many(keyspace, [key])[0]

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        return self.engine.read_many(self.inner, keyspace, keys)

    def scan(
        self, keyspace: Keyspace[K], start: K | None = None, end: K | None = None, **how: Any
    ) -> Iterator[list[tuple[K, bytes]]]:
        return self.engine.read(self.inner, keyspace, start, end, **how)

    def close(self) -> None:
        self.inner.close()


class Changed(Wrapped):
    """Writes another batch than it is given."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        self.inner.write(self.changed(batch), sync=sync)

    def changed(self, batch: WriteBatch) -> WriteBatch:
        new = WriteBatch()
        new.ranges, new.rows = list(batch.ranges), list(batch.rows)
        for keyspace, key, value in self.operations(batch):
            if value is None:
                new.delete(keyspace, key)
            else:
                new.put(keyspace, key, value)
        return new

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return batch.operations


class SabotagedBackend(Backend):
    """Opens engines of one saboteur over those of a backend that is right."""

    def __init__(self, inner: Backend, engine: type[Wrapped]) -> None:
        super().__init__(None)
        self.inner = inner
        self.engine = engine

    def open_shard(self, path: Path, keyspaces: Sequence[Keyspace[Any]], *, create: bool) -> Engine:
        opening = getattr(self.engine, "opening", None)
        if opening is not None:
            return opening(self, path, keyspaces, create)
        return self.engine(self.inner.open_shard(path, keyspaces, create=create), path, create)


def base(name: str) -> Backend:
    if name == "memory":
        return MemoryBackend(MemoryOptions())
    from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions

    return RocksdbBackend(RocksdbOptions(write_buffer_bytes=1 << 20))


ENGINES: dict[str, tuple[str, type[Wrapped]]] = {}
SABOTEURS: list[Saboteur] = []


def make(name: str) -> Backend:
    """Return a saboteur's backend: what child processes import."""
    of, engine = ENGINES[name]
    return SabotagedBackend(base(of), engine)


def memory_get(engine: Any, keyspace: Keyspace[Any], key: Key) -> bytes | None:
    return engine.inner._maps[keyspace.name].get(key, [(0, None)])[-1][1]


def memory_put(engine: Any, keyspace: Keyspace[Any], key: Key, value: bytes) -> None:
    engine.inner._maps[keyspace.name][key] = [(0, value)]


def breaks(promise: Callable[..., object], of: str = "memory", *, capabilities: str = "", **how: Any) -> Any:
    """Register a saboteur, the test that must fail of it, and capabilities that it lies about."""

    def register(engine: type[Wrapped]) -> type[Wrapped]:
        name = engine.__name__
        ENGINES[name] = of, engine
        declared = CAPABILITIES[of] | set(capabilities.split())
        around = {"raw_get": memory_get, "raw_put": memory_put} if of == "memory" else {}
        subject = partial(BackendSubject, make=partial(make, name), capabilities=declared, **around)
        what = (engine.__doc__ or "").strip()
        SABOTEURS.append(Saboteur(name, what, promise.__qualname__, subject, **how))
        return engine

    return register


S = BackendSuite


# --- keys ------------------------------------------------------------------------------------


@breaks(S.test_keys_of_bytes_are_ordered_as_bytes)
class SignedBytes(Wrapped):
    """Orders bytes as signed numbers: 0xff in front of 0x00."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if keyspace.shape is not None:
            return reader.scan(keyspace, start, end, **how)
        return iter(
            [
                sorted(
                    (pair for chunk in reader.scan(keyspace, start, end, **how) for pair in chunk),
                    key=lambda pair: [(byte + 128) % 256 for byte in pair[0]],
                    reverse=how.get("reverse", False),
                )
            ]
        )


@breaks(S.test_keys_of_tuples_are_ordered_as_numbers)
class NumbersAsText(Wrapped):
    """Orders numbers as their digits: 256 in front of 3."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for chunk in reader.scan(keyspace, start, end, **how):
            yield (
                chunk
                if keyspace.shape is None
                else sorted(chunk, key=lambda pair: list(map(str, pair[0])), reverse=how.get("reverse", False))
            )


@breaks(S.test_order_is_that_of_keys_not_of_writes)
class OrderOfWrites(Changed):
    """Scans large keyspaces in the order in which their keys were first written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.first: dict[Any, int] = {}

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        for keyspace, key, _ in batch.operations:
            self.first.setdefault((keyspace.name, key), len(self.first))
        return batch.operations

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for chunk in reader.scan(keyspace, start, end, **how):
            yield sorted(chunk, key=lambda pair: self.first.get((keyspace.name, pair[0]), 0))


@breaks(S.test_long_keys)
class CutsKeys(Changed):
    """Keeps the first 1,000 bytes of a key."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [(k, key[:1000] if k.shape is None else key, value) for k, key, value in batch.operations]


@breaks(S.test_keys_that_end_in_the_lowest_and_highest_byte)
class StripsZeros(Changed):
    """Ends keys at their trailing zero bytes."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [(k, key.rstrip(b"\0") if k.shape is None else key, value) for k, key, value in batch.operations]


@breaks(S.test_a_key_of_another_shape_is_refused)
class TakesAnyShape(Changed):
    """Leaves out the operations whose keys don't fit."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [o for o in batch.operations if isinstance(o[1], bytes if o[0].shape is None else tuple)]


@breaks(S.test_an_unknown_keyspace_is_refused)
class TakesAnyKeyspace(Changed):
    """Leaves out the operations on keyspaces that it doesn't know."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [operation for operation in batch.operations if operation[0].name != "stranger"]


@breaks(S.test_keyspaces_are_apart)
class MixesKeyspaces(Changed):
    """Keeps two keyspaces of one shape in one."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [(DATA if k is INDEX else k, key, value) for k, key, value in batch.operations]

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        return reader.get_many(DATA if keyspace is INDEX else keyspace, keys)

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        return reader.scan(DATA if keyspace is INDEX else keyspace, start, end, **how)


@breaks(S.test_get_finds_exactly_its_key)
class EmptyIsMissing(Wrapped):
    """Takes an empty value for a missing one."""

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        return [value or None for value in reader.get_many(keyspace, keys)]


@breaks(S.test_get_many_answers_in_the_order_asked)
class SortsAnswers(Wrapped):
    """Answers in the order of keys, not in the order asked."""

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        return reader.get_many(keyspace, sorted(keys))


@breaks(S.test_neighbouring_prefixes_are_apart)
class ReturnsNeighbours(Wrapped):
    """Returns a neighbouring prefix's first key: of long scans by prefix it takes the end for inside."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if keyspace.shape is None and end is not None and len(end) == 4:
            end += b"\0"
        return reader.scan(keyspace, start, end, **how)


# --- scans -----------------------------------------------------------------------------------


@breaks(S.test_the_start_is_inside_and_the_end_is_not)
class IgnoresTheEnd(Wrapped):
    """Scans on behind the end."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        return reader.scan(keyspace, start, end if how.get("reverse") else None, **how)


@breaks(S.test_the_start_is_inside_and_the_end_is_not)
class SkipsTheStart(Wrapped):
    """Begins behind the start, if that is a key."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for chunk in reader.scan(keyspace, start, end, **how):
            if left := [pair for pair in chunk if pair[0] != start]:
                yield left


@breaks(S.test_the_start_is_inside_and_the_end_is_not)
class IncludesTheEndInReverse(Wrapped):
    """Begins a reverse scan at its end, if that is a key."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if how.get("reverse") and keyspace is DATA and end is not None:
            end = (*end[:2], min(end[2] + 1, 2**64 - 1))
        return reader.scan(keyspace, start, end, **how)


@breaks(S.test_a_limit_bounds_all_lists_together)
class LimitsEachList(Wrapped):
    """Bounds each list by the limit."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        limit = how.pop("limit", None)
        for chunk in reader.scan(keyspace, start, end, **how):
            if limit is None or limit > 0:
                yield chunk if limit is None else chunk[:limit]


@breaks(S.test_bounds_need_not_be_there)
class StartsInFront(Wrapped):
    """Begins at the key in front of a start that is not there."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if keyspace is META and start is not None and reader.get(META, start) is None:
            before = [key for chunk in reader.scan(META, None, start, reverse=True, limit=1) for key, _ in chunk]
            start = (before or [start])[0]
        return reader.scan(keyspace, start, end, **how)


@breaks(S.test_a_range_whose_end_is_not_behind_its_start_is_empty)
class TurnsRangesRound(Wrapped):
    """Takes an inverted range for the other way round."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if start is not None and end is not None and end < start:
            start, end = end, start
        return reader.scan(keyspace, start, end, **how)


@breaks(S.test_a_scan_reaches_the_last_key)
class EndsEarly(Wrapped):
    """Takes the hundredth list for the last."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for _, chunk in zip(range(100), reader.scan(keyspace, start, end, **how), strict=False):
            yield chunk


@breaks(S.test_lists_are_not_empty_and_hold_a_megabyte)
class OneList(Wrapped):
    """Hands out everything in one list."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        everything = [pair for chunk in reader.scan(keyspace, start, end, **how) for pair in chunk]
        if everything:
            yield everything


@breaks(S.test_lists_are_not_empty_and_hold_a_megabyte)
class EmptyLists(Wrapped):
    """Hands out an empty list at the end."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        yield from reader.scan(keyspace, start, end, **how)
        yield []


@breaks(S.test_a_scan_can_be_dropped_or_closed_at_any_moment, raises=(AttributeError,))
class CanNotBeClosed(Wrapped):
    """Hands out scans without ``close``."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        return map(list, reader.scan(keyspace, start, end, **how))


@breaks(S.test_scans_take_turns)
class OneCursor(Wrapped):
    """Keeps one cursor: a scan moves all others of its direction on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lists: dict[Any, int] = {}

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        mine, of = object(), id(reader)
        for chunk in reader.scan(keyspace, start, end, **how):
            before, self.lists[of] = self.lists.get(of), mine
            yield chunk if before in (None, mine) else chunk[1:] or chunk
        self.lists.pop(of, None)


# --- batches ---------------------------------------------------------------------------------


@breaks(S.test_operations_apply_in_their_order)
class Reorders(Changed):
    """Reorders within a batch: deletes first."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return sorted(batch.operations, key=lambda operation: operation[2] is not None)


@breaks(S.test_ranges_apply_first)
class RangesLast(Wrapped):
    """Applies ranges behind the puts of their batch."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        ranges, batch.ranges = batch.ranges, []
        self.inner.write(batch)
        batch.ranges = ranges
        after = WriteBatch()
        after.ranges = ranges
        self.inner.write(after)


@breaks(S.test_many_puts_are_like_single_ones)
class SortsRuns(Changed):
    """Sorts the keys of a run, and takes the first of equal ones."""

    def changed(self, batch: WriteBatch) -> WriteBatch:
        new = WriteBatch()
        new.ranges = batch.ranges
        for keyspace, keys, values in batch.runs:
            if len(set(keys)) < len(keys):
                kept = dict(zip(reversed(keys), reversed(values), strict=True))
                keys, values = list(kept), list(kept.values())
            new.runs.append((keyspace, keys, values))
        return new


@breaks(S.test_a_refused_batch_applies_nothing)
class AppliesUpToTheError(Wrapped):
    """Applies the operations of a batch until one is wrong."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        try:
            self.inner.write(batch, sync=sync)
        except InvalidArgumentError:
            for keyspace, key, value in batch.operations:
                one = WriteBatch()
                one._add(keyspace, key, value)
                self.inner.write(one)
            raise


@breaks(S.test_a_batch_is_seen_at_once_and_whole)
class StaleReads(Wrapped):
    """Reads keys from a cache that only writes with sync empty."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cache: dict[Any, bytes | None] = {}

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        super().write(batch, sync=sync)
        if sync:
            self.cache = {}

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        found = reader.get_many(keyspace, keys)
        return [self.cache.setdefault((keyspace, key), value) for key, value in zip(keys, found, strict=True)]


@breaks(S.test_the_end_of_a_range_delete_stays)
class InclusiveRangeDelete(Changed):
    """Treats a range delete as inclusive."""

    def changed(self, batch: WriteBatch) -> WriteBatch:
        for keyspace, start, end in batch.ranges:
            if start < end and self.inner.get(keyspace, end) is not None:
                batch = super().changed(batch)
                batch.runs.insert(0, (keyspace, [end], [None]))
        return batch


@breaks(S.test_deleted_keys_can_be_put_again)
class DeletedForGood(Changed):
    """Keeps what a range deleted from coming back."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gone: list[Any] = []

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        kept = [
            (keyspace, key, value)
            for keyspace, key, value in batch.operations
            if not any(keyspace is k and start <= key < end for k, start, end in self.gone)
        ]
        self.gone += [each for each in batch.ranges if each[0] is DATA]
        return kept


@breaks(S.test_an_empty_batch_is_a_write, raises=(EngineError,))
class RefusesNothing(Wrapped):
    """Refuses a batch of nothing."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        if not batch:
            raise EngineError("nothing to write")
        super().write(batch, sync=sync)


# --- sizes -----------------------------------------------------------------------------------


@breaks(S.test_no_write_of_many_is_lost, whole=True)
class LosesOneInAThousand(Changed):
    """Loses one write in a thousand."""

    count = 0

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        first, self.count = self.count, self.count + len(batch.operations)
        return [o for number, o in enumerate(batch.operations, first) if number % 1_000 != 999]


@breaks(S.test_values_of_any_bytes_and_size)
class CutsValues(Changed):
    """Keeps the first 65,535 bytes of a value."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [(k, key, value and value[:65_535]) for k, key, value in batch.operations]


@breaks(S.test_values_of_16_megabytes)
class LargeLists(Wrapped):
    """Puts a large value into the list of the pairs before it."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        before: list[tuple[Key, bytes]] = []
        for chunk in reader.scan(keyspace, start, end, **how):
            if len(chunk[0][1]) > 1 << 22:
                yield before + chunk
                before = []
            else:
                if before:
                    yield before
                before = chunk
        if before:
            yield before


@breaks(S.test_a_hundred_thousand_keys_in_one_batch)
class SmallBatches(Changed):
    """Counts the operations of a batch in sixteen bits."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return batch.operations[: 1 << 16]


# --- isolation -------------------------------------------------------------------------------


@breaks(S.test_a_snapshot_sees_the_moment_it_was_made)
class LiveSnapshot(Wrapped):
    """Shows later writes in a snapshot."""

    def snapshot(self) -> Snapshot:
        return WrappedSnapshot(self, _Live(self.inner))


class _Live:
    """The engine itself, as a snapshot that can be closed."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        pass


@breaks(S.test_two_snapshots_see_two_moments)
class OneSnapshot(Wrapped):
    """Hands out one and the same snapshot until it is closed."""

    current: Any = None

    def snapshot(self) -> Snapshot:
        if self.current is None:
            self.current = super().snapshot()
        return self.current


@breaks(S.test_a_snapshot_is_one_moment_of_all_keyspaces)
class LateKeyspaces(Wrapped):
    """Takes the snapshot of a keyspace when it is first read."""

    def snapshot(self) -> Snapshot:
        return _Late(self)


class _Late(WrappedSnapshot):
    def __init__(self, engine: Wrapped) -> None:
        super().__init__(engine, engine.inner.snapshot())
        self.late: Any = None

    def scan(
        self, keyspace: Keyspace[K], start: K | None = None, end: K | None = None, **how: Any
    ) -> Iterator[list[tuple[K, bytes]]]:
        if keyspace is META and self.late is None:
            self.late = self.engine.inner.snapshot()
        return self.engine.read(self.late if keyspace is META else self.inner, keyspace, start, end, **how)


@breaks(S.test_a_scan_sees_the_moment_of_its_first_list)
class MomentOfTheCall(Wrapped):
    """Lets a scan see the moment of the call."""

    def scan(
        self, keyspace: Keyspace[K], start: K | None = None, end: K | None = None, **how: Any
    ) -> Iterator[list[tuple[K, bytes]]]:
        return self.inner.snapshot().scan(keyspace, start, end, **how)


@breaks(S.test_a_scan_sees_the_moment_of_its_first_list)
class MovingScan(Wrapped):
    """Lets each list of a scan see its own moment."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if how.get("reverse") or keyspace.shape is None:
            yield from reader.scan(keyspace, start, end, **how)
            return
        while chunk := next(reader.scan(keyspace, start, end, **how), None):
            yield chunk
            *head, last = chunk[-1][0]
            start = (*head, last + 1)


@breaks(S.test_a_scan_outlives_a_range_delete)
class RangeDeletesAreSeen(Wrapped):
    """Lets scans that are open see range deletes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.deleted: list[Any] = []

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        super().write(batch, sync=sync)
        self.deleted += batch.ranges

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        known = len(self.deleted)
        for chunk in reader.scan(keyspace, start, end, **how):
            later = [(first, last) for of, first, last in self.deleted[known:] if of is keyspace]
            if left := [pair for pair in chunk if not any(first <= pair[0] < last for first, last in later)]:
                yield left


# --- reopening -------------------------------------------------------------------------------


@breaks(S.test_everything_is_there_after_reopening, "rocksdb")
class ForgetsTheLastBatch(Wrapped):
    """Forgets the last batch when it is closed."""

    last: Any = None

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        self.last = [(k, key, self.inner.get(k, key)) for k, key, _ in batch.operations]
        super().write(batch, sync=sync)

    def close(self) -> None:
        undo = WriteBatch()
        for keyspace, key, value in self.last or ():
            undo._add(keyspace, key, value)
        self.last = None
        if undo:
            self.inner.write(undo)
        super().close()


@breaks(S.test_deletes_are_there_after_reopening, "rocksdb")
class DeletesComeBack(Wrapped):
    """Puts what a range deleted back when it is closed."""

    gone: Any = ()

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        spans = [each for each in batch.ranges if each[1] < each[2]]
        if spans:
            self.gone = [(k, *pair) for k, *span in spans for chunk in self.inner.scan(k, *span) for pair in chunk]
        super().write(batch, sync=sync)

    def close(self) -> None:
        back, self.gone = WriteBatch(), [each for each in self.gone if self.inner.get(*each[:2]) is None]
        for keyspace, key, value in self.gone:
            back.put(keyspace, key, value)
        self.gone = ()
        if back:
            self.inner.write(back)
        super().close()


@breaks(S.test_scans_are_whole_after_reopening, "rocksdb")
class SkipsAfterReopening(Wrapped):
    """Hands out scans that skip, in a shard that was there before, the first pair of the third list."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for number, chunk in enumerate(reader.scan(keyspace, start, end, **how)):
            yield chunk[1:] if self.reopened and number == 2 and len(chunk) > 1 else chunk


@breaks(S.test_creating_what_is_there_opens_it, "rocksdb")
class CreatesAnew(Wrapped):
    """Empties a shard that is opened with create."""

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        if create and path.is_dir():
            shutil.rmtree(path)
        return cls(backend.inner.open_shard(path, keyspaces, create=create), path, create)


@breaks(S.test_a_shard_that_is_not_there_is_not_made, "rocksdb")
class AlwaysCreates(Wrapped):
    """Makes shards that are not there."""

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        return cls(backend.inner.open_shard(path, keyspaces, create=True), path, create)


@breaks(S.test_what_can_not_be_opened_is_an_engine_error, "rocksdb", raises=(RuntimeError,))
class ErrorsOfItsOwn(Wrapped):
    """Raises errors of its own when a shard can't be opened."""

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        try:
            return cls(backend.inner.open_shard(path, keyspaces, create=create), path, create)
        except EngineError as error:
            raise RuntimeError(str(error)) from error


@breaks(S.test_a_second_engine_is_refused, "rocksdb")
class OpensTwice(Wrapped):
    """Opens a shard that is open a second time."""

    shared: ClassVar[weakref.WeakValueDictionary[Path, Any]] = weakref.WeakValueDictionary()

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        inner = cls.shared.get(path)
        if inner is None or inner._closed:
            inner = cls.shared[path] = backend.inner.open_shard(path, keyspaces, create=create)
        return cls(inner, path, create)


@breaks(S.test_another_process_is_refused, "rocksdb")
class OpensACopyElsewhere(Wrapped):
    """Opens a copy where another process has the shard open."""

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        try:
            inner = backend.inner.open_shard(path, keyspaces, create=create)
        except EngineError:
            if not path.is_dir():
                raise
            copy = shutil.copytree(path, path.with_name("copy"))
            inner = backend.inner.open_shard(copy, keyspaces, create=create)
        return cls(inner, path, create)


@breaks(S.test_what_does_not_persist_leaves_no_trace)
class LeavesATrace(Wrapped):
    """Makes a directory that it has no use for."""

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        path.mkdir(parents=True, exist_ok=True)
        return cls(backend.inner.open_shard(path, keyspaces, create=create), path, create)


@breaks(S.test_what_was_written_lies_there)
class AnotherForm(Changed):
    """Stores values in another form than it says, and reads them back from it."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [(k, key, value and value[::-1]) for k, key, value in batch.operations]

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        return [value and value[::-1] for value in reader.get_many(keyspace, keys)]

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for chunk in reader.scan(keyspace, start, end, **how):
            yield [(key, value[::-1]) for key, value in chunk]


@breaks(S.test_what_was_put_around_is_read)
class ReadsItsOwnOnly(Changed):
    """Finds only what it remembers having written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: set[Any] = set()

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        self.known |= {(keyspace.name, key) for keyspace, key, _ in batch.operations}
        return batch.operations

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        found = reader.get_many(keyspace, keys)
        return [value if (keyspace.name, key) in self.known else None for key, value in zip(keys, found, strict=True)]


# --- crashes and failures --------------------------------------------------------------------


@breaks(S.test_batches_are_whole_when_killed, "rocksdb")
class NotAtomic(Wrapped):
    """Writes the end of a batch, and the rest of it when the next one comes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rest = WriteBatch()

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        self.inner.write(self.rest)
        end, self.rest = WriteBatch(), WriteBatch()
        self.rest.ranges, self.rest.runs, end.runs = batch.ranges, batch.runs[:-1], batch.runs[-1:]
        self.inner.write(end, sync=sync)


@breaks(S.test_a_process_that_ends_without_closing_loses_nothing, "rocksdb")
class WritesBehind(Wrapped):
    """Keeps the last batches in memory until something is read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting: list[WriteBatch] = []

    def settle(self) -> None:
        while self.waiting:
            self.inner.write(self.waiting.pop(0))

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        self.waiting.append(batch)
        if sync or len(self.waiting) > 8:
            self.settle()

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        self.settle()
        return reader.get_many(keyspace, keys)

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        self.settle()
        return reader.scan(keyspace, start, end, **how)

    def close(self) -> None:
        self.settle()
        super().close()


@breaks(S.test_a_full_disk_is_told, "rocksdb")
class SwallowsErrors(Wrapped):
    """Swallows an error of writing."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        with contextlib.suppress(EngineError, StorageFullError):
            super().write(batch, sync=sync)


@breaks(S.test_a_full_disk_is_told, "rocksdb")
class CallsItAnEngineError(Wrapped):
    """Takes a full disk for any other error."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        try:
            super().write(batch, sync=sync)
        except StorageFullError as full:
            raise EngineError(str(full)) from full


@breaks(S.test_sync_is_told_from_commit, "rocksdb")
class NeverSyncs(Wrapped):
    """Takes sync for commit."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        super().write(batch)


@breaks(S.test_sync_is_told_from_commit, "rocksdb")
class AlwaysSyncs(Wrapped):
    """Takes commit for sync, though it declares to tell them apart."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        super().write(batch, sync=True)


@breaks(S.test_flush_log_brings_to_the_disk, "rocksdb")
class FlushesNothing(Wrapped):
    """Returns from flush_log with nothing done."""

    def flush_log(self) -> None:
        pass


@breaks(S.test_a_failed_read_is_told, "rocksdb")
class EndsAtErrors(Wrapped):
    """Takes an error of reading for the end of the data."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        try:
            yield from reader.scan(keyspace, start, end, **how)
        except EngineError as error:
            if isinstance(error, CorruptionError):
                raise


@breaks(S.test_a_flipped_byte_is_told_or_harmless, "rocksdb")
class EndsAtDamage(Wrapped):
    """Takes damage for the end of the data."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        try:
            yield from reader.scan(keyspace, start, end, **how)
        except CorruptionError:
            return


@breaks(S.test_a_flipped_byte_is_told_or_harmless, "rocksdb")
class VerifiesNothing(Wrapped):
    """Finds nothing when it verifies."""

    def verify(self) -> Iterator[str]:
        return iter(())


@breaks(S.test_what_damage_raised_may_be_kept, "rocksdb")
class StaysOpenInErrors(Wrapped):
    """Stays open as long as somebody keeps what it raised."""

    failed = False

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        try:
            yield from reader.scan(keyspace, start, end, **how)
        except CorruptionError:
            self.failed = True
            raise

    def close(self) -> None:
        if not self.failed:
            super().close()


# --- threads ---------------------------------------------------------------------------------


class Shown(Wrapped):
    """Goes on with a write, half of which is there, only when readers saw that, if there are any beside the writer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.writer = 0
        self.reads: dict[int, int] = {}
        """How often each thread took a view since half of a batch was there; threads that never did are not in it."""
        self.changed = threading.Condition()

    def seen(self) -> None:
        """Count a view that a thread takes."""
        with self.changed:
            if threading.get_ident() != self.writer:
                self.reads[threading.get_ident()] = self.reads.get(threading.get_ident(), 0) + 1
                self.changed.notify_all()

    def show(self) -> None:
        """Wait until one of the readers took a view that it had not begun to take before."""
        with self.changed:
            self.writer = threading.get_ident()
            self.reads = dict.fromkeys(self.reads, 0)
            self.changed.wait_for(lambda: not self.reads or max(self.reads.values()) > 1)


@breaks(S.test_readers_beside_a_writer_see_whole_batches)
class HalfABatchIsSeen(Shown):
    """Shows readers half of a batch."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        first = WriteBatch()
        first.runs = batch.runs[:2]
        self.inner.write(first)
        self.show()
        self.inner.write(batch)

    def snapshot(self) -> Snapshot:
        opened = super().snapshot()
        self.seen()
        return opened


@breaks(S.test_scans_beside_a_writer_are_whole)
class RangesForThemselves(Shown):
    """Applies the ranges of a batch by themselves, in front of it."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        first = WriteBatch()
        first.ranges = batch.ranges
        self.inner.write(first)
        self.show()
        self.inner.write(batch, sync=sync)

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for number, chunk in enumerate(reader.scan(keyspace, start, end, **how)):
            if not number:
                self.seen()
            yield chunk


@breaks(S.test_any_thread_may_go_on_with_a_scan, raises=(EngineError,))
class ThreadOfItsOwn(Wrapped):
    """Refuses to go on with a scan in another thread."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        mine = None
        for chunk in reader.scan(keyspace, start, end, **how):
            mine = mine or threading.get_ident()
            if threading.get_ident() != mine:
                raise EngineError("not the thread that began")
            yield chunk


@breaks(S.test_everything_raises_after_close)
class AnswersAfterClose(Wrapped):
    """Answers after close, as if it were empty."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()

    def read_many(self, reader: EngineReader, keyspace: Keyspace[Any], keys: Sequence[Key]) -> list[bytes | None]:
        return [None] * len(keys) if self.closed else reader.get_many(keyspace, keys)


@breaks(S.test_a_closed_snapshot_reads_nothing)
class SnapshotsStayOpen(Wrapped):
    """Keeps snapshots readable that were closed."""

    def snapshot(self) -> Snapshot:
        opened: Any = super().snapshot()
        opened.close = lambda: None
        return opened


@breaks(S.test_close_beside_readers)
class SharpClose(Wrapped):
    """Pulls the engine from under its readers."""

    closing = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pulled = threading.Event()

    def close(self) -> None:
        self.closing = True
        self.pulled.wait(PATIENCE)
        super().close()

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for chunk in reader.scan(keyspace, start, end, **how):
            if self.closing:
                self.pulled.set()
                return
            yield chunk


class _Gate(Wrapped):
    """Counts what is open."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open = 0
        self.changed = threading.Condition()

    def wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.open)

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        with self.changed:
            self.open += 1
        try:
            yield from reader.scan(keyspace, start, end, **how)
        finally:
            with self.changed:
                self.open -= 1
                self.changed.notify_all()


@breaks(S.test_close_waits_for_no_scan_that_nobody_reads, stuck="close to return")
class WaitsAtClose(_Gate):
    """Waits at close for scans to end."""

    def close(self) -> None:
        self.wait()
        super().close()


@breaks(S.test_writes_go_on_beside_what_is_left_open, stuck="the writes to return")
class WaitsAtWrites(_Gate):
    """Waits with writes for scans to end."""

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        self.wait()
        super().write(batch, sync=sync)


# --- leaks -----------------------------------------------------------------------------------


@breaks(S.test_close_gives_files_back, "rocksdb")
class KeepsFiles(Wrapped):
    """Keeps a file of its own open."""

    kept: ClassVar[list[Any]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept.append((self.path / "kept").open("wb"))


@breaks(S.test_close_gives_the_lock_back, "rocksdb", raises=(EngineError,))
class KeepsTheLock(Wrapped):
    """Stays open as long as somebody holds a snapshot."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: weakref.WeakSet[Any] = weakref.WeakSet()

    def snapshot(self) -> Snapshot:
        opened = super().snapshot()
        self.held.add(opened)
        return opened

    def close(self) -> None:
        if not self.held:
            super().close()


@breaks(S.test_a_failed_opening_keeps_nothing, "rocksdb", raises=(EngineError,))
class RemembersFailures(Wrapped):
    """Refuses for ever to open what it could not open once."""

    failed: ClassVar[set[Path]] = set()

    @classmethod
    def opening(cls, backend: SabotagedBackend, path: Path, keyspaces: Sequence[Keyspace[Any]], create: bool) -> Engine:
        if path in cls.failed:
            raise EngineError("it failed before")
        try:
            return cls(backend.inner.open_shard(path, keyspaces, create=create), path, create)
        except EngineError:
            cls.failed.add(path)
            raise


@breaks(S.test_openings_do_not_pile_up, stuck="handles and threads to be given back")
class KeepsThreads(Wrapped):
    """Begins a thread that never ends, at every second opening."""

    openings: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if next(self.openings) % 2:
            threading.Thread(target=threading.Event().wait, daemon=True).start()


@breaks(S.test_dropped_scans_give_back_what_they_hold)
class KeepsCursors(Wrapped):
    """Opens a handle that it never closes, at every tenth scan."""

    scans: ClassVar[Iterator[int]] = itertools.count()

    def scan(
        self, keyspace: Keyspace[K], start: K | None = None, end: K | None = None, **how: Any
    ) -> Iterator[list[tuple[K, bytes]]]:
        if next(self.scans) % 10 == 0:
            os.open(os.devnull, os.O_RDONLY)
        return super().scan(keyspace, start, end, **how)


@breaks(S.test_a_closed_engine_can_be_dropped, raises=(EngineError,))
class ClosedSnapshotsRaise(Wrapped):
    """Lets snapshots complain when their engine is gone."""

    def snapshot(self) -> Snapshot:
        opened: Any = super().snapshot()
        engine = weakref.ref(self)
        opened.engine = weakref.proxy(self)

        def close() -> None:
            if engine() is None:
                raise EngineError("the engine is gone")

        opened.close = close
        return opened


# --- capabilities ----------------------------------------------------------------------------


@breaks(S.test_capabilities_are_known, capabilities="sync")
class DeclaresSync(Wrapped):
    """Declares to tell commit from sync, though nothing persists."""


@breaks(S.test_checkpoints_raise_where_undeclared)
class MakesCheckpoints(Wrapped):
    """Makes checkpoints that it doesn't declare, of nothing."""

    def checkpoint(self, path: Path) -> None:
        path.mkdir()


@breaks(S.test_a_checkpoint_is_independent, "memory", capabilities="checkpoint persistent", raises=(UnsupportedError,))
class DeclaresCheckpoints(Wrapped):
    """Declares checkpoints that it can't make."""


@breaks(S.test_a_checkpoint_is_independent, "rocksdb")
class EmptyCheckpoint(Wrapped):
    """Makes a checkpoint of an older moment."""

    def checkpoint(self, path: Path) -> None:
        super().checkpoint(path)
        shutil.rmtree(path)
        base("rocksdb").open_shard(path, (STATE, META, DATA, INDEX, KEYS), create=True).close()


@breaks(S.test_a_checkpoint_is_of_its_second_step, "rocksdb")
class EarlyCheckpoint(Wrapped):
    """Makes the checkpoint in the first step, when others may still write."""

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        self.checkpoint(path)
        yield
        yield


@breaks(S.test_a_checkpoint_needs_a_new_directory, "rocksdb")
class OverwritingCheckpoint(Wrapped):
    """Removes what lies where a checkpoint is to be."""

    def checkpoint(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        super().checkpoint(path)


@breaks(S.test_rows_and_sql_raise_where_undeclared)
class DropsRows(Changed):
    """Drops rows without a word."""

    def changed(self, batch: WriteBatch) -> WriteBatch:
        new = super().changed(batch)
        new.rows = []
        return new


@breaks(S.test_rows_and_sql_raise_where_undeclared)
class AnswersSql(Wrapped):
    """Answers SQL that it doesn't declare, with nothing."""

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        return pa.table({})


@breaks(S.test_seeks_are_fast)
class SlowSeeks(Wrapped):
    """Walks to where a scan begins, though it declares fast seeks."""

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        if start is not None:
            for _ in reader.scan(keyspace, None, start):
                pass
        return reader.scan(keyspace, start, end, **how)


@breaks(S.test_deleted_bytes_go_back, "rocksdb", stuck="the deleted bytes to go back")
class ReclaimsNothing(Changed):
    """Hides what was deleted instead of giving it back, though it declares that."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hidden: list[Any] = []

    def changed(self, batch: WriteBatch) -> WriteBatch:
        new = super().changed(batch)
        self.hidden += new.ranges
        new.ranges = []
        return new

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        pass

    def read(self, reader: EngineReader, keyspace: Keyspace[Any], start: Any, end: Any, **how: Any) -> Chunks:
        for chunk in reader.scan(keyspace, start, end, **how):
            hidden = [(first, last) for of, first, last in self.hidden if of is keyspace]
            if left := [pair for pair in chunk if not any(first <= pair[0] < last for first, last in hidden)]:
                yield left


@breaks(S.test_reclaiming_changes_nothing_but_bytes)
class ReclaimsTooMuch(Wrapped):
    """Reclaims what was not deleted."""

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        batch = WriteBatch()
        batch.delete_range(keyspace, start, end)
        self.inner.write(batch)


@breaks(S.test_stats_are_sizes)
class SaysNothing(Wrapped):
    """Says that it takes no room."""

    def info(self) -> EngineInfo:
        super().info()
        return EngineInfo(disk_bytes=0, memory_bytes=0)


@breaks(S.test_nothing_is_damaged)
class CriesWolf(Wrapped):
    """Tells of damage where there is none."""

    def verify(self) -> Iterator[str]:
        yield "keyspace 'data': perhaps"


@breaks(S.test_much_that_is_written_and_deleted_stays_right, "rocksdb")
class ForgetsDeletes(Changed):
    """Forgets a delete now and then."""

    count = 0

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        self.count += 1
        return [o for o in batch.operations if o[2] is not None or self.count % 37]


@breaks(S.test_random_histories, "rocksdb")
class LosesLargeValuesOfOldKeys(Changed):
    """Keeps the old value where a large one replaces it in a shard that was there before."""

    def operations(self, batch: WriteBatch) -> list[tuple[Keyspace[Any], Key, bytes | None]]:
        return [
            (k, key, value)
            for k, key, value in batch.operations
            if not (self.reopened and value is not None and len(value) > 300_000 and self.inner.get(k, key) is not None)
        ]


globals().update(suites_of(BackendSuite, SABOTEURS))
