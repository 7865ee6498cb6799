"""The command ``topicstore compact``."""

from __future__ import annotations

import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import AnyDatabase
from topicstore.cli.terminal.display import count_of, size

__all__ = ["compact"]


@click.command()
@answers("r+", auto_compact=False)
def compact(db: AnyDatabase) -> Answer:
    """Merge the messages in PATH: they take fewer bytes on disk, and narrow filters read a small part of them.

    Replays of all messages, and of the last minutes, become slower. Layouts that merge (block) rewrite their
    messages; others keep messages as they were stored. Every step is atomic: if the command is interrupted,
    nothing is lost, and running it again does the rest.
    """
    report = db.compact()
    yield report
    done = f"{count_of(report.messages, 'message')} rewritten" if report.messages else "nothing was left to merge"
    done = f"{done} in {report.seconds:,.2f} s"
    if report.never_merging and not report.messages:
        several, one = ("s", "") if len(report.never_merging) > 1 else ("", "s")
        done = f"layout{several} {', '.join(report.never_merging)} keep{one} messages as stored"
    yield (
        f"{done}; values {size(report.live_bytes_before)} before, {size(report.live_bytes_after)} after; "
        f"on disk {size(report.disk_bytes_before)} before, {size(report.disk_bytes_after)} after"
    )
