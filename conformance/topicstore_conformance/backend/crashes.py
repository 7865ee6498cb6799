"""Tests of killed processes: a shard keeps whole batches: all acknowledged ones, and possibly the one in flight."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from topicstore.contract.engine import (
    DATA,
    INDEX,
    KEYS,
    KEYSPACES,
    META,
    STATE,
    Backend,
    Engine,
    WriteBatch,
    encode_generation,
)
from topicstore.contract.errors import LogDamagedError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.copying import copy_open
from topicstore_conformance.faults.killing import ENDS, Countdown, moment_of
from topicstore_conformance.subjects.subject import BackendSubject

from . import child
from .child import Make
from .fixtures import Fixtures, contents

__all__ = ["Crashes", "appended", "check_batches", "files_of", "last_batch", "leave", "open_killed", "written"]

KEPT = 6
"""The number of batches that a shard holds: each batch deletes the one written this many batches earlier."""
ROWS = 400
"""The number of a batch's keys in `DATA` and in `KEYS`: so many that a kill can land while they are written."""

Files = dict[Path, bytes]
"""The contents of a shard's files, by their paths relative to the shard."""


def batch_of(number: int) -> WriteBatch:
    """Return the batch with this number, over all keyspaces; a shard's contents show which batches it holds."""
    batch, draw = WriteBatch(), random.Random(number)
    gone = number - KEPT
    if gone >= 0:
        batch.delete_range(DATA, (1, gone, 0), (1, gone + 1, 0))
        batch.delete_range(KEYS, encode_generation(gone), encode_generation(gone + 1))
        batch.delete(META, b"%08d" % gone)
        batch.delete(INDEX, (1, 0, gone))
    payload = draw.randbytes(60)
    batch.put(STATE, b"first", b"%d" % number)
    batch.put_many(DATA, [(1, number, row) for row in range(ROWS)], [payload[row % 60 :] for row in range(ROWS)])
    for row in range(ROWS):
        batch.put(KEYS, encode_generation(number) + b"%d" % row, payload)
    batch.put(META, b"%08d" % number, payload)
    batch.put(INDEX, (1, 0, number), b"")
    batch.put(STATE, b"last", b"%d" % number)
    return batch


def expected_after(last: int) -> dict[str, dict[object, bytes]]:
    """Return the expected contents of a shard after the batches up to ``last`` (inclusive), by keyspace."""
    found: dict[str, dict[object, bytes]] = {keyspace.name: {} for keyspace in KEYSPACES}
    for number in range(max(last - KEPT + 1, 0), last + 1):
        for keyspace, key, value in batch_of(number).operations:
            if value is not None:
                found[keyspace.name][key] = value
    return found


def last_batch(engine: Engine) -> int:
    """Return the number of the last batch in a shard, -1 if there is none."""
    return int(engine.get(STATE, b"last") or b"-1")


def check_batches(engine: Engine) -> None:
    """Check that a shard holds exactly the batches up to its last one, each of them whole."""
    expected = expected_after(last_batch(engine))
    found = contents(engine)
    for keyspace in KEYSPACES:  # one by one, so that a failure names the keyspace instead of printing all contents
        differs = dict(found[keyspace.name]) != expected[keyspace.name]
        assert not differs, f"batches are there in part: see keyspace {keyspace.name!r}"


def written(engine: Engine, first: int, count: int, *, sync: bool = False) -> Iterator[int]:
    """Write ``count`` batches, and yield the number of each once its write has returned."""
    for number in range(first, first + count):
        engine.write(batch_of(number), sync=sync)
        yield number


def write_and_kill_yourself(make: Make, path: Path, first: int, sync: bool, moment: int, share: int) -> None:
    """Write batches, report each to the parent, and kill this process at the moment that `Countdown` counts to."""
    engine = make().open_shard(path, KEYSPACES, create=True)
    countdown = Countdown(moment, share / 100)
    countdown.start()
    write = countdown.counted(engine.write)
    for number in itertools.count(first):
        write(batch_of(number), sync=sync)
        child.tell(number)


def files_of(backend: Backend, path: Path) -> Files:
    """Return a consistent copy of an open shard's files, without files that the backend doesn't need for an opening."""
    with quick_directory() as directory:
        copy = Path(directory, "copy")
        copy_open(path, copy, unneeded=backend.unneeded)
        return {file.relative_to(copy): file.read_bytes() for file in copy.rglob("*") if file.is_file()}


