"""A Hypothesis state machine that makes every call of a database, in any order, and compares it with a model.

The machine sets the clock, which jumps forward and back. Consumers read streams with cursors that are serialized and
parsed at every step. If the database is persistent, some calls are interrupted by a kill or a full disk. After such a
call each shard holds its part of the batch whole or not at all.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import topicstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from topicstore import Message, MessageId, StateWrite
from topicstore.contract.replay_plan import Order
from topicstore.plugins import registry

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.clock import START
from topicstore_conformance.faults.striking import Fault, faults, striking
from topicstore_conformance.oracle import strategies
from topicstore_conformance.oracle.checks import check_all, check_replay, drain, follow_epochs, replayed
from topicstore_conformance.oracle.model import Model, Row, match
from topicstore_conformance.subjects.pairs import Pair, layouts_on, quick_options, small_options

__all__ = ["DatabaseMachine"]

T = TypeVar("T")
_SKEW = 5.0
_STEPS = (0, 1, 2, 1_000, 999_999, 1_000_000, 60_000_000)
_KEYS = (b"\x02", b"a", b"a\0", b"ab", b"b", b"\xff", b"\xff\xff", b"key")


@attrs.define
class Consumer:
    """A reader of the messages that match a filter, from a start time in microseconds, stream by stream."""

    topic_filter: str
    start: int
    places: dict[tuple[int, int, int], bytes]
    """The saved cursors, by shard, generation and stream."""
    seen: list[MessageId]


class DatabaseMachine(RuleBasedStateMachine):
    """A state machine over one database. Subclass it with ``pair`` set."""

    pair: Pair

    def __init__(self) -> None:
        super().__init__()
        self.temporary = quick_directory()
        self.directory = Path(self.temporary.name)
        self.now = START
        self.consumers: list[Consumer] = []

    @initialize(
        shards=st.sampled_from((1, 1, 3)),
        durability=st.sampled_from(("commit", "sync")),
        timestamps=st.sampled_from(("commit", "message")),
        late=st.sampled_from(("raise", "lift", "lift")),
        small=st.sampled_from((True, True, False)),
        first=st.lists(strategies.messages(times=st.none()), min_size=1, max_size=12),
    )
    def create(
        self, shards: int, durability: str, timestamps: str, late: str, small: bool, first: list[Message]
    ) -> None:
        """Create a database with some messages in it."""
        self.db = self.pair.open(
            self.directory / "db",
            shards=shards,
            durability=durability,
            timestamps=timestamps,
            late=late,
            max_skew=_SKEW,
            options={self.pair.layout: self.pair.small()} if small else None,
            auto_compact=False,
            clock=lambda: self.now,
        )
        self.model = Model(
            shards=shards,
            shard_of=self.db.shard_of,
            layout=self.pair.layout,
            timestamps=timestamps,
            late=late,
            max_skew=_SKEW,
        )
        self.db.store(first)
        self.model.store(first, self.now)
        self.consumers.append(Consumer("#", 0, {}, []))

    def teardown(self) -> None:
        """Close and remove the database."""
        if hasattr(self, "db"):
            self.db.close()
        self.temporary.cleanup()

    # --- writing ---

    def _time(self, offset: int | None) -> int | None:
        return None if offset is None else self.now + offset

    def _messages(self, drawn: list[tuple[Message, int | None]]) -> list[Message]:
        """Return the drawn messages with timestamps near the machine's clock."""
        return [
            Message(m.topic, m.payload, m.client_id, m.qos, m.retain, self._time(offset), m.properties)
            for m, offset in drawn
        ]

    _drawn = st.lists(
        st.tuples(
            strategies.messages(),
            st.none() | st.sampled_from((0, 0, 1, 2_000, -1, -2_000_000, 4_999_999, 5_000_000, 5_000_001)),
        ),
        min_size=1,
        max_size=8,
    )

    def _as_stored(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages without the fields that a transform may store in another form."""
        if not self.pair.plugins:
            return list(messages)
        return [Message(m.topic, b"", m.client_id, m.qos, m.retain, m.timestamp) for m in messages]

    def _filter(self, data: st.DataObject) -> str:
        """Draw a topic filter, usually one that matches some stored message."""
        near = strategies.filters()
        if self.model.rows:
            topics = sorted({row.message.topic for row in self.model.rows})
            near = st.one_of(near, *[st.sampled_from(topics).flatmap(strategies.filters_of)] * 3)
        return data.draw(near)

    @rule(drawn=_drawn, times=st.sampled_from((1, 1, 1, 40)), arrow=st.booleans(), sort=st.booleans(), fault=faults(3))
    def store(
        self, drawn: list[tuple[Message, int | None]], times: int, arrow: bool, sort: bool, fault: Fault | None
    ) -> None:
        """Store a batch, sometimes a longer one, sometimes from Arrow."""
        messages = self._messages(drawn) * times
        if sort:
            messages.sort(key=lambda message: self.now if message.timestamp is None else message.timestamp)
        refusals = self.model.refusal(messages, self.now)
        handed = ts.MessageBatch.from_messages(messages).to_arrow() if arrow else messages
        if refusals:
            with pytest.raises(ts.InvalidMessageError) as refused:
                self.db.store(handed)
            assert (type(refused.value).__name__, refused.value.index) in refusals
            return
        after = self.model.copy()
        rows = after.store(messages, self.now)
        result = self._call(fault, lambda: self.db.store(handed))
        if result is None:
            self._adopt(after, rows, whole=not fault or not fault.struck)
            return
        lifted, self.model = self.model.lifted, after
        assert [row.id for row in rows] == result.ids
        assert self._as_stored(row.message for row in rows) == self._as_stored(result.batch.to_messages())
        assert self.model.lifted - lifted == result.lifted

    @rule(
        drawn=_drawn,
        shard=st.integers(0, 2),
        key=st.sampled_from(_KEYS),
        value=st.none() | st.binary(max_size=3),
        right=st.sampled_from((True, True, False)),
    )
    def store_with_state(
        self, drawn: list[tuple[Message, int | None]], shard: int, key: bytes, value: bytes | None, right: bool
    ) -> None:
        """Store messages and a conditional write of state together: both are applied or neither is."""
        shard %= self.model.shards
        messages = [Message(m.topic, m.payload, m.client_id, m.qos, m.retain) for m, _ in drawn]
        there = self.model.state[shard].get(key)
        writes = {shard: [StateWrite(key, value, there if right else b"something else")]}
        refusals = {name for name, _ in self.model.refusal(messages, self.now)}
        if not right:
            refusals.add("StateConflictError")
        if refusals:
            with pytest.raises((ts.InvalidMessageError, ts.StateConflictError)) as refused:
                self.db.store(messages, state=writes)
            assert type(refused.value).__name__ in refusals
            return
        result = self.db.store(messages, state=writes)
        assert [row.id for row in self.model.store(messages, self.now)] == result.ids
        self.model.write_state(shard, {key: value})

    @rule(
        shard=st.integers(0, 2),
        values=st.dictionaries(st.sampled_from(_KEYS), st.none() | st.binary(max_size=3), max_size=3),
        wrong=st.sampled_from((None, None, b"a", b"key")),
        prefix=st.sampled_from((b"\0", b"a", b"\xff", b"\xff\xff")),
    )
    def write_state(self, shard: int, values: dict[bytes, bytes | None], wrong: bytes | None, prefix: bytes) -> None:
        """Write state without messages; one false condition rejects all writes.

        A scan is in key order, without the database's internal keys.
        """
        shard %= self.model.shards
        held = self.model.state[shard]
        writes = [
            StateWrite(key, value, b"something else" if key == wrong else held.get(key))
            for key, value in values.items()
        ]
        if wrong in values:
            with pytest.raises(ts.StateConflictError):
                self.db.state(shard).write(writes)
        else:
            self.db.state(shard).write(writes)
            self.model.write_state(shard, values)
        assert sorted(held.items()) == list(self.db.state(shard).scan())
        assert [pair for pair in sorted(held.items()) if pair[0].startswith(prefix)] == list(
            self.db.state(shard).scan(prefix)
        )

    @rule(step=st.sampled_from(_STEPS), back=st.booleans())
    def jump(self, step: int, back: bool) -> None:
        """Set the clock forward or back."""
        self.now += -step if back else step

    # --- faults ---

    def _call(self, fault: Fault | None, call: Callable[[], T]) -> T | None:
        """Return the result of a call; after a fault open the database again and return None."""
        result, killed = None, self.directory / "killed"
        fault = fault if "persistent" in self.pair.capabilities else None
        engines = [shard.writer.engine for shard in self.db.storage.shards]
        with striking(fault, engines, self.directory / "db", killed):
            result = call()
        if fault is None or not (fault.kills or fault.struck):
            return result
        assert fault.kills or result is None
        self.db.close()
        if fault.kills:
            shutil.rmtree(self.directory / "db")
            killed.rename(self.directory / "db")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*in the future", UserWarning)
            self.db = self.pair.reopen(self.directory / "db", clock=lambda: self.now, auto_compact=False)
        return None

    def _there(self, rows: list[Row]) -> set[MessageId]:
        """Return the ids of all messages in the database that have the topics of these rows."""
        topics = {row.message.topic for row in rows}
        return {id_ for topic in topics for id_, _ in replayed(self.db, topic)}

    def _adopt(self, after: Model, rows: list[Row], *, whole: bool) -> None:
        """Copy into the model the rows of an interrupted batch that the database holds.

        Each shard must hold its part of the batch whole or not at all.
        ``after``: a model with the whole batch. ``whole``: whether all parts must be stored.
        """
        there = self._there(rows)
        for shard in range(self.model.shards):
            part = [row for row in rows if row.shard == shard]
            found = [row for row in part if row.id in there]
            assert found in ([], part)
            assert found == part or not whole
            if found:
                self.model.rows += found
                self.model.last[shard], self.model.newest[shard] = after.last[shard], after.newest[shard]

    # --- removing ---

    def _moment(self, offset: int) -> int:
        return self.now + offset

    @rule(
        data=st.data(),
        start=st.just(0) | st.sampled_from((-60_000_000, -2_000_000, -1, 0, 1)),
        until=st.none() | st.sampled_from((-1_000_000, 0, 1, 5_000_000)),
        fault=faults(3),
    )
    def delete(self, data: st.DataObject, start: int, until: int | None, fault: Fault | None) -> None:
        """Delete the messages of a filter and a time range; after a fault some may remain, and no other may be lost."""
        topic_filter = self._filter(data)
        from_, to = self._moment(start) if start else 0, None if until is None else self._moment(until)
        matching = self.model.find(topic_filter, from_, to)
        deleted = self._call(fault, lambda: self.db.delete(topic_filter, from_, to))
        if deleted is None and fault and fault.struck:
            gone = {row.id for row in matching} - self._there(matching)
            self.model.rows = [row for row in self.model.rows if row.id not in gone]
        else:
            assert self.model.delete(topic_filter, from_, to) == (len(matching) if deleted is None else deleted)

    @rule(which=st.integers(0, 1), small=st.booleans(), fault=faults(3))
    @precondition(lambda self: len(self.model.generations) < 8)
    def add_generation(self, which: int, small: bool, fault: Fault | None) -> None:
        """Add a generation, with the same layout or another; after a fault either all shards have it or none has."""
        layouts = layouts_on(self.pair.backend)
        layout = (self.pair.layout, layouts[len(self.model.rows) % len(layouts)])[which]
        options = small_options(layout) if small else quick_options(layout)
        added = self._call(fault, lambda: self.db.add_generation(layout, options))
        if added is None:
            added = self.db.generations()[-1].number
            if added == self.model.current and fault and fault.struck:
                return
        assert self.model.add_generation(layout) == added

    @rule(number=st.integers(-1, 8), fault=faults(3))
    def drop_generation(self, number: int, fault: Fault | None) -> None:
        """Drop a generation; an unknown one, or one that is not sealed, raises GenerationError."""
        generation = self.model.generations.get(number)
        if generation is None or not generation.sealed:
            with pytest.raises(ts.GenerationError):
                self.db.drop_generation(number)
        else:
            dropped = self._call(fault, lambda: self.db.drop_generation(number))
            if dropped is not None:
                assert self.model.drop_generation(number) == dropped
            elif number not in {info.number for info in self.db.generations()}:
                self.model.drop_generation(number)
            else:
                assert fault
                assert fault.struck

    # --- reading ---

    @rule(
        data=st.data(),
        start=st.just(None) | st.sampled_from((-60_000_000, -2_000_000, -1, 0, 1)),
        until=st.none() | st.sampled_from((-1_000_000, 0, 1, 5_000_000)),
        order=st.sampled_from(("any", "time")),
        batch_size=st.sampled_from((1, 2, 7, 4096)),
    )
    def replay(
        self,
        data: st.DataObject,
        start: int | None,
        until: int | None,
        order: Order,
        batch_size: int,
    ) -> None:
        """Replay a filter over a time range, and compare the messages with the model."""
        topic_filter = self._filter(data)
        from_, to = 0 if start is None else self._moment(start), None if until is None else self._moment(until)
        check_replay(self.db, self.model, topic_filter, from_, to, order, batch_size)

    @rule(data=st.data(), order=st.sampled_from(("any", "time")))
    @precondition(lambda self: self.model.rows)
    def replay_around_a_message(self, data: st.DataObject, order: Order) -> None:
        """Replay from and up to exactly the time of a message: the start is inclusive, the end exclusive."""
        topic_filter = self._filter(data)
        row = data.draw(st.sampled_from(self.model.rows))
        time = data.draw(st.sampled_from((row.position >> 11, row.message.timestamp or 0)))
        check_replay(self.db, self.model, topic_filter, time, None, order)
        check_replay(self.db, self.model, topic_filter, 0, time, order)
        check_replay(self.db, self.model, topic_filter, time, time + 1, order)

    @rule(data=st.data(), start=st.sampled_from((None, None, -1, 0, 1)))
    @precondition(lambda self: len(self.consumers) < 4)
    def begin_consumer(self, data: st.DataObject, start: int | None) -> None:
        """Add a consumer of a filter."""
        from_ = 0 if start is None else self._moment(start)
        self.consumers.append(Consumer(self._filter(data), from_, {}, []))
        self._list_streams(self.consumers[-1])

    def _list_streams(self, consumer: Consumer) -> None:
        for stream in self.db.streams(consumer.topic_filter, consumer.start):
            place = stream.shard, stream.generation, stream.number
            assert self.model.generations[stream.generation].sealed == stream.sealed
            if place not in consumer.places:
                cursor = self.db.cursor(stream, consumer.topic_filter, consumer.start)
                consumer.places[place] = cursor.to_bytes()

    @rule(data=st.data(), limit=st.sampled_from((1, 2, 5, 1000)), timeout=st.sampled_from((None, None, 0.0)))
    def advance(self, data: st.DataObject, limit: int, timeout: float | None) -> None:
        """Let a consumer read one batch of some of its streams."""
        consumer = data.draw(st.sampled_from(self.consumers))
        if not consumer.places:
            self._list_streams(consumer)
        places = sorted(consumer.places)
        chosen = st.lists(st.sampled_from(places), min_size=1, max_size=6, unique=True) if places else st.just([])
        for place in data.draw(chosen):
            self._advance(consumer, place, limit, timeout)

    def _advance(self, consumer: Consumer, place: tuple[int, int, int], limit: int, timeout: float | None) -> None:
        cursor = ts.Cursor.from_bytes(consumer.places[place])
        if self.model.generations[place[1]].dropped:
            with pytest.raises(ts.GenerationDroppedError):
                self.db.read(cursor, limit)
            del consumer.places[place]
            return
        result = self.db.read(cursor, limit, timeout=timeout)
        assert len(result.batch) <= limit
        rows = list(zip(result.batch.ids(), result.batch.to_messages(), strict=True)) if len(result.batch) else []
        self._take(consumer, place, rows)
        assert not (result.end_of_stream and not self.model.generations[place[1]].sealed)
        if not rows and not result.caught_up:
            assert cursor != result.cursor  # otherwise the consumer would never advance
        consumer.places[place] = result.cursor.to_bytes()

    def _take(self, consumer: Consumer, place: tuple[int, int, int], rows: list[tuple[MessageId, Message]]) -> None:
        """Check rows read from a stream against the model, and that the consumer gets none of them twice."""
        live: dict[MessageId, Row] = {row.id: row for row in self.model.rows}
        for id_, message in rows:
            row = live[id_]
            assert (row.message, row.shard, row.generation) == (message, place[0], place[1])
            assert match(consumer.topic_filter, message.topic)
            assert row.position >= max(0, consumer.start) << 11
        if "position_order" in registry().layout(self.model.generations[place[1]].layout).capabilities:
            positions = [id_.position for id_, _ in rows]
            assert sorted(positions) == positions
        consumer.seen.extend(id_ for id_, _ in rows)
        assert len(set(consumer.seen)) == len(consumer.seen)

    @rule(data=st.data(), limit=st.sampled_from((1, 3, 1000)))
    def catch_up(self, data: st.DataObject, limit: int) -> None:
        """Let a consumer list the streams again and read all of them; it must have read every message afterwards."""
        consumer = data.draw(st.sampled_from(self.consumers))
        self.db.replay("#")  # waits until all stored messages are visible
        self._list_streams(consumer)
        for place, saved in sorted(consumer.places.items()):
            if self.model.generations[place[1]].dropped:
                del consumer.places[place]
                continue
            rows, cursor, ended = drain(self.db, ts.Cursor.from_bytes(saved), limit)
            self._take(consumer, place, rows)
            assert self.model.generations[place[1]].sealed == ended
            consumer.places[place] = cursor.to_bytes()
        expected = {row.id for row in self.model.find_from(consumer.topic_filter, consumer.start)}
        assert expected <= set(consumer.seen)

    # --- maintenance ---

    @rule()
    @precondition(lambda self: "persistent" in self.pair.capabilities)
    def reopen(self) -> None:
        """Close the database and open it again, with a warning if a last position lies in the future."""
        self.db.close()
        future = any(last >> 11 > self.now + 1_000 for last in self.model.last.values())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.db = self.pair.reopen(self.directory / "db", clock=lambda: self.now, auto_compact=False)
        assert future == bool(told)

    @rule(data=st.data(), drawn=_drawn)
    @precondition(lambda self: "concurrent_readers" in self.pair.capabilities)
    def read_beside(self, data: st.DataObject, drawn: list[tuple[Message, int | None]]) -> None:
        """Check that a read-only opening sees the messages stored before it was opened or refreshed."""
        messages = [Message(m.topic, m.payload, m.client_id) for m, _ in drawn]
        if self.model.refusal(messages, self.now):
            return
        with ts.open(self.directory / "db", mode="r", clock=lambda: self.now) as reader:
            before, topic_filter = self.model.copy(), self._filter(data)
            self.db.store(messages)
            self.model.store(messages, self.now)
            check_replay(reader, before, topic_filter)
            reader.refresh()
            check_replay(reader, self.model, topic_filter)

    @rule(data=st.data())
    @precondition(lambda self: "checkpoint" in self.pair.capabilities)
    def checkpoint(self, data: st.DataObject) -> None:
        """Make a checkpoint, which must hold all messages and be independent of the original database."""
        self.db.checkpoint(self.directory / "copy")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*in the future", UserWarning)
            taken = ts.open(self.directory / "copy", clock=lambda: self.now, auto_compact=False)
        with taken:
            check_replay(taken, self.model, self._filter(data))
            taken.delete("#")
        shutil.rmtree(self.directory / "copy")

    @rule()
    def compact(self) -> None:
        """Compact the database: the report must agree with `info`, and the number of messages must not change."""
        before = self.db.info()
        report = self.db.compact()
        after = self.db.info()
        assert (before.live_bytes, after.live_bytes) == (report.live_bytes_before, report.live_bytes_after)
        assert before.messages == after.messages

    @rule()
    def verify(self) -> None:
        """Check that nothing is damaged, and that all contents equal the model's."""
        check_all(self.db, self.model)

    @rule(number=st.integers(0, 9), bad=st.sampled_from((("", 0), ("a/#", 0), ("a\0", 0), ("a", 3), ("a", -1))))
    def store_nonsense(self, number: int, bad: tuple[str, int]) -> None:
        """Store one invalid message among valid ones: the error has its index, and no message is stored."""
        messages: list[Any] = [Message("a", b"1", f"c{index}") for index in range(number)]
        messages.insert(number // 2, Message(bad[0], b"", "c1", bad[1]))
        with pytest.raises(ts.InvalidMessageError) as refused:
            self.db.store(messages)
        assert number // 2 == refused.value.index

    @invariant()
    def same_count(self) -> None:
        """Check that the number of messages and the shards' last positions equal the model's."""
        if hasattr(self, "db"):
            assert len(self.model.rows) == sum(generation.messages for generation in self.db.generations())
            follow_epochs(self.db, self.model)
            assert self.model.last == {
                shard.number: shard.writer.tail.last_position for shard in self.db.storage.shards
            }
