"""Tests of the learned topic structure: topics that share a stream permanently, and the streams of a filter."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topicstore.contract.checksums import add_checksum
from topicstore.contract.engine import KEYSPACES, META, Engine, WriteBatch, encode_generation
from topicstore.contract.errors import CorruptionError
from topicstore.contract.topics import TopicFilter
from topicstore_backends.memory import MemoryEngine
from topicstore_conformance.backend.fixtures import put
from topicstore_conformance.faults.threads import Beside
from topicstore_conformance.layout.damage import broken
from topicstore_conformance.oracle.strategies import EDGE_TOPICS, filters, filters_of, topics
from topicstore_layouts.shared import learned_topics
from topicstore_layouts.shared.learned_topics import CAPACITY, MAX_LEVELS, LearnedTopics

GENERATION = 3
EDGE, LEAF = encode_generation(GENERATION) + b"\x01", encode_generation(GENERATION) + b"\x02"

thresholds = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
capacities = st.one_of(st.integers(0, 12), st.just(CAPACITY))


def learned(learn: Iterable[str], *limits: int, capacity: int = CAPACITY) -> LearnedTopics:
    """Return a trie with these thresholds that has learned these topics."""
    trie = LearnedTopics(GENERATION, limits, capacity)
    for topic in learn:
        trie.learn(topic)
    return trie


def patterns(trie: LearnedTopics, learn: Iterable[str]) -> list[str]:
    """Return the pattern of the stream of each topic."""
    return [trie.pattern(trie.learn(topic)) for topic in learn]


def save(trie: LearnedTopics, engine: Engine) -> None:
    """Commit the unsaved entries of a trie, and mark them as saved."""
    write = WriteBatch()
    trie.save(write)
    engine.write(write)
    trie.saved()


def contents(engine: Engine) -> dict[bytes, bytes]:
    return dict(pair for chunk in engine.scan(META) for pair in chunk)


def u32(number: int) -> bytes:
    return number.to_bytes(4, "big")


class Model:
    """A simple model of the trie: the list of children of each path."""

    def __init__(self, limits: tuple[int, ...], room: int = CAPACITY) -> None:
        self.limits = limits
        self.room = room
        self.children: dict[tuple[str, ...], list[str]] = {}

    def pattern(self, topic: str) -> str:
        """Return the pattern of a topic's stream, and learn the topic."""
        path: tuple[str, ...] = ("$",) if topic.startswith("$") else ("",)
        for depth, level in enumerate(topic.split("/")):
            children = self.children.setdefault(path, [])
            if not {level, "+", "#"} & set(children):
                self.grow(children, level, depth)
            token = next(token for token in (level, "+", "#") if token in children)
            path = (*path, token)
            if token == "#":
                break
        if path[0] == "$":
            path = ("", *{"+": ["$+"], "#": ["$+", "#"]}.get(path[1], path[1:2]), *path[2:])
        return "/".join(path[1:])

    def grow(self, children: list[str], level: str, depth: int) -> None:
        """Add the child that a level needs, and a child `+` once the threshold is reached."""
        limit = self.limits[min(depth, len(self.limits) - 1)]
        token = "+" if len(children) >= limit else level
        size = 1 + len(token.encode()) // 64
        if depth == 32 or size > self.room:
            children.append("#")
            return
        children.append(token)
        self.room -= size
        if len(children) == limit and self.room:
            children.append("+")
            self.room -= 1


# --- learning -----------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "above"), [("fleet/{}", 1), ("fleet/eu/{}/speed", 2), ("$SYS/a/b/c/{}/d", 4)])
def test_200_topics_make_few_streams(shape: str, above: int) -> None:
    """With the layouts' default thresholds, 200 topics make 20 streams of their own and one for the rest."""
    trie = learned((shape.format(number) for number in range(200)), 100, 20)
    assert 21 == len(trie)
    assert 2 + above + 21 * (len(shape.split("/")) - above) == trie.nodes


