"""The command ``topicstore clients``."""

from __future__ import annotations

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.options import filter_argument

from .topics import sort_option, tallied

__all__ = ["clients"]


@click.command()
@answers("r")
@filter_argument
@sort_option
def clients(db: AnyDatabase, topic_filter: str, sort: str) -> Answer:
    """List the client ids in PATH with messages that match FILTER (default: #), counted as by `topics`."""
    return tallied("client id", "clients", db.clients(topic_filter), topic_filter, sort)
