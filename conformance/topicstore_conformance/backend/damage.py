"""Tests of damaged files: damage is reported or harmless, and never read as data that was not written."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from topicstore.contract.engine import DATA, KEYSPACES, META, Backend, Keyspace, Reader
from topicstore.contract.errors import EngineError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.subjects.subject import BackendSubject

from . import child
from .child import Make
from .fixtures import Fixtures, Pair, contents, pairs, put

__all__ = ["Damages"]

VALUES = 200
"""The number of values, of 100 bytes each, none of which occurs twice."""

ORDER = {"right": 0, "reported": 1, "fewer": 2}
"""The outcomes of reading a damaged shard, by rank; any other outcome ranks worse."""


@cache
def value_of(number: int) -> bytes:
    """Return the value with this number, 100 random bytes that can be searched for in a file."""
    return random.Random(number).randbytes(100)


def data() -> dict[tuple[int, int, int], bytes]:
    """Return the pairs that a shard has in `DATA` before it is damaged."""
    return {(1, 1, number): value_of(number) for number in range(VALUES)}


def meta() -> dict[bytes, bytes]:
    """Return the pairs that a shard has in `META` before it is damaged."""
    return {b"%03d" % number: value_of(VALUES + number) for number in range(VALUES)}


def expected() -> dict[str, list[Pair]]:
    """Return all pairs, by keyspace."""
    return {"data": [*data().items()], "meta": [*meta().items()]}


def fill_closed(backend: Backend, shard: Path) -> None:
    """Create and close a shard with all pairs: those in `DATA` in a batch each, those in `META` in one batch."""
    engine = backend.open_shard(shard, KEYSPACES, create=True)
    for key, value in data().items():
        put(engine, DATA, {key: value})
    put(engine, META, meta())
    engine.close()
    backend.open_shard(shard, KEYSPACES, create=False).close()  # an engine may flush its log into SST files only here


def places(shard: Path, count: int) -> list[tuple[str, int, bool]]:
    """Return the bytes to flip, anywhere and within values, as (file, offset, whether the file holds values)."""
    draw, found = random.Random(11), []
    for file in sorted(file for file in shard.rglob("*") if file.is_file() and file.stat().st_size):
        content = file.read_bytes()
        of_values = [content.find(value_of(number)[:40]) for number in range(2 * VALUES)]
        hits = [at + draw.randrange(40) for at in of_values if at >= 0]
        offsets = [draw.randrange(len(content)) for _ in range(min(count, len(content)))]
        offsets += {min(hits), max(hits), *draw.sample(hits, min(count, len(hits)))} if hits else ()
        found += [(str(file.relative_to(shard)), at, bool(hits)) for at in offsets]
    return found


def read_damaged(make: Make, shard: Path, count: int) -> None:
    """Flip one byte at a time in a copy of the shard; report the outcomes of reading and of verifying it."""
    for name, at, of_values in places(shard, count):
        child.tell([name, at, of_values, "begun", ""])
        copy = shard.with_name("copy")
        shutil.copytree(shard, copy)
        flip(copy / name, at)
        child.tell([name, at, of_values, *outcome(make, copy)])
        shutil.rmtree(copy)
    child.end()


def verify_damaged(make: Make, shard: Path) -> None:
    """Flip a byte of a value in each file that holds values; report the number of files, and what `verify` yields."""
    hits = {name: at for name, at, of_values in places(shard, 1) if of_values}
    for name, at in hits.items():
        flip(shard / name, at)
    child.tell([0, 0])  # an engine may refuse to open a damaged shard
    with suppress(EngineError):
        engine = make().open_shard(shard, KEYSPACES, create=False)
        child.tell([len(hits), len(list(engine.verify()))])
        with suppress(EngineError):
            engine.close()
    child.end()


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 0x10,)))


def outcome(make: Make, copy: Path) -> tuple[str, str]:
    """Return the outcome of reading a damaged copy, and that of verifying it.

    Each call uses a new backend object, because one that opened the shard before may have cached the undamaged bytes.
    """
    try:
        engine = make().open_shard(copy, KEYSPACES, create=False)
    except EngineError:
        return "reported", "not open"
    except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
        return repr(error), ""
    verified = "reported" if list(engine.verify()) else "nothing"
    with engine.snapshot() as snapshot:
        outcomes = [*map(one_outcome, readings(engine)), *map(one_outcome, readings(snapshot))]
    with suppress(EngineError):
        engine.close()
    return max(outcomes, key=lambda read: ORDER.get(read, len(ORDER))), verified


def one_outcome(read: Callable[[], dict[str, list[Pair]]]) -> str:
    """Return the outcome of a read: that of `compared`, "reported" for an `EngineError`, else the repr of the error."""
    try:
        return compared(read())
    except EngineError:
        return "reported"
    except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
        return repr(error)


def readings(reader: Reader) -> Iterator[Callable[[], dict[str, list[Pair]]]]:
    """Yield functions that read everything, each in another way."""
    yield lambda: contents(reader)
    yield lambda: {keyspace.name: pairs(reader.scan(keyspace, reverse=True))[::-1] for keyspace in KEYSPACES}
    for keyspace in (DATA, META):
        for one_by_one in (False, True):
            yield partial(got, reader, keyspace, one_by_one=one_by_one)


def got(reader: Reader, keyspace: Keyspace[Any], *, one_by_one: bool) -> dict[str, list[Pair]]:
    """Return the pairs of a keyspace, looked up by their keys with `get` or with `get_many`."""
    keys = [key for key, _ in expected()[keyspace.name]]
    values = [reader.get(keyspace, key) for key in keys] if one_by_one else reader.get_many(keyspace, keys)
    return {keyspace.name: [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]}


def keep_errors(make: Make, shard: Path, count: int) -> None:
    """Read a damaged shard, keep the errors, close it, and open it again; report how both openings went."""
    gc.disable()  # the garbage collector would release the objects that an error refers to
    for name, at, of_values in places(shard, count):
        if not of_values:
            continue
        copy = shard.with_name("copy")
        shutil.copytree(shard, copy)
        flip(copy / name, at)
        kept: list[Exception] = []
        openings = [open_and_read(make, copy, kept) for _ in range(2)]
        child.tell([name, at, openings, len(kept)])
        shutil.rmtree(copy)
    child.end()


def open_and_read(make: Make, path: Path, kept: list[Exception]) -> str:
    """Open a shard, read it in all ways and close it; append every error to ``kept``.

    Returns the text of the error that opening raised, or "opened".
    """
    try:
        engine = make().open_shard(path, KEYSPACES, create=False)
    except EngineError as error:
        kept.append(error)
        return str(error)
    with engine.snapshot() as snapshot:
        reads = [*ways_to_read(engine), *ways_to_read(snapshot)]
        reads.append(lambda: list(engine.verify()))
        for read in reads:
            try:
                read()
            except EngineError as error:
                kept.append(error)
    engine.close()
    return "opened"


def ways_to_read(reader: Reader) -> Iterator[Callable[[], object]]:
    """Yield functions that read `DATA`: with `get_many`, with scans in both directions, and with `get` for each key."""
    wanted = list(data())
    yield lambda: reader.get_many(DATA, wanted)
    yield lambda: reader.get_many(DATA, [(1, 1, number) for number in range(10 * VALUES)])
    for reverse in (False, True):
        yield partial(lambda reverse: pairs(reader.scan(DATA, reverse=reverse)), reverse)
    for key in wanted:
        yield partial(reader.get, DATA, key)


def compared(found: dict[str, list[Pair]]) -> str:
    """Return "right" if the pairs read are as expected, "fewer" if they are a subset, else "wrong data"."""
    right = expected()
    if all(found[name] == right.get(name, []) for name in found):
        return "right"
    return "fewer" if all(set(found[name]) <= set(right.get(name, [])) for name in found) else "wrong data"


class Damages(Fixtures):
    """Tests of damaged files."""

    @requires("persistent", "checksums")
    def test_a_flipped_byte_is_reported_or_harmless(
        self, backend: Backend, subject: BackendSubject, shard: Path
    ) -> None:
        """A flipped byte in a file with values is reported by reads and by `verify`, or harmless; no read is wrong."""
        fill_closed(backend, shard)
        lines = child.run(subject.make, read_damaged, shard, tries(3, 40))
        assert len(lines) % 2 == 0, f"the process died of {lines[-1]}"
        ends = [line for line in lines if line[3] != "begun"]
        # Some engines can't detect a truncated manifest (their list of files): it looks like an older state.
        allowed = {True: ("right", "reported"), False: ("right", "reported", "fewer")}
        assert [(name, at, read) for name, at, of_values, read, _ in ends if read not in allowed[of_values]] == []
        assert [line for line in ends if line[3] == "reported" and line[4] == "nothing"] == []
        assert any(read == "reported" for _, _, _, read, _ in ends)

    @requires("persistent", "checksums")
    def test_each_damaged_file_is_reported(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """`verify` continues after a damaged file, and yields a description of each damaged file that holds values."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        for first in range(0, VALUES, VALUES // 4):
            last = min(first + VALUES // 4, VALUES)
            put(engine, DATA, {(1, 1, number): value_of(number) for number in range(first, last)})
            # Reclaiming each quarter of the values separately lets an engine keep it in a file of its own.
            engine.reclaim(DATA, (1, 1, first), (1, 1, last))
        engine.close()
        lines = child.run(subject.make, verify_damaged, shard)
        assert [line for line in lines if line[0] > line[1]] == []

    @requires("persistent", "checksums")
    def test_what_damage_raised_may_be_kept(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A damaged shard can be closed and opened again while the caller holds its errors with their tracebacks."""
        fill_closed(backend, shard)
        lines = child.run(subject.make, keep_errors, shard, tries(2, 20))
        assert [line for line in lines if line[2][0] != line[2][1]] == []
        assert any(kept > 2 for _, _, _, kept in lines)
