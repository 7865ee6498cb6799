"""The table of mutations of layouts, each with the test that must find it."""

from __future__ import annotations

import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import attrs
import msgspec
import numpy as np
import pyarrow as pa
from changes import also, argument, at_once, each, lie, nth, result, when
from running import M, forwarding, suites_of
from topicstore import MessageBatch, Properties, TopicFilter
from topicstore.contract.batch import FIELDS
from topicstore.contract.columns import ArrowColumn, to_list
from topicstore.contract.engine import DATA, KEYS, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import CompactStep, DeleteStep, Heads, Layout, Slab, SlabStep, StreamInfo
from topicstore_conformance.layout.suite import LayoutSuite
from topicstore_conformance.subjects.pairs import make_layout
from topicstore_conformance.subjects.subject import LayoutSubject
from topicstore_layouts import reference
from topicstore_layouts.reference import ReferenceLayout, ReferenceSlab
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.shared.name_table import NameTable
from topicstore_layouts.skipstream.layout import SkipstreamLayout
from topicstore_layouts.skipstream.slab import SkipstreamSlab

Call = Callable[..., Any]
Given = dict[str, Any]
FAR = 1 << 63
EMPTY = MessageBatch.empty()

# the classes that the table's rows name: wrappers of a slab and a layout, and real classes whose methods are changed
SLAB = forwarding(Slab)
REFERENCE, REFERENCE_SLAB, SKIPSTREAM, NAMES = ReferenceLayout, ReferenceSlab, SkipstreamLayout, NameTable


def create(me: Any, engine: Engine, shard: int, generation: int, parent: Any, write: WriteBatch) -> None:
    """Create the inner layout's slab."""
    me.inner.create(engine, shard, generation, parent and parent.inner, write)


def open_(me: Any, engine: Engine, shard: int, generation: int) -> Slab:
    """Open the inner layout's slab, and wrap it."""
    inner = me.inner.open(engine, shard, generation)
    same = {name: getattr(inner, name) for name in ("epoch", "counters", "reads_heads")}
    return SLAB(inner, engine=engine, generation=generation, **same)


LAYOUT = forwarding(Layout, create=create, open=open_)


def make(name: str) -> Layout:
    """Return a layout that wraps another one."""
    return LAYOUT(make_layout(name))


def subject_of(row: M) -> LayoutSubject:
    return LayoutSubject(make=partial(make, row.on), capabilities={"position_order", "few_streams"})


class Lacking(ArrowColumn):
    """A column of payloads that lack their last byte only in the conversion to Arrow."""

    def toarrow(self) -> Any:
        return pa.array([payload[:-1] for payload in self.tolist()], pa.binary())


def lacking(step: SlabStep) -> SlabStep:
    """Return a step whose payloads are `Lacking`."""
    batch = step.batch
    columns = {name: getattr(batch, name) for name in FIELDS}
    columns["payloads"] = Lacking(pa.array(to_list(batch.payloads), pa.binary()))
    return attrs.evolve(step, batch=MessageBatch(**columns, positions=batch.positions, shards=batch.shards))


# --- changes of batches and steps ------------------------------------------------------------


def taken(batch: MessageBatch, rows: Iterable[int]) -> MessageBatch:
    rows = list(rows)
    return batch.take(np.array(rows, dtype=np.intp)) if rows else EMPTY


def without_the_first(heads: Heads) -> Heads:
    """Return heads without their first row."""
    columns = {name: getattr(heads, name)[1:] for name in ("topics", "client_ids", "positions", "sizes")}
    return attrs.evolve(heads, **columns)


def stored_rows(rows: Callable[[MessageBatch], Iterable[int]]) -> Any:
    """Store only some rows of each batch; ``rows`` returns their indices."""
    return lambda call, me, given: (
        call(batch=left) if len(left := taken(given["batch"], rows(given["batch"]))) else None
    )


def stored(**fields: Callable[[Any], Any]) -> Any:
    """Store messages with changed fields; each argument is a function of the field's value."""

    def altered(batch: MessageBatch) -> MessageBatch:
        messages = [
            msgspec.structs.replace(m, **{name: change(getattr(m, name)) for name, change in fields.items()})
            for m in batch.to_messages()
        ]
        made = MessageBatch.from_messages(messages)
        return made.placed(batch.positions, made.timestamps, 4)

    return argument(batch=altered)


def step(changed: Callable[[SlabStep, Given], SlabStep]) -> Any:
    """Replace the returned step with a function of the step and the arguments."""
    return lambda call, me, given: changed(call(), given)


def rows_of(found: SlabStep, rows: Iterable[int], **more: Any) -> SlabStep:
    return attrs.evolve(found, batch=taken(found.batch, rows), **more)


class Lenient(TopicFilter):
    """A topic filter that matches by a different rule."""

    __slots__ = ("rule",)

    def matches(self, topic: str) -> bool:
        return self.rule(TopicFilter(self.text), topic)


def matching(rule: Callable[[TopicFilter, str], bool]) -> Any:
    """Read with filters that match by a different rule."""

    def lenient(topic_filter: TopicFilter) -> TopicFilter:
        other = Lenient(topic_filter.text)
        other.rule = rule
        return other

    return {"SLAB.next": argument(topic_filter=lenient)}


