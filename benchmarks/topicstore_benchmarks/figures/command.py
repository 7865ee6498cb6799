"""``topicstore bench figures``: measures all sections or the named one, and prints tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import click
import msgspec
from rich.console import Console

from topicstore_benchmarks.installed import ENGINE, check_installed
from topicstore_benchmarks.timing import machine, one_core, progress

from . import layouts, limits
from .bounds import measure, section_of
from .figure import Section


@click.group("figures", invoke_without_command=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there.")
@click.option("--markdown", is_flag=True, help="Print the tables as the README has them.")
@click.pass_context
def figures(ctx: click.Context, /, **_shown_by: object) -> Iterable[Section]:
    """Measure topicstore: all sections one after the other, or the named one."""
    check_installed(*ENGINE)
    one_core()
    if ctx.invoked_subcommand is not None:
        return []
    return chain.from_iterable(map(ctx.invoke, figures.commands.values()))


@figures.result_callback()
def _report(sections: Iterable[Section], json_file: Path | None, markdown: bool) -> None:
    """Print each section when it is measured, and write the JSON file at the end."""
    console = Console(width=None if os.isatty(1) else 180)
    click.echo(machine())
    done = []
    for section in sections:
        done.append(section)
        for sheet in section.sheets:
            if markdown:
                click.echo(sheet.markdown())
            else:
                console.print(sheet.table())
    found = [
        {"section": section.name, **attrs.asdict(figure), "held": figure.held}
        for section in done
        for figure in section.figures
    ]
    bound = [figure["held"] for figure in found if figure["held"] is not None]
    click.echo(f"{sum(bound)} of {len(bound)} figures are as they should be")
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "figures": found})))


def _add_trials(name: str, section: ModuleType, summary: str) -> None:
    """Add the command of a section of trials, which skips workloads whose messages are not available."""

    @figures.command(name, help=summary)
    @click.option("--messages", default=1_000_000, show_default=True, type=_LARGE, help="Most of a workload.")
    @click.option("--rounds", default=2, show_default=True, type=click.IntRange(min=1), help="Trials of each.")
    @click.option("--workload", "workloads", multiple=True, type=click.Choice(section.WORKLOADS), help="Only these.")
    def measured(messages: int, rounds: int, workloads: tuple[str, ...]) -> Iterator[Section]:
        for workload in workloads or section.WORKLOADS:
            plan = section.plan(workload, messages, rounds)
            (reason,) = (one.make().why_missing() for one in plan.workloads)
            if reason is None:
                yield section_of(name, measure(plan, progress), section.BOUNDS)
            else:
                progress(f"{name}: {workload} is left out: {reason}")


_LARGE = click.IntRange(min=1_000)
_add_trials("limits", limits, "Measure `block` against the engine's own put and scan.")
_add_trials("layouts", layouts, "Measure every layout against SQLite and the engine, with real and generated messages.")


@figures.command()
@click.option("--sessions", default=500, show_default=True, help="Sessions that follow one topic.")
@click.option("--published", default=20_000, show_default=True, help="Messages published to it.")
@click.option("--backlog", default=1_000_000, show_default=True, help="Messages that one session drains.")
@click.option("--stored", default=100_000, show_default=True, help="Sessions of a database that is opened.")
@click.option("--seconds", default=10.0, show_default=True, help="How long latency is measured.")
@click.option("--clients", default=1_000, show_default=True, type=click.IntRange(min=8), help="Clients of a server.")
@click.option("--rounds", default=5, show_default=True, help="How often a server's figures are measured.")
def sessions(**sizes: Any) -> list[Section]:
    """Measure live subscriptions and durable sessions, and the CPU and memory of a server for them."""
    from .sessions import measure_sessions

    progress("sessions: {sessions} at a time, {stored:,} stored, {clients:,} served".format(**sizes))
    return [measure_sessions(**sizes)]


@figures.command()
@click.option("--share", default=1.0, show_default=True, type=click.FloatRange(min=0.001), help="Of all counts.")
@click.option("--rounds", default=1, show_default=True, help="How often each load is measured.")
def mqtt(share: float, rounds: int) -> list[Section]:
    """Measure `topicstore serve`, and other MQTT servers that are installed, under the same load."""
    from .mqtt import Sizes, measure_mqtt

    full = Sizes()
    counts = {
        name: type(value)(max(20 * (name != "seconds"), value * share)) for name, value in attrs.asdict(full).items()
    }
    return [measure_mqtt(Sizes(**counts), rounds, progress)]


@figures.command()
@click.option("--messages", default=1_000_000, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="How often each is measured.")
def http(messages: int, rounds: int) -> list[Section]:
    """Measure a replay as Arrow over HTTP against one in process."""
    from .http import measure_http

    return [measure_http(messages, rounds, progress)]


@figures.command()
@click.option("--topics", default=100_000, show_default=True, help="Topics of the database.")
@click.option("--sessions", default=10_000, show_default=True, help="Its sessions, of which half are connected.")
@click.option("--rounds", default=5, show_default=True, help="How often stores with and without scrapes are measured.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each of these takes.")
def metrics(topics: int, sessions: int, rounds: int, seconds: float) -> list[Section]:
    """Measure the cost of metrics: of a scrape of `/metrics`, and of scrapes during stores."""
    from .metrics import measure_metrics

    return [measure_metrics(topics, sessions, rounds, seconds, progress)]


@figures.command()
@click.option("--messages", default=1_000_000, show_default=True, type=_LARGE, help="Messages to catch up with.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each rate is measured.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="How often each is measured.")
def cluster(messages: int, seconds: float, rounds: int) -> list[Section]:
    """Measure a database on several sites, with a directory as the log store."""
    from .cluster import measure_cluster

    return [measure_cluster(messages, seconds, rounds, progress)]
