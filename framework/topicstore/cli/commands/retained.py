"""``topicstore retained``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import topicstore
from topicstore.cli.files.output import format_of, write_messages
from topicstore.cli.terminal.options import PATH

__all__ = ["retained"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["jsonl", "table", "csv"]),
    help="[default: table on a terminal, jsonl elsewhere]",
)
def retained(path: Path, topic_filter: str, *, file_format: str | None) -> None:
    """Print the retained messages in PATH whose topics match FILTER (default: #), in order of topics.

    A retained message is the last of its topic that was published to be retained. Those that have
    expired are left out.
    """
    file_format = file_format or format_of(None, terminal=sys.stdout.isatty())
    with topicstore.open_existing(path, auto_compact=False) as db:
        messages = db.retained(topic_filter)
    write_messages(iter(messages), file_format)