def with_suffix(number: Callable[[Any], int], seen: Callable[[Any, int, Call, Given], SlabStep]) -> dict[str, Any]:
    """Return changes that append a number to the place of each new cursor.

    ``number`` computes the number. ``seen`` performs a read, and is passed the number at the end of the read's place.
    """

    def begin(call: Call, me: Any, given: Given) -> bytes:
        return call() + number(me).to_bytes(4, "big")

    def next_(call: Call, me: Any, given: Given) -> SlabStep:
        return seen(me, int.from_bytes(given["place"][-4:], "big"), partial(call, place=given["place"][:-4]), given)

    return {"SLAB.begin": begin, "SLAB.next": next_}


def count(name: str) -> Any:
    """Count the calls of a method in the attribute ``name``."""
    return also(lambda me, given: vars(me).update({name: vars(me).get(name, 0) + 1}), before=True)


def after_stores(me: Any, known: int, call: Call, given: Given) -> SlabStep:
    found, stores = call(), vars(me).get("stores", 0)
    return attrs.evolve(found if known + 5 >= stores else rows_of(found, []), place=found.place + given["place"][-4:])


def after_compaction(me: Any, known: int, call: Call, given: Given) -> SlabStep:
    found, now = call(), vars(me).get("compactions", 0)
    found = rows_of(found, range(1, len(found.batch))) if known < now else found
    return attrs.evolve(found, place=found.place + now.to_bytes(4, "big"))


def by_rows(me: Any, done: int, call: Call, given: Given) -> SlabStep:
    """Continue a read by skipping from the beginning as many rows as were read before."""
    limits = given["limits"]
    found = call(limits=attrs.evolve(limits, rows=1 << 30, bytes=1 << 40, deadline=None))
    rows = range(len(found.batch))[done : done + limits.rows]
    end = done + len(rows)
    place = given["place"][:-4] + end.to_bytes(4, "big")
    return rows_of(found, rows, place=place, exhausted=end >= len(found.batch))


def known_places(call: Call, me: Any, given: Given) -> Any:
    """Remember the places that the slab returned, and read nothing from any other place."""
    places = vars(me).setdefault("places", set())
    if "place" in given and given["place"] not in places:
        return SlabStep(batch=EMPTY, place=given["place"], exhausted=True)
    found = call()
    places.add(getattr(found, "place", found))
    return found


def two_halves(call: Call, me: Any, given: Given) -> SlabStep:
    """Divide each topic's messages between two streams by position."""
    found = call(stream=0)
    positions = found.batch.positions if len(found.batch) else []
    return rows_of(found, [row for row, p in enumerate(positions) if int(p) >> 6 & 1 == given["stream"]])


TWO = [StreamInfo(stream=stream, pattern="#") for stream in (0, 1)]


def with_the_last(call: Call, me: Any, given: Given) -> SlabStep:
    """Also read the last batch from memory, whether or not it was committed."""
    found, last = call(), vars(me).get("last")
    if last is None or not found.exhausted or not len(found.batch):
        return found
    known = set(map(int, found.batch.positions))
    messages = enumerate(last.to_messages())
    new = [n for n, m in messages if given["topic_filter"].matches(m.topic) and int(last.positions[n]) not in known]
    return attrs.evolve(found, batch=MessageBatch.concat([found.batch, taken(last, new)]))


def one_failure_only(call: Call, me: Any, given: Given) -> None:
    me.waiting = vars(me).get("waiting", 0) + 1
    if me.waiting <= 2:
        call()


def write_by_itself(call: Call, me: Any, given: Given) -> None:
    mine = WriteBatch()
    call(write=mine)
    me.engine.write(mine)
    call()


def in_one_step(steps: list[DeleteStep]) -> DeleteStep:
    write = WriteBatch()
    write.runs = [run for one in steps for run in one.write.runs]
    return DeleteStep(write=write, messages=sum(s.messages for s in steps), freed=sum(s.freed for s in steps))


def on_and_on(call: Call, me: Any, given: Given) -> Iterator[DeleteStep]:
    yield from call()
    yield from call(first=given["last"] + 1, last=FAR)


DONE: set[Any] = set()


def once(call: Call, me: Any, given: Given) -> Iterator[DeleteStep]:
    """Ignore a repeated delete, even if the first one was not completed."""
    what = id(me.engine), given["topic_filter"].text, given["first"], given["last"]
    for one in () if what in DONE else call():
        DONE.add(what)
        yield one


def newest_lost(me: Any, end: tuple[int, int, int]) -> Iterator[CompactStep]:
    """Yield a compaction step that wrongly deletes the newest value of `DATA` before a key."""
    for chunk in me.engine.scan(DATA, (me.generation, 0, 0), end, reverse=True, limit=1):
        write = WriteBatch()
        write.delete(DATA, chunk[0][0])
        yield CompactStep(write=write, messages=1, freed=len(chunk[0][1]))


def lose_the_newest(call: Call, me: Any, given: Given) -> Iterator[CompactStep]:
    """Compact, and lose the newest batch that was not merged."""
    yield from call()
    yield from newest_lost(me, (me.generation, 1, 0))


def insist(call: Call, me: Any, given: Given) -> Iterator[CompactStep]:
    """Stop compacting after a step that was not committed."""
    for one in () if vars(me).get("asked") else call():
        me.asked = True
        yield one
        me.asked = False


