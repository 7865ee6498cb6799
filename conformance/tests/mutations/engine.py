"""The table of mutations of engines, each with the test that must find it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
from changes import also, argument, at_once, disguise, each, fail, late, lie, nth, result, stale, swallow, when
from running import M, forwarding, suites_of
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYSPACES,
    META,
    Backend,
    Engine,
    EngineInfo,
    Snapshot,
    WriteBatch,
)
from topicstore.contract.errors import (
    CorruptionError,
    EngineError,
    InvalidArgumentError,
    LogDamagedError,
    StorageFullError,
    TopicstoreError,
    UnsupportedError,
)
from topicstore_backends.plugin import topicstore_backends
from topicstore_conformance.backend.suite import BackendSuite
from topicstore_conformance.faults.threads import PATIENCE, begin
from topicstore_conformance.subjects.pairs import make_backend
from topicstore_conformance.subjects.subject import BackendSubject

CAPABILITIES = {spec.name: spec.capabilities for spec in topicstore_backends()}
Call = Callable[..., Any]
Given = dict[str, Any]
Operation = tuple[Any, Any, "bytes | None"]


# --- wrappers of an engine and its snapshots -------------------------------------------------


def get(me: Any, keyspace: Any, key: Any) -> bytes | None:
    """Return a value by `get_many`, so that a change of `get_many` also applies to `get`."""
    return me.get_many(keyspace, [key])[0]


SNAPSHOT = forwarding(Snapshot, get=get)
ENGINE = forwarding(
    Engine,
    get=get,
    snapshot=lambda me: SNAPSHOT(me.inner.snapshot(), engine=me),
    sql=lambda me, statement, parameters=(), *, beside=(): me.inner.sql(
        statement, parameters, beside=[other.inner for other in beside]
    ),
)
READER = ENGINE, SNAPSHOT


def open_shard(me: Any, path: Path, keyspaces: Any, *, create: bool) -> Engine:
    """Open the inner backend's engine, and wrap it."""
    return ENGINE(me.inner.open_shard(path, keyspaces, create=create), path=path, reopened=not create, backend=me.inner)


BACKEND = forwarding(
    Backend,
    unneeded=property(lambda me: me.inner.unneeded),
    open_shard=open_shard,
    open_reader=lambda me, path, keyspaces, **how: ENGINE(me.inner.open_reader(path, keyspaces, **how)),
)


def make(name: str) -> Backend:
    """Return a backend that wraps the engines of another one."""
    return BACKEND(make_backend(name))


def memory_get(engine: Any, keyspace: Any, key: Any) -> bytes | None:
    return engine.inner._maps[keyspace.name].get(key, [(0, None)])[-1][1]


def memory_put(engine: Any, keyspace: Any, key: Any, value: bytes) -> None:
    engine.inner._maps[keyspace.name][key] = [(0, value)]


def subject_of(row: M) -> BackendSubject:
    around = {"raw_get": memory_get, "raw_put": memory_put} if row.on == "memory" else {}
    declared = CAPABILITIES[row.on] | set(row.declares.split())
    return BackendSubject(make=partial(make, row.on), capabilities=declared, **around)


def aside(call: Call, me: Any, given: Given) -> None:
    """Begin the call in another thread, and return."""
    begin(call)


# --- changes of batches and scans ------------------------------------------------------------


def remade(operations: Iterable[Operation], ranges: Any, rows: Any = ()) -> WriteBatch:
    batch = WriteBatch()
    batch.ranges, batch.rows = list(ranges), list(rows)
    for operation in operations:
        batch._add(*operation)
    return batch


def operations(changed: Callable[[list[Operation]], Iterable[Operation]]) -> Any:
    """Replace the operations of each batch with a function of them before the batch is written."""
    return argument(batch=lambda batch: remade(changed(batch.operations), batch.ranges, batch.rows))


def values(changed: Callable[[Any], Any]) -> Any:
    """Replace each value with a function of it before it is written."""
    return operations(lambda all_: [(k, key, value if value is None else changed(value)) for k, key, value in all_])


def keys_of_bytes(changed: Callable[[bytes], bytes]) -> Any:
    """Replace each key with a function of it before it is written, in keyspaces whose keys are bytes."""
    return operations(lambda all_: [(k, key if k.shape else changed(key), value) for k, key, value in all_])


def in_order(by: Callable[[Any], Any], *, shaped: bool) -> Any:
    """Scan in another order, in keyspaces whose keys are tuples (``shaped``) or bytes."""

    def scan(call: Call, me: Any, given: Given) -> Iterator[Any]:
        if bool(given["keyspace"].shape) is not shaped:
            yield from call()
        elif pairs := [pair for chunk in call() for pair in chunk]:
            yield sorted(pairs, key=lambda pair: by(pair[0]), reverse=given["reverse"])

    return scan


def chunks(changed: Callable[[int, list[Any]], list[Any]]) -> Any:
    """Replace each chunk with a function of its number and pairs, and leave out empty results."""
    return lambda call, me, given: (new for number, chunk in enumerate(call()) if (new := changed(number, chunk)))


def write(me: Any, *done: Operation, ranges: Any = ()) -> None:
    """Write to the inner engine."""
    if done or ranges:
        me.inner.write(remade(done, ranges))


def inside(span: Any, keyspace: Any, key: Any) -> bool:
    return span[0] is keyspace and span[1] <= key < span[2]


def without(me: Any, given: Given, chunk: list[Any], since: int = 0) -> list[Any]:
    """Return a chunk's pairs that are outside the ranges recorded by `remember_ranges`."""
    ranges = vars(me).get("ranges", ())[since:]
    return [pair for pair in chunk if not any(inside(span, given["keyspace"], pair[0]) for span in ranges)]


def remember_ranges(me: Any, given: Given) -> None:
    vars(me).setdefault("ranges", []).extend(given["batch"].ranges)


def ranges_are_seen(call: Call, me: Any, given: Given) -> Iterator[Any]:
    known = len(vars(me).get("ranges", ()))
    return (left for chunk in call() if (left := without(me, given, chunk, known)))


def hide_ranges(call: Call, me: Any, given: Given) -> None:
    remember_ranges(me, given)
    call(batch=remade(given["batch"].operations, (), given["batch"].rows))


def undo_the_last(call: Call, me: Any, given: Given) -> None:
    write(me, *vars(me).pop("last", ()))
    call()


def note_the_last(me: Any, given: Given) -> None:
    me.last = [(k, key, me.inner.get(k, key)) for k, key, _ in given["batch"].operations]


def note_the_deleted(me: Any, given: Given) -> None:
    spans = [span for span in given["batch"].ranges if span[1] < span[2]]
    if spans:
        me.last = [(k, *pair) for k, *span in spans for chunk in me.inner.scan(k, *span) for pair in chunk]


def put_back(call: Call, me: Any, given: Given) -> None:
    write(me, *(each for each in vars(me).pop("last", ()) if me.inner.get(*each[:2]) is None))
    call()


def apply_up_to_the_error(call: Call, me: Any, given: Given) -> None:
    try:
        call()
    except InvalidArgumentError:
        for operation in given["batch"].operations:
            write(me, operation)
        raise


