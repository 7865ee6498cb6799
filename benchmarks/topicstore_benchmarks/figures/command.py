"""``python -m topicstore_benchmarks``: all sections, or the one that is named, as tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import attrs
import click
import msgspec
from rich.console import Console

from topicstore_benchmarks.harness.plan import Plan
from topicstore_benchmarks.harness.serial import measure
from topicstore_benchmarks.timing import machine, one_core, progress

from . import layouts as layouts_plan
from . import limits as limits_plan
from .bounds import Bound, section_of
from .figure import Section


@click.group(invoke_without_command=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures there.")
@click.option("--markdown", is_flag=True, help="Print the tables as the README has them.")
@click.pass_context
def main(ctx: click.Context, /, **_shown_by: object) -> Iterable[Section]:
    """Measure topicstore: all sections one after the other, or the named one."""
    one_core()
    if ctx.invoked_subcommand is not None:
        return []
    return chain.from_iterable(map(ctx.invoke, main.commands.values()))


@main.result_callback()
def _report(sections: Iterable[Section], json_file: Path | None, markdown: bool) -> None:
    """Show each section when it is done."""
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
    bound = [figure.held for section in done for figure in section.figures if figure.held is not None]
    click.echo(f"{sum(bound)} of {len(bound)} figures are as they should be")
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(_document(done))))


def _document(sections: list[Section]) -> dict[str, object]:
    figures = [
        {"section": section.name, **attrs.asdict(figure), "held": figure.held}
        for section in sections
        for figure in section.figures
    ]
    return {"machine": machine(), "figures": figures}


def _measured(
    name: str, plan: Callable[[str, int, int], Plan], bounds: Sequence[Bound], workloads: Sequence[str], *counts: int
) -> Iterator[Section]:
    """Measure the trials of each workload whose messages are here."""
    for workload in workloads:
        planned = plan(workload, *counts)
        (reason,) = (one.definition.make().why_missing() for one in planned.workloads)
        if reason is None:
            yield section_of(name, measure(planned, progress), bounds)
        else:
            progress(f"{name}: {workload} is left out: {reason}")


_messages = click.option(
    "--messages", default=1_000_000, show_default=True, type=click.IntRange(min=1_000), help="Most of a workload."
)
_rounds = click.option("--rounds", default=2, show_default=True, type=click.IntRange(min=1), help="Trials of each.")


@main.command()
@_messages
@_rounds
@click.option("--workload", "workloads", multiple=True, type=click.Choice(limits_plan.WORKLOADS), help="Only these.")
def limits(messages: int, rounds: int, workloads: tuple[str, ...]) -> Iterator[Section]:
    """Measure `block` against the engine's own put and scan."""
    chosen = workloads or limits_plan.WORKLOADS
    return _measured("limits", limits_plan.plan, limits_plan.BOUNDS, chosen, messages, rounds)


@main.command()
@_messages
@_rounds
@click.option("--workload", "workloads", multiple=True, type=click.Choice(layouts_plan.WORKLOADS), help="Only these.")
def layouts(messages: int, rounds: int, workloads: tuple[str, ...]) -> Iterator[Section]:
    """Measure every layout against SQLite and the engine, with real and generated messages."""
    chosen = workloads or layouts_plan.WORKLOADS
    return _measured("layouts", layouts_plan.plan, layouts_plan.BOUNDS, chosen, messages, rounds)


@main.command()
@click.option("--sessions", default=500, show_default=True, help="Sessions that follow one topic.")
@click.option("--published", default=20_000, show_default=True, help="Messages published to it.")
@click.option("--backlog", default=1_000_000, show_default=True, help="Messages that one session drains.")
@click.option("--stored", default=100_000, show_default=True, help="Sessions of a database that is opened.")
@click.option("--seconds", default=10.0, show_default=True, help="How long latency is measured.")
@click.option("--clients", default=1_000, show_default=True, type=click.IntRange(min=8), help="Clients of a server.")
@click.option("--rounds", default=5, show_default=True, help="How often a server's figures are measured.")
def sessions(
    sessions: int, published: int, backlog: int, stored: int, seconds: float, clients: int, rounds: int
) -> list[Section]:
    """Measure live subscriptions and durable sessions, and what a server needs of them."""
    from .sessions import measure_sessions

    progress(f"sessions: {sessions} at a time, {stored:,} stored, {clients:,} served")
    section = measure_sessions(
        sessions=sessions,
        published=published,
        backlog=backlog,
        stored=stored,
        seconds=seconds,
        clients=clients,
        rounds=rounds,
    )
    return [section]


@main.command()
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


@main.command()
@click.option("--messages", default=1_000_000, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="How often each is measured.")
def http(messages: int, rounds: int) -> list[Section]:
    """Measure a replay as Arrow over HTTP against one in process."""
    from .http import measure_http

    return [measure_http(messages, rounds, progress)]


@main.command()
@click.option("--topics", default=100_000, show_default=True, help="Topics of the database.")
@click.option("--sessions", default=10_000, show_default=True, help="Its sessions, of which half are connected.")
@click.option("--rounds", default=5, show_default=True, help="How often stores with and without scrapes are measured.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each of these takes.")
def metrics(topics: int, sessions: int, rounds: int, seconds: float) -> list[Section]:
    """Measure what it costs to be watched: a scrape of `/metrics`, and stores beside it."""
    from .metrics import measure_metrics

    return [measure_metrics(topics, sessions, rounds, seconds, progress)]
