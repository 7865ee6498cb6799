"""Tests that the layouts of this package fulfil `topicstore.contract.layout`, even with tiny limits."""

from __future__ import annotations

from functools import partial

import pytest
from topicstore.contract.engine import Engine
from topicstore.contract.layout import Slab
from topicstore_conformance import LayoutSubject, LayoutSuite
from topicstore_conformance.conditions.capabilities import declaring, leaving_out
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.layout.borders import Borders
from topicstore_conformance.layout.changes import Changes
from topicstore_conformance.layout.limits import Limits
from topicstore_conformance.subjects.pairs import make_backend, make_layout
from topicstore_layouts.plugin import topicstore_layouts
from topicstore_layouts.shared.learned_topics import LearnedTopics
from topicstore_layouts.skipstream import entries
from topicstore_layouts.skipstream import slab as skipstream
from topicstore_layouts.skipstream.layout import SkipstreamLayout, SkipstreamOptions
from topicstore_layouts.wildcard_optimized import slab as wildcard_optimized
from topicstore_layouts.wildcard_optimized import streams
from topicstore_layouts.wildcard_optimized.layout import WildcardOptimizedLayout, WildcardOptimizedOptions

CAPABILITIES = {spec.name: spec.capabilities for spec in topicstore_layouts()}


def subject_of(layout: str) -> LayoutSubject:
    """Return a layout with options that set small limits, over an engine in memory."""
    return LayoutSubject(make=partial(make_layout, layout), capabilities=CAPABILITIES[layout])


@declaring(CAPABILITIES["block"])
class TestBlock(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return subject_of("block")


class FewRows:
    """The block layout with blocks, frames, segments and dictionaries that few messages fill."""

    @pytest.fixture
    def subject(self, tiny_blocks: None) -> LayoutSubject:
        return subject_of("block")


# With such small units, the tests of limits would take minutes, and those of combined changes many seconds.


@leaving_out(Limits, Changes)
@declaring(CAPABILITIES["block"])
class TestBlockOfFewRows(FewRows, LayoutSuite):
    """The layout suite on the block layout with few rows in each block, frame and segment."""


@pytest.mark.slow
@declaring(CAPABILITIES["block"])
class TestChangesOfFewRows(FewRows, Changes):
    """The tests of combined changes on the block layout with few rows in each block, frame and segment."""


@declaring(CAPABILITIES["reference"])
class TestReference(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return subject_of("reference")


@declaring(CAPABILITIES["skipstream"])
class TestSkipstream(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return subject_of("skipstream")


class Crowded(SkipstreamLayout):
    """A skipstream layout with so small a trie and so few hashes that most topics share streams and hashes."""

    def open(self, engine: Engine, shard: int, generation: int) -> Slab:
        trie = LearnedTopics.load(engine, generation, self.options.thresholds, capacity=4)
        return skipstream.SkipstreamSlab(engine, shard, generation, trie, hash_bits=1)


def crowded() -> Crowded:
    """Return the layout. Other processes call this function, since options can't be sent to them."""
    return Crowded(SkipstreamOptions(thresholds=(1, 0)))


class FewHashes:
    """The skipstream layout with colliding hashes, small reads and a small cache."""

    @pytest.fixture
    def subject(self, monkeypatch: pytest.MonkeyPatch) -> LayoutSubject:
        for name, value in {"_LEAST_READ": 4, "_FETCHED_FIRST": 2, "_FETCHED_MOST": 5, "_LOOKED_AT": 20}.items():
            monkeypatch.setattr(skipstream, name, value)
        monkeypatch.setattr(entries, "_KNOWN_TOPICS", 10)
        return LayoutSubject(make=crowded, capabilities=CAPABILITIES["skipstream"])


@leaving_out(Limits, Changes)
@declaring(CAPABILITIES["skipstream"])
class TestSkipstreamOfFewHashes(FewHashes, LayoutSuite):
    """The layout suite on a skipstream layout whose hashes collide."""


@pytest.mark.slow
@declaring(CAPABILITIES["skipstream"])
class TestChangesOfFewHashes(FewHashes, Changes):
    """The tests of combined changes on a skipstream layout whose hashes collide."""


class Table:
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        need("duckdb")
        return LayoutSubject(
            make=partial(make_layout, "table"),
            capabilities=CAPABILITIES["table"],
            backend=partial(make_backend, "duckdb"),
            backend_capabilities=(),
        )


@leaving_out(Limits, Changes, Borders)
@declaring(CAPABILITIES["table"])
class TestTable(Table, LayoutSuite):
    """The suite without its tests of thousands of reads, because each read takes milliseconds."""


@pytest.mark.slow
@declaring(CAPABILITIES["table"])
class TestTableAtLimits(Table, Limits, Changes, Borders):
    """The suite's tests that read thousands of times."""


@declaring(CAPABILITIES["wildcard_optimized"])
class TestWildcardOptimized(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return subject_of("wildcard_optimized")


def with_few_bits() -> WildcardOptimizedLayout:
    """Return the layout. Other processes call this function, since options can't be sent to them."""
    return WildcardOptimizedLayout(
        WildcardOptimizedOptions(bits_per_topic_level=1, epoch_bits=0, topic_index_bytes=1, thresholds=(1,))
    )


class FewBits:
    """The wildcard_optimized layout with hashes of one bit, short epochs, a small cache and small deletes."""

    @pytest.fixture
    def subject(self, monkeypatch: pytest.MonkeyPatch) -> LayoutSubject:
        monkeypatch.setattr(wildcard_optimized, "_LOOKED_AT", 40)
        monkeypatch.setattr(streams, "_CACHED", 10)
        return LayoutSubject(make=with_few_bits, capabilities=CAPABILITIES["wildcard_optimized"])


@leaving_out(Limits, Changes)
@declaring(CAPABILITIES["wildcard_optimized"])
class TestWildcardOptimizedOfFewBits(FewBits, LayoutSuite):
    """The layout suite on a wildcard_optimized layout with hashes of one bit, so that hashes collide."""


@pytest.mark.slow
@declaring(CAPABILITIES["wildcard_optimized"])
class TestChangesOfFewBits(FewBits, Changes):
    """The tests of combined changes on a wildcard_optimized layout with hashes of one bit, so that hashes collide."""
