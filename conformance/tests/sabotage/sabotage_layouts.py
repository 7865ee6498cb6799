"""Layouts that break one promise each, and the test that must tell it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import attrs
import msgspec
import numpy as np
from sabotage import Saboteur, suites_of
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.engine import DATA, KEYS, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import (
    CompactStep,
    Damage,
    DeleteStep,
    Layout,
    Slab,
    SlabInfo,
    SlabStep,
    StreamInfo,
    TopicNode,
)
from topicstore_conformance.layout.suite import LayoutSuite
from topicstore_conformance.subjects.subject import LayoutSubject
from topicstore_layouts import reference
from topicstore_layouts.block.layout import BlockLayout, BlockOptions
from topicstore_layouts.block.slab import BlockSlab
from topicstore_layouts.reference import ReferenceLayout, ReferenceOptions, ReferenceSlab
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable
from topicstore_layouts.skipstream.layout import SkipstreamLayout, SkipstreamOptions
from topicstore_layouts.skipstream.slab import SkipstreamSlab

S = LayoutSuite
SABOTEURS: list[Saboteur] = []
FAR = 1 << 63


# --- right, but for what a subclass changes --------------------------------------------------


class Wrapped(Slab):
    """A slab that hands everything on to another one."""

    def __init__(self, inner: Slab, engine: Engine, generation: int) -> None:
        self.inner: Any = inner
        self.engine = engine
        self.generation = generation
        self.epoch = inner.epoch
        self.counters = inner.counters

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        self.inner.store(batch, write)

    def committed(self) -> None:
        self.inner.committed()

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        return self.inner.streams(topic_filter)

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        return self.inner.cover(topic_filter, first)

    def visible(self, stream: int, watermark: int) -> int:
        return self.inner.visible(stream, watermark)

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream, topic_filter, position)

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream, topic_filter, place, **how)

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        return self.inner.delete(topic_filter, first, last, spare)

    def backlog(self, messages: int) -> int:
        return self.inner.backlog(messages)

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        return self.inner.compact(bound, whole=whole)

    def learned(self) -> Iterator[TopicNode]:
        return self.inner.learned()

    def info(self) -> SlabInfo:
        return self.inner.info()

    def verify(self, bound: int) -> Iterator[Damage | int]:
        return self.inner.verify(bound)


def inner_layout(of: str) -> Layout:
    if of == "block":
        return BlockLayout(BlockOptions(thresholds=(3, 2)))
    if of == "skipstream":
        return SkipstreamLayout(SkipstreamOptions(thresholds=(3, 2)))
    return ReferenceLayout(ReferenceOptions())


class SabotagedLayout(Layout):
    """Makes slabs of one saboteur around those of a layout that is right."""

    def __init__(self, of: str, slab: type[Wrapped]) -> None:
        super().__init__(None)
        self.inner = inner_layout(of)
        self.slab = slab

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        parent = parent.inner if isinstance(parent, Wrapped) else parent
        self.inner.create(engine, shard, generation, parent, write)

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        return self.slab(self.inner.open(engine, shard, generation), engine, generation)


def breaks(promise: Callable[..., object], of: str = "reference", **how: Any) -> Any:
    """Register a saboteur, a slab around another or a layout, and the test that must fail of it."""

    def register(kind: Any) -> Any:
        make = kind if issubclass(kind, Layout) else partial(SabotagedLayout, of, kind)
        subject = partial(LayoutSubject, make=make, capabilities={"position_order", "few_streams"})
        SABOTEURS.append(Saboteur(kind.__name__, kind.__doc__.strip(), promise.__qualname__, subject, **how))
        return kind

    return register


def changed(step: SlabStep, rows: list[int]) -> SlabStep:
    """Return a step with some of its rows, in another order perhaps."""
    batch = step.batch.take(np.array(rows, dtype=np.intp)) if rows else MessageBatch.empty()
    return attrs.evolve(step, batch=batch)


class Stores(Wrapped):
    """Stores other rows than it is given."""

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        rows = self.rows(batch)
        if rows:
            self.inner.store(batch.take(np.array(rows, dtype=np.intp)), write)

    def rows(self, batch: MessageBatch) -> list[int]:
        return list(range(len(batch)))


class Alters(Wrapped):
    """Stores other messages than it is given."""

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        altered = MessageBatch.from_messages([self.alter(message) for message in batch.to_messages()])
        self.inner.store(altered.placed(batch.positions, batch.timestamps, 4), write)

    def alter(self, message: Message) -> Message:
        return message


class Lenient(TopicFilter):
    """A filter that matches by a rule of a saboteur's."""

    __slots__ = ("rule",)

    def __init__(self, text: str, rule: Callable[[TopicFilter, str], bool]) -> None:
        super().__init__(text)
        self.rule = rule

    def matches(self, topic: str) -> bool:
        return self.rule(TopicFilter(self.text), topic)


