"""Tests of the in-memory index of blocks' topics: the blocks that it skips, and that no query misses a message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topicstore import TopicFilter
from topicstore.contract.engine import KEYSPACES
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance import LayoutSubject
from topicstore_conformance.layout.fixtures import START, Reader, Stored, numbered
from topicstore_layouts.block import topic_index
from topicstore_layouts.block.layout import BlockLayout, BlockOptions
from topicstore_layouts.block.slab import BlockSlab
from topicstore_layouts.block.topic_index import TopicIndex

ALL = 0
TOPICS = [*(f"bus/{number}/speed" for number in range(30)), "bus/" + "long" * 20, "$SYS/load"]
"""Topics of one level or another, one of them too long for the dictionary of names."""
FILTERS = [*TOPICS, "#", "bus/7/+", "bus/+/speed", "never/stored", "$SYS/#"]


def make(thresholds: tuple[int, ...] = (9, 9, 0)) -> Stored:
    layout = BlockLayout(BlockOptions(thresholds=thresholds))
    made = Stored(LayoutSubject(make=lambda: layout, capabilities={"position_order"}), MemoryEngine(KEYSPACES))
    made.create()
    return made


@pytest.fixture
def stored() -> Stored:
    return make()


def index_of(stored: Stored) -> TopicIndex:
    assert isinstance(stored.slab, BlockSlab)
    return stored.slab._reading.index


def visited(stored: Stored, topic_filter: str, **span: int) -> tuple[int, int]:
    """Check the rows of a query; return their number, and the number of blocks whose heads the query read."""
    counters = stored.slab.counters
    before = counters.visited + counters.skipped
    stored.check(topic_filter, **span)
    return len(stored.wanted(topic_filter, **span)), counters.visited + counters.skipped - before


def turns(stored: Stored, blocks: int, topics: int = 40) -> None:
    """Store blocks of four topics each, cycling through all topics."""
    names = [f"turn/{number}" for number in range(topics)]
    for number in range(blocks):
        start = 4 * number % topics
        stored.put(numbered(names[start : start + 4], 12))


def check_newest(stored: Stored, topic_filter: str, first: int, last: int, rows: int) -> None:
    """Check the range of positions in which `newest` finds the last matching messages up to ``last``."""
    for stream in stored.slab.cover(TopicFilter(topic_filter)):
        begin, end = stored.slab.newest(stream, TopicFilter(topic_filter), first, last, rows) or (first, last)
        assert first <= begin
        assert stored.wanted(topic_filter, end + 1, last) == []
        found = stored.wanted(topic_filter, begin, end)
        assert found or begin > end or stored.wanted(topic_filter, first, begin - 1)
        if begin > end:
            assert stored.wanted(topic_filter, first, last) == [] or begin > first
        assert Reader(stored, stream, topic_filter, begin).read(end) == found if begin <= end else True


def test_later_queries_look_only_at_blocks_of_their_topics(stored: Stored) -> None:
    """After one query for few topics, the next ones for few topics read only blocks that have these topics."""
    turns(stored, 200)
    assert (60, 200) == visited(stored, "turn/3")
    for topic in ("turn/3", "turn/17"):
        assert (60, 20) == visited(stored, topic)
    assert (30, 10) == visited(stored, "turn/17", first=stored.rows[1_200][0])


def test_the_search_for_the_newest_messages_uses_the_index(stored: Stored) -> None:
    """A backward search adds the blocks that it reads to the index, and finds messages of several blocks.

    A block that ends at the search's last position isn't added: the writer may store such a block during the search.
    """
    turns(stored, 200)
    counters, last = stored.slab.counters, stored.last
    for looked_at in (40, 4 + 1):
        before = counters.visited + counters.skipped
        begin, end = stored.slab.newest(ALL, TopicFilter("turn/3"), 0, last, 12) or (0, 0)
        assert stored.wanted("turn/3")[-12:] == stored.wanted("turn/3", begin, end)
        assert looked_at == counters.visited + counters.skipped - before


def test_blocks_that_were_stored_since_are_read_and_added(stored: Stored) -> None:
    """A query reads and adds the blocks that were stored after the previous query, so the next query can skip them."""
    turns(stored, 100)
    visited(stored, "turn/3")
    turns(stored, 100)
    assert (60, 10 + 100) == visited(stored, "turn/3")
    assert (60, 20) == visited(stored, "turn/3")


def test_topics_that_are_stored_first_after_the_index_was_built(stored: Stored) -> None:
    """A topic that is stored for the first time after a query for it is found by the next query."""
    turns(stored, 50)
    assert (0, 50) == visited(stored, "turn/late/#")
    stored.put(numbered(["turn/late/1", "turn/late/2"], 4))
    assert (4, 1) == visited(stored, "turn/late/#")
    assert (2, 1) == visited(stored, "turn/late/1")


def test_merged_blocks_leave_the_index(stored: Stored) -> None:
    """The pages of blocks that were merged are dropped when blocks are added, so that their memory is free."""
    turns(stored, 200)
    visited(stored, "turn/3")
    large = index_of(stored).memory
    stored.compact()
    turns(stored, 20)
    stored.check("turn/3")
    assert 0 < index_of(stored).memory < large
    assert [index_of(stored).pages[0].first > stored.rows[2_399][0]] == [True] * len(index_of(stored).pages)


def test_a_query_beside_a_merge_claims_no_blocks_that_it_skipped(stored: Stored) -> None:
    """While a merge is uncommitted, a query adds no index page for a range with blocks that the query has skipped.

    The page would lack these blocks, so later queries would miss their messages.
    """
    stored.put(numbered(["early"], 1))
    turns(stored, 40)
    first = stored.last + 1
    stored.put(numbered(["merged"], 1))
    turns(stored, 20)
    stored.check("turn/3", first)
    bound = stored.last
    turns(stored, 20)
    merge = next(iter(stored.slab.compact(bound, whole=True)))  # readers still see the blocks that the merge removes
    stored.check("early")
    stored.check("merged")
    stored.engine.write(merge.write)
    stored.check("merged")


def test_memory_is_bounded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries read all blocks for which the index's memory limit leaves no space, and miss none of their messages."""
    monkeypatch.setattr(topic_index, "PAGE_TOPICS", 100)
    monkeypatch.setattr(topic_index, "MOST_BYTES", 20_000)
    turns(stored, 400)
    for _ in range(2):
        rows, blocks = visited(stored, "turn/3")
    assert index_of(stored).memory <= 20_000
    assert 120 == rows
    assert 40 < blocks < 400


