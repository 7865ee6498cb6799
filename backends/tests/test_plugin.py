"""Tests of the specifications of the backends."""

from __future__ import annotations

from importlib import import_module

import pytest
from topicstore.contract.engine import CAPABILITIES, Backend
from topicstore.contract.plugin_specs import BackendSpec
from topicstore_backends.plugin import topicstore_backends
from topicstore_conformance.conditions.skipping import need


@pytest.mark.parametrize("spec", topicstore_backends(), ids=lambda spec: spec.name)
def test_a_target_is_a_backend_with_options(spec: BackendSpec) -> None:
    """Each target is a `Backend` class whose options have defaults and whose capabilities are known."""
    module, _, name = spec.target.partition(":")
    need(spec.name)
    backend = getattr(import_module(module), name)
    assert issubclass(backend, Backend)
    assert isinstance(backend(backend.Options()), Backend)
    assert frozenset() == spec.capabilities - CAPABILITIES
