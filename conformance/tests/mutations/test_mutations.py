"""Mutation tests of the suites: the named test fails for each mutation, and passes without one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # the modules beside this file belong to no package

for module in ("rocksdict", "duckdb"):
    pytest.importorskip(module, reason='needs rocksdict and duckdb: pip install "topicstore[rocksdb,duckdb]"')

import database
import engine
import layout
import parts
import plugins
from running import M, run
from topicstore_conformance import BackendSuite, DatabasePartsSuite, DatabaseSuite, LayoutSuite, PluginSuite

Results = Callable[[str], list[dict[str, str]]]
"""A function that returns the outcomes of a table's tests, for each row by test; it runs them at the first call."""
TABLES = {
    "engine": (engine.ROWS, BackendSuite),
    "layout": (layout.ROWS, LayoutSuite),
    "database": (database.ROWS, DatabaseSuite),
    "parts": (parts.ROWS, DatabasePartsSuite),
    "plugins": (plugins.ROWS, PluginSuite),
}
ROWS = [(table, number, row) for table, (rows, _) in TABLES.items() for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return functools.cache(lambda table: run(table, tmp_path_factory.mktemp(table)))


def rows(control: bool) -> list[object]:
    """Return the rows that have mutations, or the control rows, which have none."""
    return [
        pytest.param(table, number, row, id=f"{table}: {row.what}, {row.on}")
        for table, number, row in ROWS
        if control is not bool(row.promise)
    ]


@pytest.mark.parametrize(("table", "number", "row"), rows(control=False))
def test_a_broken_promise_is_named(table: str, number: int, row: M, results: Results) -> None:
    """For each mutation, the test that its row names fails with an assertion error."""
    ended = results(table)[number][row.promise]
    if ended == "skipped":
        pytest.skip(f"the test that must fail is skipped here: {row.promise}")
    assert ended == "failed", row.what


@pytest.mark.parametrize(("table", "number", "row"), rows(control=True))
def test_nothing_is_found_where_nothing_is_changed(table: str, number: int, row: M, results: Results) -> None:
    """For the same subject without a mutation, every test that some mutation makes fail passes or is skipped."""
    ended = results(table)[number]
    assert {each.promise for each in TABLES[table][0] if each.on == row.on and each.promise} == set(ended)
    assert {} == {test: how for test, how in ended.items() if how not in ("passed", "skipped")}


@pytest.mark.parametrize("table", TABLES)
def test_each_promise_has_a_row(table: str) -> None:
    """Each test of a suite has a row that makes the test fail, and each subject has a control row."""
    all_rows, suite = TABLES[table]
    assert {name for name in dir(suite) if name.startswith("test_")} == {row.promise for row in all_rows} - {""}
    assert {row.on for row in all_rows} == {row.on for row in all_rows if not row.changes and not row.promise}