def test_levels_beyond_the_32nd_are_not_learned() -> None:
    """Topics with more than 32 levels share one stream per prefix, which filters of any depth find."""
    prefix = "/".join(["a"] * MAX_LEVELS)
    exact, first, second = (f"{prefix}{rest}" for rest in ("", "/b", "/c/d/e"))
    trie = learned([], 9)
    assert [prefix, f"{prefix}/#", f"{prefix}/#"] == patterns(trie, [exact, first, second])
    assert [1] == trie.match(TopicFilter(prefix))
    assert [2] == trie.match(TopicFilter(f"{prefix}/b")) == trie.match(TopicFilter(f"{prefix}/+/d/+"))
    assert [2] == trie.match(TopicFilter(f"{prefix}/c/d/#"))
    assert [1, 2] == trie.match(TopicFilter(f"{prefix}/#")) == trie.match(TopicFilter("#"))
    assert [1] == trie.match(TopicFilter("/".join(["+"] * MAX_LEVELS)))


def test_65535_bytes_of_empty_levels() -> None:
    """The longest possible topic makes 33 nodes and not 65,536."""
    longest = "/" * 65_535
    trie = learned([longest], 9)
    assert ["/" * 32 + "#"] == patterns(trie, [longest])
    assert 2 + 33 == trie.nodes
    for text in ("#", "/#", longest, longest[1:] + "+", longest[1:] + "#"):
        assert [1] == trie.match(TopicFilter(text))
    assert [] == trie.match(TopicFilter("a/#"))


@given(st.lists(topics() | st.sampled_from(EDGE_TOPICS), max_size=30), thresholds, capacities)
def test_it_learns_what_a_simple_model_learns(taught: list[str], limits: tuple[int, ...], capacity: int) -> None:
    """The trie gives topics the same patterns as a simple model, for any thresholds and capacity.

    Streams are numbered from 1, and their patterns match their topics.
    """
    trie, model = learned([], *limits, capacity=capacity), Model(limits, capacity)
    numbers: dict[str, int] = {}
    for topic in taught:
        pattern = model.pattern(topic)
        assert pattern == trie.pattern(trie.learn(topic))
        assert describes(pattern, topic)
        assert numbers.setdefault(pattern, len(numbers) + 1) == trie.learn(topic)
    assert len(numbers) == len(trie)
    assert not any(number in trie for number in (0, len(numbers) + 1))


# --- asking -------------------------------------------------------------------------


def describes(pattern: str, topic: str) -> bool:
    """Return whether a pattern matches a topic; `$+` stands for any first level that begins with `$`."""
    if topic.startswith("$") and pattern.startswith("$+"):
        pattern, topic = f"x{pattern[2:]}", "/".join(["x", *topic.split("/")[1:]])
    return TopicFilter(pattern).matches(topic)


@given(st.lists(topics(), max_size=20), thresholds, capacities, st.lists(filters(), max_size=4), st.data())
def test_match_finds_every_stream_with_a_matching_topic(
    taught: list[str], limits: tuple[int, ...], capacity: int, asked: list[str], data: st.DataObject
) -> None:
    """`match` returns every stream with a topic that matches the filter, each once and in ascending order."""
    trie = learned(taught, *limits, capacity=capacity)
    for text in [*asked, *(data.draw(filters_of(topic)) for topic in taught[:5])]:
        topic_filter = TopicFilter(text)
        matched = trie.match(topic_filter)
        assert sorted(set(matched)) == matched
        assert {trie.learn(topic) for topic in taught if topic_filter.matches(topic)} <= set(matched)


def compatible(topic_filter: TopicFilter, pattern: str) -> bool:
    """Return whether some topic matches both a filter without `#` and a pattern, comparing level by level."""
    mine, theirs = topic_filter.levels, pattern.split("/")
    if theirs[0] == "$+" and mine[0].startswith("$"):
        theirs[0] = mine[0]
        if pattern == "$+/#":  # the stream may have any topic that begins with `$`
            return True
    if theirs[-1] == "#" and len(mine) >= len(theirs):
        theirs = [*theirs[:-1], *["+"] * (len(mine) - len(theirs) + 1)]
    return len(mine) == len(theirs) and all(a == b or "+" in (a, b) for a, b in zip(mine, theirs, strict=True))


