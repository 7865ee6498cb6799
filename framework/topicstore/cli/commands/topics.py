"""The command ``topicstore topics``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.cli.terminal.tallies import sort_option, sorted_by, table_of

__all__ = ["topics"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@sort_option
@json_option
def topics(path: Path, topic_filter: str, *, sort: str, as_json: bool) -> None:
    """List the topics in PATH that match FILTER (default: #): messages, bytes, the first and the last.

    Bytes are those of payloads and topics, before compression. Times are those of positions. All is exact; what
    was counted in the background, or by `compact`, isn't read for it.
    """
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found = sorted_by(sort, db.topics(topic_filter))
    if as_json:
        display.print_json({"path": str(path), "filter": topic_filter, "topics": found})
    else:
        table_of("topic", [(one.topic, one) for one in found])
