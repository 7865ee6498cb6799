"""Fixtures shared by all tests of layouts: a slab on an engine, with a list of its messages as the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import attrs
import msgspec
import numpy as np
import pytest
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import to_list
from topicstore.contract.engine import (
    DATA,
    GENERATION_END,
    INDEX,
    KEYS,
    KEYSPACES,
    META,
    Engine,
    Key,
    Keyspace,
    WriteBatch,
)
from topicstore.contract.engine import encode_generation as prefix
from topicstore.contract.layout import CompactStep, Damage, DeleteStep, ReadLimits, Slab, SlabStep

from topicstore_conformance.conditions.capabilities import check_capabilities
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.oracle.model import match
from topicstore_conformance.subjects.subject import LayoutSubject

__all__ = [
    "SHARD",
    "START",
    "Fixtures",
    "Reader",
    "Row",
    "Stored",
    "matches_pattern",
    "numbered",
    "plenty",
    "rows_of",
    "span",
]

SHARD, GENERATION = 4, 2
START = 1 << 60
"""A position below all positions of the tests, and a multiple of every epoch's length."""
ABOUT = 1 << 20
"""The bytes by which a result may exceed its limit: a layout may only end it between blocks of a megabyte."""
VALUES = (DATA, INDEX, KEYS)
"""The keyspaces in which a layout stores messages; its learned structure is in ``meta``."""

Row = tuple[int, Message]
"""A position and the message stored at it."""


def numbered(topics: Sequence[str], count: int, size: int = 8) -> list[Message]:
    """Return ``count`` messages with cyclic topics, from three publishers, with distinct payloads of ``size`` bytes."""
    return [
        Message(topics[n % len(topics)], n.to_bytes(size, "big"), f"c{n % 3}", n % 3, n % 2 == 0) for n in range(count)
    ]


def span(keyspace: Keyspace[Any], generation: int) -> tuple[Key, Key]:
    """Return the bounds of a generation's keys: inclusive, exclusive."""
    if keyspace.shape is None:
        return prefix(generation), prefix(generation + 1)
    return (generation, 0, 0), (generation + 1, 0, 0)


def rows_of(batch: MessageBatch, shard: int = SHARD) -> list[Row]:
    """Return the rows of a batch that a slab returned, and check its shard numbers."""
    if not len(batch):
        return []
    assert batch.shards is not None
    assert [shard] * len(batch) == to_list(batch.shards)
    return list(zip(map(int, batch.positions), batch.to_messages(), strict=True))