@given(st.lists(topics(), max_size=20), thresholds, capacities, st.data())
def test_match_is_tight_without_rest(
    taught: list[str], limits: tuple[int, ...], capacity: int, data: st.DataObject
) -> None:
    """A filter without `#` gets only streams whose patterns it can match, and a literal topic at most one."""
    trie = learned(taught, *limits, capacity=capacity)
    for topic in taught[:5]:
        topic_filter = TopicFilter(data.draw(filters_of(topic).filter(lambda text: not text.endswith("#"))))
        matched = trie.match(topic_filter)
        assert [] == [stream for stream in matched if not compatible(topic_filter, trie.pattern(stream))]
        assert len(matched) <= 1 or not topic_filter.literal


@given(st.lists(topics(), max_size=20), thresholds, capacities, st.lists(topics(), max_size=9))
def test_find_learns_nothing(taught: list[str], limits: tuple[int, ...], capacity: int, asked: list[str]) -> None:
    """`find` returns the stream that a topic has or would get, if it exists, and doesn't change the trie."""
    trie = learned(taught, *limits, capacity=capacity)
    before = len(trie), trie.nodes
    found = {topic: trie.find(topic) for topic in [*taught, *asked, "/".join(["a"] * 40)]}
    assert before == (len(trie), trie.nodes)
    assert {topic: trie.learn(topic) for topic in taught} == {topic: found[topic] for topic in taught}
    for topic, stream in found.items():
        again = learned(taught, *limits, capacity=capacity)
        assert ([] if stream is None else [stream]) == again.match(TopicFilter(topic))


@given(st.lists(topics(), max_size=20), thresholds, capacities)
def test_levels_say_what_varies(taught: list[str], limits: tuple[int, ...], capacity: int) -> None:
    """`levels` returns the pattern with `+` for `$+`, and `varying` the indexes of its `+`."""
    trie = learned(taught, *limits, capacity=capacity)
    for topic in taught:
        stream = trie.learn(topic)
        levels, own = trie.levels(stream), topic.split("/")
        assert trie.pattern(stream).replace("$+", "+") == "/".join(levels)
        assert tuple(depth for depth, level in enumerate(levels) if level == "+") == trie.varying(stream)
        assert all(level in ("+", "#", own[depth]) for depth, level in enumerate(levels) if depth < len(own))


@given(st.lists(topics(), max_size=20), thresholds, capacities)
def test_it_describes_itself(taught: list[str], limits: tuple[int, ...], capacity: int) -> None:
    """`describe` yields every node once, parents before children, and every stream with its pattern."""
    trie = learned(taught, *limits, capacity=capacity)
    found = list(trie.describe())
    above = ("$+", "#") in {node.path for node in found}  # then the trie has no node ("$+",)
    assert trie.nodes - 2 + above == len(found) == len({node.path for node in found})
    before: set[tuple[str, ...]] = {()}
    for node in found:
        assert node.path[:-1] in before
        before.add(node.path)
    streams = {node.stream: "/".join(node.path) for node in found if node.stream is not None}
    assert {stream: trie.pattern(stream) for stream in range(1, len(trie) + 1)} == streams


@pytest.mark.parametrize("stream", [-1, 0, 3])
def test_streams_that_are_not_there(stream: int) -> None:
    """A stream that doesn't exist raises `KeyError` for its pattern, levels and varying levels."""
    trie = learned(["a", "b"], 9)
    assert stream not in trie
    for ask in (trie.pattern, trie.levels, trie.varying):
        with pytest.raises(KeyError):
            ask(stream)


# --- many at once -------------------------------------------------------------------


@given(st.lists(st.lists(topics(), max_size=20), max_size=4), thresholds, capacities)
def test_many_are_learned_as_one_by_one(batches: list[list[str]], limits: tuple[int, ...], capacity: int) -> None:
    """`learn_all` returns the same streams as learning one topic at a time, for any iterable and from its cache."""
    one, other = (learned([], *limits, capacity=capacity) for _ in range(2))
    for batch in [*batches, *batches]:
        assert [one.learn(topic) for topic in batch] == other.learn_all(iter(batch))


