"""``topicstore replay``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

import topicstore
from topicstore.cli.files.output import FORMATS, format_of, open_output, write_messages, write_parquet
from topicstore.cli.terminal.options import PATH, time_options
from topicstore.contract.positions import time_of
from topicstore.contract.replay_plan import Order
from topicstore.times import format_time

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["replay"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@time_options
@click.option("--limit", type=click.IntRange(min=0), metavar="MESSAGES", help="Stop after so many.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(FORMATS),
    help="[default: by the ending of --output; else table on a terminal, jsonl elsewhere]",
)
@click.option("--output", type=PATH, metavar="FILE", help="Write to FILE; jsonl and csv are packed if it ends in .gz.")
@click.option(
    "--order",
    type=click.Choice(["time", "none"]),
    default="time",
    show_default=True,
    help="Merge everything by position, or keep just each publisher's order in each topic, which is quicker.",
)
def replay(
    path: Path,
    topic_filter: str,
    start: int,
    until: int | None,
    *,
    limit: int | None,
    file_format: str | None,
    output: Path | None,
    order: str,
) -> None:
    """Print the messages in PATH whose topics match FILTER (default: #).

    Times are compared with positions: by the messages' own times if the database was made by
    `import` or with --timestamps message, else by the times of storing.

    CSV and JSON lines are what `import` reads; from standard input, it takes CSV with --format csv.

    \b
    Examples:
      topicstore replay data 'fleet/+/+/speed' --start -2h
      topicstore replay data --start 2015-03-07 --until 2015-03-08T12:00:00-06:00 --limit 10
      topicstore replay data --output messages.parquet
    """  # noqa: D301 - click wants the character
    limit = None if limit is None else min(limit, sys.maxsize)
    file_format = file_format or format_of(output, terminal=sys.stdout.isatty())
    if file_format == "parquet" and output is None:
        raise click.UsageError("Parquet needs a file: --output FILE")
    with topicstore.open_existing(path) as db:
        merged: Order | None = "time" if order == "time" else None
        if file_format == "parquet":
            batches = db.replay_arrow(topic_filter, start, until, order=merged)
            with open_output(output, packed=False) as file:
                written = write_parquet(_limited(batches, limit), file)
        else:
            messages = islice(db.replay(topic_filter, start, until, order=merged), limit)
            written = write_messages(messages, file_format, output)
        if not written and limit != 0 and sys.stderr.isatty():
            click.echo(_nothing(db), err=True)


def _nothing(db: topicstore.Database) -> str:
    """Return what a person may want to know where nothing matches."""
    if not any(generation.messages for generation in db.generations()):
        return "no messages: the database holds none"
    newest = max(shard.watermark for shard in db.info().shards)
    return f"no messages match; the newest of the database is of {format_time(time_of(newest))}"


def _limited(batches: Iterable[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if limit is not None and batch.num_rows >= limit:
            yield batch.slice(0, limit)
            return
        yield batch
        limit = None if limit is None else limit - batch.num_rows