class Matches(Wrapped):
    """Matches by a rule of its own."""

    @staticmethod
    def rule(topic_filter: TopicFilter, topic: str) -> bool:
        return topic_filter.matches(topic)

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream, Lenient(topic_filter.text, self.rule), place, **how)


# --- contents --------------------------------------------------------------------------------


@breaks(S.test_no_message_of_many_is_lost, whole=True)
class LosesOneInAThousand(Stores):
    """Loses one message in a thousand."""

    count = 0

    def rows(self, batch: MessageBatch) -> list[int]:
        first, self.count = self.count, self.count + len(batch)
        return [row for row in range(len(batch)) if (first + row) % 1_000 != 999]


@breaks(S.test_every_field_comes_back)
class DropsProperties(Alters):
    """Drops the user properties."""

    def alter(self, message: Message) -> Message:
        if message.properties is None:
            return message
        return msgspec.structs.replace(
            message, properties=msgspec.structs.replace(message.properties, user_properties=())
        )


@breaks(S.test_any_messages_come_back)
class LosesEmptyPayloads(Stores):
    """Loses retained messages without a payload."""

    def rows(self, batch: MessageBatch) -> list[int]:
        return [n for n, m in enumerate(batch.to_messages()) if m.payload or not m.retain]


@breaks(S.test_hostile_topics)
class CutsTopics(Alters):
    """Keeps the first 10,000 characters of a topic."""

    def alter(self, message: Message) -> Message:
        return msgspec.structs.replace(message, topic=message.topic[:10_000])


@breaks(S.test_large_payloads)
class CutsPayloads(Alters):
    """Keeps the first megabyte of a payload."""

    def alter(self, message: Message) -> Message:
        return msgspec.structs.replace(message, payload=message.payload[: 1 << 20])


@breaks(S.test_a_large_batch)
class SmallBatches(Stores):
    """Stores 8,192 messages of a batch."""

    def rows(self, batch: MessageBatch) -> list[int]:
        return list(range(min(len(batch), 8_192)))


# --- reading ---------------------------------------------------------------------------------


@breaks(S.test_the_limit_of_rows)
class IgnoresTheLimit(Wrapped):
    """Returns one row more than its limit."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream, topic_filter, place, **{**how, "limit": how["limit"] + 1})


@breaks(S.test_the_limit_of_bytes)
class IgnoresTheBytes(Wrapped):
    """Returns as many bytes as there are."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream, topic_filter, place, **{**how, "limit_bytes": 1 << 40})


@breaks(S.test_the_bound)
class IgnoresTheBound(Wrapped):
    """Reads a position behind the bound."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream, topic_filter, place, **{**how, "bound": how["bound"] + 1})


@breaks(S.test_the_start_is_inclusive)
class SkipsTheStart(Wrapped):
    """Begins behind the position it is given."""

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream, topic_filter, position + 1)


@breaks(S.test_a_deadline_that_is_past)
class StuckAtDeadlines(Wrapped):
    """Does nothing past its deadline."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        if how["deadline"] is not None and how["deadline"] <= time.monotonic():
            return SlabStep(batch=MessageBatch.empty(), place=place, exhausted=False)
        return self.inner.next(stream, topic_filter, place, **how)


@breaks(S.test_exhausted_is_not_said_too_early)
class ExhaustedTooEarly(Wrapped):
    """Reports the end when a limit was reached."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place, **how)
        return attrs.evolve(step, exhausted=step.exhausted or len(step.batch) == how["limit"])


@breaks(S.test_bounds_that_grow_step_by_step)
class EndsBehindTheBound(Wrapped):
    """Goes on behind the bound's block of 64 positions."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place, **how)
        if not step.exhausted:
            return step
        return attrs.evolve(step, place=(how["bound"] | 63).to_bytes(8, "big"))


