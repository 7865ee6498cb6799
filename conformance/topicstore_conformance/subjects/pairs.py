"""Pairs of a backend and a layout that are tested together: one by its names, or all installed compatible ones.

`pairs` selects plugins by capabilities, never by name, so installed third-party plugins are included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import topicstore as ts
from topicstore.contract.engine import KEYSPACES, Backend, Engine
from topicstore.contract.layout import Layout
from topicstore.contract.options import make_options
from topicstore.contract.plugin_specs import PluginSpec
from topicstore.plugins import check_pair, load_target, registry, why_absent

__all__ = [
    "Pair",
    "absent",
    "backend_for",
    "backends_under",
    "covering",
    "incompatible",
    "known",
    "layouts_on",
    "make_backend",
    "make_layout",
    "pair_of",
    "pairs",
    "quick_options",
    "small_options",
]


@attrs.frozen(order=True)
class Pair:
    """A backend and a layout that work together."""

    backend: str
    layout: str
    capabilities: frozenset[str] = attrs.field(order=False)
    """The union of the capabilities that the backend and the layout declare."""
    plugins: tuple[str, ...] = ()
    """The names of the plugins with which the pair's databases are opened, outermost first."""

    def __str__(self) -> str:
        return "+".join((f"{self.backend}-{self.layout}", *self.plugins))

    def open(
        self, path: Path, *, options: Mapping[str, Mapping[str, Any]] | None = None, **arguments: Any
    ) -> ts.Database:
        """Open a database of this pair, by default with `quick_options` and the pair's plugins."""
        merged = {self.layout: quick_options(self.layout), **(options or {})}
        arguments = {"plugins": self.plugins, **arguments}
        return ts.open(path, backend=self.backend, layout=self.layout, options=merged, **arguments)

    def reopen(self, path: Path, **arguments: Any) -> ts.Database:
        """Open for writing a database that `open` has created, and that was closed since."""
        return ts.open(path, **arguments)

    def small(self, **changes: Any) -> dict[str, Any]:
        """Return `small_options` of the layout, updated with the ``changes`` that are options of this layout."""
        return small_options(self.layout, **changes)

    def raw(self, path: Path, shard: int = 0) -> contextlib.closing[Engine]:
        """Open the engine of a shard without the database, so that a test can put or damage values."""
        # Removes the list of files, as after a kill: otherwise opening would report changed files.
        (path / "closed").unlink(missing_ok=True)
        backend = make_backend(self.backend)
        return contextlib.closing(backend.open_shard(path / f"shard-{shard:04}", KEYSPACES, create=False))

    def scans_all(self, db: ts.Database) -> bool:
        """Return whether the layout reads all messages for every filter, which is slow for large sets.

        Such a layout has streams even for a topic without messages.
        """
        return bool(db.streams("no such topic/was ever/published to"))

    def merges(self, db: ts.Database) -> bool:
        """Return whether a database, whose messages were never compacted, has a compaction backlog."""
        return any(shard.rewriter.backlog() for shard in db.storage.shards)


def quick_options(layout: str) -> dict[str, Any]:
    """Return options that make waits short: if the layout has epochs, they last a millisecond."""
    return _known(layout, {"epoch_bits": 10})


def small_options(layout: str, **changes: Any) -> dict[str, Any]:
    """Return options with which a layout learns from a few topics, and its topic hashes collide, if it has any."""
    return _known(layout, {"thresholds": [3, 2], "epoch_bits": 10, "bits_per_topic_level": 2, **changes})


def _known(layout: str, options: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in attrs.fields(load_target(registry().layout(layout)).Options)}
    return {name: value for name, value in options.items() if name in known}


def make_backend(name: str) -> Backend:
    """Create an object of an installed backend, with its default options."""
    target = load_target(registry().backend(name))
    backend: Backend = target(make_options(name, target.Options, {}))
    return backend


def make_layout(name: str) -> Layout:
    """Create an object of an installed layout, with `small_options`."""
    target = load_target(registry().layout(name))
    layout: Layout = target(make_options(name, target.Options, small_options(name)))
    return layout


def absent() -> dict[str, str]:
    """Return the registered plugins that can't be loaded, each with the reason."""
    specs: dict[str, PluginSpec] = {**registry().backends(), **registry().layouts()}
    return {name: reason for name, spec in specs.items() if (reason := why_absent(spec)) is not None}


def incompatible() -> dict[tuple[str, str], str]:
    """Return the incompatible pairs of a backend and a layout, each with the reason."""
    reasons = {(pair.backend.name, pair.layout.name): pair.why_refused() for pair in registry().pairs()}
    return {names: reason for names, reason in reasons.items() if reason is not None}


def layouts_on(backend: str) -> list[str]:
    """Return the installed layouts that work on a backend."""
    return [pair.layout.name for pair in registry().pairs() if pair.backend.name == backend and pair.works]


def backends_under(layout: str) -> list[str]:
    """Return the installed backends on which a layout works."""
    return [pair.backend.name for pair in registry().pairs() if pair.layout.name == layout and pair.works]


def backend_for(layout: str) -> str:
    """Return the backend on which a layout is tested alone: the one in memory, if it is compatible."""
    fitting = backends_under(layout)
    return "memory" if "memory" in fitting else fitting[0]


def pair_of(backend: str, layout: str, *, plugins: Iterable[str] = ()) -> Pair:
    """Return a pair by its names, and the names of the plugins that its databases have, outermost first.

    Raises `UnknownPluginError`, `IncompatibleError`, and `BackendUnavailableError` or `PluginError`
    for a plugin that can't be loaded.
    """
    specs = registry().backend(backend), registry().layout(layout)
    check_pair(*specs)
    for spec in specs:
        load_target(spec)
    wrappers = tuple(plugins)
    for name in wrappers:
        registry().wrapper(name)
    return Pair(backend, layout, specs[0].capabilities | specs[1].capabilities, wrappers)


def known(*required: str) -> list[Pair]:
    """Return every compatible pair, installed or not, that has all required capabilities."""
    return [
        Pair(pair.backend.name, pair.layout.name, pair.capabilities)
        for pair in registry().pairs()
        if pair.why_refused() is None and pair.capabilities.issuperset(required)
    ]


def pairs(*required: str) -> list[Pair]:
    """Return the `known` pairs that are installed."""
    missing = absent()
    return [pair for pair in known(*required) if missing.keys().isdisjoint({pair.backend, pair.layout})]


def covering(*required: str) -> list[Pair]:
    """Return few pairs that include every layout, in a persistent pair if possible, and every backend.

    Only installed pairs that have all required capabilities are considered.
    """
    installed, chosen = pairs(*required), dict[str, Pair]()

    def worth(pair: Pair) -> tuple[bool, bool, int]:
        new = all(pair.backend != other.backend for other in chosen.values())
        return "persistent" in pair.capabilities, new, len(pair.capabilities)

    for layout in sorted({pair.layout for pair in installed}):
        chosen[layout] = max((pair for pair in installed if pair.layout == layout), key=worth)
    covered = {pair.backend for pair in chosen.values()}
    others = {pair.backend: pair for pair in reversed(installed) if pair.backend not in covered}
    return [*chosen.values(), *others.values()]
