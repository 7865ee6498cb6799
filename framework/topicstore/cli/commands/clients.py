"""The command ``topicstore clients``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.cli.terminal.tallies import sort_option, sorted_by, table_of

__all__ = ["clients"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@sort_option
@json_option
def clients(path: Path, topic_filter: str, *, sort: str, as_json: bool) -> None:
    """List the client ids in PATH with messages that match FILTER (default: #), counted as by `topics`."""
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found = sorted_by(sort, db.clients(topic_filter))
    if as_json:
        display.print_json({"path": str(path), "filter": topic_filter, "clients": found})
    else:
        table_of("client id", [(one.client_id, one) for one in found])