def over_stores(call: Call, me: Any, given: Given) -> Iterator[CompactStep]:
    for one in call():
        one.write.delete_range(DATA, (me.generation, 0, given["bound"] + 1), (me.generation, 1, 0))
        yield one


def readable(call: Call, me: Any, given: Given) -> Iterator[Any]:
    for position, value in call():
        try:
            me._read(position, value)
        except CorruptionError:
            continue
        yield position, value


COUNTED: dict[int, int] = {}


def count_stored(me: Any, given: Given) -> None:
    COUNTED[id(me.engine)] = COUNTED.get(id(me.engine), 0) + len(given["batch"])


def remembered(call: Call, me: Any, given: Given) -> Iterator[int]:
    list(call())
    yield COUNTED[id(me.engine)]


def give_up(call: Call, me: Any, given: Given) -> SlabStep:
    for found in me.inner.verify(FAR):
        if not isinstance(found, int):
            raise CorruptionError(found.reason, found.place)
    return call()


def store_unplaced(call: Call, me: Any, given: Given) -> None:
    """Store every message with the checksum for one fixed position, whatever its own position is."""
    for position, message in zip(given["batch"].positions.tolist(), given["batch"].to_messages(), strict=True):
        row = reference._Row(*(getattr(message, name) for name in message.__struct_fields__))
        given["write"].put(DATA, (me._generation, 0, position), reference._encode(row, 7))


def open_anew(call: Call, me: Any, given: Given) -> Slab:
    """Open a slab without loading its learned structure."""
    return SkipstreamSlab(*given.values(), LearnedTopics(given["generation"], (3, 2)))


def open_anew_if_damaged(call: Call, me: Any, given: Given) -> Slab:
    try:
        return call()
    except CorruptionError:
        return open_anew(call, me, given)


HEIRS: dict[Engine, LearnedTopics] = {}


def inherit(call: Call, me: Any, given: Given) -> None:
    """Inherit the previous generation's structure in memory, without storing the structure."""
    if given["parent"] is not None:
        heir = HEIRS[given["engine"]] = LearnedTopics(given["generation"], (3, 2))
        heir.inherit(given["parent"].trie)
        heir.save(WriteBatch())
        heir.saved()


def open_heir(call: Call, me: Any, given: Given) -> Slab:
    heir = HEIRS.pop(given["engine"], None)
    return call() if heir is None else SkipstreamSlab(*given.values(), heir)


def open_parent(call: Call, me: Any, given: Given) -> Slab:
    """Open the previous generation's slab while a new generation is empty."""
    engine, generation = given["engine"], given["generation"]
    mine = any(engine.scan(DATA, (generation, 0, 0), (generation + 1, 0, 0), limit=1))
    return call(generation=generation if mine or generation == 2 else generation - 1)


def guessed(call: Call, me: Any, given: Given) -> None:
    """Replace a missing name with the first known one."""
    try:
        call()
    except CorruptionError:
        for number in np.unique(given["ids"]).tolist():
            if number >= len(me._texts.values) or me._texts.values[number] is None:
                me._texts.set(number, str(me._texts.values[0]))


def wanted_elsewhere(call: Call, me: Any, given: Given) -> SlabStep:
    """Read with the filter of another thread's last read, if there is one."""
    wanted = vars(me).setdefault("wanted", {})
    wanted[threading.get_ident()] = given["topic_filter"]
    others = [each for thread, each in list(wanted.items()) if thread != threading.get_ident()]
    return call(topic_filter=[given["topic_filter"], *others][-1])


def overtaken(call: Call, me: Any, given: Given) -> SlabStep:
    """If a delete begins during a read, lose a message of the read."""
    before = vars(me).get("deletes", 0)
    found = call()
    return found if vars(me).get("deletes", 0) == before else rows_of(found, range(1, len(found.batch)))


def twice_committed(call: Call, me: Any, given: Given) -> Iterator[CompactStep]:
    """Commit each step a second time when the next one is requested."""
    for one in call():
        yield one
        me.engine.write(one.write)


def happened(me: Any) -> set[str]:
    """Return the names of the events recorded on an engine."""
    found: set[str] = vars(me.engine).setdefault("happened", set())
    return found


def after_a_failure(call: Call, me: Any, given: Given) -> None:
    """Lose the first message of every batch, once a write has failed after a delete."""
    if vars(me).get("failed") and "delete" in happened(me):
        happened(me).add("failure")
    me.failed = True
    stored_rows(lambda batch: range(int("failure" in happened(me)), len(batch)))(call, me, given)


def late_streams(call: Call, me: Any, given: Given) -> list[int]:
    """For any start but 0, leave out the streams that existed at the first call."""
    old = vars(me).setdefault("old", {info.stream for info in me.inner.streams(TopicFilter("#"))})
    return [stream for stream in call() if not given["first"] or stream not in old]


def not_its_place(call: Call, me: Any, given: Given) -> SlabStep:
    try:
        return call()
    except CorruptionError as error:
        raise CorruptionError(error.reason, "") from error


# --- changes of limits, places and borders ---------------------------------------------------


def aged(call: Call, me: Any, given: Given) -> Any:
    """Forget places after a minute."""
    known, now = vars(me).setdefault("aged", {}), time.monotonic()
    if "place" not in given:
        place = call()
        known[place] = now
        return place
    if now - known.get(given["place"], now) > 60:
        return SlabStep(batch=EMPTY, place=given["place"], exhausted=True)
    found = call()
    known[found.place] = now
    return found


