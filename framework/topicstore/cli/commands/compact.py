"""The command ``topicstore compact``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from topicstore.cli.connecting import opened
from topicstore.cli.terminal.options import PATH, json_option

__all__ = ["compact"]


@click.command()
@click.argument("path", type=PATH)
@json_option
def compact(path: Path, *, as_json: bool) -> None:
    """Merge the messages in PATH: they take fewer bytes on disk, and narrow filters read a small part of them.

    Replays of everything, and of the last minutes, are slower afterwards than before. Layouts that merge (block)
    rewrite what they hold; the others keep messages as they were stored. Every
    step is atomic: if it is interrupted, nothing is lost, and running it again does the rest.
    """
    from topicstore.cli.terminal.display import count_of, print_json, size

    with opened(path, "r+", auto_compact=False) as db:
        report = db.compact()
    if as_json:
        print_json({"path": str(path), **attrs.asdict(report)})
        return
    kept = "" if report.messages else _kept(report.never_merging)
    done = f"{count_of(report.messages, 'message')} rewritten" if report.messages else "nothing was left to merge"
    click.echo(
        f"{kept or f'{done} in {report.seconds:,.2f} s'}; "
        f"values {size(report.live_bytes_before)} before, {size(report.live_bytes_after)} after; "
        f"on disk {size(report.disk_bytes_before)} before, {size(report.disk_bytes_after)} after"
    )


def _kept(names: Sequence[str]) -> str:
    """Return a sentence on the layouts in use if none of them ever merges, otherwise an empty text."""
    if not names:
        return ""
    return f"layout{'s' * (len(names) > 1)} {', '.join(names)} keep{'s' * (len(names) == 1)} messages as stored"
