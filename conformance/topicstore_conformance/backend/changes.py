"""Tests of all combinations of a kind of change and a method that reads after it, in every keyspace.

A change is a batch. After each change, every reading of `READINGS` is made of the engine and of a `Model`, which must
agree. The same readings are made in each keyspace, before the change, and after reclaiming and reopening.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from topicstore.contract.engine import DATA, KEYSPACES, META, Backend, Engine, Keyspace, Reader, WriteBatch
from topicstore.contract.engine import encode_generation as prefix

from topicstore_conformance.conditions.capabilities import requires
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.faults.clock import pass_a_day
from topicstore_conformance.oracle.limits import unlike
from topicstore_conformance.subjects.subject import BackendSubject

from .fixtures import Fixtures, pairs

__all__ = [
    "CHANGES",
    "READINGS",
    "Changes",
    "Model",
    "changed",
    "check",
    "check_groups",
    "every_change",
    "filled",
    "key_of",
]


def key_of(keyspace: Keyspace[Any], number: int, group: int = 1) -> Any:
    """Return the key with this number in a group of keys; keys are in order of their groups and numbers."""
    return (group, 2, number) if keyspace.shape else prefix(group) + b"%07d" % number


class Model:
    """An engine's contents as dictionaries, with an engine's reading methods."""

    def __init__(self) -> None:
        self.maps: dict[str, dict[Any, bytes]] = {keyspace.name: {} for keyspace in KEYSPACES}

    def copy(self) -> Model:
        """Return a copy that later changes don't change."""
        made = Model()
        made.maps = {name: {**values} for name, values in self.maps.items()}
        return made

    def apply(self, batch: WriteBatch) -> None:
        """Apply the range deletes of a batch, and then its other operations in order."""
        for keyspace, start, end in batch.ranges:
            values = self.maps[keyspace.name]
            for key in [key for key in values if start <= key < end]:
                del values[key]
        for keyspace, key, value in batch.operations:
            if value is None:
                self.maps[keyspace.name].pop(key, None)
            else:
                self.maps[keyspace.name][key] = value

    def get(self, keyspace: Keyspace[Any], key: Any) -> bytes | None:
        """Return a value like `Reader.get`."""
        return self.maps[keyspace.name].get(key)

    def get_many(self, keyspace: Keyspace[Any], keys: Sequence[Any]) -> list[bytes | None]:
        """Return values like `Reader.get_many`."""
        return [self.maps[keyspace.name].get(key) for key in keys]

    def scan(
        self,
        keyspace: Keyspace[Any],
        start: Any = None,
        end: Any = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[Any]]:
        """Yield single pairs like `Reader.scan`."""
        values = self.maps[keyspace.name]
        ordered = sorted(values)
        first = 0 if start is None else bisect_left(ordered, start)
        last = len(ordered) if end is None else bisect_left(ordered, end)
        chosen = ordered[first:last][:: -1 if reverse else 1][:limit]
        return ([(key, values[key])] for key in chosen)


# --- readings ------------------------------------------------------------------------------------

Reading = Callable[[Any, Keyspace[Any], Sequence[Any]], Any]
"""A function of a reader, a keyspace, and the keys to read in order, some of which may be missing."""


def _scan(start: int | None, end: int | None, **how: Any) -> Reading:
    """Return a reading by one scan; ``start`` and ``end`` are indices of the asked keys, or None for unbounded."""

    def read(reader: Any, keyspace: Keyspace[Any], asked: Sequence[Any]) -> Any:
        first, last = (None if at is None else asked[max(-len(asked), min(at, len(asked) - 1))] for at in (start, end))
        return pairs(reader.scan(keyspace, first, last, **how))

    return read


