"""Completion of plugins' names in the shell; the guide to the command line says how to install it."""

from __future__ import annotations

from collections.abc import Mapping

import click
from click.shell_completion import CompletionItem

from topicstore.contract.plugin_specs import PluginSpec

__all__ = ["backend_names", "layout_names"]


def backend_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the backends whose names begin with the typed text, each with its summary. For ``shell_complete``."""
    from topicstore.plugins import registry  # imports the plugins

    return _matching(registry().backends(), incomplete)


def layout_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the layouts whose names begin with the typed text, each with its summary. For ``shell_complete``."""
    from topicstore.plugins import registry

    return _matching(registry().layouts(), incomplete)


def _matching(specs: Mapping[str, PluginSpec], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=specs[name].summary) for name in sorted(specs) if name.startswith(incomplete)]
