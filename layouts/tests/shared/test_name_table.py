"""Tests of dictionaries of names: numbers that never change, and bounded memory."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.checksums import add_checksum
from topicstore.contract.columns import Coded, Constant, to_list
from topicstore.contract.engine import KEYSPACES, META, Engine, K, Keyspace, Reader, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.backend import fixtures
from topicstore_conformance.faults.threads import Beside
from topicstore_conformance.layout.damage import broken
from topicstore_layouts.shared import name_table
from topicstore_layouts.shared.name_table import LONGEST, MOST_BYTES, NAME_BYTES, NameTable, coded

GENERATION, KIND = 7, 0x10
FORWARD, BACK = encode_generation(GENERATION) + b"\x10", encode_generation(GENERATION) + b"\x11"

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)


def stream_of(name: str) -> int:
    return len(name.encode()) + 1


def streams_of(names: list[str]) -> list[int]:
    return list(map(stream_of, names))


def room(names: int) -> int:
    """Return the bytes of memory in which this many names of two characters fit."""
    return names * (NAME_BYTES + sys.getsizeof("n0")) + 50


def table(engine: Reader) -> NameTable:
    return NameTable(engine, GENERATION, KIND, streams_of)


class Counting(Reader):
    """An engine whose reads are counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reads: list[str] = []

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        self.reads.append("get")
        return self._engine.get(keyspace, key)

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        self.reads.append("get_many")
        return self._engine.get_many(keyspace, keys)

    def scan(self, keyspace: Keyspace[K], *args: Any, **kwargs: Any) -> Iterator[list[tuple[K, bytes]]]:
        self.reads.append("scan")
        return self._engine.scan(keyspace, *args, **kwargs)


def save(names: NameTable, engine: Engine) -> None:
    """Commit the unsaved names of a dictionary, and mark these names as saved."""
    write = WriteBatch()
    names.save(write)
    engine.write(write)
    names.saved()


def filled(engine: Engine, learn: Iterable[str]) -> NameTable:
    """Return a dictionary that has committed these names."""
    names = table(engine)
    names.encode(list(learn))
    save(names, engine)
    return names


def put(engine: Engine, key: bytes, value: bytes | None) -> None:
    """Write an entry with a correct checksum, bypassing the dictionary; None deletes the entry."""
    write = WriteBatch()
    if value is None:
        write.delete(META, key)
    else:
        write.put(META, key, add_checksum(key, value))
    engine.write(write)


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


