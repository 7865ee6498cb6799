"""Which backends and layouts are tested together: all that are installed and fit, found by the registry.

Tests name capabilities, never engines::

    @pytest.mark.parametrize("pair", pairs("persistent"), ids=str)
    def test_it(pair, tmp_path): ...

The result changes with what is installed: a plugin of yours is among the pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import topicstore as ts
from topicstore.engine import KEYSPACES, Engine
from topicstore.errors import BackendUnavailableError, IncompatibleError
from topicstore.options import make_options
from topicstore.plugins import check_pair, load_target, registry
from topicstore.specs import PluginSpec

__all__ = ["Pair", "absent", "layouts_on", "pairs", "quick_options", "small_options"]


@attrs.frozen(order=True)
class Pair:
    """A backend and a layout that work together."""

    backend: str
    layout: str
    capabilities: frozenset[str] = attrs.field(order=False)
    """What both of them declare."""

    def __str__(self) -> str:
        return f"{self.backend}-{self.layout}"

    def open(
        self, path: Path, *, options: Mapping[str, Mapping[str, Any]] | None = None, **arguments: Any
    ) -> ts.Database:
        """Open a database of this pair; unless told otherwise, with options that let tests run fast."""
        merged = {self.layout: quick_options(self.layout), **(options or {})}
        return ts.open(path, backend=self.backend, layout=self.layout, options=merged, **arguments)

    def small(self, **changes: Any) -> dict[str, Any]:
        """Return `small_options` of the layout, with ``changes`` as far as it has such options."""
        return small_options(self.layout, **changes)

    def raw(self, path: Path, shard: int = 0) -> contextlib.closing[Engine]:
        """Open the engine of a shard without the database around it, to put or damage what it keeps."""
        target = load_target(registry().backend(self.backend))
        backend = target(make_options(self.backend, target.Options, {}))
        return contextlib.closing(backend.open_shard(path / f"shard-{shard:04}", KEYSPACES, create=False))

    def scans_all(self, db: ts.Database) -> bool:
        """Say whether the layout reads everything for every filter, and so takes long for large sets.

        The way to tell: it has streams even for a topic that nobody ever published to.
        """
        return bool(db.streams("no such topic/was ever/published to"))

    def merges(self, db: ts.Database) -> bool:
        """Say whether the layout has anything to compact in a database with messages that were never compacted."""
        return any(shard.backlog() for shard in db.shards)


def quick_options(layout: str) -> dict[str, Any]:
    """Return options with which nobody waits: epochs of a millisecond, if the layout has epochs."""
    return _known(layout, {"epoch_bits": 10})


def small_options(layout: str, **changes: Any) -> dict[str, Any]:
    """Return options with which a layout learns from a handful of topics, and hashes collide, if it does either."""
    return _known(layout, {"thresholds": [3, 2], "epoch_bits": 10, "bits_per_topic_level": 2, **changes})


def _known(layout: str, options: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in attrs.fields(load_target(registry().layout(layout)).Options)}
    return {name: value for name, value in options.items() if name in known}


def _reason(spec: PluginSpec) -> str | None:
    """Return why a plugin can't be loaded here, or None."""
    try:
        load_target(spec)
    except BackendUnavailableError as missing:
        return str(missing)
    return None


def absent() -> dict[str, str]:
    """Return the plugins that are known but not tested, each with the reason."""
    specs: dict[str, PluginSpec] = {**registry().backends(), **registry().layouts()}
    return {name: reason for name, spec in specs.items() if (reason := _reason(spec)) is not None}


def layouts_on(backend: str) -> list[str]:
    """Return the layouts that work on a backend."""
    found = []
    for name, spec in sorted(registry().layouts().items()):
        try:
            check_pair(registry().backend(backend), spec)
        except IncompatibleError:
            continue
        if _reason(spec) is None:
            found.append(name)
    return found


def pairs(*required: str) -> list[Pair]:
    """Return every installed, compatible pair whose backend or layout declares what is required."""
    found = [
        Pair(
            backend,
            layout,
            registry().backend(backend).capabilities | registry().layout(layout).capabilities,
        )
        for backend, spec in registry().backends().items()
        if _reason(spec) is None
        for layout in layouts_on(backend)
    ]
    return sorted(pair for pair in found if pair.capabilities.issuperset(required))