@breaks(S.test_a_publishers_messages_keep_their_order)
class BreaksPublishersOrder(Wrapped):
    """Breaks the order of a publisher's messages: returns the newest of a call first."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place, **how)
        return changed(step, list(range(len(step.batch)))[::-1])


@breaks(S.test_a_stream_is_in_order_of_positions)
class SortsByTopic(Wrapped):
    """Sorts what a call returns by topic, though it declares the order of positions."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place, **how)
        topics = [message.topic for message in step.batch.to_messages()]
        return changed(step, sorted(range(len(topics)), key=topics.__getitem__))


@breaks(S.test_what_is_visible_never_changes)
class ShowsTooMuch(Wrapped):
    """Shows what lies behind the watermark."""

    def visible(self, stream: int, watermark: int) -> int:
        return watermark + 1


@breaks(S.test_streams_share_the_messages)
class ListsTwice(Wrapped):
    """Lists a stream a second time, under another number."""

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        listed = self.inner.streams(topic_filter)
        return [*listed, *(attrs.evolve(info, stream=info.stream + 1_000) for info in listed)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        return self.inner.cover(topic_filter, first)

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream % 1_000, topic_filter, position)

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream % 1_000, topic_filter, place, **how)


@breaks(S.test_cover_with_a_start_leaves_nothing_out, "skipstream")
class LeavesLateStreamsOut(Wrapped):
    """Leaves a stream out if it was written before the slab was opened, for any late start."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.old = {info.stream for info in self.inner.streams(TopicFilter("#"))}

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        covering = self.inner.cover(topic_filter, first)
        return [stream for stream in covering if not first or stream not in self.old]


@breaks(S.test_a_streams_pattern_matches_its_topics)
class WrongPatterns(Wrapped):
    """Shows every stream with a pattern that some of its topics don't match."""

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        return [attrs.evolve(info, pattern="f/#") for info in self.inner.streams(topic_filter)]


@breaks(S.test_counters_count_rows)
class CountsNothing(Wrapped):
    """Counts nothing of what it reads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counters = type(self.counters)()


@breaks(S.test_info_counts_streams)
class CountsStreamsWrongly(Wrapped):
    """Counts one stream too many."""

    def info(self) -> SlabInfo:
        info = self.inner.info()
        return attrs.evolve(info, streams=info.streams + 1)


# --- topics ----------------------------------------------------------------------------------


@breaks(S.test_wildcards_do_not_match_dollar_topics)
class HashMatchesDollar(Matches):
    """Matches topics that begin with ``$`` by ``#``."""

    @staticmethod
    def rule(topic_filter: TopicFilter, topic: str) -> bool:
        return topic_filter.matches(topic) or topic_filter.text == "#"


@breaks(S.test_empty_levels_are_levels)
class DropsEmptyLevels(Matches):
    """Takes a level that is empty for none."""

    @staticmethod
    def rule(topic_filter: TopicFilter, topic: str) -> bool:
        return topic_filter.matches(topic.strip("/") or topic)


@breaks(S.test_a_filter_matches_the_level_above_its_hash)
class HashWantsALevel(Matches):
    """Wants a level where ``#`` is."""

    @staticmethod
    def rule(topic_filter: TopicFilter, topic: str) -> bool:
        return topic_filter.matches(topic) and f"{topic}/#" != topic_filter.text


@breaks(S.test_filters_made_of_topics)
class PlusWantsText(Matches):
    """Matches no empty level by ``+`` in the last level."""

    @staticmethod
    def rule(topic_filter: TopicFilter, topic: str) -> bool:
        return topic_filter.matches(topic) and not (topic_filter.text.endswith("+") and topic.endswith("/"))


@breaks(S.test_topics_nobody_published_to)
class FindsSomething(Matches):
    """Matches by all levels but the last, of four levels and more."""

    @staticmethod
    def rule(topic_filter: TopicFilter, topic: str) -> bool:
        return topic_filter.matches(topic) or topic_filter.matches(f"{topic}/no")


# --- places ----------------------------------------------------------------------------------


