"""What `topicstore.engine` promises, over both engines."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from topicstore.engine import DATA, INDEX, KEYS, KEYSPACES, META, STATE, Backend, Engine, Key, Keyspace, WriteBatch
from topicstore.errors import DatabaseClosedError, InvalidArgumentError, UnsupportedError
from topicstore_backends.memory import MemoryBackend, MemoryOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

U32, U64 = 2**32 - 1, 2**64 - 1
MEGABYTE = 1 << 20


def make_backend(name: str) -> Backend:
    if name == "memory":
        return MemoryBackend(MemoryOptions())
    pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")
    from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions

    return RocksdbBackend(RocksdbOptions())


@pytest.fixture(params=["memory", "rocksdb"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param)


@pytest.fixture
def engine(backend: Backend, tmp_path: Path) -> Iterator[Engine]:
    opened = backend.open_shard(tmp_path / "shard", KEYSPACES, create=True)
    yield opened
    opened.close()


def put(engine: Engine, keyspace: Keyspace, pairs: dict[Any, bytes]) -> None:
    batch = WriteBatch()
    for key, value in pairs.items():
        batch.put(keyspace, key, value)
    engine.write(batch)


def pairs(chunks: Iterator[list[tuple[Key, bytes]]]) -> list[tuple[Key, bytes]]:
    return [pair for chunk in chunks for pair in chunk]


def keys(chunks: Iterator[list[tuple[Key, bytes]]]) -> list[Key]:
    return [key for key, _ in pairs(chunks)]


def numbered(count: int, size: int = 3) -> dict[Any, bytes]:
    return {(1, 2, number): number.to_bytes(size, "big") for number in range(count)}


# --- keys and order ------------------------------------------------------------------


def test_keys_of_bytes_are_ordered_as_bytes(engine: Engine) -> None:
    """Prefixes come first, 0x00 and 0xff are bytes like others, and so is the empty key."""
    ordered = [b"", b"\0", b"\0\0", b"\0\xff", b"a", b"a\0", b"a\xff", b"b", b"\xff", b"\xff\0", b"\xff\xff"]
    put(engine, META, {key: key for key in reversed(ordered)})
    assert [(key, key) for key in ordered] == pairs(engine.scan(META))
    assert ordered[::-1] == keys(engine.scan(META, reverse=True))


def test_keys_of_tuples_are_ordered_as_numbers(engine: Engine) -> None:
    """Number by number, up to the largest that fits."""
    ordered = [(0, 0, 0), (0, 0, 256), (0, 1, 255), (1, 0, 0), (256, 0, 1), (U32, 0, 0), (U32, U64, 0), (U32, U64, U64)]
    put(engine, DATA, dict.fromkeys(reversed(ordered), b"v"))
    assert ordered == keys(engine.scan(DATA))
    assert ordered[::-1] == keys(engine.scan(DATA, reverse=True))
    assert engine.get(DATA, (U32, U64, U64)) == b"v"


@pytest.mark.parametrize(
    ("keyspace", "key"), [(DATA, (1, 2)), (DATA, (U32 + 1, 0, 0)), (DATA, (0, -1, 0)), (DATA, b"bytes"), (META, (1,))]
)
def test_a_key_of_another_shape_is_refused(engine: Engine, keyspace: Keyspace, key: Key) -> None:
    """And so is the whole batch it came in, and any read with it."""
    batch = WriteBatch()
    batch.put(STATE, b"before", b"")
    batch.put(keyspace, key, b"")
    with pytest.raises(InvalidArgumentError, match="is not a key of keyspace"):
        engine.write(batch)
    assert None is engine.get(STATE, b"before")
    with pytest.raises(InvalidArgumentError, match="is not a key of keyspace"):
        engine.get(keyspace, key)
    with pytest.raises(InvalidArgumentError, match="is not a key of keyspace"):
        next(engine.scan(keyspace, key))


def test_an_unknown_keyspace_is_refused(engine: Engine) -> None:
    """Reading and writing name it."""
    stranger = Keyspace("stranger")
    batch = WriteBatch()
    batch.put(STATE, b"before", b"")
    batch.put(stranger, b"k", b"v")
    with pytest.raises(InvalidArgumentError, match="stranger"):
        engine.write(batch)
    assert None is engine.get(STATE, b"before")
    with pytest.raises(InvalidArgumentError, match="stranger"):
        engine.get(stranger, b"k")
    with pytest.raises(InvalidArgumentError, match="stranger"):
        engine.scan(stranger)
    with engine.snapshot() as snapshot, pytest.raises(InvalidArgumentError, match="stranger"):
        snapshot.get(stranger, b"k")


def test_keyspaces_are_apart(engine: Engine) -> None:
    """One key in two keyspaces has two values."""
    put(engine, STATE, {b"k": b"state"})
    put(engine, META, {b"k": b"meta"})
    assert engine.get(STATE, b"k") == b"state"
    assert engine.get(META, b"k") == b"meta"
    assert pairs(engine.scan(KEYS)) == []


# --- get -----------------------------------------------------------------------------


def test_get_and_get_many(engine: Engine) -> None:
    """An empty value is a value; what is missing is None, in the order asked, repeated as asked."""
    put(engine, STATE, {b"a": b"1", b"empty": b""})
    assert engine.get(STATE, b"a") == b"1"
    assert engine.get(STATE, b"empty") == b""
    assert None is engine.get(STATE, b"missing")
    assert engine.get_many(STATE, [b"empty", b"missing", b"a", b"a"]) == [b"", None, b"1", b"1"]
    assert engine.get_many(STATE, []) == []


# --- scan ----------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [None, 0, 1, 7, 10_000])
@pytest.mark.parametrize(
    ("start", "end"),
    [(None, None), (0, 300), (10, 11), (10, 10), (20, 10), (None, 25), (275, None), (299, 400), (300, 400), (50, 250)],
)
def test_scan_ranges(engine: Engine, start: int | None, end: int | None, limit: int | None, reverse: bool) -> None:
    """The start is inside, the end is not, and a limit bounds all lists together."""
    put(engine, DATA, numbered(300))
    first = None if start is None else (1, 2, start)
    last = None if end is None else (1, 2, end)
    expected = [(1, 2, number) for number in range(start or 0, min(300, 300 if end is None else end))]
    if reverse:
        expected.reverse()
    found = engine.scan(DATA, first, last, reverse=reverse, limit=limit)
    assert expected[: 300 if limit is None else limit] == keys(found)


def test_scan_between_keys(engine: Engine) -> None:
    """Bounds need not be keys that are there."""
    put(engine, META, {b"b": b"", b"d": b"", b"f": b""})
    assert keys(engine.scan(META, b"a", b"e")) == [b"b", b"d"]
    assert keys(engine.scan(META, b"a", b"e", reverse=True)) == [b"d", b"b"]
    assert keys(engine.scan(META, b"b\0", b"f")) == [b"d"]


def test_lists_are_not_empty_and_hold_a_megabyte(engine: Engine) -> None:
    """Lists of small values grow, those of large values stay below a megabyte."""
    put(engine, DATA, {(1, 0, number): bytes(60_000 if number % 2 else 100) for number in range(400)})
    chunks = list(engine.scan(DATA))
    assert sum(map(len, chunks)) == 400
    assert all(chunks)
    assert max(sum(len(value) for _, value in chunk) for chunk in chunks) <= MEGABYTE


@pytest.mark.parametrize("reverse", [False, True])
def test_values_of_16_megabytes(engine: Engine, reverse: bool) -> None:
    """Each comes in a list of its own, also behind small ones."""
    big = bytes(range(256)) * (16 * MEGABYTE // 256)
    put(engine, DATA, {(1, 0, number): big if number in (5, 6, 12) else b"small" for number in range(14)})
    assert big == engine.get(DATA, (1, 0, 6))
    chunks = list(engine.scan(DATA, reverse=reverse))
    assert [(1, 0, number) for number in range(14)] == sorted(key for chunk in chunks for key, _ in chunk)
    assert [len(chunk) for chunk in chunks if any(len(value) == len(big) for _, value in chunk)] == [1, 1, 1]


def test_a_scan_can_be_dropped_or_closed_at_any_moment(engine: Engine) -> None:
    """Before its first list, between lists and after the last."""
    put(engine, DATA, numbered(200))
    for asked in (0, 1, 1000):
        scan: Any = engine.scan(DATA)
        for _ in zip(range(asked), scan, strict=False):
            pass
        scan.close()
        scan.close()
        assert list(scan) == []
    dropped = engine.scan(DATA)
    next(dropped)
    del dropped
    assert len(keys(engine.scan(DATA))) == 200


# --- write ---------------------------------------------------------------------------


def test_operations_apply_in_order_and_ranges_first(engine: Engine) -> None:
    """The last operation on a key wins; a range of the same batch doesn't touch what the batch puts."""
    put(engine, META, {b"a": b"old", b"b": b"old", b"c": b"old"})
    batch = WriteBatch()
    batch.put(META, b"a", b"1")
    batch.put(META, b"a", b"2")
    batch.put(META, b"gone", b"1")
    batch.delete(META, b"gone")
    batch.delete(META, b"back")
    batch.put(META, b"back", b"3")
    batch.delete(META, b"never there")
    batch.delete_range(META, b"a", b"c")
    engine.write(batch)
    assert pairs(engine.scan(META)) == [(b"a", b"2"), (b"back", b"3"), (b"c", b"old")]


