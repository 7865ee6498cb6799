"""``topicstore streams``, ``info`` and ``verify``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click
import msgspec

import topicstore
from topicstore.layout import Damage, ReadCounters
from topicstore.manifest import Manifest
from topicstore.positions import time_of
from topicstore.reports import DatabaseInfo, VerifyReport

from .exits import DAMAGED
from .generations import options_text
from .options import PATH, json_option
from .times import TIME, TIME_HELP, format_time

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["info", "streams", "verify"]


@click.command()
@click.argument("path", type=PATH)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@click.option("--start", type=TIME, default=0, metavar="TIME", help=f"Leave out what ended before: {TIME_HELP}.")
@json_option
def streams(path: Path, topic_filter: str, *, start: int, as_json: bool) -> None:
    """List the streams in PATH that may hold messages whose topics match FILTER (default: #)."""
    from . import display

    with topicstore.open_existing(path, auto_compact=False) as db:
        found = db.streams(topic_filter, start)
    if as_json:
        display.print_json({"path": str(path), "filter": topic_filter, "streams": found})
        return
    rows = [(s.pattern, s.shard, s.generation, s.number, "sealed" if s.sealed else "current") for s in found]
    display.console().print(display.make_table("topics", "shard>", "generation>", "stream>", "state", rows=rows))
    click.echo(f"{len(found):,} stream{'s' * (len(found) != 1)}")


@click.command()
@click.argument("path", type=PATH)
@json_option
def info(path: Path, *, as_json: bool) -> None:
    """Show what PATH is and holds: sizes, generations, shards."""
    from . import display

    with topicstore.open_existing(path, auto_compact=False) as db:
        found, manifest = db.info(), db.manifest
    if as_json:
        display.print_json({**msgspec.to_builtins(found), "created_with": attrs.asdict(manifest)})
        return
    out = display.console()
    _print_database(out, found, manifest)
    _print_generations(out, found)
    _print_shards(out, found)
    _print_reads(out, found)
    for shard in found.shards:
        if shard.ahead:
            out.print(
                f"shard {shard.number}: its last position lies {shard.ahead / 1e6:,.1f} s in the future; "
                "until then, messages get positions right behind it",
                style="yellow",
            )
        if shard.failure is not None:
            out.print(f"shard {shard.number} takes no writes: {shard.failure}", style="red", markup=False)


def _print_database(out: Console, found: DatabaseInfo, manifest: Manifest) -> None:
    from rich.panel import Panel

    from .display import fields, size, visible

    each = f"  ({found.disk_bytes / found.messages:,.1f} a message)" if found.messages else ""
    pairs = [
        ("messages", found.messages),
        ("streams", found.streams),
        ("on disk", size(found.disk_bytes) + each),
        ("values", f"{size(found.live_bytes)}, as written by the layouts"),
        ("backend", found.backend),
        ("layout", f"{found.layout}, of the current generation"),
        ("shards", len(found.shards)),
        ("durability", found.durability),
        ("timestamps", f"{found.timestamps}{', late: ' + manifest.late if found.timestamps == 'message' else ''}"),
        ("plugins", ", ".join(found.plugins) or "none"),
        ("created", f"{manifest.created} by {manifest.created_by}"),
        ("id", found.id),
    ]
    out.print(Panel(fields(pairs), title=visible(found.path), title_align="left", expand=False, border_style="cyan"))


def _print_generations(out: Console, found: DatabaseInfo) -> None:
    from .display import make_table, size

    rows = [
        (
            generation.number,
            generation.layout,
            options_text(generation.options),
            format_time(generation.created)[:19] + "Z",
            "current" if generation.sealed is None else format_time(generation.sealed)[:19] + "Z",
            generation.messages,
            size(generation.live_bytes),
        )
        for generation in found.generations
    ]
    headers = ("generation>", "layout", "options", "created", "sealed", "messages>", "values>")
    out.print(make_table(*headers, title="Generations", rows=rows))


def _print_shards(out: Console, found: DatabaseInfo) -> None:
    from .display import make_table, size

    rows = [
        (
            shard.number,
            format_time(time_of(shard.watermark)) if shard.watermark else None,
            shard.lifted,
            size(shard.disk_bytes),
            size(shard.memory_bytes),
            _details(shard.engine),
        )
        for shard in found.shards
    ]
    headers = ("shard>", "readable up to", "lifted>", "disk>", "memory>", "engine")
    out.print(make_table(*headers, title="Shards", rows=rows))


def _print_reads(out: Console, found: DatabaseInfo) -> None:
    """Show what the layouts say, and what was counted since this opening."""
    from .display import make_table

    rows = [
        (shard.number, number, slab.streams, _details(slab.details) or "-", *attrs.astuple(shard.reads[number]))
        for shard in found.shards
        for number, slab in shard.slabs.items()
    ]
    counted = (f"{field.name}>" for field in attrs.fields(ReadCounters))
    headers = ("shard>", "generation>", "streams>", "layout", *counted)
    out.print(make_table(*headers, title="Slabs; reads are counted from the opening on", rows=rows))
    total = attrs.asdict(found.total)
    if any(total.values()):
        out.print(f"since it was opened: {_details(total)}", markup=False)


def _details(named: Mapping[str, str | int]) -> str:
    return ", ".join(f"{name} {n:,}" if isinstance(n, (int, float)) else f"{name} {n}" for name, n in named.items())


@click.command()
@click.argument("path", type=PATH)
@json_option
@click.pass_context
def verify(ctx: click.Context, path: Path, *, as_json: bool) -> None:
    """Read everything in PATH and check it; exit with 1 and list every damaged place if there are any."""
    from . import display

    try:
        with topicstore.open_existing(path, auto_compact=False) as db, display.bar("verifying") as bar:
            total = db.info().messages
            report = db.verify(lambda messages: bar.update(messages, total, messages))
    except topicstore.CorruptionError as bad:  # so damaged that it can't even be opened
        report = VerifyReport(messages=0, damages=[Damage(place=bad.place or str(path), reason=bad.reason)])
    if as_json:
        places = [attrs.asdict(damage) for damage in report.damages]
        display.print_json({"path": str(path), "ok": report.ok, "messages": report.messages, "damages": places})
    else:
        for damage in report.damages:
            click.echo(display.visible(f"{damage.place}: {damage.reason}"))
        verdict = "nothing is damaged" if report.ok else f"damaged places: {len(report.damages):,}"
        click.echo(f"{report.messages:,} messages are whole; {verdict}")
    if not report.ok:
        ctx.exit(DAMAGED)
