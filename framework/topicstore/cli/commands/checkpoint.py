"""The command ``topicstore checkpoint``."""

from __future__ import annotations

from pathlib import Path

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import count_of
from topicstore.cli.terminal.options import PATH

__all__ = ["checkpoint"]


@click.command()
@answers("r+")
@click.argument("target", type=PATH)
def checkpoint(db: AnyDatabase, target: Path) -> Answer:
    """Copy the database PATH, as it is now, into the new directory TARGET.

    If a server has PATH open, the server makes the copy. Any other program that has PATH open must call
    `Database.checkpoint` itself.
    """
    db.checkpoint(target)
    messages = db.info().messages
    yield {"target": str(target), "messages": messages}
    yield f"{target}: a database with {count_of(messages, 'message')}"
