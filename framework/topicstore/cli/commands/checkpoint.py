"""The command ``topicstore checkpoint``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.display import count_of
from topicstore.cli.terminal.options import PATH

__all__ = ["checkpoint"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("target", type=PATH)
def checkpoint(path: Path, target: Path) -> None:
    """Copy the database PATH, as it is now, into the new directory TARGET.

    If a server has PATH open, the server makes the copy. Any other program that has PATH open must call
    `Database.checkpoint` itself.
    """
    with opened(path, "r+") as db:
        db.checkpoint(target)
        messages = db.info().messages
    click.echo(f"{target}: a database with {count_of(messages, 'message')}")
