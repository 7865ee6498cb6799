"""The command ``topicstore latest``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.files.output import format_option, in_chunks, write_messages
from topicstore.cli.terminal.options import PATH, filter_argument

__all__ = ["latest"]


@click.command()
@click.argument("path", type=PATH)
@filter_argument
@format_option("jsonl", "table", "csv")
def latest(path: Path, topic_filter: str, file_format: str) -> None:
    """Print the last message of each topic in PATH that matches FILTER (default: #), in order of topics.

    `replay --reverse --limit N` prints the last messages of all topics together; `retained` prints the retained
    messages.
    """
    with opened(path, "r") as db:
        messages = db.latest(topic_filter)
    write_messages(in_chunks(messages), file_format)
