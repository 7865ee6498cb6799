"""A skipstream slab: each stream comes back whole and in order, by whichever way a reader found its messages."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore import Message, MessageBatch, TopicFilter
from topicstore.contract.columns import to_list
from topicstore.contract.engine import KEYS, KEYSPACES, META, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import Damage, ReadCounters
from topicstore.contract.positions import COUNTER_BITS, Positions
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.oracle import strategies
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.skipstream.entries import Entries
from topicstore_layouts.skipstream.keys import entry_keys, message_keys
from topicstore_layouts.skipstream.layout import SkipstreamLayout, SkipstreamOptions
from topicstore_layouts.skipstream.postings import Postings, common
from topicstore_layouts.skipstream.slab import SkipstreamSlab

SHARD, GENERATION = 4, 2
START = 1 << 60
PLENTY = {"limit": 100_000, "limit_bytes": 1 << 30, "deadline": None}
TIME = START >> COUNTER_BITS
CHUNK = 128
"""What the memory backend reads at least."""

Row = tuple[int, Message]
Pairs = list[tuple[bytes, bytes]]


@attrs.define
class Store:
    """A slab over an engine, and every message that should be in it."""

    thresholds: tuple[int, ...] = (3, 2)
    hash_bits: int = 64
    capacity: int = 1_000
    engine: Engine = attrs.field(factory=lambda: MemoryEngine(KEYSPACES))
    rows: list[Row] = attrs.field(factory=list)
    last: int = START
    slab: SkipstreamSlab = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        trie = LearnedTopics.load(self.engine, GENERATION, self.thresholds, self.capacity)
        self.slab = SkipstreamSlab(self.engine, SHARD, GENERATION, trie, self.hash_bits)

    def put(self, messages: Iterable[Message], *, gaps: int = 1, commit: bool = True) -> None:
        """Store a batch whose positions go up by ``gaps``."""
        batch = MessageBatch.from_messages(messages)
        positions = np.arange(len(batch), dtype=np.uint64) * np.uint64(gaps) + np.uint64(self.last + 1)
        write = WriteBatch()
        placed = batch.placed(positions, [m.timestamp or 0 for m in batch.to_messages()], SHARD)
        self.slab.store(placed, write)
        if commit:
            self.engine.write(write)
            self.slab.committed()
            self.last = int(positions[-1])
            self.rows += zip(positions.tolist(), placed.to_messages(), strict=True)

    def delete(self, topic_filter: str, first: int, last: int) -> None:
        """Delete from the slab and from the list."""
        before, size, deleted = len(self.rows), self.size(), 0
        for step in self.slab.delete(TopicFilter(topic_filter), first, last):
            self.engine.write(step.write)
            deleted += step.messages
            size -= step.freed
        assert size == self.size()
        matches = TopicFilter(topic_filter).matches
        self.rows = [(at, m) for at, m in self.rows if not (first <= at <= last and matches(m.topic))]
        assert before - len(self.rows) == deleted

    def check(self, text: str = "#", first: int = 0, bound: int | None = None, **limits: Any) -> int:
        """Hold what a reader gets from all streams against the list; return how many messages it was."""
        topic_filter, bound = TopicFilter(text), self.last if bound is None else bound
        got: list[Row] = []
        for info in self.slab.streams(topic_filter):
            found = [row for call in self.read(info.stream, text, first, bound, **limits) for row in call]
            assert sorted(at for at, _ in found) == [at for at, _ in found]
            got += found
        wanted = [row for row in self.rows if first <= row[0] <= bound and topic_filter.matches(row[1].topic)]
        assert wanted == sorted(got, key=lambda row: row[0])
        return len(got)

    def read(self, stream: int, text: str, first: int, bound: int, **limits: Any) -> Iterator[list[Row]]:
        """Yield what a reader of one stream gets, a list a call."""
        topic_filter, exhausted = TopicFilter(text), False
        place = self.slab.begin(stream, topic_filter, first)
        while not exhausted:
            step = self.slab.next(stream, topic_filter, place, bound=bound, **{**PLENTY, **limits})
            assert step.exhausted or step.place > place
            place, exhausted = step.place, step.exhausted
            assert len(step.batch) <= limits.get("limit", PLENTY["limit"])
            positions = to_list(step.batch.positions) if len(step.batch) else []
            yield list(zip(positions, step.batch.to_messages(), strict=True))
        assert int.from_bytes(place, "big") == max(bound + 1, first)

    def cost(self, text: str, **limits: Any) -> ReadCounters:
        """Check a replay and return what it cost."""
        self.slab.counters = ReadCounters()
        self.check(text, **limits)
        return self.slab.counters

    def pairs(self, kind: int) -> Pairs:
        """Return the stored messages (1) or index entries (2)."""
        return [pair for chunk in self.engine.scan(KEYS) for pair in chunk if pair[0][4] == kind]

    def size(self) -> int:
        return sum(len(value) for kind in (1, 2) for _, value in self.pairs(kind))

    def replace(self, puts: Pairs, deletes: Sequence[bytes] = ()) -> None:
        """Put and delete behind the slab's back."""
        write = WriteBatch()
        for key, value in puts:
            write.put(KEYS, key, value)
        for key in deletes:
            write.delete(KEYS, key)
        self.engine.write(write)

    def verify(self, bound: int | None = None) -> tuple[int, list[Damage]]:
        """Return how many good messages there are, and the damages."""
        found = list(self.slab.verify(self.last if bound is None else bound))
        return sum(n for n in found if isinstance(n, int)), [n for n in found if isinstance(n, Damage)]


