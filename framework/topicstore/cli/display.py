"""How things look: consoles, numbers, tables. Loads rich, so commands import it when they run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

__all__ = ["bar", "cell", "console", "fields", "make_table", "print_json", "readable", "size", "visible"]

_WIDTH_WITHOUT_TERMINAL = 140


class _Console(Console):
    """Lets the program end as it does whatever writes to a reader that has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """Return a console on standard output, wide enough for tables where it is not a terminal."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    return _Console(file=sys.stdout, width=width, highlight=False)


def visible(text: str) -> str:
    """Return text with everything escaped that could act on a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def readable(payload: bytes, most: int = 200) -> str:
    """Return the beginning of a payload as a person would want to see it."""
    try:
        text = visible(payload[: most * 4].decode())
    except UnicodeDecodeError as bad:
        if bad.start < most * 4 - 3:  # else it was cut within a character
            return f"0x{payload[: most // 2].hex()}{'…' if len(payload) > most // 2 else ''}"
        text = visible(payload[: bad.start].decode())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def size(count: float) -> str:
    """Return a number of bytes for people."""
    units = ["TB", "GB", "MB", "kB", "bytes"]
    while count >= 1_000 and len(units) > 1:
        count /= 1_000
        units.pop()
    return f"{count:,.0f} {units[-1]}" if units[-1] == "bytes" or count >= 100 else f"{count:,.1f} {units[-1]}"


def cell(value: Any) -> Text:
    """Return a table cell: numbers grouped, text as it is, never read as markup."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    return Text(f"{value:,}" if isinstance(value, int) else visible(str(value)))


def make_table(*headers: str, title: str | None = None, rows: Iterable[Iterable[Any]] = ()) -> Table:
    """Return a table; a header that ends in ``>`` is of a column of numbers."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for header in headers:
        numbers = header.endswith(">")
        made.add_column(header.rstrip(">"), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(value if isinstance(value, Text) else cell(value) for value in row))
    return made


def fields(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Return names and values, one pair a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value if isinstance(value, Text) else cell(value))
    return grid


def print_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


class _Rate(ProgressColumn):
    """Messages a second."""

    def render(self, task: Task) -> Text:
        started = task.fields.get("messages", 0)
        elapsed = task.elapsed or 0.0
        return Text(f"{started / elapsed:,.0f}/s" if elapsed > 0.2 else "", style="cyan")


class _Bar:
    """A progress bar, or nothing."""

    def __init__(self, progress: Progress | None, what: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(visible(what), total=None)

    def update(self, done: float, total: float | None, messages: int) -> None:
        """Show that ``done`` of ``total`` is done, which was so many messages."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, messages=messages)


@contextlib.contextmanager
def bar(what: str) -> Iterator[_Bar]:
    """Show progress on standard error while the block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield _Bar(None, what)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, what)
