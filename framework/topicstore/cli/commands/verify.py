"""The command ``topicstore verify``."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

import topicstore
from topicstore.cli.connecting import opened
from topicstore.cli.terminal.display import bar, count_of, print_json, visible
from topicstore.cli.terminal.exits import DAMAGED
from topicstore.cli.terminal.options import PATH, json_option
from topicstore.contract.layout import Damage
from topicstore.storage.opening import RECOVERIES, Recovery
from topicstore.storage.reports import VerifyReport

__all__ = ["verify"]


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--recovery",
    type=click.Choice(RECOVERIES),
    default="strict",
    help="If it can't be opened because writes are missing or damaged: go on with what was there before the first of "
    "them, or with the messages behind it too that can be read. What that leaves out is gone for good; copy the "
    "directory before.",
)
@json_option
@click.pass_context
def verify(ctx: click.Context, path: Path, recovery: Recovery, *, as_json: bool) -> None:
    """Read everything in PATH and check it; exit with 1 and list every damaged place if there are any."""
    try:
        with (
            opened(path, "r" if recovery == "strict" else "r+", recovery=recovery, auto_compact=False) as db,
            bar("verifying") as update,
        ):
            total = db.info().messages
            report = db.verify(lambda messages: update(messages, total, messages))
    except topicstore.CorruptionError as bad:  # the damage prevents even opening the database
        report = VerifyReport(messages=0, damages=[Damage(place=bad.place or str(path), reason=bad.reason)])
    if as_json:
        places = [attrs.asdict(damage) for damage in report.damages]
        print_json({"path": str(path), "ok": report.ok, "messages": report.messages, "damages": places})
    else:
        for damage in report.damages:
            click.echo(visible(f"{damage.place}: {damage.reason}"))
        verdict = "nothing is damaged" if report.ok else f"damaged places: {len(report.damages):,}"
        click.echo(f"{count_of(report.messages, 'message')} {'is' if report.messages == 1 else 'are'} whole; {verdict}")
    if not report.ok:
        ctx.exit(DAMAGED)