def message(topic: str, number: int = 0) -> Message:
    return Message(topic, b"%d " % number * 3, "c", 1, False, TIME + number)


def buses(count: int, *, lines: int = 12, vehicles: int = 40, seed: int = 1) -> list[Message]:
    """Return messages of topics with two levels that vary, each vehicle on some of the lines."""
    draw = random.Random(seed)
    drawn = ((draw.randrange(vehicles), draw.randrange(4)) for _ in range(count))
    return [message(f"t/{(vehicle + line) % lines}/{vehicle}/x", n) for n, (vehicle, line) in enumerate(drawn)]


# --- right, whatever is asked ---

stores = st.builds(
    Store,
    thresholds=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    hash_bits=st.sampled_from([1, 4, 64]),
    capacity=st.sampled_from([0, 5, 1_000]),
)
batches = st.lists(
    st.lists(strategies.messages(times=st.integers(0, 2**40)), min_size=1, max_size=12), min_size=1, max_size=6
)
places = st.integers(START - 2, START + 80)


@given(
    stores,
    batches,
    strategies.filters(),
    places,
    places,
    st.sampled_from([1, 3, 100]),
    st.sampled_from([1, 300, 1 << 30]),
    st.booleans(),
)
def test_everything_comes_back(
    store: Store,
    stored: list[list[Message]],
    text: str,
    first: int,
    bound: int,
    limit: int,
    limit_bytes: int,
    reopened: bool,
) -> None:
    """Any filter, place, bound and limit, also where hardly two hashes differ or the trie is full."""
    for batch in stored:
        store.put(batch, gaps=3)
    if reopened:
        store.reopen()
    store.check()
    store.check(text, first, bound, limit=limit, limit_bytes=limit_bytes)
    store.check(text, deadline=0.0)
    assert (len(store.rows), []) == store.verify()


@pytest.mark.slow
@given(stores, batches, st.lists(st.tuples(strategies.filters(), places, places), min_size=1, max_size=3))
def test_deletes_take_the_entries_along(
    store: Store, stored: list[list[Message]], deletes: list[tuple[str, int, int]]
) -> None:
    """What is left is whole, and the index knows of nothing else."""
    for batch in stored:
        store.put(batch)
    for text, first, last in deletes:
        store.delete(text, first, last)
        store.check()
        store.check(text)
        assert (len(store.rows), []) == store.verify()
    store.delete("#", 0, store.last)
    store.delete("$SYS/#", 0, store.last)
    store.delete("$x/#", 0, store.last)
    assert len(store.rows) == len(store.pairs(1))
    assert store.rows or not store.pairs(2)