def _pages(*, reverse: bool) -> Reading:
    """Return a reading that reads page after page of seven keys."""

    def read(reader: Any, keyspace: Keyspace[Any], asked: Sequence[Any]) -> Any:
        found: list[Any] = []
        start, end = None, None
        # Bounded, so that a scan that repeats a page fails the test instead of running forever.
        for _ in range(len(asked) + 2):
            page = pairs(reader.scan(keyspace, start, end, reverse=reverse, limit=7))
            found += page[1:] if found and not reverse else page
            if not page or (len(page) == 1 and not reverse):
                break
            start, end = (None, page[-1][0]) if reverse else (page[-1][0], None)
        return found

    return read


READINGS: dict[str, Reading] = {
    "get": lambda reader, keyspace, asked: [reader.get(keyspace, key) for key in asked],
    "get_many": lambda reader, keyspace, asked: reader.get_many(keyspace, asked),
    "get_many of repeated keys": lambda reader, keyspace, asked: reader.get_many(
        keyspace, [*asked[::-1], *asked[:9], *asked[:9]]
    ),
    "get_many of one key": lambda reader, keyspace, asked: [reader.get_many(keyspace, [key]) for key in asked[::3]],
    "scan": _scan(None, None),
    "scan in reverse": _scan(None, None, reverse=True),
    "scan from a key": _scan(2, None),
    "scan from a key in reverse": _scan(2, None, reverse=True),
    "scan to a key": _scan(None, -2),
    "scan to a key in reverse": _scan(None, -2, reverse=True),
    "scan between keys": _scan(1, -1),
    "scan between keys in reverse": _scan(1, -1, reverse=True),
    "scan with a limit": _scan(1, None, limit=5),
    "scan with a limit in reverse": _scan(None, -1, limit=5, reverse=True),
    "scan in pages": _pages(reverse=False),
    "scan in pages in reverse": _pages(reverse=True),
    "seek to each key": lambda reader, keyspace, asked: [
        pairs(reader.scan(keyspace, key, limit=1)) for key in asked[::2]
    ],
    "seek to each key in reverse": lambda reader, keyspace, asked: [
        pairs(reader.scan(keyspace, None, key, limit=1, reverse=True)) for key in asked[::2]
    ],
}
"""All ways to read, by name."""


def check(model: Model, reader: Reader, keyspace: Keyspace[Any], what: str, more: Sequence[Any] = ()) -> None:
    """Compare every reading of a keyspace with the model; a failure names the reading and ``what`` was changed.

    more: keys to read besides those of the model.
    """
    asked = sorted({*model.maps[keyspace.name], *more})
    for name, read in READINGS.items():
        same = read(model, keyspace, asked) == read(reader, keyspace, asked)
        assert same, f"{name}, keyspace {keyspace.name!r}: wrong after {what}"


# --- changes -------------------------------------------------------------------------------------

ROWS = 12
"""The number of a group's keys that exist before a change: the even numbers below `2 * ROWS`."""
Change = Callable[[WriteBatch, Keyspace[Any], Callable[[int], Any]], object]
"""A function that adds a change to a batch; the last argument returns the key with a number."""


def _ranges(*spans: tuple[int, int]) -> Change:
    def change(batch: WriteBatch, keyspace: Keyspace[Any], key: Callable[[int], Any]) -> None:
        for start, end in spans:
            batch.delete_range(keyspace, key(start), key(end))

    return change


def _in_turn(*changes: Change) -> Change:
    def change(batch: WriteBatch, keyspace: Keyspace[Any], key: Callable[[int], Any]) -> None:
        for each in changes:
            each(batch, keyspace, key)

    return change


def _put(number: int, value: bytes) -> Change:
    return lambda batch, keyspace, key: batch.put(keyspace, key(number), value)


def _delete(*numbers: int) -> Change:
    def change(batch: WriteBatch, keyspace: Keyspace[Any], key: Callable[[int], Any]) -> None:
        for number in numbers:
            batch.delete(keyspace, key(number))

    return change