def test_many_puts_are_like_single_ones(engine: Engine) -> None:
    """In their order with all others, of keys of both kinds; a wrong key among them applies nothing."""
    batch = WriteBatch()
    batch.put(META, b"b", b"first")
    batch.put_many(META, [b"c", b"b", b"a", b"b"], [b"", b"second", b"x", b"third"])
    batch.delete(META, b"a")
    batch.put_many(DATA, [(1, 2, number) for number in range(3)], [b"0", b"1", b"2"])
    batch.put_many(DATA, [], [])
    batch.put(META, b"d", b"last")
    assert batch.size == len(b"first" + b"second" + b"x" + b"third" + b"012" + b"last")
    assert len(batch.operations) == 10
    engine.write(batch)
    assert [(b"b", b"third"), (b"c", b""), (b"d", b"last")] == pairs(engine.scan(META))
    assert [b"0", b"1", b"2"] == engine.get_many(DATA, [(1, 2, number) for number in range(3)])
    for keyspace, wrong in ((META, [b"e", (1, 2, 3)]), (DATA, [(1, 2, 9), b"e"])):
        bad = WriteBatch()
        bad.put_many(keyspace, wrong, [b"", b""])
        with pytest.raises(InvalidArgumentError):
            engine.write(bad)
    assert not WriteBatch()
    assert engine.get_many(META, [b"e"]) + engine.get_many(DATA, [(1, 2, 9)]) == [None, None]


