"""Tests of dictionaries of names: numbers that never change, and bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.checksums import add_checksum
from topicstore.contract.columns import Coded, Constant, to_list
from topicstore.contract.engine import KEYSPACES, META, Engine, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.backend import fixtures
from topicstore_conformance.faults.threads import Beside
from topicstore_conformance.layout.damage import broken
from topicstore_layouts.shared import name_table
from topicstore_layouts.shared.name_table import CAPACITY, LONGEST, NameTable, coded

GENERATION, KIND = 7, 0x10
FORWARD, BACK = encode_generation(GENERATION) + b"\x10", encode_generation(GENERATION) + b"\x11"

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)


def stream_of(name: str) -> int:
    return len(name.encode()) + 1


def table(engine: Engine) -> NameTable:
    return NameTable(engine, GENERATION, KIND, stream_of)


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
    """Limit dictionaries to eight names, and return that limit."""
    monkeypatch.setattr(name_table, "CAPACITY", 8)
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
    """A list of names and a column of coded texts get the same numbers."""
    names = filled(engine, ["a", "b"])
    coded = names.names(array(1, 0, 1))
    assert isinstance(coded, Coded)
    assert [1, 0, 1] == to_list(names.encode(coded))


def test_each_name_has_its_stream(engine: MemoryEngine) -> None:
    """A name keeps the stream that it had when it was added, because the stream is stored with it."""
    names = filled(engine, ["a", "bbb"])
    assert [2, 4, 2] == names.streams(array(0, 1, 0)).tolist()
    again = NameTable(engine, GENERATION, KIND, lambda _: 99)
    assert [4, 2] == [again.stream(1), again.stream(0)]


def test_tables_keep_apart(engine: MemoryEngine) -> None:
    """Dictionaries of different kinds and generations have independent numbers, even for names that look like keys."""
    tables = [NameTable(engine, generation, kind, stream_of) for generation in (1, 7, 8) for kind in (0x10, 0x20)]
    for index, names in enumerate(tables):
        names.encode([f"{index}-{number}" for number in range(index + 1)] + ["\x10", "\xff"])
        save(names, engine)
    for index, (generation, kind) in enumerate((g, k) for g in (1, 7, 8) for k in (0x10, 0x20)):
        names = NameTable(engine, generation, kind, stream_of)
        assert index + 3 == len(names)
        assert f"{index}-{index}" == names.name(index)
        assert [] == list(names.verify(stream_of))


# --- keeping ------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from(["learn", "save", "unheard", "lose", "reopen"]), st.lists(texts, max_size=12)))
)
def test_a_name_never_changes_its_number(steps: list[tuple[str, list[str]]]) -> None:
    """Any sequence of adding, saving, failed commits and loading keeps the number of every committed name.

    The dictionary has room for eight names of up to three characters.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name_table, "CAPACITY", 8)
        patch.setattr(name_table, "LONGEST", 3)
        engine = MemoryEngine(KEYSPACES)
        names = table(engine)
        known: dict[str, int] = {}
        committed: dict[str, int] = {}
        for step, learn in steps:
            if learn:
                encoded = names.encode(learn)
                for name in learn:
                    if name not in known and len(known) < 8 and len(name) <= 3:
                        known[name] = len(known)
                assert [known.get(name, name) for name in learn] == to_list(encoded) or learn == to_list(encoded)
                assert all(name in known for name in learn) != isinstance(encoded, Coded)
            assert len(known) == len(names)
            write = WriteBatch()
            if step in ("save", "unheard"):
                names.save(write)
                engine.write(write)
                committed = dict(known)
            if step == "save":
                names.saved()
            if step == "lose":  # the write fails, and the process goes on
                names.save(write)
            if step == "reopen":
                names, known = table(engine), dict(committed)
            ids = array(*known.values())
            if len(ids):
                assert list(known) == to_list(names.names(ids))
                assert list(map(stream_of, known)) == names.streams(ids).tolist()
                assert list(known.values()) == to_list(names.encode(list(known)))
            assert [known.get(name) for name in learn] == [names.find(name) for name in learn]
        assert committed == {name: table(engine).find(name) for name in committed}
        assert [] == list(names.verify(stream_of))


# --- memory -------------------------------------------------------------------------


def in_memory(names: NameTable) -> int:
    """Return the number of names in memory, after checking that all structures hold the same names."""
    texts = names._texts.values
    held = {text: number for number, text in enumerate(texts) if text is not None}
    assert held == names._ids
    assert sorted(held.values()) == np.flatnonzero(names._loaded).tolist()
    return len(held)


