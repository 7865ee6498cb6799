"""``topicstore checkpoint``."""

from __future__ import annotations

from pathlib import Path

import click

import topicstore
from topicstore.cli.terminal.options import PATH

__all__ = ["checkpoint"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("target", type=PATH)
def checkpoint(path: Path, target: Path) -> None:
    """Copy the database PATH, as it is now, into the new directory TARGET.

    While a program has PATH open, that program makes the copy: `Database.checkpoint`. Then read that.
    """
    from topicstore.cli.terminal.display import count_of

    with topicstore.open_existing(path) as db:
        db.checkpoint(target)
        messages = db.info().messages
    click.echo(f"{target}: a database with {count_of(messages, 'message')}")