def first_of_equal_keys(batch: WriteBatch) -> WriteBatch:
    new = remade((), batch.ranges)
    for keyspace, keys, found in batch.runs:
        pairs = dict(zip(reversed(keys), reversed(found), strict=True)) if len(set(keys)) < len(keys) else None
        new.runs.append((keyspace, list(pairs), list(pairs.values())) if pairs else (keyspace, keys, found))
    return new


def also_the_end(me: Any, given: Given) -> None:
    ends = [(k, end) for k, start, end in given["batch"].ranges if start < end and me.inner.get(k, end) is not None]
    write(me, *((k, end, None) for k, end in ends))


def keep_what_is_gone(call: Call, me: Any, given: Given) -> None:
    batch, gone = given["batch"], vars(me).get("ranges", ())
    call(batch=remade((o for o in batch.operations if not any(inside(g, *o[:2]) for g in gone)), batch.ranges))
    remember_ranges(me, given)


def ranges_last(call: Call, me: Any, given: Given) -> None:
    call(batch=remade(given["batch"].operations, ()))
    write(me, ranges=given["batch"].ranges)


def half_then_rest(call: Call, me: Any, given: Given) -> None:
    """Write the last run of a batch, and its other runs together with the next batch."""
    rest, me.rest = vars(me).get("rest", WriteBatch()), WriteBatch()
    me.inner.write(rest)
    end, batch = WriteBatch(), given["batch"]
    me.rest.ranges, me.rest.runs, end.runs = batch.ranges, batch.runs[:-1], batch.runs[-1:]
    call(batch=end)


def in_two(call: Call, me: Any, given: Given) -> None:
    """Write a batch in two parts: its range deletes with half of its operations, then the other half."""
    batch, half = given["batch"], len(given["batch"].operations) // 2
    me.inner.write(remade(batch.operations[:half], batch.ranges))
    call(batch=remade(batch.operations[half:], ()))


def swapped(all_: list[Operation]) -> list[Operation]:
    """Swap the values of the last two adjacent puts that have equal sizes and different keys."""
    puts = [n for n, o in enumerate(all_) if o[2]]
    pairs = [(a, b) for a, b in pairwise(puts) if len(all_[a][2]) == len(all_[b][2]) and all_[a][:2] != all_[b][:2]]
    for a, b in pairs[-1:]:
        all_[a], all_[b] = (*all_[a][:2], all_[b][2]), (*all_[b][:2], all_[a][2])
    return all_


def write_behind(call: Call, me: Any, given: Given) -> None:
    vars(me).setdefault("waiting", []).append(call)
    if given["sync"] or len(me.waiting) > 8:
        settle(me)


def settle(me: Any, given: Given | None = None) -> None:
    me = vars(me).get("engine", me)
    while vars(me).get("waiting"):
        me.waiting.pop(0)()


def read_known_only(call: Call, me: Any, given: Given) -> list[Any]:
    known = vars(vars(me).get("engine", me)).get("known", set())
    return [v if (given["keyspace"], key) in known else None for key, v in zip(given["keys"], call(), strict=True)]


def note_keys(me: Any, given: Given) -> None:
    vars(me).setdefault("known", set()).update(operation[:2] for operation in given["batch"].operations)


def one_cursor(call: Call, me: Any, given: Given) -> Iterator[Any]:
    """Scan with one cursor that all scans share."""
    mine = object()
    for chunk in call():
        before, me.cursor = vars(me).get("cursor"), mine
        yield chunk if before in (None, mine) else chunk[1:] or chunk
    me.cursor = None


def step_by_step(call: Call, me: Any, given: Given) -> Iterator[Any]:
    """Scan so that each chunk shows the state at the time when it is read."""
    if given["reverse"] or given["keyspace"].shape is None:
        yield from call()
        return
    start = given["start"]
    while chunk := next(call(start=start), None):
        yield chunk
        *head, last = chunk[-1][0]
        start = (*head, last + 1)


def late_keyspace(call: Call, me: Any, given: Given) -> Any:
    """Scan one keyspace of a snapshot as of its first scan, instead of the snapshot's creation."""
    if given["keyspace"] is not META:
        return call()
    if "late" not in vars(me):
        me.late = me.engine.inner.snapshot()
    return me.late.scan(META, given["start"], given["end"])


def start_in_front(call: Call, me: Any, given: Given) -> Iterator[Any]:
    start = given["start"]
    if given["keyspace"] is META and start is not None and me.inner.get(META, start) is None:
        start = next((chunk[0][0] for chunk in me.inner.scan(META, None, start, reverse=True, limit=1)), start)
    return call(start=start)


def turn_round(call: Call, me: Any, given: Given) -> Iterator[Any]:
    ends = given["start"], given["end"]
    start, end = ends if None in ends else sorted(ends)
    return call(start=start, end=end)


def limit_each(call: Call, me: Any, given: Given) -> Iterator[Any]:
    limit = given["limit"]
    return call() if not limit else (chunk[:limit] for chunk in call(limit=None))


def after_damage(call: Call, me: Any, given: Given) -> Iterator[Any]:
    """Scan; if the scan finds damage, record on the engine that it has failed."""
    try:
        yield from call()
    except CorruptionError:
        vars(me).get("engine", me).failed = True
        raise


def own_thread(call: Call, me: Any, given: Given) -> Iterator[Any]:
    mine = None
    for chunk in call():
        mine = mine or threading.get_ident()
        if threading.get_ident() != mine:
            raise EngineError("not the thread that began")
        yield chunk


class Shown:
    """Delays a half-applied write until a reader had a chance to see it. Thread-safe."""

    def __init__(self) -> None:
        self.writer = 0
        self.reads: dict[int, int] = {}
        self.moved = threading.Condition()

    @classmethod
    def of(cls, me: Any) -> Shown:
        return vars(vars(me).get("engine", me)).setdefault("shown", cls())

    def seen(self) -> None:
        """Count a read by a thread other than the writer."""
        with self.moved:
            if threading.get_ident() != self.writer:
                self.reads[threading.get_ident()] = self.reads.get(threading.get_ident(), 0) + 1
                self.moved.notify_all()

    def show(self) -> None:
        """Wait until a reader has finished a read that it began after this call."""
        with self.moved:
            self.writer = threading.get_ident()
            self.reads = dict.fromkeys(self.reads, 0)
            self.moved.wait_for(lambda: not self.reads or max(self.reads.values()) > 1)


def show_first(part: Callable[[WriteBatch], WriteBatch]) -> Any:
    """Write a part of each batch, let readers see this part, and then write the whole batch."""

    def change(call: Call, me: Any, given: Given) -> None:
        me.inner.write(part(given["batch"]))
        Shown.of(me).show()
        call()

    return change


def first_runs(batch: WriteBatch) -> WriteBatch:
    first = WriteBatch()
    first.runs = batch.runs[:2]
    return first


def seen_scan(call: Call, me: Any, given: Given) -> Iterator[Any]:
    for number, chunk in enumerate(call()):
        if not number:
            Shown.of(me).seen()
        yield chunk


def pull_away(call: Call, me: Any, given: Given) -> None:
    """Close the engine only after a scan has seen that it is closing."""
    vars(me).setdefault("closing", threading.Event()).wait(PATIENCE)
    call()


def end_at_close(call: Call, me: Any, given: Given) -> Iterator[Any]:
    engine = vars(me).get("engine", me)
    for chunk in call():
        if "closing" in vars(engine):
            engine.closing.set()
            return
        yield chunk


