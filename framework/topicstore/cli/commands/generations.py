"""The command ``topicstore generations``, which lists, adds and drops generations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click
import msgspec

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.asking import check_can_ask, confirmed, yes_option
from topicstore.cli.terminal.completion import layout_names
from topicstore.cli.terminal.groups import GroupWithDefault
from topicstore.cli.terminal.options import PATH, json_option, read_options
from topicstore.storage.generations import GenerationInfo

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["generations", "generations_table"]


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|add|drop] PATH …")
def generations() -> None:
    """List, add or drop generations: partitions of a database in time.

    Only the current one is written. Dropping the oldest is how old data is removed, and adding one is
    how a database gets another layout. `generations PATH` lists them.
    """


@generations.command("list")
@click.argument("path", type=PATH)
@json_option
def list_(path: Path, *, as_json: bool) -> None:
    """List the generations in PATH, oldest first."""
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found, archived = db.generations(), {one.generation: one.path for one in db.archives}
    if as_json:
        document = {"path": str(path), "generations": [attrs.asdict(one) for one in found]}
        display.print_json({**document, "archived": {number: str(place) for number, place in archived.items()}})
        return
    display.console().print(generations_table(found, archived=archived))
    for number, place in archived.items():
        click.echo(display.visible(f"generation {number} is exported to {place}"))


def generations_table(
    found: Iterable[GenerationInfo], title: str | None = None, *, archived: Collection[int] = ()
) -> Table:
    """Return a table of generations; the options of each, as they are written, are below the name of its layout."""
    from rich.text import Text

    from topicstore.cli.terminal import display

    rows = [
        (
            one.number,
            Text("\n".join([one.layout, *_option_lines(one.options)])),
            display.short_time(one.created),
            "exported" if one.number in archived else "current" if one.sealed is None else "sealed",
            one.messages,
            display.size(one.live_bytes),
        )
        for one in found
    ]
    headers = ("no.>", "layout", "created", "state", "messages>", "values>")
    return display.make_table(*headers, title=title, rows=rows)


def _option_lines(options: Mapping[str, Any]) -> list[str]:
    from topicstore.cli.terminal.display import visible

    return [visible(f"  {name}={_value_text(value)}") for name, value in options.items()]


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


@generations.command()
@click.argument("path", type=PATH)
@click.argument("named", metavar="", required=False)  # a layout here gets an error that names the option
@click.option("--layout", shell_complete=layout_names, help="[default: that of the current generation]")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="LAYOUT.NAME=VALUE",
    help="Option of the layout, such as block.level=3.",
)
@json_option
def add(path: Path, named: str | None, *, layout: str | None, options: tuple[str, ...], as_json: bool) -> None:
    """Seal the current generation in PATH and begin a new one.

    This is how a database gets another layout: messages stored before stay as they are.
    """
    from topicstore.cli.terminal import display

    if named is not None and layout not in (None, named):
        raise click.UsageError(f"two layouts are named: {named} and {layout}")
    layout = layout or named
    with opened(path, "r+") as db:
        current = db.generations()[-1].layout
        number = db.add_generation(layout, _of_layout(layout or current, options) if options else None)
        used = db.generations()[-1].layout
    if as_json:
        display.print_json({"path": str(path), "generation": number, "layout": used})
    else:
        click.echo(f"generation {number} begins, with layout {used}")


def _of_layout(layout: str, options: Iterable[str]) -> dict[str, Any]:
    """Return options of a layout; plain NAME=VALUE is enough, because no other plugin has options here."""
    names = []
    for text in options:
        plugin, dot, name = text.partition(".")
        if not dot or "=" in plugin:
            name = text
        elif plugin != layout:
            raise click.BadParameter(f"{text!r} is no option of the layout {layout!r}", param_hint="'--option'")
        names.append(name)
    return read_options(names)


@generations.command()
@click.argument("path", type=PATH)
@click.argument("number", type=click.IntRange(min=1))
@yes_option
@json_option
def drop(path: Path, number: int, *, yes: bool, as_json: bool) -> None:
    """Drop generation NUMBER of PATH with all its messages, for good. The current one can't be dropped.

    Asks first; without a terminal, --yes is needed.
    """
    from topicstore.cli.terminal import display

    check_can_ask("dropping", yes=yes)
    with opened(path, "r+") as db:
        held = sum(generation.messages for generation in db.generations() if generation.number == number)
        question = f"Drop generation {number} with {display.count_of(held, 'message')}?"
        if held and not yes and not confirmed(question, "nothing was dropped"):
            return
        dropped = db.drop_generation(number)
    if as_json:
        display.print_json({"path": str(path), "generation": number, "dropped": dropped})
    else:
        click.echo(f"generation {number} {'is dropped' if dropped else 'was dropped before'}")
