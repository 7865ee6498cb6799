"""``topicstore sql``."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import topicstore as ts
from click.testing import CliRunner, Result
from topicstore import Message
from topicstore.cli import cli

pytest.importorskip("duckdb", reason='needs duckdb: pip install "topicstore[duckdb]"')

COUNTS = "SELECT topic, count(*) AS n FROM messages GROUP BY 1 ORDER BY 1"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["sql", *arguments])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with ts.open(tmp_path / "db", backend="duckdb", layout="table", shards=3) as db:
        db.store([Message(f"t/{n % 2}", b"\xff" if n else "é,\n".encode(), f"c{n}") for n in range(10)])
    return tmp_path / "db"


def test_rows_of_all_shards_as_a_table(path: Path) -> None:
    """With the number of rows below."""
    done = run(COUNTS, str(path))
    lines = [line.split() for line in done.stdout.splitlines()]
    assert 0 == done.exit_code, done.output
    assert ["topic", "n"] in lines
    assert ["t/0", "5"] in lines
    assert ["2", "rows"] == lines[-1]


def test_json_and_csv(path: Path) -> None:
    """For programs: bytes that are not text in hexadecimal, sums as numbers, values within values as JSON."""
    query = "SELECT payload, sum(qos), [count(*)] AS counts, NULL AS nothing FROM messages GROUP BY 1 ORDER BY 3 DESC"
    expected = [["0xff", 0, [9], None], ["é,\n", 0, [1], None]]
    document = json.loads(run(query, str(path), "--json").stdout)
    assert {"columns": ["payload", "sum(qos)", "counts", "nothing"], "rows": expected} == document
    rows = list(csv.reader(io.StringIO(run(query, str(path), "--csv").stdout)))
    assert [["payload", "sum(qos)", "counts", "nothing"], ["0xff", "0", "[9]", ""], ["é,\n", "0", "[1]", ""]] == rows


@pytest.mark.parametrize(
    "statement", ["DELETE FROM messages", "SELECT", "SELECT x FROM messages", "SELECT 1; SELECT 2"]
)
def test_what_is_not_a_read_is_refused(path: Path, statement: str) -> None:
    """In one line, as bad usage; nothing has changed."""
    done = run(statement, str(path))
    assert 2 == done.exit_code
    assert done.stderr.startswith("error: ")
    assert 1 == len(done.stderr.splitlines())
    assert [10] == ts_sql(path, "SELECT count(*) FROM messages")


def ts_sql(path: Path, statement: str) -> list[object]:
    with ts.open(path) as db:
        found: list[object] = db.sql(statement).column(0).to_pylist()
        return found


def test_other_layouts_have_no_rows(path: Path, tmp_path: Path) -> None:
    """A database without rows refuses; one with some tells what is left out."""
    with ts.open(tmp_path / "block", backend="duckdb", layout="block") as db, pytest.raises(ts.UnsupportedError):
        db.sql("SELECT 1")
    with ts.open(tmp_path / "memory", backend="memory") as db, pytest.raises(ts.UnsupportedError, match="memory"):
        db.sql("SELECT 1")
    with ts.open(path) as db:
        db.add_generation("block")
        with pytest.warns(UserWarning, match=r"2 \(block\)"):
            assert [10] == db.sql("SELECT count(*) FROM messages").column(0).to_pylist()
        db.add_generation("table")
        db.drop_generation(1)
        db.drop_generation(2)
        assert [0] == db.sql("SELECT count(*) FROM messages WHERE topic = ?", ["t/0"]).column(0).to_pylist()