def test_delete_range(engine: Engine) -> None:
    """From the start to before the end; an empty or inverted range is nothing."""
    put(engine, DATA, numbered(100))
    batch = WriteBatch()
    batch.delete_range(DATA, (1, 2, 10), (1, 2, 90))
    batch.delete_range(DATA, (1, 2, 95), (1, 2, 95))
    batch.delete_range(DATA, (1, 2, 98), (1, 2, 92))
    batch.delete_range(DATA, (5, 0, 0), (6, 0, 0))
    engine.write(batch)
    expected = [(1, 2, number) for number in (*range(10), *range(90, 100))]
    assert expected == keys(engine.scan(DATA))
    assert expected[::-1] == keys(engine.scan(DATA, reverse=True))
    assert engine.get_many(DATA, [(1, 2, 89), (1, 2, 90)]) == [None, b"\0\0\x5a"]


def test_an_empty_batch_is_a_write(engine: Engine) -> None:
    """With and without sync."""
    engine.write(WriteBatch())
    engine.write(WriteBatch(), sync=True)
    engine.flush_log()
    assert pairs(engine.scan(STATE)) == []


def test_a_hundred_thousand_keys_in_one_batch(engine: Engine) -> None:
    """They come back in order, and one range deletes them."""
    put(engine, DATA, numbered(100_000))
    chunks = list(engine.scan(DATA))
    assert list(numbered(100_000).items()) == [pair for chunk in chunks for pair in chunk]
    batch = WriteBatch()
    batch.delete_range(DATA, (1, 0, 0), (2, 0, 0))
    engine.write(batch)
    assert pairs(engine.scan(DATA)) == []