def of_a_thousand(call: Call, me: Any, given: Given) -> Any:
    """After more than a thousand cursors were created, let one read start again from the beginning."""
    known = vars(me).setdefault("begun", {})
    if "place" not in given:
        place = call()
        known[place] = known.pop(place, None)
        if len(known) > 1_000:
            vars(me).setdefault("gone", True)
        return place
    if vars(me).pop("gone", False):
        return call(place=bytes(len(given["place"])))
    return call()


def by_hash(name: str) -> Any:
    """Add to places, and check in places, a number that depends on this process's hashes."""
    own = lambda: hash("place").to_bytes(8, "big", signed=True)  # noqa: E731

    def begin(call: Call, me: Any, given: Given) -> bytes:
        return call() + own()

    def next_(call: Call, me: Any, given: Given) -> SlabStep:
        known = given["place"].endswith(own())
        found = call(place=given["place"][:-8])
        return rows_of(found, range(len(found.batch)) if known else [], place=found.place + own())

    return begin if name == "begin" else next_


def after_names(most: int) -> Any:
    """Store the topic of a message under the first topic, once more than ``most`` topics are known."""

    def store(call: Call, me: Any, given: Given) -> None:
        known = vars(me).setdefault("topics", {})
        messages = given["batch"].to_messages()
        for one in messages:
            known.setdefault(one.topic, len(known))
        first = next(iter(known))
        changed = [msgspec.structs.replace(m, topic=first) if known[m.topic] == most else m for m in messages]
        call(batch=MessageBatch.from_messages(changed).placed(given["batch"].positions, given["batch"].timestamps, 4))

    return store


def same_crc(text: str) -> str:
    return text.replace("buckeroo", "plumless")


def lose_runs(call: Call, me: Any, given: Given) -> Iterator[CompactStep]:
    """Compact, and lose the newest value, merged or not, if a step merges more than 255 messages."""
    lost = False
    for one in call():
        lost = lost or one.messages > 255
        yield one
    if lost:
        yield from newest_lost(me, (me.generation + 1, 0, 0))


def border_stays(call: Call, me: Any, given: Given) -> Iterator[DeleteStep]:
    """Spare the message at a delete's first position if that position begins a batch."""
    yield from call(first=given["first"] + (given["first"] in vars(me).get("firsts", ())))


def note_firsts(me: Any, given: Given) -> None:
    vars(me).setdefault("firsts", set()).add(int(given["batch"].positions[0]))


def end_goes(call: Call, me: Any, given: Given) -> Iterator[DeleteStep]:
    """Extend a delete past its last position if that position ends a batch."""
    yield from call(last=given["last"] + 3 * (given["last"] in vars(me).get("ends", ())))


def note_ends(me: Any, given: Given) -> None:
    vars(me).setdefault("ends", set()).add(int(given["batch"].positions[-1]))


def stale_reads(call: Call, me: Any, given: Given) -> SlabStep:
    """Repeat the result of an equal read, even after deletes and compactions, until something is stored."""
    known = vars(me).setdefault("answers", {})
    key = given["stream"], given["topic_filter"].text, given["place"], given["limits"]
    return known[key] if key in known else known.setdefault(key, call())


def shared_answers(call: Call, me: Any, given: Given) -> SlabStep:
    """Return the result of a filter's first read with a limit of rows to all its later reads with that limit."""
    known: dict[Any, SlabStep] = vars(me).setdefault("shared", {})
    return known.setdefault((given["stream"], given["topic_filter"].text, given["limits"].rows), call())


def forget_answers(me: Any, given: Given) -> None:
    vars(me).pop("answers", None)


def end_of_nothing(call: Call, me: Any, given: Given) -> SlabStep:
    """Move the place of a reader that found nothing past the next messages."""
    found = call()
    if found.exhausted and not len(found.batch) and len(found.place) == 8:
        return attrs.evolve(found, place=(int.from_bytes(found.place, "big") + 3).to_bytes(8, "big"))
    return found


KEPT: list[Any] = []


def keep_readings(me: Any, given: Given) -> None:
    KEPT.append([given, object()])


def first_damage_only(call: Call, me: Any, given: Given) -> Iterator[Any]:
    seen = False
    for found in call():
        if isinstance(found, int):
            yield found
        elif not seen:
            seen = True
            yield found


def unless_damaged(name: str) -> Any:
    """Leave out the damage of a keyspace."""
    return each(lambda found: found, keep=lambda found: isinstance(found, int) or name not in found.place)


