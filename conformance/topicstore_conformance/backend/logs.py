"""Tests of damaged write-ahead logs: a shard has all writes before the damage, and none after it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, META, STATE, Backend, Engine, WriteBatch
from topicstore.contract.errors import LogDamagedError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries

from .crashes import Files, appended, files_of, leave
from .fixtures import Fixtures, pairs, put

__all__ = ["Logs"]

SIZES = (10, 300, 40_000, 5, 70_000, 90, 7, 1_100, 33_000, 20)
"""The sizes of the values of the writes: several writes in a page, and writes of several pages."""
SECTOR = 512
"""The least number of bytes that a disk writes atomically."""

BLOCK, HEAD = 32 << 10, 7
"""The bytes of a block, and of the head of each part of a write, in the logs of LevelDB and of RocksDB.

https://github.com/google/leveldb/blob/main/doc/log_format.md
"""
BEGUN = (1, 5, 11, 12, 20)
"""The numbers of bytes of writes that stand in one block, while the rest of the write stands in later ones."""

Case = tuple[str, Files, int]
"""A damage by name, the damaged files, and the number of writes before the damage."""


def value_of(number: int) -> bytes:
    """Return the random value of a write."""
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


def write(engine: Engine, number: int) -> None:
    """Write the value with this number into two keyspaces, in one batch."""
    batch = WriteBatch()
    batch.put(DATA, (1, 1, number), value_of(number))
    batch.put(META, b"%08d" % number, value_of(number))
    engine.write(batch)


def numbers(engine: Engine) -> tuple[list[int], list[int]]:
    """Return the numbers of the writes that each of the two keyspaces has; check all values."""
    of_data = {key[2]: value for key, value in pairs(engine.scan(DATA))}
    of_meta = {int(key): value for key, value in pairs(engine.scan(META))}
    assert {number: value_of(number) for number in of_data} == of_data
    assert {number: value_of(number) for number in of_meta} == of_meta
    return list(of_data), list(of_meta)


def count(engine: Engine) -> int:
    """Return the number of writes that a shard has; check that they are the first ones, and whole."""
    of_data, of_meta = numbers(engine)
    assert list(range(len(of_data))) == of_data == of_meta
    return len(of_data)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


class Logs(Fixtures):
    """Tests of damaged write-ahead logs."""

    @requires("persistent")
    def test_damage_at_any_place_of_a_log_ends_it(self, backend: Backend, shard: Path) -> None:
        """A changed byte or a missing sector, at the ends or within a write, ends the log before that write."""
        states = self._written(backend, shard)
        cases = list(self._cases(states))
        if not cases:
            pytest.skip("the engine appends to no file, or to several")
        for number, case in enumerate(random.Random(9).sample(cases, min(len(cases), tries(10, 80)))):
            damage, files, expected = case
            damaged = shard.with_name(f"damaged-{number}")
            leave(files, damaged)
            assert expected == self._opened(backend, damaged), damage

    @requires("persistent")
    def test_a_torn_end_discards_nothing(self, backend: Backend, shard: Path) -> None:
        """A log whose last write is zeros is truncated there, and the error names no readable write that is discarded.

        File systems leave such an end where a file has its new size before its new data.
        """
        states = self._written(backend, shard)
        logs = {number: appended(*two) for number, two in enumerate(pairwise(states))}
        if not any(logs.values()):
            pytest.skip("the engine appends to no file, or to several")
        for number, log in logs.items():
            if log is not None:
                torn = shard.with_name(f"torn-{number}")
                before, after = states[number][log], states[number + 1][log]
                leave({**states[number + 1], log: before + bytes(len(after) - len(before) + 2 * SECTOR)}, torn)
                assert number == self._opened(backend, torn, discarding=False)

    @requires("persistent")
    def test_a_write_may_begin_at_the_end_of_a_block(self, backend: Backend, shard: Path) -> None:
        """Damage is found where a block of the log has only the first bytes of a write, fewer than its head has."""
        sizes = []
        with closing(backend.open_shard(shard, KEYSPACES, create=True)) as engine:
            for number, begun in enumerate(BEGUN):
                log, size = self._filled(backend, shard, engine, HEAD + begun)
                sizes.append(size)
                write(engine, number)
            files = files_of(backend, shard)
        whole = files[log]
        for number, size in enumerate(sizes):
            later = (size // BLOCK + 1) * BLOCK + HEAD
            damaged = shard.with_name(f"damaged-{number}")
            leave({**files, log: flipped(whole, later)}, damaged)
            assert number == self._opened(backend, damaged), f"the second part of a write, after {BEGUN[number]} bytes"
        torn = shard.with_name("torn")
        leave({**files, log: whole[: sizes[-1]] + bytes(len(whole) - sizes[-1])}, torn)
        assert len(sizes) - 1 == self._opened(backend, torn, discarding=False)

    @requires("persistent")
    @pytest.mark.parametrize("count", [0, 3])
    def test_a_log_that_lacks_its_last_write_ends_the_next(self, backend: Backend, shard: Path, count: int) -> None:
        """Two logs are read as one: if the first lacks its last write, of one change, no write of the second is there.

        An engine begins a log when it is opened, and when its buffer is full, and removes the one before later. File
        systems may lose the end of that one (https://github.com/google/leveldb/issues/193).

        count: the number of writes in the first log before its last one.
        """
        with closing(backend.open_shard(shard, KEYSPACES, create=True)) as engine:
            for number in range(count):
                write(engine, number)
            without = files_of(backend, shard)
            put(engine, STATE, {b"k": b"v"})
            files = files_of(backend, shard)
        reopened, both, gap = map(shard.with_name, ("reopened", "both", "gap"))
        leave(files, reopened)
        with closing(backend.open_shard(reopened, KEYSPACES, create=False)) as engine:
            begun = files_of(backend, reopened)
            for number in range(count, count + 3):
                write(engine, number)
            written = files_of(backend, reopened)
        log, next_log = appended(without, files), appended(begun, written)
        if log is None or next_log is None or log == next_log:
            pytest.skip("the engine begins no new log")
        leave({**files, next_log: written[next_log]}, both)
        if self._opened(backend, both) != count + 3:
            pytest.skip("the engine reads no log that its other files don't name")
        leave({**files, log: without[log], next_log: written[next_log]}, gap)
        assert count == self._opened(backend, gap)

    # --- steps ---

    @staticmethod
    def _filled(backend: Backend, shard: Path, engine: Engine, left: int) -> tuple[Path, int]:
        """Write values until the log ends ``left`` bytes before the end of a block; return the log and its size.

        Skip the test if the engine doesn't append each value to one file, with the same number of bytes beside it.
        """
        size, before = 1_000, files_of(backend, shard)
        for _ in range(8):
            put(engine, STATE, {b"filling": bytes(size)})
            after = files_of(backend, shard)
            log = appended(before, after)
            if log is None:
                break
            missing = (BLOCK - left - len(after[log])) % BLOCK
            if not missing:
                return log, len(after[log])
            beside = (
                len(after[log]) - len(before[log]) - size
            )  # whatever the engine writes with a value of two bytes' size
            before = after
            size = missing - beside if 1_000 <= missing <= 16_000 else 12_000
        pytest.skip("the engine appends to no file, or to several, or no blocks")

    @staticmethod
    def _written(backend: Backend, shard: Path) -> list[Files]:
        """Return the files of a new shard after each number of writes, from none on."""
        states = []
        with closing(backend.open_shard(shard, KEYSPACES, create=True)) as engine:
            states.append(files_of(backend, shard))
            for number in range(len(SIZES)):
                write(engine, number)
                states.append(files_of(backend, shard))
        return states

    @staticmethod
    def _cases(states: list[Files]) -> Iterator[Case]:
        """Yield damages of the log that the last write went to; `states` are the files after each number of writes."""
        log = appended(*states[-2:])
        if log is None:
            return
        ends = [len(state[log]) for state in states if log in state]
        first, last = len(states) - len(ends), states[-1]
        for number, (start, end) in enumerate(pairwise(ends), first):
            for place in {start, start + 4, start + 6, start + 7, (start + end) // 2, end - 1}:
                if start <= place < end:
                    yield f"the byte {place - start} of {end - start}", {**last, log: flipped(last[log], place)}, number
            for sector in islice(range(-(-start // SECTOR) * SECTOR, end - SECTOR, SECTOR), 0, None, 40):
                lost = last[log][:sector] + bytes(SECTOR) + last[log][sector + SECTOR :]
                yield f"the sector {sector - start} of {end - start}", {**last, log: lost}, number

    @staticmethod
    def _opened(backend: Backend, path: Path, *, discarding: bool = True) -> int:
        """Open a shard, inspected and repaired if need be; return the number of its writes.

        discarding: whether an error may name readable writes that are discarded.
        """
        damaged = None
        try:
            engine = backend.open_shard(path, KEYSPACES, create=False)
        except LogDamagedError as error:
            damaged = error
        if damaged is None:
            with closing(engine):
                return count(engine)
        found = files_of(backend, path)
        assert str(path) in str(damaged), "the error names no place"
        assert discarding or not damaged.discarded, "the error names readable writes behind the end"
        assert str(copy.deepcopy(damaged)) == str(damaged), "the error can't be made again, as in another process"
        with closing(backend.open_damaged(path, KEYSPACES, damaged, salvage=False)) as view:
            seen = count(view)
        with closing(backend.open_damaged(path, KEYSPACES, damaged, salvage=True)) as view:
            salvaged, of_meta = numbers(view)
            assert salvaged == of_meta
            assert list(range(seen)) == salvaged[:seen]
        assert found == files_of(backend, path), "inspecting changed a file"
        backend.repair_log(path, damaged)
        with closing(backend.open_shard(path, KEYSPACES, create=False)) as engine:
            assert seen == count(engine)
        return seen