CHANGES: dict[str, Change] = {
    "a put of a new key": _put(5, b"new"),
    "a put behind the last key": _put(2 * ROWS + 1, b"new"),
    "a put over an old value": _put(6, b"over"),
    "a put of an empty value over an old one": _put(6, b""),
    "a put of a larger value over an old one": _put(6, unlike(70_000)),
    "a put of the same value": _put(6, b"old 6"),
    "put_many over old and new keys": lambda batch, keyspace, key: batch.put_many(
        keyspace, [key(n) for n in range(4, 9)], [b"many %d" % n for n in range(4, 9)]
    ),
    "change_many that puts and removes": lambda batch, keyspace, key: batch.change_many(
        keyspace, [key(n) for n in range(4, 9)], [b"some", None, None, b"", None]
    ),
    "a delete": _delete(6),
    "a delete of the first and the last key": _delete(0, 2 * ROWS - 2),
    "a delete of a key that is not there": _delete(5, 99),
    "a delete and a put in one batch": _in_turn(_delete(6), _put(6, b"back")),
    "a put and a delete in one batch": _in_turn(_put(6, b"gone"), _put(7, b"gone"), _delete(6, 7)),
    "a range delete from key to key": _ranges((4, 10)),
    "a range delete from gap to gap": _ranges((3, 11)),
    "a range delete of one key": _ranges((6, 7)),
    "a range delete that ends before a key": _ranges((5, 6)),
    "range deletes side by side": _ranges((4, 8), (8, 12)),
    "range deletes across each other": _ranges((4, 10), (2, 6), (9, 13)),
    "an empty and an inverted range delete": _ranges((6, 6), (10, 4)),
    "a range delete of the whole group": _ranges((0, 2 * ROWS)),
    "a range delete and puts within it": _in_turn(_ranges((0, 2 * ROWS)), _put(6, b"in"), _put(9, b"in")),
    "a put over a put of the same batch": _in_turn(_put(6, b"first"), _put(6, b"second")),
}
"""All kinds of changes, by name."""


def every_change(subject: BackendSubject) -> int:
    """Return n, so that every n-th change is checked: 1, or more for engines whose reads take milliseconds."""
    return 1 if "fast_seek" in subject.capabilities else tries(40, 12, subject.capabilities)


def filled() -> tuple[WriteBatch, Model]:
    """Return a batch that fills one group of each keyspace for each change, and the model after it."""
    batch, model = WriteBatch(), Model()
    for keyspace in KEYSPACES:
        for group, _ in enumerate(CHANGES):
            for number in range(0, 2 * ROWS, 2):
                batch.put(keyspace, key_of(keyspace, number, group + 1), b"old %d" % number)
    model.apply(batch)
    return batch, model


def changed(group: int, change: Change) -> WriteBatch:
    """Return the batch that makes a change in one group of each keyspace."""
    batch = WriteBatch()
    for keyspace in KEYSPACES:
        change(batch, keyspace, lambda number, keyspace=keyspace: key_of(keyspace, number, group + 1))  # type: ignore[misc]
    return batch


def within(model: Model, group: int) -> Model:
    """Return a model of one group alone."""
    made = Model()
    for keyspace in KEYSPACES:
        first, last = key_of(keyspace, 0, group + 1), key_of(keyspace, 0, group + 2)
        made.maps[keyspace.name] = {k: v for k, v in model.maps[keyspace.name].items() if first <= k < last}
    return made


class Group:
    """A reader of one group of keys: a scan without bounds yields all keys of the group and no others.

    Unless a bound is given, the scan has no start for the first group, and no end for the last one.
    """

    def __init__(self, reader: Reader, group: int) -> None:
        self.reader, self.group = reader, group
        self.get, self.get_many = reader.get, reader.get_many

    def scan(self, keyspace: Keyspace[Any], start: Any = None, end: Any = None, **how: Any) -> Iterator[list[Any]]:
        """Scan a range of the group's keys; by default all of them."""
        start = key_of(keyspace, 0, self.group + 1) if start is None and self.group else start
        end = key_of(keyspace, 0, self.group + 2) if end is None and self.group + 1 < len(CHANGES) else end
        return self.reader.scan(keyspace, start, end, **how)


