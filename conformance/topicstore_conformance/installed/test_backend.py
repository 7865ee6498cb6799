"""The backend suite, for the selected backends.

Tests that access the underlying store directly are skipped here, because that access differs by plugin. A backend's
author supplies it in a subclass of the suite.
"""

from __future__ import annotations

from functools import partial

import pytest
from topicstore.plugins import registry

from topicstore_conformance.backend.suite import BackendSuite
from topicstore_conformance.installed.choosing import chosen_backends
from topicstore_conformance.subjects.pairs import make_backend
from topicstore_conformance.subjects.subject import BackendSubject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test for each backend."""
    names = chosen_backends(metafunc.config)
    metafunc.parametrize("subject", [_subject(name) for name in names], ids=names, scope="class")


def _subject(name: str) -> BackendSubject:
    return BackendSubject(make=partial(make_backend, name), capabilities=registry().backend(name).capabilities)


class TestBackend(BackendSuite):
    """The suite for each backend in turn."""