@pytest.mark.parametrize("size", [1, 3, 8, 30])
def test_a_full_table_takes_no_more(engine: MemoryEngine, small: int, size: int) -> None:
    """A full dictionary keeps its first names; a batch with any other name keeps all its names as texts."""
    names = table(engine)
    learn = [f"n{number}" for number in range(40)]
    for start in range(0, len(learn), size):
        batch = learn[start : start + size]
        encoded = names.encode(batch)
        assert isinstance(encoded, Coded) == (start + len(batch) > small)
        assert (batch if isinstance(encoded, Coded) else list(range(start, start + len(batch)))) == to_list(encoded)
        save(names, engine)
    for each in (names, table(engine)):
        assert small == len(each)
        assert learn == to_list(each.encode(learn))
        assert [0, 7, 0] == to_list(each.encode(["n0", "n7", "n0"]))
        assert [*range(small), None] == [each.find(f"n{number}") for number in range(small + 1)]
        assert small == in_memory(each)
        write = WriteBatch()
        each.save(write)
        assert not write


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

    After the dictionary was full, it is false for all missing names.
    """
    names = table(engine)
    long = "x" * (LONGEST + 1)
    assert [True, True, False] == [names.lacks(name) for name in ("a", "b", long)]
    names.encode(["a", long])
    assert [False, True, False] == [names.lacks(name) for name in ("a", "b", long)]
    save(names, engine)
    assert [False, True, False] == [table(engine).lacks(name) for name in ("a", "b", long)]
    names.encode([f"n{number}" for number in range(small)])
    save(names, engine)
    for each in (names, table(engine)):
        assert [False, False, False] == [each.lacks(name) for name in ("a", "b", f"n{small - 1}")]


def test_columns_outlive_what_is_learned_after_them(engine: MemoryEngine) -> None:
    """A returned column keeps its texts while names are added to the dictionary."""
    names = table(engine)
    columns = []
    for start in range(0, 500, 5):
        names.encode([f"n{number}" for number in range(start, start + 5)])
        columns.append(names.names(np.arange(start, start + 5)))
    assert [f"n{number}" for number in range(500)] == [text for column in columns for text in to_list(column)]


@pytest.mark.parametrize("stored", [0, 1, 15, 16, 17, 40])
def test_growth_goes_on_after_reopening(engine: MemoryEngine, stored: int) -> None:
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
def test_200000_names() -> None:
    """Of 200,000 names the first 65,536 get numbers; after that the dictionary takes no more memory, even reloaded."""
    engine = MemoryEngine(KEYSPACES)
    learn = [f"fleet/bus-{number}" for number in range(200_000)]
    names = table(engine)
    for start in range(0, len(learn), 5_000):
        batch = learn[start : start + 5_000]
        encoded = names.encode(batch)
        save(names, engine)
        full = start + 5_000 > CAPACITY
        assert (batch if full else list(range(start, start + 5_000))) == to_list(encoded)
    for each in (names, table(engine)):
        assert CAPACITY == len(each)
        assert learn[:CAPACITY] == to_list(each.names(np.arange(CAPACITY)))
        assert learn[-5_000:] == to_list(each.encode(learn[-5_000:]))
        assert [0, CAPACITY - 1, None] == [each.find(learn[number]) for number in (0, CAPACITY - 1, CAPACITY)]
        assert in_memory(each) == CAPACITY


# --- damage -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 18, 19, 1_000, 2**32 - 1])
def test_unknown_numbers(engine: MemoryEngine, number: int) -> None:
    """A number that was never assigned raises `CorruptionError` from every method."""
    names = filled(engine, ["a", "b", "c"])
    for ask in (names.name, names.stream, lambda n: names.names(array(0, n)), lambda n: names.streams(array(n))):
        with pytest.raises(CorruptionError, match=str(number)):
            ask(number)


@pytest.mark.parametrize("value", [None, b"", b"\0\0\0", b"\0\0\0\1\xff"])
def test_a_damaged_name(engine: MemoryEngine, value: bytes | None) -> None:
    """A missing, truncated or malformed name raises an error, and the names beside it stay readable."""
    filled(engine, ["a", "b", "c"])
    put(engine, FORWARD + u32(1), value)
    names = table(engine)
    with pytest.raises(CorruptionError, match=r"^names: .*number 1"):
        names.name(1)
    with pytest.raises(CorruptionError, match="number 1"):
        names.streams(array(0, 1, 2))
    assert ["a", "c"] == to_list(names.names(array(0, 2)))


@pytest.mark.parametrize("value", [b"", b"\0\0\1", u32(3), u32(2**32 - 1), b"\0\0\0\0\1"])
def test_a_damaged_number(engine: MemoryEngine, value: bytes) -> None:
    """A damaged number raises an error when it is read, and is not used for new messages."""
    filled(engine, ["a", "b", "c"])
    put(engine, BACK + b"b", value)
    names = table(engine)
    with pytest.raises(CorruptionError, match=r"^names: "):
        names.find("b")
    with pytest.raises(CorruptionError):
        names.encode(["a", "b"])
    assert [0, 2] == to_list(names.encode(["a", "c"]))


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
    ],
)
def test_verify_finds_tampering(engine: MemoryEngine, key: bytes, value: bytes | None) -> None:
    """Verification finds a changed entry of either direction, even if memory holds the correct one."""
    names = filled(engine, ["a", "b", "c"])
    assert [] == list(names.verify(stream_of))
    put(engine, key, value)
    for each in (names, table(engine)):
        assert "" != "; ".join(each.verify(stream_of))


def test_every_flipped_bit_and_truncation_is_found(engine: MemoryEngine) -> None:
    """Every flipped bit and truncation of either entry is detected, and so is another key's value."""
    filled(engine, ["a", "bb"])
    forward, back = FORWARD + u32(1), BACK + b"bb"
    for key, other in ((forward, FORWARD + u32(0)), (back, BACK + b"a")):
        good, foreign = engine.get(META, key), engine.get(META, other)
        assert good is not None
        assert foreign is not None
        for bad in [*broken(good), foreign]:
            fixtures.put(engine, META, {key: bad})
            names = table(engine)
            with pytest.raises(CorruptionError):
                names.name(1) if key == forward else names.find("bb")
            assert 1 == len(list(names.verify(stream_of)))
        fixtures.put(engine, META, {key: good})


# --- threads ------------------------------------------------------------------------


def test_readers_run_beside_the_writer(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that load names beside the writer get correct names, also while the dictionary becomes full."""
    monkeypatch.setattr(name_table, "CAPACITY", 300)
    learn = [f"n{number}" for number in range(400)]
    committed = 200
    filled(engine, learn[:committed])
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