@attrs.define
class Stored:
    """A slab and the list of its messages; each change is made in both."""

    subject: LayoutSubject
    engine: Engine
    generation: int = GENERATION
    last: int = START
    shard: int = SHARD
    rows: list[Row] = attrs.field(factory=list)
    slab: Slab = attrs.field(init=False)
    as_rows: bool = False
    """Whether messages were stored as rows of a table, whose sizes are unknown here."""

    def create(self, parent: Slab | None = None) -> None:
        """Create the slab, with learned structure inherited from ``parent``."""
        write = WriteBatch()
        self.subject.make().create(self.engine, self.shard, self.generation, parent, write)
        self.engine.write(write)
        self.reopen()

    def reopen(self) -> None:
        """Open the slab again with a new layout object."""
        self.slab = self.subject.make().open(self.engine, self.shard, self.generation)

    # --- writing ---

    def place(
        self, messages: Iterable[Message], gap: int = 1, *, arrow: bool = False
    ) -> tuple[MessageBatch, list[Row]]:
        """Return messages as a batch whose positions follow the last stored one, ``gap`` apart, and as rows."""
        filled = [
            msgspec.structs.replace(m, timestamp=self.last >> 11 if m.timestamp is None else m.timestamp)
            for m in messages
        ]
        batch = MessageBatch.from_messages(filled)
        if arrow:
            batch = MessageBatch.from_arrow(batch.to_arrow())
        positions = np.arange(1, len(batch) + 1, dtype=np.uint64) * np.uint64(gap) + np.uint64(self.last)
        return batch.placed(positions, batch.timestamps, self.shard), list(zip(positions.tolist(), filled, strict=True))

    def put(self, messages: Iterable[Message], gap: int = 1, *, arrow: bool = False) -> list[Row]:
        """Store a batch and commit it."""
        batch, rows = self.place(messages, gap, arrow=arrow)
        write = WriteBatch()
        self.slab.store(batch, write)
        self.as_rows = self.as_rows or bool(write.rows)
        self.engine.write(write)
        self.slab.committed()
        self.rows += rows
        self.last = rows[-1][0]
        return rows

    def fail(self, messages: Iterable[Message], gap: int = 1) -> None:
        """Store a batch whose commit fails; check that the slab itself has written nothing."""
        before = self.pairs((*VALUES, META))
        self.slab.store(self.place(messages, gap)[0], WriteBatch())
        assert before == self.pairs((*VALUES, META))

    def lose(self, messages: Iterable[Message]) -> None:
        """Store a batch whose write is lost after the slab was notified of its commit."""
        batch, rows = self.place(messages)
        self.slab.store(batch, WriteBatch())
        self.slab.committed()
        self.last = rows[-1][0]

    def end_epoch(self) -> None:
        """Advance the last position to the end of its epoch, so that all messages are visible."""
        self.last |= self.slab.epoch - 1

    def delete(self, topic_filter: str, first: int = 0, last: int | None = None, spare: Sequence[str] = ()) -> int:
        """Delete a filter's messages from slab and list, except those of the filters ``spare``; return the number."""
        last, before = self.last if last is None else last, len(self.rows)
        deleted = sum(self.commit(self.slab.delete(TopicFilter(topic_filter), first, last, [*map(TopicFilter, spare)])))
        self.forget(topic_filter, first, last, spare)
        assert before - len(self.rows) == deleted, "a delete counts other messages than it should remove"
        return deleted

    def commit(self, steps: Iterable[DeleteStep | CompactStep]) -> list[int]:
        """Commit the steps of a delete or a compaction; return the number of messages of each."""
        size, counts = self.size(), []
        for step in steps:
            assert bool(step.messages) == bool(step.write), "messages and writes belong together"
            self.engine.write(step.write)
            counts.append(step.messages)
            size -= step.freed
        assert size == self.size() or self.as_rows, "what was freed is miscounted"
        return counts

    def forget(self, topic_filter: str, first: int, last: int, spare: Sequence[str] = ()) -> None:
        """Delete matching rows from the list of expected rows, not from the slab."""

        def goes(position: int, topic: str) -> bool:
            matching = match(topic_filter, topic) and not any(match(one, topic) for one in spare)
            return matching and first <= position <= last

        self.rows = [row for row in self.rows if not goes(row[0], row[1].topic)]

    def compact(self, bound: int | None = None, *, whole: bool = True) -> int:
        """Run and commit all steps of a compaction; return the number of rewritten messages."""
        return sum(self.commit(self.slab.compact(self.last if bound is None else bound, whole=whole)))

    # --- reading ---

    def wanted(self, topic_filter: str = "#", first: int = 0, bound: int | None = None) -> list[Row]:
        """Return the rows from ``first`` to ``bound`` (inclusive) that a reader must get, in order of position."""
        bound = self.last if bound is None else bound
        return [row for row in self.rows if first <= row[0] <= bound and match(topic_filter, row[1].topic)]

    def check(self, topic_filter: str = "#", first: int = 0, bound: int | None = None, **limits: Any) -> None:
        """Check that readers of all streams of a filter get exactly the rows that `wanted` returns."""
        self.end_epoch()
        bound = self.last if bound is None else bound
        got: list[Row] = []
        for stream in self.slab.cover(TopicFilter(topic_filter), first):
            got += Reader(self, stream, topic_filter, first).read(bound, **limits)
        expected = self.wanted(topic_filter, first, bound)
        assert expected == sorted(got, key=lambda row: row[0]), "readers don't get exactly the messages that are left"

    def readers(self, filters: Iterable[str]) -> list[Reader]:
        """Return a reader of each stream that covers a filter, for each filter."""
        self.end_epoch()
        return [Reader(self, stream, text) for text in filters for stream in self.slab.cover(TopicFilter(text))]

    def check_read(self, readers: Sequence[Reader], deleted: Collection[int] = ()) -> None:
        """Check that the readers of each filter together got every remaining matching row, and no row twice.

        The readers may also have got rows at the positions ``deleted``, from before the delete.
        """
        for text in {reader.text for reader in readers}:
            got = [row for reader in readers if reader.text == text for row in reader.got]
            assert len({position for position, _ in got}) == len(got)
            left = [row for row in got if row[0] not in deleted]
            assert self.wanted(text) == sorted(left, key=lambda row: row[0])

    def read_all(self) -> None:
        """Check that readers of each filter get the rows that it matches."""
        for topic_filter in self.everything():
            self.check(topic_filter)

    def check_all(self) -> None:
        """Check the rows that readers of each filter get, and the number of messages that `verify` counts."""
        self.read_all()
        assert (len(self.rows), []) == self.verify(), "verify counts other messages than are left"

    def everything(self) -> list[str]:
        """Return filters such that each stored topic matches exactly one of them."""
        levels = {message.topic.partition("/")[0] for _, message in self.rows}
        return ["#", *(f"{level}/#" for level in sorted(levels) if level.startswith("$"))]

    def streams_of(self, topic_filter: str) -> dict[int, list[Row]]:
        """Return the matching rows of each of a filter's streams; check that stream patterns match their topics."""
        self.end_epoch()
        listed = self.slab.streams(TopicFilter(topic_filter))
        found = {info.stream: Reader(self, info.stream, topic_filter).read(self.last) for info in listed}
        assert len(found) == len(listed)
        for info in listed:
            for topic in {message.topic for _, message in found[info.stream]}:
                assert matches_pattern(info.pattern, topic), (info.pattern, topic)
        return found

    def structure(self) -> list[Any]:
        """Return the streams and the learned nodes, sorted; check that parents come before their children."""
        seen: set[tuple[str, ...]] = set()
        nodes = list(self.slab.learned())
        for node in nodes:
            assert len(node.path) <= 1 or node.path[:-1] in seen
            seen.add(node.path)
        streams = {i.stream: i.pattern for text in self.everything() for i in self.slab.streams(TopicFilter(text))}
        for node in nodes:
            assert node.stream not in streams or streams[node.stream] in ("/".join(node.path), "#")
        return [sorted(streams.items()), sorted((node.path, node.stream or 0) for node in nodes)]

    def visible(self, stream: int, watermark: int) -> int:
        """Return a stream's highest visible position.

        Checks that it is not above the watermark, and covers all epochs that have ended.
        """
        epoch, found = self.slab.epoch, self.slab.visible(stream, watermark)
        assert epoch & (epoch - 1) == 0 < epoch
        assert epoch == 1 or "position_order" not in self.subject.capabilities
        assert (watermark + 1) // epoch * epoch - 1 <= found <= watermark
        return found

    def verify(self, bound: int | None = None) -> tuple[int, list[Damage]]:
        """Return the number of undamaged messages, and the reported damage."""
        found = list(self.slab.verify(self.last if bound is None else bound))
        return sum(n for n in found if isinstance(n, int)), [n for n in found if isinstance(n, Damage)]

    # --- directly in the engine ---

    def act(self) -> Acting:
        """Open the slab again on an engine wrapper that can run an action during reads; return the wrapper."""
        acting = Acting(self.engine)
        self.engine = cast("Engine", acting)
        self.reopen()
        return acting

    def pairs(self, keyspaces: Iterable[Keyspace[Any]] = VALUES) -> list[tuple[Keyspace[Any], Key, bytes]]:
        """Return the slab's values in the engine, as (keyspace, key, value)."""
        return [
            (keyspace, key, value)
            for keyspace in keyspaces
            for chunk in self.engine.scan(keyspace, *span(keyspace, self.generation))
            for key, value in chunk
        ]

    def size(self) -> int:
        """Return the total size of the slab's values in bytes."""
        return sum(len(value) for _, _, value in self.pairs())

    def learned_pairs(self) -> list[tuple[Keyspace[Any], Key, bytes]]:
        """Return the values with the slab's learned structure, as (keyspace, key, value)."""
        return self.pairs((META,))

    def replace(self, keyspace: Keyspace[Any], key: Key, value: bytes | None) -> None:
        """Put or delete a value directly in the engine."""
        write = WriteBatch()
        if value is None:
            write.delete(keyspace, key)
        else:
            write.put(keyspace, key, value)
        self.engine.write(write)


