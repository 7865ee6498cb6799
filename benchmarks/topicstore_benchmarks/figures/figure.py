"""The results of a section: figures with their bounds, and tables of them."""

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
    """A description of the stored messages or of the load."""
    subject: str
    """The measured system, such as a layout, SQLite, an engine or a server."""
    name: str
    value: float
    unit: str = ""
    least: float | None = None
    """The lower bound of the value."""
    most: float | None = None
    """The upper bound of the value."""

    @property
    def held(self) -> bool | None:
        """Whether the value is within its bounds; None if it has none."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def cell(self) -> Cell:
        """Return a cell with the value and, in brackets, its bound."""
        if self.held is None:
            return Cell(shown(self.value))
        bound = f"≤ {self.most:,.9g}" if self.least is None else f"≥ {self.least:,.9g}"
        return Cell(f"{shown(self.value)} ({bound})", "good" if self.held else "bad")


_STYLES = {"": "default", "good": "green", "bad": "red", "best": "bold"}


@attrs.frozen(kw_only=True)
class Sheet:
    """A table of results, which can be shown in a terminal or as Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    """The rows. Texts are aligned left, cells right."""
    note: str

    @classmethod
    def listing(cls, title: str, first: Mapping[str, str], figures: Sequence[Figure], *, note: str) -> Sheet:
        """Return a sheet with a row per figure: its attributes in ``first``, by heading, and then its value."""
        rows = [[*(getattr(figure, name) for name in first.values()), figure.cell()] for figure in figures]
        return cls(title=title, columns=[*first, "is"], rows=rows, note=note)

    def table(self) -> Table:
        """Return a table for a terminal: values within bounds are green, others red, and the best bold."""
        table = Table(title=self.title, caption=self.note)
        for name, cell in zip(self.columns, self.rows[0], strict=True):
            table.add_column(escape(name), justify="left" if isinstance(cell, str) else "right")
        for row in self.rows:
            table.add_row(*(escape(cell) if isinstance(cell, str) else _styled(cell) for cell in row))
        return table

    def markdown(self) -> str:
        """Return a table for a README: values out of bounds, or the best ones, are bold."""
        rules = ["---" if isinstance(cell, str) else "---:" for cell in self.rows[0]]
        rows = [
            self.columns,
            rules,
            *([cell if isinstance(cell, str) else _bold(cell) for cell in r] for r in self.rows),
        ]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(row)} |" for row in rows), "", self.note, ""])


@attrs.frozen(kw_only=True)
class Section:
    """The results of one section."""

    name: str
    figures: Sequence[Figure]
    sheets: Sequence[Sheet]


def shown(value: float) -> str:
    """Return a value as text with about three digits."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _styled(cell: Cell) -> str:
    return f"[{_STYLES[cell.mark]}]{escape(cell.text)}[/]"


def _bold(cell: Cell) -> str:
    return f"**{cell.text}**" if cell.mark in ("bad", "best") else cell.text
