"""Shell completion of the names of backends and layouts; the guide to the command line explains its installation."""

from __future__ import annotations

from functools import partial

import click
from click.shell_completion import CompletionItem

__all__ = ["backend_names", "layout_names"]


def _names(kind: str, _: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names that begin with ``incomplete``, each with its summary."""
    from topicstore.plugins import registry  # imports the plugins

    specs = getattr(registry(), kind)()
    return [CompletionItem(name, help=specs[name].summary) for name in sorted(specs) if name.startswith(incomplete)]


backend_names = partial(_names, "backends")
"""The names of backends, for ``shell_complete``."""
layout_names = partial(_names, "layouts")
"""The names of layouts, for ``shell_complete``."""