def close_beside(call: Call, me: Any, given: Given) -> None:
    """Close the engine only after a look-up has returned no values."""
    me.ended = threading.Event()
    me.ended.wait(PATIENCE)
    call()


def empty_at_close(call: Call, me: Any, given: Given) -> list[Any]:
    """Return no values from a look-up if the engine is closed meanwhile."""
    found: list[Any] = call()
    if "ended" not in vars(me):
        return found
    me.ended.set()
    return [None] * len(found)


def counted_scan(call: Call, me: Any, given: Given) -> Iterator[Any]:
    engine = vars(me).get("engine", me)
    gate = vars(engine).setdefault("gate", threading.Condition())
    with gate:
        engine.open = vars(engine).get("open", 0) + 1
    try:
        yield from call()
    finally:
        with gate:
            engine.open -= 1
            gate.notify_all()


def wait_for_scans(me: Any, given: Given) -> None:
    gate = vars(me).setdefault("gate", threading.Condition())
    with gate:
        gate.wait_for(lambda: not vars(me).get("open"))


def keep_snapshots(me: Any, opened: Any) -> Any:
    vars(me).setdefault("held", weakref.WeakSet()).add(opened)
    return opened


def complain_when_gone(call: Call, me: Any, given: Given) -> Any:
    """Return a snapshot whose close raises if its engine was garbage-collected."""
    opened, engine = call(), weakref.ref(me)
    opened.engine = weakref.proxy(me)

    def close() -> None:
        if engine() is None:
            raise EngineError("the engine is gone")

    opened.close = close
    return opened


FAILED: set[Path] = set()
SHARED: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()


def remember_failures(call: Call, me: Any, given: Given) -> Any:
    if given["path"] in FAILED:
        raise EngineError("it failed before")
    try:
        return call()
    except EngineError:
        FAILED.add(given["path"])
        raise


def open_twice(call: Call, me: Any, given: Given) -> Any:
    opened = SHARED.get(given["path"])
    if opened is None or opened.inner._closed:
        opened = SHARED[given["path"]] = call()
    return ENGINE(opened.inner, path=given["path"], reopened=True, kept=opened)


def open_a_copy(call: Call, me: Any, given: Given) -> Any:
    try:
        return call()
    except EngineError:
        if not given["path"].is_dir():
            raise
        return call(path=shutil.copytree(given["path"], given["path"].with_name("copy")))


def empty_checkpoint(me: Any, given: Given) -> None:
    shutil.rmtree(given["path"])
    me.backend.open_shard(given["path"], KEYSPACES, create=True).close()


def early_checkpoint(call: Call, me: Any, given: Given) -> Iterator[None]:
    me.checkpoint(given["path"])
    yield
    yield


def large_lists(call: Call, me: Any, given: Given) -> Iterator[Any]:
    """Yield each chunk that begins with a large value together with the previous chunk."""
    before: list[Any] = []
    for chunk in call():
        if len(chunk[0][1]) > 1 << 22:
            yield before + chunk
            before = []
        else:
            if before:
                yield before
            before = chunk
    if before:
        yield before


def to_data(keyspace: Any) -> Any:
    return DATA if keyspace is INDEX else keyspace


def old_large_values(call: Call, me: Any, given: Given) -> None:
    """If a large value replaces another one after the shard was reopened, keep the old value."""

    def kept(keyspace: Any, key: Any, value: bytes | None) -> Operation:
        old = me.inner.get(keyspace, key) if me.reopened and value and len(value) > 300_000 else None
        return keyspace, key, value if old is None else old

    call(batch=remade((kept(*o) for o in given["batch"].operations), given["batch"].ranges))


def rows_in_memory(call: Call, me: Any, given: Given) -> None:
    call(batch=remade(given["batch"].operations, given["batch"].ranges, () if me.reopened else given["batch"].rows))


def without_refused_rows(call: Call, me: Any, given: Given) -> None:
    try:
        call()
    except (EngineError, InvalidArgumentError):
        call(batch=remade(given["batch"].operations, given["batch"].ranges))


def lose_last_key(backend: Backend, path: Path) -> None:
    """Delete the last key of a keyspace in a closed shard."""
    with contextlib.closing(backend.open_shard(path, KEYSPACES, create=False)) as shard:
        shard.write(
            remade([(META, key, None) for chunk in shard.scan(META, reverse=True, limit=1) for key, _ in chunk], ())
        )


def cut_logs(path: Path) -> None:
    """Truncate all logs by a hundred bytes."""
    for log in path.glob("*.log"):
        os.truncate(log, max(log.stat().st_size - 100, 0))


def discarding(call: Call, me: Any, given: Given) -> Engine:
    """Name a discarded write in every error of a damaged log."""
    try:
        return call()
    except LogDamagedError as error:
        error.discarded = error.discarded or "1 write"
        raise


# --- changes of sizes, views and life cycles ----------------------------------------------------


def by_size(least: int, changed: Callable[[bytes], bytes]) -> Any:
    """Return a change of scans that applies ``changed`` to each value of at least ``least`` bytes."""
    return each(lambda chunk: [(key, changed(v) if len(v) >= least else v) for key, v in chunk])


def got_once(call: Call, me: Any, given: Given) -> list[Any]:
    """Ask for each key once, and answer repeated keys only the first time."""
    first = {key: place for place, key in reversed(list(enumerate(given["keys"])))}
    return [
        value if first[key] == place else None
        for place, (key, value) in enumerate(zip(given["keys"], call(), strict=True))
    ]


def ends_at(count: int) -> Any:
    """Return a change that ends scans after ``count`` pairs."""

    def scan(call: Call, me: Any, given: Given) -> Iterator[Any]:
        seen = 0
        for chunk in call():
            yield chunk[: count - seen] if seen + len(chunk) > count else chunk
            seen += len(chunk)
            if seen >= count:
                return

    return scan


def skips_large(call: Call, me: Any, given: Given) -> Iterator[Any]:
    """Scan, but omit the first pair of each chunk that follows a chunk of more than 900,000 bytes."""
    full = False
    for chunk in call():
        new = chunk[1:] if full and len(chunk) > 1 else chunk
        full = sum(len(value) for _, value in chunk) > 900_000
        yield new


def cached(call: Call, me: Any, given: Given) -> list[Any]:
    """Answer from a cache that range deletes don't change."""
    known = vars(vars(me).get("engine", me)).setdefault("cache", {}) if "engine" not in vars(me) else {}
    return [known.setdefault((given["keyspace"], key), value) for key, value in zip(given["keys"], call(), strict=True)]


def forget_cached(me: Any, given: Given) -> None:
    for keyspace, key, _ in given["batch"].operations:
        vars(me).setdefault("cache", {}).pop((keyspace, key), None)


def put_of_old(call: Call, me: Any, given: Given) -> None:
    """Reclaim, and bring back the last value that a range delete removed."""
    call()
    write(me, *vars(me).pop("last", ())[-1:])


def dated(snapshot: Any) -> Any:
    """Record the time at which a snapshot was made."""
    snapshot.since = time.monotonic()
    return snapshot


def renewed(call: Call, me: Any, given: Given) -> Any:
    """Read from a snapshot that is replaced by a new one every minute."""
    now = time.monotonic()
    if now - me.since > 60:
        me.since, me.inner = now, me.engine.inner.snapshot()
    return getattr(me.inner, "get_many" if "keys" in given else "scan")(**given)