def test_an_entry_takes_six_bytes(stored: Stored) -> None:
    """Each topic of a block takes 6 bytes, a block 16 more, and a page about a kilobyte."""
    stored_topics = [f"fleet/{number}" for number in range(2_000)]
    for _ in range(20):
        stored.put(numbered(stored_topics, 2_000))
    stored.check("fleet/3")
    (page,) = index_of(stored).pages
    assert 20 * (2_000 * 6 + 16) + 1_000 == page.memory == index_of(stored).memory


def test_queries_for_many_topics_build_no_index(stored: Stored) -> None:
    """A filter that matches many topics, or all, adds no blocks: most blocks have some of its topics anyway."""
    turns(stored, 200, topics=400)
    for text in ("#", "turn/+"):
        stored.check(text)
        assert 0 == index_of(stored).memory


def test_one_row_blocks_with_texts(stored: Stored) -> None:
    """Topics that get no number in the dictionary are found by name, and by filters with wildcards."""
    long = "long/" + "x" * 300
    for number in range(50):
        stored.put(numbered([long if number % 10 == 3 else f"long/{number % 10}"], 1))
    assert (5, 50) == visited(stored, long)
    assert (5, 5) == visited(stored, long)
    assert (5, 5) == visited(stored, "long/7")
    assert (50, 50) == visited(stored, "long/+")


@st.composite
def steps(draw: Any) -> tuple[Any, ...]:
    kind = draw(st.sampled_from(["put", "put", "one", "ask", "ask", "ask", "newest", "delete", "compact", "reopen"]))
    text, share = draw(st.sampled_from(FILTERS)), st.integers(0, 100)
    return kind, text, draw(share), draw(share), draw(st.integers(1, 40))


class History:
    """A slab that lives through a history of changes and queries."""

    def __init__(self) -> None:
        self.stored = make()

    def take(self, kind: str, text: str, low: int, high: int, count: int) -> None:
        """Take one step; ``low`` and ``high`` are shares of the positions, in percent."""
        span = self.stored.last - START
        first, last = (START + span * share // 100 for share in sorted((low, high)))
        getattr(self, kind)(text, first, last, low, count)

    def put(self, _text: str, _first: int, _last: int, low: int, count: int) -> None:
        for number in range(count // 8 + 1):
            begin = (low + 3 * number) % len(TOPICS)
            self.stored.put(numbered((TOPICS + TOPICS)[begin : begin + low % 9 + 1], count))

    def one(self, _text: str, _first: int, _last: int, low: int, count: int) -> None:
        for number in range(count):
            self.stored.put(numbered([TOPICS[(low * number) % len(TOPICS)]], 1))

    def ask(self, text: str, first: int, last: int, _low: int, count: int) -> None:
        for each in (self.stored, self.opened()):
            each.check(text, first, last, limit=count)
            each.check(text)

    def newest(self, text: str, first: int, last: int, _low: int, count: int) -> None:
        check_newest(self.stored, text, first, last, count)
        check_newest(self.stored, text, 0, self.stored.last, count)

    def delete(self, text: str, first: int, last: int, _low: int, _count: int) -> None:
        self.stored.delete(text, first, last)

    def compact(self, _text: str, _first: int, last: int, low: int, _count: int) -> None:
        self.stored.compact(last, whole=low % 2 == 0)

    def reopen(self, *_: Any) -> None:
        self.stored.reopen()

    def opened(self) -> Stored:
        """Return the slab as another process opens it, without an index."""
        made = Stored(self.stored.subject, self.stored.engine, last=self.stored.last, rows=self.stored.rows)
        made.reopen()
        return made


@pytest.mark.usefixtures("tiny_blocks")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps(), min_size=5, max_size=40))
def test_no_history_makes_a_query_miss_messages(history: list[tuple[Any, ...]]) -> None:
    """Whatever is stored, deleted and merged between queries, queries return the same messages as without the index."""
    lived = History()
    for step in history:
        lived.take(*step)