def array(*ids: int) -> np.ndarray[Any, Any]:
    return np.array(ids, dtype=np.uint32)


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine(KEYSPACES)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit dictionaries to eight names, and return that number."""
    monkeypatch.setattr(name_table, "MOST_BYTES", room(8))
    return 8


# --- numbers ------------------------------------------------------------------------


def test_a_constant_column_stays_constant(engine: MemoryEngine) -> None:
    """A constant column of names is encoded as a single number."""
    names = table(engine)
    for expected, name in ((0, "a"), (1, "b"), (0, "a")):
        encoded = names.encode(Constant(name, 5))
        assert isinstance(encoded, Constant)
        assert (expected, 5) == (encoded.value, len(encoded))


def test_the_forms_of_a_column_are_alike(engine: MemoryEngine) -> None:
    """A list of names and a dictionary-encoded column of the same names get the same numbers."""
    names = filled(engine, ["a", "b"])
    coded = names.names(array(1, 0, 1))
    assert isinstance(coded, Coded)
    assert [1, 0, 1] == to_list(names.encode(coded))


def test_each_name_has_its_stream(engine: MemoryEngine) -> None:
    """A name keeps the stream that it had when it was added, because the stream is stored with it."""
    names = filled(engine, ["a", "bbb"])
    assert [2, 4, 2] == names.streams(array(0, 1, 0)).tolist()
    again = NameTable(engine, GENERATION, KIND, lambda _: [99])
    assert [4, 2] == [again.stream(1), again.stream(0)]


def test_tables_keep_apart(engine: MemoryEngine) -> None:
    """Dictionaries of different kinds and generations have independent numbers, even for names that look like keys."""
    tables = [NameTable(engine, generation, kind, streams_of) for generation in (1, 7, 8) for kind in (0x10, 0x20)]
    for index, names in enumerate(tables):
        names.encode([f"{index}-{number}" for number in range(index + 1)] + ["\x10", "\xff"])
        save(names, engine)
    for index, (generation, kind) in enumerate((g, k) for g in (1, 7, 8) for k in (0x10, 0x20)):
        names = NameTable(engine, generation, kind, streams_of)
        assert index + 3 == len(names)
        assert f"{index}-{index}" == names.name(index)
        assert [] == list(names.verify(stream_of))


# --- keeping ------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["learn", "save", "unheard", "lose", "reopen"]), st.lists(texts, max_size=12)))
)
def test_a_name_never_changes_its_number(steps: list[tuple[str, list[str]]]) -> None:
    """Any sequence of adding, saving, failed commits and loading keeps the number of every committed name.

    The dictionary has room for about eight names, of up to three characters. A batch becomes numbers if and only if
    all its names have one, and a name that was once stored as text is never reported as lacking.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_table, "MOST_BYTES", room(8))
        patch.setattr(name_table, "LONGEST", 3)
        engine = MemoryEngine(KEYSPACES)
        names = table(engine)
        known: dict[str, int] = {}
        committed: dict[str, int] = {}
        as_text: set[str] = set()
        for step, learn in steps:
            if learn:
                encoded = names.encode(learn)
                found = {name: names.find(name) for name in learn}
                new = {name: number for name, number in found.items() if number is not None and name not in known}
                assert list(range(len(known), len(known) + len(new))) == list(new.values())
                assert all(len(name) <= 3 for name in new)
                known |= new
                assert [known.get(name) for name in learn] == [found[name] for name in learn]
                missing = None in found.values()
                assert missing == isinstance(encoded, Coded)
                assert to_list(encoded) == (learn if missing else [known[name] for name in learn])
                if missing:
                    as_text |= set(learn)
            assert len(known) == len(names)
            assert names.memory <= room(8)
            write = WriteBatch()
            if step in ("save", "unheard"):
                names.save(write)
                engine.write(write)
                committed = dict(known)
            if step == "save":
                names.saved()
            if step == "lose":  # the write fails, and the process continues
                names.save(write)
            if step == "reopen":
                names, known, as_text = table(engine), dict(committed), set()
            ids = array(*known.values())
            if len(ids):
                assert list(known) == to_list(names.names(ids))
                assert list(map(stream_of, known)) == names.streams(ids).tolist()
                assert list(known.values()) == to_list(names.encode(list(known)))
            assert not any(map(names.lacks, as_text))
        assert committed == {name: table(engine).find(name) for name in committed}
        assert [] == list(names.verify(stream_of))


# --- memory -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 30])
def test_a_full_table_takes_no_more(engine: MemoryEngine, small: int, size: int) -> None:
    """A full dictionary keeps its first names; a batch with any other name keeps all its names as strings."""
    names = table(engine)
    learn = [f"n{number}" for number in range(40)]
    for start in range(0, len(learn), size):
        batch = learn[start : start + size]
        for _ in range(2):  # names that are used again
            encoded = names.encode(batch)
        assert isinstance(encoded, Coded) == (start + len(batch) > small)
        assert (batch if isinstance(encoded, Coded) else list(range(start, start + len(batch)))) == to_list(encoded)
        save(names, engine)
    for each in (names, table(engine)):
        assert small == len(each)
        assert learn == to_list(each.encode(learn))
        assert [0, 7, 0] == to_list(each.encode(["n0", "n7", "n0"]))
        assert [*range(small), None] == [each.find(f"n{number}") for number in range(small + 1)]
        assert room(small - 1) < each.memory <= room(small)
        write = WriteBatch()
        each.save(write)
        assert not write