def test_more_topics_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics beyond the cache keep their streams, and take no more memory than the cache counts."""
    monkeypatch.setattr(learned_topics, "_MEMO_BYTES", 8 << 20)
    trie = learned([], 100, 20)
    first = [f"fleet/region-{number % 3}/bus-{number}/temp" for number in range(70_000)]
    streams = trie.learn_all(first)
    tracemalloc.start()
    for start in range(70_000, 210_000, 10_000):
        trie.learn_all(f"fleet/region-{number % 3}/bus-{number}/temp" for number in range(start, start + 10_000))
    trie.learn_all(f"{number}/{'x' * 10_000}" for number in range(10_000))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert streams == trie.learn_all(first)
    assert 3 * 21 + 99 + 1 == len(trie)
    assert grown < 10e6
    for _ in range(3):  # topics that recur and fill both halves of the cache
        trie.learn_all(first[:20_000])
        trie.learn_all(first[20_000:40_000])
    assert trie._memo.memory <= 8 << 20


class Walks(LearnedTopics):
    """A trie that counts the topics that it looks up level by level."""

    walks = 0

    def _learn(self, topic: str) -> int:
        self.walks += 1
        return super()._learn(topic)


def test_topics_in_use_stay_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics that recur are looked up once, however many other topics occur only once."""
    monkeypatch.setattr(learned_topics, "_MEMO_BYTES", 1 << 20)
    trie = Walks(GENERATION, (100, 20))
    often = [f"often/{number}" for number in range(1_000)]
    for turn in range(60):
        trie.learn_all(often)
        trie.learn_all([f"once/{turn}/{number}" for number in range(500)])
    assert len(often) + 60 * 500 == trie.walks


def test_topics_that_come_once_are_soon_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a flood of topics that occur only once, most are not cached until they recur."""
    monkeypatch.setattr(learned_topics, "_MEMO_BYTES", 1 << 20)
    trie = learned([], 100, 20)
    held = []
    for turn in range(200):
        trie.learn_all([f"once/{turn}/{number}" for number in range(500)])
        held.append(trie._memo.memory)
    assert max(held) <= 1 << 20
    assert held.count(0) > 100
    walking = Walks(GENERATION, (100, 20))
    walking._memo = trie._memo
    for _ in range(40):
        walking.learn_all([f"often/{number}" for number in range(1_000)])
    walks = walking.walks
    walking.learn_all([f"often/{number}" for number in range(1_000)])
    assert walks == walking.walks


# --- floods -------------------------------------------------------------------------


def test_what_has_no_room_ends_in_rest_whatever_follows() -> None:
    """Topics beyond the trie's capacity share the `#` of their parent; filters find the `#` of each node passed."""
    trie = learned([], 9, capacity=2)
    assert ["a/b", "a/#", "a/#", "#", "$+/#"] == patterns(trie, ["a/b", "a/c", "a/d/e", "x", "$SYS/x"])
    exact, below, other, dollar = 1, 2, 3, 4
    asked = {
        "a/b": [exact],
        "a/c": [below],
        "a/d/+/f": [below],
        "+/c": [below, other],
        "a/+": [exact, below],
        "a/#": [exact, below],
        "a": [],
        "+": [other],
        "b/#": [other],
        "a/b/#": [exact],
        "a/b/c": [],
        "#": [exact, below, other],
        "$a": [dollar],
        "$a/b/#": [dollar],
    }
    assert asked == {text: trie.match(TopicFilter(text)) for text in asked}
    found = {"a": None, "a/z/z": below, "z": other, "a/b/c": None, "$": dollar}
    assert found == {topic: trie.find(topic) for topic in found}
    assert ("+", "#") == trie.levels(dollar)


def test_a_flood_stops_at_the_room_there_is() -> None:
    """A flood of topics makes at most twice as many nodes as the capacity, and then no further nodes or streams."""
    known = ["/".join(levels) for levels in itertools.product(map(str, range(30)), repeat=3)]
    trie = learned(known, 100, capacity=1_000)
    streams = {topic: trie.find(topic) for topic in known[:900]}
    for topic in [*known, *(f"{topic}/{rest}" for topic in known for rest in ("x", "y/z"))]:
        trie.learn(topic)
    assert 1_900 < trie.nodes <= 2 * (1_000 + 2)
    assert len(trie) <= trie.nodes - 2
    before = trie.nodes, len(trie)
    trie.learn_all(f"flood/{number}/of/{number}" for number in range(10_000))
    trie.learn_all(f"{number}/{number}" for number in range(30, 10_000))
    assert before == (trie.nodes, len(trie))
    assert streams == {topic: trie.learn(topic) for topic in streams}


