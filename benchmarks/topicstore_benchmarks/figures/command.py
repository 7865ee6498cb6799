"""``python -m topicstore_benchmarks``: all sections, or the one that is named, as tables."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import attrs
import click
import msgspec
from rich.console import Console
from topicstore.plugins import missing_modules, registry
from topicstore_conformance.subjects import datasets

from topicstore_benchmarks.contenders.raw_engine import RAW_ENGINES
from topicstore_benchmarks.timing import machine, one_core

from .cases import CASES, PAYLOADS
from .comparison import Comparison, compare
from .figure import Section
from .growth import Growth, growth_of
from .http import measure_http
from .layouts import compared_layouts, layouts_section
from .limits import Outcome, limits_section, measure
from .message_sets import FLEET_MESSAGES, SETS
from .metrics import measure_metrics
from .mqtt import Sizes, measure_mqtt
from .opening import measure_opening, opening_section
from .sessions import measure_sessions
from .sql import measure_sql, sql_section
from .trie import measure_trie

_STARTED = time.monotonic()


def _tell(text: str) -> None:
    """Report progress on standard error."""
    click.echo(f"{time.monotonic() - _STARTED:6.0f} s  {text}", err=True)


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


@main.command()
@click.option("--messages", default=1_000_000, show_default=True, help="Messages a round.")
@click.option("--rounds", default=3, show_default=True, help="Rounds that count, after one that warms up.")
@click.option("--case", "wanted", multiple=True, type=click.Choice([case.name for case in CASES]), help="Only these.")
@click.option("--payload", "payloads", multiple=True, type=click.Choice(list(PAYLOADS)), help="Only these.")
@click.option("--compression", default="lz4", show_default=True, help="Of the block layout.")
@click.option("--backend", "backends", multiple=True, type=click.Choice(list(RAW_ENGINES)), help="Only these.")
def limits(
    messages: int,
    rounds: int,
    wanted: tuple[str, ...],
    payloads: tuple[str, ...],
    compression: str,
    backends: tuple[str, ...],
) -> list[Section]:
    """Measure `block` against the engine's own put and scan, and `table` against plain inserts."""
    outcomes: list[Outcome] = []
    everything = not (wanted or payloads or backends)
    backends = backends or tuple(name for name in RAW_ENGINES if not missing_modules(registry().backend(name)))
    for case in (case for case in CASES if not wanted or case.name in wanted):
        for payload in payloads or PAYLOADS:
            _tell(f"limits: {case.name}, {payload} payloads")
            outcomes += measure(case, payload, compression, messages, rounds, backends)
    return [limits_section(outcomes, compression), *(_sql(messages, rounds) if everything else [])]


def _sql(messages: int, rounds: int) -> list[Section]:
    """Measure `table`, if its engine and the message set are available."""
    missing = missing_modules(registry().backend("duckdb"))
    if reason := datasets.why_absent("bus.parquet") or ", ".join(missing):
        _tell(f"limits: sql is left out: {reason}")
        return []
    _tell("limits: sql, bus")
    return [sql_section(measure_sql("bus", datasets.load("bus").slice(0, messages), rounds))]


@main.command()
@click.option("--messages", default=1_000_000, show_default=True, help="Messages in the database.")
@click.option("--rounds", default=5, show_default=True, help="How often it is opened.")
def opening(messages: int, rounds: int) -> list[Section]:
    """Measure the time of opening a database of `block`."""
    _tell(f"opening: {messages:,} messages")
    return [opening_section(messages, measure_opening(messages, rounds))]


@main.command()
@click.option(
    "--messages",
    default=FLEET_MESSAGES,
    show_default=True,
    type=click.IntRange(min=1_000),
    help="Most messages of a set.",
)
@click.option("--rounds", default=3, show_default=True, help="Rounds that count, after a small one that warms up.")
@click.option("--data", multiple=True, type=click.Choice(list(SETS)), help="Only this set.")
def layouts(messages: int, rounds: int, data: tuple[str, ...]) -> list[Section]:
    """Measure every layout against SQLite and the engine, with real and generated messages."""
    comparisons: list[Comparison] = []
    growth: dict[str, Growth] = {}
    for name in data or SETS:
        if name == "bus" and (reason := datasets.why_absent("bus.parquet")):
            _tell(f"layouts: {name} is left out: {reason}")
            continue
        comparisons.append(compare(name, messages, compared_layouts(name), rounds, _tell))
        if name == "fleet":
            growth = _growth(messages)
    return [layouts_section(comparisons, growth)]


def _growth(messages: int) -> dict[str, Growth]:
    found = {}
    for layout in compared_layouts("fleet"):
        _tell(f"fleet: memory of {layout}, in a process of its own")
        grown = growth_of(layout, messages)
        if grown is not None:
            found[layout] = grown
    return found


@main.command()
@click.option("--topics", default=1_000_000, show_default=True, help="Topics of each set.")
@click.option("--rounds", default=3, show_default=True, help="Rounds that count, after one that warms up.")
def trie(topics: int, rounds: int) -> list[Section]:
    """Measure the learned topic structure by itself."""
    _tell(f"trie: {topics:,} topics")
    return [measure_trie(topics, rounds)]


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
    _tell(f"sessions: {sessions} at a time, {stored:,} stored, {clients:,} served")
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
    if missing := missing_modules(registry().backend("rocksdb")):
        _tell(f"mqtt is left out: {', '.join(missing)}")
        return []
    full = Sizes()
    counts = {
        name: type(value)(max(20 * (name != "seconds"), value * share)) for name, value in attrs.asdict(full).items()
    }
    return [measure_mqtt(Sizes(**counts), rounds, _tell)]


@main.command()
@click.option("--messages", default=1_000_000, show_default=True, type=click.IntRange(min=1))
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="How often each is measured.")
def http(messages: int, rounds: int) -> list[Section]:
    """Measure a replay as Arrow over HTTP against one in process."""
    if missing := missing_modules(registry().backend("rocksdb")):
        _tell(f"http is left out: {', '.join(missing)}")
        return []
    return [measure_http(messages, rounds, _tell)]


@main.command()
@click.option("--topics", default=100_000, show_default=True, help="Topics of the database.")
@click.option("--sessions", default=10_000, show_default=True, help="Its sessions, of which half are connected.")
@click.option("--rounds", default=5, show_default=True, help="How often stores with and without scrapes are measured.")
@click.option("--seconds", default=5.0, show_default=True, help="How long each of these takes.")
def metrics(topics: int, sessions: int, rounds: int, seconds: float) -> list[Section]:
    """Measure what it costs to be watched: a scrape of `/metrics`, and stores beside it."""
    return [measure_metrics(topics, sessions, rounds, seconds, _tell)]
