"""Damaged files: told, or harmless; never data that nobody wrote."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from topicstore.contract.engine import DATA, KEYSPACES, META, Backend, Engine
from topicstore.contract.errors import EngineError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.profiles import tries
from topicstore_conformance.subjects.subject import BackendSubject

from . import child
from .child import Make
from .fixtures import Fixtures, Pair, contents, put

__all__ = ["Damages"]

VALUES = 200
"""Values of 100 bytes, none of which occurs twice."""


@cache
def value_of(number: int) -> bytes:
    """Return a value by which its place in a file is found."""
    return random.Random(number).randbytes(100)


def expected() -> dict[str, list[Pair]]:
    """Return what is damaged later, by keyspace."""
    data: list[Pair] = [((1, 1, number), value_of(number)) for number in range(VALUES)]
    return {"data": data, "meta": [(b"%03d" % number, value_of(VALUES + number)) for number in range(VALUES)]}


def fill(engine: Engine) -> None:
    """Write it, some of it in batches of its own."""
    for key, value in expected()["data"]:
        put(engine, DATA, {key: value})
    put(engine, META, dict(expected()["meta"]))


def places(shard: Path, count: int) -> list[tuple[str, int, bool]]:
    """Return (file, offset, whether values are in that file) of bytes to flip: anywhere, and within values."""
    draw, found = random.Random(11), []
    for file in sorted(file for file in shard.rglob("*") if file.is_file() and file.stat().st_size):
        content = file.read_bytes()
        of_values = [content.find(value_of(number)[:40]) for number in range(2 * VALUES)]
        hits = [at + draw.randrange(40) for at in of_values if at >= 0]
        offsets = [draw.randrange(len(content)) for _ in range(min(count, len(content)))]
        offsets += draw.sample(hits, min(count, len(hits)))
        found += [(str(file.relative_to(shard)), at, bool(hits)) for at in offsets]
    return found


def read_damaged(make: Make, shard: Path, count: int) -> None:
    """Flip one byte of a copy of the shard at a time; tell what came of reading and of verifying it."""
    for name, at, of_values in places(shard, count):
        child.tell([name, at, of_values, "begun", ""])
        copy = shard.with_name("copy")
        shutil.copytree(shard, copy)
        with (copy / name).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes((byte ^ 0x10,)))
        child.tell([name, at, of_values, *outcome(make, copy)])
        shutil.rmtree(copy)
    child.end()


def outcome(make: Make, copy: Path) -> tuple[str, str]:
    """Return how reading a damaged copy ends, and what verify says of it.

    By a new backend object: one that opened the shard before may remember what is damaged now.
    """
    try:
        engine = make().open_shard(copy, KEYSPACES, create=False)
    except EngineError:
        return "told", "not open"
    except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
        return repr(error), ""
    told = "told" if list(engine.verify()) else "nothing"
    try:
        read = compared(contents(engine))
    except EngineError:
        read = "told"
    except Exception as error:  # noqa: BLE001 - whatever it is, the test names it
        read = repr(error)
    with suppress(EngineError):
        engine.close()
    return read, told


def compared(found: dict[str, list[Pair]]) -> str:
    """Return whether what was read is right, only a part of that, or wrong."""
    right = expected()
    if all(found[name] == right.get(name, []) for name in found):
        return "right"
    return "fewer" if all(set(found[name]) <= set(right.get(name, [])) for name in found) else "wrong data"


class Damages(Fixtures):
    """Promises about damaged files."""

    @requires("persistent", "checksums")
    def test_a_flipped_byte_is_told_or_harmless(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """A flipped byte of a file with values is told, by reading and by verify, or harmless; never data."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        fill(engine)
        engine.close()
        told = child.run(subject.make, read_damaged, shard, tries(3, 40))
        assert len(told) % 2 == 0, f"the process died of {told[-1]}"
        ends = [line for line in told if line[3] != "begun"]
        # Of an engine's own lists of its files a lost end can look like an older state: that is not told by all.
        allowed = {True: ("right", "told"), False: ("right", "told", "fewer")}
        assert [(name, at, read) for name, at, of_values, read, _ in ends if read not in allowed[of_values]] == []
        assert [line for line in ends if line[3] == "told" and line[4] == "nothing"] == []
        assert any(read == "told" for _, _, _, read, _ in ends)
