"""The command ``topicstore generations``, which lists, adds and drops generations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click
import msgspec

from topicstore.cli.command import Answer, GroupWithDefault, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.completion import layout_names
from topicstore.cli.terminal.display import count_of, lines, make_table, short_time, size, visible
from topicstore.cli.terminal.options import or_end, read_options, yes_option
from topicstore.storage.generations import GenerationInfo

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["generations", "generations_table", "missing_lines"]


@click.group(cls=GroupWithDefault, default="list", subcommand_metavar="[list|add|drop] PATH …")
def generations() -> None:
    """List, add or drop generations: partitions of a database in time.

    Only the current generation is written. Drop the oldest generation to remove old data; add a generation to
    change the layout. `generations PATH` lists them.
    """


@generations.command("list")
@answers("r")
def list_(db: AnyDatabase) -> Answer:
    """List the generations in PATH, oldest first."""
    found, archived = db.generations(), {one.generation: str(one.path) for one in db.archives}
    yield {"generations": [attrs.asdict(one) for one in found], "archived": archived}
    yield generations_table(found, archived=archived)
    for number, place in archived.items():
        yield visible(f"generation {number} is exported to {place}")
    yield from missing_lines(found[-1].missing)


def generations_table(
    found: Iterable[GenerationInfo], title: str | None = None, *, archived: Collection[int] = ()
) -> Table:
    """Return a table of generations; the options of each are listed as NAME=VALUE below the name of its layout."""
    rows = [
        (
            one.number,
            lines([one.layout, *(f"  {name}={_value_text(value)}" for name, value in one.options.items())]),
            short_time(one.created),
            "exported" if one.number in archived else "current" if one.sealed is None else "sealed",
            one.messages,
            size(one.live_bytes),
        )
        for one in found
    ]
    headers = ("no.>", "layout", "created", "state", "messages>", "written>")
    return make_table(*headers, title=title, rows=rows)


def missing_lines(missing: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each shard of a cluster that is not counted, with the reason."""
    for number, why in missing.items():
        yield click.style(f"shard {number} is not counted: {visible(why)}", fg="yellow")


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


@generations.command()
@answers("r+")
@click.argument("named", metavar="", required=False)  # a layout that is named without ``--layout``
@click.option("--layout", shell_complete=layout_names, help="[default: that of the current generation]")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="LAYOUT.NAME=VALUE",
    help="Option of the layout, such as block.level=3.",
)
def add(db: AnyDatabase, named: str | None, *, layout: str | None, options: tuple[str, ...]) -> Answer:
    """Seal the current generation in PATH and begin a new one.

    The new generation may have another layout; messages stored before keep theirs.
    """
    if named is not None and layout not in (None, named):
        raise click.UsageError(f"two layouts are named: {named} and {layout}")
    layout = layout or named
    current = db.generations()[-1].layout
    number = db.add_generation(layout, _of_layout(layout or current, options) if options else None)
    used = db.generations()[-1].layout
    yield {"generation": number, "layout": used}
    yield f"generation {number} begins, with layout {used}"


def _of_layout(layout: str, options: Iterable[str]) -> dict[str, Any]:
    """Return the options of a layout. NAME=VALUE is accepted besides LAYOUT.NAME=VALUE, because only it has options."""
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
@answers("r+")
@click.argument("number", type=click.IntRange(min=1))
@yes_option("dropping")
def drop(db: AnyDatabase, number: int, *, yes: bool) -> Answer:
    """Drop generation NUMBER of PATH with all its messages, for good. The current one can't be dropped.

    The command asks for confirmation; without a terminal, --yes is required.
    """
    held = sum(generation.messages for generation in db.generations() if generation.number == number)
    if held and not yes:
        or_end(f"Drop generation {number} with {count_of(held, 'message')}?", "nothing was dropped")
    dropped = db.drop_generation(number)
    yield {"generation": number, "dropped": dropped}
    yield f"generation {number} {'is dropped' if dropped else 'was dropped before'}"