def test_long_tokens_take_more_room() -> None:
    """A node counts as one more for every 64 bytes of its token in UTF-8."""
    trie = learned([], 9, capacity=10)
    # The first token takes 1 + 3 of the capacity of 10, and the second needs 7, but only 6 remain.
    assert [text := "é" * 100, "#"] == patterns(trie, [text, "b" * 384])
    trie = learned([], 9, capacity=10)
    assert [text, "b" * 383, "#"] == patterns(trie, [text, "b" * 383, "c"])


def test_the_longest_tokens_take_bounded_memory() -> None:
    """Tokens of 65,535 bytes take bounded memory, even if Python needs four bytes for each of their characters."""
    tracemalloc.start()
    trie = learned([], 10_000)
    for number in range(500):
        trie.learn(f"\U0001f68c{'x' * 65_526}{number:05}")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "#" == trie.pattern(len(trie))
    assert 65 == len(trie)
    assert taken < 4 * 65_536 * 64 + 65_536 * 64 + 1e6  # for the tokens, and for the unsaved entries


@given(st.lists(topics(), max_size=30), thresholds, capacities, capacities)
def test_the_room_may_change(taught: list[str], limits: tuple[int, ...], before: int, after: int) -> None:
    """A trie that is loaded with another capacity keeps the streams of all topics and learns new ones."""
    engine = MemoryEngine(KEYSPACES)
    trie = learned(taught, *limits, capacity=before)
    known = {topic: trie.learn(topic) for topic in taught}
    save(trie, engine)
    loaded = LearnedTopics.load(engine, GENERATION, limits, after)
    loaded.learn_all(f"{topic}/more" for topic in taught)
    assert known == {topic: loaded.learn(topic) for topic in taught}
    save(loaded, engine)
    again = LearnedTopics.load(engine, GENERATION, limits, before)
    assert known == {topic: again.learn(topic) for topic in taught}


# --- keeping ------------------------------------------------------------------------

Step = tuple[str, str]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), topics()),
        st.tuples(st.sampled_from(["learn", "learn and save", "save and learn"]), topics()),
        st.tuples(st.sampled_from(["save unheard", "lose", "reopen"]), st.just("")),
    ),
    max_size=40,
)


@given(steps, thresholds, capacities)
def test_a_topic_never_changes_its_stream(sequence: list[Step], limits: tuple[int, ...], capacity: int) -> None:
    """Any sequence of learning, saving, failed commits and loading keeps every committed topic in its stream."""
    engine = MemoryEngine(KEYSPACES)
    trie = learned([], *limits, capacity=capacity)
    known: dict[str, int] = {}
    committed: dict[str, int] = {}
    for step, topic in sequence:
        write = WriteBatch()
        if step.startswith("learn"):
            assert known.setdefault(topic, trie.learn(topic)) == trie.learn(topic)
        if step == "reopen":
            trie = LearnedTopics.load(engine, GENERATION, limits, capacity)
            known = dict(committed)
        if "save" in step:
            trie.save(write)
            engine.write(write)
            committed = dict(known)
        if step == "save and learn":  # topics learned before the trie is notified of the commit
            known.setdefault(topic, trie.learn(topic))
        if step in ("learn and save", "save and learn"):
            trie.saved()
        if step == "lose":  # the write fails, and the process continues
            trie.save(write)
        assert known == {topic: trie.learn(topic) for topic in known}
    again = LearnedTopics.load(engine, GENERATION, limits, capacity)
    assert committed == {topic: again.learn(topic) for topic in committed}


@given(st.lists(topics(), max_size=15), st.lists(topics(), max_size=15), thresholds, capacities)
def test_a_loaded_trie_learns_like_the_saved_one(
    first: list[str], then: list[str], limits: tuple[int, ...], capacity: int
) -> None:
    """A loaded trie learns the same streams and writes the same entries as the trie that was saved."""
    engine = MemoryEngine(KEYSPACES)
    trie = learned(first, *limits, capacity=capacity)
    save(trie, engine)
    loaded = LearnedTopics.load(engine, GENERATION, limits, capacity)
    assert (len(trie), trie.nodes) == (len(loaded), loaded.nodes)
    for topic in [*then, *first]:
        assert trie.learn(topic) == loaded.learn(topic)
        assert trie.pattern(trie.learn(topic)) == loaded.pattern(loaded.learn(topic))
    one, other = WriteBatch(), WriteBatch()
    trie.save(one)
    loaded.save(other)
    assert one.operations == other.operations


