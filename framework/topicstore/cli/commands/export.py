"""The command ``topicstore export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from topicstore.cli.command import Answer, answers
from topicstore.cli.connecting import opened
from topicstore.cli.terminal.display import count_of, size
from topicstore.cli.terminal.options import PATH
from topicstore.storage.directory.manifest import existing_manifest

if TYPE_CHECKING:
    from topicstore.lifecycle.exporting import ExportReport

__all__ = ["export"]


@click.command()
@answers()
@click.argument("target", type=PATH)
@click.option(
    "--generation",
    "generations",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Only this one; may be repeated.  [default: all that are sealed]",
)
@click.option("--drop", is_flag=True, help="Then remove them from PATH, which reads them from TARGET from then on.")
@click.option("--spark", is_flag=True, help="Let Spark write them, a task for each shard and generation.")
def export(path: Path, target: Path, generations: tuple[int, ...], *, drop: bool, spark: bool) -> Answer:
    """Write sealed generations of PATH to the directory TARGET as partitioned Parquet.

    Spark, DuckDB and others can read TARGET/shard=*/generation=*/*.parquet; `import` restores the rows into a
    database. Every written row is read again and compared. Files that exist already are not written again, so an
    interrupted export continues when it is run again.

    With --drop, the messages are only in TARGET afterwards, and reads of PATH find them there, so keep TARGET. A
    relative TARGET is recorded relative to PATH, so that both can be moved together. Without --drop, PATH is only
    read, even while another program writes it, if the backend supports that. A server that has PATH open
    writes the files itself.
    """
    chosen = list(generations) or None
    report = _through_spark(path, target, chosen) if spark else None
    if drop:
        with opened(path, "r+", auto_compact=False) as db:
            archived = db.archives.archive(target, generations=chosen)
        report = archived if report is None else attrs.evolve(report, seconds=report.seconds + archived.seconds)
    elif report is None:
        with opened(path, "r") as db:
            report = db.archives.export(target, generations=chosen)
    report = attrs.evolve(report, target=str(target))  # the user's path, even if a server or Spark exported
    yield {**attrs.asdict(report), "dropped": drop}
    yield _summary(report)
    if drop and report.generations:
        yield f"{path} reads them from {target} now; nothing of them is left in it"


def _through_spark(path: Path, target: Path, generations: list[int] | None) -> ExportReport:
    from topicstore.spark import session
    from topicstore.spark.tiering import export as export_with

    existing_manifest(path)  # report a missing database before Spark takes seconds to start
    spark = session()
    try:
        return export_with(spark, path, target, generations=generations)
    finally:
        spark.stop()


def _summary(report: ExportReport) -> str:
    if not report.generations:
        return "nothing was to be exported: no generation is sealed (topicstore generations add), or all are exported"
    numbers = ", ".join(map(str, report.generations))
    named = f"generation{'s' if len(report.generations) > 1 else ''} {numbers}"
    if not report.slabs:
        return f"{named}: already in {report.target}"
    written = f"{count_of(report.messages, 'message')}, {size(report.file_bytes)}"
    text = f"{named}: {written} to {report.target}, compared row by row, in {report.seconds:,.1f} s"
    return f"{text}; {count_of(report.slabs_before, 'part')} were there" if report.slabs_before else text
