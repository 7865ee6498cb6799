"""``topicstore bench``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from topicstore.cli.terminal.completion import backend_names, layout_names
from topicstore.cli.terminal.exits import DAMAGED, USAGE, Failure

if TYPE_CHECKING:
    from .harness.plan import Run

__all__ = ["bench"]

_DIRECTORY = click.Path(path_type=Path, file_okay=False)
_PARQUET = click.Path(path_type=Path, exists=True, dir_okay=False)

_ENGINE, _SPARK, _REPORT = ("rocksdict",), ("pyspark",), ("altair", "jinja2", "vl_convert")
"""Modules that figures need, a run, and its report."""
_POSITIVE = click.FloatRange(min=0, min_open=True)
_STARTED = time.monotonic()


def _tell(text: str) -> None:
    """Report progress on standard error."""
    click.echo(f"{time.monotonic() - _STARTED:6.0f} s  {text}", err=True)


_ELSEWHERE = {
    "compare": "topicstore_benchmarks.comparing:compare_command",
    "figures": "topicstore_benchmarks.figures.command:main",
}
"""Commands of other modules, each loaded when it is used."""


class _Bench(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands, those of other modules last."""
        return [*self.commands, *_ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; where what it needs is not installed, one that says so, as the list of commands does."""
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, name = _ELSEWHERE[cmd_name].partition(":")
        try:
            _check_installed(_ENGINE if cmd_name == "figures" else ())
            command: click.Command = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as missing:
            return _unusable(cmd_name, _not_installed(str(missing.name)))
        except Failure as reason:
            return _unusable(cmd_name, reason)
        return command


def _not_installed(*modules: str) -> Failure:
    return Failure(f'this needs {", ".join(modules)}: pip install "topicstore[bench]"', USAGE)


def _check_installed(modules: Iterable[str]) -> None:
    """Raise `Failure` if modules are missing, before anything is measured or written."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise _not_installed(*missing)


def _unusable(name: str, reason: Failure) -> click.Command:
    def fail(**_: object) -> None:
        raise reason

    anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(name, callback=fail, help=reason.message, context_settings=anything)


@click.group(cls=_Bench)
def bench() -> None:
    """Measure topicstore beside what else keeps messages."""


@bench.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--quick", is_flag=True, help="A small matrix. What doesn't fit into five minutes is left out.")
@click.option("--workload", "workloads", multiple=True, metavar="NAME|FILE.toml", help="Only these.  [default: all]")
@click.option("--data", type=_PARQUET, help="Your own messages, in order of time, as a workload.")
@click.option("--wildcard", help="With --data: a filter to ask for.  [default: one that about half match]")
@click.option("--device", "devices", multiple=True, metavar="FILTER", help="With --data: filters of single devices.")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    shell_complete=backend_names,
    help="Of topicstore, only on these.",
)
@click.option(
    "--layout", "layouts", multiple=True, metavar="NAME", shell_complete=layout_names, help="Of topicstore, only these."
)
@click.option("--contender", "contenders", multiple=True, metavar="NAME", help="Only these, by their names.")
@click.option("--peers/--no-peers", default=True, help="Whether to measure other stores.  [default: yes]")
@click.option("--limits/--no-limits", default=True, help="Whether to measure bare engines and files.  [default: yes]")
@click.option("--durability", "durabilities", multiple=True, type=click.Choice(["commit", "sync"]))
@click.option("--messages", type=click.IntRange(min=1_000), help="Most messages of a workload.  [default: 300000]")
@click.option("--repetitions", type=click.IntRange(min=1), help="How often each trial is measured.  [default: 3]")
@click.option("--batch", type=click.IntRange(min=1), help="Messages of a batch that is stored.  [default: 1000]")
@click.option("--repeat", type=click.IntRange(min=1), help="Most runs of each replay within a worker.  [default: 5]")
@click.option("--mixed-seconds", type=_POSITIVE, help="How long to read and write at the same time.  [default: 10]")
@click.option(
    "--mixed-rate", type=_POSITIVE, help="Batches of 100 messages that are stored a second then.  [default: 100]"
)
@click.option("--phase-timeout", type=_POSITIVE, help="Seconds that a phase may take.  [default: 900]")
@click.option(
    "--budget",
    type=_POSITIVE,
    help="Seconds for all of it; what doesn't fit is left out.  [default: no limit]",
)
@click.option("--cache", type=_DIRECTORY, help="Where the messages of workloads are kept.  [default: in DIRECTORY]")
@click.option("--spark-master", metavar="URL", help="A cluster; all its machines must see DIRECTORY.")
@click.option("--report/--no-report", default=True, help="Whether to write the report at the end.  [default: yes]")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    directory: Path,
    *,
    cache: Path | None,
    spark_master: str | None,
    report: bool,
    **asked: Any,
) -> None:
    """Measure into DIRECTORY, or continue the run that it holds.

    Without options, it continues the run in DIRECTORY. The exit code is 1 if anything failed, such as a replay
    that returned other messages than were stored.
    """
    _check_installed((*_SPARK, *(_REPORT if report else ())))
    from .harness.choosing import RunOptions, new_run
    from .harness.drive import begin, drive

    directory = directory.absolute()
    found = _there(ctx, directory) or begin(directory, new_run(directory.name, _command(), RunOptions(**asked)))
    for name, reason in {**found.skipped_workloads, **found.skipped_contenders}.items():
        _tell(f"{name} is left out: {reason}")
    results = drive(directory, found, cache or directory / "workloads", spark_master, _tell)
    failed = _tell_failures(results)
    if report:
        _report(directory)
    if failed:
        ctx.exit(DAMAGED)


