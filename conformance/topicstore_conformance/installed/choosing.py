"""The plugins and pairs that are selected with the options of `topicstore_conformance.runner.plugin`."""

from __future__ import annotations

import pytest
from topicstore import TopicstoreError

from topicstore_conformance.subjects.pairs import Pair, backends_under, layouts_on, pair_of, pairs

__all__ = ["chosen_backends", "chosen_layouts", "chosen_pairs"]


def chosen_pairs(config: pytest.Config) -> list[Pair]:
    """Return the selected pairs. Raises pytest.UsageError for unknown names and for pairs that don't work together."""
    if only := _only(config, "database"):
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
