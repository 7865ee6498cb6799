"""Shell completion of topics, and of the names of backends and layouts.

The guide to the command line explains its installation.
"""

from __future__ import annotations

from functools import partial

import click
from click.shell_completion import CompletionItem

from topicstore.contract.errors import TopicstoreError

__all__ = ["backend_names", "layout_names", "topics"]

_MOST = 100
"""The number of topics up to which whole topics are completed, and above which the next level is."""


def _names(kind: str, _: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names that begin with ``incomplete``, each with its summary."""
    from topicstore.plugins import registry  # slow, because it imports the plugins

    specs = getattr(registry(), kind)()
    return [CompletionItem(name, help=specs[name].summary) for name in sorted(specs) if name.startswith(incomplete)]


def topics(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the topics in PATH that begin with ``incomplete``; if there are many, filters up to their next level."""
    from topicstore.cli.connecting import opened

    path = ctx.params.get("path")
    above, slash, _rest = incomplete.rpartition("/")
    if path is None or "+" in above or "#" in above:
        return []
    try:
        with opened(path, "r") as db:
            found = [one.topic for one in db.topics(f"{above}{slash}#") if one.topic.startswith(incomplete)]
    except (TopicstoreError, OSError, click.ClickException):
        return []  # an error would be printed in the middle of the command line
    if len(found) > _MOST:
        found = list(dict.fromkeys(_next_level(topic, len(above) + len(slash)) for topic in found))
    return [CompletionItem(one) for one in found]


def _next_level(topic: str, at: int) -> str:
    """Return a topic, or a filter of all topics with the same levels up to the one that begins at a character."""
    end = topic.find("/", at)
    return topic if end < 0 else f"{topic[:end]}/#"


backend_names = partial(_names, "backends")
"""The names of backends, for ``shell_complete``."""
layout_names = partial(_names, "layouts")
"""The names of layouts, for ``shell_complete``."""
