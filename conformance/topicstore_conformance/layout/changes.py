"""Tests of all combinations of two successive changes and a way of reading after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from topicstore import Message, TopicFilter
from topicstore.contract.engine import KEYSPACES, Engine, WriteBatch
from topicstore_backends.memory import MemoryBackend, MemoryOptions

from topicstore_conformance.backend import child
from topicstore_conformance.conditions.tries import MODE, tries
from topicstore_conformance.faults.clock import pass_a_day
from topicstore_conformance.faults.memory import kept_by
from topicstore_conformance.subjects.subject import LayoutSubject

from .fixtures import SHARD, START, Fixtures, Reader, Stored, numbered, plenty, rows_of
from .heads import counted, expected
from .reading import FILTERS, TOPICS

__all__ = ["Changes"]

SEEDS = (1, 4_294_967_295)
"""Hash seeds (``PYTHONHASHSEED``) of other processes."""


def _first_half(stored: Stored) -> None:
    stored.delete("f/x/#", 0, stored.rows[len(stored.rows) // 2][0])


def _all_but(stored: Stored) -> None:
    stored.delete("#", 0, stored.rows[-30][0] if len(stored.rows) > 120 else 0, ["f/y/3/s", "$SYS/#"])


CHANGES: dict[str, Callable[[Stored], object]] = {
    "a batch": lambda stored: stored.put(numbered(TOPICS, 31)),
    "a batch with gaps": lambda stored: stored.put(numbered(TOPICS[::-1], 12), 700),
    "a batch of one topic": lambda stored: stored.put(numbered(["f/y/3/s"], 9)),
    "a batch that failed": lambda stored: stored.fail(numbered(["f/lost/1/t", *TOPICS[:4]], 10)),
    "a delete of some topics": _first_half,
    "a delete that spares topics": _all_but,
    "a compaction": lambda stored: stored.compact(),
    "a compaction in part": lambda stored: stored.compact(stored.rows[len(stored.rows) // 2][0], whole=False),
    "a reopening": lambda stored: stored.reopen(),
}
"""All kinds of changes, by name."""


def pairs_in_turn(count: int) -> Iterator[int]:
    """Yield numbers below ``count``, so that each directly follows every number, including itself, at least once."""
    for number in range(count):
        yield number
        yield number
        for other in range(number + 1, count):
            yield other
            yield number


def check_heads(stored: Stored, text: str) -> None:
    """Compare a filter's message heads with the expected messages, if the slab reads heads."""
    if not stored.slab.reads_heads:
        return
    before = -1
    for heads in stored.slab.heads(TopicFilter(text), 0, stored.last):
        assert heads.before == before
        assert expected(stored, text, heads) == counted(heads), f"heads of {text!r}"
        before = heads.last
    assert before == stored.last


def dump(stored: Stored, path: Path) -> None:
    """Write all pairs of an engine to a file."""
    found = [(k.name, key, value) for k in KEYSPACES for chunk in stored.engine.scan(k) for key, value in chunk]
    path.write_bytes(msgspec.msgpack.encode(found))


def loaded(path: Path) -> Engine:
    """Return an engine in memory with the pairs of a file."""
    engine = MemoryBackend(MemoryOptions()).open_shard(path, KEYSPACES, create=True)
    by_name = {keyspace.name: keyspace for keyspace in KEYSPACES}
    write = WriteBatch()
    for name, key, value in msgspec.msgpack.decode(path.read_bytes()):
        write.put(by_name[name], key if by_name[name].shape is None else tuple(key), value)
    engine.write(write)
    return engine


def read_elsewhere(make: Any, path: Path, generation: int, last: int, asked: str) -> None:
    """Continue at places in another process; report the positions read from each, and the place of a new reader."""
    slab = make().open(loaded(path), SHARD, generation)
    for text, stream, place in msgspec.json.decode(asked):
        rest, began = [], slab.begin(stream, TopicFilter(text), 0)
        at, exhausted = bytes.fromhex(place), False
        while not exhausted:
            step = slab.next(stream, TopicFilter(text), at, plenty(last))
            rest += [position for position, _ in rows_of(step.batch)]
            at, exhausted = step.place, step.exhausted
        half = slab.next(stream, TopicFilter(text), began, plenty(last, limit=17))
        child.tell([rest, [position for position, _ in rows_of(half.batch)], half.place.hex()])
    child.tell([sorted(slab.cover(TopicFilter(text))) for text in FILTERS])
    child.end()