def test_finding_learns_nothing() -> None:
    """`find_all` returns the streams of stored topics, and raises an error that names a topic whose stream was lost."""
    trie = learned([], 5)
    topics = ["a/b", "a/c", "$s", "x" * 300]
    streams = trie.learn_all(topics)
    nodes, count = trie.nodes, len(trie)
    assert streams == trie.find_all(topics)
    with pytest.raises(CorruptionError, match="'never/stored' leads to no stream"):
        trie.find_all(["a/b", "never/stored"])
    assert (nodes, count) == (trie.nodes, len(trie))


# --- inheriting ---------------------------------------------------------------------


def inherited(parent: LearnedTopics, *limits: int) -> LearnedTopics:
    """Return a trie that inherited from another one, after its entries were committed and loaded."""
    engine = MemoryEngine(KEYSPACES)
    child = LearnedTopics(GENERATION + 1, limits)
    child.inherit(parent)
    save(child, engine)
    return LearnedTopics.load(engine, GENERATION + 1, limits)


def test_what_a_flood_left_is_not_inherited() -> None:
    """A new generation inherits no `#`; wildcards, from the upper levels first, may take up half of its capacity."""
    parent = learned(["a/b/c", "x", "a/e/f", "a/e/g"], 2, 1, capacity=8)
    described = ["a", "a/b", "a/+", "a/b/c", "a/b/+", "x", "+", "a/+/f", "a/+/#"]
    assert described == ["/".join(node.path) for node in parent.describe()]
    child = LearnedTopics(GENERATION + 1, (2, 1), 8)
    child.inherit(parent)
    assert ["+", "a", "a/+"] == ["/".join(node.path) for node in child.describe()]


@given(st.lists(topics(), max_size=30), thresholds, capacities, capacities)
def test_half_of_the_room_is_not_inherited(
    taught: list[str], limits: tuple[int, ...], capacity: int, room: int
) -> None:
    """A new generation inherits wildcards with the nodes above them, without streams, up to half of its capacity."""
    parent = learned(taught, *limits, capacity=capacity)
    child = LearnedTopics(GENERATION + 1, limits, room)
    child.inherit(parent)
    assert len(child) == 0
    assert child.nodes - 2 <= room - room // 2
    paths = {node.path for node in child.describe()}
    assert paths <= {node.path for node in parent.describe() if node.path[-1] != "#"}
    ways = {path for path in paths if path[-1] not in ("+", "$+")}
    assert all(any(path[: len(way)] == way for path in paths - ways) for way in ways)


@given(st.lists(topics(), max_size=30), thresholds, st.lists(topics(), max_size=10))
def test_an_heir_has_its_parents_wildcards(taught: list[str], limits: tuple[int, ...], then: list[str]) -> None:
    """A level that varies in one generation varies in the next generation from its first message on."""
    parent = learned(taught, *limits)
    child = inherited(parent, *limits)
    for before, now in zip(patterns(parent, taught), patterns(child, taught), strict=True):
        assert all(b == "+" for a, b in zip(before.split("/"), now.split("/"), strict=True) if a == "+")
    for topic in then:
        assert child.learn(topic) in child.match(TopicFilter(topic))


def test_an_heir_of_an_heir() -> None:
    """A wildcard passes to the generation after the next, even if the next one has no topic that uses the wildcard."""
    first = learned([f"t/{number}" for number in range(5)], 9, 2)
    assert ["t/+"] == patterns(inherited(inherited(first, 9, 2), 9, 2), ["t/0"])