@pytest.mark.parametrize("hash_bits", [3, 64])
@pytest.mark.parametrize("gaps", [1, 977])
def test_many_messages(hash_bits: int, gaps: int) -> None:
    """So many that lists are read in chunks and leapt over, with several levels asked for."""
    store = Store(thresholds=(1, 0), hash_bits=hash_bits)
    messages = buses(4_500)
    for start in range(0, len(messages), 900):
        store.put(messages[start : start + 900], gaps=gaps)
    common_topic = max(sorted({m.topic for m in messages}), key=lambda topic: sum(m.topic == topic for m in messages))
    line, vehicle = common_topic.split("/")[1:3]
    for text in (common_topic, f"t/{line}/+/x", f"t/+/{vehicle}/#", f"+/{line}/{vehicle}/x", "t/none/+/x", "+/+/+/x"):
        middle = store.rows[2_321][0]
        for limits in ({}, {"limit": 7}, {"limit_bytes": 400}, {"first": middle}, {"bound": middle}):
            store.check(text, **limits)
    store.delete(f"t/{line}/+/x", store.rows[100][0], store.rows[4_000][0])
    store.check(f"t/+/{vehicle}/x")
    assert (len(store.rows), []) == store.verify()


def test_hashes_of_another_stream() -> None:
    """Candidates that are all of another stream lead to nothing, however many they are."""
    store = Store(thresholds=(9, 0), hash_bits=1)
    store.put([message("a/0")] + [message(f"b/{n}") for n in range(800)])
    for number in range(8):
        store.check(f"a/{number}")


def test_limits() -> None:
    """A call ends with its rows, its bytes or its time, having moved on."""
    store = Store(thresholds=(0,))
    store.put([message("ab"[n % 2]) for n in range(10)])
    (info,) = store.slab.streams(TopicFilter("#"))
    size = len(store.pairs(1)[0][1])

    def calls(text: str, **limits: Any) -> list[int]:
        return list(map(len, store.read(info.stream, text, 0, store.last, **limits)))

    assert [3, 3, 3, 1] == calls("#", limit=3)
    assert [3, 2] == calls("a", limit=3)
    assert [2, 2, 2, 2, 2] == calls("#", limit_bytes=size + 1)
    assert [1, 1, 1, 1, 1, 0] == calls("a", limit_bytes=1)
    assert [10] == calls("#", deadline=time.monotonic() + 1_000)


def test_a_deadline_ends_a_long_search() -> None:
    """A call moves on by what it looked at, though it found nothing."""
    store = Store(thresholds=(0,), hash_bits=1)
    store.put([message(f"{n}") for n in range(2_000)])
    wanted = Entries(store.slab.trie, 1).wanted(1, TopicFilter("1999"))
    shared = sum(Entries(store.slab.trie, 1).of(1, str(n)) == wanted for n in range(2_000))
    calls = list(store.read(1, "1999", 0, store.last, deadline=0.0))
    assert 1 < len(calls) < shared
    assert [("1999",)] == [tuple(m.topic for _, m in call) for call in calls if call]


def test_no_such_stream_or_place() -> None:
    """Streams are those learned, places are positions."""
    store = Store()
    store.put([message("a")])
    assert [(1, "a")] == [(info.stream, info.pattern) for info in store.slab.streams(TopicFilter("+"))]
    assert 1 == store.slab.info().streams
    assert [("a",)] == [node.path for node in store.slab.learned()]
    with pytest.raises(KeyError):
        store.slab.begin(2, TopicFilter("#"), 0)
    for stream, place in ((2, bytes(8)), (1, bytes(7)), (1, b"")):
        with pytest.raises(ValueError, match="b'"):
            store.slab.next(stream, TopicFilter("#"), place, bound=START, **PLENTY)  # type: ignore[arg-type]


def test_a_stream_that_the_filter_does_not_touch() -> None:
    """Gives nothing, rather than what it holds."""
    store = Store()
    store.put([message("a/b"), message("c/d")])
    for text in ("a/b/c", "c/+", "+", "c/b", "$SYS/#"):
        assert [[]] == list(store.read(1, text, 0, store.last))


# --- what it costs ---


def test_a_narrow_filter_reads_what_it_returns() -> None:
    """One vehicle among many, by itself and with a line that has many messages."""
    store = Store(thresholds=(1, 0))
    store.put([message(f"t/{n % 3}/{n}/x") for n in range(6_000)] + [message("t/1/4000/x"), message("t/2/4000/x")])
    for text, rows in (("t/+/4000/x", 3), ("t/1/4000/x", 2), ("t/+/4000/#", 3)):
        cost = store.cost(text)
        assert rows == cost.rows
        assert cost.visited < 5 * CHUNK
        assert cost.seeks <= 5