def test_names_used_once_take_an_eighth_of_the_memory(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are never used again get numbers for an eighth of the memory; the rest is for names used again."""
    monkeypatch.setattr(name_table, "MOST_BYTES", room(1_000))
    names = table(engine)
    for number in range(5_000):
        names.encode([f"n{number:04}"])
    assert 100 <= len(names) <= 150
    assert names.memory <= room(1_000) // 8 + room(1)
    for number in range(5_000):
        names.encode([f"n{number % 900:04}"])
    assert 900 == len(names)


def test_the_counted_bytes_are_those_that_names_take(engine: MemoryEngine) -> None:
    """The memory that a dictionary counts is that of its names, whether they were added or loaded."""
    filled(engine, [])
    learn = [f"fleet/region-{number % 7}/bus-{number}/speed" for number in range(90_000)]
    filled(engine, learn)
    names = table(engine)
    tracemalloc.start()
    names.find("")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.75 * names.memory < taken < 1.1 * names.memory


def test_a_batch_stores_one_record(engine: MemoryEngine) -> None:
    """All new names of a write are one value, and a write without new names has none."""
    names = table(engine)
    for learn, expected in ((["a", "b", "c"], 1), (["d"], 1), (["a", "d"], 0)):
        names.encode(learn)
        write = WriteBatch()
        names.save(write)
        assert expected == len(write.operations)
        engine.write(write)
        names.saved()
    assert [0, 1, 2, 3] == to_list(table(engine).encode(["a", "b", "c", "d"]))


def test_all_names_are_loaded_by_one_scan(engine: MemoryEngine) -> None:
    """The first name that is needed loads the whole dictionary; later ones read nothing."""
    learn = [f"n{number}" for number in range(3_000)]
    for start in range(0, len(learn), 100):
        filled(engine, learn[start : start + 100])
    counting = Counting(engine)
    names = table(counting)
    counting.reads.clear()
    assert learn == to_list(names.names(np.arange(len(learn))))
    assert list(range(len(learn))) == [names.find(name) for name in learn]
    assert ["scan", "get_many"] == counting.reads


def test_texts_in_every_form(engine: MemoryEngine, small: int) -> None:
    """In a full dictionary, a constant column stays one text, and other columns list each distinct text once."""
    filled(engine, [f"n{number}" for number in range(small)])
    names = table(engine)
    encoded = names.encode(Constant("new", 3))
    assert isinstance(encoded, Constant)
    assert ("new", 3) == (encoded.value, len(encoded))
    assert 7 == names.encode(Constant("n7", 3)).value
    for column in (["b", "a", "b"], coded(["b", "a", "b"])):
        encoded = names.encode(column)
        assert isinstance(encoded, Coded)
        assert ["b", "a"] == encoded.texts.values.tolist()
        assert ["b", "a", "b"] == to_list(encoded)
    assert not isinstance(names.encode(names.names(array(3, 3))), Coded)


def test_long_names_get_no_number(engine: MemoryEngine) -> None:
    """A name that is too long gets no number, and the other names of its batch get theirs."""
    names = table(engine)
    fits, long = "\U0001f68c" * LONGEST, "x" * (LONGEST + 1)
    assert [fits, long, "a"] == to_list(names.encode([fits, long, "a"]))
    assert isinstance(names.encode(Constant(long, 2)), Constant)
    save(names, engine)
    for each in (names, table(engine)):
        assert [1, 0] == to_list(each.encode(["a", fits]))
        assert 2 == len(each)
        assert None is each.find(long)


def test_what_is_lacking_is_certain(engine: MemoryEngine, small: int) -> None:
    """`lacks` is true only for names that were certainly never stored; long names may be stored as text.

    After the dictionary was full, `lacks` is false for all missing names.
    """
    names = table(engine)
    long = "x" * (LONGEST + 1)
    assert [True, True, False] == [names.lacks(name) for name in ("a", "b", long)]
    names.encode(["a", "a", long])
    assert [False, True, False] == [names.lacks(name) for name in ("a", "b", long)]
    save(names, engine)
    assert [False, True, False] == [table(engine).lacks(name) for name in ("a", "b", long)]
    names.encode([f"n{number}" for number in range(small)])
    save(names, engine)
    for each in (names, table(engine)):
        assert [False, False, False] == [each.lacks(name) for name in ("a", "b", f"n{small - 1}")]


def test_columns_outlive_what_is_learned_after_them(engine: MemoryEngine) -> None:
    """A returned column keeps its strings while names are added to the dictionary."""
    names = table(engine)
    columns = []
    for start in range(0, 500, 5):
        names.encode([f"n{number}" for number in range(start, start + 5)])
        columns.append(names.names(np.arange(start, start + 5)))
    assert [f"n{number}" for number in range(500)] == [text for column in columns for text in to_list(column)]


@pytest.mark.parametrize("stored", [0, 1, 15, 16, 17, 40])
def test_numbers_continue_after_reopening(engine: MemoryEngine, stored: int) -> None:
    """A loaded dictionary assigns the next free numbers, however many names it holds."""
    filled(engine, [f"n{number}" for number in range(stored)])
    names = table(engine)
    for number in range(stored, stored + 60):
        assert [number] == to_list(names.encode([f"n{number}"]))
        assert stream_of(f"n{number}") == names.stream(number)
        save(names, engine)
    learn = [f"n{number}" for number in range(stored + 60)]
    assert learn == to_list(names.names(np.arange(len(learn))))


@pytest.mark.slow
def test_names_beyond_the_memory() -> None:
    """Of 500,000 names those that fit get numbers, and the memory doesn't grow further, even after loading."""
    engine = MemoryEngine(KEYSPACES)
    learn = [f"fleet/bus-{number}" for number in range(500_000)]
    names = table(engine)
    for start in range(0, len(learn), 5_000):
        for _ in range(2):
            names.encode(learn[start : start + 5_000])
        save(names, engine)
    assert 300_000 < len(names) < 450_000
    for each in (names, table(engine)):
        assert len(names) == len(each)
        assert learn[: len(each)] == to_list(each.names(np.arange(len(each))))
        assert learn[-5_000:] == to_list(each.encode(learn[-5_000:]))
        assert None is each.find(learn[-1])
        assert 0.99 * MOST_BYTES < each.memory <= MOST_BYTES


# --- version 1 ----------------------------------------------------------------------


def put_v1(engine: Engine, names: list[str]) -> None:
    """Write a dictionary of version 1."""
    write = WriteBatch()
    for number, name in enumerate(names):
        forward, back = FORWARD + u32(number), BACK + name.encode()
        write.put(META, forward, add_checksum(forward, u32(stream_of(name)) + name.encode()))
        write.put(META, back, add_checksum(back, u32(number)))
    engine.write(write)


def test_version_1_is_continued(engine: MemoryEngine) -> None:
    """A dictionary of version 1 keeps its numbers and takes new names as records."""
    put_v1(engine, ["a", "", "bb"])
    names = filled(engine, ["c", "a", "dd"])
    for each in (names, table(engine)):
        assert ["a", "", "bb", "c", "dd"] == to_list(each.names(np.arange(5)))
        assert [2, 1, 3, 2, 3] == each.streams(np.arange(5)).tolist()
        assert [0, 1, 2, 3, 4] == to_list(each.encode(["a", "", "bb", "c", "dd"]))
        assert each.lacks("e")
        assert [] == list(each.verify(stream_of))


def test_a_full_dictionary_of_version_1_may_have_texts(engine: MemoryEngine) -> None:
    """`lacks` is false for a full dictionary of version 1, because it stored any further names as strings."""
    put_v1(engine, [f"n{number}" for number in range(65_536)])
    assert not table(engine).lacks("never")
    names = filled(engine, ["new"])
    for each in (names, table(engine)):
        assert 65_536 == each.find("new")
        assert not each.lacks("never")


# --- damage -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 18, 19, 1_000, 2**32 - 1])
def test_unknown_numbers(engine: MemoryEngine, number: int) -> None:
    """A number that was never assigned raises `CorruptionError` from every method."""
    names = filled(engine, ["a", "b", "c"])
    for ask in (names.name, names.stream, lambda n: names.names(array(0, n)), lambda n: names.streams(array(n))):
        with pytest.raises(CorruptionError, match=str(number)):
            ask(number)


def spoiled(engine: Engine, value: bytes | None) -> None:
    """Store the names a to f in three writes, and replace the record of c and d; None deletes it."""
    for learn in (["a", "b"], ["c", "d"], ["e", "f"]):
        filled(engine, learn)
    put(engine, FORWARD + u32(3), value)


GOOD = b"\2\x92\xc4\0\x92\xa1c\xa1d"
DAMAGES = [None, b"", b"\0\0", b"\2", b"\3" + GOOD[1:], b"\2\x92\xc4\0\x90", b"\2\x92\xc4\1\0\x92\xa1c\xa1d"]


@pytest.mark.parametrize("value", DAMAGES)
def test_a_damaged_record(engine: MemoryEngine, value: bytes | None) -> None:
    """A missing or malformed record raises an error for its names, and those of other records stay readable."""
    spoiled(engine, value)
    names = table(engine)
    for number in (2, 3):
        with pytest.raises(CorruptionError, match=rf"^names: .*number {number}"):
            names.name(number)
        with pytest.raises(CorruptionError, match=f"number {number}"):
            names.stream(number)
    with pytest.raises(CorruptionError, match="number 2"):
        names.streams(array(0, 2, 4))
    assert ["a", "f"] == to_list(names.names(array(0, 5)))
    assert [None, None] == names.all(2)[:2]
    assert "" != "; ".join(names.verify(stream_of))


@pytest.mark.parametrize("value", DAMAGES)
def test_a_damaged_dictionary_takes_no_names(engine: MemoryEngine, value: bytes | None) -> None:
    """Names that a damaged dictionary can't find are stored as strings, so that no name gets a second number."""
    spoiled(engine, value)
    names = table(engine)
    assert [0, 5] == to_list(names.encode(["a", "f"]))
    assert ["a", "d", "new"] == to_list(names.encode(["a", "d", "new"]))
    assert not names.lacks("new")
    save(names, engine)
    put(engine, FORWARD + u32(3), GOOD)  # as if only the copy in memory had been damaged
    assert not table(engine).lacks("new")


@pytest.mark.parametrize("value", [None, b"\0\0\0", b"\0\0\0\1\xff"])
def test_a_damaged_name_of_version_1(engine: MemoryEngine, value: bytes | None) -> None:
    """A missing, truncated or malformed name of version 1 raises an error, and the names beside it stay readable."""
    put_v1(engine, ["a", "b", "c"])
    put(engine, FORWARD + u32(1), value)
    names = table(engine)
    with pytest.raises(CorruptionError, match=r"^names: .*number 1"):
        names.name(1)
    with pytest.raises(CorruptionError, match="number 1"):
        names.streams(array(0, 1, 2))
    assert ["a", "c"] == to_list(names.names(array(0, 2)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (FORWARD + u32(1), None),
        (FORWARD + u32(1), u32(2) + b"other"),
        (FORWARD + u32(1), u32(2) + b"a"),
        (FORWARD + u32(1), b"\0"),
        (FORWARD + u32(9), u32(2) + b"b"),
        (BACK + b"b", None),
        (BACK + b"b", u32(0)),
        (BACK + b"b", b""),
        (FORWARD + u32(1), u32(3) + b"b"),
        (FORWARD + u32(4), b"\2\x92\xc4\x08\2\0\0\0\2\0\0\0\x92\xa1d\xa1a"),
        (FORWARD + u32(4), b"\2\x92\xc4\0\x92\xa1d\xa1e"),
        (FORWARD + u32(4), b"\2\x92\xc4\0"),
        (FORWARD + u32(4), None),
        (FORWARD + u32(2), None),
    ],
)
def test_verify_finds_tampering(engine: MemoryEngine, key: bytes, value: bytes | None) -> None:
    """Verification finds a changed entry of either version, even if memory holds the correct one."""
    put_v1(engine, ["a", "b", "c"])
    names = filled(engine, ["d", "e"])
    filled(engine, ["f"])
    assert [] == list(names.verify(stream_of))
    put(engine, key, value)
    for each in (names, table(engine)):
        assert "" != "; ".join(each.verify(stream_of))


def test_every_flipped_bit_and_truncation_is_found(engine: MemoryEngine) -> None:
    """Every flipped bit and truncation of a record or a marker is detected, and so is another key's value."""
    filled(engine, ["a", "bb"])
    filled(engine, ["c"])
    record, mark = FORWARD + u32(1), BACK + b"\0"
    put(engine, mark, b"\2")
    for key, other in ((record, FORWARD + u32(2)), (mark, record)):
        good, foreign = engine.get(META, key), engine.get(META, other)
        assert good is not None
        assert foreign is not None
        for bad in [*broken(good), foreign]:
            fixtures.put(engine, META, {key: bad})
            names = table(engine)
            if key == record:
                with pytest.raises(CorruptionError):
                    names.name(1)
            assert not names.lacks("never")
            assert 1 == len(list(names.verify(stream_of)))
        fixtures.put(engine, META, {key: good})


# --- threads ------------------------------------------------------------------------


def test_readers_run_beside_the_writer(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers beside the writer get correct names, even while the dictionary becomes full."""
    learn = [f"n{number:03}" for number in range(400)]
    monkeypatch.setattr(name_table, "MOST_BYTES", 300 * (NAME_BYTES + sys.getsizeof("n000")))
    committed = 200
    for start in range(0, committed, 20):
        filled(engine, learn[start : start + 20])
    names, source = table(engine), random.Random(1)

    def read() -> None:
        ids = np.array(source.choices(range(committed), k=6))
        assert [learn[number] for number in ids] == to_list(names.names(ids))
        assert [stream_of(learn[number]) for number in ids] == names.streams(ids).tolist()
        assert int(ids[0]) == names.find(learn[ids[0]])

    with Beside(read, read, read):
        for start in range(0, len(learn), 4):
            batch = learn[start : start + 4] + learn[start // 2 : start // 2 + 3]
            expected = [*range(start, start + 4), *range(start // 2, start // 2 + 3)]
            assert (expected if start < 300 else batch) == to_list(names.encode(batch))
            assert [start if start < 300 else learn[start]] == to_list(names.encode(Constant(learn[start], 1)))
            save(names, engine)
            committed = min(max(committed, start + 4), 300)
    assert [] == list(names.verify(stream_of))
