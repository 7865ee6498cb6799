"""``topicstore generations``: list them, add one, drop one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec

import topicstore

from .options import PATH, json_option, read_options
from .times import format_time

__all__ = ["generations", "options_text"]


class _ListByDefault(click.Group):
    """``generations PATH`` means ``generations list PATH``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault, subcommand_metavar="[list|add|drop] PATH …")
def generations() -> None:
    """List, add or drop generations: partitions of a database in time.

    Only the current one is written. Dropping the oldest is how old data goes, and adding one is
    how a database gets another layout. `generations PATH` lists them.
    """


@generations.command("list")
@click.argument("path", type=PATH)
@json_option
def list_(path: Path, *, as_json: bool) -> None:
    """List the generations in PATH, oldest first."""
    from . import display

    with topicstore.open_existing(path, auto_compact=False) as db:
        found = db.generations()
    if as_json:
        display.print_json({"path": str(path), "generations": [attrs.asdict(one) for one in found]})
        return
    rows = [
        (
            one.number,
            one.layout,
            options_text(one.options),
            format_time(one.created)[:19] + "Z",
            "current" if one.sealed is None else format_time(one.sealed)[:19] + "Z",
            one.messages,
            display.size(one.live_bytes),
        )
        for one in found
    ]
    headers = ("generation>", "layout", "options", "created", "sealed", "messages>", "values>")
    display.console().print(display.make_table(*headers, rows=rows))


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as they are written on a command line."""
    return ", ".join(f"{name}={_value_text(value)}" for name, value in options.items()) or "-"


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


@generations.command()
@click.argument("path", type=PATH)
@click.option("--layout", help="[default: that of the current generation]")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Option of the layout.")
@json_option
def add(path: Path, *, layout: str | None, options: tuple[str, ...], as_json: bool) -> None:
    """Seal the current generation in PATH and begin a new one."""
    from . import display

    with topicstore.open_existing(path) as db:
        number = db.add_generation(layout, read_options(options) if options else None)
        used = db.generations()[-1].layout
    if as_json:
        display.print_json({"path": str(path), "generation": number, "layout": used})
    else:
        click.echo(f"generation {number} begins, with layout {used}")


@generations.command()
@click.argument("path", type=PATH)
@click.argument("number", type=click.IntRange(min=1))
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
def drop(path: Path, number: int, *, yes: bool, as_json: bool) -> None:
    """Drop generation NUMBER of PATH with all its messages, for good. The current one can't be dropped.

    Asks first; where nobody can answer, --yes is needed.
    """
    from . import display

    if not yes and not sys.stdin.isatty():
        raise click.UsageError("dropping needs --yes where nobody can be asked")
    with topicstore.open_existing(path) as db:
        held = sum(generation.messages for generation in db.generations() if generation.number == number)
        if held and not yes and not click.confirm(f"Drop generation {number} with {held:,} messages?", err=True):
            click.echo("nothing was dropped", err=True)
            return
        dropped = db.drop_generation(number)
    if as_json:
        display.print_json({"path": str(path), "generation": number, "dropped": dropped})
    else:
        click.echo(f"generation {number} {'is dropped' if dropped else 'was dropped before'}")
