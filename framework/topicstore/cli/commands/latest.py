"""The command ``topicstore latest``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.files.output import format_of, in_chunks, write_messages
from topicstore.cli.terminal.options import PATH

__all__ = ["latest"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["jsonl", "table", "csv"]),
    help="[default: table on a terminal, jsonl elsewhere]",
)
def latest(path: Path, topic_filter: str, *, file_format: str | None) -> None:
    """Print the last message of each topic in PATH that matches FILTER (default: #), in order of topics.

    `replay --reverse --limit N` prints the last messages of all topics together, `retained` those that were published
    to be retained.
    """
    file_format = file_format or format_of(None, terminal=sys.stdout.isatty())
    with opened(path, "r") as db:
        messages = db.latest(topic_filter)
    write_messages(in_chunks(iter(messages)), file_format)
