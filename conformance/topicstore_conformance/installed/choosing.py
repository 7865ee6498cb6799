"""The plugins and pairs that are selected with the options of `topicstore_conformance.runner.plugin`."""

from __future__ import annotations

import attrs
import pytest
from topicstore import TopicstoreError
from topicstore.plugins import registry

from topicstore_conformance.subjects.pairs import Pair, backends_under, layouts_on, pair_of, pairs

__all__ = ["chosen_backends", "chosen_layouts", "chosen_pairs", "chosen_transforms"]


def chosen_pairs(config: pytest.Config, suite: str = "database") -> list[Pair]:
    """Return the pairs that are selected for a suite.

    Raises pytest.UsageError for unknown names and for pairs that don't work together.
    """
    if only := _only(config, suite):
        return [pair for pair in pairs() if str(pair) in only]
    backend, layout = _chosen(config)
    if backend is None and layout is None:
        return pairs()
    try:
        if backend is None:
            return [pair_of(name, str(layout)) for name in backends_under(str(layout))]
        return [pair_of(backend, name) for name in ([layout] if layout else layouts_on(backend))]
    except TopicstoreError as error:
        raise pytest.UsageError(str(error)) from error


def chosen_transforms(config: pytest.Config) -> list[Pair]:
    """Return the selected pairs with the plugins of the option ``--plugins``: none without that option."""
    plugins = _plugins(config)
    if not plugins:
        return []
    only = _only(config, "plugins")
    found = [attrs.evolve(pair, plugins=plugins) for pair in (pairs() if only else chosen_pairs(config))]
    return [pair for pair in found if str(pair) in only] if only else found


def _plugins(config: pytest.Config) -> tuple[str, ...]:
    """Return the names of the option ``--plugins``. Raises pytest.UsageError for an unknown one."""
    names: str | None = config.getoption("tested_plugins", default=None)
    found = tuple(names.split(",")) if names else ()
    try:
        for name in found:
            registry().wrapper(name)
    except TopicstoreError as error:
        raise pytest.UsageError(str(error)) from error
    return found


def chosen_backends(config: pytest.Config) -> list[str]:
    """Return the names of the selected backends: none if only a layout was named."""
    if only := _only(config, "backend"):
        return only
    backend, layout = _chosen(config)
    if backend is None and layout is None:
        return sorted({pair.backend for pair in pairs()})
    return [] if backend is None else [backend]


def chosen_layouts(config: pytest.Config) -> list[str]:
    """Return the names of the selected layouts: none if only a backend was named."""
    if only := _only(config, "layout"):
        return only
    backend, layout = _chosen(config)
    if backend is None and layout is None:
        return sorted({pair.layout for pair in pairs()})
    return [] if layout is None else [layout]


def _chosen(config: pytest.Config) -> tuple[str | None, str | None]:
    return config.getoption("backend", default=None), config.getoption("layout", default=None)


def _only(config: pytest.Config, suite: str) -> list[str]:
    names: str | None = config.getoption(f"only_{suite}", default=None)
    return names.split(",") if names else []
