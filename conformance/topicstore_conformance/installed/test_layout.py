"""The layout suite, for the selected layouts."""

from __future__ import annotations

from functools import partial

import pytest
from topicstore.plugins import registry

from topicstore_conformance.installed.choosing import chosen_layouts
from topicstore_conformance.layout.suite import LayoutSuite
from topicstore_conformance.subjects.pairs import backend_for, make_backend, make_layout
from topicstore_conformance.subjects.subject import LayoutSubject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for each layout."""
    names = chosen_layouts(metafunc.config)
    metafunc.parametrize("subject", [_subject(name) for name in names], ids=names, scope="class")


def _subject(name: str) -> LayoutSubject:
    backend = backend_for(name)
    return LayoutSubject(
        make=partial(make_layout, name),
        capabilities=registry().layout(name).capabilities,
        backend=partial(make_backend, backend),
        backend_capabilities=registry().backend(backend).capabilities,
    )


class TestLayout(LayoutSuite):
    """The suite for each layout in turn."""
