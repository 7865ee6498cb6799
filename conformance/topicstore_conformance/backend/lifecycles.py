"""Tests of life cycles: closing in any order and twice, other processes, second threads, and memory that is kept."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, META, STATE, Backend, Engine, Reader
from topicstore.contract.errors import DatabaseClosedError, EngineError

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.memory import kept_by
from topicstore_conformance.faults.threads import together
from topicstore_conformance.oracle.limits import MEGABYTE, unlike
from topicstore_conformance.subjects.subject import BackendSubject

from . import child
from .changes import CHANGES, changed, check_groups, every_change, filled, key_of
from .child import Make
from .fixtures import Fixtures, keys, numbered, pairs, put

__all__ = ["LifeCycles"]

SEEDS = (1, 4_294_967_295)
"""Hash seeds (``PYTHONHASHSEED``) of other processes."""
FIRST_CHUNKS = 8 * MEGABYTE
"""The memory, in bytes, that the first chunk of a scan may need: several times as much as a chunk holds."""


def make_changes(make: Make, path: Path) -> None:
    """Create a shard with all changes, and close it."""
    engine = make().open_shard(path, KEYSPACES, create=True)
    engine.write(filled()[0])
    for group, change in enumerate(CHANGES.values()):
        engine.write(changed(group, change))
    engine.close()


class LifeCycles(Fixtures):
    """Tests of openings and closings in any order, by several processes and threads, and of memory left in use."""

    # --- closing, in any order ---

    @requires("persistent")
    def test_a_second_close_touches_nothing_new(self, backend: Backend, shard: Path) -> None:
        """Closing an engine again, or dropping it, changes nothing for an engine that opened the shard afterwards."""
        first = backend.open_shard(shard, KEYSPACES, create=True)
        put(first, DATA, numbered(300))
        old: Any = first.snapshot()
        scan: Any = first.scan(DATA)
        next(scan)
        first.close()
        second = backend.open_shard(shard, KEYSPACES, create=False)
        view, begun = second.snapshot(), second.scan(DATA)
        chunk = next(begun)
        for end in (first.close, scan.close, old.close, first.close):
            end()
        with pytest.raises(EngineError):
            backend.open_shard(shard, KEYSPACES, create=False)
        del first, scan, old
        gc.collect()
        put(second, DATA, {(1, 3, 0): b"more"})
        assert list(numbered(300).items()) == pairs(view.scan(DATA)) == chunk + pairs(begun)
        assert second.get(DATA, (1, 3, 0)) == b"more"
        with pytest.raises(EngineError):
            backend.open_shard(shard, KEYSPACES, create=False)
        second.close()
        backend.open_shard(shard, KEYSPACES, create=False).close()

    def test_siblings_stay_when_one_is_closed(self, backend: Backend, directory: Path) -> None:
        """Several engines of a backend are closed in any order, each twice; the open ones are not affected."""
        for number, order in enumerate(permutations(range(3))):
            engines = [backend.open_shard(directory / f"{number}-{n}", KEYSPACES, create=True) for n in range(3)]
            for n, engine in enumerate(engines):
                put(engine, DATA, {(1, 2, at): b"%d" % n for at in range(150)})
            views = [(engine.snapshot(), engine.scan(DATA)) for engine in engines]
            begun = [next(scan) for _, scan in views]
            for place, closed in enumerate(order):
                engines[closed].close()
                engines[closed].close()
                for n in order[place + 1 :]:
                    expected = [((1, 2, at), b"%d" % n) for at in range(150)]
                    assert expected == pairs(views[n][0].scan(DATA)), f"after {order[: place + 1]} were closed"
                    assert engines[n].get(DATA, (1, 2, 7)) == b"%d" % n
                    put(engines[n], STATE, {b"still": b"here"}, sync=True)
                    engines[n].flush_log()
                for n in order[place + 1 : place + 2]:
                    assert len(begun[n] + pairs(views[n][1])) == 150

    def test_views_stay_when_another_is_closed(self, engine: Engine, every: int) -> None:
        """Snapshots and scans are closed in any order, each twice; the engine's open views are not affected."""
        for order in [*permutations(range(4))][::every]:
            batch, model = filled()
            engine.write(batch)
            snapshots = [engine.snapshot() for _ in range(2)]
            scans: list[Any] = [snapshots[0].scan(DATA), engine.scan(DATA), snapshots[1].scan(DATA)]
            for scan in scans:
                next(scan)
            views: list[Any] = [*snapshots, *scans[:2]]
            for closed in order:
                views[closed].close()
                views[closed].close()
                left = [n for n in range(2) if n not in order[: order.index(closed) + 1]]
                for n in left:
                    assert model.get_many(META, [key_of(META, 4)]) == snapshots[n].get_many(META, [key_of(META, 4)])
                    assert len(keys(snapshots[n].scan(DATA))) == len(model.maps["data"])
            with pytest.raises(DatabaseClosedError):
                snapshots[0].get(DATA, (1, 2, 0))
            assert len(keys(engine.scan(DATA))) == len(model.maps["data"])

    def test_many_may_close_at_once(self, backend: Backend, directory: Path) -> None:
        """Closes by several threads at the same time all return, and only when the shard can be opened again."""
        for turn in range(5):
            engine = backend.open_shard(directory / "shard", KEYSPACES, create=turn == 0)
            put(engine, DATA, numbered(200))

            def close(engine: Engine = engine) -> None:
                engine.close()
                with pytest.raises(DatabaseClosedError):
                    engine.get(DATA, (1, 2, 3))

            together(close, close, close)
            backend.open_shard(directory / "shard", KEYSPACES, create=False).close()

    @requires("persistent")
    def test_shards_open_and_close_without_a_write(self, backend: Backend, shard: Path) -> None:
        """A shard keeps all pairs when it is opened, for writing or read-only, and closed many times."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        engine.close()
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        batch, model = filled()
        engine.write(batch)
        engine.close()
        for turn in range(6):
            open_ = backend.open_shard if turn % 2 else backend.open_reader
            how: dict[str, Any] = {"create": False} if turn % 2 else {"alone": True}
            with closing(open_(shard, KEYSPACES, **how)) as again:
                for keyspace in KEYSPACES:
                    assert sorted(model.maps[keyspace.name].items()) == pairs(again.scan(keyspace)), keyspace.name

    @requires("persistent")
    def test_engines_hold_their_own_state(self, backend: Backend, subject: BackendSubject, directory: Path) -> None:
        """A shard's contents don't depend on the other shards, or on the backend object, that a process has open."""
        first = backend.open_shard(directory / "a", KEYSPACES, create=True)
        second = subject.make().open_shard(directory / "b", KEYSPACES, create=True)
        put(first, META, {b"k": b"first"})
        put(second, META, {b"k": b"second", b"l": b"second"})
        assert [first.get(META, b"l"), second.get(META, b"k")] == [None, b"second"]
        first.close()
        moved = (directory / "a").rename(directory / "moved")
        first = subject.make().open_shard(moved, KEYSPACES, create=False)
        assert [pairs(each.scan(META)) for each in (first, second)] == [
            [(b"k", b"first")],
            [(b"k", b"second"), (b"l", b"second")],
        ]
        first.close()
        second.close()

    # --- other processes and threads ---

    @requires("persistent")
    def test_another_process_wrote_the_shard(
        self, backend: Backend, subject: BackendSubject, shard: Path, every: int
    ) -> None:
        """A shard that a process with another hash seed wrote is read by every method, and can be written on."""
        model = self._model()
        for number, seed in enumerate(SEEDS[: tries(1, 2)]):
            path = shard.with_name(f"shard-{number}")
            child.run(subject.make, make_changes, path, seed=seed)
            with closing(backend.open_shard(path, KEYSPACES, create=False)) as engine:
                check_groups(model, engine, "another process wrote it", 4 * every)

    @pytest.fixture
    def every(self, subject: BackendSubject) -> int:
        """Return n, so that every n-th change is checked; see `every_change`."""
        return every_change(subject)

    @staticmethod
    def _model() -> Any:
        _, model = filled()
        for group, change in enumerate(CHANGES.values()):
            model.apply(changed(group, change))
        return model

    def test_threads_get_their_own_answers(self, engine: Engine, subject: BackendSubject) -> None:
        """Threads that read at the same time, of one engine or one snapshot, each get their own answers."""
        count = 600
        put(engine, DATA, {(1, 2, number): unlike(40, number) for number in range(count)})
        rounds = tries(12, 100, subject.capabilities)
        with engine.snapshot() as snapshot:

            def read(mine: int, reader: Reader) -> list[str]:
                wrong = []
                own = [(1, 2, number) for number in range(mine, count, 4)]
                values = [unlike(40, number) for number in range(mine, count, 4)]
                for turn in range(rounds):
                    if values != reader.get_many(DATA, own):
                        wrong.append("get_many")
                    if values[turn] != reader.get(DATA, own[turn]):
                        wrong.append("get")
                    span = (1, 2, 100 * mine), (1, 2, 100 * mine + 100)
                    if list(range(100 * mine, 100 * mine + 100)) != [key[2] for key in keys(reader.scan(DATA, *span))]:
                        wrong.append("scan")
                return wrong

            works = [partial(read, mine, of) for mine, of in enumerate((engine, snapshot, engine, snapshot))]
            assert [[]] * 4 == together(*works)

    # --- memory ---

    def test_nothing_that_is_done_stays_in_memory(self, engine: Engine, subject: BackendSubject) -> None:
        """Memory doesn't grow with the number of reads, scans, snapshots and writes over old values."""
        put(engine, DATA, numbered(50))
        times = tries(200, 100_000) if "fast_seek" in subject.capabilities else tries(50, 1_000)

        def scan_some(_: int) -> None:
            next(engine.scan(DATA))

        def look(_: int) -> None:
            with engine.snapshot() as snapshot:
                snapshot.get(DATA, (1, 2, 3))
                next(snapshot.scan(DATA, reverse=True))

        works: dict[str, Callable[[int], object]] = {
            "get": lambda number: engine.get(DATA, (1, 2, number)),
            "get_many": lambda number: engine.get_many(DATA, [(1, 2, number), (1, 2, number % 50)]),
            "scan": lambda number: pairs(engine.scan(DATA, (1, 2, number % 50), limit=3)),
            "half a scan": scan_some,
            "a snapshot": look,
            "info": lambda _: engine.info(),
        }
        if "persistent" in subject.capabilities:  # other engines keep all values in Python's memory
            works["a write"] = lambda number: put(engine, DATA, {(1, 2, number % 50): b"%d" % number})
        for name, work in works.items():
            kept = kept_by(work, times)
            assert kept < times // 2, f"{name}: {times:,} calls keep {kept:,} blocks of memory"

    def test_a_scan_holds_a_chunk_at_a_time(self, engine: Engine) -> None:
        """The first chunk of a scan, and a snapshot, need the memory of about one chunk, however much is stored."""
        for number in range(24):
            put(engine, DATA, {(1, number, row): unlike(65_000, row) for row in range(16)})
        gc.collect()
        begins: dict[str, Callable[[], object]] = {
            "scan": lambda: next(engine.scan(DATA)),
            "scan in reverse": lambda: next(engine.scan(DATA, reverse=True)),
            "snapshot": lambda: next(engine.snapshot().scan(DATA)),
        }
        for name, begin_ in begins.items():
            tracemalloc.start()
            try:
                begin_()
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < FIRST_CHUNKS, f"{name}: {peak:,} bytes for the first chunk of 25 MB"

    def test_openings_stay_out_of_memory(self, backend: Backend, directory: Path, subject: BackendSubject) -> None:
        """Memory doesn't grow with the number of shards that were opened, used and closed."""

        def use(number: int) -> None:
            engine = backend.open_shard(directory / f"{number % 3}", KEYSPACES, create=True)
            put(engine, DATA, numbered(20))
            next(engine.scan(DATA))
            engine.snapshot()
            engine.close()

        times = tries(8, 40, subject.capabilities)
        kept = kept_by(use, times, 6)
        assert kept < 25 * times, f"{times} openings keep {kept:,} blocks of memory"