def plenty(
    bound: int, *, limit: int = 100_000, limit_bytes: int = 1 << 30, deadline: float | None = None
) -> ReadLimits:
    """Return read limits, by default so large that no test reaches them."""
    return ReadLimits(rows=limit, bytes=limit_bytes, bound=bound, deadline=deadline)


def matches_pattern(pattern: str, topic: str) -> bool:
    """Return whether a topic matches a stream's pattern, in which ``$+`` is any first level that begins with ``$``.

    Unlike in a filter, other wildcards at the first level match such levels, too.
    """
    hidden = pattern.startswith("$+")
    return (not hidden or topic.startswith("$")) and match(f"x/{pattern[hidden:]}", f"x/{topic}")


class Reader:
    """A reader of one stream with one filter, whose place is stored as bytes."""

    def __init__(self, stored: Stored, stream: int, topic_filter: str, first: int = 0) -> None:
        self.stored, self.stream, self.first = stored, stream, first
        self.text, self.filter = topic_filter, TopicFilter(topic_filter)
        self.place = stored.slab.begin(stream, self.filter, first)
        assert type(self.place) is bytes
        self.got: list[Row] = []
        self.calls: list[int] = []
        """The number of rows that each call returned."""
        self.exhausted = False
        self.highest = -1
        self.last: dict[tuple[str, str], int] = {}
        """The last position by publisher and topic."""

    def step(self, bound: int, **limits: Any) -> SlabStep:
        """Read one step with the limits of `plenty`; check the guarantees that hold for every step."""
        asked = plenty(bound, **limits)
        step = self.stored.slab.next(self.stream, self.filter, self.place, asked)
        rows = rows_of(step.batch, self.stored.shard)
        assert len(rows) <= asked.rows, "more rows than the limit"
        assert step.exhausted or step.place != self.place, "neither exhausted nor moved on"
        sizes = [len(message.payload) for _, message in rows]
        assert sum(sizes[:-1]) <= 2 * asked.bytes + ABOUT, "far more bytes than the limit"
        outside = [at for at, _ in rows if not self.first <= at <= bound]
        assert outside == [], "positions in front of the start, or behind the bound"
        assert [message.topic for _, message in rows if not match(self.text, message.topic)] == [], "they don't match"
        self.place, self.exhausted = step.place, step.exhausted
        self.got += rows
        self.calls.append(len(rows))
        self._check_order(rows)
        return step

    def read(self, bound: int, **limits: Any) -> list[Row]:
        """Read until the stream is exhausted; check that it stays exhausted; return the rows."""
        before, calls = len(self.got), 0
        self.exhausted = False
        while not self.exhausted:
            self.step(bound, **limits)
            calls += 1
            assert calls < 10 * len(self.stored.rows) + 1_000, "it never comes to an end"
        end = len(self.got)
        self.step(bound)
        assert self.exhausted, "exhausted once, and not any more"
        assert end == len(self.got), "exhausted, and something lay behind the place"
        return self.got[before:]

    def _check_order(self, rows: list[Row]) -> None:
        """Check that each publisher's messages of a topic come in order of position, and all in order of epoch.

        With the capability ``position_order`` all must come in order of position.
        """
        epoch = 1 if "position_order" in self.stored.subject.capabilities else self.stored.slab.epoch
        for position, message in rows:
            assert self.highest // epoch <= position // epoch, "not in order"
            assert self.last.get((message.client_id, message.topic), -1) < position, "not in their publisher's order"
            self.highest = max(self.highest, position)
            self.last[message.client_id, message.topic] = position


