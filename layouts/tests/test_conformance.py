"""The layouts of this package hold what `topicstore.contract.layout` promises."""

from __future__ import annotations

from functools import partial

import pytest
from topicstore_conformance import LayoutSubject, LayoutSuite
from topicstore_conformance.conditions.capabilities import declaring
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.subjects.pairs import make_backend, make_layout
from topicstore_layouts.plugin import topicstore_layouts

CAPABILITIES = {spec.name: spec.capabilities for spec in topicstore_layouts()}


def subject_of(layout: str) -> LayoutSubject:
    """Return a layout, with small options, over an engine in memory."""
    return LayoutSubject(make=partial(make_layout, layout), capabilities=CAPABILITIES[layout])


@declaring(CAPABILITIES["block"])
class TestBlock(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return subject_of("block")


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


@declaring(CAPABILITIES["table"])
class TestTable(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        need("duckdb")
        return LayoutSubject(
            make=partial(make_layout, "table"),
            capabilities=CAPABILITIES["table"],
            backend=partial(make_backend, "duckdb"),
            backend_capabilities=(),
        )


@declaring(CAPABILITIES["wildcard_optimized"])
class TestWildcardOptimized(LayoutSuite):
    @pytest.fixture
    def subject(self) -> LayoutSubject:
        return subject_of("wildcard_optimized")
