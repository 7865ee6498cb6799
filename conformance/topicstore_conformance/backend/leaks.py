"""Tests of close: it releases files, mappings, threads and the lock, even while scans and snapshots are open."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, STATE, Backend, Engine

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.faults.threads import wait_until
from topicstore_conformance.subjects.subject import BackendSubject

from .fixtures import Fixtures, keys, numbered, put

__all__ = ["Leaks"]

DESCRIPTORS, MAPPINGS, TASKS = Path("/proc/self/fd"), Path("/proc/self/maps"), Path("/proc/self/task")
OPENINGS, SCANS = 8, 150
"""The numbers of openings and scans in a round. The counts after two rounds are compared with those after one."""
ITS_OWN = 3
"""The number of handles or threads that an engine may add in a round for internal use."""

linux = pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="there is no /proc/self to count handles in")


def open_files(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open or mapped."""
    found = []
    for entry in DESCRIPTORS.iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # closed meanwhile, as the handle of the listing itself is
            continue
    found += [line.rpartition(" ")[2] for line in MAPPINGS.read_text().splitlines()]
    return [name for name in found if name.startswith(f"{directory.resolve()}/")]


def handles(directory: Path) -> tuple[int, int]:
    """Return the number of this process's handles, and the number of its open or mapped files below a directory."""
    gc.collect()
    return len(list(DESCRIPTORS.iterdir())), len(open_files(directory))


def counts() -> tuple[int, set[str]]:
    """Return the number of this process's handles, and the ids of its threads.

    The threads are a set, because unrelated ones may end between two calls.
    """
    gc.collect()
    return len(list(DESCRIPTORS.iterdir())), {task.name for task in TASKS.iterdir()}


def leave_things_open(engine: Engine) -> list[object]:
    """Return scans and a snapshot that are open and half read, with the chunks read."""
    scan, snapshot = engine.scan(DATA), engine.snapshot()
    within, unasked = snapshot.scan(DATA, reverse=True), snapshot.scan(DATA)
    return [scan, snapshot, within, unasked, next(scan), next(within), next(iter(engine.verify()), None)]


class Leaks(Fixtures):
    """Tests of the resources that close releases."""

    def test_close_gives_everything_back(
        self, backend: Backend, subject: BackendSubject, shard: Path, directory: Path
    ) -> None:
        """After close no file is open or mapped and the shard can be reopened, even while the caller holds scans."""
        held: list[object] = []
        for opening in range(5):
            engine = backend.open_shard(shard, KEYSPACES, create=opening == 0)
            put(engine, DATA, {(opening, 0, number): bytes(1_000) for number in range(300)}, sync=True)
            kept = opening + 1 if "persistent" in subject.capabilities else 1
            assert 300 * kept == len(keys(engine.scan(DATA)))
            held += [engine, *leave_things_open(engine)]
            engine.close()
            assert not DESCRIPTORS.is_dir() or open_files(directory) == []
        assert len(held) == 5 * 8

    @requires("persistent")
    def test_readers_leave_no_files(self, backend: Backend, shard: Path) -> None:
        """Opening a shard to read it, and closing it, adds no file to its directory, however often that is done."""
        with closing(backend.open_shard(shard, KEYSPACES, create=True)) as engine:
            put(engine, DATA, numbered(300))
        found = []
        for _ in range(3):
            with closing(backend.open_reader(shard, KEYSPACES, alone=True)) as reader:
                assert list(numbered(300)) == keys(reader.scan(DATA))
            found.append(sorted(shard.rglob("*")))
        assert found[0] == found[-1]

    @requires("persistent")
    def test_a_failed_opening_keeps_nothing(self, backend: Backend, shard: Path, directory: Path) -> None:
        """A failed opening leaves no file open, and the shard can be opened once the cause is gone."""
        shard.write_bytes(b"in the way")
        for _ in range(3):
            with pytest.raises(Exception):  # noqa: B017, PT011 - of which kind is another promise
                backend.open_shard(shard, KEYSPACES, create=True)
        assert not DESCRIPTORS.is_dir() or open_files(directory) == []
        shard.unlink()
        backend.open_shard(shard, KEYSPACES, create=True).close()

    @linux
    def test_openings_do_not_pile_up(self, backend: Backend, directory: Path) -> None:
        """The process's handles and threads don't grow with the number of shards that were opened and closed."""

        def use(number: int) -> None:
            engine = backend.open_shard(directory / f"{number}", KEYSPACES, create=True)
            put(engine, DATA, numbered(300), sync=True)
            leave_things_open(engine)
            engine.close()

        def grown() -> int:
            (handles_before, threads_before), (handles_now, threads_now) = before, counts()
            return max(handles_now - handles_before, len(threads_now - threads_before))

        for number in range(OPENINGS):
            use(number)
        before = counts()
        for number in range(OPENINGS, 2 * OPENINGS):
            use(number)
        # The kernel lists a thread for a short time after it was joined.
        wait_until(lambda: grown() <= ITS_OWN, "handles and threads to be given back")

    @linux
    def test_dropped_scans_give_back_what_they_hold(self, engine: Engine, directory: Path) -> None:
        """Any number of scans and snapshots that are dropped or closed half read keep no handle open."""
        put(engine, DATA, numbered(500), sync=True)

        def drop_scans() -> tuple[int, int]:
            for _ in range(SCANS):
                scan = engine.scan(DATA)
                next(scan)
                with engine.snapshot() as snapshot:
                    within = snapshot.scan(DATA)
                    next(within)
                del scan, within, snapshot
            return handles(directory)

        before, after = drop_scans(), drop_scans()
        assert max(now - then for now, then in zip(after, before, strict=True)) <= ITS_OWN

    def test_a_closed_engine_can_be_dropped(self, backend: Backend, shard: Path) -> None:
        """Closing and dropping an engine, its scans and its snapshots in any order raises nothing."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        put(engine, STATE, {b"k": b"v"})
        scan, snapshot = engine.scan(STATE), engine.snapshot()
        next(scan)
        del engine
        gc.collect()
        snapshot.close()
        del scan, snapshot
        gc.collect()
        again = backend.open_shard(shard.with_name("other"), KEYSPACES, create=True)
        again.close()
        del again
        gc.collect()
