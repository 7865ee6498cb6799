"""Specifications by which plugins declare backends, layouts, log stores and workloads without importing them."""

from __future__ import annotations

import attrs

__all__ = ["BackendSpec", "LayoutSpec", "LogStoreSpec", "PluginSpec", "WorkloadSpec"]


def _frozenset(names: object) -> frozenset[str]:
    return frozenset(names)  # type: ignore[call-overload, no-any-return]


@attrs.frozen(kw_only=True)
class PluginSpec:
    """The fields that the specifications of all kinds have in common."""

    name: str
    """The name by which users select the plugin, unique among its kind."""
    target: str
    """The implementing class as ``"module:Class"``, imported on first use."""
    summary: str
    """A description in one line."""
    needs: tuple[str, ...] = ()
    """The modules that the target requires and that topicstore doesn't install by default."""
    install: str = ""
    """The argument of ``pip install`` that installs those modules, such as ``topicstore[rocksdb]``."""
    advice: str = ""
    """A sentence of advice for cases in which ``install`` fails, for example a Python version without wheels."""


@attrs.frozen(kw_only=True)
class BackendSpec(PluginSpec):
    """The specification of a `topicstore.contract.engine.Backend`."""

    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """Names of `topicstore.contract.engine.CAPABILITIES`, or additional names that the plugin's layouts require."""
    durability_note: str = ""
    """A sentence on the meaning of ``commit`` and ``sync`` for this backend, if that differs from the contract."""


@attrs.frozen(kw_only=True)
class LayoutSpec(PluginSpec):
    """The specification of a `topicstore.contract.layout.Layout`."""

    capabilities: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_frozenset)
    """The capabilities that the layout requires of a backend. A database with another backend is refused."""


@attrs.frozen(kw_only=True)
class LogStoreSpec(PluginSpec):
    """The specification of a `topicstore.contract.log_store.LogStore`. Its name is the scheme of its URLs."""


@attrs.frozen(kw_only=True)
class WorkloadSpec(PluginSpec):
    """The specification of a source of messages for benchmarks."""
