"""What a section gives: figures, with what each should be, and tables of them for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
from rich.markup import escape
from rich.table import Table

__all__ = ["Cell", "Figure", "Section", "Sheet", "shown"]


@attrs.frozen
class Cell:
    """One cell of a table."""

    text: str
    mark: Literal["", "good", "bad", "best"] = ""


@attrs.frozen(kw_only=True)
class Figure:
    """One measured value."""

    data: str
    """What was stored."""
    subject: str
    """Who was measured: a layout, SQLite, the engine."""
    name: str
    value: float
    unit: str = ""
    least: float | None = None
    """What the value should at least be."""
    most: float | None = None
    """What the value should at most be."""

    @property
    def held(self) -> bool | None:
        """Whether the value is as it should be; None if it may be anything."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def cell(self) -> Cell:
        """Return the value, and in brackets what it should be."""
        if self.held is None:
            return Cell(shown(self.value))
        bound = f"≤ {self.most:,.9g}" if self.least is None else f"≥ {self.least:,.9g}"
        return Cell(f"{shown(self.value)} ({bound})", "good" if self.held else "bad")


_STYLES = {"": "default", "good": "green", "bad": "red", "best": "bold"}


@attrs.frozen(kw_only=True)
class Sheet:
    """A table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    """Texts are flush left, cells flush right."""
    note: str

    @classmethod
    def listing(cls, title: str, first: Mapping[str, str], figures: Sequence[Figure], *, note: str) -> Sheet:
        """Return a row a figure: ``first``, headings with the names of what stands under them, then the value."""
        rows = [[*(getattr(figure, name) for name in first.values()), figure.cell()] for figure in figures]
        return cls(title=title, columns=[*first, "is"], rows=rows, note=note)

    def table(self) -> Table:
        """Return it for a terminal: green what is as it should be, red what isn't, bold the best."""
        table = Table(title=self.title, caption=self.note)
        for name, cell in zip(self.columns, self.rows[0], strict=True):
            table.add_column(escape(name), justify="left" if isinstance(cell, str) else "right")
        for row in self.rows:
            table.add_row(*(escape(cell) if isinstance(cell, str) else _styled(cell) for cell in row))
        return table

    def markdown(self) -> str:
        """Return it for a README: bold what isn't as it should be, or what is best."""
        rules = ["---" if isinstance(cell, str) else "---:" for cell in self.rows[0]]
        rows = [
            self.columns,
            rules,
            *([cell if isinstance(cell, str) else _bold(cell) for cell in r] for r in self.rows),
        ]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(row)} |" for row in rows), "", self.note, ""])


@attrs.frozen(kw_only=True)
class Section:
    """What one section gave."""

    name: str
    figures: Sequence[Figure]
    sheets: Sequence[Sheet]


def shown(value: float) -> str:
    """Return a value with about three digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _styled(cell: Cell) -> str:
    return f"[{_STYLES[cell.mark]}]{escape(cell.text)}[/]"


def _bold(cell: Cell) -> str:
    return f"**{cell.text}**" if cell.mark in ("bad", "best") else cell.text