# --- isolation -------------------------------------------------------------------------


def disturb(engine: Engine) -> None:
    """Overwrite, delete and add, over keys that were there and between them."""
    batch = WriteBatch()
    batch.delete_range(DATA, (1, 2, 100), (1, 2, 150))
    for number in range(0, 2000, 2):
        batch.put(DATA, (1, 2, number), b"later")
        batch.delete(DATA, (1, 2, number + 1))
        batch.put(DATA, (1, 3, number), b"later")
    engine.write(batch)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_sees_the_moment_of_its_first_list(engine: Engine, reverse: bool) -> None:
    """Not that of the call, and nothing later."""
    scan = engine.scan(DATA, reverse=reverse)
    put(engine, DATA, numbered(1000))
    first = next(scan)
    disturb(engine)
    expected = list(numbered(1000).items())
    assert (expected[::-1] if reverse else expected) == first + pairs(scan)


def test_a_snapshot_sees_the_moment_it_was_made(engine: Engine) -> None:
    """By get, get_many and any number of scans in both directions, begun late and taking turns."""
    put(engine, DATA, numbered(1000))
    put(engine, STATE, {b"p": b"1"})
    expected = list(numbered(1000).items())
    with engine.snapshot() as snapshot:
        early = snapshot.scan(DATA)
        first = next(early)
        disturb(engine)
        put(engine, STATE, {b"p": b"2", b"q": b"2"})
        late, down = snapshot.scan(DATA, (1, 2, 100)), snapshot.scan(DATA, end=(1, 2, 900), reverse=True)
        turns = [first, next(late), next(down)]
        assert snapshot.get_many(STATE, [b"p", b"q"]) == [b"1", None]
        assert snapshot.get(DATA, (1, 2, 1)) == b"\0\0\1"
        assert None is snapshot.get(DATA, (1, 3, 0))
        assert expected == turns[0] + pairs(early)
        assert expected[100:] == turns[1] + pairs(late)
        assert expected[:900][::-1] == turns[2] + pairs(down)
        assert expected[-3:][::-1] == pairs(snapshot.scan(DATA, reverse=True, limit=3))
        assert pairs(snapshot.scan(DATA, (1, 3, 0))) == []
    assert engine.get(DATA, (1, 3, 0)) == b"later"


def test_two_snapshots_see_two_moments(engine: Engine) -> None:
    """Closing one leaves the other alone."""
    put(engine, STATE, {b"k": b"1"})
    first = engine.snapshot()
    put(engine, STATE, {b"k": b"2"})
    second = engine.snapshot()
    put(engine, STATE, {b"k": b"3"})
    assert [reader.get(STATE, b"k") for reader in (first, second, engine)] == [b"1", b"2", b"3"]
    first.close()
    assert pairs(second.scan(STATE)) == [(b"k", b"2")]
    second.close()


def test_a_closed_snapshot_reads_nothing(engine: Engine) -> None:
    """Nor do scans of it that were open. Closing it twice is fine, and the engine stays open."""
    put(engine, DATA, numbered(200))
    snapshot = engine.snapshot()
    scan, unasked = snapshot.scan(DATA), snapshot.scan(DATA)
    next(scan)
    snapshot.close()
    snapshot.close()
    for read in (lambda: next(scan), lambda: next(unasked), lambda: snapshot.get(DATA, (1, 2, 3))):
        with pytest.raises(DatabaseClosedError):
            read()
    assert len(keys(engine.scan(DATA))) == 200


