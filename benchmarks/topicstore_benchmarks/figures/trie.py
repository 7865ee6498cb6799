"""The section ``trie``, the learned topic structure by itself: look-ups, loading, memory, and matching filters.

There are two sets of topics: ``devices``, of one shape, in which each device has its own name; and
``flood``, unrelated topics that fill the trie until it grows no more.
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

from .figure import Cell, Figure, Section, Sheet

__all__ = ["devices", "flood", "measure_trie"]

_CACHED = 65_536
"""The number of topics that are looked up repeatedly."""
_CALL, _STREAM = 10e-6, 2e-6
"""Seconds that a match may take in any case, and for each stream in its answer."""
_BATCH = 1_000
_GENERATION = 1
_THRESHOLDS = 100, 20
_TOKENS, _LEVELS = 150, 5
"""The number of different tokens per level, and of levels, of the flood."""


@attrs.frozen(kw_only=True)
class _Match:
    """A match of one filter on the trie that the flood filled."""

    topic_filter: str
    streams: int
    """The number of streams in the answer."""
    seconds: float


def devices(count: int) -> Iterator[str]:
    """Yield topics of one shape."""
    return (f"fleet/region-{number % 8}/bus-{number:07}/temp" for number in range(count))


def flood(count: int) -> Iterator[str]:
    """Yield topics without a common shape, the same ones in every run."""
    source = random.Random(5)  # noqa: S311 - the same topics in every run
    tokens = [f"t{number}" for number in range(_TOKENS)]
    return ("/".join(source.choices(tokens, k=_LEVELS)) for _ in range(count))


def measure_trie(topics: int, rounds: int) -> Section:
    """Measure the trie with ``topics`` topics of each set; return the figures, those of single filters in a table."""
    of_one_shape, unrelated = list(devices(topics)), list(flood(topics))
    known, full = _learned(of_one_shape), _learned(unrelated)
    (load, memory), (flood_load, flood_memory) = _loading(known, rounds), _loading(full, rounds)
    cold = topics / median_of(lambda: _learned(of_one_shape), rounds)
    walked = topics / median_of(lambda: _find_all(known, of_one_shape), rounds)
    flooding = topics / median_of(lambda: _learned(unrelated), rounds)
    matches = _matches(full, unrelated[0], rounds)
    worst = max(match.seconds / (_CALL + _STREAM * match.streams) for match in matches)
    cached = _cached(known, of_one_shape[:_CACHED], rounds)
    learning_memory = _bytes(lambda: _learned(devices(topics)))
    figures = [
        _figure("devices", f"look-ups a second, {_CACHED:,} topics again and again", cached, least=1_000_000),
        _figure("devices", "look-ups a second, topics never seen", cold, least=150_000),
        _figure("devices", "look-ups a second, topics known and not remembered", walked, least=150_000),
        _figure("devices", "streams", len(known)),
        _figure("devices", "loading, ms", load * 1_000),
        _figure("devices", "memory once all were learned, MB", learning_memory / 1e6),
        _figure("devices", "memory once loaded, MB", memory / 1e6),
        _figure("flood", "look-ups a second, topics never seen", flooding, least=150_000),
        _figure("flood", "streams", len(full)),
        _figure("flood", "loading, ms", flood_load * 1_000),
        _figure("flood", "memory once loaded, MB", flood_memory / 1e6),
        _figure("flood", "slowest filter, times (10 µs + 2 µs for each stream in its answer)", worst, most=1),
    ]
    matched = [_figure("flood", f"µs to match {match.topic_filter}", match.seconds * 1e6) for match in matches]
    return Section(
        name="trie",
        figures=[*figures, *matched],
        sheets=[
            Sheet.listing(
                f"The learned topic structure, {topics:,} topics",
                {"topics": "data", "figure": "name"},
                figures,
                note="medians; in brackets what a figure should be",
            ),
            Sheet(
                title=f"Filters on {len(full):,} streams",
                columns=["filter", "streams in the answer", "µs"],
                rows=[
                    [f"`{match.topic_filter}`", Cell(f"{match.streams:,}"), figure.cell()]
                    for match, figure in zip(matches, matched, strict=True)
                ],
                note="medians",
            ),
        ],
    )


def _figure(data: str, name: str, value: float, least: float | None = None, most: float | None = None) -> Figure:
    return Figure(data=data, subject="trie", name=name, value=value, least=least, most=most)


def _learned(topics: Iterable[str]) -> LearnedTopics:
    """Return a new trie that was taught topics, in batches as they are stored."""
    trie, left = LearnedTopics(_GENERATION, _THRESHOLDS), iter(topics)
    while batch := list(islice(left, _BATCH)):
        trie.learn_all(batch)
    return trie


def _bytes(make: Callable[[], object]) -> int:
    """Return the bytes of memory of the object that ``make`` returns."""
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
    """Return the look-ups a second of topics that were looked up just before."""
    expected = list(map(trie.find, topics))
    batches = [topics[start : start + _BATCH] for start in range(0, len(topics), _BATCH)]
    trie.learn_all(topics)  # replaces the topics remembered so far
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


def _matches(trie: LearnedTopics, topic: str, rounds: int) -> list[_Match]:
    """Match filters made from a topic, with more and more of its last levels as wildcards."""
    levels = topic.split("/")
    texts = [topic, *("/".join([*levels[:known], "#"]) for known in range(_LEVELS - 1, -1, -1))]
    return [_match(trie, TopicFilter(text), rounds) for text in texts]


def _match(trie: LearnedTopics, topic_filter: TopicFilter, rounds: int) -> _Match:
    seconds = median_of(lambda: trie.match(topic_filter), rounds)
    return _Match(topic_filter=topic_filter.text, streams=len(trie.match(topic_filter)), seconds=seconds)