def test_entries_rule_out_messages() -> None:
    """Where two levels have as many entries but few in common, messages of only one of them are not read."""
    store = Store(thresholds=(0,))
    store.put([message(f"{'a' if n % 2 else 'b'}/{'a' if n % 4 < 2 else 'c'}/{n % 64}") for n in range(4_096)])
    cost = store.cost("a/a/1")
    assert 64 == cost.rows
    assert cost.visited < 600
    store = Store(thresholds=(0,))
    store.put([message("a/x" if n % 3 else "b/y") for n in range(4_000)] + [message("a/y")])
    cost = store.cost("a/y")
    assert 1 == cost.rows
    assert cost.skipped > 1_000


def test_lists_that_do_not_overlap() -> None:
    """Are leapt over: a vehicle that changed its line, and a line whose vehicles changed."""
    store = Store(thresholds=(0,))
    store.put([message("a/x")] * 10_000)
    store.put([message("b/y")] * 10_000)
    store.put([message("a/y")] * 3)
    cost = store.cost("a/y")
    assert 3 == cost.rows
    assert cost.visited < 3 * CHUNK


def test_dense_matches_are_read_in_passing() -> None:
    """Half of a stream is not fetched message by message, each by its key."""
    store = Store(thresholds=(0,))
    store.put([message(f"{n % 2}/{n}") for n in range(8_000)])
    cost = store.cost("1/+")
    assert 4_000 == cost.rows
    assert cost.visited > 11_000  # half of them entries


def test_levels_behind_the_last_learned() -> None:
    """The first eight have entries; topics that differ only behind them are told apart all the same."""
    store = Store(capacity=0)
    deep = "/".join("abcdefgh")
    store.put([message(f"{n}/{deep}"[: 2 * n]) for n in range(3, 9)])
    store.put([message(f"{deep}/{n}") for n in range(500)])
    assert {"#"} == {info.pattern for info in store.slab.streams(TopicFilter("#"))}
    cost = store.cost(f"3/{deep}"[:6])
    assert 1 == cost.rows <= cost.visited < 30
    assert 1 == store.cost(f"{deep}/77").rows
    assert (len(store.rows), []) == store.verify()


def test_memory_of_topics_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's cache starts anew when it is full, and topics keep their streams and entries."""
    monkeypatch.setattr("topicstore_layouts.skipstream.entries._KNOWN_TOPICS", 50)
    store = Store()
    for start in range(0, 300, 30):
        store.put([message(f"a/{n}") for n in range(start, start + 40)])
    store.put([message(f"a/{n}") for n in range(300)])
    store.check()
    store.check("a/77")
    assert (len(store.rows), []) == store.verify()


# --- lists of the index ---


@st.composite
def _lists(draw: st.DrawFn) -> list[list[int]]:
    """Two or three lists of positions, in clusters that may or may not meet."""
    count = draw(st.integers(2, 3))
    clusters = st.tuples(st.integers(0, 3_000), st.integers(1, 300), st.integers(1, 7))
    lists = []
    for _ in range(count):
        spans = draw(st.lists(clusters, min_size=1, max_size=4))
        lists.append(sorted({first + n * gap for first, rows, gap in spans for n in range(rows)}))
    return lists


@given(_lists(), st.integers(0, 4_000), st.integers(0, 6_000))
def test_common_positions(lists: list[list[int]], first: int, bound: int) -> None:
    """Every common position is a candidate once, in order, and every candidate is of one list at least."""
    engine, keys, write = MemoryEngine(KEYSPACES), entry_keys(GENERATION), WriteBatch()
    for number, positions in enumerate(lists):
        for key in keys.many(number, np.array(positions, dtype=np.uint64)):
            write.put(KEYS, key, b"")
    engine.write(write)
    counters = ReadCounters()
    postings = [Postings(engine, keys, number, bound, counters) for number in range(len(lists))]
    candidates: list[int] = []
    for stretch in common(postings, first, bound, counters):
        assert all(stretch.first <= at <= stretch.last <= bound for at in stretch.positions.tolist())
        assert not candidates or candidates[-1] < stretch.first
        candidates += stretch.positions.tolist()
    shared = set.intersection(*map(set, lists))
    assert {at for at in shared if first <= at <= bound} <= set(candidates)
    assert set(candidates) <= {at for positions in lists for at in positions if first <= at <= bound}
    assert sorted(set(candidates)) == candidates


