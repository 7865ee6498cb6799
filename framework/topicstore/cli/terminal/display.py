"""Formatting of numbers, texts and tables for people. Rich is imported only when it is used."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import click
import msgspec

from topicstore.contract.times import format_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "bar",
    "cell",
    "console",
    "count_of",
    "fields",
    "lines",
    "make_table",
    "milliseconds",
    "natural",
    "panel",
    "print_json",
    "readable",
    "short_time",
    "single",
    "size",
    "visible",
]

_WIDTH_WITHOUT_TERMINAL = 1_000
"""The width of output for other programs unless COLUMNS is set: each row of a table then stays on one line."""


def console() -> Console:
    """Return a console on standard output, with the terminal's width, that of COLUMNS, or else a very large one."""
    from .consoles import TrimmedConsole

    wide = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return TrimmedConsole(file=sys.stdout, width=None if wide else _WIDTH_WITHOUT_TERMINAL, highlight=False)


def visible(text: str) -> str:
    """Return text with all non-printable characters escaped, so that it can't control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def readable(payload: bytes, most: int = 200) -> str:
    """Return the beginning of a payload as text, at most ``most`` characters; as hexadecimal if it isn't UTF-8."""
    try:
        text = visible(payload[: most * 4].decode())
    except UnicodeDecodeError as bad:
        if bad.start < most * 4 - 3:  # a later error is a character that the slice has cut
            return f"0x{payload[: most // 2].hex()}{'…' if len(payload) > most // 2 else ''}"
        text = visible(payload[: bad.start].decode())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def size(count: float) -> str:
    """Return a number of bytes as text with a decimal unit, such as ``1.5 MB``."""
    units = ["TB", "GB", "MB", "kB", "bytes"]
    while count >= 1_000 and len(units) > 1:
        count /= 1_000
        units.pop()
    return f"{count:,.0f} {units[-1]}" if units[-1] == "bytes" or count >= 100 else f"{count:,.1f} {units[-1]}"


def count_of(count: int, what: str) -> str:
    """Return a number with its noun: ``1 message``, ``2,000 batches``."""
    plural = "es" if what.endswith(("ch", "s")) else "s"
    return f"{count:,} {what}{plural * (count != 1)}"


def milliseconds(seconds: float) -> str:
    """Return a duration as text in milliseconds, with two decimals and without the unit."""
    return f"{seconds * 1e3:,.2f}"


def short_time(timestamp: int) -> str:
    """Return a time to the minute, in ISO 8601, as options of the command line accept it."""
    return f"{format_time(timestamp)[:16]}Z"


def natural(text: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key for natural sorting: ``bus-9`` before ``bus-10``."""
    parts = (part.lstrip("0") if n % 2 else part for n, part in enumerate(re.split(r"([0-9]+)", text)))
    return [(len(part) if n % 2 else 0, part) for n, part in enumerate(parts)], text


def cell(value: Any) -> Text:
    """Return a table cell: integers with thousands separators, text escaped by `visible` and not read as markup."""
    from rich.text import Text

    if value is None:
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    return Text(f"{value:,}" if isinstance(value, int) else visible(str(value)))


def single(*, shards: int, generations: int) -> set[str]:
    """Return the headers of columns to leave out because there is only one shard, or one generation."""
    return {header for header, count in (("shard>", shards), ("generation>", generations)) if count == 1}


def make_table(
    *headers: str, title: str | None = None, rows: Iterable[Iterable[Any]] = (), without: Collection[str] = ()
) -> Table:
    """Return a table.

    headers: a header that ends in ``>`` marks a column of numbers; in ``~``, a column of texts that may be wrapped.
             Other columns are as wide as their content.
    without: the headers of columns to leave out.

    Rich takes about a millisecond per row. So rows that need only one line each are combined into one row of many
    lines, which is several times as fast.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, padding=(0, 1, 0, 0))
    kept = [header not in without for header in headers]
    for header in compress(headers, kept):
        name = header.rstrip(">~")
        made.add_column(
            Text(name),
            justify="right" if header.endswith(">") else "left",
            overflow="fold" if header.endswith("~") else "ellipsis",
            no_wrap=not header.endswith("~"),
            min_width=max(map(len, name.split("\n"))),
        )
    cells = [[one if isinstance(one, Text) else cell(one) for one in compress(row, kept)] for row in rows]
    columns = list(zip(*cells, strict=True))
    for row in [[Text("\n").join(column) for column in columns]] if _fit(made, columns) else cells:
        made.add_row(*row)
    return made


def _fit(table: Table, columns: Sequence[Sequence[Text]]) -> bool:
    """Return whether there are rows, and each fits on one line of the console."""
    if not columns or any("\n" in one.plain for column in columns for one in column):
        return False
    widths = (
        max(column.min_width or 0, *(one.cell_len for one in cells)) + 1
        for column, cells in zip(table.columns, columns, strict=True)
    )
    return sum(widths) <= console().width


def fields(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Return a table of names and values, one pair on each line."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value if isinstance(value, Text) else cell(value))
    return grid


def panel(title: str, pairs: Iterable[tuple[str, Any]]) -> Panel:
    """Return names and values, one pair on each line, in a frame with a title."""
    from rich.panel import Panel
    from rich.text import Text

    return Panel(fields(pairs), title=Text(visible(title)), title_align="left", expand=False, border_style="cyan")


def lines(texts: Iterable[str]) -> Text:
    """Return a table cell with each text on its own line; ``-`` if there are none."""
    from rich.text import Text

    return Text("\n".join(map(visible, texts)) or "-")


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[float, float | None, int], None]]:
    """Show a progress bar on standard error while the block runs, if standard error is a terminal.

    Yields a function to call with the amount done, the total (None if unknown), and the number of messages.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total, _messages: None
        return
    from .consoles import messages_bar

    with messages_bar(visible(what)) as update:
        yield update
