"""The layouts of this package hold what `topicstore.layout` promises."""

from __future__ import annotations

import pytest
from topicstore.layout import Layout
from topicstore_conformance.layout.suite import LayoutSuite
from topicstore_conformance.subjects import LayoutSubject
from topicstore_layouts.block.layout import BlockLayout, BlockOptions
from topicstore_layouts.plugin import topicstore_layouts
from topicstore_layouts.reference import ReferenceLayout, ReferenceOptions
from topicstore_layouts.skipstream.layout import SkipstreamLayout, SkipstreamOptions
from topicstore_layouts.wildcard_optimized.layout import WildcardOptimizedLayout, WildcardOptimizedOptions

CAPABILITIES = {spec.name: spec.capabilities for spec in topicstore_layouts()}


def make_reference() -> Layout:
    return ReferenceLayout(ReferenceOptions())


def make_wildcard_optimized() -> Layout:
    return WildcardOptimizedLayout(WildcardOptimizedOptions(thresholds=(3, 2), epoch_bits=0, bits_per_topic_level=2))


def make_skipstream() -> Layout:
    return SkipstreamLayout(SkipstreamOptions(thresholds=(3, 2)))


def make_block() -> Layout:
    return BlockLayout(BlockOptions(thresholds=(3, 2)))


class TestReference(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return LayoutSubject(make=make_reference, capabilities=CAPABILITIES["reference"])


class TestWildcardOptimized(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return LayoutSubject(make=make_wildcard_optimized, capabilities=CAPABILITIES["wildcard_optimized"])


class TestSkipstream(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return LayoutSubject(make=make_skipstream, capabilities=CAPABILITIES["skipstream"])


class TestBlock(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return LayoutSubject(make=make_block, capabilities=CAPABILITIES["block"])