class Acting:
    """A wrapper of an engine, or of its snapshot, that calls a function once, immediately before or after a read.

    Reads of the keyspace ``meta`` don't count, because the slab may hold a lock meanwhile.
    """

    def __init__(self, inner: Any, engine: Acting | None = None) -> None:
        self.inner, self.engine = inner, engine or self
        self.left = -1
        """The remaining number of starts and ends of reads before the action; negative if none is pending."""
        self.action: Callable[[], object] = bool

    def arm(self, moments: int, action: Callable[[], object]) -> None:
        """Call ``action`` once, after ``moments`` further starts and ends of reads; each read has a start and an end.

        A scan has one such moment before its first chunk, and one after each chunk.
        """
        self.left, self.action = moments, action

    def moment(self, *arguments: Any) -> None:
        """Count the start or the end of a read, and call the action if it is due; ignore reads of ``meta``."""
        if META not in arguments:
            self.engine.left -= 1
            if self.engine.left == -1:
                self.engine.action()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("get", "get_many", "snapshot", "sql"):
            return found

        def read(*arguments: Any, **options: Any) -> Any:
            self.moment(*arguments)
            value = found(*arguments, **options)
            self.moment(*arguments)
            return Acting(value, self.engine) if name == "snapshot" else value

        return read

    def scan(self, *arguments: Any, **options: Any) -> Iterator[list[tuple[Key, bytes]]]:
        """Scan the inner engine; count a moment before the first chunk, and one after each."""
        self.moment(*arguments)
        for chunk in self.inner.scan(*arguments, **options):
            self.moment(*arguments)
            yield chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.inner.close()