class Changes(Fixtures):
    """Tests of the product of readings and changes, also by later and by other processes."""

    def test_every_reading_after_every_change(self, stored: Stored) -> None:
        """After two changes of any two kinds, every way of reading returns exactly the expected messages."""
        for _ in range(3):
            stored.put(numbered(TOPICS, 60))
        names = list(CHANGES)
        turns = tries(len(names) * (len(names) + 1), 1_000, stored.subject.backend_capabilities)
        for turn, number in enumerate(islice(pairs_in_turn(len(names)), turns)):
            CHANGES[names[number]](stored)
            try:
                self._read(stored, turn, listed=names[number] != "a batch that failed")
            except AssertionError as error:
                error.add_note(f"It was wrong after {names[number]}.")
                raise
        stored.check_all()

    @staticmethod
    def _read(stored: Stored, turn: int, *, listed: bool) -> None:
        """Read everything, and in turn by one filter and one kind of limit, and with ``listed`` all its streams."""
        assert (len(stored.rows), []) == stored.verify()
        text, middle = FILTERS[turn % len(FILTERS)], stored.rows[len(stored.rows) // 2][0]
        how: dict[str, Any] = ({}, {"limit": 7}, {"limit_bytes": 60}, {"deadline": 0.0})[turn % 4]
        for one in (*stored.everything(), text):
            stored.check(one)
        stored.check(text, middle, **how)
        stored.check(text, 0, middle, **how)
        got = [row for rows in stored.streams_of(text).values() for row in rows] if listed and turn % 3 == 0 else None
        assert got is None or stored.wanted(text) == sorted(got, key=lambda row: row[0])
        for one in dict.fromkeys(("#", text)):  # always the same filter, so that a layout may cache its heads
            check_heads(stored, one)

    def test_old_places_after_every_change(self, stored: Stored) -> None:
        """A reader's place stays valid after two changes of any two kinds, without gaps or repeats."""
        for _ in range(3):
            stored.put(numbered(TOPICS, 60))
        readers = stored.readers(FILTERS)
        deleted: set[int] = set()
        for turn, number in enumerate(pairs_in_turn(len(CHANGES))):
            before = {position for position, _ in stored.rows}
            list(CHANGES.values())[number](stored)
            stored.end_epoch()
            deleted |= before - {position for position, _ in stored.rows}
            for reader in readers[turn % 4 :: 4]:
                reader.step(stored.last, limit=9)
        for reader in readers:
            reader.read(stored.last, limit=50)
        stored.check_read(readers, deleted)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_places_work_in_other_processes(
        self, stored: Stored, subject: LayoutSubject, tmp_path: Path, seed: int
    ) -> None:
        """A place continues at the same message in every process that opens the slab, whatever its hash seed."""
        if not child.importable(subject.make):
            pytest.skip("another process can't import what makes the layout")
        for gap in (1, 30):
            stored.put(numbered(TOPICS, 90), gap)
        stored.compact()
        stored.put(numbered(TOPICS, 60))
        if stored.as_rows:
            pytest.skip("the layout keeps rows, which are not copied to another process")
        readers = stored.readers(FILTERS)
        for reader in readers:
            reader.step(stored.last, limit=13)
        dump(stored, tmp_path / "pairs")
        asked = msgspec.json.encode([(r.text, r.stream, r.place.hex()) for r in readers]).decode()
        *told, covers = child.run(
            subject.make, read_elsewhere, tmp_path / "pairs", stored.generation, stored.last, asked, seed=seed
        )
        assert covers == [sorted(stored.slab.cover(TopicFilter(text))) for text in FILTERS]
        for reader, (rest, half, place) in zip(readers, told, strict=True):
            whole = [position for position, _ in Reader(stored, reader.stream, reader.text).read(stored.last)]
            first = [position for position, _ in reader.got]
            assert whole == first + rest, f"a place of {reader.text!r} that was taken to another process"
            back = Reader(stored, reader.stream, reader.text)
            back.place = bytes.fromhex(place)
            assert whole == half + [position for position, _ in back.read(stored.last)], (
                f"one from there, {reader.text!r}"
            )

    def test_any_number_of_places_is_held(
        self, stored: Stored, subject: LayoutSubject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A place stays valid, however old it is and however many other places exist."""
        for _ in range(3):
            stored.put(numbered(TOPICS, 60))
        readers = stored.readers(FILTERS)
        for reader in readers:
            reader.step(stored.last, limit=5)
        pass_a_day(monkeypatch)
        for reader in readers[::2]:
            reader.read(stored.last, limit=50)
        streams = [(reader.stream, reader.filter) for reader in readers]
        for number in range(tries(4_200, 70_000, subject.backend_capabilities)):
            stream, topic_filter = streams[number % len(streams)]
            stored.slab.begin(stream, topic_filter, START + number)
        for reader in readers[1::2]:
            reader.read(stored.last, limit=50)
        stored.check_read(readers)

    # --- limits, when nothing is found and when everything is ---

    def test_limits_when_nothing_is_found(self, stored: Stored) -> None:
        """With any limits, readers that find no message reach the end in few calls, and later read new messages."""
        for gap in (1, 40):
            stored.put(numbered(TOPICS, 120), gap)
        stored.compact()
        stored.put(numbered(TOPICS, 60))
        stored.end_epoch()
        filters = ("f/none/+/s", "f/+/none/#", "none", "none/#", "$none/#", "+/+/+/+/+", "f/x/1/none")
        every = ({"limit": 1, "limit_bytes": 1, "deadline": 0.0}, {"limit": 1}, {"limit_bytes": 1}, {"deadline": 0.0})
        for how in every[: tries(4, 4, stored.subject.backend_capabilities)]:
            for text in filters[: tries(7, 7, stored.subject.backend_capabilities)]:
                for stream in stored.slab.cover(TopicFilter(text)):
                    reader = Reader(stored, stream, text)
                    assert [] == reader.read(stored.last, **how)
                    assert len(reader.calls) <= len(stored.rows) + 2, f"{len(reader.calls)} calls to find nothing"
            for first, bound in ((stored.last, stored.last), (stored.last + 1, stored.last), (0, START), (0, 0)):
                stored.check("#", first, bound, **how)
                stored.check("f/y/3/s", first, bound, **how)
        readers = stored.readers(FILTERS)
        for reader in readers:
            reader.read(stored.last, limit=1, deadline=0.0)
        stored.put(numbered(TOPICS, 40))
        stored.end_epoch()
        for reader in readers:
            reader.read(stored.last, limit=1)
        stored.check_read(readers)
        stored.put([Message("none", b"", "c"), Message("f/x/1/none", b"", "c")])
        for text in filters:
            stored.check(text, limit=1, deadline=0.0)

    def test_limits_when_everything_is_found(self, stored: Stored) -> None:
        """A limit of the exact number of stored rows or bytes, or of one less or more, loses and repeats no message."""
        for size in (1, 100, 3_000):
            stored.put(numbered(["a", "b"], 60, size))
        stored.compact()
        stored.end_epoch()
        for text in ("#", "a"):
            count = len(stored.wanted(text))
            total = sum(len(message.payload) for _, message in stored.wanted(text))
            for by in (-1, 0, 1):
                stored.check(text, limit=count + by)
                stored.check(text, limit=count // 3 + by)
                stored.check(text, limit_bytes=total + by)
                stored.check(text, limit_bytes=3_000 + by)

    def test_a_slab_without_messages(self, stored: Stored) -> None:
        """A slab without committed messages returns none from any call, even with the bound -1, and can store some."""
        for _ in range(2):
            for bound in (-1, 0, START):
                assert stored.verify(bound) == (0, [])
                assert stored.compact(bound) == 0
                for text in FILTERS:
                    for stream in stored.slab.cover(TopicFilter(text)):
                        assert Reader(stored, stream, text).read(bound) == []
                        assert stored.slab.visible(stream, bound) <= bound
            assert stored.delete("#") == 0
            assert stored.slab.backlog(0) == 0
            stored.reopen()
        stored.put(numbered(TOPICS, 1))
        stored.check_all()

    # --- memory ---

    def test_nothing_that_is_read_stays_in_memory(self, stored: Stored, subject: LayoutSubject) -> None:
        """Memory doesn't grow with the number of readers, places, openings and calls, whatever they request."""
        stored.put(numbered(TOPICS, 60))
        stored.compact()
        quick_seeks = "fast_seek" in subject.backend_capabilities
        times = tries(300, 20_000) if quick_seeks else tries(75, 500)

        few = MODE == "quick" or not quick_seeks  # so that caches are full before the count begins

        def read(number: int) -> None:
            asked = number % 40 if few else number
            topic_filter = TopicFilter(f"f/+/{asked}/t" if asked % 2 else "f/+/3/t")
            for stream in stored.slab.cover(topic_filter):
                place = stored.slab.begin(stream, topic_filter, START + number)
                stored.slab.next(stream, topic_filter, place, plenty(stored.last, limit=3))

        works: dict[str, Callable[[int], object]] = {
            "reading": read,
            "listing streams": lambda number: stored.slab.streams(TopicFilter(f"f/{number % 40 if few else number}/#")),
            "opening": lambda _: stored.reopen(),
            "statistics": lambda _: (stored.slab.info(), stored.slab.backlog(60)),
        }
        for name, work in works.items():
            kept = kept_by(work, times, 50 if few else 10_000)
            assert kept < times // 2, f"{name}: {times:,} calls keep {kept:,} blocks of memory"