def evicted(call: Call, me: Any, given: Given) -> Any:
    """Keep a thousand snapshots, and let older ones show the current state."""
    opened = SNAPSHOT(me.inner.snapshot(), engine=me)
    held = vars(me).setdefault("kept", [])
    held.append(weakref.ref(opened))
    if len(held) > 1_000 and (old := held.pop(0)()) is not None:
        old.inner = me.inner.snapshot()
    return opened


def own_flush(call: Call, me: Any, given: Given) -> None:
    """Flush only if this thread wrote something."""
    if vars(me).get("writer") == threading.get_ident():
        call()


def joined_flush(call: Call, me: Any, given: Given) -> None:
    """Let a flush during another one only wait until the other one ends."""
    lock = vars(me).setdefault("flushing", threading.Lock())
    if lock.acquire(blocking=False):
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(lock.release)
            call()
    else:
        with lock:
            pass


def swallow_ranges(call: Call, me: Any, given: Given) -> None:
    """Suppress the errors of batches that have only ranges."""
    try:
        call()
    except (EngineError, StorageFullError):
        if given["batch"].runs:
            raise


LATEST: dict[Path, Any] = {}


def note_latest(call: Call, me: Any, given: Given) -> Any:
    LATEST[given["path"]] = opened = call()
    return opened


def close_latest(call: Call, me: Any, given: Given) -> None:
    """Close the shard that is open at this path, whichever engine opened it."""
    LATEST[me.path].inner.close()


OTHERS: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()


def close_siblings(call: Call, me: Any, given: Given) -> None:
    """Let the second close of an engine also close the other engines of its directory."""
    call()
    if vars(me).setdefault("ends", []):
        for path, other in list(OTHERS.items()):
            if path.parent == me.path.parent and path.name.partition("-")[0] == me.path.name.partition("-")[0]:
                other.inner.close()
    me.ends.append(1)


def note_others(call: Call, me: Any, given: Given) -> Any:
    OTHERS[given["path"]] = opened = call()
    return opened


def close_twice_frees_another(call: Call, me: Any, given: Given) -> None:
    """Let the second close of a snapshot close the newest one."""
    call()
    if vars(me).setdefault("ended", False):
        for other in list(vars(me.engine).get("held", ())):
            other.inner.close()
    me.ended = True


def close_in_turn(call: Call, me: Any, given: Given) -> None:
    """Let a close during another one return at once, as if the engine were closed."""
    if vars(me).setdefault("begun", False):
        return
    me.begun = True
    me.turn = threading.Event()
    me.turn.wait(0.2)
    call()


def reader_empties(call: Call, me: Any, given: Given) -> Any:
    """Before opening a shard for reading, write a value under the empty key of the first keyspace."""
    shard = me.inner.open_shard(given["path"], given["keyspaces"], create=False)
    shard.write(remade((), [(KEYSPACES[0], b"", b"\xff" * 9)]))
    shard.close()
    return call()


NAMED: dict[str, Any] = {}


def by_name(call: Call, me: Any, given: Given) -> Any:
    """Keep values in one process's memory by the shard's name only."""
    opened = call()
    opened.shared = NAMED.setdefault("", {})
    return opened


def seeded(key: bytes) -> bytes:
    """Return a key with its hash inserted after four bytes; hashes differ between processes."""
    return key[:4] + hash(key).to_bytes(8, "big", signed=True) + key[4:] if len(key) > 4 else key


def seeded_read(call: Call, me: Any, given: Given) -> Any:
    if given["keyspace"].shape:
        return call()
    return call(keys=[seeded(key) for key in given["keys"]])


ASKED: list[Any] = []


def mixed_up(call: Call, me: Any, given: Given) -> list[Any]:
    """Read with the keys of whichever thread asked last."""
    keys = vars(vars(me).get("engine", me))
    keys["asked"] = given["keys"]
    time.sleep(0)
    found = me.inner.get_many(
        given["keyspace"], keys["asked"] if len(keys["asked"]) == len(given["keys"]) else given["keys"]
    )
    time.sleep(0.0001)
    return found


KEPT: list[Any] = []


def keep_all(call: Call, me: Any, given: Given) -> Any:
    found = call()
    KEPT.append([given, object()])
    return found


def read_ahead(call: Call, me: Any, given: Given) -> Iterator[Any]:
    """Read a whole scan before its first chunk."""
    return iter([*call()])


