"""The command ``topicstore queue``, which lists, reads and removes queues."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

import topicstore
from topicstore.cli.connecting import opened
from topicstore.cli.files.output import format_of, write_messages
from topicstore.cli.terminal.asking import check_can_ask, confirmed, yes_option
from topicstore.cli.terminal.groups import GroupWithDefault
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.queues.queue import QueueInfo

if TYPE_CHECKING:
    from topicstore.client.remote_database import RemoteDatabase

__all__ = ["queue"]


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|read|drop] PATH …")
def queue() -> None:
    """List, read or drop queues: messages of a database that wait to be forwarded. `queue PATH` lists them."""


@queue.command("list")
@click.argument("path", type=PATH)
@json_option
def list_(path: Path, *, as_json: bool) -> None:
    """List the queues of PATH."""
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found = list(db.queues)
    if as_json:
        display.print_json({"path": str(path), "queues": [attrs.asdict(one) for one in found]})
        return
    rows = [
        (one.name, one.messages, display.size(one.bytes), one.dropped, _bounds(one), display.size(one.disk_bytes))
        for one in found
    ]
    headers = ("queue~", "waiting>", "size>", "dropped>", "bounds", "disk>")
    display.console().print(display.make_table(*headers, rows=rows))
    click.echo(display.count_of(len(found), "queue"))


def _bounds(info: QueueInfo) -> str:
    from topicstore.cli.terminal.display import count_of, size

    bounds = [count_of(info.max_messages, "message")] if info.max_messages is not None else []
    bounds += [size(info.max_bytes)] if info.max_bytes is not None else []
    return f"{', '.join(bounds)}: {info.overflow}" if bounds else "none"


@queue.command()
@click.argument("path", type=PATH)
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), metavar="MESSAGES", help="Stop after so many.")
@click.option("--commit", is_flag=True, help="Remove what was printed.")
@click.option("--format", "file_format", type=click.Choice(["jsonl", "table"]), help="[default: as replay has it]")
def read(path: Path, name: str, *, limit: int | None, commit: bool, file_format: str | None) -> None:
    """Print the messages that wait in queue NAME of PATH, the oldest first."""
    file_format = file_format or format_of(None, terminal=sys.stdout.isatty())
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
@click.argument("path", type=PATH)
@click.argument("name")
@yes_option
@json_option
def drop(path: Path, name: str, *, yes: bool, as_json: bool) -> None:
    """Remove queue NAME of PATH with all messages that wait in it, for good.

    Asks first; without a terminal, --yes is needed.
    """
    from topicstore.cli.terminal.display import count_of, print_json, visible

    check_can_ask("dropping", yes=yes)
    with opened(path, "r+", auto_compact=False) as db:
        _check_there(db, name)
        waiting = len(db.queues.open(name))
        question = f"Drop queue {visible(name)} with {count_of(waiting, 'message')}?"
        if waiting and not yes and not confirmed(question, "nothing was dropped"):
            return
        db.queues.drop(name)
    if as_json:
        print_json({"path": str(path), "queue": name, "dropped": waiting})
    else:
        click.echo(f"queue {visible(name)} is dropped, with {count_of(waiting, 'message')}")


def _check_there(db: topicstore.Database | RemoteDatabase, name: str) -> None:
    """Refuse the name of a missing queue, which the library would create."""
    if name not in db.queues:
        raise click.BadParameter(f"there is no queue {name!r}", param_hint="'NAME'")
