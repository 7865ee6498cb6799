"""``python -m topicstore_benchmarks``: the ratios to the engine's own rates, as a table."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import click
from rich.console import Console
from rich.table import Table

from .cases import CASES, PAYLOADS
from .opening import measure_opening
from .ratios import Outcome, measure


@click.command()
@click.option("--messages", default=1_000_000, show_default=True, help="Messages a round.")
@click.option("--rounds", default=5, show_default=True, help="Rounds that count, after one that warms up.")
@click.option("--case", "wanted", multiple=True, type=click.Choice([case.name for case in CASES]), help="Only these.")
@click.option("--payload", "payloads", multiple=True, type=click.Choice(list(PAYLOADS)), help="Only these.")
@click.option("--compression", default="lz4", show_default=True, help="Of the block layout.")
@click.option("--opening/--no-opening", default=True, help="Also time the opening of a million messages.")
def main(
    messages: int, rounds: int, wanted: tuple[str, ...], payloads: tuple[str, ...], compression: str, opening: bool
) -> None:
    """Measure store and replay of `block` on RocksDB against the engine's own put and scan."""
    console = Console(width=None if os.isatty(1) else 150)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, the engine's threads included
    console.print(_machine())
    cases = [case for case in CASES if not wanted or case.name in wanted]
    outcomes = []
    with console.status("measuring") as status:
        for case in cases:
            for payload in payloads or PAYLOADS:
                status.update(f"measuring {case.name}, {payload} payloads")
                outcomes.append(measure(case, payload, compression, messages, rounds))
    console.print(_table(outcomes, compression, messages, rounds))
    if opening:
        seconds = measure_opening(1_000_000, rounds)
        console.print(f"opening a database of 1,000,000 messages: {seconds * 1_000:.0f} ms (at most 200)")


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("topicstore", "rocksdict", "msgspec", "pyarrow"))
    return f"Python {platform.python_version()}, {platform.machine()}, one core; {packages}"


def _table(outcomes: list[Outcome], compression: str, messages: int, rounds: int) -> Table:
    table = Table(
        title=f"block ({compression}) on RocksDB, payloads of 128 bytes, {messages:,} messages in batches of 1,000",
        caption=f"medians of {rounds} rounds, both sides in each; a ratio's least value in brackets",
    )
    table.add_column("case")
    for name in ("payload", "streams", "bytes/msg", "put M/s", "store M/s", "store/put"):
        table.add_column(name, justify="right")
    for name in ("scan M/s", "replay M/s", "replay/scan", "arrow/replay"):
        table.add_column(name, justify="right")
    for o in outcomes:
        table.add_row(
            o.case.name,
            o.payload,
            str(o.streams),
            f"{o.bytes_a_message:.0f}",
            *(f"{o.rate(phase) / 1e6:.2f}" for phase in ("put", "store")),
            _ratio(o.store, o.case.store),
            *(f"{o.rate(phase) / 1e6:.2f}" for phase in ("scan", "replay")),
            _ratio(o.replay, o.case.replay),
            _ratio(o.arrow, 1.0),
        )
    return table


def _ratio(value: float, least: float) -> str:
    style = "green" if value >= least else "red"
    return f"[{style}]{value:.2f}[/] ({least:g})"


if __name__ == "__main__":
    main()