# --- damage -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (EDGE + u32(0) + b"x", b"\0\0\0"),
        (EDGE + u32(0), b""),
        (EDGE + b"\0\0", u32(9)),
        (EDGE + u32(0) + b"\xff", u32(9)),
        (EDGE + u32(7) + b"x", u32(9)),
        (EDGE + u32(2) + b"x", u32(2)),
        (EDGE + u32(3) + b"x", u32(2)),
        (EDGE + u32(0) + b"x", u32(0)),
        (EDGE + u32(0) + b"x", u32(1)),
        (EDGE + u32(0) + b"x", u32(3)),
        (LEAF + u32(2), u32(1)),
        (LEAF + u32(2), u32(0)),
        (LEAF + u32(2), u32(3)),
        (LEAF + u32(2), u32(1) + b"\0"),
        (LEAF + u32(9), u32(2)),
        (LEAF + u32(0), u32(2)),
        (LEAF + b"", u32(2)),
        (EDGE + u32(0) + b"x", u32(5)),
    ],
)
def test_damage_is_found_when_it_is_loaded(key: bytes, value: bytes) -> None:
    """Loading refuses nodes without parents, cycles, duplicate or missing streams, and malformed numbers and texts."""
    engine = MemoryEngine(KEYSPACES)
    save(learned(["a/b"], 9), engine)
    good = {EDGE + u32(0) + b"a": u32(2), EDGE + u32(2) + b"b": u32(3), LEAF + u32(3): u32(1)}
    assert {key: add_checksum(key, value) for key, value in good.items()} == contents(engine)
    put(engine, META, {key: add_checksum(key, value)})
    with pytest.raises(CorruptionError, match="learned topics"):
        LearnedTopics.load(engine, GENERATION, (9,))


@pytest.mark.parametrize(("parent", "token"), [(2, "+"), (4, "x"), (4, "+"), (4, "#")])
def test_wildcards_that_can_not_be(parent: int, token: str) -> None:
    """Loading refuses two wildcards at one node, and any node below a `#`."""
    engine = MemoryEngine(KEYSPACES)
    save(learned(["a/b", "a/c"], 9, capacity=2), engine)
    assert add_checksum(EDGE + u32(2) + b"#", u32(4)) == engine.get(META, EDGE + u32(2) + b"#")
    key = EDGE + u32(parent) + token.encode()
    put(engine, META, {key: add_checksum(key, u32(5))})
    with pytest.raises(CorruptionError, match="besides its wildcard"):
        LearnedTopics.load(engine, GENERATION, (9,))


def test_a_tree_deeper_than_any_that_was_learned() -> None:
    """Loading refuses a trie that is too deep, so that damage can't make it fill the memory with long paths."""
    engine = MemoryEngine(KEYSPACES)
    for parent in (0, *range(2, 40)):
        key = EDGE + u32(parent) + b"a"
        put(engine, META, {key: add_checksum(key, u32(max(parent, 1) + 1))})
    with pytest.raises(CorruptionError, match="too deep"):
        LearnedTopics.load(engine, GENERATION, (9,))


def test_every_flipped_bit_and_truncation_is_found_when_it_is_loaded() -> None:
    """Loading detects every flipped bit and truncation of every value, and values stored under another key."""
    engine = MemoryEngine(KEYSPACES)
    save(learned(["a/b", "c"], 9), engine)
    stored = contents(engine)
    for key, value in stored.items():
        for bad in [*broken(value), *(other for other in stored.values() if other != value)]:
            put(engine, META, {key: bad})
            with pytest.raises(CorruptionError, match="learned topics"):
                LearnedTopics.load(engine, GENERATION, (9,))
        put(engine, META, {key: value})
    assert 2 == len(LearnedTopics.load(engine, GENERATION, (9,)))


@pytest.mark.parametrize("key", [EDGE + u32(0) + b"a", LEAF + u32(3)])
def test_loss_is_found_when_it_is_loaded(key: bytes) -> None:
    """Loading detects a missing edge and a missing stream."""
    engine = MemoryEngine(KEYSPACES)
    save(learned(["a/b", "c"], 9), engine)
    write = WriteBatch()
    write.delete(META, key)
    engine.write(write)
    with pytest.raises(CorruptionError, match="learned topics"):
        LearnedTopics.load(engine, GENERATION, (9,))


# --- threads ------------------------------------------------------------------------


def test_readers_run_beside_the_writer() -> None:
    """A match sees every topic learned before it began, and all streams it returns have patterns."""
    trie = learned([], 50, 3)

    def read() -> None:
        known = len(trie)
        found = trie.match(TopicFilter("#"))
        assert set(range(1, known + 1)) <= set(found)
        assert len(found) == len([trie.pattern(stream) for stream in found])

    with Beside(read, read):
        for number in range(3_000):
            trie.learn(f"a{number % 60}/b{number % 7}/c{number}")
