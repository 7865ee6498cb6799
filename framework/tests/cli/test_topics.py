"""``topicstore topics`` and ``topicstore clients``: counts by topic and client id."""

from __future__ import annotations

from pathlib import Path

import pytest
import topicstore as ts
from topicstore.cli.terminal import display

from .conftest import document


@pytest.mark.parametrize("command", ["topics", "clients"])
@pytest.mark.parametrize("sort", ["messages", "bytes", "last"])
def test_they_are_sorted(path: Path, command: str, sort: str) -> None:
    """Rows are sorted in descending order of messages, bytes or last time, and then by name."""
    with ts.open(path) as opened:
        opened.store([ts.Message("b", b"1", "b")] * 3)
        opened.store([ts.Message("a", b"1" * 100, "a")])
        opened.store([ts.Message("c", b"", "c")])
    expected = {"messages": "bac", "bytes": "abc", "last": "cab"}[sort]
    name = {"topics": "topic", "clients": "client_id"}[command]
    assert list(expected) == [one[name] for one in document(command, path, "--sort", sort)[command]]
    assert list("abc") == [one[name] for one in document(command, path)[command]]


@pytest.mark.parametrize("width", ["40", "20"])
def test_a_table_of_many_rows_is_printed_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: str
) -> None:
    """A table in which every row fits into one line is passed to rich as a single row, for speed.

    The output is the same as if each row was passed.
    """
    monkeypatch.setenv("COLUMNS", width)
    rows = [(f"plant/{n}", n * 1_000, None) for n in range(50)]
    table = display.make_table("topic~", "messages>", "more", rows=rows)
    assert (1 if width == "40" else 50) == table.row_count
    one_by_one = display.make_table("topic~", "messages>", "more")
    for row in rows:
        one_by_one.add_row(*map(display.cell, row))
    display.console().print(one_by_one)
    expected = capsys.readouterr().out
    assert "plant" in expected
    display.console().print(table)
    assert expected == capsys.readouterr().out