@given(
    st.integers(1, 2**32 - 2),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=9),
)
def test_keys(generation: int, parts: list[tuple[int, int]]) -> None:
    """One by one or many, of bytes that are in the order of their numbers, and back."""
    numbers, positions = (np.array(column, dtype=np.uint64) for column in zip(*parts, strict=True))
    for keys in (message_keys(generation), entry_keys(generation)):
        made = keys.many(numbers, positions)
        assert made == [keys.one(*part) for part in parts]
        assert [parts[n] for n in np.lexsort((positions, numbers))] == [parts[made.index(key)] for key in sorted(made)]
        assert positions.tolist() == _positions(keys.positions(made))
        assert numbers.tolist() == keys.numbers(made).tolist()
        start, end = keys.all()
        assert all(start <= key < end for key in made)
        for (number, position), key in zip(parts, made, strict=True):
            start, end = keys.span(number, position, position)
            assert [key] == sorted({key for key in made if start <= key < end})


def _positions(positions: Positions) -> list[int]:
    listed: list[int] = positions.tolist()
    return listed


# --- what is kept ---


def test_a_failed_write_costs_nothing() -> None:
    """What it would have kept of the topics' structure is kept by the next one."""
    store = Store(thresholds=(1, 1))
    store.put([message("a/b"), message("a/c")], commit=False)
    store.put([message("a/c"), message("d/e")])
    store.reopen()
    store.put([message("a/c"), message("d/e"), message("a/b")])
    store.check()
    store.check("a/c")
    assert (5, []) == store.verify()


def test_a_new_generation_inherits_wildcards() -> None:
    """And keeps them, if the one before is of this layout."""
    store = Store()
    store.put([message(f"a/{n}") for n in range(9)])
    layout = SkipstreamLayout(SkipstreamOptions(thresholds=(3, 2)))
    for parent, patterns in ((store.slab, {"a/+"}), (None, {"a/new"})):
        write = WriteBatch()
        engine = MemoryEngine(KEYSPACES)
        layout.create(engine, SHARD, GENERATION + 1, parent, write)
        engine.write(write)
        slab = layout.open(engine, SHARD, GENERATION + 1)
        batch, write = MessageBatch.from_messages([message("a/new")]), WriteBatch()
        slab.store(batch.placed(np.array([START], dtype=np.uint64), [0], SHARD), write)
        assert patterns == {info.pattern for info in slab.streams(TopicFilter("#"))}


def test_generations_keep_apart() -> None:
    """Those before and behind are not seen."""
    engine = MemoryEngine(KEYSPACES)
    layout = SkipstreamLayout(SkipstreamOptions(thresholds=(0,)))
    for generation in (1, 2, 3):
        slab, write = layout.open(engine, SHARD, generation), WriteBatch()
        batch = MessageBatch.from_messages([message("a"), message("b")][: 1 + generation % 2])
        slab.store(batch.placed(np.arange(START, START + len(batch), dtype=np.uint64), [0] * len(batch), SHARD), write)
        engine.write(write)
    for generation in (1, 2, 3):
        slab = layout.open(engine, SHARD, generation)
        for text, rows in (("#", 1 + generation % 2), ("a", 1), ("b", generation % 2)):
            place = slab.begin(1, TopicFilter(text), 0)
            step = slab.next(1, TopicFilter(text), place, bound=START + 9, **PLENTY)  # type: ignore[arg-type]
            assert rows == len(step.batch)
        assert [1 + generation % 2] == list(slab.verify(START + 9))


@pytest.mark.parametrize("thresholds", [(), (-1,), (3, -1)])
def test_bad_options(thresholds: tuple[int, ...]) -> None:
    """Are refused."""
    with pytest.raises(ValueError, match="thresholds"):
        SkipstreamOptions(thresholds=thresholds)


