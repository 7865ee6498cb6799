"""``topicstore compact``."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

import topicstore

from .options import PATH, json_option

__all__ = ["compact"]


@click.command()
@click.argument("path", type=PATH)
@json_option
def compact(path: Path, *, as_json: bool) -> None:
    """Bring the messages in PATH into the form that is read fastest, and give back what that frees on disk.

    Layouts that merge (block) rewrite what they hold; the others have nothing to rewrite. Every step is
    atomic: if it is interrupted, nothing is lost, and running it again does the rest.
    """
    from .display import print_json, size

    with topicstore.open_existing(path, auto_compact=False) as db:
        report = db.compact()
    if as_json:
        print_json({"path": str(path), **attrs.asdict(report)})
        return
    done = f"{report.messages:,} messages rewritten" if report.messages else "nothing was left to merge"
    click.echo(
        f"{done} in {report.seconds:,.2f} s; "
        f"values {size(report.live_bytes_before)} before, {size(report.live_bytes_after)} after; "
        f"on disk {size(report.disk_bytes_before)} before, {size(report.disk_bytes_after)} after"
    )
