"""The command ``topicstore delete``."""

from __future__ import annotations

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.completion import topics
from topicstore.cli.terminal.display import count_of, visible
from topicstore.cli.terminal.options import by_option, or_end, time_options, yes_option
from topicstore.contract.replay_plan import By
from topicstore.contract.times import format_time

__all__ = ["delete"]


@click.command()
@answers("r+")
@click.argument("topic_filter", metavar="FILTER", shell_complete=topics)
@time_options
@by_option
@yes_option("deleting")
def delete(db: AnyDatabase, topic_filter: str, start: int, until: int | None, by: By, *, yes: bool) -> Answer:
    """Delete the messages in PATH whose topics match FILTER, for good.

    The command asks for confirmation; without a terminal, --yes is required. If it is interrupted, running it
    again does the rest.
    """
    if not yes:
        found = sum(batch.num_rows for batch in db.replay_arrow(topic_filter, start, until, by=by, order="any"))
        span = f", from {format_time(start)}" * (start > 0) + (f", until {format_time(until)}" if until else "")
        or_end(f"Delete {count_of(found, 'message')} that match {visible(topic_filter)}{span}?", "nothing was deleted")
    deleted = db.delete(topic_filter, start, until, by=by)
    yield {"filter": topic_filter, "deleted": deleted}
    yield f"{count_of(deleted, 'message')} deleted"
