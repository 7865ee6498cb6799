"""The command ``topicstore delete``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.asking import check_can_ask, confirmed, yes_option
from topicstore.cli.terminal.options import PATH, json_option, time_options
from topicstore.contract.times import format_time

__all__ = ["delete"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="FILTER")
@time_options
@yes_option
@json_option
def delete(path: Path, topic_filter: str, *, start: int, until: int | None, yes: bool, as_json: bool) -> None:
    """Delete the messages in PATH whose topics match FILTER, for good.

    Asks first; without a terminal, --yes is needed. If it is interrupted, running it again does the rest.
    """
    from topicstore.cli.terminal.display import count_of, print_json, visible

    check_can_ask("deleting", yes=yes)
    with opened(path, "r+") as db:
        if not yes:
            found = sum(batch.num_rows for batch in db.replay_arrow(topic_filter, start, until, order="any"))
            span = f", from {format_time(start)}" * (start > 0) + (f", until {format_time(until)}" if until else "")
            question = f"Delete {count_of(found, 'message')} that match {visible(topic_filter)}{span}?"
            if not confirmed(question, "nothing was deleted"):
                return
        deleted = db.delete(topic_filter, start, until)
    if as_json:
        print_json({"path": str(path), "filter": topic_filter, "deleted": deleted})
    else:
        click.echo(f"{count_of(deleted, 'message')} deleted")