def check_group(model: Model, reader: Reader, group: int, what: str, every: int = 1) -> None:
    """Compare every reading of one group in each keyspace, or in two if ``every`` is more than 1, with the model."""
    own, some = within(model, group), Group(reader, group)
    for keyspace in KEYSPACES if every == 1 else (META, DATA):
        missing = [key_of(keyspace, number, group + 1) for number in (5, 6, 7, 99)]
        check(own, some, keyspace, what, missing)  # type: ignore[arg-type]


def check_groups(model: Model, reader: Reader, what: str, every: int = 1) -> None:
    """Compare every reading of each keyspace, and of the groups of each ``every``-th change, with the model."""
    for keyspace in KEYSPACES:
        for name in ("scan", "scan in reverse", "get_many"):
            asked = list(model.maps[keyspace.name])
            same = READINGS[name](model, keyspace, asked) == READINGS[name](reader, keyspace, asked)
            assert same, f"{name}, keyspace {keyspace.name!r}: wrong after {what}"
    for group, name in [*enumerate(CHANGES)][::every]:
        check_group(model, reader, group, f"{name}, {what}", every)


class Changes(Fixtures):
    """Tests of the product of readings and changes."""

    @pytest.fixture
    def every(self, subject: BackendSubject) -> int:
        """Return n, so that every n-th change is checked; see `every_change`."""
        return every_change(subject)

    def make_all(self, engine: Engine) -> Model:
        """Fill the engine and make all changes, each in a batch of its own; return the model after them."""
        batch, model = filled()
        engine.write(batch)
        for group, change in enumerate(CHANGES.values()):
            batch = changed(group, change)
            engine.write(batch)
            model.apply(batch)
        return model

    def test_every_reading_after_every_change(self, engine: Engine, every: int) -> None:
        """After each kind of change every reading method shows it in each keyspace, whatever was read before."""
        batch, model = filled()
        engine.write(batch)
        for group, (name, change) in [*enumerate(CHANGES.items())][::every]:
            check_group(model, engine, group, "the first put", every)
            batch = changed(group, change)
            engine.write(batch, sync=group % 5 == 0)
            model.apply(batch)
            check_group(model, engine, group, name, every)
            with engine.snapshot() as snapshot:
                check_group(model, snapshot, group, f"{name}, by a snapshot", every)
        check_groups(model, engine, "all changes", 9 * every)

    def test_old_views_show_no_change(self, engine: Engine, every: int) -> None:
        """A snapshot, read by any method, and a scan that has begun show no later change of any kind."""
        batch, model = filled()
        engine.write(batch)
        before = model.copy()
        snapshot = engine.snapshot()
        scans = [
            (keyspace, reverse, scan, next(scan))
            for keyspace in KEYSPACES
            for reverse in (False, True)
            for scan in (engine.scan(keyspace, reverse=reverse), snapshot.scan(keyspace, reverse=reverse))
        ]
        for group, (name, change) in enumerate(CHANGES.items()):
            engine.write(changed(group, change))
            if group % every == 0:
                check_group(before, snapshot, group, f"{name}, which came after the snapshot", every)
        for keyspace in KEYSPACES:
            first, last = key_of(keyspace, 0, 1), key_of(keyspace, 0, len(CHANGES) + 1)
            engine.reclaim(keyspace, first, last)
        check_groups(before, snapshot, "reclaiming, which came after the snapshot", 4 * every)
        for keyspace, reverse, scan, begun in scans:
            whole = pairs(before.scan(keyspace, reverse=reverse))
            assert whole == begun + pairs(scan), f"a scan of {keyspace.name!r} shows changes that came after it began"
        snapshot.close()

    def test_no_change_is_lost_by_reclaiming(self, engine: Engine, every: int) -> None:
        """Reclaiming changes no answer of any reading method, after any kind of change, nor between two changes."""
        batch, model = filled()
        engine.write(batch)

        def reclaim() -> None:
            for keyspace in KEYSPACES:
                engine.reclaim(keyspace, key_of(keyspace, 0, 1), key_of(keyspace, 0, len(CHANGES) + 1))

        reclaim()
        for group, change in enumerate(CHANGES.values()):
            batch = changed(group, change)
            engine.write(batch)
            model.apply(batch)
            if group % 6 == 0:
                reclaim()
        reclaim()
        reclaim()
        check_groups(model, engine, "reclaiming", every)

    @requires("persistent")
    def test_no_change_is_lost_by_reopening(self, backend: Backend, shard: Path, every: int) -> None:
        """After reopening every reading method shows every kind of change, whether made before or after it."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        batch, model = filled()
        engine.write(batch)
        for group, change in enumerate(CHANGES.values()):
            batch = changed(group, change)
            engine.write(batch)
            model.apply(batch)
            if group % 6 == 5:
                engine.close()
                engine = backend.open_shard(shard, KEYSPACES, create=False)
        engine.close()
        engine = backend.open_shard(shard, KEYSPACES, create=False)
        check_groups(model, engine, "reopening", every)
        engine.close()
        with closing(backend.open_reader(shard, KEYSPACES, alone=True)) as reader:
            check_groups(model, reader, "opening to read", 3 * every)

    @requires("checkpoint")
    def test_every_change_is_in_a_checkpoint(
        self, engine: Engine, backend: Backend, directory: Path, every: int
    ) -> None:
        """A checkpoint shows every kind of change that came before it, by every reading method."""
        model = self.make_all(engine)
        engine.checkpoint(directory / "copy")
        with closing(backend.open_shard(directory / "copy", KEYSPACES, create=False)) as copy:
            check_groups(model, copy, "a checkpoint", 2 * every)

    @requires("concurrent_readers")
    def test_a_reader_beside_its_writer_stays(self, backend: Backend, shard: Path, every: int) -> None:
        """A reader that was opened while another engine writes shows every earlier change, and no later one."""
        engine = backend.open_shard(shard, KEYSPACES, create=True)
        model = self.make_all(engine)
        with closing(backend.open_reader(shard, KEYSPACES, alone=False)) as reader:
            for keyspace in KEYSPACES:
                batch = WriteBatch()
                batch.delete_range(keyspace, key_of(keyspace, 0, 1), key_of(keyspace, 0, len(CHANGES)))
                batch.put(keyspace, key_of(keyspace, 1, 99), b"later")
                engine.write(batch)
                engine.reclaim(keyspace, key_of(keyspace, 0, 1), key_of(keyspace, 0, 200))
            check_groups(model, reader, "the writer's later changes", 2 * every)
        engine.close()

    def test_frozen_views_do_not_age(
        self, engine: Engine, subject: BackendSubject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A snapshot and an open scan never change, however old they are and however many others are open."""
        batch, model = filled()
        engine.write(batch)
        snapshot, scan = engine.snapshot(), engine.scan(KEYSPACES[2])
        first = next(scan)
        pass_a_day(monkeypatch)
        for number in range(tries(1_100, 11_000, subject.capabilities)):
            if number % 100 == 0:
                engine.write(changed(number % len(CHANGES), CHANGES["a range delete and puts within it"]))
            with engine.snapshot() as other:
                other.get(KEYSPACES[2], key_of(KEYSPACES[2], 5))
        pass_a_day(monkeypatch)
        check_groups(model, snapshot, "a long time", 8 * every_change(subject))
        assert pairs(model.scan(KEYSPACES[2])) == first + pairs(scan), "the scan changed after a long time"
        snapshot.close()
