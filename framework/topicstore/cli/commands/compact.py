"""``topicstore compact``."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

import topicstore
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.contract.layout import Slab
from topicstore.shard.damaged_slab import DamagedSlab

__all__ = ["compact"]


@click.command()
@click.argument("path", type=PATH)
@json_option
def compact(path: Path, *, as_json: bool) -> None:
    """Bring the messages in PATH into the form that is read fastest, and give back what that frees on disk.

    Layouts that merge (block) rewrite what they hold; the others keep messages as they were stored. Every
    step is atomic: if it is interrupted, nothing is lost, and running it again does the rest.
    """
    from topicstore.cli.terminal.display import count_of, print_json, size

    with topicstore.open_existing(path, auto_compact=False) as db:
        report = db.compact()
        kept = "" if report.messages else _kept(db)
    if as_json:
        print_json({"path": str(path), **attrs.asdict(report)})
        return
    done = f"{count_of(report.messages, 'message')} rewritten" if report.messages else "nothing was left to merge"
    click.echo(
        f"{kept or f'{done} in {report.seconds:,.2f} s'}; "
        f"values {size(report.live_bytes_before)} before, {size(report.live_bytes_after)} after; "
        f"on disk {size(report.disk_bytes_before)} before, {size(report.disk_bytes_after)} after"
    )


def _kept(db: topicstore.Database) -> str:
    """Return a sentence on the layouts in use if none of them ever merges, else nothing."""
    slabs = [(record.layout, slab) for shard in db.storage.shards for record, slab in shard.slabs()]
    if any(type(slab).compact is not Slab.compact or isinstance(slab, DamagedSlab) for _, slab in slabs):
        return ""
    names = sorted({layout for layout, _ in slabs})
    return f"layout{'s' * (len(names) > 1)} {', '.join(names)} keep{'s' * (len(names) == 1)} messages as stored"
