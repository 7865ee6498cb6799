"""Specifications of the backends, layouts, log stores and workloads that a plugin has. Listing them imports none."""

from __future__ import annotations

import attrs

__all__ = ["BackendSpec", "LayoutSpec", "LogStoreSpec", "PluginSpec", "WorkloadSpec"]


def _frozenset(names: object) -> frozenset[str]:
    return frozenset(names)  # type: ignore[call-overload, no-any-return]


@attrs.frozen(kw_only=True)
class PluginSpec:
    """The fields that the specifications of all kinds have in common."""

    name: str
    """The name by which people select it, unique among its kind."""
    target: str
    """The class as ``"module:Class"``, imported when it is first used, not when it is listed."""
    summary: str
    """A description in one line."""
    needs: tuple[str, ...] = ()
    """The modules that the target imports and that may not be installed."""
    install: str = ""
    """The argument of ``pip install`` that installs those modules, such as ``topicstore[rocksdb]``."""
    advice: str = ""
    """A sentence on what to do where ``install`` doesn't help, for example on a version of Python without wheels."""


@attrs.frozen(kw_only=True)
class BackendSpec(PluginSpec):
    """The specification of a `topicstore.contract.engine.Backend`."""

    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """Names of `topicstore.contract.engine.CAPABILITIES`, or names of the plugin's own that its layouts require."""
    durability_note: str = ""
    """A sentence on what ``commit`` and ``sync`` mean for this backend, if it differs from the contract."""


@attrs.frozen(kw_only=True)
class LayoutSpec(PluginSpec):
    """The specification of a `topicstore.contract.layout.Layout`."""

    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """The capabilities that the layout needs of a backend; without them a database is refused."""


@attrs.frozen(kw_only=True)
class LogStoreSpec(PluginSpec):
    """The specification of a `topicstore.contract.log_store.LogStore`. Its name is the scheme of its URLs."""


@attrs.frozen(kw_only=True)
class WorkloadSpec(PluginSpec):
    """The specification of a source of messages for benchmarks."""
