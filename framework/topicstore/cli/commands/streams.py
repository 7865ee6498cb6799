"""The command ``topicstore streams``."""

from __future__ import annotations

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import count_of, make_table, natural, single
from topicstore.cli.terminal.options import TIME, TIME_HELP, filter_argument

__all__ = ["streams"]


@click.command()
@answers("r")
@filter_argument
@click.option("--start", type=TIME, default=0, metavar="TIME", help=f"Leave out what ended before: {TIME_HELP}.")
def streams(db: AnyDatabase, topic_filter: str, start: int) -> Answer:
    """List the streams in PATH that may hold messages whose topics match FILTER (default: #).

    A stream is a sequence of messages that can be read separately: those of one topic, or of several topics that
    share a level learned as + or #. `learned-topics` shows the streams as a tree.
    """
    found = sorted(db.streams(topic_filter, start), key=lambda one: natural(one.pattern))
    alone = single(shards=db.manifest.shards, generations=len(db.generations()))
    yield {"filter": topic_filter, "streams": found}
    rows = [(s.pattern, s.shard, s.generation, s.number, "sealed" if s.sealed else "current") for s in found]
    yield make_table("topics~", "shard>", "generation>", "stream>", "state", rows=rows, without=alone)
    yield count_of(len(found), "stream")
