"""The command ``topicstore replay``; with ``--follow`` it polls a database that another process writes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import topicstore
from topicstore.cli.connecting import AnyDatabase, opened
from topicstore.cli.files.output import FORMATS, format_option, in_chunks, limited, write_messages
from topicstore.cli.terminal.options import PATH, filter_argument, replay_options
from topicstore.contract.batch import MessageBatch
from topicstore.contract.positions import first_position, time_of
from topicstore.contract.replay_plan import TimeRange
from topicstore.contract.times import format_time
from topicstore.contract.topics import TopicFilter
from topicstore.database import BATCH_SIZE
from topicstore.storage.storage import Storage

__all__ = ["replay"]

_LOOK_EVERY = 0.5
"""The seconds between two polls of a followed database; each poll opens its files again."""


@click.command()
@click.argument("path", type=PATH)
@filter_argument
@replay_options(
    ["time", "any", "timestamp"],
    "By position; just each publisher's order in each topic, which is quicker; or by the messages' own times, "
    "sorted in memory.",
)
@click.option("--limit", type=click.IntRange(min=0), metavar="MESSAGES", help="Stop after so many.")
@click.option("--reverse", is_flag=True, help="The newest first; with --limit, hardly more is read than is printed.")
@format_option(*FORMATS, otherwise="by the ending of --output; else table on a terminal, jsonl elsewhere")
@click.option("--output", type=PATH, is_eager=True, metavar="FILE", help="Write to FILE; .gz compresses jsonl and csv.")
@click.option(
    "--follow", is_flag=True, help="Then go on with what another program stores, as it comes, until --limit or Ctrl-C."
)
def replay(
    path: Path,
    topic_filter: str,
    *,
    file_format: str,
    output: Path | None,
    follow: bool,
    limit: int | None,
    **asked: Any,
) -> None:
    """Print the messages in PATH whose topics match FILTER (default: #).

    --start and --until are compared with positions. Positions follow the messages' own times if the database was
    created by `import` or with --timestamps message; otherwise they follow the times of storing. With --by
    timestamp, --start and --until are compared with the messages' own times, even if the messages were not stored
    in that order. The output is in order of positions, unless --order timestamp is given.

    `import` reads the output in CSV and JSON lines; for CSV from standard input, it needs --format csv.
    --format arrow writes a stream in Arrow's IPC format for a pipe: pyarrow.ipc.open_stream reads it, and
    Polars, DuckDB and pandas can use it through pyarrow.

    \b
    Examples:
      topicstore replay data 'fleet/+/+/speed' --start -2h
      topicstore replay data --until 2015-03-08T12:00:00-06:00 --limit 10
      topicstore replay data 'fleet/truck-1/#' --reverse --limit 1
      topicstore replay data --output messages.parquet
      topicstore replay data 'fleet/#' --start now --follow
      topicstore replay data 'fleet/#' --by timestamp --start 2015-03-07
      topicstore replay data 'fleet/#' --format arrow --output fleet.arrow
    """  # noqa: D301 - click wants the character
    limit = None if limit is None else min(limit, sys.maxsize)
    order, reverse = asked["order"], asked["reverse"]
    if file_format == "parquet" and output is None:
        raise click.UsageError("Parquet needs a file: --output FILE")
    if file_format == "arrow" and output is None and sys.stdout.isatty():
        raise click.UsageError("Arrow is no text for a terminal: write it to a pipe, or to --output FILE")
    if follow and (output is not None or asked["until"] is not None or order != "time" or reverse):
        raise click.UsageError(
            "--follow prints in order of time and has no end: leave out --output, --until, --order and --reverse"
        )
    if follow and asked["by"] == "timestamp":
        raise click.UsageError("--follow goes by positions: leave out --by")
    if reverse and order == "any":
        raise click.UsageError("--reverse is by time, or by the messages' own times: --order any has no reverse")
    with opened(path, "r") as db:
        columns = file_format in ("parquet", "arrow")
        found: Any
        if follow:
            chunks = limited(_follow(db, topic_filter, asked["start"]), limit)
            found = (topicstore.MessageBatch.of(chunk).to_arrow() for chunk in chunks) if columns else chunks
        elif columns:
            found = db.replay_arrow(topic_filter, limit=limit, **asked)
        else:
            found = in_chunks(db.replay(topic_filter, limit=limit, **asked))
        written = write_messages(found, file_format, output)
        if not written and limit != 0 and sys.stderr.isatty():
            click.echo(_nothing(db), err=True)


def _follow(db: AnyDatabase, topic_filter: str, start: int) -> Iterator[list[topicstore.Message]]:
    """Yield the stored messages, and then those that another process stores, in lists."""
    if not isinstance(db, topicstore.Database):
        yield from db.follow(topic_filter, start)
        return
    if db.storage.mode == "owner":
        raise click.UsageError(
            f"on {db.manifest.backend} nobody can store anything while this reads it, so there is nothing to follow"
        )
    following = _Following(db.storage, TopicFilter(topic_filter), start)
    while True:
        for batch in following.look(BATCH_SIZE):
            yield batch.to_messages()
        time.sleep(_LOOK_EVERY)


class _Following:
    """A reader of the matching messages at or after a time, as they become visible to a read-only opening."""

    def __init__(self, storage: Storage, topic_filter: TopicFilter, start: int) -> None:
        self._storage = storage
        self._filter = topic_filter
        own = storage.manifest.timestamps == "message" and start > 0
        self._timestamps = TimeRange(start) if own else None
        self._next = [first_position(start)] * len(storage.shards)
        """By shard, the first position that was not read yet."""

    def look(self, rows: int) -> Iterator[MessageBatch]:
        """Refresh the database, and yield the messages that became visible since the last call, in order of positions.

        Batches have about ``rows`` rows. The caller must exhaust the iterator before the next call. Messages of an
        epoch that hasn't ended are yielded by a later call. Raises the errors of refreshing and replaying.
        """
        self._storage.refresh()
        plans = [self._storage.plan_shard(shard, self._filter, first, None) for shard, first in enumerate(self._next)]
        yield from self._storage.run_shards(plans, rows, timestamps=self._timestamps)
        self._next = [max(first, plan.bound + 1) for first, plan in zip(self._next, plans, strict=True)]


def _nothing(db: AnyDatabase) -> str:
    """Return a message that explains why nothing was printed: the database is empty, or nothing matches."""
    if not any(generation.messages for generation in db.generations()):
        return "no messages: the database holds none"
    newest = max(shard.watermark for shard in db.info().shards)
    return f"no messages match; the newest of the database is of {format_time(time_of(newest))}"