def test_reopening_finds_it_on_disk(open_rocksdb: Callable[[], Engine]) -> None:
    """With a real engine between, and its way to hand out what lies in a range."""
    engine = open_rocksdb()
    store = Store(thresholds=(1, 0), engine=engine)
    store.put(buses(3_000))
    engine.close()
    store.engine = open_rocksdb()
    store.reopen()
    for text in ("#", "t/+/7/x", store.rows[2_000][1].topic):
        store.check(text)
    store.delete("t/+/7/x", 0, store.last)
    assert (len(store.rows), []) == store.verify()
    store.engine.close()


# --- damage ---


def test_damaged_messages_are_named() -> None:
    """By every way to read them; those around stay readable, and nothing is said of their entries."""
    store = Store(thresholds=(0,))
    store.put([message(f"{n % 3}") for n in range(30)])
    key, value = store.pairs(1)[13]
    at = START + 14
    store.replace([(key, value[:20] + b"\xff" + value[21:])])
    place = f"shard {SHARD}, generation {GENERATION}, message at position {at}"
    for text in ("#", "1"):
        with pytest.raises(CorruptionError, match=place):
            store.check(text)
        with pytest.raises(CorruptionError, match=place):
            list(store.slab.delete(TopicFilter(text), 0, store.last))
    store.check("2")
    store.check("#", bound=at - 1)
    store.check("#", first=at + 1)
    good, damages = store.verify()
    assert (29, [place]) == (good, [damage.place for damage in damages])
    assert (13, []) == store.verify(at - 1)
    store.replace([(key, value)])
    assert (30, []) == store.verify()


def test_a_message_that_lies_in_another_stream() -> None:
    """Is told, with its entry, which leads nowhere."""
    store = Store(thresholds=(9,))
    store.put([message("a"), message("b")])
    (key, value), _ = store.pairs(1)
    store.replace([(message_keys(GENERATION).one(2, START + 1), value)], [key])
    good, (damage,) = store.verify()
    assert 1 == good
    assert f"message at position {START + 1}" in damage.place
    assert "'a'" in damage.reason


@pytest.mark.parametrize("damaged", [1, 500])
def test_missing_entries(damaged: int) -> None:
    """Are told with the messages that can't be found by them; of very many, some are."""
    store = Store(thresholds=(0,))
    store.put([message(f"{n % 7}/{n}") for n in range(1_000)])
    gone = random.Random(3).sample(store.pairs(2), damaged)
    store.replace([], [key for key, _ in gone])
    good, damages = store.verify()
    assert 1_000 == good
    at = {int.from_bytes(key[-8:], "big") for key, _ in gone}
    *named, rest = damages if damaged > 1 else [*damages, None]
    assert {int(damage.place.rpartition(" ")[2]) for damage in named} <= at
    assert all("missing" in damage.reason for damage in named)
    assert len(named) == damaged if damaged == 1 else (len(named) >= 60 and rest is not None and "more" in rest.reason)


def test_dangling_entries() -> None:
    """Are told with their keys, up to the bound."""
    store = Store(thresholds=(0,))
    store.put([message(f"{n}") for n in range(100)])
    entries = entry_keys(GENERATION)
    store.replace([(entries.one(7, START + 50), b""), (entries.one(8, store.last + 1), b"")])
    good, (damage,) = store.verify()
    assert 100 == good
    assert damage.place.endswith(f"index entry 0000000000000007 at position {START + 50}")
    assert (49, []) == store.verify(START + 49)
    store.check("50")


def test_verification_sees_one_moment() -> None:
    """What is stored and deleted while it runs makes no difference to it."""
    store = Store(thresholds=(0,))
    store.put([message(f"{n}") for n in range(6_000)])
    rows, found = len(store.rows), store.slab.verify(store.last)
    seen = [next(found)]
    store.delete("#", START + 3_000, store.last)
    store.put([message("new")])
    seen += list(found)
    assert all(isinstance(n, int) for n in seen)
    assert rows == sum(n for n in seen if isinstance(n, int))


def test_damaged_structure() -> None:
    """A trie that can't be read is found when the slab is opened."""
    store = Store()
    store.put([message("a")])
    ((key, value), *_), *_ = store.engine.scan(META)
    write = WriteBatch()
    write.put(META, key, value[:-1])
    store.engine.write(write)
    with pytest.raises(CorruptionError, match="learned topics"):
        store.reopen()