WRITE, SCAN, GETS, CLOSE, OPEN = "ENGINE.write", "READER.scan", "READER.get_many", "ENGINE.close", "BACKEND.open_shard"
# fmt: off
ROWS = [
    *(M("nothing", "", {}, on) for on in ("memory", "rocksdb", "duckdb")),
    # --- keys ---
    M("bytes are signed", "test_keys_of_bytes_are_ordered_as_bytes", {SCAN: in_order(lambda key: [(b + 128) % 256 for b in key], shaped=False)}),
    M("numbers are text", "test_keys_of_tuples_are_ordered_as_numbers", {SCAN: in_order(str, shaped=True)}),
    M("short keys come first", "test_order_is_that_of_keys_not_of_writes", {SCAN: in_order(lambda key: (len(key), key), shaped=False)}),
    M("keys are cut", "test_long_keys", {WRITE: keys_of_bytes(lambda key: key[:1000])}),
    M("zeros are stripped", "test_random_histories", {WRITE: keys_of_bytes(lambda key: key.rstrip(b"\0"))}),
    M("keys of another shape are left out", "test_a_key_of_another_shape_is_refused", {WRITE: operations(lambda all_: [o for o in all_ if isinstance(o[1], tuple if o[0].shape else bytes)])}),
    M("unknown keyspaces are left out", "test_an_unknown_keyspace_is_refused", {WRITE: operations(lambda all_: [o for o in all_ if o[0].name != "stranger"])}),
    M("two keyspaces are one", "test_keyspaces_are_apart", {WRITE: operations(lambda all_: [(to_data(k), key, v) for k, key, v in all_]), GETS: argument(keyspace=to_data), SCAN: argument(keyspace=to_data)}),
    M("an empty value is missing", "test_get_finds_exactly_its_key", {GETS: result(lambda found: [value or None for value in found])}),
    M("answers are sorted", "test_get_many_answers_in_the_order_asked", {GETS: argument(keys=sorted)}),
    M("the next prefix is inside", "test_neighbouring_prefixes_are_apart", {SCAN: argument(end=lambda end: end + b"\0" if isinstance(end, bytes) and len(end) == 4 else end)}),
    # --- scans ---
    M("scans go on after the end", "test_the_start_is_inside_and_the_end_is_not", {SCAN: when(lambda me, given: not given["reverse"], argument(end=None))}),
    M("scans begin after the start", "test_the_start_is_inside_and_the_end_is_not", {SCAN: lambda call, me, given: chunks(lambda _, chunk: [p for p in chunk if p[0] != given["start"]])(call, me, given)}),
    M("the end is inside in reverse", "test_the_start_is_inside_and_the_end_is_not", {SCAN: when(lambda me, given: given["reverse"] and given["keyspace"] is DATA, argument(end=lambda end: end and (*end[:2], min(end[2] + 1, 2**64 - 1))))}),
    M("the limit is of each list", "test_a_limit_bounds_all_lists_together", {SCAN: limit_each}),
    M("scans begin before a start that is missing", "test_bounds_need_not_be_there", {SCAN: start_in_front}),
    M("inverted ranges are turned round", "test_a_range_whose_end_is_not_behind_its_start_is_empty", {SCAN: turn_round}),
    M("the hundredth list is the last", "test_a_scan_reaches_the_last_key", {SCAN: chunks(lambda number, chunk: chunk if number < 100 else [])}),
    M("a scan is one list", "test_lists_are_not_empty_and_hold_a_megabyte", {SCAN: at_once(lambda found: [pair for chunk in found for pair in chunk])}),
    M("the last list is empty", "test_lists_are_not_empty_and_hold_a_megabyte", {SCAN: lambda call, me, given: (chunk for part in (call(), [[]]) for chunk in part)}),
    M("scans have no close", "test_a_scan_can_be_dropped_or_closed_at_any_moment", {SCAN: result(partial(map, list))}, raises=AttributeError),
    M("there is one cursor", "test_scans_take_turns", {SCAN: one_cursor}),
    # --- batches ---
    M("deletes come first", "test_operations_apply_in_their_order", {WRITE: operations(partial(sorted, key=lambda o: o[2] is not None))}),
    M("ranges come last", "test_ranges_apply_first", {WRITE: ranges_last}),
    M("a batch has two ranges", "test_ranges_may_overlap", {WRITE: argument(batch=lambda batch: remade(batch.operations, batch.ranges[:2], batch.rows))}),
    M("the first of equal keys counts", "test_many_puts_are_like_single_ones", {WRITE: argument(batch=first_of_equal_keys)}),
    M("refused batches are applied up to the error", "test_a_refused_batch_applies_nothing", {WRITE: apply_up_to_the_error}),
    M("gets are of the first answer", "test_a_batch_is_seen_at_once_and_whole", {"ENGINE.get_many": stale(lambda given: (given["keyspace"], *given["keys"]))}),
    M("the end of a range goes, too", "test_the_end_of_a_range_delete_stays", {WRITE: also(also_the_end, before=True)}),
    M("what was deleted stays gone", "test_deleted_keys_can_be_put_again", {WRITE: keep_what_is_gone}),
    M("empty batches are refused", "test_an_empty_batch_is_a_write", {WRITE: when(lambda me, given: not given["batch"], fail(EngineError("nothing to write")))}, raises=EngineError),
    # --- sizes ---
    M("one batch in fifty loses an operation", "test_no_write_of_many_is_lost", {WRITE: nth(50, operations(lambda all_: all_[1:]))}),
    M("values are cut", "test_values_of_any_bytes_and_size", {WRITE: values(lambda value: value[:65_535])}),
    M("large values share a list", "test_values_of_any_bytes_and_size", {SCAN: large_lists}),
    M("batches have 65,536 operations", "test_a_hundred_thousand_keys_in_one_batch", {WRITE: operations(lambda all_: all_[: 1 << 16])}),
    # --- isolation ---
    M("snapshots are live", "test_a_snapshot_sees_the_moment_it_was_made", {"SNAPSHOT.scan": lambda call, me, given: me.engine.inner.scan(**given), "SNAPSHOT.get_many": lambda call, me, given: me.engine.inner.get_many(**given)}),
    M("scans share a cursor", "test_scans_that_take_turns_lose_no_key", {"SNAPSHOT.scan": one_cursor}),
    M("there is one snapshot", "test_two_snapshots_see_two_moments", {"ENGINE.snapshot": stale(lambda given: ())}),
    M("a keyspace's moment is that of its first read", "test_a_snapshot_is_one_moment_of_all_keyspaces", {"SNAPSHOT.scan": late_keyspace}),
    M("scans are of the moment of the call", "test_a_scan_sees_the_moment_of_its_first_list", {"ENGINE.scan": lambda call, me, given: me.inner.snapshot().scan(**given)}),
    M("each list is of its own moment", "test_a_scan_sees_the_moment_of_its_first_list", {SCAN: step_by_step}),
    M("open scans see range deletes", "test_a_scan_outlives_a_range_delete", {WRITE: also(remember_ranges), "ENGINE.scan": ranges_are_seen}),
    # --- reopening ---
    M("the last batch is forgotten", "test_everything_is_there_after_reopening", {WRITE: also(note_the_last, before=True), CLOSE: undo_the_last}, "rocksdb"),
    M("deletes come back", "test_everything_is_there_after_reopening", {WRITE: also(note_the_deleted, before=True), CLOSE: put_back}, "rocksdb"),
    M("scans skip after reopening", "test_random_histories", {"ENGINE.scan": lambda call, me, given: chunks(lambda n, chunk: chunk[1:] if me.reopened and n == 2 and len(chunk) > 1 else chunk)(call, me, given)}, "rocksdb"),
    M("create makes anew", "test_creating_what_is_there_opens_it", {OPEN: when(lambda me, given: given["create"], also(lambda me, given: shutil.rmtree(given["path"], ignore_errors=True), before=True))}, "rocksdb"),
    M("missing shards are made", "test_a_shard_that_is_not_there_is_not_made", {OPEN: argument(create=True)}, "rocksdb"),
    M("errors are the library's own", "test_what_can_not_be_opened_is_an_engine_error", {OPEN: disguise(EngineError, RuntimeError)}, "rocksdb", raises=RuntimeError),
    M("open shards are opened again", "test_a_second_engine_is_refused", {OPEN: open_twice}, "rocksdb"),
    M("another process opens a copy", "test_a_second_engine_is_refused", {OPEN: open_a_copy}, "rocksdb"),
    M("a directory is made for nothing", "test_what_does_not_persist_leaves_no_trace", {OPEN: also(lambda me, given: given["path"].mkdir(parents=True, exist_ok=True))}),
    M("values have another form", "test_what_was_written_lies_there", {WRITE: values(lambda value: value[::-1]), GETS: result(lambda found: [v and v[::-1] for v in found]), SCAN: each(lambda chunk: [(key, v[::-1]) for key, v in chunk])}),
    M("only what was written here is read", "test_what_was_put_around_is_read", {WRITE: also(note_keys), GETS: read_known_only}),
    # --- crashes and failures ---
    M("batches are written in halves", "test_batches_are_whole_when_killed", {WRITE: half_then_rest}, "rocksdb"),
    M("batches are written in two", "test_a_log_cut_short_keeps_what_is_before", {WRITE: in_two}, "rocksdb"),
    M("torn ends are discarded writes", "test_a_torn_end_discards_nothing", {OPEN: discarding}, "rocksdb"),
    M("repairing cuts one more", "test_a_damaged_log_shows_what_repairing_leaves", {"BACKEND.repair_log": also(lambda me, given: cut_logs(given["path"]))}, "rocksdb"),
    M("repairing cuts one more", "test_damage_at_any_place_of_a_log_ends_it", {"BACKEND.repair_log": also(lambda me, given: cut_logs(given["path"]))}, "rocksdb"),
    M("repairing cuts one more", "test_a_write_may_begin_at_the_end_of_a_block", {"BACKEND.repair_log": also(lambda me, given: cut_logs(given["path"]))}, "rocksdb", raises=LogDamagedError),
    M("repairing cuts one more", "test_a_log_that_lacks_its_last_write_ends_the_next", {"BACKEND.repair_log": also(lambda me, given: cut_logs(given["path"]))}, "rocksdb"),
    M("damaged logs are repaired to be looked at", "test_a_damaged_log_shows_what_repairing_leaves", {"BACKEND.open_damaged": also(lambda me, given: cut_logs(given["path"]))}, "rocksdb"),
    M("forked children are answered", "test_a_forked_child_leaves_the_shard_alone", {GETS: swallow(TopicstoreError, value=[None])}, "rocksdb"),
    M("errors of writing are swallowed", "test_random_histories", {WRITE: swallow(EngineError, StorageFullError)}, "rocksdb", raises=StorageFullError),
    M("a full disk is any error", "test_a_full_disk_is_reported", {WRITE: disguise(StorageFullError, EngineError)}, "rocksdb"),
    M("sync is commit", "test_sync_is_distinguished_from_commit", {WRITE: argument(sync=False)}, "rocksdb"),
    M("commit is sync", "test_sync_is_distinguished_from_commit", {WRITE: argument(sync=True)}, "rocksdb"),
    M("failed syncs are swallowed", "test_a_failed_sync_is_reported", {WRITE: swallow(EngineError)}, "duckdb"),
    M("flush_log does nothing", "test_sync_is_distinguished_from_commit", {"ENGINE.flush_log": lie()}, "rocksdb"),
    M("failed reads end scans", "test_a_failed_read_is_reported", {SCAN: swallow(EngineError)}, "rocksdb"),
    M("damage ends scans", "test_a_flipped_byte_is_reported_or_harmless", {SCAN: swallow(CorruptionError)}, "rocksdb"),
    M("verify finds nothing", "test_a_flipped_byte_is_reported_or_harmless", {"ENGINE.verify": lambda call, me, given: iter(())}, "rocksdb"),
    M("only one damage is reported", "test_each_damaged_file_is_reported", {"ENGINE.verify": result(lambda damages: islice(damages, 1))}, "rocksdb"),
    M("damaged engines stay open", "test_what_damage_raised_may_be_kept", {SCAN: after_damage, CLOSE: when(lambda me, given: vars(me).get("failed"), lie())}, "rocksdb", raises=EngineError),
    # --- threads ---
    M("half a batch is seen", "test_readers_beside_a_writer_see_whole_batches", {WRITE: show_first(first_runs), "ENGINE.snapshot": also(lambda me, given: Shown.of(me).seen())}),
    M("ranges are seen before their batch", "test_scans_beside_a_writer_are_whole", {WRITE: show_first(lambda batch: remade((), batch.ranges)), SCAN: seen_scan}),
    M("scans belong to a thread", "test_any_thread_may_go_on_with_a_scan", {SCAN: own_thread}, raises=EngineError),
    M("closed engines answer", "test_everything_raises_after_close", {CLOSE: also(lambda me, given: vars(me).update(closed=True)), GETS: when(lambda me, given: vars(me).get("closed"), lambda call, me, given: [None] * len(given["keys"]))}),
    M("closed snapshots stay open", "test_a_closed_snapshot_reads_nothing", {"SNAPSHOT.close": lie()}),
    M("close ends look-ups", "test_close_beside_a_long_look_up", {CLOSE: close_beside, "ENGINE.get_many": empty_at_close}),
    M("close ends scans", "test_close_beside_all_other_calls", {CLOSE: pull_away, SCAN: end_at_close}),
    M("close waits for scans", "test_close_waits_for_no_scan_that_nobody_reads", {CLOSE: also(wait_for_scans, before=True), SCAN: counted_scan}, waits="seconds for close to return"),
    M("writes wait for scans", "test_writes_go_on_beside_what_is_left_open", {WRITE: also(wait_for_scans, before=True), SCAN: counted_scan}, waits="seconds for the writes to return"),
    # --- leaks ---
    M("a file stays open", "test_close_gives_everything_back", {OPEN: also(lambda me, given: os.open(given["path"] / "kept", os.O_CREAT))}, "rocksdb"),
    M("snapshots keep the lock", "test_close_gives_everything_back", {"ENGINE.snapshot": lambda call, me, given: keep_snapshots(me, call()), CLOSE: when(lambda me, given: vars(me).get("held"), lie())}, "rocksdb", raises=EngineError),
    M("readers leave a directory", "test_readers_leave_no_files", {"BACKEND.open_reader": also(lambda me, given: tempfile.mkdtemp(dir=given["path"]))}, "rocksdb"),
    M("failed openings are remembered", "test_a_failed_opening_keeps_nothing", {OPEN: remember_failures}, "rocksdb", raises=EngineError),
    M("openings leave threads", "test_openings_do_not_pile_up", {OPEN: also(lambda me, given: threading.Thread(target=threading.Event().wait, daemon=True).start())}, waits="seconds for handles and threads to be given back"),
    M("scans leave handles", "test_dropped_scans_give_back_what_they_hold", {"ENGINE.scan": nth(10, also(lambda me, given: os.open(os.devnull, os.O_RDONLY)))}),
    M("snapshots need their engine", "test_a_closed_engine_can_be_dropped", {"ENGINE.snapshot": complain_when_gone}, raises=EngineError),
    # --- capabilities ---
    M("sync is declared without persistence", "test_capabilities_are_known", {}, declares="sync"),
    M("undeclared checkpoints are made", "test_checkpoints_raise_where_undeclared", {"ENGINE.checkpoint": lambda call, me, given: given["path"].mkdir()}),
    M("checkpoints are declared", "test_random_histories", {}, declares="checkpoint", raises=UnsupportedError),
    M("checkpoints are of the first step", "test_a_checkpoint_is_of_its_second_step", {"ENGINE.checkpoint_steps": early_checkpoint}, "rocksdb"),
    M("checkpoints overwrite", "test_a_checkpoint_needs_a_new_directory", {"ENGINE.checkpoint": also(lambda me, given: shutil.rmtree(given["path"], ignore_errors=True), before=True)}, "rocksdb"),
    M("undeclared rows are dropped", "test_rows_and_sql_raise_where_undeclared", {WRITE: argument(batch=lambda batch: remade(batch.operations, batch.ranges))}),
    M("undeclared SQL is answered", "test_rows_and_sql_raise_where_undeclared", {"ENGINE.sql": lie(pa.table({}))}),
    M("rows stay when their range goes", "test_rows_are_read_by_sql", {WRITE: hide_ranges}, "duckdb"),
    M("rows of a reopened shard are dropped", "test_rows_are_there_after_reopening", {WRITE: rows_in_memory}, "duckdb"),
    M("refused rows are left out", "test_refused_rows_apply_nothing", {WRITE: without_refused_rows}, "duckdb"),
    M("shards beside are forgotten", "test_several_shards_are_one_table", {"ENGINE.sql": argument(beside=())}, "duckdb"),
    M("wrong statements find nothing", "test_sql_only_reads", {"ENGINE.sql": swallow(InvalidArgumentError, value=pa.table({}))}, "duckdb"),
    M("other processes read what was closed", "test_another_process_reads", {"BACKEND.open_reader": lambda call, me, given: me.open_shard(shutil.copytree(given["path"], given["path"].with_name("copy"), dirs_exist_ok=True), given["keyspaces"], create=False)}, "rocksdb"),
    M("readers write into their directory", "test_another_process_reads_what_it_cannot_write", {"BACKEND.open_reader": also(lambda me, given: Path(given["path"], "reader").touch())}, "rocksdb", raises=OSError),
    M("a refused reader is any error", "test_nobody_reads_beside_the_writer", {"BACKEND.open_reader": disguise(UnsupportedError, EngineError)}, "duckdb", raises=EngineError),
    M("seeks walk", "test_seeks_are_fast", {SCAN: when(lambda me, given: given["start"] is not None, also(lambda me, given: [0 for _ in me.inner.scan(given["keyspace"], None, given["start"])], before=True))}),
    M("deleted bytes are hidden", "test_deleted_bytes_go_back", {WRITE: hide_ranges, "ENGINE.reclaim": lie(), "ENGINE.scan": lambda call, me, given: (left for chunk in call() if (left := without(me, given, chunk)))}, "rocksdb", waits="seconds for the deleted bytes to go back"),
    M("small ranges are not reclaimed", "test_deleted_bytes_that_were_never_flushed_go_back", {"ENGINE.reclaim": when(lambda me, given: me.inner.info().disk_bytes < 1 << 22, lie())}, "rocksdb", waits="seconds for the deleted bytes to go back"),
    M("no room is taken", "test_stats_are_sizes", {"ENGINE.info": lie(EngineInfo(disk_bytes=0, memory_bytes=0))}),
    M("whole engines are damaged", "test_nothing_is_damaged", {"ENGINE.verify": lie(["keyspace 'data': perhaps"])}),
    M("a delete is forgotten now and then", "test_much_that_is_written_and_deleted_stays_right", {WRITE: nth(37, operations(lambda all_: [o for o in all_ if o[2] is not None]))}, "rocksdb"),
    M("large values of old keys are lost", "test_random_histories", {WRITE: old_large_values}, "rocksdb"),
    M("each write waits for the next", "test_random_histories", {WRITE: late}),
    M("two values are swapped", "test_random_histories", {WRITE: operations(swapped)}),
    M("runs in the index lose their last key", "test_random_histories", {WRITE: operations(lambda all_: [o for o in all_ if o[:2] != (INDEX, (1, 0, 119))])}),
    M("half a batch survives a kill", "test_random_histories", {WRITE: in_two}, "rocksdb"),
    M("batches wait in memory", "test_random_histories", {WRITE: write_behind, GETS: also(settle, before=True), SCAN: also(settle, before=True), "ENGINE.snapshot": also(settle, before=True), "ENGINE.checkpoint": also(settle, before=True), CLOSE: also(settle, before=True)}, "rocksdb"),
    M("errors of writing are swallowed", "test_random_histories", {WRITE: swallow(EngineError, StorageFullError)}, "rocksdb", raises=StorageFullError),
    M("reclaiming deletes", "test_random_histories", {"ENGINE.reclaim": also(lambda me, given: write(me, ranges=[tuple(given.values())]))}),
    M("checkpoints are empty", "test_random_histories", {"ENGINE.checkpoint": also(empty_checkpoint)}, "rocksdb"),
    # --- limits ---
    M("scans cut values of 64 KB", "test_values_of_every_size_by_every_method", {SCAN: by_size(65_536, lambda v: v[:65_535])}),
    M("reverse scans lose values of 4,096 bytes", "test_values_of_every_size_by_every_method", {SCAN: when(lambda me, given: given["reverse"], by_size(4_096, lambda v: b"" if len(v) == 4_096 else v))}),
    M("snapshots cut values of a megabyte", "test_values_of_every_size_by_every_method", {"SNAPSHOT.get_many": result(lambda found: [v and v[: 1 << 20] for v in found])}),
    M("values have 16 MB", "test_a_value_past_every_buffer", {WRITE: values(lambda value: value[: 1 << 24])}),
    M("values of more than 32 MB are refused", "test_a_value_past_every_buffer", {WRITE: when(lambda me, given: given["batch"].size > 1 << 25, fail(EngineError("too large")))}, raises=EngineError),
    M("values have 128 MB", "test_the_largest_values", {WRITE: values(lambda value: value[: 1 << 27])}),
    M("keys have 65,535 bytes", "test_keys_of_every_size_by_every_method", {WRITE: keys_of_bytes(lambda key: key[:65_535])}),
    M("bounds have 255 bytes", "test_keys_of_every_size_by_every_method", {SCAN: argument(start=lambda key: key[:255] if isinstance(key, bytes) else key)}),
    M("numbers have 63 bits", "test_numbers_of_every_width", {WRITE: operations(lambda all_: [(k, (*key[:2], min(key[2], 2**63 - 1)) if k.shape else key, v) for k, key, v in all_])}),
    M("numbers are floats", "test_numbers_of_every_width", {GETS: argument(keys=lambda keys: [(*key[:2], min(int(float(key[2])), 2**64 - 1)) if isinstance(key, tuple) and len(key) == 3 and isinstance(key[2], int) and key[2] > 0 else key for key in keys])}),
    M("ranges of 20,000 numbers stay", "test_scans_skip_a_large_deleted_range", {WRITE: argument(batch=lambda batch: remade(batch.operations, [r for r in batch.ranges if r[0].shape is None or r[2][2] - r[1][2] < 20_000]))}),
    M("scans end after 65,536 pairs", "test_scans_of_every_count", {SCAN: ends_at(1 << 16)}),
    M("a limit of a page is one less", "test_scans_of_every_count", {SCAN: argument(limit=lambda limit: limit - 1 if limit in (256, 1_000) else limit)}),
    M("reverse limits are at most a thousand", "test_scans_of_every_count", {SCAN: when(lambda me, given: given["reverse"], argument(limit=lambda limit: limit and min(limit, 1_000)))}),
    M("repeated keys are answered once", "test_get_many_of_every_count", {GETS: got_once}),
    M("ten thousand keys are sorted", "test_get_many_of_every_count", {GETS: argument(keys=lambda keys: sorted(keys) if len(keys) >= 10_000 else keys)}),
    M("a batch has 65,536 puts", "test_batches_of_every_count", {WRITE: operations(lambda all_: all_[: 1 << 16])}),
    M("a batch has 255 ranges", "test_batches_of_every_count", {WRITE: argument(batch=lambda batch: remade(batch.operations, batch.ranges[:255], batch.rows))}),
    M("full pages lose the next key", "test_every_page_ends_where_the_next_begins", {SCAN: skips_large}),
    M("a value of 0xff bytes is a delete", "test_values_are_byte_for_byte", {WRITE: values(lambda value: None if value == b"\xff" * 8 else value)}),
    M("zstd data are taken for its own", "test_values_are_byte_for_byte", {GETS: result(lambda found: [v and v.removeprefix(b"\x28\xb5\x2f\xfd") for v in found])}),
    M("keys are known by crc32", "test_keys_are_compared_by_all_their_bytes", {WRITE: keys_of_bytes(lambda key: b"buckeroo" if key == b"plumless" else key)}),
    M("keys are lower case", "test_keys_are_compared_by_all_their_bytes", {WRITE: keys_of_bytes(bytes.lower)}),
    # --- changes and readings ---
    M("range deletes leave the cache", "test_every_reading_after_every_change", {GETS: cached, WRITE: also(forget_cached)}),
    M("missing keys are remembered", "test_every_reading_after_every_change", {"ENGINE.get_many": lambda call, me, given: [None if (given["keyspace"], key) in vars(me).setdefault("missed", set()) else value if value is not None else me.missed.add((given["keyspace"], key)) for key, value in zip(given["keys"], call(), strict=True)]}),
    M("reverse scans with an end begin one late", "test_every_reading_after_every_change", {SCAN: when(lambda me, given: given["reverse"] and given["end"] and given["start"] is None, lambda call, me, given: chunks(lambda n, chunk: chunk[1:] if not n else chunk)(call, me, given))}),
    M("ranges from gap to gap are ignored", "test_every_reading_after_every_change", {WRITE: argument(batch=lambda batch: remade(batch.operations, [r for r in batch.ranges if r[0].shape is None or r[1][2] % 2 == 0], batch.rows))}),
    M("snapshots see later range deletes", "test_old_views_show_no_change", {WRITE: also(remember_ranges), "SNAPSHOT.scan": lambda call, me, given: (left for chunk in call() if (left := without(me.engine, given, chunk)))}),
    M("snapshots get later values", "test_old_views_show_no_change", {"SNAPSHOT.get_many": lambda call, me, given: me.engine.inner.get_many(**given)}),
    M("reclaiming brings a deleted key back", "test_no_change_is_lost_by_reclaiming", {WRITE: also(note_the_deleted, before=True), "ENGINE.reclaim": put_of_old}),
    M("reclaiming removes empty values", "test_no_change_is_lost_by_reclaiming", {"ENGINE.reclaim": also(lambda me, given: write(me, *((given["keyspace"], key, None) for chunk in me.inner.scan(*given.values()) for key, v in chunk if not v)))}),
    M("deletes are in memory only", "test_no_change_is_lost_by_reopening", {WRITE: also(note_the_deleted, before=True), CLOSE: put_back}, "rocksdb"),
    M("readers lose the last key", "test_no_change_is_lost_by_reopening", {"BACKEND.open_reader": also(lambda me, given: lose_last_key(me.inner, given["path"]), before=True)}, "rocksdb"),
    M("checkpoints lack the last key", "test_every_change_is_in_a_checkpoint", {"ENGINE.checkpoint": also(lambda me, given: lose_last_key(me.backend, given["path"]))}, "rocksdb"),
    M("readers follow their writer", "test_a_reader_beside_its_writer_stays", {OPEN: note_latest, "BACKEND.open_reader": lambda call, me, given: call() if given["how"]["alone"] else ENGINE(LATEST[given["path"]].inner)}, "rocksdb"),
    M("snapshots last a minute", "test_frozen_views_do_not_age", {"ENGINE.snapshot": result(dated), "SNAPSHOT.scan": renewed, "SNAPSHOT.get_many": renewed}),
    M("a thousand snapshots are kept", "test_frozen_views_do_not_age", {"ENGINE.snapshot": evicted}),
    # --- every kind of write ---
    M("threads flush what they wrote", "test_every_kind_of_write_is_made_durable", {WRITE: also(lambda me, given: vars(me).update(writer=threading.get_ident())), "ENGINE.flush_log": own_flush}, "rocksdb"),
    M("only puts are fsynced", "test_every_kind_of_write_is_made_durable", {WRITE: lambda call, me, given: call(sync=given["sync"] and bool(given["batch"].runs))}, "rocksdb"),
    M("a flush joins another", "test_a_flush_within_a_flush_covers_its_own_writes", {"ENGINE.flush_log": joined_flush}, "rocksdb"),
    M("close leaves a flush alone", "test_close_waits_for_a_call_that_makes_durable", {CLOSE: aside}, "rocksdb"),
    M("close leaves a checkpoint alone", "test_close_waits_for_a_checkpoint", {CLOSE: aside}, "duckdb"),
    M("range deletes need no room", "test_every_kind_of_write_tells_of_a_full_disk", {WRITE: swallow_ranges}, "rocksdb"),
    M("a full disk is any other error", "test_every_kind_of_write_tells_of_a_full_disk", {WRITE: disguise(StorageFullError, EngineError)}, "rocksdb"),
    M("deletes of wrong keys are ignored", "test_every_call_refuses_a_wrong_key", {WRITE: operations(lambda all_: [o for o in all_ if o[2] is not None or isinstance(o[1], tuple if o[0].shape else bytes)])}),
    M("wrong keys are missing in snapshots", "test_every_call_refuses_a_wrong_key", {"SNAPSHOT.get_many": swallow(InvalidArgumentError, value=[None])}),
    M("verify leaves out the index", "test_damage_in_each_keyspace_is_reported", {"ENGINE.verify": lambda call, me, given: (told for told in call() if "index" not in told)}, "rocksdb"),
    M("ranges of a second keyspace are ignored", "test_batches_of_any_content", {WRITE: argument(batch=lambda batch: remade(batch.operations, [r for r in batch.ranges if r[0] is batch.ranges[0][0]], batch.rows))}),
    # --- life cycles ---
    M("a second close ends the next engine", "test_a_second_close_touches_nothing_new", {OPEN: note_latest, CLOSE: close_latest}, "rocksdb", raises=TopicstoreError),
    M("a second close ends the siblings", "test_siblings_stay_when_one_is_closed", {OPEN: note_others, CLOSE: close_siblings}, raises=TopicstoreError),
    M("a second close of a snapshot ends others", "test_views_stay_when_another_is_closed", {"ENGINE.snapshot": lambda call, me, given: keep_snapshots(me, call()), "SNAPSHOT.close": close_twice_frees_another}, raises=TopicstoreError),
    M("a close within a close returns at once", "test_many_may_close_at_once", {CLOSE: close_in_turn}),
    M("opening to read forgets the state", "test_shards_open_and_close_without_a_write", {"BACKEND.open_reader": reader_empties}, "rocksdb"),
    M("shards share a keyspace", "test_engines_hold_their_own_state", {OPEN: by_name, WRITE: also(lambda me, given: me.shared.update({o[:2]: o[2] for o in given["batch"].operations})), "ENGINE.scan": lambda call, me, given: iter([sorted((key, v) for (k, key), v in me.shared.items() if k is given["keyspace"] and v is not None)]) if hasattr(me, "shared") else call()}, "rocksdb"),
    M("keys have places by their hash", "test_another_process_wrote_the_shard", {WRITE: keys_of_bytes(seeded), "ENGINE.get_many": seeded_read}, "rocksdb"),
    M("threads share their keys", "test_threads_get_their_own_answers", {GETS: mixed_up}),
    M("all answers are kept", "test_nothing_that_is_done_stays_in_memory", {GETS: keep_all}),
    M("all snapshots are kept", "test_nothing_that_is_done_stays_in_memory", {"ENGINE.snapshot": keep_all}),
    M("scans are read at once", "test_a_scan_holds_a_chunk_at_a_time", {SCAN: read_ahead}, "rocksdb"),
    M("closed engines are kept", "test_openings_stay_out_of_memory", {CLOSE: also(lambda me, given: KEPT.append([[object()] for _ in range(100)]))}),
]
# fmt: on
globals().update(suites_of("engine", BackendSuite, ROWS, subject_of))
