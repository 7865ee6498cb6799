"""What a plugin says of the backends, layouts and workloads it brings: frozen, and free of imports."""

from __future__ import annotations

import attrs

__all__ = ["BackendSpec", "LayoutSpec", "PluginSpec", "WorkloadSpec"]


def _frozenset(names: object) -> frozenset[str]:
    return frozenset(names)  # type: ignore[call-overload, no-any-return]


@attrs.frozen(kw_only=True)
class PluginSpec:
    """What all kinds have in common."""

    name: str
    """Unique among its kind; what people write."""
    target: str
    """``"module:Class"``, imported when first used, not when listed."""
    summary: str
    """One line for people."""
    needs: tuple[str, ...] = ()
    """Modules that the target imports and that may not be installed."""
    install: str = ""
    """What brings them: the argument of ``pip install``, such as ``topicstore[rocksdb]``."""
    advice: str = ""
    """What to do instead where ``install`` brings nothing, such as on a Python without wheels."""


@attrs.frozen(kw_only=True)
class BackendSpec(PluginSpec):
    """A `topicstore.contract.engine.Backend`."""

    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """Of `topicstore.contract.engine.CAPABILITIES`, or a name of the plugin's own that its layouts require."""
    durability_note: str = ""
    """What ``commit`` and ``sync`` mean here, if not what the contract says."""


@attrs.frozen(kw_only=True)
class LayoutSpec(PluginSpec):
    """A `topicstore.contract.layout.Layout`."""

    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """Capabilities of the backend without which a database is refused."""


@attrs.frozen(kw_only=True)
class WorkloadSpec(PluginSpec):
    """A source of messages for benchmarks."""
