"""``topicstore bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from topicstore.cli.terminal.exits import DAMAGED, Failure
from topicstore.cli.terminal.options import json_option

from .commits.command import compare_commits_command
from .comparing import compare_command
from .figures.command import figures
from .installed import REPORT, SPARK, check_installed
from .timing import progress

if TYPE_CHECKING:
    from .harness.plan import Run

__all__ = ["bench"]

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_PARQUET = click.Path(path_type=Path, exists=True, dir_okay=False)


def _named(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return pairs of a name and a value. A name may be in several of them."""
    pairs = [text.partition("=") for text in given]
    for text, (name, equals, value) in zip(given, pairs, strict=True):
        if not (name and equals and value):
            raise click.BadParameter(f"{text!r} is not {param.make_metavar(ctx)}", ctx, param)
    return [(name, value) for name, _, value in pairs]


def _contender_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    from .contenders.catalogue import catalogue

    return [name for name in catalogue() if name.startswith(incomplete)]


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order in which they were added."""
        return list(self.commands)


@click.group(cls=_InOrder)
def bench() -> None:
    """Measure topicstore and other stores of messages."""


@bench.command()
@click.argument("directory", type=_DIRECTORY)
@click.option(
    "--preset",
    type=click.Choice(["quick", "full"]),
    default="full",
    help="quick: a small matrix; what doesn't fit into five minutes is left out.  [default: full]",
)
@click.option("--workload", "workloads", multiple=True, metavar="NAME|FILE.toml", help="Only these.  [default: all]")
@click.option("--data", type=_PARQUET, help="Your own messages, in order of time, as a workload.")
@click.option(
    "--request",
    "requests",
    multiple=True,
    metavar="NAME=FILTER",
    callback=_named,
    help="With --data: what to replay. 'wildcard' and 'one device' replace those that are chosen by default.",
)
@click.option(
    "--contender",
    "contenders",
    multiple=True,
    metavar="GLOB",
    shell_complete=_contender_names,
    help="Only those with such names: rocksdb-*, 'raw *', sqlite.  [default: all]",
)
@click.option("--durability", "durabilities", multiple=True, type=click.Choice(["commit", "sync"]))
@click.option("--messages", type=click.IntRange(min=1_000), help="Most messages of a workload.  [default: 300000]")
@click.option("--repetitions", type=click.IntRange(min=1), help="How often each trial is measured.  [default: 3]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_named,
    help="How to measure: batch=1000, repeat=5, patience=2 (s), mixed_seconds=10 (0: not), mixed_rate=100 (batches/s), "
    "phase_timeout=900 (s), budget=3600 (s for all).",
)
@click.option("--spark-master", metavar="URL", help="A cluster; all its machines must see DIRECTORY.")
@click.pass_context
def run(ctx: click.Context, /, directory: Path, *, spark_master: str | None, **asked: Any) -> None:
    """Measure into DIRECTORY, or continue the run that it holds.

    Without options, it continues the run in DIRECTORY. The exit code is 1 if anything failed, such as a replay
    that returned other messages than were stored.
    """
    check_installed(*SPARK, *REPORT)
    from .harness.choosing import RunOptions, new_run
    from .harness.drive import begin, drive

    directory = directory.absolute()
    found = _there(ctx, directory) or begin(directory, new_run(directory.name, _command(), RunOptions(**asked)))
    for name, reason in {**found.skipped_workloads, **found.skipped_contenders}.items():
        progress(f"{name} is left out: {reason}")
    failed = _report_failures(drive(directory, found, spark_master, progress))
    _report(directory)
    if failed:
        ctx.exit(DAMAGED)


def _report_failures(results: Path) -> bool:
    """Report the failures of all trials of a run, wrong replays last; return whether anything did."""
    import pyarrow.parquet as pq

    from .harness.trial import WRONG

    failed = pq.read_table(results, filters=[("status", "=", "failed")]).to_pylist()
    for row in failed:
        click.echo(f"failed: {row['trial']}, {row['contender']}, {row['phase']}: {row['reason']}", err=True)
    if any(row["reason"].startswith(WRONG) for row in failed):
        click.echo("WRONG: a replay gave other messages than were stored; its time doesn't count", err=True)
    return bool(failed)


def _there(ctx: click.Context, directory: Path) -> Run | None:
    """Return the run in a directory, if no option chooses measurements."""
    from .harness.plan import Run

    source = click.core.ParameterSource.DEFAULT
    elsewhere = ("directory", "spark_master")
    given = [name for name in ctx.params if name not in elsewhere and ctx.get_parameter_source(name) != source]
    return None if given else Run.load(directory)


def _report(directory: Path) -> None:
    """Write the report, and print its path."""
    from .report.page import write_report

    try:
        path = write_report(directory)
    except (FileNotFoundError, ValueError) as nothing:
        raise Failure(f"{directory} holds no measured value to report on", DAMAGED) from nothing
    click.echo(path)


@bench.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
def report(directory: Path) -> None:
    """Write the report of the run in DIRECTORY again, from the trials measured so far."""
    check_installed(*REPORT)
    from .harness.plan import Run

    if Run.load(directory) is None:
        raise click.UsageError(f"there is no run in {directory}")
    _report(directory)


@bench.command("list")
@json_option
def list_(*, as_json: bool) -> None:
    """List contenders, built-in workloads, and the kinds of workloads that a TOML file may name."""
    from topicstore.cli.terminal.display import console, make_table, print_json
    from topicstore.plugins import registry

    from .contenders.catalogue import catalogue
    from .workloads.definition import built_in, read

    rows = [(spec.name, spec.kind, spec.why_missing()) for spec in catalogue().values()]
    found = [(name, read(name).make()) for name in built_in()]
    about = [(name, one.options.kind, one.options.messages, one.why_missing(), one.summary) for name, one in found]
    kinds = [(spec.name, spec.summary) for spec in registry().workloads().values()]
    if as_json:
        columns = ("name", "kind", "messages", "why_missing", "summary")
        print_json(
            {
                "contenders": [dict(zip(("name", "kind", "why_missing"), row, strict=True)) for row in rows],
                "workloads": [dict(zip(columns, row, strict=True)) for row in about],
                "kinds": [dict(zip(("name", "summary"), row, strict=True)) for row in kinds],
            }
        )
        return
    out = console()
    ready = [(name, kind, why or "ready") for name, kind, why in rows]
    out.print(make_table("contender", "kind", "state~", rows=ready))
    out.print()
    out.print(make_table("workload", "kind", "messages>", "why absent~", "summary~", rows=about))
    out.print()
    out.print(make_table("kind", "summary~", rows=kinds))


bench.add_command(compare_command)
bench.add_command(compare_commits_command)
bench.add_command(figures)


def _command() -> list[str]:
    """Return the command line's arguments from ``run`` on."""
    return sys.argv[sys.argv.index("run") :] if "run" in sys.argv else []