def test_readers_beside_a_writer_see_whole_batches(engine: Engine) -> None:
    """Each batch sets the same number in three keyspaces; snapshots and scans never see a mixture."""
    done = Event()
    seen: list[set[bytes]] = []
    spots = [(STATE, b"k"), (META, b"k"), (DATA, (1, 1, 1)), (DATA, (1, 1, 2)), (INDEX, (9, 9, 9))]

    def read() -> None:
        while not done.is_set():
            with engine.snapshot() as snapshot:
                values = {snapshot.get(keyspace, key) or b"" for keyspace, key in spots}
                values |= {value for _, value in pairs(snapshot.scan(DATA))}
            seen.append(values)
            seen.append({value for _, value in pairs(engine.scan(DATA))})
            seen.append({value or b"" for value in engine.get_many(DATA, [(1, 1, 1), (1, 1, 2)])})

    def write(number: int) -> None:
        batch = WriteBatch()
        for keyspace, key in spots:
            batch.put(keyspace, key, number.to_bytes(4, "big"))
        engine.write(batch)

    write(0)
    readers = [Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    number = 0
    while number < 2000 or len(seen) < 30:
        number += 1
        write(number)
    done.set()
    for reader in readers:
        reader.join()
    assert [values for values in seen if len(values) != 1] == []
    assert number.to_bytes(4, "big") == engine.get(STATE, b"k")


# --- close -----------------------------------------------------------------------------


def test_everything_raises_after_close(engine: Engine) -> None:
    """Open scans, snapshots and their scans too; closing twice is fine."""
    put(engine, DATA, numbered(500))
    scan, unasked, snapshot = engine.scan(DATA), engine.scan(DATA), engine.snapshot()
    within = snapshot.scan(DATA, reverse=True)
    next(scan)
    next(within)
    engine.close()
    engine.close()
    batch = WriteBatch()
    batch.put(STATE, b"k", b"v")
    for call in (
        lambda: next(scan),
        lambda: next(unasked),
        lambda: next(within),
        lambda: next(snapshot.scan(DATA)),
        lambda: snapshot.get(DATA, (1, 2, 3)),
        lambda: snapshot.get_many(DATA, [(1, 2, 3)]),
        lambda: engine.get(DATA, (1, 2, 3)),
        lambda: engine.get_many(DATA, [(1, 2, 3)]),
        lambda: next(engine.scan(DATA)),
        lambda: engine.write(batch),
        engine.flush_log,
        engine.snapshot,
        engine.stats,
    ):
        with pytest.raises(DatabaseClosedError):
            call()
    snapshot.close()


def test_close_beside_readers(engine: Engine) -> None:
    """Threads that are reading get `DatabaseClosedError` or what they asked for, and nothing else."""
    put(engine, DATA, numbered(5000))
    started = Event()
    ends: list[str] = []

    def read() -> None:
        try:
            while True:
                assert len(keys(engine.scan(DATA))) == 5000
                assert len(engine.get_many(DATA, [(1, 2, number) for number in range(100)])) == 100
                with engine.snapshot() as snapshot:
                    assert len(keys(snapshot.scan(DATA, reverse=True))) == 5000
                started.set()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
            ends.append(type(error).__name__)

    readers = [Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert started.wait(60)
    engine.close()
    for reader in readers:
        reader.join()
    assert ends == ["DatabaseClosedError"] * 3


# --- the rest --------------------------------------------------------------------------


def test_stats_and_verify(engine: Engine) -> None:
    """Sizes are numbers, and nothing is damaged."""
    put(engine, DATA, numbered(1000))
    stats = engine.stats()
    assert stats.memory_bytes >= 3000
    assert stats.disk_bytes >= 0
    assert list(engine.verify()) == []


def test_undeclared_capabilities_raise(engine: Engine, tmp_path: Path) -> None:
    """Neither engine speaks SQL, and memory makes no checkpoints."""
    with pytest.raises(UnsupportedError):
        engine.sql("select 1")
    if type(engine).__name__ == "MemoryEngine":
        with pytest.raises(UnsupportedError):
            engine.checkpoint(tmp_path / "copy")
