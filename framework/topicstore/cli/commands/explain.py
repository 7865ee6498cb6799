"""The command ``topicstore explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, by_option, json_option, time_options
from topicstore.contract.replay_plan import By, Order
from topicstore.contract.times import format_time
from topicstore.storage.explain import LEGEND, Explanation, SlabCost

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["explain"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="FILTER")
@time_options
@by_option
@click.option(
    "--order",
    type=click.Choice(["time", "any"]),
    default="time",
    show_default=True,
    help="Merge everything by position, as `replay` does, or keep just each publisher's order in each topic.",
)
@json_option
def explain(
    path: Path, topic_filter: str, start: int, until: int | None, *, by: By, order: Order, as_json: bool
) -> None:
    """Replay FILTER from PATH, and print the cost of finding the messages instead of the messages.

    For each generation of each shard: how many of its streams may hold such messages; seeks (scans begun);
    how many blocks or keys, by its layout, were visited (decoded) and skipped (passed over); the messages
    found; the time, with the layouts' caches still cold. --json also has the passes in which streams were
    read, and the batches fetched.
    """
    from topicstore.cli.terminal import display

    with opened(path, "r") as db:
        found = db.explain(topic_filter, start, until, by=by, order=order)
    if as_json:
        display.print_json({"path": str(path), **attrs.asdict(found)})
        return
    out = display.console()
    _print_total(out, found)
    if found.slabs:
        places = [(one.shard, one.generation) for one in found.slabs]
        places += [(one.shard, one.generation) for one in found.unread]
        alone = display.single(shards=len({shard for shard, _ in places}), generations=len({n for _, n in places}))
        _print_slabs(out, found, alone)
        _print_patterns(out, found, alone)
    for slab in found.unread:
        click.echo(slab)


def _print_total(out: Console, found: Explanation) -> None:
    from rich.panel import Panel
    from rich.text import Text

    from topicstore.cli.terminal.display import count_of, fields, milliseconds, size, visible

    in_layouts = sum(slab.seconds for slab in found.slabs)
    took, planning, reading = map(milliseconds, (found.seconds, found.planning_seconds, in_layouts))
    pairs = [
        (
            "messages",
            f"{found.messages:,}, with {size(found.payload_bytes)} of payloads, in {count_of(found.batches, 'batch')}",
        ),
        ("took", f"{took} ms" + (f": {found.rate:,.0f} messages a second" if found.messages else "")),
        ("of that", f"planning {planning} ms, reading {reading} ms; the rest merges, and makes messages"),
        (
            "order",
            "of time, over all streams and shards" if found.order == "time" else "each publisher's, in each topic",
        ),
        ("from", format_time(found.start) if found.start else "the beginning"),
        ("until", "the end" if found.until is None else format_time(found.until)),
    ]
    if found.zones is not None:
        pairs.append(("by", f"timestamps; {found.zones:,} of {found.all_zones:,} zones may hold some of them"))
    title = Text(visible(found.topic_filter))
    out.print(Panel(fields(pairs), title=title, title_align="left", expand=False, border_style="cyan"))


def _print_slabs(out: Console, found: Explanation, alone: set[str]) -> None:
    from topicstore.cli.terminal.display import make_table

    headers = ("shard>", "generation>", "layout", "streams>", "seeks>", "visited>", "skipped>", "messages>", "ms>")
    click.echo()
    out.print(make_table(*headers, title="Read", rows=map(_row, found.slabs), without=alone))
    click.echo(LEGEND)
    for layout, seconds in {slab.layout: slab.epoch_seconds for slab in found.slabs if slab.epoch_seconds}.items():
        click.echo(f"{layout} shows a message once its epoch is over, up to {seconds:,.3g} s after it was stored")


def _row(slab: SlabCost) -> tuple[object, ...]:
    from topicstore.cli.terminal.display import milliseconds

    reads = slab.reads
    streams = f"{slab.matching:,} of {slab.streams:,}"
    place = (slab.shard, slab.generation, slab.layout, streams)
    return (*place, reads.seeks, reads.visited, reads.skipped, reads.rows, milliseconds(slab.seconds))


def _print_patterns(out: Console, found: Explanation, alone: set[str]) -> None:
    """Print what the layouts have learned of the matching topics."""
    from rich.text import Text

    from topicstore.cli.terminal.display import make_table, visible

    rows = []
    for slab in found.slabs:
        more = slab.matching - len(slab.patterns)
        lines = [visible(pattern) for pattern in slab.patterns] + [f"and {more:,} more"] * (more > 0)
        rows.append((slab.shard, slab.generation, Text("\n".join(lines) or "-")))
    headers = ("shard>", "generation>", "topics~")
    click.echo()
    out.print(make_table(*headers, title="Streams that may match", rows=rows, without=alone))
