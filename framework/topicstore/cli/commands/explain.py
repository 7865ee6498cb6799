"""The command ``topicstore explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.completion import topics
from topicstore.cli.terminal.display import count_of, lines, make_table, milliseconds, panel, single, size
from topicstore.cli.terminal.options import replay_options
from topicstore.contract.times import format_time
from topicstore.storage.reading.explain import LEGEND, Explanation

if TYPE_CHECKING:
    from rich.panel import Panel

__all__ = ["explain"]


@click.command()
@answers("r")
@click.argument("topic_filter", metavar="FILTER", shell_complete=topics)
@replay_options(
    ["time", "any"],
    "Merge everything by position, as `replay` does, or keep just each publisher's order in each topic.",
)
def explain(db: AnyDatabase, **asked: Any) -> Answer:
    """Replay FILTER from PATH, and print the cost of finding the messages instead of the messages.

    For each generation of each shard, the command prints the number of streams that may hold such messages; the
    seeks (scans begun); the blocks or keys, depending on the layout, that were visited (decoded) and skipped; the
    messages found; and the time, with cold caches of the layouts. --json also has the passes in which streams
    were read, and the batches fetched.
    """
    found = db.explain(**asked)
    yield found
    yield _summary(found)
    if found.slabs:
        yield from _slabs(found)
    yield from map(str, found.unread)


def _summary(found: Explanation) -> Panel:
    in_layouts = sum(slab.seconds for slab in found.slabs)
    took, planning, reading = map(milliseconds, (found.seconds, found.planning_seconds, in_layouts))
    held = f"{found.messages:,}, with {size(found.payload_bytes)} of payloads"
    pairs = [
        ("messages", f"{held}, in {count_of(found.batches, 'batch')}"),
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
    return panel(found.topic_filter, pairs)


def _slabs(found: Explanation) -> Answer:
    """Yield the table of reads in each slab, and the table of streams that may match."""
    places = [(one.shard, one.generation) for one in found.slabs]
    places += [(one.shard, one.generation) for one in found.unread]
    shards, generations = map(len, map(set, zip(*places, strict=True)))
    alone = single(shards=shards, generations=generations)
    read, learned = [], []
    for slab in found.slabs:
        reads, more = slab.reads, slab.matching - len(slab.patterns)
        place, streams = (slab.shard, slab.generation), f"{slab.matching:,} of {slab.streams:,}"
        counts = (reads.seeks, reads.visited, reads.skipped, reads.rows)
        read.append((*place, slab.layout, streams, *counts, milliseconds(slab.seconds)))
        learned.append((*place, lines([*slab.patterns, *[f"and {more:,} more"] * (more > 0)])))
    headers = ("shard>", "generation>", "layout", "streams>", "seeks>", "visited>", "skipped>", "messages>", "ms>")
    yield ""
    yield make_table(*headers, title="Read", rows=read, without=alone)
    yield LEGEND
    for layout, seconds in {slab.layout: slab.epoch_seconds for slab in found.slabs if slab.epoch_seconds}.items():
        yield f"{layout} shows a message once its epoch is over, up to {seconds:,.3g} s after it was stored"
    yield ""
    title = "Streams that may match"
    yield make_table("shard>", "generation>", "topics~", title=title, rows=learned, without=alone)
