"""The command ``topicstore streams``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, TIME, TIME_HELP, json_option

__all__ = ["streams"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@click.option("--start", type=TIME, default=0, metavar="TIME", help=f"Leave out what ended before: {TIME_HELP}.")
@json_option
def streams(path: Path, topic_filter: str, *, start: int, as_json: bool) -> None:
    """List the streams in PATH that may hold messages whose topics match FILTER (default: #).

    A stream is what can be read separately: the messages of one topic, or of several that share a level
    learned as + or #. `learned-topics` shows the same as a tree.
    """
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found = sorted(db.streams(topic_filter, start), key=lambda one: display.natural(one.pattern))
        alone = display.single(shards=db.manifest.shards, generations=len(db.generations()))
    if as_json:
        display.print_json({"path": str(path), "filter": topic_filter, "streams": found})
        return
    rows = [(s.pattern, s.shard, s.generation, s.number, "sealed" if s.sealed else "current") for s in found]
    headers = ("topics~", "shard>", "generation>", "stream>", "state")
    display.console().print(display.make_table(*headers, rows=rows, without=alone))
    click.echo(display.count_of(len(found), "stream"))