@breaks(S.test_places_survive_reopening, raises=(ValueError,))
class PlacesInMemory(Wrapped):
    """Keeps places in memory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.places: set[bytes] = set()

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        place = self.inner.begin(stream, topic_filter, position)
        self.places.add(place)
        return place

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        if place not in self.places:
            raise ValueError(place)
        step = self.inner.next(stream, topic_filter, place, **how)
        self.places.add(step.place)
        return step


@breaks(S.test_places_survive_stores)
class PlacesEndWithStores(Wrapped):
    """Leaves out what is stored while somebody reads."""

    stores = 0

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        self.stores += 1
        super().store(batch, write)

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream, topic_filter, position) + self.stores.to_bytes(4, "big")

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place[:-4], **how)
        stale = int.from_bytes(place[-4:], "big") + 5 < self.stores
        return attrs.evolve(step if not stale else changed(step, []), place=step.place + place[-4:])


@breaks(S.test_places_survive_deletes)
class PlacesCountRows(Wrapped):
    """Goes on as many rows behind the beginning as were read."""

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream, topic_filter, position) + bytes(4)

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        start, count = place[:-4], int.from_bytes(place[-4:], "big")
        everything = {**how, "limit": 1 << 30, "limit_bytes": 1 << 40, "deadline": None}
        step = self.inner.next(stream, topic_filter, start, **everything)
        rows = list(range(len(step.batch)))[count : count + how["limit"]]
        end = count + len(rows)
        exhausted = end >= len(step.batch)
        return attrs.evolve(changed(step, rows), place=start + end.to_bytes(4, "big"), exhausted=exhausted)


@breaks(S.test_places_survive_compaction, "block")
class PlacesEndWithCompaction(Wrapped):
    """Skips a row when it was compacted since."""

    compactions = 0

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        self.compactions += 1
        return self.inner.compact(bound, whole=whole)

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream, topic_filter, position) + self.compactions.to_bytes(4, "big")

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place[:-4], **how)
        if int.from_bytes(place[-4:], "big") < self.compactions:
            step = changed(step, list(range(1, len(step.batch))))
        return attrs.evolve(step, place=step.place + self.compactions.to_bytes(4, "big"))


@breaks(S.test_streams_that_are_not_there)
class KnowsAllStreams(Wrapped):
    """Takes a stream that is not there for an empty one."""

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(0, topic_filter, position)


@breaks(S.test_places_that_are_none)
class TakesAnyPlace(Wrapped):
    """Begins anew where it is given no place of its own."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        return self.inner.next(stream, topic_filter, place if len(place) == 8 else bytes(8), **how)


# --- structure -------------------------------------------------------------------------------


@breaks(S.test_few_streams_serve_many_topics)
class AStreamATopic(SkipstreamLayout):
    """Learns nothing: each topic has a stream of its own."""

    def __init__(self) -> None:
        super().__init__(SkipstreamOptions(thresholds=(1_000_000,)))