def leave(files: Files, path: Path) -> None:
    """Write files into a shard's directory, as a killed process would leave them."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


def appended(before: Files, after: Files) -> Path | None:
    """Return the path of the only file that differs between two results of `files_of`, if data was only appended."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    only = before.get(changed[0]) if len(changed) == 1 else None
    return changed[0] if only is not None and after.get(changed[0], b"").startswith(only) else None


def open_killed(backend: Backend, path: Path) -> Engine:
    """Open a shard whose writer was killed; if its write-ahead log ends in a torn write, truncate the log there."""
    try:
        return backend.open_shard(path, KEYSPACES, create=False)
    except LogDamagedError as damaged:
        backend.repair_log(path, damaged)
        return backend.open_shard(path, KEYSPACES, create=False)


def open_reader(backend: Backend, path: Path) -> Engine:
    """Open a shard read-only while no other process has it open."""
    return backend.open_reader(path, KEYSPACES, alone=True)


class Crashes(Fixtures):
    """Tests of killed processes."""

    @requires("persistent")
    def test_batches_are_whole_when_killed(self, backend: Backend, subject: BackendSubject, shard: Path) -> None:
        """After a kill each batch is stored whole or not at all, and no acknowledged batch is lost."""
        last, draw = -1, random.Random(7)
        for kill in range(tries(3, 12, subject.capabilities)):
            acknowledged, place = last, ("within", "after", "within", "before")[kill % 4]
            how = last + 1, kill % 3 == 2, moment_of(draw.randrange(2, 13), place), draw.randrange(100)
            with child.Child(subject.make, write_and_kill_yourself, shard, *how) as writer:
                for number in writer.told():
                    acknowledged = number
                assert writer.wait() in ENDS, writer.complaint()
            engine = open_killed(backend, shard)
            last = last_batch(engine)
            assert acknowledged + (place == "after") <= last, "a batch that was acknowledged is lost"
            assert last <= acknowledged + (place != "before"), "a batch is there that was never begun"
            check_batches(engine)
            engine.close()

    @requires("persistent")
    def test_a_log_cut_short_keeps_what_is_before(self, backend: Backend, shard: Path) -> None:
        """If the log is cut off anywhere within its last write, that write is absent, and all earlier ones are kept."""
        for number, log, before, after in self.appends(backend, shard):
            draw = random.Random(number)
            for cut in range(tries(3, 20)):
                torn = shard.with_name(f"torn-{number}-{cut}")
                leave({**after, log: after[log][: draw.randrange(len(before[log]), len(after[log]))]}, torn)
                for opened in (open_reader, open_killed):
                    engine = opened(backend, torn)
                    assert number == last_batch(engine)
                    check_batches(engine)
                    engine.close()

    @requires("persistent")
    def test_a_damaged_log_shows_what_repairing_leaves(self, backend: Backend, shard: Path) -> None:
        """Recovery ends at corruption in the middle of a log; inspecting the shard beforehand changes no file."""
        *_, (_, log, _, last) = steps = self.appends(backend, shard)
        for number, _, before, after in [step for step in steps if step[1] == log][:-1]:
            damaged = shard.with_name(f"damaged-{number}")
            at = random.Random(number).randrange(len(before[log]) + 20, len(after[log]) - 20)
            leave({**last, log: last[log][:at] + bytes([last[log][at] ^ 1]) + last[log][at + 1 :]}, damaged)
            try:
                engine = backend.open_shard(damaged, KEYSPACES, create=False)
            except LogDamagedError as error:
                found = files_of(backend, damaged)
                with closing(backend.open_damaged(damaged, KEYSPACES, error, salvage=True)) as view:
                    assert number <= last_batch(view)
                with closing(backend.open_damaged(damaged, KEYSPACES, error, salvage=False)) as view:
                    assert number == last_batch(view)
                    check_batches(view)
                assert found == files_of(backend, damaged)
                backend.repair_log(damaged, error)
                engine = backend.open_shard(damaged, KEYSPACES, create=False)
            assert number == last_batch(engine)
            check_batches(engine)
            engine.close()

    @staticmethod
    def appends(backend: Backend, shard: Path) -> list[tuple[int, Path, Files, Files]]:
        """Write batches; return for each its number, the file appended to, and all files before and after it.

        Skip the test if the engine doesn't append each batch to one file.
        """
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        states = [files_of(backend, shard) for _ in written(engine, 0, 6)]
        engine.close()
        logs = [appended(*two) for two in itertools.pairwise(states)]
        found = [(number, log, states[number], states[number + 1]) for number, log in enumerate(logs) if log]
        if not found:
            pytest.skip("the engine appends to no file, or to several")
        return found
