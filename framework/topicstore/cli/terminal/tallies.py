"""Tables of messages counted by topic or by client id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from topicstore.storage.contents import ClientTally, TopicTally

__all__ = ["sort_option", "sorted_by", "table_of"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", TopicTally, ClientTally)


def sort_option(command: F) -> F:
    """Add the option by which a command's lines are sorted."""
    return click.option(
        "--sort",
        type=click.Choice(["name", "messages", "bytes", "last"]),
        default="name",
        show_default=True,
        help="By name, or what has most, or came last, first.",
    )(command)


def sorted_by(sort: str, found: list[T]) -> list[T]:
    """Sort a list that is sorted by name already."""
    return found if sort == "name" else sorted(found, key=lambda one: int(getattr(one, sort)), reverse=True)


def table_of(header: str, found: Sequence[tuple[str, TopicTally | ClientTally]]) -> None:
    """Print names with their counts, and the sum."""
    from topicstore.cli.terminal import display

    rows = [
        (name, one.messages, display.size(one.bytes), display.short_time(one.first), display.short_time(one.last))
        for name, one in found
    ]
    headers = (f"{header}~", "messages>", "bytes>", "first", "last")
    display.console().print(display.make_table(*headers, rows=rows))
    messages = display.count_of(sum(one.messages for _, one in found), "message")
    click.echo(f"{display.count_of(len(found), header)}, {messages}")
