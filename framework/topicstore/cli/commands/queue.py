"""The command ``topicstore queue``, which lists, reads and removes queues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import click

import topicstore
from topicstore.cli.command import Answer, GroupWithDefault, answers
from topicstore.cli.connecting import AnyDatabase, opened
from topicstore.cli.files.output import format_option, write_messages
from topicstore.cli.terminal.display import count_of, make_table, size, visible
from topicstore.cli.terminal.options import PATH, or_end, yes_option
from topicstore.queues.queue import QueueInfo

__all__ = ["queue"]


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|read|drop] PATH …")
def queue() -> None:
    """List, read or drop queues: messages of a database that wait to be forwarded. `queue PATH` lists them."""


@queue.command("list")
@answers("r")
def list_(db: AnyDatabase) -> Answer:
    """List the queues of PATH."""
    found = list(db.queues)
    yield {"queues": [attrs.asdict(one) for one in found]}
    rows = [(q.name, q.messages, size(q.bytes), q.dropped, _bounds(q), size(q.disk_bytes)) for q in found]
    yield make_table("queue~", "waiting>", "size>", "dropped>", "bounds", "disk>", rows=rows)
    yield count_of(len(found), "queue")


def _bounds(info: QueueInfo) -> str:
    bounds = [count_of(info.max_messages, "message")] if info.max_messages is not None else []
    bounds += [size(info.max_bytes)] if info.max_bytes is not None else []
    return f"{', '.join(bounds)}: {info.overflow}" if bounds else "none"


@queue.command()
@click.argument("path", type=PATH)
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), metavar="MESSAGES", help="Stop after so many.")
@click.option("--commit", is_flag=True, help="Remove what was printed.")
@format_option("jsonl", "table", otherwise="as replay has it")
def read(path: Path, name: str, *, limit: int | None, commit: bool, file_format: str) -> None:
    """Print the uncommitted messages in queue NAME of PATH, oldest first."""
    with opened(path, "r" if not commit else "r+") as db:
        _check_there(db, name)
        one = db.queues.open(name)
        last = 0

        def batches() -> Iterator[list[topicstore.Message]]:
            nonlocal last
            left = len(one) if limit is None else min(limit, len(one))
            while left > 0:
                batch = one.read(min(left, 4_096))
                left -= len(batch)
                last = batch.last
                yield batch.messages

        write_messages(batches(), file_format)
        if commit:
            one.commit(last)


@queue.command()
@answers("r+", auto_compact=False)
@click.argument("name")
@yes_option("dropping")
def drop(db: AnyDatabase, name: str, *, yes: bool) -> Answer:
    """Remove queue NAME of PATH with all its messages, for good.

    The command asks for confirmation; without a terminal, --yes is required.
    """
    _check_there(db, name)
    waiting = len(db.queues.open(name))
    held = count_of(waiting, "message")
    if waiting and not yes:
        or_end(f"Drop queue {visible(name)} with {held}?", "nothing was dropped")
    db.queues.drop(name)
    yield {"queue": name, "dropped": waiting}
    yield f"queue {visible(name)} is dropped, with {held}"


def _check_there(db: AnyDatabase, name: str) -> None:
    """Raise `click.BadParameter` if there is no such queue, because opening it would create it."""
    if name not in db.queues:
        raise click.BadParameter(f"there is no queue {name!r}", param_hint="'NAME'")