@breaks(S.test_no_topic_moves)
class MovesTopics(Wrapped):
    """Moves a topic to another stream after a while."""

    def streams(self, topic_filter: TopicFilter) -> list[StreamInfo]:
        return [StreamInfo(stream=stream, pattern="#") for stream in (0, 1)]

    def cover(self, topic_filter: TopicFilter, first: int = 0) -> list[int]:
        return [0, 1]

    def begin(self, stream: int, topic_filter: TopicFilter, position: int) -> bytes:
        return self.inner.begin(stream // 2, topic_filter, position)

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(0, topic_filter, place, **how)
        positions = step.batch.positions if len(step.batch) else []
        return changed(step, [row for row, position in enumerate(positions) if int(position) >> 6 & 1 == stream])


@breaks(S.test_the_structure_is_there_after_reopening)
class LosesTheStructure(SkipstreamLayout):
    """Loses the learned structure when it is opened anew."""

    def __init__(self) -> None:
        super().__init__(SkipstreamOptions(thresholds=(3, 2)))

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        return SkipstreamSlab(engine, shard, generation, LearnedTopics(generation, (3, 2)))


@breaks(S.test_learned_names_the_streams, "skipstream")
class ChildrenFirst(Wrapped):
    """Tells of children before their parents."""

    def learned(self) -> Iterator[TopicNode]:
        return iter(list(self.inner.learned())[::-1])


@breaks(S.test_a_generation_inherits)
class InheritsInMemory(SkipstreamLayout):
    """Inherits in memory, and stores nothing of it."""

    heirs: ClassVar[dict[Engine, LearnedTopics]] = {}

    def __init__(self) -> None:
        super().__init__(SkipstreamOptions(thresholds=(3, 2)))

    def create(self, engine: Engine, shard: int, generation: int, parent: Slab | None, write: WriteBatch) -> None:
        if isinstance(parent, SkipstreamSlab):
            heir = self.heirs[engine] = LearnedTopics(generation, (3, 2))
            heir.inherit(parent.trie)
            heir.save(WriteBatch())
            heir.saved()

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        heir = self.heirs.pop(engine, None)
        return (
            super().open(engine, shard, generation) if heir is None else SkipstreamSlab(engine, shard, generation, heir)
        )


@breaks(S.test_an_heir_has_no_messages_of_its_parent)
class SeesItsParent(ReferenceLayout):
    """Shows a new generation the messages of the one before, as long as it has none."""

    def __init__(self) -> None:
        super().__init__(ReferenceOptions())

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        mine = any(engine.scan(DATA, (generation, 0, 0), (generation + 1, 0, 0), limit=1))
        return super().open(engine, shard, generation if mine or generation == 2 else generation - 1)


@breaks(S.test_generations_keep_apart)
class OneGeneration(ReferenceLayout):
    """Keeps all generations in one."""

    def __init__(self) -> None:
        super().__init__(ReferenceOptions())

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        return super().open(engine, shard, 1)


@breaks(S.test_a_generation_goes_by_range_deletes)
class StoresElsewhere(Wrapped):
    """Stores a note beside its generation."""

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        super().store(batch, write)
        write.put(KEYS, b"note", b"")


# --- writing ---------------------------------------------------------------------------------


@breaks(S.test_a_failed_write_leaves_nothing)
class ShowsWhatFailed(Wrapped):
    """Reads the last batch from memory, committed or not."""

    last: Any = None

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        super().store(batch, write)
        self.last = batch

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        step = self.inner.next(stream, topic_filter, place, **how)
        if self.last is None or not step.exhausted or not len(step.batch):
            return step
        rows = [n for n, m in enumerate(self.last.to_messages()) if topic_filter.matches(m.topic)]
        known = set(map(int, step.batch.positions))
        new = [row for row in rows if int(self.last.positions[row]) not in known]
        more = self.last.take(np.array(new, dtype=np.intp)) if new else MessageBatch.empty()
        return attrs.evolve(step, batch=MessageBatch.concat([step.batch, more]))


@breaks(S.test_what_a_failed_write_learned_is_stored_by_the_next, "skipstream", raises=(CorruptionError,))
class SavedTooEarly(Wrapped):
    """Takes what it learned for saved before the commit."""

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        super().store(batch, write)
        self.inner.committed()


@breaks(S.test_several_failures_in_a_row)
class OneFailureOnly(Wrapped):
    """Stores nothing any more when two batches were not committed."""

    waiting = 0

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        self.waiting += 1
        if self.waiting <= 2:
            super().store(batch, write)

    def committed(self) -> None:
        self.waiting = 0


@breaks(S.test_storing_changes_nothing_until_the_commit)
class WritesByItself(Wrapped):
    """Writes to the engine by itself."""

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        mine = WriteBatch()
        super().store(batch, mine)
        self.engine.write(mine)
        super().store(batch, write)


# --- deletes ---------------------------------------------------------------------------------


@breaks(S.test_exactly_what_matches_goes)
class KeepsTheLast(Wrapped):
    """Takes the last position of a delete for exclusive."""

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        return self.inner.delete(topic_filter, first, last - 1, spare)


@breaks(S.test_exactly_what_matches_goes)
class MiscountsBytes(Wrapped):
    """Counts what was freed twice."""

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        for step in self.inner.delete(topic_filter, first, last, spare):
            yield attrs.evolve(step, freed=2 * step.freed)


@breaks(S.test_what_is_to_be_spared_stays)
class SparesNothing(Wrapped):
    """Deletes what it was told to spare, too."""

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        return self.inner.delete(topic_filter, first, last)


@breaks(S.test_everything_can_go)
class KeepsDollar(Wrapped):
    """Deletes nothing by a filter that begins with ``$``."""

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        return iter(()) if topic_filter.text[0] == "$" else self.inner.delete(topic_filter, first, last, spare)


@breaks(S.test_steps_are_bounded)
class OneStep(Wrapped):
    """Deletes in one step."""

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        # Each of the others' steps looks from where the last one ended, so they can be put together.
        steps = list(self.inner.delete(topic_filter, first, last, spare))
        write = WriteBatch()
        write.runs = [run for step in steps for run in step.write.runs]
        yield DeleteStep(write=write, messages=sum(s.messages for s in steps), freed=sum(s.freed for s in steps))


@breaks(S.test_others_write_between_steps)
class DeletesOnAndOn(Wrapped):
    """Deletes what is stored meanwhile, too."""

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        yield from self.inner.delete(topic_filter, first, last, spare)
        yield from self.inner.delete(topic_filter, last + 1, FAR, spare)


@breaks(S.test_a_delete_is_resumed)
class RemembersDeletes(Wrapped):
    """Deletes by a filter once, whether that came to its end or not."""

    done: ClassVar[set[Any]] = set()

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        what = id(self.engine), topic_filter.text, first, last
        for step in () if what in self.done else self.inner.delete(topic_filter, first, last, spare):
            self.done.add(what)
            yield step


# --- compaction ------------------------------------------------------------------------------


@breaks(S.test_compaction_changes_nothing, "block")
class CompactsAway(Wrapped):
    """Loses the newest block when it compacts."""

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        yield from self.inner.compact(bound, whole=whole)
        for chunk in self.engine.scan(DATA, (self.generation, 0, 0), (self.generation, 1, 0), reverse=True, limit=1):
            write = WriteBatch()
            write.delete(DATA, chunk[0][0])
            yield CompactStep(write=write, messages=0, freed=len(chunk[0][1]))


@breaks(S.test_the_backlog_is_what_waits)
class EverythingWaits(Wrapped):
    """Says that everything waits to be compacted, always."""

    def backlog(self, messages: int) -> int:
        return messages


@breaks(S.test_steps_that_are_never_committed, "block")
class InsistsOnSteps(Wrapped):
    """Compacts no more after a step that was not committed."""

    asked = False

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        if self.asked:
            return
        for step in self.inner.compact(bound, whole=whole):
            self.asked = True
            yield step
            self.asked = False


@breaks(S.test_stores_beside_compaction, "block")
class CompactsOverStores(Wrapped):
    """Removes with a step what was stored since it was asked for."""

    def compact(self, bound: int, *, whole: bool) -> Iterator[CompactStep]:
        for step in self.inner.compact(bound, whole=whole):
            step.write.delete_range(DATA, (self.generation, 0, bound + 1), (self.generation, 1, 0))
            yield step


# --- damage ----------------------------------------------------------------------------------


@breaks(S.test_flipped_bits_are_told)
class SkipsDamage(ReferenceLayout):
    """Skips messages that are damaged."""

    def __init__(self) -> None:
        super().__init__(ReferenceOptions())

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        return _Skipping(engine, shard, generation)


class _Skipping(ReferenceSlab):
    def _scan(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        for position, value in super()._scan(first, last):
            try:
                self._read(position, value)
            except CorruptionError:
                continue
            yield position, value


@breaks(S.test_flipped_bits_of_messages_are_told)
class VerifiesNothing(Wrapped):
    """Verifies nothing, and says that all is well."""

    def verify(self, bound: int) -> Iterator[Damage | int]:
        for found in self.inner.verify(bound):
            yield found if isinstance(found, int) else 1


class _Careless(ReferenceSlab):
    """Without a checksum, or with one of something else."""

    seed: int | None = None

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        if self.seed is None:
            super().store(batch, write)
            return
        for position, message in zip(batch.positions.tolist(), batch.to_messages(), strict=True):
            row = reference._Row(*(getattr(message, name) for name in message.__struct_fields__))
            write.put(DATA, (self._generation, 0, position), reference._encode(row, self.seed))

    def _read(self, position: int, value: bytes) -> Any:
        if self.seed is not None:
            position = self.seed
        else:
            value = self.trimmed(value)
        return super()._read(position, value)

    @staticmethod
    def trimmed(value: bytes) -> bytes:
        return value[:-1] if value.endswith(b"\xc0\0") else value


class _Unplaced(_Careless):
    seed = 7


@breaks(S.test_cut_and_longer_values_are_told)
class IgnoresTheTail(ReferenceLayout):
    """Ignores what follows a value."""

    def __init__(self) -> None:
        super().__init__(ReferenceOptions())

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        return _Careless(engine, shard, generation)


@breaks(S.test_values_under_other_keys_are_told)
class AnyPlaceWillDo(ReferenceLayout):
    """Takes a value for good wherever it lies."""

    def __init__(self) -> None:
        super().__init__(ReferenceOptions())

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        return _Unplaced(engine, shard, generation)


@breaks(S.test_missing_values_are_missed)
class CountsWhatWasThere(Wrapped):
    """Counts what it remembers having stored, instead of what is there."""

    counted: ClassVar[dict[int, int]] = {}

    def store(self, batch: MessageBatch, write: WriteBatch) -> None:
        super().store(batch, write)
        self.counted[id(self.engine)] = self.counted.get(id(self.engine), 0) + len(batch)

    def verify(self, bound: int) -> Iterator[Damage | int]:
        for _ in self.inner.verify(bound):
            pass
        yield self.counted[id(self.engine)]


@breaks(S.test_damaged_structure_is_told)
class BeginsAnew(SkipstreamLayout):
    """Begins anew where what it learned can't be read."""

    def __init__(self) -> None:
        super().__init__(SkipstreamOptions(thresholds=(3, 2)))

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        try:
            return super().open(engine, shard, generation)
        except CorruptionError:
            return SkipstreamSlab(engine, shard, generation, LearnedTopics(generation, (3, 2)))


@breaks(S.test_the_rest_stays_readable, raises=(CorruptionError,))
class GivesUp(Wrapped):
    """Reads nothing of a slab in which anything is damaged."""

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        for found in self.inner.verify(FAR):
            if not isinstance(found, int):
                raise CorruptionError(found.reason, found.place)
        return self.inner.next(stream, topic_filter, place, **how)


@breaks(S.test_missing_writes_change_no_message)
class GuessesNames(BlockLayout):
    """Takes the name that it knows best where that of a number is missing."""

    def __init__(self) -> None:
        super().__init__(BlockOptions(thresholds=(3, 2)))

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        slab = super().open(engine, shard, generation)
        assert isinstance(slab, BlockSlab)
        for names in (slab._topics, slab._clients):
            names._load = partial(self._guessed, names, names._load)  # type: ignore[method-assign]
        return slab

    @staticmethod
    def _guessed(names: NameTable, load: Callable[[Any], None], ids: Any) -> None:
        for number in np.unique(ids).tolist():
            try:
                load(np.array([number]))
            except CorruptionError:
                load(np.array([0]))
                names._remember(number, str(names._texts.values[0]), int(names._streams[0]))


# --- threads and histories -------------------------------------------------------------------


@breaks(S.test_readers_beside_a_writer_and_compaction)
class OneReader(Wrapped):
    """Gives a thread that reads what another one wanted last, if there is another one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wanted = dict[int, TopicFilter]()

    def next(self, stream: int, topic_filter: TopicFilter, place: bytes, **how: Any) -> SlabStep:
        self.wanted[threading.get_ident()] = topic_filter
        others = [wanted for thread, wanted in list(self.wanted.items()) if thread != threading.get_ident()]
        return self.inner.next(stream, [topic_filter, *others][-1], place, **how)


@breaks(S.test_random_histories)
class ForgetsAfterDeletes(Stores):
    """Loses the first message of every batch that comes after a failed write that came after a delete."""

    seen: ClassVar[set[str]] = set()
    """What happened so far, to any slab: one alone is opened anew too often."""
    failed = False

    def delete(
        self, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> Iterator[DeleteStep]:
        self.seen.add("delete")
        return self.inner.delete(topic_filter, first, last, spare)

    def committed(self) -> None:
        super().committed()
        self.failed = False

    def rows(self, batch: MessageBatch) -> list[int]:
        if self.failed and "delete" in self.seen:
            self.seen.add("failure")
        self.failed = True
        return list(range(int("failure" in self.seen), len(batch)))


globals().update(suites_of(LayoutSuite, SABOTEURS))
