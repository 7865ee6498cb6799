"""The learned topic structure by itself: look-ups, loading, memory, and matching filters.

Two sets of topics: ``devices``, of one shape, where each has a name of its own; and ``flood``,
unrelated ones, which fill the trie until it grows no more.
"""

from __future__ import annotations

import gc
import random
import tempfile
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import attrs
from topicstore.contract.engine import KEYSPACES, Engine, WriteBatch
from topicstore.contract.topics import TopicFilter
from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions
from topicstore_layouts.shared.learned_topics import LearnedTopics

from topicstore_benchmarks.timing import median_of

__all__ = ["CACHED", "Match", "Outcome", "devices", "flood", "measure_trie"]

CACHED = 65_536
"""Topics that are looked up again and again."""
_BATCH = 1_000
_GENERATION = 1
_THRESHOLDS = 100, 20
_TOKENS, _LEVELS = 150, 5
"""Of the flood: so many different tokens in each of so many levels."""


@attrs.frozen(kw_only=True)
class Match:
    """One filter on the trie that the flood filled."""

    topic_filter: str
    streams: int
    """In the answer."""
    seconds: float


@attrs.frozen(kw_only=True)
class Outcome:
    """What a measurement gave; rates are look-ups a second, times are medians."""

    topics: int
    """Different ones, of either set."""
    cached: float
    """Of ``devices`` that were looked up before, as many as are remembered."""
    cold: float
    """Of ``devices`` that were never seen: batches into an empty trie."""
    walked: float
    """Of ``devices`` that are known, without what is remembered."""
    streams: int
    nodes: int
    """Of all ``devices``; so are the next three."""
    learning_memory: int
    """Bytes of the trie once all were learned, with the topics that it remembers."""
    load_seconds: float
    memory: int
    """Bytes of the loaded trie."""
    flood_rate: float
    """Of the flood, into an empty trie."""
    flood_streams: int
    flood_nodes: int
    flood_load_seconds: float
    flood_memory: int
    matches: tuple[Match, ...]
    """From narrow filters to the one that wants all."""


def devices(count: int) -> Iterator[str]:
    """Yield topics of one shape."""
    return (f"fleet/region-{number % 8}/bus-{number:07}/temp" for number in range(count))


def flood(count: int) -> Iterator[str]:
    """Yield topics that have no shape, the same ones in every run."""
    source = random.Random(5)  # noqa: S311 - the same topics in every run
    tokens = [f"t{number}" for number in range(_TOKENS)]
    return ("/".join(source.choices(tokens, k=_LEVELS)) for _ in range(count))


def measure_trie(topics: int, rounds: int) -> Outcome:
    """Measure the trie with so many topics of each set."""
    of_one_shape, unrelated = list(devices(topics)), list(flood(topics))
    known = _learned(of_one_shape)
    full = _learned(unrelated)
    load_seconds, memory = _loading(known, rounds)
    flood_load_seconds, flood_memory = _loading(full, rounds)
    return Outcome(
        topics=topics,
        cached=_cached(known, of_one_shape[:CACHED], rounds),
        cold=topics / median_of(lambda: _learned(of_one_shape), rounds),
        walked=topics / median_of(lambda: _find_all(known, of_one_shape), rounds),
        streams=len(known),
        nodes=known.nodes,
        learning_memory=_bytes(lambda: _learned(devices(topics))),
        load_seconds=load_seconds,
        memory=memory,
        flood_rate=topics / median_of(lambda: _learned(unrelated), rounds),
        flood_streams=len(full),
        flood_nodes=full.nodes,
        flood_load_seconds=flood_load_seconds,
        flood_memory=flood_memory,
        matches=_matches(full, unrelated[0], rounds),
    )


def _learned(topics: Iterable[str]) -> LearnedTopics:
    """Return a new trie that was taught topics, in batches as they are stored."""
    trie, left = LearnedTopics(_GENERATION, _THRESHOLDS), iter(topics)
    while batch := list(islice(left, _BATCH)):
        trie.learn_all(batch)
    return trie


def _bytes(make: Callable[[], object]) -> int:
    """Return how much memory what ``make`` returns takes."""
    gc.collect()
    tracemalloc.start()
    made = make()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del made
    return taken


def _find_all(trie: LearnedTopics, topics: list[str]) -> None:
    if None in map(trie.find, topics):
        raise AssertionError("a topic that was learned is not found")


def _cached(trie: LearnedTopics, topics: list[str], rounds: int) -> float:
    """Return how many topics a second are looked up that were looked up just before."""
    expected = list(map(trie.find, topics))
    batches = [topics[start : start + _BATCH] for start in range(0, len(topics), _BATCH)]
    trie.learn_all(topics)  # in place of those remembered till now
    trie.learn_all(topics)
    found: list[int] = []

    def look_up() -> None:
        found.clear()
        for batch in batches:
            found.extend(trie.learn_all(batch))

    seconds = median_of(look_up, rounds)
    if found != expected:
        raise AssertionError("what is remembered is not what was learned")
    return len(topics) / seconds


def _loading(trie: LearnedTopics, rounds: int) -> tuple[float, int]:
    """Return the seconds that loading takes, and the bytes of what was loaded."""
    with tempfile.TemporaryDirectory(prefix="topicstore-bench-") as directory:
        engine = RocksdbBackend(RocksdbOptions()).open_shard(Path(directory) / "shard", KEYSPACES, create=True)
        write = WriteBatch()
        trie.save(write)
        engine.write(write)
        seconds = median_of(lambda: _load(engine), rounds)
        loaded, memory = _load(engine), _bytes(lambda: _load(engine))
        engine.close()
    if (len(loaded), loaded.nodes) != (len(trie), trie.nodes):
        raise AssertionError("what was loaded is not what was saved")
    return seconds, memory


def _load(engine: Engine) -> LearnedTopics:
    return LearnedTopics.load(engine, _GENERATION, _THRESHOLDS)


def _matches(trie: LearnedTopics, topic: str, rounds: int) -> tuple[Match, ...]:
    """Ask for a topic, with ever more of its levels from behind as wildcards."""
    levels = topic.split("/")
    texts = [topic, *("/".join([*levels[:known], "#"]) for known in range(_LEVELS - 1, -1, -1))]
    return tuple(_match(trie, TopicFilter(text), rounds) for text in texts)


def _match(trie: LearnedTopics, topic_filter: TopicFilter, rounds: int) -> Match:
    seconds = median_of(lambda: trie.match(topic_filter), rounds)
    return Match(topic_filter=topic_filter.text, streams=len(trie.match(topic_filter)), seconds=seconds)
