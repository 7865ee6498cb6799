"""The command ``topicstore info``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import lines, make_table, panel, single, size, visible
from topicstore.contract.positions import span_text, time_of
from topicstore.contract.times import format_time
from topicstore.database import DatabaseInfo
from topicstore.storage.directory.manifest import Manifest

from .generations import generations_table, missing_lines

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

__all__ = ["info"]


@click.command()
@answers("r")
def info(db: AnyDatabase) -> Answer:
    """Show a summary of PATH: sizes, generations, shards.

    \b
    streams         sequences of messages that can be read separately
                    (see: topicstore streams)
    written         bytes that the layouts wrote, which the engine may compress
    kept            which messages are stored, and how long they stay
    readable up to  time of the last position that readers see
    lifted          late messages, stored after the last message of their
                    shard (--late lift); shown only if there are any
    """  # noqa: D301 - click wants the character
    found, manifest, archived = db.info(), db.manifest, {one.generation: one.path for one in db.archives}
    yield {**attrs.asdict(found), "created_with": attrs.asdict(manifest)}
    alone = single(shards=len(found.shards), generations=len(found.generations))
    yield _summary(found, manifest)
    yield ""
    yield generations_table(found.generations, title="Generations", archived=archived)
    yield ""
    yield _shards(found, alone)
    yield ""
    yield _slabs(found, alone)
    for shard in found.shards:
        if shard.ahead:
            yield click.style(
                f"shard {shard.number}: its last position lies {span_text(shard.ahead)} in the future; "
                "until then, messages get positions right behind it",
                fg="yellow",
            )
        if shard.failure is not None:
            yield click.style(f"shard {shard.number} takes no writes: {visible(shard.failure)}", fg="red")
    yield from missing_lines(found.missing)


def _summary(found: DatabaseInfo, manifest: Manifest) -> Panel:
    each = f"  ({found.disk_bytes / found.messages:,.1f} bytes a message)" if found.messages else ""
    pairs = [
        ("messages", found.messages),
        ("streams", found.streams),
        ("on disk", size(found.disk_bytes) + each),
        ("written", f"{size(found.live_bytes)}, before the engine compresses it"),
        ("backend", found.backend),
        ("layout", f"{found.layout}, of the current generation"),
        ("shards", manifest.shards),
        ("durability", found.durability),
        ("timestamps", f"{found.timestamps}{', late: ' + manifest.late if found.timestamps == 'message' else ''}"),
        *zip(("kept", "", ""), found.kept, strict=False),
        ("plugins", ", ".join(found.plugins) or "none"),
        ("created", f"{manifest.created} by {manifest.created_by}"),
        ("id", found.id),
    ]
    return panel(found.path, pairs)


def _shards(found: DatabaseInfo, alone: set[str]) -> Table:
    rows = [
        (
            shard.number,
            f"{format_time(time_of(shard.watermark))[:19]}Z" if shard.watermark else None,
            shard.lifted,
            size(shard.disk_bytes),
            size(shard.memory_bytes),
            _details(shard.engine),
        )
        for shard in found.shards
    ]
    headers = ("shard>", "readable up to", "lifted>", "disk>", "memory>", "engine~")
    without = alone | ({"lifted>"} if not any(shard.lifted for shard in found.shards) else set())
    return make_table(*headers, title="Shards", rows=rows, without=without)


def _slabs(found: DatabaseInfo, alone: set[str]) -> Table:
    """Return the table of the layouts' reports by slab, without read counters: the database was just opened."""
    rows = [
        (shard.number, number, slab.streams, _details(slab.details))
        for shard in found.shards
        for number, slab in shard.slabs.items()
    ]
    headers = ("shard>", "generation>", "streams>", "of the layout~")
    return make_table(*headers, title="Layout", rows=rows, without=alone)


def _details(named: Mapping[str, str | int]) -> Text:
    """Return a cell with a name and its value on each line."""
    return lines(f"{name} {n:,}" if isinstance(n, (int, float)) else f"{name} {n}" for name, n in named.items())