class Fixtures:
    """Fixtures of all tests of layouts; a subclass overrides ``subject``."""

    @pytest.fixture
    def subject(self) -> LayoutSubject:
        """Return the layout under test."""
        raise NotImplementedError("override the fixture 'subject': it returns a LayoutSubject")

    @pytest.fixture(autouse=True)
    def _declared(self, request: pytest.FixtureRequest, subject: LayoutSubject) -> None:
        check_capabilities(request.function, subject.capabilities)

    @pytest.fixture
    def engine(self, subject: LayoutSubject) -> Iterator[Engine]:
        """Yield an empty engine, and close it afterwards."""
        with quick_directory() as name:
            opened = subject.backend().open_shard(Path(name) / "shard", KEYSPACES, create=True)
            yield opened
            opened.close()

    @pytest.fixture
    def stored(self, subject: LayoutSubject, engine: Engine) -> Stored:
        """Return an empty slab."""
        assert GENERATION < GENERATION_END
        stored = Stored(subject, engine)
        stored.create()
        return stored

    @pytest.fixture
    def fresh(self, subject: LayoutSubject) -> Iterator[Callable[[], Stored]]:
        """Yield a function that creates an empty slab on a new engine, and closes the previous engine."""
        backend = subject.backend()
        with quick_directory() as name:
            engines: list[Engine] = []

            def make() -> Stored:
                if engines:
                    engines.pop().close()
                made = len(list(Path(name).iterdir()))
                engines.append(backend.open_shard(Path(name) / f"shard-{made}", KEYSPACES, create=True))
                stored = Stored(subject, engines[0])
                stored.create()
                return stored

            yield make
            for engine in engines:
                engine.close()