STORE, NEXT, DELETE, COMPACT, VERIFY = "SLAB.store", "SLAB.next", "SLAB.delete", "SLAB.compact", "SLAB.verify"
# fmt: off
ROWS = [
    *(M("nothing", "", {}, on) for on in ("reference", "block", "skipstream")),
    # --- contents ---
    M("one message in a thousand is lost", "test_no_message_of_many_is_lost", {STORE: stored_rows(lambda batch: [row for row in range(len(batch)) if int(batch.positions[row]) % 1_000])}, "reference"),
    M("user properties are dropped", "test_every_field_comes_back", {STORE: stored(properties=lambda all_: all_ and msgspec.structs.replace(all_, user_properties=()))}, "reference"),
    M("empty retained messages are lost", "test_any_messages_come_back", {STORE: stored_rows(lambda batch: [n for n, m in enumerate(batch.to_messages()) if m.payload or not m.retain])}, "reference"),
    M("topics are cut", "test_hostile_topics", {STORE: stored(topic=lambda topic: topic[:10_000])}, "reference"),
    M("payloads are cut", "test_large_payloads", {STORE: stored(payload=lambda payload: payload[: 1 << 20])}, "reference"),
    M("batches have 8,192 messages", "test_a_large_batch", {STORE: stored_rows(lambda batch: range(min(len(batch), 8_192)))}, "reference"),
    # --- reading ---
    M("the limit is one more", "test_the_limit_of_rows", {NEXT: argument(limits=lambda limits: attrs.evolve(limits, rows=limits.rows + 1))}, "reference"),
    M("bytes have no limit", "test_the_limit_of_bytes", {NEXT: argument(limits=lambda limits: attrs.evolve(limits, bytes=1 << 40))}, "reference"),
    M("columns are left unread", "test_the_columns_that_are_asked_for", {NEXT: argument(limits=lambda limits: attrs.evolve(limits, columns=limits.columns if len(limits.columns) > 2 else frozenset()))}, "block"),
    M("the bound is one more", "test_the_bound", {NEXT: argument(limits=lambda limits: attrs.evolve(limits, bound=limits.bound + 1))}, "reference"),
    M("the start is left out", "test_the_start_is_inclusive", {"SLAB.begin": argument(position=lambda position: position + 1)}, "reference"),
    M("readers of one filter have one answer", "test_readers_of_one_filter_take_turns", {NEXT: shared_answers}, "block"),
    M("nothing is done after the deadline", "test_a_deadline_that_is_past", {NEXT: when(lambda me, given: given["limits"].deadline is not None and given["limits"].deadline <= time.monotonic(), lambda call, me, given: SlabStep(batch=EMPTY, place=given["place"], exhausted=False))}, "reference"),
    M("deadlines don't count", "test_a_deadline_bounds_a_call", {NEXT: argument(limits=lambda limits: attrs.evolve(limits, deadline=None))}, "reference"),
    M("a limit is the end", "test_exhausted_is_not_said_too_early", {NEXT: step(lambda found, given: attrs.evolve(found, exhausted=found.exhausted or len(found.batch) == given["limits"].rows))}, "reference"),
    M("the next call begins after 64 positions", "test_bounds_that_grow_step_by_step", {NEXT: step(lambda found, given: attrs.evolve(found, place=(given["limits"].bound | 63).to_bytes(8, "big")) if found.exhausted else found)}, "reference"),
    M("payloads lack a byte in Arrow", "test_batches_are_the_same_in_arrow", {NEXT: result(lambda found: lacking(found) if len(found.batch) else found)}, "reference"),
    M("the newest come first", "test_a_publishers_messages_keep_their_order", {NEXT: result(lambda found: rows_of(found, reversed(range(len(found.batch)))))}, "reference"),
    M("rows are sorted by topic", "test_a_stream_is_in_order_of_positions", {NEXT: result(lambda found: rows_of(found, sorted(range(len(found.batch)), key=[m.topic for m in found.batch.to_messages()].__getitem__)))}, "reference"),
    M("too much is visible", "test_what_is_visible_never_changes", {"SLAB.visible": result(lambda position: position + 1)}, "reference"),
    M("streams are listed twice", "test_streams_share_the_messages", {"SLAB.streams": result(lambda all_: [*all_, *(attrs.evolve(info, stream=info.stream + 1_000) for info in all_)]), "SLAB.begin": argument(stream=lambda stream: stream % 1_000), NEXT: argument(stream=lambda stream: stream % 1_000)}, "reference"),
    M("old streams are left out of late starts", "test_cover_with_a_start_leaves_nothing_out", {"SLAB.cover": late_streams}, "skipstream"),
    M("patterns are wrong", "test_a_streams_pattern_matches_its_topics", {"SLAB.streams": result(lambda all_: [attrs.evolve(info, pattern="f/#") for info in all_])}, "reference"),
    M("nothing is counted", "test_counters_count_rows", {"LAYOUT.open": result(lambda slab: vars(slab).update(counters=type(slab.counters)()) or slab)}, "reference"),
    M("streams are miscounted", "test_info_counts_streams", {"SLAB.info": result(lambda info: attrs.evolve(info, streams=info.streams + 1))}, "reference"),
    # --- topics and filters ---
    M("# matches $", "test_wildcards_do_not_match_dollar_topics", matching(lambda f, topic: f.matches(topic) or f.text == "#"), "reference"),
    M("empty levels are none", "test_empty_levels_are_levels", matching(lambda f, topic: f.matches(topic.strip("/") or topic)), "reference"),
    M("# wants a level", "test_a_filter_matches_the_level_above_its_hash", matching(lambda f, topic: f.matches(topic) and f"{topic}/#" != f.text), "reference"),
    M("the last + wants a text", "test_filters_made_of_topics", matching(lambda f, topic: f.matches(topic) and not (f.text.endswith("+") and topic.endswith("/"))), "reference"),
    M("the last level may miss", "test_topics_nobody_published_to", matching(lambda f, topic: f.matches(topic) or f.matches(f"{topic}/no")), "reference"),
    # --- places of cursors ---
    M("places are kept in memory", "test_places_survive_all_changes", {"SLAB.begin": known_places, NEXT: known_places}, "reference"),
    M("places end with stores", "test_places_survive_all_changes", {STORE: count("stores"), **with_suffix(lambda me: vars(me).get("stores", 0), after_stores)}, "reference"),
    M("places count rows", "test_places_survive_all_changes", with_suffix(lambda me: 0, by_rows), "reference"),
    M("places end with compaction", "test_places_survive_all_changes", {COMPACT: count("compactions"), **with_suffix(lambda me: vars(me).get("compactions", 0), after_compaction)}, "block"),
    M("places say what is there", "test_places_say_what_was_read", {"SLAB.reached": lie(1 << 60)}, "reference"),
    M("all streams are there", "test_streams_that_are_not_there", {"SLAB.begin": argument(stream=0)}, "reference"),
    M("any place is the beginning", "test_places_that_are_none", {NEXT: argument(place=lambda place: place if len(place) == 8 else bytes(8))}, "reference"),
    # --- structure ---
    M("nothing is learned", "test_few_streams_serve_many_topics", {"SKIPSTREAM.open": lambda call, me, given: SkipstreamSlab(*given.values(), LearnedTopics(given["generation"], (1_000_000,)))}, "skipstream"),
    M("topics move", "test_no_topic_moves", {"SLAB.streams": lie(TWO), "SLAB.cover": lie([0, 1]), "SLAB.begin": argument(stream=lambda stream: stream // 2), NEXT: two_halves}, "reference"),
    M("streams beyond the numbers of a byte are left out", "test_more_structures_than_a_byte_counts", {"SLAB.cover": result(lambda streams: [stream for stream in streams if stream < 256])}, "skipstream"),
    M("the structure is lost", "test_the_structure_is_there_after_reopening", {"SKIPSTREAM.open": open_anew}, "skipstream"),
    M("children come first", "test_learned_names_the_streams", {"SLAB.learned": result(lambda nodes: iter(list(nodes)[::-1]))}, "skipstream"),
    M("heirs are kept in memory", "test_a_generation_inherits", {"SKIPSTREAM.create": inherit, "SKIPSTREAM.open": open_heir}, "skipstream"),
    M("an heir shows its parent's messages", "test_an_heir_has_no_messages_of_its_parent", {"REFERENCE.open": open_parent}, "reference"),
    M("generations are one", "test_generations_keep_apart", {"REFERENCE.open": argument(generation=1)}, "reference"),
    M("a note is beside the generation", "test_a_generation_goes_by_range_deletes", {STORE: also(lambda me, given: given["write"].put(KEYS, b"note", b""))}, "reference"),
    # --- writing ---
    M("failed batches are shown", "test_a_failed_write_leaves_nothing", {STORE: also(lambda me, given: vars(me).update(last=given["batch"])), NEXT: with_the_last}, "reference"),
    M("what was learned is saved too early", "test_what_a_failed_write_learned_is_stored_by_the_next", {STORE: also(lambda me, given: me.inner.committed())}, "skipstream", raises=CorruptionError),
    M("two failures stop the slab", "test_several_failures_in_a_row", {STORE: one_failure_only, "SLAB.committed": also(lambda me, given: vars(me).update(waiting=0))}, "reference"),
    M("the slab writes by itself", "test_storing_changes_nothing_until_the_commit", {STORE: write_by_itself}, "reference"),
    # --- deletes ---
    M("the last position stays", "test_exactly_what_matches_goes", {DELETE: argument(last=lambda last: last - 1)}, "reference"),
    M("freed bytes are miscounted", "test_exactly_what_matches_goes", {DELETE: each(lambda one: attrs.evolve(one, freed=2 * one.freed))}, "reference"),
    M("nothing is spared", "test_what_is_to_be_spared_stays", {DELETE: argument(spare=())}, "reference"),
    M("$ is not deleted", "test_everything_can_go", {DELETE: when(lambda me, given: given["topic_filter"].text[0] == "$", lambda call, me, given: iter(()))}, "reference"),
    M("a delete is one step", "test_steps_are_bounded", {DELETE: at_once(in_one_step)}, "reference"),
    M("later messages are deleted", "test_others_write_between_steps", {DELETE: on_and_on}, "reference"),
    M("a delete is begun once", "test_a_delete_is_resumed", {DELETE: once}, "reference"),
    # --- heads ---
    M("heads lack a message", "test_heads_are_those_of_the_messages", {"SLAB.heads": each(without_the_first)}, "block"),
    M("heads lack a range", "test_heads_are_those_of_the_messages", {"SLAB.heads": each(lambda heads: attrs.evolve(heads, last=heads.last + 1))}, "block"),
    M("heads end too late", "test_heads_of_any_range", {"SLAB.heads": argument(last=lambda last: last + 9)}, "block"),
    M("steps lack a message", "test_compaction_steps_have_the_heads_of_a_range", {COMPACT: each(lambda step: attrs.evolve(step, heads=without_the_first(step.heads)))}, "block"),
    M("steps end too late", "test_compaction_steps_have_the_heads_of_a_range", {COMPACT: each(lambda step: attrs.evolve(step, heads=attrs.evolve(step.heads, last=FAR)))}, "block"),

    # --- compaction ---
    M("compaction loses the newest", "test_compaction_changes_nothing", {COMPACT: lose_the_newest}, "block"),
    M("everything waits", "test_the_backlog_is_what_waits", {"SLAB.backlog": lambda call, me, given: given["messages"]}, "reference"),
    M("compaction continues to the end", "test_compaction_ends_at_its_bound", {COMPACT: argument(bound=FAR)}, "block"),
    M("each step must be committed", "test_steps_that_are_never_committed", {COMPACT: insist}, "block"),
    M("steps are committed twice", "test_deletes_between_steps_of_a_compaction", {COMPACT: twice_committed}, "block"),
    M("steps remove later stores", "test_stores_beside_compaction", {COMPACT: over_stores}, "block"),
    # --- damage ---
    M("damaged messages are skipped", "test_flipped_bits_are_reported", {"REFERENCE_SLAB._scan": readable}, "reference"),
    M("verify finds all well", "test_other_values_of_messages_are_reported", {VERIFY: each(lambda found: found if isinstance(found, int) else 1)}, "reference"),
    M("errors have no place", "test_flipped_bits_are_reported", {NEXT: not_its_place}, "reference"),
    M("what follows a value is ignored", "test_other_values_of_messages_are_reported", {"REFERENCE_SLAB._read": argument(value=lambda value: value.removesuffix(b"\0"))}, "reference"),
    M("any place will do", "test_other_values_of_messages_are_reported", {"REFERENCE_SLAB.store": store_unplaced, "REFERENCE_SLAB._read": argument(position=7)}, "reference"),
    M("what was stored is counted", "test_missing_values_are_missed", {STORE: also(count_stored), VERIFY: remembered}, "reference"),
    M("damaged structure begins anew", "test_damaged_structure_is_reported", {"SKIPSTREAM.open": open_anew_if_damaged}, "skipstream"),
    M("any damage ends reading", "test_the_rest_stays_readable", {NEXT: give_up}, "reference", raises=CorruptionError),
    M("missing names are guessed", "test_missing_writes_change_no_message", {"NAMES.check": guessed}, "block"),
    # --- threads and histories ---
    M("a delete during a call loses a message", "test_a_change_at_any_moment_of_a_read", {DELETE: count("deletes"), NEXT: overtaken}, "reference"),
    M("threads read for each other", "test_readers_beside_a_writer_and_compaction", {NEXT: wanted_elsewhere}, "reference"),
    M("a failure after a delete loses messages", "test_random_histories", {DELETE: also(lambda me, given: happened(me).add("delete")), STORE: after_a_failure, "SLAB.committed": also(lambda me, given: vars(me).update(failed=False))}, "reference"),
    M("every third batch is lost", "test_random_histories", {STORE: nth(3, lie())}, "reference"),
    # --- limits ---
    M("payloads of 32 KB lose a byte", "test_one_payload_of_many_sizes", {STORE: stored(payload=lambda payload: payload[:-1] if len(payload) == 32_768 else payload)}, "reference"),
    M("payloads of 64 KB are cut", "test_payloads_of_every_size", {STORE: stored(payload=lambda payload: payload[:65_535])}, "reference"),
    M("payloads have lengths of three bytes", "test_a_payload_past_every_buffer", {STORE: stored(payload=lambda payload: payload[: len(payload) & 0xFFFFFF])}, "reference"),
    M("payloads have 128 MB", "test_the_largest_payloads", {STORE: stored(payload=lambda payload: payload[: 1 << 27])}, "reference"),
    M("client ids have 255 bytes", "test_texts_of_every_size", {STORE: stored(client_id=lambda text: text[:255])}, "reference"),
    M("content types are cut", "test_texts_of_every_size", {STORE: stored(properties=lambda all_: all_ and msgspec.structs.replace(all_, content_type=all_.content_type and all_.content_type[:1_000]))}, "reference"),
    M("there are 255 user properties", "test_any_number_of_user_properties", {STORE: stored(properties=lambda all_: all_ and msgspec.structs.replace(all_, user_properties=all_.user_properties[:255]))}, "reference"),
    M("user properties are a dict", "test_any_number_of_user_properties", {STORE: stored(properties=lambda all_: all_ and msgspec.structs.replace(all_, user_properties=tuple(dict(all_.user_properties).items())))}, "reference"),
    M("batches of 1,000 lose their last message", "test_batches_of_every_count", {STORE: stored_rows(lambda batch: range(len(batch) - (len(batch) == 1_000)))}, "reference"),
    M("rows are counted by two bytes", "test_more_rows_than_two_bytes_count", {STORE: stored_rows(lambda batch: range(min(len(batch), 65_535)))}, "reference"),
    M("a merge of more than 255 loses the newest", "test_many_runs_are_merged", {COMPACT: lose_runs}, "block"),
    M("the 4,097th topic is the first", "test_more_names_than_any_cache_holds", {STORE: after_names(4_097)}, "reference"),
    M("times have 32 bits", "test_times_at_their_limits", {STORE: stored(timestamp=lambda time: time & 0xFFFFFFFF)}, "reference", raises=OverflowError),
    M("times begin with 1", "test_times_at_their_limits", {STORE: stored(timestamp=lambda time: time or 1)}, "reference"),
    M("bounds have 63 bits", "test_positions_at_their_limits", {NEXT: argument(limits=lambda limits: attrs.evolve(limits, bound=min(limits.bound, (1 << 63) - 1)))}, "reference"),
    M("starts are floats", "test_positions_at_their_limits", {"SLAB.begin": argument(position=lambda position: int(float(position)))}, "reference"),
    M("shards have a byte", "test_any_number_of_the_shard", {"LAYOUT.open": argument(shard=lambda shard: shard & 0xFF)}, "reference"),
    M("topics are known by crc32", "test_names_with_equal_hashes_stay_apart", {STORE: stored(topic=same_crc)}, "reference"),
    M("client ids are known by crc32", "test_names_with_equal_hashes_stay_apart", {STORE: stored(client_id=same_crc)}, "reference"),
    M("topics are normalised", "test_names_with_equal_hashes_stay_apart", {STORE: stored(topic=lambda text: unicodedata.normalize("NFC", text))}, "reference"),
    M("empty properties are none", "test_payloads_and_fields_are_byte_for_byte", {STORE: stored(properties=lambda all_: None if all_ == Properties() else all_)}, "reference"),
    M("an empty content type is none", "test_payloads_and_fields_are_byte_for_byte", {STORE: stored(properties=lambda all_: all_ and msgspec.structs.replace(all_, content_type=all_.content_type or None))}, "reference"),
    # --- changes and readings ---
    M("answers outlast deletes", "test_every_reading_after_every_change", {NEXT: stale_reads, STORE: also(forget_answers)}, "block"),
    M("heads outlast deletes", "test_every_reading_after_every_change", {"SLAB.heads": lambda call, me, given: iter(vars(me).setdefault("known_heads", {}).setdefault((given["topic_filter"].text, given["first"], given["last"]), [*call()])), STORE: also(lambda me, given: vars(me).pop("known_heads", None))}, "block"),
    M("places end with a delete", "test_old_places_after_every_change", {DELETE: count("compactions"), **with_suffix(lambda me: vars(me).get("compactions", 0), after_compaction)}, "block"),
    M("places have a hash", "test_places_work_in_other_processes", {"SLAB.begin": by_hash("begin"), NEXT: by_hash("next")}, "reference"),
    M("places last a minute", "test_any_number_of_places_is_held", {"SLAB.begin": aged, NEXT: aged}, "reference"),
    M("a thousand places are known", "test_any_number_of_places_is_held", {"SLAB.begin": of_a_thousand, NEXT: of_a_thousand}, "reference"),
    M("readers who find nothing go too far", "test_limits_when_nothing_is_found", {NEXT: end_of_nothing}, "reference"),
    M("one row and a deadline find no more", "test_limits_when_nothing_is_found", {NEXT: step(lambda found, given: attrs.evolve(found, exhausted=True) if given["limits"].rows == 1 and given["limits"].deadline is not None else found)}, "reference"),
    M("a limit that is met is not exhausted, and loses a row", "test_limits_when_everything_is_found", {NEXT: step(lambda found, given: rows_of(found, range(len(found.batch) - 1)) if len(found.batch) == given["limits"].rows > 50 else found)}, "reference"),
    M("empty slabs have one message", "test_a_slab_without_messages", {VERIFY: lambda call, me, given: call() if given["bound"] >= 0 else iter([1])}, "reference"),
    M("filters are kept", "test_nothing_that_is_read_stays_in_memory", {"SLAB.begin": also(keep_readings)}, "reference"),
    M("openings are kept", "test_nothing_that_is_read_stays_in_memory", {"LAYOUT.open": also(keep_readings)}, "reference"),
    # --- borders ---
    M("the first of a batch stays", "test_deletes_at_the_borders_of_batches", {STORE: also(note_firsts), DELETE: border_stays}, "reference"),
    M("the next batch goes with the last", "test_deletes_at_the_borders_of_batches", {STORE: also(note_ends), DELETE: end_goes}, "block"),
    M("every eighth position can't be deleted", "test_deletes_at_every_position", {DELETE: when(lambda me, given: given["first"] == given["last"] and given["first"] % 8 == 1, lambda call, me, given: iter(()))}, "reference"),
    M("sixteen filters are spared", "test_any_number_of_topics_is_spared", {DELETE: argument(spare=lambda spare: spare[:16])}, "reference"),
    M("filters with wildcards are not spared", "test_any_number_of_topics_is_spared", {DELETE: argument(spare=lambda spare: [one for one in spare if "+" not in one.text])}, "reference"),
    M("answers outlast steps of deletes", "test_deletes_of_what_is_being_read", {NEXT: stale_reads, STORE: also(forget_answers)}, "block"),
    M("steps are counted before they are taken", "test_reads_between_steps_of_a_delete", {DELETE: lambda call, me, given: (me.engine.write(one.write) or one for one in list(call()))}, "reference"),
    M("verify leaves out a keyspace", "test_damage_in_each_keyspace_is_reported", {VERIFY: unless_damaged("position")}, "reference"),
    M("only one damage is reported", "test_all_damage_is_reported", {VERIFY: first_damage_only}, "reference"),
    M("verify goes on to the end", "test_verification_ends_at_its_bound", {VERIFY: argument(bound=lambda bound: FAR)}, "reference"),
]
# fmt: on
globals().update(suites_of("layout", LayoutSuite, ROWS, subject_of))