def _tell_failures(results: Path) -> bool:
    """Report what failed in any trial of a run, wrong replays last; return whether anything did."""
    import pyarrow.parquet as pq

    from .harness.trial import WRONG

    failed = pq.read_table(results, filters=[("status", "=", "failed")]).to_pylist()
    for row in failed:
        click.echo(f"failed: {row['trial']}, {row['contender']}, {row['phase']}: {row['reason']}", err=True)
    if any(row["reason"].startswith(WRONG) for row in failed):
        click.echo("WRONG: a replay gave other messages than were stored; its time doesn't count", err=True)
    return bool(failed)


def _there(ctx: click.Context, directory: Path) -> Run | None:
    """Return the run in a directory, if no option says what to measure."""
    from .harness.plan import Run

    source = click.core.ParameterSource.DEFAULT
    elsewhere = ("directory", "cache", "spark_master", "report")
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
    _check_installed(_REPORT)
    from .harness.plan import Run

    if Run.load(directory) is None:
        raise click.UsageError(f"there is no run in {directory}")
    _report(directory)


@bench.command()
def workloads() -> None:
    """List the built-in workloads, and the kinds that a TOML file may name."""
    from topicstore.cli.terminal.display import console, make_table
    from topicstore.plugins import registry

    from .workloads.definition import built_in, read

    found = [(name, read(name).make()) for name in built_in()]
    rows = [(name, one.options.kind, one.options.messages, one.why_missing(), one.summary) for name, one in found]
    out = console()
    out.print(make_table("workload", "kind", "messages>", "why absent~", "summary~", rows=rows))
    out.print()
    kinds = [(spec.name, spec.summary) for spec in registry().workloads().values()]
    out.print(make_table("kind", "summary~", rows=kinds))


@bench.command()
def contenders() -> None:
    """List the contenders, with the reason if one can't take part here."""
    from topicstore.cli.terminal.display import console, make_table

    from .contenders.catalogue import catalogue

    rows = [(spec.name, spec.kind, spec.why_missing() or "ready") for spec in catalogue().values()]
    console().print(make_table("contender", "kind", "state~", rows=rows))


def _command() -> list[str]:
    """Return the command line's arguments from ``run`` on."""
    return sys.argv[sys.argv.index("run") :] if "run" in sys.argv else []
