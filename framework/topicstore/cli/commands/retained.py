"""The command ``topicstore retained``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.files.output import format_option, in_chunks, write_messages
from topicstore.cli.terminal.options import PATH, filter_argument

__all__ = ["retained"]


@click.command()
@click.argument("path", type=PATH)
@filter_argument
@format_option("jsonl", "table", "csv")
def retained(path: Path, topic_filter: str, file_format: str) -> None:
    """Print the retained messages in PATH whose topics match FILTER (default: #), in order of topics.

    A retained message is the last message of its topic that was published with the retain flag. Expired
    messages are not printed.
    """
    with opened(path, "r") as db:
        messages = db.retained(topic_filter)
    write_messages(in_chunks(messages), file_format)
